// Every kernel that matches on the CPU, OneFlow's and the plug-in's, again for the device: the same
// kernel, in contexts that say "CPU" and give the host's view of device memory. So the library is
// loaded after the CPU plug-in.
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "emulated/emulated.h"
#include "oneflow/core/common/protobuf.h"
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

class HostTensor final : public Tensor {
 public:
  explicit HostTensor(Tensor* tensor) : tensor(tensor) {}
  ShapeView shape_view() const override { return tensor->shape_view(); }
  MutShapeView mut_shape_view() override { return tensor->mut_shape_view(); }
  const Stride& stride() const override { return tensor->stride(); }
  DataType data_type() const override { return tensor->data_type(); }
  const MemoryCase& mem_case() const override {
    static const MemoryCase host = [] {
      MemoryCase memory;
      memory.set_device_type(DeviceType::kCPU);
      memory.set_device_id(0);
      return memory;
    }();
    return host;
  }
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
    ComputeOnCpu on_cpu(*ctx);
    kernel_->Compute(&on_cpu, state, cache);
  }

 protected:
  const std::unique_ptr<const OpKernel> kernel_;

 private:
  using OpKernel::Compute;
};

// OneFlow asks a kernel for a state or a cache only if its class has functions for them.
class DelegatingKernelWithState final : public DelegatingKernel {
 public:
  using DelegatingKernel::DelegatingKernel;
  std::shared_ptr<OpKernelState> CreateOpKernelState(KernelInitContext* ctx) const override {
    OnCpuBefore<KernelInitContext> on_cpu(*ctx);
    return kernel_->CreateOpKernelState(&on_cpu);
  }
  std::shared_ptr<OpKernelCache> InitOpKernelCache(KernelCacheContext* ctx) const override {
    OnCpuBefore<KernelCacheContext> on_cpu(*ctx);
    return kernel_->InitOpKernelCache(&on_cpu);
  }
  void InitOpKernelCacheWithFlags(KernelCacheContext* ctx, int8_t flag,
                                  std::shared_ptr<OpKernelCache>* cache) const override {
    OnCpuBefore<KernelCacheContext> on_cpu(*ctx);
    kernel_->InitOpKernelCacheWithFlags(&on_cpu, flag, cache);
  }
};

class IsOnDevice final : public hob::BaseExpr<KernelRegContext, bool> {
 public:
  explicit IsOnDevice(IsMatchedHob on_cpu) : on_cpu_(std::move(on_cpu)) {}
  bool get(const KernelRegContext& ctx) const override {
    // The device first: the other asks for more of an operator, which may lack it elsewhere.
    return ctx.device_type() == kDevice && on_cpu_->get(RegistrationOnCpu(ctx));
  }
  std::string DebugStr(const KernelRegContext& ctx, bool display) const override {
    return "on the emulated device, and on a CPU "
           + on_cpu_->DebugStr(RegistrationOnCpu(ctx), display);
  }

 private:
  const IsMatchedHob on_cpu_;
};

OpKernelRegistryResult on_device(const OpKernelRegistryResult& of_cpu) {
  OpKernelRegistryResult own = of_cpu;
  own.priority += kPriority;
  own.is_matched_hob = std::make_shared<IsOnDevice>(of_cpu.is_matched_hob);
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
    const bool is_between = name.rfind("eager_", 0) == 0 || name == "send" || name == "recv";
    if (!is_between || !infer) { continue; }
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
    if (op == "copy") { continue; }
    // Operators that have run keep pointers to their kernel's entry: the old ones stay for ever.
    auto& of_cpu = *new std::vector<OpKernelRegistryResult>;
    of_cpu.swap(kernels);
    kernels = of_cpu;
    for (const auto& kernel : of_cpu) { kernels.push_back(on_device(kernel)); }
  }
  infer_streams();
  return true;
}();

}  // namespace

}  // namespace oneflow_accel::emulated
