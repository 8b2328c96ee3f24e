// OneFlow's kernel interface, and the few things that every kernel of the plug-in needs from it.
#pragma once

// Before OneFlow's headers: the wheel's include folder also holds a system include tree.
#include <immintrin.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/bfloat16.h"
#include "oneflow/core/framework/framework.h"
#include "oneflow/core/framework/user_op_registry_manager.h"
#include "oneflow/core/kernel/new_kernel_util.h"

// So that OneFlow's tensors give Bfloat16 by type, as they do their own class for it.
template <>
struct oneflow::GetDataType<oneflow_accel::Bfloat16>
    : std::integral_constant<DataType, DataType::kBFloat16> {};

namespace oneflow_accel {

namespace user_op = ::oneflow::user_op;
using ::oneflow::DataType;
using ::oneflow::Error;
using ::oneflow::Maybe;

// OneFlow's name of T.
template <typename T>
constexpr DataType kDataType = ::oneflow::GetDataType<T>::value;

// The kernels that OneFlow has registered, its own and, once they are registered, the plug-in's, by
// operator: to change them, for which it has no interface.
using Kernels = ::oneflow::HashMap<std::string, std::vector<user_op::OpKernelRegistryResult>>;
Kernels& all_kernels();

// False where a kernel is for other devices.
bool may_run_on_cpu(const user_op::OpKernelRegistryResult& kernel);

// Registers a kernel; its exceptions are caught in failures.cpp.
struct KernelRegistration {
  explicit KernelRegistration(user_op::OpKernelRegistry registry);
};

// Above OneFlow's own kernels (0), so that the plug-in's are chosen wherever both match.
constexpr int kKernelPriority = user_op::kKernelPriorityOptimized;

// Notes that the plug-in has a kernel for `op`, for Python to list, and returns `op`.
const std::string& listed(const std::string& op);

// False while registry.cpp asks what OneFlow would do without the plug-in.
bool plugin_kernels_match();

// Matches operators on the CPU.
inline auto is_on_cpu() {
  return (user_op::HobDeviceType() == ::oneflow::DeviceType::kCPU)
         && ::oneflow::hob::make_custom(
             "the plug-in's kernels match",
             [](const user_op::KernelRegContext&) { return plugin_kernels_match(); });
}

// Those with tensors of one data type; `name` is the argument whose type decides.
inline auto is_on_cpu(const std::string& name, DataType type) {
  return is_on_cpu() && (user_op::HobDataType(name, 0) == type);
}

inline auto is_float32_on_cpu(const std::string& name) { return is_on_cpu(name, kDataType<float>); }

inline auto is_bfloat16_on_cpu(const std::string& name) {
  return is_on_cpu(name, kDataType<Bfloat16>);
}

// A kernel that has nothing to do where all its outputs are empty: all but those whose operators
// have no output.
class Kernel : public user_op::OpKernel {
 public:
  bool AlwaysComputeWhenAllOutputsEmpty() const final { return false; }

 protected:
  using user_op::OpKernel::Compute;
};

// Bytes of a tensor's data.
inline int64_t bytes_of(const user_op::Tensor& tensor) {
  return tensor.shape_view().elem_cnt() * ::oneflow::GetSizeOfDataType(tensor.data_type());
}

// The data of a kernel's arguments by name.
template <typename T = float>
const T* input(user_op::KernelComputeContext* ctx, const std::string& name) {
  return ctx->Tensor4ArgNameAndIndex(name, 0)->dptr<T>();
}

// Also of an input that the kernel changes in place.
template <typename T = float>
T* output(user_op::KernelComputeContext* ctx, const std::string& name) {
  return ctx->Tensor4ArgNameAndIndex(name, 0)->mut_dptr<T>();
}

template <typename T = float>
const T* input_or_null(user_op::KernelComputeContext* ctx, const std::string& name) {
  return ctx->has_input(name, 0) ? input<T>(ctx, name) : nullptr;
}

template <typename T = float>
T* output_or_null(user_op::KernelComputeContext* ctx, const std::string& name) {
  return ctx->has_output(name, 0) ? output<T>(ctx, name) : nullptr;
}

// Calls fn(). An exception becomes one whose text starts with describe(), a string that names the
// operation and its shapes.
template <typename Describe, typename Fn>
void run_or_throw(const Describe& describe, const Fn& fn) {
  try {
    fn();
  } catch (const std::exception& error) {
    throw std::runtime_error(describe() + " failed: " + error.what());
  }
}

// What makes kernels of class T.
template <typename T>
const user_op::OpKernel* make() {
  return user_op::NewOpKernel<T>();
}

// That the output `out` may take the memory of the input `in`, where the operator has that input.
// `changes`: whether the kernel then writes to it.
struct InPlace {
  const char* out = nullptr;
  const char* in = nullptr;
  bool changes = true;
};

inline InPlace in_place(const char* out, const char* in, bool changes = true) {
  return {out, in, changes};
}

// Tells OneFlow, and notes for in_place_of(); `op` has one such pair for all its kernels.
void propose(user_op::OpKernelRegistry* kernel, const std::string& op, const InPlace& pair);

// What was proposed for an operator; without names where nothing was.
InPlace in_place_of(const std::string& op);

// The kernels that `create` makes, for the operator `op` where its tensors match.
template <typename Match>
user_op::OpKernelRegistry registry(const std::string& op, user_op::OpKernelCreateFn create,
                                   const Match& match,
                                   const InPlace& in_place = {},
                                   user_op::InferTmpSizeFn scratch_size = nullptr) {
  auto found = user_op::UserOpRegistryMgr::Get().CheckAndGetOpKernelRegistry(listed(op));
  found.SetCreateFn(std::move(create)).SetIsMatchedHob(match).SetPriority(kKernelPriority);
  if (scratch_size) { found.SetInferTmpSizeFn(std::move(scratch_size)); }
  if (in_place.out != nullptr) { propose(&found, op, in_place); }
  return found;
}

// The operator's kernels for tensors of each of the types: that of the argument `decides`.
template <template <typename> class TypedKernel, typename... T>
std::vector<KernelRegistration> typed_kernels(const char* op, const char* decides,
                                              const InPlace& in_place = {}) {
  return {KernelRegistration(
      registry(op, make<TypedKernel<T>>, is_on_cpu(decides, kDataType<T>), in_place))...};
}

}  // namespace oneflow_accel

// Registers the kernels of registry(...).
#define REGISTER_KERNEL(...) \
  static const ::oneflow_accel::KernelRegistration OF_PP_CAT(g_kernel_registration, __COUNTER__)( \
      ::oneflow_accel::registry(__VA_ARGS__))

// REGISTER_KERNELS(the template, its types)(the operator, the argument that decides, in place).
#define REGISTER_KERNELS(...) \
  static const auto OF_PP_CAT(g_typed_kernels, __COUNTER__) = \
      ::oneflow_accel::typed_kernels<__VA_ARGS__>
