// add_n, float32 and bfloat16: what OneFlow emits for x + y and x += y of equal shapes, and for the
// sum of the gradients of a tensor that is used more than once.
#include <algorithm>
#include <vector>

#include "common/oneflow.h"
#include "common/threads.h"
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

// out = a + b; out may be a or b itself.
template <typename A, typename B, typename Out>
void add(const A* a, const B* b, Out* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { out[i] = from_float<Out>(to_float(a[i]) + to_float(b[i])); }
}

// The sum of three or more inputs over [begin, end), in their order. `out` may be any of them, so a
// block is summed up beside it before it is written.
template <typename T>
void add_all(const std::vector<Operand<T>>& inputs, T* out, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 1024;
  float sum[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = std::min(kBlock, end - i);
    add(inputs[0].data() + i, inputs[1].data() + i, sum, n);
    for (std::size_t k = 2; k + 1 < inputs.size(); ++k) { add(sum, inputs[k].data() + i, sum, n); }
    add(sum, inputs.back().data() + i, out + i, n);
  }
}

template <typename T>
void add_n_kernel(Context* ctx) {
  auto* out = argument(ctx, "out");
  T* sum = out->mut_dptr<T>();
  const int64_t n = out->shape_view().elem_cnt();
  std::vector<Operand<T>> inputs;
  for (std::size_t k = 0; k < ctx->inputs().size(); ++k) {
    inputs.emplace_back(argument(ctx, "in", k)->dptr<T>(), n, sum, n);
  }
  parallel_for(n, kGrainSize, [&](int64_t begin, int64_t end) {
    if (inputs.size() == 2) {
      add(inputs[0].data() + begin, inputs[1].data() + begin, sum + begin, end - begin);
    } else {
      add_all(inputs, sum, begin, end);
    }
  });
}

REGISTER_KERNELS(add_n_kernel, "add_n", "out", in_place("out", "in"));

}  // namespace

}  // namespace oneflow_accel
