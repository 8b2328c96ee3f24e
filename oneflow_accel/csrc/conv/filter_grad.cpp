// conv_filter_grad: the gradient of a convolution with respect to its weights, float32.
#include "common/arguments.h"
#include "common/threads.h"
#include "conv/convolution.h"
#include "conv/grouped.h"
#include "conv/pixel_products.h"
#include "conv/relayout.h"
#include "conv/run.h"
#include "conv/select.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

dnnl::convolution_backward_weights::primitive_desc filter_grad_desc(const ConvGeometry& geometry,
                                                                   bool has_bias) {
  const ActivationLayout layout = filter_grad_layout(geometry);
  const auto in = in_desc(geometry, layout);
  const auto out = out_desc(geometry, layout);
  const auto weights = any_weights(geometry);
  const dnnl::convolution_forward::primitive_desc hint(
      cpu_engine(), dnnl::prop_kind::forward_training, dnnl::algorithm::convolution_direct, in,
      weights, out, geometry.strides, geometry.dilation, geometry.padding, geometry.padding);
  return dnnl::convolution_backward_weights::primitive_desc(
      cpu_engine(), dnnl::algorithm::convolution_direct, in, weights,
      has_bias ? geometry.bias_desc() : dnnl::memory::desc(), out, geometry.strides,
      geometry.dilation, geometry.padding, geometry.padding, hint, user_scratchpad_attr());
}

struct FilterGrad {
  dnnl::convolution_backward_weights primitive;
  InputLayout in;
  InputLayout out_grad;
  OutputLayout weights_grad;
  dnnl::memory::desc bias_grad;
  dnnl::memory::desc scratchpad;

  FilterGrad(const ConvGeometry& geometry,
             const dnnl::convolution_backward_weights::primitive_desc& desc)
      : primitive(desc),
        in(geometry.in_desc(), desc.src_desc(), ScratchSlot::kSource),
        out_grad(geometry.out_desc(), desc.diff_dst_desc(), ScratchSlot::kDestination),
        weights_grad(geometry.weights_desc(), desc.diff_weights_desc(), ScratchSlot::kWeights),
        bias_grad(geometry.bias_desc()),
        scratchpad(desc.scratchpad_desc()) {}
};

void run_filter_grad(const ConvGeometry& geometry, const float* in, const float* out_grad,
                     float* weights_grad, float* bias_grad) {
  const bool has_bias = bias_grad != nullptr;
  const FilterGrad& grad = PrimitiveCache<FilterGrad>::get_or_create(
      geometry.key("convolution_filter_grad").add(has_bias ? 1 : 0).str(),
      [&] { return FilterGrad(geometry, filter_grad_desc(geometry, has_bias)); });
  const auto in_memory = grad.in.load(in);
  const auto out_memory = grad.out_grad.load(out_grad);
  auto weights_memory = grad.weights_grad.target(weights_grad);
  std::unordered_map<int, dnnl::memory> arguments{
      {DNNL_ARG_SRC, in_memory},
      {DNNL_ARG_DIFF_DST, out_memory},
      {DNNL_ARG_DIFF_WEIGHTS, weights_memory},
      {DNNL_ARG_SCRATCHPAD, scratchpad_memory(grad.scratchpad)}};
  if (has_bias) { arguments.emplace(DNNL_ARG_DIFF_BIAS, wrap(grad.bias_grad, bias_grad)); }
  grad.primitive.execute(cpu_stream(), arguments);
  grad.weights_grad.store(weights_memory, weights_grad);
}

class ConvFilterGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* x = ctx->Tensor4ArgNameAndIndex("x", 0);
    const auto* dy = ctx->Tensor4ArgNameAndIndex("dy", 0);
    const ThreadScope threads;
    const ConvGeometry geometry(*ctx, x->shape_view(), dy->shape_view());
    run_or_zero(ctx, geometry, "filter gradient of the convolution", [&] {
      convolution_filter_grad(geometry, x->dptr<float>(), dy->dptr<float>(),
                              output(ctx, "filter_diff"), nullptr);
    });
  }
};

REGISTER_KERNEL("conv_filter_grad", make<ConvFilterGradKernel>, is_float32_on_cpu("dy"));

}  // namespace

void convolution_filter_grad(const ConvGeometry& geometry, const float* in, const float* out_grad,
                             float* weights_grad, float* bias_grad) {
  if (const auto shape = grouped_shape(geometry)) {
    return grouped_convolution_filter_grad(*shape, in, out_grad, weights_grad, bias_grad);
  }
  if (has_pixel_products(geometry)) {
    return pixel_products_filter_grad(geometry, in, out_grad, weights_grad, bias_grad);
  }
  run_filter_grad(geometry, in, out_grad, weights_grad, bias_grad);
}

}  // namespace oneflow_accel
