// conv1d, conv2d and conv3d, float32 and bfloat16, both data formats, any number of groups.
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

dnnl::convolution_forward::primitive_desc forward_desc(const ConvGeometry& geometry,
                                                       bool has_bias) {
  const ActivationLayout layout = forward_layout(geometry);
  return dnnl::convolution_forward::primitive_desc(
      cpu_engine(), dnnl::prop_kind::forward_training, dnnl::algorithm::convolution_direct,
      in_desc(geometry, layout), any_weights(geometry),
      has_bias ? geometry.bias_desc() : dnnl::memory::desc(), out_desc(geometry, layout),
      geometry.strides, geometry.dilation, geometry.padding, geometry.padding,
      user_scratchpad_attr());
}

struct Forward {
  dnnl::convolution_forward primitive;
  InputLayout in;
  InputLayout weights;
  OutputLayout out;
  dnnl::memory::desc bias;
  dnnl::memory::desc scratchpad;

  Forward(const ConvGeometry& geometry, const dnnl::convolution_forward::primitive_desc& desc)
      : primitive(desc),
        in(geometry.in_desc(), desc.src_desc(), ScratchSlot::kSource),
        weights(geometry.weights_desc(), desc.weights_desc(), ScratchSlot::kWeights),
        out(geometry.out_desc(), desc.dst_desc(), ScratchSlot::kDestination),
        bias(geometry.bias_desc()),
        scratchpad(desc.scratchpad_desc()) {}
};

void convolve(const ConvGeometry& geometry, const void* in, const void* weights,
              const float* bias, void* out) {
  const bool has_bias = bias != nullptr;
  const KeyBuilder key = geometry.key("convolution").add(has_bias ? 1 : 0);
  const Forward& forward = PrimitiveCache<Forward>::get_or_create(
      key.str(), [&] { return Forward(geometry, forward_desc(geometry, has_bias)); });
  const auto in_memory = forward.in.load(in);
  const auto weights_memory = forward.weights.load(weights);
  auto out_memory = forward.out.target(out);
  std::unordered_map<int, dnnl::memory> arguments{
      {DNNL_ARG_SRC, in_memory},
      {DNNL_ARG_WEIGHTS, weights_memory},
      {DNNL_ARG_DST, out_memory},
      {DNNL_ARG_SCRATCHPAD, scratchpad_memory(forward.scratchpad)}};
  if (has_bias) { arguments.emplace(DNNL_ARG_BIAS, wrap(forward.bias, bias)); }
  forward.primitive.execute(cpu_stream(), arguments);
  forward.out.store(out_memory, out);
}

template <typename T>
class ConvKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* in = ctx->Tensor4ArgNameAndIndex("in", 0);
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    const ThreadScope threads;
    ConvGeometry geometry(*ctx, in->shape_view(), out->shape_view());
    geometry.data_type = kConvType<T>;
    run_or_zero<T>(ctx, geometry, "convolution", [&] {
      convolution(geometry, input<T>(ctx, "in"), input<T>(ctx, "weight"),
                  FloatBias<T>(ctx, geometry).data(), output<T>(ctx, "out"));
    });
    add_to_output<T>(ctx, "out");
  }
};

REGISTER_KERNEL("conv1d", make<ConvKernel<float>>, is_float32_on_cpu("in"));
REGISTER_KERNEL("conv2d", make<ConvKernel<float>>, is_float32_on_cpu("in"));
REGISTER_KERNEL("conv3d", make<ConvKernel<float>>, is_float32_on_cpu("in"));
REGISTER_KERNEL("conv1d", make<ConvKernel<Bfloat16>>, is_bfloat16_on_cpu("in"));
REGISTER_KERNEL("conv2d", make<ConvKernel<Bfloat16>>, is_bfloat16_on_cpu("in"));
REGISTER_KERNEL("conv3d", make<ConvKernel<Bfloat16>>, is_bfloat16_on_cpu("in"));

}  // namespace

template <typename T>
void convolution(const ConvGeometry& geometry, const T* in, const T* weights, const float* bias,
                 T* out) {
  const int64_t in_image = geometry.in_image();
  const int64_t out_image = geometry.out_image();
  if constexpr (std::is_same_v<T, Bfloat16>) {
    if (is_convolved_in_float32(geometry)) {
      const FloatCopy sums(geometry.in[0] * out_image);
      convolution<float>(float32_geometry(geometry),
                         FloatCopy(in, geometry.in[0] * in_image).data(),
                         FloatCopy(weights, geometry.weight_count()).data(), bias, sums.data());
      return sums.round_to(out);
    }
  } else if (const auto shape = grouped_shape(geometry)) {
    return grouped_convolution(*shape, in, weights, bias, Activation::kNone, out);
  }
  for_parts(geometry, forward_layout(geometry), [&](const ConvGeometry& part, int64_t first) {
    convolve(part, in + first * in_image, weights, bias, out + first * out_image);
  });
}

template void convolution(const ConvGeometry&, const float*, const float*, const float*, float*);
template void convolution(const ConvGeometry&, const Bfloat16*, const Bfloat16*, const float*,
                          Bfloat16*);

}  // namespace oneflow_accel
