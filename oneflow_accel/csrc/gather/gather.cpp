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

// A table (outer, rows, row). `first` is the index of the first row: where a global tensor is
// split by rows, a process holds a part of them.
struct TableShape {
  int64_t outer;
  int64_t rows;
  int64_t row;
  int64_t first;
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

// The rows that this process holds of a tensor that may be split over processes.
struct RowRange final : public user_op::OpKernelCache {
  explicit RowRange(const LocalRange& range) : range(range) {}
  const LocalRange range;
};

// A kernel that knows it, for the axis named by the attribute "axis" of the argument `table`; in one
// process there is none.
class TableKernel : public Kernel {
 public:
  explicit TableKernel(const char* table) : table_(table) {}
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const final {
    if (ctx->parallel_ctx().parallel_num() == 1) { return nullptr; }
    return std::make_shared<RowRange>(local_range(ctx, table_, ctx->Attr<int64_t>("axis")));
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const final {
    const auto* local = dynamic_cast<const RowRange*>(cache);
    const auto& shape = ctx->Tensor4ArgNameAndIndex(table_, 0)->shape_view();
    const int64_t axis = ctx->Attr<int64_t>("axis");
    TableShape table{1, 1, 1, local == nullptr ? 0 : local->range.first};
    if (shape.NumAxes() > 0) {
      table = {shape.Count(0, axis), shape.At(axis), shape.Count(axis + 1), table.first};
    }
    compute(ctx, table, local == nullptr ? table.rows : local->range.total);
  }
  virtual void compute(user_op::KernelComputeContext* ctx, const TableShape& shape,
                       int64_t all_rows) const = 0;

  std::string table_;
};

class GatherKernel final : public TableKernel {
 public:
  GatherKernel() : TableKernel("in") {}

 private:
  void compute(user_op::KernelComputeContext* ctx, const TableShape& shape,
               int64_t all_rows) const override {
    const Indices indices(*ctx->Tensor4ArgNameAndIndex("indices", 0));
    indices.check(all_rows);
    gather_rows(shape, indices, *ctx->Tensor4ArgNameAndIndex("in", 0),
                ctx->Tensor4ArgNameAndIndex("out", 0));
  }
};

template <typename T>
class SegmentSumKernel final : public TableKernel {
 public:
  SegmentSumKernel() : TableKernel("out") {}

 private:
  void compute(user_op::KernelComputeContext* ctx, const TableShape& shape,
               int64_t) const override {
    const Indices segments(*ctx->Tensor4ArgNameAndIndex("segment_ids", 0));
    sum_rows_by_index(shape, segments, input<T>(ctx, "data"), output<T>(ctx, "out"));
  }
};

TableShape embedding_shape(user_op::KernelComputeContext* ctx, const Indices& indices) {
  const auto& weight = ctx->Tensor4ArgNameAndIndex("weight", 0)->shape_view();
  indices.check(weight.At(0));
  return {1, weight.At(0), weight.At(1), 0};
}

class EmbeddingKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const Indices indices(*ctx->Tensor4ArgNameAndIndex("indices", 0));
    gather_rows(embedding_shape(ctx, indices), indices, *ctx->Tensor4ArgNameAndIndex("weight", 0),
                ctx->Tensor4ArgNameAndIndex("out", 0));
  }
};

// Divides each row by how often its index occurs.
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
class EmbeddingGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const Indices indices(*ctx->Tensor4ArgNameAndIndex("indices", 0));
    const TableShape shape = embedding_shape(ctx, indices);
    T* dx = output<T>(ctx, "dx");
    sum_rows_by_index(shape, indices, input<T>(ctx, "dy"), dx, ctx->Attr<int64_t>("padding_idx"));
    if (ctx->Attr<bool>("scale_grad_by_freq")) { divide_by_frequency(shape, indices, dx); }
  }
};

REGISTER_KERNEL("gather", make<GatherKernel>, is_movable_on_cpu("in"));
REGISTER_KERNELS(SegmentSumKernel, float, Bfloat16)("unsorted_segment_sum", "out");
REGISTER_KERNELS(SegmentSumKernel, float, double, Bfloat16)("unsorted_segment_sum_like", "out");
REGISTER_KERNEL("embedding", make<EmbeddingKernel>, is_movable_on_cpu("weight"));
REGISTER_KERNELS(EmbeddingGradKernel, float, Bfloat16)("embedding_grad", "weight");

}  // namespace

}  // namespace oneflow_accel
