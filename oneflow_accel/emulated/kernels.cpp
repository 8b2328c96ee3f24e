// Every kernel that matches on the CPU, OneFlow's and the plug-in's, again for the device: the same
// kernel, in contexts that say "CPU" and give the host's view of device memory. So the library is
// loaded after the CPU plug-in.
#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "emulated/emulated.h"
#include "oneflow/core/common/protobuf.h"
#include "oneflow/core/common/tensor_desc.h"
#include "oneflow/core/framework/attr_value.h"
#include "oneflow/core/framework/device.h"
#include "oneflow/core/framework/stream.h"
#include "oneflow/core/framework/user_op_registry_manager.h"
#include "oneflow/core/job/parallel_desc.h"

namespace oneflow_accel::emulated {

namespace {

using namespace user_op;
using Attribute = std::shared_ptr<const AttrVal>;
using Arguments = std::vector<std::pair<std::string, int32_t>>;
using Kernels = HashMap<std::string, std::vector<OpKernelRegistryResult>>;

// Above those of the plug-in, which are above OneFlow's, and below experimental ones, which OneFlow
// passes over; the order among them stays.
constexpr int kPriority = 2 * kKernelPriorityOptimized;

// What is private or protected; an explicit instantiation may name it.
template <Kernels UserOpRegistryMgr::*member>
struct PrivateKernels {
  friend Kernels& kernels_of(UserOpRegistryMgr& manager) { return manager.*member; }
};
Kernels& kernels_of(UserOpRegistryMgr& manager);
template struct PrivateKernels<&UserOpRegistryMgr::op_kernel_reg_result_>;

#define OPEN(Context)                                                                         \
  template <const Attribute& (Context::*member)(const std::string&) const>                    \
  struct Attribute##Context {                                                                 \
    friend const Attribute& attribute_of(const Context& ctx, const std::string& name) {       \
      return (ctx.*member)(name);                                                             \
    }                                                                                         \
  };                                                                                          \
  const Attribute& attribute_of(const Context& ctx, const std::string& name);                 \
  template struct Attribute##Context<&Context::Attr4Name>;                                    \
  template <const UserOpConfWrapper& (Context::*member)() const>                              \
  struct Conf##Context {                                                                      \
    friend const UserOpConfWrapper& conf_of(const Context& ctx) { return (ctx.*member)(); }   \
  };                                                                                          \
  const UserOpConfWrapper& conf_of(const Context& ctx);                                       \
  template struct Conf##Context<&Context::user_op_conf>
OPEN(KernelRegContext);
OPEN(KernelInitContext);
OPEN(KernelCacheContext);
OPEN(KernelComputeContext);

// The same ranks, of CPUs.
ParallelConf on_cpus(ParallelConf placement) {
  placement.set_device_tag("cpu");
  return placement;
}

// An attribute as the CPU's kernels see it: collectives have their placement there.
class AttributesOnCpu {
 public:
  const Attribute& of(const std::string& name, const Attribute& value) const {
    if (name != "parallel_conf") { return value; }
    ParallelConf placement;
    CHECK(TxtString2PbMessage(
        dynamic_cast<const TypedAttrValIf<std::string>&>(*value).val(),
        &placement));
    placement_ = std::make_shared<TypedAttrVal<std::string>>(
        PbMessage2TxtString(on_cpus(placement)));
    return placement_;
  }

 private:
  mutable Attribute placement_;
};

// What the CPU's kernels see of a context of this device's.
template <typename Context, typename Seen = Context>
class OnCpu : public Context {
 public:
  explicit OnCpu(Seen& ctx) : ctx_(ctx) {}
  DeviceType device_type() const override { return DeviceType::kCPU; }
  const ParallelContext& parallel_ctx() const override { return ctx_.parallel_ctx(); }
  const TensorDesc* TensorDesc4ArgNameAndIndex(const std::string& name,
                                               int32_t index) const override {
    return ctx_.TensorDesc4ArgNameAndIndex(name, index);
  }
  const Arguments& inputs() const override { return ctx_.inputs(); }
  const Arguments& outputs() const override { return ctx_.outputs(); }
  const UserOpConfWrapper& user_op_conf() const override { return conf_of(ctx_); }

 protected:
  const Attribute& Attr4Name(const std::string& name) const override {
    return attributes_.of(name, attribute_of(ctx_, name));
  }
  Seen& ctx_;

 private:
  const AttributesOnCpu attributes_;
};

// Those in which kernels make their states and caches.
template <typename Context>
class OnCpuBefore final : public OnCpu<Context> {
 public:
  using OnCpu<Context>::OnCpu;
  ep::Stream* stream() override { return cpu_stream(this->ctx_.stream()); }
  const SbpParallel& SbpParallel4ArgNameAndIndex(const std::string& name,
                                                 int32_t index) const override {
    return this->ctx_.SbpParallel4ArgNameAndIndex(name, index);
  }
  const TensorDesc* LogicalTensorDesc4ArgNameAndIndex(const std::string& name,
                                                      int32_t index) const override {
    return this->ctx_.LogicalTensorDesc4ArgNameAndIndex(name, index);
  }
  const ParallelDesc& parallel_desc() const override {
    // Symbols stay for ever.
    return *SymbolOf(ParallelDesc(on_cpus(this->ctx_.parallel_desc().parallel_conf())));
  }
  const NdSbp& NdSbp4ArgNameAndIndex(const std::string& name, int32_t index) const override {
    return this->ctx_.NdSbp4ArgNameAndIndex(name, index);
  }
};

const MemoryCase& host_memory() {
  static const MemoryCase host = [] {
    MemoryCase memory;
    memory.set_device_type(DeviceType::kCPU);
    memory.set_device_id(0);
    return memory;
  }();
  return host;
}

class HostTensor final : public Tensor {
 public:
  explicit HostTensor(Tensor* tensor) : tensor(tensor) {}
  ShapeView shape_view() const override { return tensor->shape_view(); }
  MutShapeView mut_shape_view() override { return tensor->mut_shape_view(); }
  const Stride& stride() const override { return tensor->stride(); }
  DataType data_type() const override { return tensor->data_type(); }
  const MemoryCase& mem_case() const override { return host_memory(); }
  const void* raw_dptr() const override { return host_view(tensor->raw_dptr()); }
  void* mut_raw_dptr() override { return host_view(tensor->mut_raw_dptr()); }

  Tensor* const tensor;
};

class ComputeOnCpu final : public OnCpu<KernelComputeContext> {
 public:
  using OnCpu<KernelComputeContext>::OnCpu;
  ep::Stream* stream() override { return cpu_stream(ctx_.stream()); }
  Tensor* Tensor4ArgNameAndIndex(const std::string& name, int32_t index) override {
    Tensor* tensor = ctx_.Tensor4ArgNameAndIndex(name, index);
    if (tensor == nullptr) { return nullptr; }
    for (HostTensor& known : tensors_) {
      if (known.tensor == tensor) { return &known; }
    }
    tensors_.emplace_back(tensor);
    return &tensors_.back();
  }

 private:
  // Their addresses stay.
  std::deque<HostTensor> tensors_;
};

// That in which the registry asks whether a kernel matches.
using RegistrationOnCpu = OnCpu<KernelRegContext, const KernelRegContext>;

// One argument of a launch that waits in a queue: what the kernel may ask for when it runs.
class KeptTensor final : public Tensor {
 public:
  KeptTensor(Tensor* tensor, const TensorDesc* desc)
      : type_(tensor->data_type()), data_(host_view(tensor->mut_raw_dptr())) {
    tensor->shape_view().ToShape(&shape_);
    // Memory for intermediate results has no description, and no stride to ask for.
    if (desc == nullptr) { return; }
    stride_ = tensor->stride();
    desc_.set_shape(desc->shape());
    desc_.set_stride(desc->stride());
    desc_.set_data_type(desc->data_type());
    desc_.set_is_dynamic(desc->is_dynamic());
  }
  ShapeView shape_view() const override { return ShapeView(shape_); }
  MutShapeView mut_shape_view() override {
    throw std::logic_error("a kernel changes a shape after its launch on the emulated device");
  }
  const Stride& stride() const override { return stride_; }
  DataType data_type() const override { return type_; }
  const MemoryCase& mem_case() const override { return host_memory(); }
  const void* raw_dptr() const override { return data_; }
  void* mut_raw_dptr() override { return data_; }
  const TensorDesc* desc() const { return &desc_; }

 private:
  Shape shape_;
  Stride stride_;
  const DataType type_;
  void* const data_;
  NaiveTensorDesc desc_;
};

// What is the same for all launches of a kernel.
struct Launches {
  explicit Launches(const KernelComputeContext& ctx)
      : conf(conf_of(ctx)), inputs(ctx.inputs()), outputs(ctx.outputs()) {
    const auto* op = UserOpRegistryMgr::Get().GetOpRegistryResult(ctx.op_type_name());
    if (op == nullptr) { return; }
    for (const auto& attribute : op->op_def.attr()) { attributes.push_back(attribute.name()); }
  }
  const UserOpConfWrapper conf;
  const Arguments inputs, outputs;
  std::vector<std::string> attributes;
};

// The context of a launch that waits in a queue: a copy of what OneFlow uses again for the next one.
class KeptContext final : public KernelComputeContext {
 public:
  KeptContext(KernelComputeContext& ctx, std::shared_ptr<const Launches> launches)
      : launches_(std::move(launches)),
        stream_(cpu_stream(ctx.stream())),
        parallel_(ctx.parallel_ctx()) {
    for (const auto* arguments : {&launches_->inputs, &launches_->outputs}) {
      for (const auto& [name, index] : *arguments) {
        keep(ctx, name, index, ctx.TensorDesc4ArgNameAndIndex(name, index));
      }
    }
    keep(ctx, kIntermediate, 0, nullptr);
    for (const auto& name : launches_->attributes) {
      attributes_.push_back(attribute_of(ctx, name));
    }
  }

  Tensor* Tensor4ArgNameAndIndex(const std::string& name, int32_t index) override {
    return const_cast<KeptTensor*>(find(name, index));
  }
  const TensorDesc* TensorDesc4ArgNameAndIndex(const std::string& name,
                                               int32_t index) const override {
    const KeptTensor* tensor = find(name, index);
    return tensor == nullptr ? nullptr : tensor->desc();
  }
  ep::Stream* stream() override { return stream_; }
  DeviceType device_type() const override { return DeviceType::kCPU; }
  const ParallelContext& parallel_ctx() const override { return parallel_; }
  const Arguments& inputs() const override { return launches_->inputs; }
  const Arguments& outputs() const override { return launches_->outputs; }
  const UserOpConfWrapper& user_op_conf() const override { return launches_->conf; }
  const Attribute& Attr4Name(const std::string& name) const override {
    const auto& names = launches_->attributes;
    const auto at = std::find(names.begin(), names.end(), name) - names.begin();
    return attributes_.at(at);
  }

 private:
  static constexpr const char* kIntermediate = "tmp_buffer";

  void keep(KernelComputeContext& ctx, const std::string& name, int32_t index,
            const TensorDesc* desc) {
    Tensor* tensor = ctx.Tensor4ArgNameAndIndex(name, index);
    if (tensor != nullptr) { tensors_.emplace_back(name, index, KeptTensor(tensor, desc)); }
  }
  const KeptTensor* find(const std::string& name, int32_t index) const {
    for (const auto& [own_name, own_index, tensor] : tensors_) {
      if (own_index == index && own_name == name) { return &tensor; }
    }
    return nullptr;
  }

  const std::shared_ptr<const Launches> launches_;
  ep::Stream* const stream_;
  const ParallelContext parallel_;
  std::vector<std::tuple<std::string, int32_t, KeptTensor>> tensors_;
  std::vector<Attribute> attributes_;
};

// States and caches of the CPU's kernels, which a launch in a queue keeps.
template <typename Base>
struct Shared final : Base {
  explicit Shared(std::shared_ptr<Base> own) : own(std::move(own)) {}
  static std::shared_ptr<Base> make(std::shared_ptr<Base> own) {
    return own ? std::make_shared<Shared>(std::move(own)) : nullptr;
  }
  const std::shared_ptr<Base> own;
};

std::size_t bytes_of(const Tensor& tensor) {
  return tensor.shape_view().elem_cnt() * GetSizeOfDataType(tensor.data_type());
}

// Between processes: the CPU's kernels talk to OneFlow's threads there, which know each other.
bool is_between_processes(const std::string& op) {
  return op.rfind("eager_", 0) == 0 || op == "send" || op == "recv";
}

class DelegatingKernel : public OpKernel {
 public:
  explicit DelegatingKernel(const OpKernel* kernel) : kernel_(kernel) {}

  bool AlwaysComputeWhenAllOutputsEmpty() const final {
    return kernel_->AlwaysComputeWhenAllOutputsEmpty();
  }
  bool IsKernelLaunchSynchronized() const final { return kernel_->IsKernelLaunchSynchronized(); }
  void InferShape(KernelInferContext* ctx) const final { kernel_->InferShape(ctx); }
  void Compute(KernelComputeContext* ctx, OpKernelState* state,
               const OpKernelCache* cache) const final {
    count(Counter::kLaunches);
    const std::string& op = ctx->op_type_name();
    if (fails(op)) { return run(ctx->stream(), zeros(*ctx)); }
    const auto* shared_state = dynamic_cast<const Shared<OpKernelState>*>(state);
    const auto* shared_cache = static_cast<const Shared<OpKernelCache>*>(cache);
    const OpKernelCache* own_cache = cache == nullptr ? nullptr : shared_cache->own.get();
    const bool is_between = is_between_processes(op);
    // A state that is not the kernel's own is gone after this call, such as that of a generator of
    // random numbers. So is a shape that the kernel writes.
    if (options().is_asynchronous == 0 || is_between || (state != nullptr && shared_state == nullptr)
        || writes_shapes(*ctx)) {
      return run_in_call(ctx->stream(), [&] {
        ComputeOnCpu on_cpu(*ctx);
        if (is_between) { pass_link(bytes_of_inputs(*ctx)); }
        kernel_->Compute(&on_cpu, shared_state == nullptr ? state : shared_state->own.get(),
                         own_cache);
      });
    }
    std::call_once(is_known_, [&] { launches_ = std::make_shared<const Launches>(*ctx); });
    run(ctx->stream(),
        [kernel = kernel_, kept = std::make_shared<KeptContext>(*ctx, launches_),
         own_state = shared_state == nullptr ? nullptr : shared_state->own,
         own_cache = cache == nullptr ? nullptr : shared_cache->own] {
          kernel->Compute(kept.get(), own_state.get(), own_cache.get());
        });
  }

 protected:
  const std::shared_ptr<const OpKernel> kernel_;

 private:
  using OpKernel::Compute;

  static bool writes_shapes(const KernelComputeContext& ctx) {
    for (const auto& [name, index] : ctx.outputs()) {
      const auto* desc = ctx.TensorDesc4ArgNameAndIndex(name, index);
      if (desc != nullptr
          && (desc->is_dynamic() || desc->data_type() == DataType::kTensorBuffer)) {
        return true;
      }
    }
    return false;
  }
  static std::size_t bytes_of_inputs(KernelComputeContext& ctx) {
    std::size_t bytes = 0;
    for (const auto& [name, index] : ctx.inputs()) {
      const auto* tensor = ctx.Tensor4ArgNameAndIndex(name, index);
      if (tensor != nullptr) { bytes += bytes_of(*tensor); }
    }
    return bytes;
  }
  // What a failed launch leaves in its outputs.
  static std::function<void()> zeros(KernelComputeContext& ctx) {
    std::vector<std::pair<void*, std::size_t>> outputs;
    for (const auto& [name, index] : ctx.outputs()) {
      auto* tensor = ctx.Tensor4ArgNameAndIndex(name, index);
      if (tensor == nullptr) { continue; }
      outputs.emplace_back(host_view(tensor->mut_raw_dptr()), bytes_of(*tensor));
    }
    return [outputs] {
      for (const auto& [data, bytes] : outputs) { std::memset(data, 0, bytes); }
    };
  }

  mutable std::once_flag is_known_;
  mutable std::shared_ptr<const Launches> launches_;
};

// OneFlow asks a kernel for a state or a cache only if its class has functions for them.
class DelegatingKernelWithState final : public DelegatingKernel {
 public:
  using DelegatingKernel::DelegatingKernel;
  std::shared_ptr<OpKernelState> CreateOpKernelState(KernelInitContext* ctx) const override {
    OnCpuBefore<KernelInitContext> on_cpu(*ctx);
    auto own = kernel_->CreateOpKernelState(&on_cpu);
    // An nn.Graph's actors know these, and change them before each launch.
    const std::string& op = ctx->op_type_name();
    const bool is_actors = op == "pack" || op == "unpack";
    return is_actors ? own : Shared<OpKernelState>::make(std::move(own));
  }
  std::shared_ptr<OpKernelCache> InitOpKernelCache(KernelCacheContext* ctx) const override {
    OnCpuBefore<KernelCacheContext> on_cpu(*ctx);
    return Shared<OpKernelCache>::make(kernel_->InitOpKernelCache(&on_cpu));
  }
  void InitOpKernelCacheWithFlags(KernelCacheContext* ctx, int8_t flag,
                                  std::shared_ptr<OpKernelCache>* cache) const override {
    constexpr int8_t kNothingChanged =
        OpKernelCache::kShapeNotChanged | OpKernelCache::kAttrNotChanged;
    std::shared_ptr<OpKernelCache> old, own;
    if (*cache) { old = static_cast<Shared<OpKernelCache>&>(**cache).own; }
    // A kernel may change the old one in place, and a launch that waits in a queue has it: where
    // there is a change, it makes a new one.
    if (flag == kNothingChanged) { own = old; }
    OnCpuBefore<KernelCacheContext> on_cpu(*ctx);
    kernel_->InitOpKernelCacheWithFlags(&on_cpu, own ? flag : 0, &own);
    if (!old || own != old) { *cache = Shared<OpKernelCache>::make(std::move(own)); }
  }
};

// The operators that the device whose profile this is has, and the types that they have there; all,
// where there is no profile.
using Types = std::set<DataType>;
HashMap<std::string, Types>& kept() {
  static auto* const operators = new HashMap<std::string, Types>;
  return *operators;
}

// Whether the types of an operator's tensors of floating-point numbers, or that of the first where
// there is none, are among them.
bool has(const std::string& op, const KernelRegContext& ctx) {
  if (kept().empty()) { return true; }
  const auto found = kept().find(op);
  // Between processes, nothing but the device is known when OneFlow asks.
  if (found == kept().end() || is_between_processes(op)) { return found != kept().end(); }
  DataType first = DataType::kInvalidDataType;
  bool has_floating = false;
  for (const auto* arguments : {&ctx.inputs(), &ctx.outputs()}) {
    for (const auto& [name, index] : *arguments) {
      const auto* desc = ctx.TensorDesc4ArgNameAndIndex(name, index);
      if (desc == nullptr) { continue; }
      const DataType type = desc->data_type();
      const bool is_floating = IsFloatingDataType(type) || IsHalfDataType(type);
      if (is_floating && found->second.count(type) == 0) { return false; }
      has_floating = has_floating || is_floating;
      if (first == DataType::kInvalidDataType) { first = type; }
    }
  }
  return has_floating || first == DataType::kInvalidDataType || found->second.count(first) > 0;
}

class IsOnDevice final : public hob::BaseExpr<KernelRegContext, bool> {
 public:
  IsOnDevice(std::string op, IsMatchedHob on_cpu)
      : op_(std::move(op)), on_cpu_(std::move(on_cpu)) {}
  bool get(const KernelRegContext& ctx) const override {
    // The device first: the others ask for more of an operator, which may lack it elsewhere.
    return ctx.device_type() == kDevice && has(op_, ctx) && on_cpu_->get(RegistrationOnCpu(ctx));
  }
  std::string DebugStr(const KernelRegContext& ctx, bool display) const override {
    return "on the emulated device, and on a CPU "
           + on_cpu_->DebugStr(RegistrationOnCpu(ctx), display);
  }

 private:
  const std::string op_;
  const IsMatchedHob on_cpu_;
};

OpKernelRegistryResult on_device(const std::string& op, const OpKernelRegistryResult& of_cpu) {
  OpKernelRegistryResult own = of_cpu;
  own.priority += kPriority;
  own.is_matched_hob = std::make_shared<IsOnDevice>(op, of_cpu.is_matched_hob);
  own.create_fn = [create = of_cpu.create_fn]() -> const OpKernel* {
    const OpKernel* kernel = create();
    if (kernel->has_state_or_cache()) { return NewOpKernel<DelegatingKernelWithState>(kernel); }
    return NewOpKernel<DelegatingKernel>(kernel);
  };
  return own;
}

// Where the output of an operator between processes is: recv has no input, and says it.
Maybe<Symbol<::oneflow::Device>> device_of(DeviceAndStreamInferContext* ctx) {
  if (!ctx->inputs().empty()) {
    const auto& [input, index] = ctx->inputs()[0];
    return ctx->InputTensorDevice4ArgNameAndIndex(input, index);
  }
  return ::oneflow::Device::New(ctx->Attr<std::string>("device_type"), ctx->Attr<int64_t>("device_id"));
}

// The stream that OneFlow runs operators between processes on, which it knows for CPUs and GPUs
// only.
void infer_streams() {
  auto& operators = const_cast<HashMap<std::string, OpRegistryResult>&>(
      UserOpRegistryMgr::Get().GetAllOpRegistryResults());
  for (auto& [name, op] : operators) {
    auto& infer = op.device_and_stream_infer_fn;
    if (!is_between_processes(name) || !infer) { continue; }
    infer = [stock = infer](DeviceAndStreamInferContext* ctx) -> Maybe<Symbol<::oneflow::Stream>> {
      const auto device = JUST(device_of(ctx));
      if (device->enum_type() != kDevice) { return stock(ctx); }
      for (const auto& [output, number] : ctx->outputs()) {
        *ctx->OutputTensorDevice4ArgNameAndIndex(output, number) = device;
      }
      return ::oneflow::Stream::New(device, StreamType::kCcl);
    };
  }
}

// When the library is loaded. Copies between memories are OneFlow's, by the device's primitives.
const bool g_has_kernels = [] {
  for (auto& [op, kernels] : kernels_of(UserOpRegistryMgr::Get())) {
    count(Counter::kOfCpu);
    if (op == "copy") { continue; }
    count(Counter::kHere);
    // Operators that have run keep pointers to their kernel's entry: the old ones stay for ever.
    auto& of_cpu = *new std::vector<OpKernelRegistryResult>;
    of_cpu.swap(kernels);
    kernels = of_cpu;
    for (const auto& kernel : of_cpu) { kernels.push_back(on_device(op, kernel)); }
  }
  infer_streams();
  return true;
}();

}  // namespace

}  // namespace oneflow_accel::emulated

// Before the first operation on a device: of a profile, an operator and the names of its types. False
// where OneFlow does not have it, or a type.
extern "C" bool oneflow_accel_emulated_keep(const char* op, const char* types) {
  using namespace oneflow_accel::emulated;
  static const HashMap<std::string, DataType> known = {
      {"float32", kFloat}, {"float64", kDouble}, {"float16", kFloat16}, {"bfloat16", kBFloat16},
      {"int8", kInt8},     {"uint8", kUInt8},    {"int32", kInt32},     {"int64", kInt64},
      {"bool", kBool}};
  if (user_op::UserOpRegistryMgr::Get().GetOpRegistryResult(op) == nullptr) { return false; }
  std::istringstream words(types);
  for (std::string type; words >> type;) {
    const auto found = known.find(type);
    if (found == known.end()) { return false; }
    kept()[op].insert(found->second);
  }
  return true;
}
