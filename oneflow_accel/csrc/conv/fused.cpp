// The kernel of oneflow_accel_conv2d: a convolution with bias, summand and activation in one pass,
// float32 and bfloat16. oneDNN computes what follows where it can; grouped convolutions of a few
// channels are ours (grouped.h), and so is bfloat16 on processors for which oneDNN has none.
#include <atomic>
#include <optional>

#include "common/oneflow.h"
#include "conv/convolution.h"
#include "conv/grouped.h"

namespace oneflow_accel {

namespace {

// out = activation(x + summand), where `summand` may be null. out may be x.
template <typename X, typename T>
void add_and_activate(const X* x, const T* summand, Activation activation, int64_t n, T* out) {
  with_activation(activation, [&](auto function) {
    if (summand == nullptr) { return map(n, out, function, x); }
    map(n, out, [=](float a, float b) { return function(a + b); }, x, summand);
  });
}

// Whether a NaN came up on the team's threads since this was made. Whatever makes one of other
// numbers sets a flag of the processor, and so does the maximum of one and 0, which oneDNN's relu
// is: asking takes no second look at the results.
class NanWatch {
 public:
  NanWatch() {
    run_team(num_threads(), [](int64_t, int64_t) { _MM_SET_EXCEPTION_STATE(0); });
  }

  bool saw_any() const {
    std::atomic<bool> any{false};
    run_team(num_threads(), [&](int64_t, int64_t) {
      if ((_MM_GET_EXCEPTION_STATE() & _MM_EXCEPT_INVALID) != 0) { any = true; }
    });
    return any;
  }
};

template <typename T>
void run_fused(const ConvGeometry& geometry, ConvCall call, const T* summand,
               Activation activation) {
  T* out = call.tensor<T>(kConvOut);
  const int64_t n = geometry.count(kConvOut);
  const auto float_copy = [&](ConvRole role) {
    return FloatCopy(call.tensor<T>(role), geometry.count(role));
  };
  if (const auto shape = grouped_shape(geometry)) {
    const FloatCopy weights = float_copy(kConvWeights);
    call.data[kConvWeights] = weights.data();
    // No activation before a summand is added.
    if (summand == nullptr) { call.activation = activation; }
    run_grouped<T>(*shape, call);
    if (summand != nullptr) { add_and_activate(out, summand, activation, n, out); }
    return;
  }
  // Channels first, the output is mostly written in a blocked layout and copied: the summand is
  // added to the copy then.
  const bool adds = summand == nullptr || geometry.channels_last;
  if (adds) {
    call.summand = summand;
    call.activation = activation;
  }
  std::optional<NanWatch> watch;
  if (call.activation == Activation::kRelu) { watch.emplace(); }
  bool done = run_primitive(geometry, call);
  // oneDNN's relu makes 0 of NaN, so where one came up all is computed again without it.
  if (done && watch && watch->saw_any()) {
    call.activation = Activation::kNone;
    done = run_primitive(geometry, call);
    if (done) { return add_and_activate<T, T>(out, nullptr, Activation::kRelu, n, out); }
  }
  if (!done) {
    const FloatCopy in = float_copy(kConvIn);
    const FloatCopy weights = float_copy(kConvWeights);
    const FloatCopy sums(n);
    convolve(float32_geometry(geometry),
             {kConvOut, {in.data(), weights.data(), sums.data()}, call.bias, call.inference});
    return add_and_activate(sums.data(), summand, activation, n, out);
  }
  if (!adds) { add_and_activate(out, summand, activation, n, out); }
}

template <typename T>
void fused_conv2d_kernel(Context* ctx) {
  const ThreadScope threads;
  const ConvGeometry geometry(ctx, "in", "out", kConvType<T>, is_channels_last(ctx));
  const Activation activation = activation_of(ctx->Attr<std::string>("activation"));
  const T* summand = input_or_null<T>(ctx, "summand");
  ConvCall call{kConvOut, {data_of(ctx, "in"), data_of(ctx, "weight"), data_of(ctx, "out")}};
  if (ctx->has_input("bias", 0)) { call.bias = data_of(ctx, "bias"); }
  call.inference = true;
  call.owner = ctx->Attr<int64_t>("owner");
  if (geometry.is_empty()) {
    T* out = output<T>(ctx, "out");
    fill_with_bias(geometry, input_or_null(ctx, "bias"), out);
    return add_and_activate(out, summand, activation, geometry.count(kConvOut), out);
  }
  run_or_throw([&] { return geometry.describe("oneflow_accel_conv2d"); },
               [&] { run_fused(geometry, call, summand, activation); });
}

REGISTER_KERNELS(fused_conv2d_kernel, "oneflow_accel_conv2d", "in");

}  // namespace

}  // namespace oneflow_accel
