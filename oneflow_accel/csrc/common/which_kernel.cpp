// Asks OneFlow's kernel registry which kernel an operator would get, for
// `python -m oneflow_accel kernels`.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/oneflow.h"
#include "oneflow/core/framework/user_op_registry_manager.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

thread_local bool plugin_kernels_hidden = false;

// Arguments that are not of the operator's data type, whatever the operator.
bool is_index(const std::string& argument) {
  static const std::vector<std::string> names = {"indices", "index", "label", "target",
                                                 "segment_ids"};
  return std::find(names.begin(), names.end(), argument) != names.end();
}

bool is_mask(const std::string& argument) {
  return argument.find("mask") != std::string::npos || argument == "condition";
}

// What the registry's predicates ask: an operator on the CPU whose tensors are all of one data
// type, but for indices and masks. Predicates that ask for more (attributes, numbers of inputs)
// get an exception.
class Context final : public user_op::KernelRegContext {
 public:
  Context(::oneflow::DataType type, ::oneflow::DataType index, ::oneflow::DataType mask) {
    data_.set_data_type(type);
    index_.set_data_type(index);
    mask_.set_data_type(mask);
    // Some predicates look at the shapes too; one element satisfies them.
    for (auto* tensor : {&data_, &index_, &mask_}) { tensor->set_shape(::oneflow::Shape({1})); }
  }
  ::oneflow::DeviceType device_type() const override { return ::oneflow::DeviceType::kCPU; }
  const ::oneflow::ParallelContext& parallel_ctx() const override {
    throw std::runtime_error("it depends on the placement");
  }
  const user_op::TensorDesc* TensorDesc4ArgNameAndIndex(const std::string& name,
                                                        int32_t) const override {
    return is_index(name) ? &index_ : is_mask(name) ? &mask_ : &data_;
  }
  const std::vector<std::pair<std::string, int32_t>>& inputs() const override { return none_; }
  const std::vector<std::pair<std::string, int32_t>>& outputs() const override { return none_; }
  const user_op::UserOpConfWrapper& user_op_conf() const override {
    throw std::runtime_error("it depends on the operator's inputs");
  }

 protected:
  const std::shared_ptr<const user_op::AttrVal>& Attr4Name(const std::string&) const override {
    throw std::runtime_error("it depends on the operator's attributes");
  }

 private:
  user_op::NaiveTensorDesc data_, index_, mask_;
  std::vector<std::pair<std::string, int32_t>> none_;
};

// The kernel that the registry gives, nullptr where it has none.
const user_op::OpKernelRegistryResult* kernel_for(const std::string& op,
                                                  ::oneflow::DataType type) {
  auto& registry = user_op::UserOpRegistryMgr::Get();
  for (const auto index : {::oneflow::DataType::kInt64, ::oneflow::DataType::kInt32}) {
    for (const auto mask : {::oneflow::DataType::kBool, ::oneflow::DataType::kInt8, type}) {
      const Context context(type, index, mask);
      // Asked first: where there is none, the registry's error message needs a whole operator.
      if (CHECK_JUST(registry.IsOpKernelRegistered(op, context))) {
        return CHECK_JUST(registry.GetOpKernelRegistryResult(op, context));
      }
    }
  }
  return nullptr;
}

// OneFlow's kernel of its own, as if the plug-in had none.
bool has_stock_kernel(const std::string& op, ::oneflow::DataType type) {
  plugin_kernels_hidden = true;
  try {
    const bool found = kernel_for(op, type) != nullptr;
    plugin_kernels_hidden = false;
    return found;
  } catch (...) {
    plugin_kernels_hidden = false;
    throw;
  }
}

}  // namespace

bool plugin_kernels_match() { return !plugin_kernels_hidden; }

}  // namespace oneflow_accel

extern "C" {

// Which kernel runs on the CPU with tensors of a data type (a number of OneFlow's DataType):
// 0 none, 1 OneFlow's own, 2 the plug-in's in place of OneFlow's, 3 the plug-in's, and OneFlow has
// none; -1 it depends on the operator's attributes.
int oneflow_accel_which_kernel(const char* op, int data_type) {
  const auto type = static_cast<::oneflow::DataType>(data_type);
  try {
    const auto* kernel = oneflow_accel::kernel_for(op, type);
    if (kernel == nullptr) { return 0; }
    if (kernel->priority < oneflow_accel::kKernelPriority) { return 1; }
    return oneflow_accel::has_stock_kernel(op, type) ? 2 : 3;
  } catch (const std::exception&) {
    return -1;
  }
}

// All operators that OneFlow knows, the plug-in's own among them, separated by spaces.
const char* oneflow_accel_all_operators() {
  static const std::string names = [] {
    std::vector<std::string> all;
    for (const auto& entry :
         ::oneflow::user_op::UserOpRegistryMgr::Get().GetAllOpRegistryResults()) {
      all.push_back(entry.first);
    }
    std::sort(all.begin(), all.end());
    std::string text;
    for (const std::string& name : all) { text += (text.empty() ? "" : " ") + name; }
    return text;
  }();
  return names.c_str();
}

}  // extern "C"
