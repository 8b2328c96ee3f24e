// The kernel of oneflow_accel_conv2d: a convolution with bias, summand and activation in one pass,
// float32 and bfloat16. oneDNN computes what follows where it can; grouped convolutions of a few
// channels are ours (grouped.h), and so is bfloat16 on processors for which oneDNN has none.
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>

#include "common/arguments.h"
#include "common/bfloat16.h"
#include "common/guard.h"
#include "common/threads.h"
#include "conv/activation.h"
#include "conv/convolution.h"
#include "conv/grouped.h"
#include "conv/kept_weights.h"
#include "conv/parts.h"
#include "conv/run.h"
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

bool primitive_activates(const ConvGeometry& geometry, const Tail& tail) {
  return !tail.summand || primitive_adds_summand(geometry);
}

dnnl::primitive_attr attributes(const ConvGeometry& geometry, const Tail& tail) {
  dnnl::primitive_attr attr = user_scratchpad_attr();
  dnnl::post_ops ops;
  if (!primitive_activates(geometry, tail)) { return attr; }
  if (tail.summand) { ops.append_binary(dnnl::algorithm::binary_add, geometry.out_desc()); }
  if (tail.activation == Activation::kRelu) {
    // oneDNN's relu makes 0 of NaN. This is x min(1, max(0, 1e38 x)): x where x > 0, else 0, and NaN
    // where x is NaN or -infinity. The kernel tells these apart.
    ops.append_eltwise(dnnl::algorithm::eltwise_hardswish, 1e38F, 0.0F);
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
      attributes(geometry, tail), /*allow_empty=*/true);
}

// What oneDNN has for a convolution.
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

template <typename A, typename B>
ONEFLOW_ACCEL_INLINE void add_to_float(const A* a, const B* b, int64_t n, float* sum) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { sum[i] = to_float(a[i]) + to_float(b[i]); }
}

void sums(const float* a, const float* b, int64_t n, float* sum) { add_to_float(a, b, n, sum); }

void sums(const Bfloat16* a, const Bfloat16* b, int64_t n, float* sum) {
  add_to_float(a, b, n, sum);
}

void sums(const float* a, const Bfloat16* b, int64_t n, float* sum) { add_to_float(a, b, n, sum); }

void widened(const Bfloat16* x, int64_t n, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = to_float(x[i]); }
}

void widened(const float* x, int64_t n, float* y) { std::copy_n(x, n, y); }

void rounded(const float* x, int64_t n, float* y) { std::copy_n(x, n, y); }

void rounded(const float* x, int64_t n, Bfloat16* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<Bfloat16>(x[i]); }
}

// out = activation(x + summand), where `summand` may be null. out may be x.
template <typename X, typename T>
void add_and_activate(const X* x, const T* summand, Activation activation, int64_t n, T* out) {
  parallel_for(n, kGrainSize, [=](int64_t begin, int64_t end) {
    constexpr int64_t kBlock = 1024;
    float block[kBlock];
    for (int64_t i = begin; i < end; i += kBlock) {
      const int64_t count = std::min(kBlock, end - i);
      if (summand == nullptr) {
        widened(x + i, count, block);
      } else {
        sums(x + i, summand + i, count, block);
      }
      if (activation != Activation::kNone) { activate(activation, 0.0F, count, block); }
      rounded(block, count, out + i);
    }
  });
}

bool has_nan_here(const float* x, int64_t n) {
  int found = 0;
#pragma omp simd reduction(| : found)
  for (int64_t i = 0; i < n; ++i) { found |= x[i] != x[i] ? 1 : 0; }
  return found != 0;
}

bool has_nan_here(const Bfloat16* x, int64_t n) {
  int found = 0;
#pragma omp simd reduction(| : found)
  for (int64_t i = 0; i < n; ++i) { found |= (x[i].bits & 0x7FFF) > 0x7F80 ? 1 : 0; }
  return found != 0;
}

template <typename T>
bool has_nan(const T* x, int64_t n) {
  std::atomic<bool> found{false};
  parallel_for(n, kGrainSize, [x, &found](int64_t begin, int64_t end) {
    if (has_nan_here(x + begin, end - begin)) { found = true; }
  });
  return found;
}

int64_t count(const dnnl::memory::dims& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<int64_t>());
}

// The weights in float32: converted ones are in the calling thread's scratch memory.
const float* float_weights(const ConvGeometry&, const float* weights) { return weights; }
const float* float_weights(const ConvGeometry& geometry, const Bfloat16* weights) {
  const int64_t n = count(geometry.weights);
  auto* converted = static_cast<float*>(scratch(ScratchSlot::kWeights, n * sizeof(float)));
  widened(weights, n, converted);
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
    const Tail tail{ctx->has_input("bias", 0), ctx->has_input("summand", 0),
                    activation_of(ctx->Attr<std::string>("activation"))};
    const float* bias = input_or_null(ctx, "bias");
    const T* x = input<T>(ctx, "in");
    const T* summand = input_or_null<T>(ctx, "summand");
    T* y = output<T>(ctx, "out");
    const int64_t n = out->shape_view().elem_cnt();
    if (geometry.is_empty()) {
      fill_with_bias(geometry, bias, y);
      return add_and_activate(y, summand, tail.activation, n, y);
    }
    run_or_throw([&] { return geometry.describe("oneflow_accel_conv2d"); }, [&] {
      if (const auto shape = grouped_shape(geometry)) {
        const float* weights = float_weights(geometry, input<T>(ctx, "weight"));
        // Not before a summand is added.
        const Activation activation = tail.summand ? Activation::kNone : tail.activation;
        grouped_convolution(*shape, x, weights, bias, activation, y);
        if (tail.summand) { add_and_activate(y, summand, tail.activation, n, y); }
        return;
      }
      bool convolved = true;
      for_parts(geometry, forward_layout(geometry), [&](const ConvGeometry& part, int64_t first) {
        convolved = convolved
                    && convolve_as_written(ctx, part, tail, x + first * geometry.in_image(),
                                           y + first * geometry.out_image());
      });
      if (!convolved) {
        convolve_in_float32(geometry, x, input<T>(ctx, "weight"), bias, summand, tail.activation,
                            y);
      } else if (!primitive_activates(geometry, tail)) {
        add_and_activate(y, summand, tail.activation, n, y);
      }
    });
  }

  // convolve() with relu(-infinity) = 0. Telling it from NaN takes the sums before relu, so what gave
  // a NaN is computed again without it. What looking for one costs is less than ResNet50's time
  // varies by.
  static bool convolve_as_written(user_op::KernelComputeContext* ctx, const ConvGeometry& geometry,
                                  const Tail& tail, const T* in, T* out) {
    if (!convolve(ctx, geometry, tail, in, out)) { return false; }
    const bool relu = tail.activation == Activation::kRelu && primitive_activates(geometry, tail);
    const int64_t n = count(geometry.out);
    if (!relu || !has_nan(out, n)) { return true; }
    if (!convolve(ctx, geometry, {tail.bias, tail.summand, Activation::kNone}, in, out)) {
      return false;
    }
    add_and_activate<T, T>(out, nullptr, Activation::kRelu, n, out);
    return true;
  }

  // False where oneDNN, on this processor, has no such convolution that we want.
  static bool convolve(user_op::KernelComputeContext* ctx, const ConvGeometry& geometry,
                       const Tail& tail, const void* in, void* out) {
    const KeyBuilder key = geometry.key("fused_convolution")
                               .add(tail.bias ? 1 : 0)
                               .add(tail.summand ? 1 : 0)
                               .add(static_cast<int64_t>(tail.activation));
    if (sizeof(T) != sizeof(float) && !has_bfloat16_products()) { return false; }
    const auto& found = PrimitiveCache<std::optional<Fused>>::get_or_create(key.str(), [&] {
      const auto desc = fused_desc(geometry, tail);
      return desc ? std::make_optional<Fused>(geometry, desc) : std::nullopt;
    });
    if (!found) { return false; }
    const Fused& fused = *found;
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
    return true;
  }

  // For processors without bfloat16 products: float32 copies are convolved. Not in scratch memory,
  // which the convolution uses itself.
  static void convolve_in_float32(ConvGeometry geometry, const T* in, const T* weights,
                                  const float* bias, const T* summand, Activation activation,
                                  T* out) {
    geometry.data_type = dnnl::memory::data_type::f32;
    const int64_t n = count(geometry.out);
    const auto wide_in = float_copy(in, count(geometry.in));
    const auto wide_weights = float_copy(weights, count(geometry.weights));
    const std::unique_ptr<float[]> sums(new float[n]);
    convolution(geometry, wide_in.get(), wide_weights.get(), bias, sums.get());
    add_and_activate(sums.get(), summand, activation, n, out);
  }

  static std::unique_ptr<float[]> float_copy(const T* from, int64_t n) {
    std::unique_ptr<float[]> to(new float[n]);
    widened(from, n, to.get());
    return to;
  }
};

REGISTER_KERNEL("oneflow_accel_conv2d", make<FusedConv2dKernel<float>>, is_float32_on_cpu("in"));
REGISTER_KERNEL("oneflow_accel_conv2d", make<FusedConv2dKernel<Bfloat16>>,
                is_bfloat16_on_cpu("in"));

}  // namespace

}  // namespace oneflow_accel
