// reduce_sum (sum, and the first step of mean) and reduce_sum_like (the gradient of an operand that
// was broadcast), float32, bfloat16 and float64.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "common/arguments.h"
#include "common/onednn.h"
#include "common/threads.h"
#include "common/typed_kernels.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

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
  parallel_for(n, std::max<int64_t>(kGrainSize / blocks, 1), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double sum = 0.0;
      for (int64_t b = 0; b < blocks; ++b) { sum += partial[i * stride + b * step]; }
      out[i] = static_cast<T>(sum);
    }
  });
}

template <typename T>
T* partial_sums(int64_t n) {
  return static_cast<T*>(scratch(ScratchSlot::kReduction, n * sizeof(T)));
}

// (rows, n) -> (rows)
template <typename T>
void sum_rows(const T* x, int64_t rows, int64_t n, Sum<T>* out) {
  const int64_t blocks = (n + kRowBlock - 1) / kRowBlock;
  Sum<T>* sums = blocks == 1 ? out : partial_sums<Sum<T>>(rows * blocks);
  const int64_t grain = std::max<int64_t>(kGrainSize / std::min(n, kRowBlock), 1);
  parallel_for(rows * blocks, grain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % blocks * kRowBlock;
      sums[i] = row_sum(x + i / blocks * n + first, std::min(kRowBlock, n - first));
    }
  });
  if (blocks > 1) { add_blocks(sums, blocks, blocks, 1, out, rows); }
}

// (outer, rows, columns) -> (outer, columns)
template <typename T>
void sum_columns(const T* x, int64_t outer, int64_t rows, int64_t columns, Sum<T>* out) {
  const int64_t blocks = (rows + kColumnBlock - 1) / kColumnBlock;
  const int64_t tiles = (columns + kColumnTile - 1) / kColumnTile;
  // One after the other: (outer, columns) for the first block, then for the second.
  Sum<T>* sums = blocks == 1 ? out : partial_sums<Sum<T>>(blocks * outer * columns);
  const int64_t work = std::min(rows, kColumnBlock) * std::min(columns, kColumnTile);
  const int64_t grain = std::max<int64_t>(kGrainSize / work, 1);
  parallel_for(outer * blocks * tiles, grain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t column = i % tiles * kColumnTile;
      const int64_t block = i / tiles % blocks;
      const int64_t o = i / tiles / blocks;
      const int64_t row = block * kColumnBlock;
      column_sums(x + (o * rows + row) * columns + column, columns,
                  std::min(kColumnBlock, rows - row), sums + (block * outer + o) * columns + column,
                  std::min(kColumnTile, columns - column));
    }
  });
  if (blocks > 1) { add_blocks(sums, blocks, 1, outer * columns, out, outer * columns); }
}

// Neighboring axes that are all summed over, or all kept.
struct Group {
  int64_t size;
  bool summed;
};

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
  return groups;
}

template <typename T>
void sum_axis(const T* x, int64_t outer, int64_t size, int64_t inner, Sum<T>* out) {
  if (inner == 1) {
    sum_rows(x, outer, size, out);
  } else {
    sum_columns(x, outer, size, inner, out);
  }
}

template <typename T>
void sum_into(const ::oneflow::ShapeView& shape, const std::vector<int32_t>& axes, const T* x,
              Sum<T>* out) {
  std::vector<Group> groups = groups_of(shape, axes);
  int64_t kept = 1;
  auto left = std::count_if(groups.begin(), groups.end(), [](const Group& g) { return g.summed; });
  for (const Group& group : groups) { kept *= group.summed ? 1 : group.size; }
  if (left == 0 || shape.elem_cnt() == 0) {
    const bool copy = shape.elem_cnt() != 0;
    for (int64_t i = 0; i < kept; ++i) { out[i] = copy ? to_float(x[i]) : 0; }
    return;
  }
  // One group after the other, the last one first; what is not final goes to either of two
  // buffers in turn.
  ScratchSlot slot = ScratchSlot::kSource;
  const Sum<T>* sums = nullptr;
  int64_t inner = 1;
  int64_t outer = shape.elem_cnt();
  for (std::size_t k = groups.size(); k-- > 0;) {
    outer /= groups[k].size;
    if (!groups[k].summed) {
      inner *= groups[k].size;
      continue;
    }
    Sum<T>* to = out;
    if (--left > 0) {
      to = static_cast<Sum<T>*>(scratch(slot, outer * inner * sizeof(Sum<T>)));
      slot = slot == ScratchSlot::kSource ? ScratchSlot::kDestination : ScratchSlot::kSource;
    }
    if (sums == nullptr) {
      sum_axis(x, outer, groups[k].size, inner, to);
    } else {
      sum_axis(sums, outer, groups[k].size, inner, to);
    }
    sums = to;
  }
}

// out = the sum of x over `axes` (none, some or all; negative ones count from the end). The result
// does not depend on the number of threads: blocks of a fixed size are summed up, then the blocks'
// sums in a fixed order, in float64. The sum of nothing is 0. bfloat16 is summed up in float32.
template <typename T>
void sum_over(const ::oneflow::ShapeView& shape, const std::vector<int32_t>& axes, const T* x,
              user_op::Tensor* out) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    const int64_t kept = out->shape_view().elem_cnt();
    auto* sums = static_cast<float*>(scratch(ScratchSlot::kWeights, kept * sizeof(float)));
    sum_into(shape, axes, x, sums);
    auto* to = static_cast<T*>(out->mut_raw_dptr());
    for (int64_t i = 0; i < kept; ++i) { to[i] = from_float<T>(sums[i]); }
  } else {
    sum_into(shape, axes, x, out->mut_dptr<T>());
  }
}

template <typename T>
class ReduceSumKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    sum_over(ctx->Tensor4ArgNameAndIndex("input_tensor", 0)->shape_view(),
             ctx->Attr<std::vector<int32_t>>("axis"), input<T>(ctx, "input_tensor"),
             ctx->Tensor4ArgNameAndIndex("output_tensor", 0));
  }
};

template <typename T>
class ReduceSumLikeKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    sum_over(ctx->Tensor4ArgNameAndIndex("x", 0)->shape_view(),
             ctx->Attr<std::vector<int32_t>>("axis"), input<T>(ctx, "x"),
             ctx->Tensor4ArgNameAndIndex("y", 0));
  }
};

REGISTER_KERNELS(ReduceSumKernel, float, double, Bfloat16)("reduce_sum", "output_tensor");
REGISTER_KERNELS(ReduceSumLikeKernel, float, double, Bfloat16)("reduce_sum_like", "y");

}  // namespace

}  // namespace oneflow_accel
