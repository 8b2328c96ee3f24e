// conv_filter_grad: the gradient of a convolution with respect to its weights, float32 and
// bfloat16.
#include "common/arguments.h"
#include "common/threads.h"
#include "conv/convolution.h"
#include "conv/grouped.h"
#include "conv/pixel_products.h"
#include "conv/relayout.h"
#include "conv/run.h"
#include "conv/select.h"
#include "conv/widen.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

dnnl::memory::desc bias_grad_desc(const ConvGeometry& geometry) {
  return {{geometry.out[1]}, geometry.data_type, dnnl::memory::format_tag::a};
}

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
      has_bias ? bias_grad_desc(geometry) : dnnl::memory::desc(), out, geometry.strides,
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
        bias_grad(bias_grad_desc(geometry)),
        scratchpad(desc.scratchpad_desc()) {}
};

void run_filter_grad(const ConvGeometry& geometry, const void* in, const void* out_grad,
                     void* weights_grad, void* bias_grad) {
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

template <typename T>
class ConvFilterGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const ThreadScope threads;
    ConvGeometry geometry(*ctx, ctx->Tensor4ArgNameAndIndex("x", 0)->shape_view(),
                          ctx->Tensor4ArgNameAndIndex("dy", 0)->shape_view());
    geometry.data_type = kConvType<T>;
    run_or_zero<T>(ctx, geometry, "filter gradient of the convolution", [&] {
      convolution_filter_grad<T>(geometry, input<T>(ctx, "x"), input<T>(ctx, "dy"),
                                 output<T>(ctx, "filter_diff"), nullptr);
    });
  }
};

REGISTER_KERNEL("conv_filter_grad", make<ConvFilterGradKernel<float>>, is_float32_on_cpu("dy"));
REGISTER_KERNEL("conv_filter_grad", make<ConvFilterGradKernel<Bfloat16>>,
                is_bfloat16_on_cpu("dy"));

}  // namespace

template <typename T>
void convolution_filter_grad(const ConvGeometry& geometry, const T* in, const T* out_grad,
                             T* weights_grad, T* bias_grad) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    if (is_convolved_in_float32(geometry)) {
      const FloatCopy weight_sums(geometry.weight_count());
      const FloatCopy bias_sums(bias_grad == nullptr ? 0 : geometry.out[1]);
      convolution_filter_grad<float>(
          float32_geometry(geometry), FloatCopy(in, geometry.in[0] * geometry.in_image()).data(),
          FloatCopy(out_grad, geometry.in[0] * geometry.out_image()).data(), weight_sums.data(),
          bias_grad == nullptr ? nullptr : bias_sums.data());
      weight_sums.round_to(weights_grad);
      return bias_sums.round_to(bias_grad);
    }
  } else if (const auto shape = grouped_shape(geometry)) {
    return grouped_convolution_filter_grad(*shape, in, out_grad, weights_grad, bias_grad);
  } else if (has_pixel_products(geometry)) {
    return pixel_products_filter_grad(geometry, in, out_grad, weights_grad, bias_grad);
  }
  run_filter_grad(geometry, in, out_grad, weights_grad, bias_grad);
}

template void convolution_filter_grad(const ConvGeometry&, const float*, const float*, float*,
                                      float*);
template void convolution_filter_grad(const ConvGeometry&, const Bfloat16*, const Bfloat16*,
                                      Bfloat16*, Bfloat16*);

}  // namespace oneflow_accel
