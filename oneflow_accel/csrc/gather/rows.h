// Looking up rows of a table, and adding rows up in one: gather, embedding and their gradients.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/oneflow.h"

namespace oneflow_accel {

// Indices of either type that OneFlow has for them.
class Indices {
 public:
  explicit Indices(const ::oneflow::user_op::Tensor& tensor);

  int64_t count() const { return count_; }
  int64_t operator[](int64_t i) const { return wide_ ? wide_[i] : narrow_[i]; }

  // Throws std::out_of_range unless 0 <= each index < size.
  void check(int64_t size) const;

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
void gather_rows(const TableShape& shape, const Indices& indices, std::size_t element_bytes,
                 const void* table, void* out);

// table[o, r] = the sum of data[o, i] over the i with indices[i] == first + r, in their order; all
// other rows become 0. An index equal to `skipped` is left out.
template <typename T>
void sum_rows_by_index(const TableShape& shape, const Indices& indices, const T* data, T* table,
                       int64_t skipped = -1);

// The rows that this process holds of a tensor that may be split over processes, and how many there
// are in all: made once per kernel.
class RowRange final : public ::oneflow::user_op::OpKernelCache {
 public:
  RowRange(int64_t first, int64_t total) : first(first), total(total) {}
  const int64_t first;
  const int64_t total;

  // For the axis named by the attribute "axis" of argument `name`; null for one process.
  static std::shared_ptr<::oneflow::user_op::OpKernelCache> of(
      ::oneflow::user_op::KernelCacheContext* ctx, const std::string& name);
};

}  // namespace oneflow_accel
