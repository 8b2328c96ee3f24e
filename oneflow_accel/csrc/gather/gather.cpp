// Looking up rows of a table, and adding rows up in one: gather and its gradient
// unsorted_segment_sum_like, unsorted_segment_sum, and embedding and embedding_grad (nn.Embedding
// with a padding index or with gradients scaled by frequency; without, it is gather).
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/oneflow.h"
#include "common/part.h"
#include "common/scratch.h"
#include "common/threads.h"
#include "copy/strided_copy.h"

namespace oneflow_accel {

namespace {

// Whether 0 <= each x <= last: else x or last - x has the sign bit set.
template <typename T>
bool all_in_range(const T* x, int64_t n, int64_t last) {
  uint64_t signs = 0;
#pragma omp simd reduction(| : signs)
  for (int64_t i = 0; i < n; ++i) {
    const auto index = static_cast<uint64_t>(static_cast<int64_t>(x[i]));
    signs |= index | (static_cast<uint64_t>(last) - index);
  }
  return (signs >> 63U) == 0;
}

// Indices of either type that OneFlow has for them.
class Indices {
 public:
  explicit Indices(const user_op::Tensor& tensor) : count_(tensor.shape_view().elem_cnt()) {
    if (tensor.data_type() == DataType::kInt64) {
      wide_ = tensor.dptr<int64_t>();
    } else {
      narrow_ = tensor.dptr<int32_t>();
    }
  }

  int64_t count() const { return count_; }
  int64_t operator[](int64_t i) const { return wide_ ? wide_[i] : narrow_[i]; }

  // Throws std::out_of_range unless 0 <= each index < size.
  void check(int64_t size) const {
    if (wide_ != nullptr ? all_in_range(wide_, count_, size - 1)
                         : all_in_range(narrow_, count_, size - 1)) {
      return;
    }
    int64_t i = 0;
    while ((*this)[i] >= 0 && (*this)[i] < size) { ++i; }
    throw std::out_of_range("index " + std::to_string((*this)[i]) + " at position "
                            + std::to_string(i) + " is out of range for " + std::to_string(size)
                            + " rows");
  }

 private:
  const int64_t* wide_ = nullptr;
  const int32_t* narrow_ = nullptr;
  int64_t count_;
};

// A table (outer, rows, row). Where a global tensor is split by rows, a process holds a part of
// `all_rows`, the first of which has the index `first`.
struct TableShape {
  int64_t outer;
  int64_t rows;
  int64_t row;
  int64_t first;
  int64_t all_rows;
};

// out[o, i] = table[o, indices[i] - first], or 0 where the table does not have that row.
void gather_rows(const TableShape& shape, const Indices& indices, const user_op::Tensor& table,
                 user_op::Tensor* out) {
  const int64_t row_bytes = shape.row * static_cast<int64_t>(element_bytes(table));
  const int64_t count = indices.count();
  const auto* from = static_cast<const char*>(table.raw_dptr());
  auto* to = static_cast<char*>(out->mut_raw_dptr());
  for_each_block(shape.outer * count, row_bytes / 4, [&](int64_t i) {
    const int64_t row = indices[i % count] - shape.first;
    if (row >= 0 && row < shape.rows) {
      std::memcpy(to + i * row_bytes, from + (i / count * shape.rows + row) * row_bytes, row_bytes);
    } else {
      std::memset(to + i * row_bytes, 0, row_bytes);
    }
  });
}

// table[o, r] = the sum of data[o, i] over the i with indices[i] == first + r, in their order; all
// other rows become 0. An index equal to `skipped` is left out. bfloat16 is summed up in float32 and
// rounded once.
template <typename T>
void sum_rows_by_index(const TableShape& shape, const Indices& indices, const T* data, T* table,
                       int64_t skipped = -1) {
  constexpr bool kApart = std::is_same_v<T, Bfloat16>;
  using Sum = std::conditional_t<kApart, float, T>;
  const int64_t count = indices.count();
  const auto row_of = [&](int64_t i) {
    const int64_t row = indices[i] - shape.first;
    return indices[i] == skipped || row >= shape.rows ? -1 : row;
  };
  // Sums that lie apart do so in the order in which their rows first come up, without the others.
  std::vector<int64_t> places(kApart ? shape.rows : 0, -1);
  int64_t rows = kApart ? 0 : shape.rows;
  for (int64_t i = 0; kApart && i < count; ++i) {
    const int64_t row = row_of(i);
    if (row >= 0 && places[row] < 0) { places[row] = rows++; }
  }
  const int64_t bytes = shape.outer * rows * shape.row * static_cast<int64_t>(sizeof(Sum));
  void* memory = kApart ? scratch(ScratchSlot::kReduction, bytes) : table;
  zero_fill(memory, bytes);
  auto* sums = static_cast<Sum*>(memory);
  // The threads share out the columns, so that no two of them add to the same element and each
  // adds in the order of the indices.
  const int64_t grain = std::max<int64_t>(grain_of(shape.outer * count), 16);
  parallel_for(shape.row, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < shape.outer * count; ++i) {
      const int64_t row = row_of(i % count);
      if (row < 0) { continue; }
      const T* from = data + i * shape.row;
      Sum* to = sums + (i / count * rows + (kApart ? places[row] : row)) * shape.row;
#pragma omp simd
      for (int64_t c = begin; c < end; ++c) { to[c] += to_float(from[c]); }
    }
  });
  if constexpr (kApart) {
    const int64_t all = shape.outer * shape.rows;
    zero_fill(table, all * shape.row * static_cast<int64_t>(sizeof(T)));
    for_each_block(all, shape.row, [&](int64_t i) {
      const int64_t place = places[i % shape.rows];
      if (place < 0) { return; }
      const Sum* from = sums + (i / shape.rows * rows + place) * shape.row;
      T* to = table + i * shape.row;
#pragma omp simd
      for (int64_t c = 0; c < shape.row; ++c) { to[c] = from_float<T>(from[c]); }
    });
  }
}

// What a process holds of the axis of the attribute "axis" of the argument `table`.
MakeCache row_range(const char* table) {
  return [=](user_op::KernelCacheContext* ctx) {
    return local_ranges(ctx, table, {ctx->Attr<int64_t>("axis")});
  };
}

TableShape table_shape(Context* ctx, const char* table, const KernelCache* cache) {
  const auto shape = shape_of(ctx, table);
  if (shape.NumAxes() == 0) { return {1, 1, 1, 0, 1}; }
  const int64_t axis = ctx->Attr<int64_t>("axis");
  const LocalRange range = range_in(cache, 0, shape.At(axis));
  return {shape.Count(0, axis), shape.At(axis), shape.Count(axis + 1), range.first, range.total};
}

void gather_kernel(Context* ctx, const KernelCache* cache) {
  const TableShape shape = table_shape(ctx, "in", cache);
  const Indices indices(*argument(ctx, "indices"));
  indices.check(shape.all_rows);
  gather_rows(shape, indices, *argument(ctx, "in"), argument(ctx, "out"));
}

template <typename T>
void segment_sum_kernel(Context* ctx, const KernelCache* cache) {
  const Indices segments(*argument(ctx, "segment_ids"));
  sum_rows_by_index(table_shape(ctx, "out", cache), segments, input<T>(ctx, "data"),
                    output<T>(ctx, "out"));
}

TableShape embedding_shape(Context* ctx, const Indices& indices) {
  const auto& weight = shape_of(ctx, "weight");
  indices.check(weight.At(0));
  return {1, weight.At(0), weight.At(1), 0, weight.At(0)};
}

void embedding_kernel(Context* ctx) {
  const Indices indices(*argument(ctx, "indices"));
  gather_rows(embedding_shape(ctx, indices), indices, *argument(ctx, "weight"),
              argument(ctx, "out"));
}

template <typename T>
void divide_by_frequency(const TableShape& shape, const Indices& indices, T* table) {
  std::vector<int64_t> frequency(shape.rows, 0);
  for (int64_t i = 0; i < indices.count(); ++i) { ++frequency[indices[i]]; }
  for (int64_t r = 0; r < shape.rows; ++r) {
    if (frequency[r] < 2) { continue; }
    T* row = table + r * shape.row;
    for (int64_t k = 0; k < shape.row; ++k) {
      row[k] = from_float<T>(to_float(row[k]) / static_cast<float>(frequency[r]));
    }
  }
}

template <typename T>
void embedding_grad_kernel(Context* ctx) {
  const Indices indices(*argument(ctx, "indices"));
  const TableShape shape = embedding_shape(ctx, indices);
  T* dx = output<T>(ctx, "dx");
  sum_rows_by_index(shape, indices, input<T>(ctx, "dy"), dx, ctx->Attr<int64_t>("padding_idx"));
  if (ctx->Attr<bool>("scale_grad_by_freq")) { divide_by_frequency(shape, indices, dx); }
}

REGISTER_KERNEL("gather", kernel(gather_kernel, row_range("in")), is_movable_on_cpu("in"));
REGISTER_KERNELS(segment_sum_kernel, row_range("out"),
                 "unsorted_segment_sum unsorted_segment_sum_like", "out");
REGISTER_TYPED_KERNELS((double), segment_sum_kernel, row_range("out"), "unsorted_segment_sum_like",
                       "out");
REGISTER_KERNEL("embedding", kernel(embedding_kernel), is_movable_on_cpu("weight"));
REGISTER_KERNELS(embedding_grad_kernel, "embedding_grad", "weight");

}  // namespace

}  // namespace oneflow_accel
