// The kernel of oneflow_accel_conv2d: a convolution with bias, summand and activation in one pass,
// float32 and bfloat16. oneDNN computes what follows where it can; grouped convolutions of a few
// channels are ours (grouped.h).
#include <algorithm>

#include "common/arguments.h"
#include "common/bfloat16.h"
#include "common/guard.h"
#include "common/simd.h"
#include "common/threads.h"
#include "conv/activation.h"
#include "conv/grouped.h"
#include "conv/kept_weights.h"
#include "conv/select.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// What follows the convolution.
struct Tail {
  bool bias;
  bool summand;
  Activation activation;
};

// Channels first, the output is mostly written in a blocked layout and copied: the summand is added
// to the copy then.
bool primitive_adds_summand(const ConvGeometry& geometry) { return geometry.channels_last; }

dnnl::primitive_attr attributes(const ConvGeometry& geometry, const Tail& tail) {
  dnnl::primitive_attr attr = user_scratchpad_attr();
  dnnl::post_ops ops;
  if (tail.summand) {
    if (!primitive_adds_summand(geometry)) { return attr; }
    ops.append_binary(dnnl::algorithm::binary_add, geometry.out_desc());
  }
  if (tail.activation == Activation::kRelu) {
    ops.append_eltwise(dnnl::algorithm::eltwise_relu, 0.0F, 0.0F);
  } else if (tail.activation == Activation::kSilu) {
    // x sigmoid(alpha x)
    ops.append_eltwise(dnnl::algorithm::eltwise_swish, 1.0F, 0.0F);
  }
  attr.set_post_ops(ops);
  return attr;
}

dnnl::convolution_forward::primitive_desc fused_desc(const ConvGeometry& geometry,
                                                     const Tail& tail) {
  const ActivationLayout layout = forward_layout(geometry);
  return dnnl::convolution_forward::primitive_desc(
      cpu_engine(), dnnl::prop_kind::forward_inference, dnnl::algorithm::convolution_direct,
      in_desc(geometry, layout), any_weights(geometry),
      tail.bias ? geometry.bias_desc() : dnnl::memory::desc(), out_desc(geometry, layout),
      geometry.strides, geometry.dilation, geometry.padding, geometry.padding,
      attributes(geometry, tail));
}

struct Fused {
  dnnl::convolution_forward primitive;
  InputLayout in;
  InputLayout weights;
  OutputLayout out;
  dnnl::memory::desc bias;
  dnnl::memory::desc summand;
  dnnl::memory::desc scratchpad;

  Fused(const ConvGeometry& geometry, const dnnl::convolution_forward::primitive_desc& desc)
      : primitive(desc),
        in(geometry.in_desc(), desc.src_desc(), ScratchSlot::kSource),
        weights(geometry.weights_desc(), desc.weights_desc(), ScratchSlot::kWeights),
        out(geometry.out_desc(), desc.dst_desc(), ScratchSlot::kDestination),
        bias(geometry.bias_desc()),
        summand(geometry.out_desc()),
        scratchpad(desc.scratchpad_desc()) {}
};

template <typename T>
ONEFLOW_ACCEL_INLINE void add_to_float(const T* a, const T* b, int64_t n, float* sum) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { sum[i] = to_float(a[i]) + to_float(b[i]); }
}

ONEFLOW_ACCEL_SIMD
void sums(const float* a, const float* b, int64_t n, float* sum) { add_to_float(a, b, n, sum); }

ONEFLOW_ACCEL_SIMD
void sums(const Bfloat16* a, const Bfloat16* b, int64_t n, float* sum) {
  add_to_float(a, b, n, sum);
}

ONEFLOW_ACCEL_SIMD
void rounded(const float* x, int64_t n, float* y) { std::copy_n(x, n, y); }

ONEFLOW_ACCEL_SIMD
void rounded(const float* x, int64_t n, Bfloat16* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<Bfloat16>(x[i]); }
}

// out = activation(out + summand)
template <typename T>
void add_summand(const T* summand, Activation activation, int64_t n, T* out) {
  parallel_for(n, kGrainSize, [=](int64_t begin, int64_t end) {
    constexpr int64_t kBlock = 1024;
    float block[kBlock];
    for (int64_t i = begin; i < end; i += kBlock) {
      const int64_t count = std::min(kBlock, end - i);
      sums(out + i, summand + i, count, block);
      if (activation != Activation::kNone) { activate(activation, 0.0F, count, block); }
      rounded(block, count, out + i);
    }
  });
}

// The weights in float32: converted ones are in the calling thread's scratch memory.
const float* float_weights(const ConvGeometry&, const float* weights) { return weights; }
const float* float_weights(const ConvGeometry& geometry, const Bfloat16* weights) {
  int64_t count = 1;
  for (const int64_t size : geometry.weights) { count *= size; }
  auto* converted = static_cast<float*>(scratch(ScratchSlot::kWeights, count * sizeof(float)));
  for (int64_t i = 0; i < count; ++i) { converted[i] = to_float(weights[i]); }
  return converted;
}

template <typename T>
class FusedConv2dKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const user_op::Tensor* in = ctx->Tensor4ArgNameAndIndex("in", 0);
    user_op::Tensor* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    const ThreadScope threads;
    ConvGeometry geometry(*ctx, in->shape_view(), out->shape_view());
    geometry.data_type = sizeof(T) == sizeof(float) ? dnnl::memory::data_type::f32
                                                    : dnnl::memory::data_type::bf16;
    if (geometry.is_empty()) { return; }
    const Tail tail{ctx->has_input("bias", 0), ctx->has_input("summand", 0),
                    activation_of(ctx->Attr<std::string>("activation"))};
    const auto shape = grouped_shape(geometry);
    run_or_abort([&] { return geometry.describe("oneflow_accel_conv2d"); }, [&] {
      if (shape) {
        const float* bias = input_or_null(ctx, "bias");
        const float* weights = float_weights(geometry, input<T>(ctx, "weight"));
        // Not before a summand is added.
        const Activation activation = tail.summand ? Activation::kNone : tail.activation;
        grouped_convolution(*shape, input<T>(ctx, "in"), weights, bias, activation,
                            output<T>(ctx, "out"));
      } else {
        convolve(ctx, geometry, tail, in->raw_dptr(), out->mut_raw_dptr());
      }
    });
    if (tail.summand && (shape || !primitive_adds_summand(geometry))) {
      add_summand(input<T>(ctx, "summand"), tail.activation, out->shape_view().elem_cnt(),
                  output<T>(ctx, "out"));
    }
  }

  static void convolve(user_op::KernelComputeContext* ctx, const ConvGeometry& geometry,
                       const Tail& tail, const void* in, void* out) {
    const KeyBuilder key = geometry.key("fused_convolution")
                               .add(tail.bias ? 1 : 0)
                               .add(tail.summand ? 1 : 0)
                               .add(static_cast<int64_t>(tail.activation));
    const Fused& fused = PrimitiveCache<Fused>::get_or_create(
        key.str(), [&] { return Fused(geometry, fused_desc(geometry, tail)); });
    const void* weights = ctx->Tensor4ArgNameAndIndex("weight", 0)->raw_dptr();
    const int64_t owner = ctx->Attr<int64_t>("owner");
    const bool keep = owner != 0 && !fused.weights.is_plain();
    const std::shared_ptr<void> kept = keep ? kept_weights(owner, weights, fused.weights) : nullptr;
    auto out_memory = fused.out.target(out);
    std::unordered_map<int, dnnl::memory> arguments{
        {DNNL_ARG_SRC, fused.in.load(in)},
        {DNNL_ARG_WEIGHTS,
         keep ? wrap(fused.weights.inner(), kept.get()) : fused.weights.load(weights)},
        {DNNL_ARG_DST, out_memory},
        {DNNL_ARG_SCRATCHPAD, scratchpad_memory(fused.scratchpad)}};
    if (tail.bias) {
      const auto* bias = ctx->Tensor4ArgNameAndIndex("bias", 0);
      arguments.emplace(DNNL_ARG_BIAS, wrap(fused.bias, bias->raw_dptr()));
    }
    if (tail.summand && primitive_adds_summand(geometry)) {
      const auto* summand = ctx->Tensor4ArgNameAndIndex("summand", 0);
      arguments.emplace(DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1,
                        wrap(fused.summand, summand->raw_dptr()));
    }
    fused.primitive.execute(cpu_stream(), arguments);
    fused.out.store(out_memory, out);
  }
};

REGISTER_USER_KERNEL(listed("oneflow_accel_conv2d"))
    .SetCreateFn<FusedConv2dKernel<float>>()
    .SetIsMatchedHob(is_float32_on_cpu("in"))
    .SetPriority(kKernelPriority);
REGISTER_USER_KERNEL(listed("oneflow_accel_conv2d"))
    .SetCreateFn<FusedConv2dKernel<Bfloat16>>()
    .SetIsMatchedHob(is_bfloat16_on_cpu("in"))
    .SetPriority(kKernelPriority);

}  // namespace

}  // namespace oneflow_accel
