// conv_data_grad: the gradient of a convolution with respect to its input, float32 and
// bfloat16.
#include "common/arguments.h"
#include "common/threads.h"
#include "conv/add.h"
#include "conv/convolution.h"
#include "conv/grouped.h"
#include "conv/parts.h"
#include "conv/relayout.h"
#include "conv/run.h"
#include "conv/select.h"
#include "conv/widen.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

dnnl::convolution_backward_data::primitive_desc data_grad_desc(const ConvGeometry& geometry) {
  const ActivationLayout layout = data_grad_layout(geometry);
  const auto in = in_desc(geometry, layout);
  const auto out = out_desc(geometry, layout);
  const auto weights = any_weights(geometry);
  const dnnl::convolution_forward::primitive_desc hint(
      cpu_engine(), dnnl::prop_kind::forward_training, dnnl::algorithm::convolution_direct, in,
      weights, out, geometry.strides, geometry.dilation, geometry.padding, geometry.padding);
  return dnnl::convolution_backward_data::primitive_desc(
      cpu_engine(), dnnl::algorithm::convolution_direct, in, weights, out, geometry.strides,
      geometry.dilation, geometry.padding, geometry.padding, hint, user_scratchpad_attr());
}

struct DataGrad {
  dnnl::convolution_backward_data primitive;
  InputLayout out_grad;
  InputLayout weights;
  OutputLayout in_grad;
  dnnl::memory::desc scratchpad;

  DataGrad(const ConvGeometry& geometry,
           const dnnl::convolution_backward_data::primitive_desc& desc)
      : primitive(desc),
        out_grad(geometry.out_desc(), desc.diff_dst_desc(), ScratchSlot::kSource),
        weights(geometry.weights_desc(), desc.weights_desc(), ScratchSlot::kWeights),
        in_grad(geometry.in_desc(), desc.diff_src_desc(), ScratchSlot::kDestination),
        scratchpad(desc.scratchpad_desc()) {}
};

void run_data_grad(const ConvGeometry& geometry, const void* out_grad, const void* weights,
                   void* in_grad) {
  const DataGrad& grad = PrimitiveCache<DataGrad>::get_or_create(
      geometry.key("convolution_data_grad").str(),
      [&] { return DataGrad(geometry, data_grad_desc(geometry)); });
  const auto out_memory = grad.out_grad.load(out_grad);
  const auto weights_memory = grad.weights.load(weights);
  auto in_memory = grad.in_grad.target(in_grad);
  grad.primitive.execute(cpu_stream(),
                         {{DNNL_ARG_DIFF_DST, out_memory},
                          {DNNL_ARG_WEIGHTS, weights_memory},
                          {DNNL_ARG_DIFF_SRC, in_memory},
                          {DNNL_ARG_SCRATCHPAD, scratchpad_memory(grad.scratchpad)}});
  grad.in_grad.store(in_memory, in_grad);
}

template <typename T>
class ConvDataGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const ThreadScope threads;
    ConvGeometry geometry(*ctx, ctx->Tensor4ArgNameAndIndex("dx", 0)->shape_view(),
                          ctx->Tensor4ArgNameAndIndex("dy", 0)->shape_view());
    geometry.data_type = kConvType<T>;
    run_or_zero<T>(ctx, geometry, "data gradient of the convolution", [&] {
      convolution_data_grad(geometry, input<T>(ctx, "dy"), input<T>(ctx, "filter"),
                            output<T>(ctx, "dx"));
    });
    add_to_output<T>(ctx, "dx");
  }
};

REGISTER_KERNEL("conv_data_grad", make<ConvDataGradKernel<float>>, is_float32_on_cpu("dy"));
REGISTER_KERNEL("conv_data_grad", make<ConvDataGradKernel<Bfloat16>>, is_bfloat16_on_cpu("dy"));

}  // namespace

template <typename T>
void convolution_data_grad(const ConvGeometry& geometry, const T* out_grad, const T* weights,
                           T* in_grad) {
  const int64_t in_image = geometry.in_image();
  const int64_t out_image = geometry.out_image();
  if constexpr (std::is_same_v<T, Bfloat16>) {
    if (is_convolved_in_float32(geometry)) {
      const FloatCopy sums(geometry.in[0] * in_image);
      convolution_data_grad<float>(float32_geometry(geometry),
                                   FloatCopy(out_grad, geometry.in[0] * out_image).data(),
                                   FloatCopy(weights, geometry.weight_count()).data(),
                                   sums.data());
      return sums.round_to(in_grad);
    }
  } else if (const auto shape = grouped_shape(geometry)) {
    return grouped_convolution_data_grad(*shape, out_grad, weights, in_grad);
  }
  for_parts(geometry, data_grad_layout(geometry), [&](const ConvGeometry& part, int64_t first) {
    run_data_grad(part, out_grad + first * out_image, weights, in_grad + first * in_image);
  });
}

template void convolution_data_grad(const ConvGeometry&, const float*, const float*, float*);
template void convolution_data_grad(const ConvGeometry&, const Bfloat16*, const Bfloat16*,
                                    Bfloat16*);

}  // namespace oneflow_accel
