// Sums of squares, float32, for the norm of gradients: sqrt_square_sum (eager clipping),
// multi_reduce_sum_pow_abs with p = 2 (nn.Graph's clipping).
#include <algorithm>
#include <cmath>

#include "common/onednn.h"
#include "common/oneflow.h"
#include "common/threads.h"

namespace oneflow_accel {

namespace {

// Squares are summed per block, and the blocks' sums in their order, so that the result does not
// depend on the number of threads. In float64: the squares of large float32 gradients overflow.
constexpr int64_t kBlock = kGrainSize;

double block_sum(const float* x, int64_t n) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const double value = x[i];
    sum += value * value;
  }
  return sum;
}

double square_sum(const user_op::Tensor& tensor) {
  const float* x = tensor.dptr<float>();
  const int64_t n = tensor.shape_view().elem_cnt();
  const int64_t blocks = ceil_div(n, kBlock);
  if (blocks <= 1) { return block_sum(x, n); }
  auto* sums = scratch<double>(ScratchSlot::kReduction, blocks);
  for_each_block(blocks, kBlock, [=](int64_t block) {
    sums[block] = block_sum(x + block * kBlock, std::min(kBlock, n - block * kBlock));
  });
  double total = 0.0;
  for (int64_t block = 0; block < blocks; ++block) { total += sums[block]; }
  return total;
}

// The sum of one tensor or of several, of which the operator for one takes the root.
void square_sum_kernel(Context* ctx) {
  double sum = 0.0;
  for (int32_t i = 0; i < ctx->input_size("x"); ++i) { sum += square_sum(*argument(ctx, "x", i)); }
  const bool root = ctx->op_type_name() == "sqrt_square_sum";
  *output(ctx, "y") = static_cast<float>(root ? std::sqrt(sum) : sum);
}

REGISTER_FLOAT_KERNEL(square_sum_kernel, "sqrt_square_sum", "y");
REGISTER_KERNEL("multi_reduce_sum_pow_abs", kernel(square_sum_kernel),
                is_float32_on_cpu("y") && (user_op::HobAttr<float>("p") == 2.0F));

}  // namespace

}  // namespace oneflow_accel
