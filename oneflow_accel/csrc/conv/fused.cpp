// The kernel of oneflow_accel_conv2d: a convolution with bias, summand and activation in one pass,
// float32 and bfloat16. oneDNN computes what follows where it can; grouped convolutions of a few
// channels are ours (grouped.h), and so is bfloat16 on processors for which oneDNN has none.
#include <atomic>

#include "common/guard.h"
#include "conv/convolution.h"
#include "conv/grouped.h"
#include "conv/primitive.h"

namespace oneflow_accel {

namespace {

// out = activation(x + summand), where `summand` may be null. out may be x.
template <typename X, typename T>
void add_and_activate(const X* x, const T* summand, Activation activation, int64_t n, T* out) {
  with_activation(activation, [&](auto function) {
    parallel_for(n, kGrainSize, [=](int64_t begin, int64_t end) {
      if (summand == nullptr) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) { out[i] = from_float<T>(function(to_float(x[i]))); }
      } else {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) {
          out[i] = from_float<T>(function(to_float(x[i]) + to_float(summand[i])));
        }
      }
    });
  });
}

template <typename T>
bool has_nan(const T* x, int64_t n) {
  std::atomic<bool> found{false};
  parallel_for(n, kGrainSize, [x, &found](int64_t begin, int64_t end) {
    int here = 0;
#pragma omp simd reduction(| : here)
    for (int64_t i = begin; i < end; ++i) { here |= to_float(x[i]) != to_float(x[i]) ? 1 : 0; }
    if (here != 0) { found = true; }
  });
  return found;
}

template <typename T>
class FusedConv2dKernel final : public Kernel {
  void Compute(::oneflow::user_op::KernelComputeContext* ctx) const override {
    const ThreadScope threads;
    const ConvGeometry geometry(ctx, "in", "out", kConvType<T>, is_channels_last(ctx));
    const Activation activation = activation_of(ctx->Attr<std::string>("activation"));
    const float* bias = input_or_null(ctx, "bias");
    const T* summand = input_or_null<T>(ctx, "summand");
    T* out = output<T>(ctx, "out");
    if (geometry.is_empty()) {
      fill_with_bias(geometry, bias, out);
      const int64_t n = ctx->Tensor4ArgNameAndIndex("out", 0)->shape_view().elem_cnt();
      return add_and_activate(out, summand, activation, n, out);
    }
    run_or_throw([&] { return geometry.describe("oneflow_accel_conv2d"); }, [&] {
      convolve(geometry, input<T>(ctx, "in"), input<T>(ctx, "weight"), bias, summand, activation,
               ctx->Attr<int64_t>("owner"), out);
    });
  }

  static void convolve(const ConvGeometry& geometry, const T* in, const T* weights,
                       const float* bias, const T* summand, Activation activation, int64_t owner,
                       T* out) {
    const int64_t n = geometry.out_count();
    if (const auto shape = grouped_shape(geometry)) {
      const FloatCopy float_weights(weights, geometry.weight_count());
      // No activation before a summand is added.
      grouped_convolution(*shape, in, float_weights.data(), bias,
                          summand == nullptr ? activation : Activation::kNone, out);
      if (summand != nullptr) { add_and_activate(out, summand, activation, n, out); }
      return;
    }
    // Channels first, the output is mostly written in a blocked layout and copied: the summand is
    // added to the copy then.
    const bool adds = summand == nullptr || geometry.channels_last;
    ConvCall call{ConvResult::kOut, in, weights, out, bias, /*inference=*/true,
                  adds ? summand : nullptr, adds ? activation : Activation::kNone, owner};
    if (!run_primitive(geometry, call)) {
      const FloatCopy sums(n);
      convolution(float32_geometry(geometry), FloatCopy(in, geometry.in_count()).data(),
                  FloatCopy(weights, geometry.weight_count()).data(), bias, sums.data());
      return add_and_activate(sums.data(), summand, activation, n, out);
    }
    if (!adds) { return add_and_activate(out, summand, activation, n, out); }
    // relu(-infinity) = 0. Telling it from NaN takes the sums before relu, so where there is a NaN
    // all is computed again without it. What looking for one costs is less than ResNet50's time
    // varies by.
    if (activation == Activation::kRelu && has_nan(out, n)) {
      call.activation = Activation::kNone;
      run_primitive(geometry, call);
      add_and_activate<T, T>(out, nullptr, Activation::kRelu, n, out);
    }
  }
};

REGISTER_KERNEL("oneflow_accel_conv2d", make<FusedConv2dKernel<float>>, is_float32_on_cpu("in"));
REGISTER_KERNEL("oneflow_accel_conv2d", make<FusedConv2dKernel<Bfloat16>>,
                is_bfloat16_on_cpu("in"));

}  // namespace

}  // namespace oneflow_accel
