// OneFlow's kernel registry: it stays as it is for what has run already, says which operators have
// kernels here, and which kernel an operator would get, for `python -m oneflow_accel kernels`.
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/oneflow.h"
#include "oneflow/core/common/registry_error.h"
#include "oneflow/core/common/singleton.h"
#include "oneflow/core/framework/stream_mgr.h"

// How many streams OneFlow has: 0 until its first operation, or its first fork, makes one.
extern "C" int oneflow_accel_streams() {
  const auto* manager = ::oneflow::Singleton<::oneflow::StreamMgr>::Get();
  return manager == nullptr ? 0 : static_cast<int>(manager->UniqueStreamSize());
}

namespace oneflow_accel {

namespace {

// The registry shows its kernels one at a time only. An explicit instantiation may name what is
// private.
template <Kernels user_op::UserOpRegistryMgr::*member>
struct PrivateKernels {
  friend Kernels& kernels_of(user_op::UserOpRegistryMgr& manager) { return manager.*member; }
};
Kernels& kernels_of(user_op::UserOpRegistryMgr& manager);
template struct PrivateKernels<&user_op::UserOpRegistryMgr::op_kernel_reg_result_>;

// Keeps the kernels that OneFlow has chosen usable while the plug-in registers its own. An operator
// that has run keeps pointers to its kernel's entry in the registry's vector
// (StatefulOpKernel::ChooseOpKernel in oneflow 0.9.0). One more kernel for that operator can move
// the vector's entries, and the operator's next run would read freed memory. So, before the first
// kernel of the plug-in is registered, the vectors get new storage, and the old one stays for ever.
// 101: before the registrations, which have no priority.
__attribute__((constructor(101))) void keep_entries_where_they_are() {
  if (oneflow_accel_streams() == 0) { return; }
  auto& kept = *new std::vector<Kernels::mapped_type>;
  for (auto& [name, entries] : all_kernels()) {
    auto copy = entries;
    entries.swap(copy);
    kept.push_back(std::move(copy));
  }
}

// Above OneFlow's own kernels (0), so that the plug-in's are chosen wherever both match.
constexpr int kKernelPriority = user_op::kKernelPriorityOptimized;

// Operators that have kernels here. A function's static, not a global: kernels register themselves
// while the library is loaded, in no particular order of files.
std::set<std::string>& operators() {
  static std::set<std::string> names;
  return names;
}

std::map<std::string, InPlace>& in_place_pairs() {
  static std::map<std::string, InPlace> pairs;
  return pairs;
}

// Separated by spaces.
std::string joined(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) { text += (text.empty() ? "" : " ") + name; }
  return text;
}

thread_local bool plugin_kernels_hidden = false;

class FunctionKernel final : public Kernel {
 public:
  explicit FunctionKernel(KernelFunction compute) : compute_(std::move(compute)) {}

 private:
  void Compute(Context* ctx) const override { compute_(ctx); }

  const KernelFunction compute_;
};

class CachingKernel final : public Kernel {
 public:
  CachingKernel(CachingFunction compute, MakeCache make_cache)
      : compute_(std::move(compute)), make_cache_(std::move(make_cache)) {}
  std::shared_ptr<KernelCache> InitOpKernelCache(user_op::KernelCacheContext* ctx) const override {
    return make_cache_(ctx);
  }

 private:
  void Compute(Context* ctx, user_op::OpKernelState*, const KernelCache* cache) const override {
    compute_(ctx, cache);
  }

  const CachingFunction compute_;
  const MakeCache make_cache_;
};

// Tells OneFlow, and notes for in_place_of().
void propose(user_op::OpKernelRegistry* kernel, const std::string& op, const InPlace& pair) {
  in_place_pairs()[op] = pair;
  kernel->SetInplaceProposalFn(
      [=](const user_op::InferContext& ctx, const user_op::AddInplaceArgPair& add) {
        if (!ctx.has_input(pair.in, 0)) { return Maybe<void>::Ok(); }
        // One that is broadcast is smaller.
        const int64_t elements = ctx.InputShape(pair.in, 0).elem_cnt();
        if (elements != ctx.OutputShape(pair.out, 0).elem_cnt()) { return Maybe<void>::Ok(); }
        return add(pair.out, 0, pair.in, 0, pair.changes);
      });
}

// Arguments that are not of the operator's data type, whatever the operator.
bool is_index(const std::string& argument) {
  static const std::set<std::string> names{"indices", "index", "label", "target", "segment_ids"};
  return names.count(argument) > 0;
}

bool is_mask(const std::string& argument) {
  return argument.find("mask") != std::string::npos || argument == "condition";
}

// What the registry's predicates ask: an operator on the CPU whose tensors are all of one data
// type, but for indices and masks. Predicates that ask for more (attributes, numbers of inputs)
// get an exception, as do those that ask for a data type where none is given.
class Question final : public user_op::KernelRegContext {
 public:
  Question() = default;
  Question(DataType type, DataType index, DataType mask) : has_types_(true) {
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
    if (!has_types_) { throw std::runtime_error("it depends on the data type"); }
    return is_index(name) ? &index_ : is_mask(name) ? &mask_ : &data_;
  }
  const std::vector<std::pair<std::string, int32_t>>& inputs() const override {
    throw std::runtime_error("it depends on the operator's inputs");
  }
  const std::vector<std::pair<std::string, int32_t>>& outputs() const override {
    throw std::runtime_error("it depends on the operator's outputs");
  }
  const user_op::UserOpConfWrapper& user_op_conf() const override {
    throw std::runtime_error("it depends on the operator's inputs");
  }

 protected:
  const std::shared_ptr<const user_op::AttrVal>& Attr4Name(const std::string&) const override {
    throw std::runtime_error("it depends on the operator's attributes");
  }

 private:
  bool has_types_ = false;
  user_op::NaiveTensorDesc data_, index_, mask_;
};

// The kernel that the registry gives, nullptr where it has none.
const user_op::OpKernelRegistryResult* kernel_for(const std::string& op, DataType type) {
  auto& registry = ::oneflow::user_op::UserOpRegistryMgr::Get();
  for (const auto index : {DataType::kInt64, DataType::kInt32}) {
    for (const auto mask : {DataType::kBool, DataType::kInt8, type}) {
      const Question question(type, index, mask);
      // Asked first: where there is none, the registry's error message needs a whole operator.
      if (CHECK_JUST(registry.IsOpKernelRegistered(op, question))) {
        return CHECK_JUST(registry.GetOpKernelRegistryResult(op, question));
      }
    }
  }
  return nullptr;
}

// Whether OneFlow has a kernel of its own, as if the plug-in had none.
bool has_stock_kernel(const std::string& op, DataType type) {
  struct Hidden {
    Hidden() { plugin_kernels_hidden = true; }
    ~Hidden() { plugin_kernels_hidden = false; }
  } hidden;
  return kernel_for(op, type) != nullptr;
}

}  // namespace

Kernels& all_kernels() { return kernels_of(user_op::UserOpRegistryMgr::Get()); }

bool may_run_on_cpu(const user_op::OpKernelRegistryResult& kernel) {
  try {
    return kernel.is_matched_hob->get(Question());
  } catch (const std::exception&) {
    return true;  // It is for the CPU, and asks for more.
  }
}

user_op::OpKernelCreateFn kernel(KernelFunction compute) {
  return [=] { return user_op::NewOpKernel<FunctionKernel>(compute); };
}

user_op::OpKernelCreateFn kernel(CachingFunction compute, MakeCache make_cache) {
  return [=] { return user_op::NewOpKernel<CachingKernel>(compute, make_cache); };
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream words(text);
  return {std::istream_iterator<std::string>(words), {}};
}

bool register_matching(const std::string& ops, const user_op::OpKernelCreateFn& create,
                       const user_op::IsMatchedHob& match, const InPlace& in_place,
                       const user_op::InferTmpSizeFn& scratch_size) {
  auto& manager = user_op::UserOpRegistryMgr::Get();
  for (const std::string& op : words_of(ops)) {
    operators().insert(op);
    auto made = manager.CheckAndGetOpKernelRegistry(op);
    made.SetCreateFn(create).SetPriority(kKernelPriority);
    if (scratch_size) { made.SetInferTmpSizeFn(scratch_size); }
    if (in_place.out != nullptr) { propose(&made, op, in_place); }
    ::oneflow::CatchRegistryError([&]() -> Maybe<void> {
      auto result = JUST(made.Finish()).GetResult();
      result.is_matched_hob = match;
      return manager.Register(std::move(result));
    });
  }
  return true;
}

InPlace in_place_of(const std::string& op) {
  const auto found = in_place_pairs().find(op);
  return found == in_place_pairs().end() ? InPlace{} : found->second;
}

bool plugin_kernels_match() { return !plugin_kernels_hidden; }

}  // namespace oneflow_accel

extern "C" {

// The operators that have kernels here, sorted, separated by spaces.
const char* oneflow_accel_operators() {
  static const std::string names = oneflow_accel::joined(oneflow_accel::operators());
  return names.c_str();
}

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

// All operators that OneFlow knows, the plug-in's own among them, sorted, separated by spaces.
const char* oneflow_accel_all_operators() {
  static const std::string names = [] {
    std::set<std::string> all;
    auto& registry = ::oneflow::user_op::UserOpRegistryMgr::Get();
    for (const auto& entry : registry.GetAllOpRegistryResults()) { all.insert(entry.first); }
    return oneflow_accel::joined(all);
  }();
  return names.c_str();
}

}  // extern "C"
