// Class indices.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

#include "common/part.h"

namespace oneflow_accel {

// Labels of type int32 or int64, one for each row.
class Labels {
 public:
  // Of the argument `name`. This process holds the first `here` classes, which are all, or those
  // of the range in the cache `range`. Rows whose label is `ignored` do not count.
  Labels(Context* ctx, const std::string& name, int64_t here, const KernelCache* range = nullptr,
         std::optional<int64_t> ignored = std::nullopt)
      : here_(here), ignored_(ignored) {
    const auto* label = argument(ctx, name);
    data_ = label->raw_dptr();
    is_int64_ = label->data_type() == DataType::kInt64;
    rows_ = label->shape_view().elem_cnt();
    const LocalRange classes = range_in(range, 0, here);
    first_ = classes.first;
    classes_ = classes.total;
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
  int64_t first_;
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
