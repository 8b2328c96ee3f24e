// l1_l2_regularize_gradient, float32: how nn.Graph adds SGD's weight decay to a gradient before it is
// clipped.
#include "common/threads.h"
#include "optimizer/update.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// gradients and out may be the same array.
void regularize(const float* gradients, const float* parameters, float* out, int64_t n,
                const GradientTerms& terms) {
  const GradientTerms t = terms;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { out[i] = regularized(gradients[i], parameters[i], t); }
}

class RegularizeKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const GradientTerms terms{1.0F, ctx->Attr<float>("l1"), ctx->Attr<float>("l2")};
    const auto* model = ctx->Tensor4ArgNameAndIndex("model", 0);
    const float* parameters = model->dptr<float>();
    const float* gradients = input(ctx, "model_diff");
    float* out = output(ctx, "out");
    parallel_for(model->shape_view().elem_cnt(), kGrainSize, [=](int64_t begin, int64_t end) {
      regularize(gradients + begin, parameters + begin, out + begin, end - begin, terms);
    });
  }
};

REGISTER_KERNEL("l1_l2_regularize_gradient", make<RegularizeKernel>, is_float32_on_cpu("out"),
                in_place("out", "model_diff"));

}  // namespace

}  // namespace oneflow_accel
