// fused_bias_add_gelu (exact, by erf), its gradient, and fused_bias_add_mask_scale, float32 and
// bfloat16: what follows a + b, with b along any axis of a. The last is (a + b) * scale where the
// mask is true, else 0, plus _add_to_output, which nn.Graph fuses in; dropout_grad is its gradient.
#include <functional>
#include <stdexcept>

#include "activation/formulas.h"
#include "common/oneflow.h"
#include "elementwise/broadcast.h"
#include "random/keep.h"

namespace oneflow_accel {

namespace {

// out[i] = finish(i, element i of a + b), in parallel, on stretches of sums that are still in the
// nearest cache.
template <typename T, typename Finish>
void with_bias(Context* ctx, T* out, const Finish& finish) {
  constexpr int64_t kStretch = 2048;
  // OneFlow's operators do not look.
  if (argument(ctx, "b")->data_type() != argument(ctx, "a")->data_type()) {
    throw std::invalid_argument("the bias is of another dtype");
  }
  const T* a = input<T>(ctx, "a");
  const T* b = input<T>(ctx, "b");
  const Broadcast broadcast(shape_of(ctx, "a"), ctx->Attr<int32_t>("axis"));
  parallel_for(broadcast.elements(), kGrainSize, [&](int64_t begin, int64_t end) {
    const Finish of_one = finish;
    float sums[kStretch];
    for (int64_t first = begin; first < end; first += kStretch) {
      const int64_t last = std::min(first + kStretch, end);
      broadcast.for_blocks(
          first, last, [&](int64_t i, int64_t in_a, int64_t in_b, const Rows& rows) {
            for_rows(std::plus<float>(), a + in_a, b + in_b, sums + (i - first), rows);
          });
#pragma omp simd
      for (int64_t i = first; i < last; ++i) { out[i] = from_float<T>(of_one(i, sums[i - first])); }
    }
  });
}

template <typename T>
void bias_gelu_kernel(Context* ctx) {
  with_bias(ctx, output<T>(ctx, "out"), [](int64_t, float sum) { return gelu(sum); });
}

template <typename T>
void bias_gelu_grad_kernel(Context* ctx) {
  const T* dy = input<T>(ctx, "dy");
  with_bias(ctx, output<T>(ctx, "dx"),
            [=](int64_t i, float sum) { return to_float(dy[i]) * gelu_slope(sum); });
}

template <typename T>
void bias_mask_scale_kernel(Context* ctx) {
  const uint8_t* mask = random::mask_bytes(ctx, "mask");
  const T* addend = input_or_null<T>(ctx, "_add_to_output");
  const float scale = ctx->Attr<float>("scale");
  T* out = output<T>(ctx, "out");
  const auto kept = [=](int64_t i, float sum) { return sum * random::kept(mask[i], scale); };
  if (addend == nullptr) { return with_bias(ctx, out, kept); }
  with_bias(ctx, out, [=](int64_t i, float sum) { return kept(i, sum) + to_float(addend[i]); });
}

REGISTER_KERNELS(bias_gelu_kernel, "fused_bias_add_gelu", "out");
REGISTER_KERNELS(bias_gelu_grad_kernel, "fused_bias_add_gelu_grad", "dx");
REGISTER_KERNELS(bias_mask_scale_kernel, "fused_bias_add_mask_scale", "out");

}  // namespace

}  // namespace oneflow_accel
