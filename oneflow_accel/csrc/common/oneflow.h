// OneFlow's kernel interface, and the few things that every kernel of the plug-in needs from it.
#pragma once

// Before OneFlow's headers: the wheel's include folder also holds a system include tree.
#include <immintrin.h>

#include <exception>
#include <functional>
#include <memory>
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

template <typename T>
constexpr DataType kDataType = ::oneflow::GetDataType<T>::value;

// The kernels that OneFlow has registered, its own and, once they are registered, the plug-in's, by
// operator: to change them, for which it has no interface.
using Kernels = ::oneflow::HashMap<std::string, std::vector<user_op::OpKernelRegistryResult>>;
Kernels& all_kernels();

// False where a kernel is for other devices.
bool may_run_on_cpu(const user_op::OpKernelRegistryResult& kernel);

// False while registry.cpp asks what OneFlow would do without the plug-in.
bool plugin_kernels_match();

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

// What a kernel is called with.
using Context = user_op::KernelComputeContext;
using KernelFunction = std::function<void(Context*)>;

// A kernel that has nothing to do where all its outputs are empty: all but those whose operators
// have no output.
class Kernel : public user_op::OpKernel {
 public:
  bool AlwaysComputeWhenAllOutputsEmpty() const final { return false; }

 protected:
  using user_op::OpKernel::Compute;
};

// What makes kernels of class T.
template <typename T>
const user_op::OpKernel* make() {
  return user_op::NewOpKernel<T>();
}

// What makes kernels that call a function.
user_op::OpKernelCreateFn kernel(KernelFunction compute);

// The same with what `make_cache` gives once for all calls with tensors of one kind.
using KernelCache = user_op::OpKernelCache;
using CachingFunction = std::function<void(Context*, const KernelCache*)>;
using MakeCache = std::function<std::shared_ptr<KernelCache>(user_op::KernelCacheContext*)>;
user_op::OpKernelCreateFn kernel(CachingFunction compute, MakeCache make_cache);

inline int64_t bytes_of(const user_op::Tensor& tensor) {
  return tensor.shape_view().elem_cnt() * ::oneflow::GetSizeOfDataType(tensor.data_type());
}

// A kernel's arguments by name, their shapes and their data.
inline user_op::Tensor* argument(Context* ctx, const std::string& name, int32_t index = 0) {
  return ctx->Tensor4ArgNameAndIndex(name, index);
}

inline ::oneflow::ShapeView shape_of(Context* ctx, const std::string& name) {
  return argument(ctx, name)->shape_view();
}

template <typename T = float>
const T* input(Context* ctx, const std::string& name) {
  return argument(ctx, name)->dptr<T>();
}

// Also of an input that the kernel changes in place.
template <typename T = float>
T* output(Context* ctx, const std::string& name) {
  return argument(ctx, name)->mut_dptr<T>();
}

template <typename T = float>
const T* input_or_null(user_op::KernelComputeContext* ctx, const std::string& name) {
  return ctx->has_input(name, 0) ? input<T>(ctx, name) : nullptr;
}

template <typename T = float>
T* output_or_null(user_op::KernelComputeContext* ctx, const std::string& name) {
  return ctx->has_output(name, 0) ? output<T>(ctx, name) : nullptr;
}

// An attribute of OneFlow's type Scalar: NAME is floating_NAME or integer_NAME.
template <typename T>
T scalar_attr(Context* ctx, const std::string& name) {
  return ctx->Attr<bool>("is_floating_" + name)
             ? static_cast<T>(ctx->Attr<double>("floating_" + name))
             : static_cast<T>(ctx->Attr<int64_t>("integer_" + name));
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

// What was proposed for an operator, one pair for all its kernels; without names where nothing was.
InPlace in_place_of(const std::string& op);

// The words of a text, such as names of operators or arguments.
std::vector<std::string> words_of(const std::string& text);

// Registers what `create` makes for each of the operators `ops`, a name or several, where its
// tensors match. What a kernel throws is caught in failures.cpp. Returns true.
bool register_matching(const std::string& ops, const user_op::OpKernelCreateFn& create,
                       const user_op::IsMatchedHob& match, const InPlace& in_place,
                       const user_op::InferTmpSizeFn& scratch_size);

template <typename Match>
bool register_kernels(const std::string& ops, const user_op::OpKernelCreateFn& create,
                      const Match& match, const InPlace& in_place = {},
                      const user_op::InferTmpSizeFn& scratch_size = nullptr) {
  return register_matching(ops, create, std::make_shared<Match>(match), in_place, scratch_size);
}

// The operators' kernels for tensors of each of the types, that of the argument `decides`:
// function_of(T{}) is what that for T calls.
template <typename... T, typename FunctionOf>
bool register_typed_kernels(const FunctionOf& function_of, const char* ops, const char* decides,
                            const InPlace& in_place = {}) {
  return (...
          && register_kernels(ops, kernel(KernelFunction(function_of(T{}))),
                              is_on_cpu(decides, kDataType<T>), in_place));
}

template <typename... T, typename FunctionOf>
bool register_typed_kernels(const FunctionOf& function_of, const MakeCache& make_cache,
                            const char* ops, const char* decides) {
  return (...
          && register_kernels(ops, kernel(CachingFunction(function_of(T{})), make_cache),
                              is_on_cpu(decides, kDataType<T>)));
}

}  // namespace oneflow_accel

// REGISTER_KERNEL(operators, kernel(...), what they match, in place).
#define REGISTER_KERNEL(...)                                      \
  static const bool OF_PP_CAT(g_kernel_registered, __COUNTER__) = \
      ::oneflow_accel::register_kernels(__VA_ARGS__)

// For float32: REGISTER_FLOAT_KERNEL(function, operators, the argument that decides, in place).
#define REGISTER_FLOAT_KERNEL(function, ops, decides, ...) \
  REGISTER_KERNEL(ops, ::oneflow_accel::kernel(function),  \
                  ::oneflow_accel::is_float32_on_cpu(decides), ##__VA_ARGS__)

// Kernels that call `function<T>`, for each T of the types in parentheses:
// REGISTER_TYPED_KERNELS((float, double), function, operators, the argument that decides, in
// place), or with what makes a cache after the function.
#define ONEFLOW_ACCEL_TYPES(...) __VA_ARGS__
#define REGISTER_TYPED_KERNELS(types, function, ...)                      \
  static const bool OF_PP_CAT(g_kernels_registered, __COUNTER__) =        \
      ::oneflow_accel::register_typed_kernels<ONEFLOW_ACCEL_TYPES types>( \
          [](auto zero) { return function<decltype(zero)>; }, __VA_ARGS__)

// For float32 and bfloat16, as most operators have them.
#define REGISTER_KERNELS(...) \
  REGISTER_TYPED_KERNELS((float, ::oneflow_accel::Bfloat16), __VA_ARGS__)
