// Class indices, and which classes of a global tensor a process holds.
#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "common/part.h"

namespace oneflow_accel {

// Which classes this process holds of a global tensor that is split along its last axis.
struct ClassRange final : user_op::OpKernelCache {
  ClassRange(user_op::KernelCacheContext* ctx, const std::string& name) {
    const auto& shape = ctx->LogicalTensorDesc4ArgNameAndIndex(name, 0)->shape();
    const LocalRange range = local_range(ctx, name, shape.NumAxes() - 1);
    classes = range.total;
    begin = range.first;
  }

  int64_t begin;    // the first class here
  int64_t classes;  // the number of classes in all
};

// Labels of type int32 or int64, one for each row.
class Labels {
 public:
  // Of the argument `name`. This process holds the first `here` classes, which are all, or those
  // that `range`, a ClassRange, says. Rows whose label is `ignored` do not count.
  Labels(user_op::KernelComputeContext* ctx, const std::string& name, int64_t here,
         const user_op::OpKernelCache* range = nullptr,
         std::optional<int64_t> ignored = std::nullopt)
      : here_(here), classes_(here), ignored_(ignored) {
    const auto* label = ctx->Tensor4ArgNameAndIndex(name, 0);
    data_ = label->raw_dptr();
    is_int64_ = label->data_type() == DataType::kInt64;
    rows_ = label->shape_view().elem_cnt();
    if (range != nullptr) {
      first_ = static_cast<const ClassRange*>(range)->begin;
      classes_ = static_cast<const ClassRange*>(range)->classes;
    }
  }

  int64_t at(int64_t row) const {
    return is_int64_ ? static_cast<const int64_t*>(data_)[row]
                     : static_cast<const int32_t*>(data_)[row];
  }
  bool counts(int64_t row) const { return !ignored_ || at(row) != *ignored_; }

  // Throws std::out_of_range where the label is not the index of a class.
  int64_t checked(int64_t row) const {
    const int64_t label = at(row);
    if (label < 0 || label >= classes_) {
      throw std::out_of_range("label " + std::to_string(label) + " of row " + std::to_string(row)
                              + " is out of range for " + std::to_string(classes_) + " classes");
    }
    return label;
  }

  // The place of the row's label, checked, among the classes here; -1 where the row does not count
  // or another process holds its class.
  int64_t place(int64_t row) const {
    if (!counts(row)) { return -1; }
    const int64_t label = checked(row) - first_;
    return label >= 0 && label < here_ ? label : -1;
  }

  // Checks all rows that count, before any work is done and so that loops need not.
  void check() const {
    for (int64_t row = 0; row < rows_; ++row) { place(row); }
  }

 private:
  const void* data_;
  bool is_int64_;
  int64_t rows_;
  int64_t first_ = 0;
  int64_t here_;
  int64_t classes_;
  std::optional<int64_t> ignored_;
};

// Matches labels of the types that Labels reads.
inline auto is_label(const std::string& name) {
  return user_op::HobDataType(name, 0) == DataType::kInt32
         || user_op::HobDataType(name, 0) == DataType::kInt64;
}

}  // namespace oneflow_accel
