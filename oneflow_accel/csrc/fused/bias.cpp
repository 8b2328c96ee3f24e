// fused_bias_add_gelu (exact, by erf), its gradient, and fused_bias_add_mask_scale, float32 and
// bfloat16: what follows a + b, with b along any axis of a. The last is (a + b) * scale where the
// mask is true, else 0, plus _add_to_output, which nn.Graph fuses in; dropout_grad is its gradient.
#include <stdexcept>

#include "activation/gelu.h"
#include "common/oneflow.h"
#include "common/threads.h"
#include "random/keep.h"

namespace oneflow_accel {

namespace {

// out[i] = finish(i, element i of a + b), in parallel, on stretches of sums that are still in the
// nearest cache.
template <typename T, typename Finish>
void with_bias(user_op::KernelComputeContext* ctx, T* out, const Finish& finish) {
  constexpr int64_t kStretch = 2048;
  const auto* tensor = ctx->Tensor4ArgNameAndIndex("a", 0);
  // OneFlow's operators do not look.
  if (ctx->Tensor4ArgNameAndIndex("b", 0)->data_type() != tensor->data_type()) {
    throw std::invalid_argument("the bias is of another dtype");
  }
  const T* a = input<T>(ctx, "a");
  const T* b = input<T>(ctx, "b");
  const auto& shape = tensor->shape_view();
  const auto axis = ctx->Attr<int32_t>("axis");
  // Element i belongs to b[(i / inner) % channels].
  const int64_t inner = shape.Count(axis + 1);
  const int64_t channels = shape.At(axis);
  parallel_for(shape.elem_cnt(), kGrainSize, [&](int64_t begin, int64_t end) {
    const Finish of_one = finish;
    float sums[kStretch];
    for (int64_t first = begin; first < end; first += kStretch) {
      const int64_t last = std::min(first + kStretch, end);
      int64_t count = 0;
      for (int64_t i = first; i < last; i += count) {
        const T* from = a + i;
        float* to = sums + (i - first);
        if (inner == 1) {
          const int64_t channel = i % channels;
          count = std::min(channels - channel, last - i);
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) {
            to[j] = to_float(from[j]) + to_float(b[channel + j]);
          }
        } else {
          count = std::min(inner - i % inner, last - i);
          const float value = to_float(b[i / inner % channels]);
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) { to[j] = to_float(from[j]) + value; }
        }
      }
#pragma omp simd
      for (int64_t i = first; i < last; ++i) { out[i] = from_float<T>(of_one(i, sums[i - first])); }
    }
  });
}

template <typename T>
class BiasGeluKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    with_bias(ctx, output<T>(ctx, "out"), [](int64_t, float sum) { return gelu(sum); });
  }
};

template <typename T>
class BiasGeluGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const T* dy = input<T>(ctx, "dy");
    with_bias(ctx, output<T>(ctx, "dx"),
              [=](int64_t i, float sum) { return to_float(dy[i]) * gelu_slope(sum); });
  }
};

template <typename T>
class BiasMaskScaleKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const uint8_t* mask = random::mask_bytes(ctx, "mask");
    const T* addend = input_or_null<T>(ctx, "_add_to_output");
    const float scale = ctx->Attr<float>("scale");
    T* out = output<T>(ctx, "out");
    const auto kept = [=](int64_t i, float sum) { return sum * random::kept(mask[i], scale); };
    if (addend == nullptr) { return with_bias(ctx, out, kept); }
    with_bias(ctx, out, [=](int64_t i, float sum) { return kept(i, sum) + to_float(addend[i]); });
  }
};

REGISTER_KERNELS(BiasGeluKernel, float, Bfloat16)("fused_bias_add_gelu", "out");
REGISTER_KERNELS(BiasGeluGradKernel, float, Bfloat16)("fused_bias_add_gelu_grad", "dx");
REGISTER_KERNELS(BiasMaskScaleKernel, float, Bfloat16)("fused_bias_add_mask_scale", "out");

}  // namespace

}  // namespace oneflow_accel
