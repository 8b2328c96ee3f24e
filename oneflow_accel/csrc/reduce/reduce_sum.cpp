// reduce_sum (sum, and the first step of mean) and reduce_sum_like (the gradient of an operand that
// was broadcast), float32, bfloat16 and float64.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "common/oneflow.h"
#include "common/scratch.h"
#include "common/threads.h"
#include "copy/strided_copy.h"
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

// Elements of a row that are summed up in T, with enough accumulators to keep the error small.
constexpr int64_t kRowBlock = 4096;
// Rows of a column sum that are added up in T, and columns whose sums stay in the L1 cache.
constexpr int64_t kColumnBlock = 128;
constexpr int64_t kColumnTile = 1024;

// What T is summed up in.
template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
Sum<T> row_sum(const T* x, int64_t n) {
  // Four quarters at once: an addition waits for the one before it, not for those of the others.
  const int64_t quarter = n / 4;
  Sum<T> a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
  for (int64_t i = 0; i < quarter; ++i) {
    a += to_float(x[i]);
    b += to_float(x[quarter + i]);
    c += to_float(x[2 * quarter + i]);
    d += to_float(x[3 * quarter + i]);
  }
  for (int64_t i = 4 * quarter; i < n; ++i) { a += to_float(x[i]); }
  return (a + b) + (c + d);
}

// sums[i] = the sum over rows r of x[r * stride + i].
template <typename T>
void column_sums(const T* x, int64_t stride, int64_t rows, Sum<T>* sums, int64_t n) {
  std::fill_n(sums, n, Sum<T>(0));
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const T* row = x + r * stride;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      sums[i] += (to_float(row[i]) + to_float(row[stride + i]))
                 + (to_float(row[2 * stride + i]) + to_float(row[3 * stride + i]));
    }
  }
  for (; r < rows; ++r) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) { sums[i] += to_float(x[r * stride + i]); }
  }
}

// out[i] = the sum over b of partial[i * stride + b * step].
template <typename T>
void add_blocks(const T* partial, int64_t blocks, int64_t stride, int64_t step, T* out, int64_t n) {
  for_each_block(n, blocks, [=](int64_t i) {
    double sum = 0.0;
    for (int64_t b = 0; b < blocks; ++b) { sum += partial[i * stride + b * step]; }
    out[i] = static_cast<T>(sum);
  });
}

// (rows, n) -> (rows)
template <typename T>
void sum_rows(const T* x, int64_t rows, int64_t n, Sum<T>* out) {
  const int64_t blocks = ceil_div(n, kRowBlock);
  Sum<T>* sums = blocks == 1 ? out : scratch<Sum<T>>(ScratchSlot::kReduction, rows * blocks);
  for_each_block(rows * blocks, std::min(n, kRowBlock), [=](int64_t i) {
    const int64_t first = i % blocks * kRowBlock;
    sums[i] = row_sum(x + i / blocks * n + first, std::min(kRowBlock, n - first));
  });
  if (blocks > 1) { add_blocks(sums, blocks, blocks, 1, out, rows); }
}

// (outer, rows, columns) -> (outer, columns)
template <typename T>
void sum_columns(const T* x, int64_t outer, int64_t rows, int64_t columns, Sum<T>* out) {
  const int64_t blocks = ceil_div(rows, kColumnBlock);
  const int64_t tiles = ceil_div(columns, kColumnTile);
  // One after the other: (outer, columns) for the first block, then for the second.
  const int64_t size = blocks * outer * columns;
  Sum<T>* sums = blocks == 1 ? out : scratch<Sum<T>>(ScratchSlot::kReduction, size);
  const int64_t work = std::min(rows, kColumnBlock) * std::min(columns, kColumnTile);
  for_each_block(outer * blocks * tiles, work, [=](int64_t i) {
    const int64_t column = i % tiles * kColumnTile;
    const int64_t block = i / tiles % blocks;
    const int64_t o = i / tiles / blocks;
    const int64_t row = block * kColumnBlock;
    column_sums(x + (o * rows + row) * columns + column, columns,
                std::min(kColumnBlock, rows - row), sums + (block * outer + o) * columns + column,
                std::min(kColumnTile, columns - column));
  });
  if (blocks > 1) { add_blocks(sums, blocks, 1, outer * columns, out, outer * columns); }
}

// Neighboring axes that are all summed over, or all kept.
struct Group {
  int64_t size;
  bool summed;
};

// There is one at least that is summed over.
std::vector<Group> groups_of(const ::oneflow::ShapeView& shape, const std::vector<int32_t>& axes) {
  const auto rank = static_cast<int32_t>(shape.NumAxes());
  std::vector<bool> summed(rank, false);
  for (const int32_t axis : axes) { summed[axis < 0 ? axis + rank : axis] = true; }
  std::vector<Group> groups;
  for (int32_t k = 0; k < rank; ++k) {
    if (shape.At(k) == 1) { continue; }
    if (!groups.empty() && groups.back().summed == summed[k]) {
      groups.back().size *= shape.At(k);
    } else {
      groups.push_back({shape.At(k), summed[k]});
    }
  }
  const auto is_summed = [](const Group& group) { return group.summed; };
  if (std::none_of(groups.begin(), groups.end(), is_summed)) {
    groups.insert(groups.begin(), {1, true});
  }
  return groups;
}

// The sums of x, of the shape that the groups give, over the summed ones: one group after the other,
// the last one first. What is not final goes to `slot` and another buffer in turn.
template <typename T>
void sum_groups(std::vector<Group> groups, const T* x, Sum<T>* out,
                ScratchSlot slot = ScratchSlot::kSource) {
  int64_t inner = 1;
  for (; !groups.back().summed; groups.pop_back()) { inner *= groups.back().size; }
  const int64_t size = groups.back().size;
  groups.pop_back();
  int64_t outer = 1;
  bool last = true;
  for (const Group& group : groups) {
    outer *= group.size;
    last = last && !group.summed;
  }
  Sum<T>* sums = last ? out : scratch<Sum<T>>(slot, outer * inner);
  if (inner == 1) {
    sum_rows(x, outer, size, sums);
  } else {
    sum_columns(x, outer, size, inner, sums);
  }
  if (last) { return; }
  groups.push_back({inner, false});
  const bool first_slot = slot == ScratchSlot::kSource;
  sum_groups(groups, sums, out, first_slot ? ScratchSlot::kDestination : ScratchSlot::kSource);
}

// out = the sum of x over `axes` (none, some or all; negative ones count from the end). The result
// does not depend on the number of threads: blocks of a fixed size are summed up, then the blocks'
// sums in a fixed order, in float64. The sum of nothing is 0. bfloat16 is summed up in float32.
template <typename T>
void sum_over(const ::oneflow::ShapeView& shape, const std::vector<int32_t>& axes, const T* x,
              user_op::Tensor* out) {
  if (shape.elem_cnt() == 0) { return zero_fill(out); }
  const std::vector<Group> groups = groups_of(shape, axes);
  if constexpr (std::is_same_v<T, Bfloat16>) {
    const int64_t kept = out->shape_view().elem_cnt();
    auto* sums = scratch<float>(ScratchSlot::kWeights, kept);
    sum_groups(groups, x, sums);
    convert(sums, out->mut_dptr<T>(), kept);
  } else {
    sum_groups(groups, x, out->mut_dptr<T>());
  }
}

template <typename T>
void reduce_sum_kernel(Context* ctx) {
  const bool like = ctx->has_input("like", 0);
  const char* x = like ? "x" : "input_tensor";
  sum_over(shape_of(ctx, x), ctx->Attr<std::vector<int32_t>>("axis"), input<T>(ctx, x),
           argument(ctx, like ? "y" : "output_tensor"));
}

REGISTER_TYPED_KERNELS((float, double, Bfloat16), reduce_sum_kernel, "reduce_sum", "output_tensor");
REGISTER_TYPED_KERNELS((float, double, Bfloat16), reduce_sum_kernel, "reduce_sum_like", "y");

}  // namespace

}  // namespace oneflow_accel
