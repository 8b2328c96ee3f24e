// Class indices, and which classes of a global tensor a process holds.
#pragma once

#include <memory>

#include "common/oneflow.h"

namespace oneflow_accel {

// Labels of type int32 or int64, one for each row.
class Labels {
 public:
  // `classes` is the number of classes in all, also where this process holds some of them.
  Labels(const ::oneflow::user_op::Tensor* label, int64_t classes)
      : data_(label->raw_dptr()),
        is_int64_(label->data_type() == ::oneflow::DataType::kInt64),
        classes_(classes) {}

  int64_t at(int64_t row) const {
    return is_int64_ ? static_cast<const int64_t*>(data_)[row]
                     : static_cast<const int32_t*>(data_)[row];
  }

  // Throws std::out_of_range where the label is not the index of a class.
  int64_t checked(int64_t row) const {
    const int64_t label = at(row);
    if (label < 0 || label >= classes_) { fail(row); }
    return label;
  }

 private:
  [[noreturn]] void fail(int64_t row) const;

  const void* data_;
  bool is_int64_;
  int64_t classes_;
};

// Matches labels of the types that Labels reads.
inline auto is_label(const std::string& name) {
  namespace user_op = ::oneflow::user_op;
  return user_op::HobDataType(name, 0) == ::oneflow::DataType::kInt32
         || user_op::HobDataType(name, 0) == ::oneflow::DataType::kInt64;
}

// Which classes this process holds of a global tensor that is split along its last axis.
class ClassRange final : public ::oneflow::user_op::OpKernelCache {
 public:
  ClassRange(int64_t begin, int64_t classes) : begin(begin), classes(classes) {}

  const int64_t begin;    // the first class here
  const int64_t classes;  // the number of classes in all
};

// The range of argument `name`, or null where each process holds all classes.
std::shared_ptr<ClassRange> class_range(::oneflow::user_op::KernelCacheContext* ctx,
                                        const std::string& name);

}  // namespace oneflow_accel
