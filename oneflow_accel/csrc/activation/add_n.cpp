// add_n, float32: what OneFlow emits for x + y and x += y of equal shapes, and for the sum of the
// gradients of a tensor that is used more than once.
#include <algorithm>
#include <vector>

#include "common/oneflow.h"
#include "common/simd.h"
#include "common/threads.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// out = a + b; out may be a or b itself.
ONEFLOW_ACCEL_SIMD
void add(const float* a, const float* b, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { out[i] = a[i] + b[i]; }
}

// The sum of `inputs` over [begin, end), in their order. `out` may be any of the inputs, so a block
// is summed up beside it before it is written.
void add_all(const std::vector<const float*>& inputs, float* out, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 1024;
  float sum[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = std::min(kBlock, end - i);
    std::copy_n(inputs.front() + i, n, sum);
    for (std::size_t k = 1; k + 1 < inputs.size(); ++k) { add(sum, inputs[k] + i, sum, n); }
    add(sum, inputs.back() + i, out + i, n);
  }
}

class AddNKernel final : public user_op::OpKernel {
 public:
  bool AlwaysComputeWhenAllOutputsEmpty() const override { return false; }

 private:
  using user_op::OpKernel::Compute;
  void Compute(user_op::KernelComputeContext* ctx) const override {
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    float* sum = out->mut_dptr<float>();
    std::vector<const float*> inputs;
    for (std::size_t k = 0; k < ctx->inputs().size(); ++k) {
      inputs.push_back(ctx->Tensor4ArgNameAndIndex("in", k)->dptr<float>());
    }
    parallel_for(out->shape_view().elem_cnt(), kGrainSize, [&](int64_t begin, int64_t end) {
      if (inputs.size() == 2) {
        add(inputs[0] + begin, inputs[1] + begin, sum + begin, end - begin);
      } else {
        add_all(inputs, sum, begin, end);
      }
    });
  }
};

REGISTER_USER_KERNEL(listed("add_n"))
    .SetCreateFn<AddNKernel>()
    .SetIsMatchedHob(is_float32_on_cpu("out"))
    .SetInplaceProposalFn([](const user_op::InferContext&,
                             const user_op::AddInplaceArgPair& add) -> ::oneflow::Maybe<void> {
      return add("out", 0, "in", 0, true);
    })
    .SetPriority(kKernelPriority);

}  // namespace

}  // namespace oneflow_accel
