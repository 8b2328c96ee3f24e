// OneFlow's primitives. Kernels are delegated whole (kernels.cpp), so that the device has only those
// that OneFlow itself calls; the others say that there are none, as an unregistered one ends the
// process.
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "emulated/emulated.h"
#include "oneflow/core/ep/include/primitive/add.h"
#include "oneflow/core/ep/include/primitive/batch_matmul.h"
#include "oneflow/core/ep/include/primitive/broadcast_elementwise_binary.h"
#include "oneflow/core/ep/include/primitive/broadcast_elementwise_unary.h"
#include "oneflow/core/ep/include/primitive/broadcast_matmul.h"
#include "oneflow/core/ep/include/primitive/cast.h"
#include "oneflow/core/ep/include/primitive/constant_pad.h"
#include "oneflow/core/ep/include/primitive/copy_nd.h"
#include "oneflow/core/ep/include/primitive/elementwise_unary.h"
#include "oneflow/core/ep/include/primitive/fill.h"
#include "oneflow/core/ep/include/primitive/log_softmax.h"
#include "oneflow/core/ep/include/primitive/log_softmax_backward.h"
#include "oneflow/core/ep/include/primitive/matmul.h"
#include "oneflow/core/ep/include/primitive/memcpy.h"
#include "oneflow/core/ep/include/primitive/memset.h"
#include "oneflow/core/ep/include/primitive/permute.h"
#include "oneflow/core/ep/include/primitive/softmax.h"
#include "oneflow/core/ep/include/primitive/softmax_backward.h"
#include "oneflow/core/ep/include/primitive/tensor_fill.h"

namespace oneflow_accel::emulated {

namespace {

using namespace ep::primitive;

// Gives the stream `work`, which writes `bytes` at `to`. It is left out where that memory is not
// there; what the CPU's kernels keep of these bytes is old.
void write(ep::Stream* stream, void* to, std::size_t bytes, const std::function<void()>& work) {
  run(stream, [=] {
    const auto count = static_cast<int64_t>(bytes);
    host().drop_copies(host_view(to), count);
    if (host().may_write(host_view(to), count)) { work(); }
  });
}

struct OwnMemcpy final : Memcpy {
  explicit OwnMemcpy(MemcpyKind kind) : kind(kind) {}
  // On a card, a direction that is wrong is an error or, worse, none.
  void check(const char* name, const void* to, bool to_device, const void* from,
             bool from_device) const {
    CHECK(is_on_device(to) == to_device && is_on_device(from) == from_device)
        << "a copy " << name << " of an emulated device, from "
        << (is_on_device(from) ? "device" : "host") << " memory to "
        << (is_on_device(to) ? "device" : "host") << " memory";
  }
  void Launch(ep::Stream* stream, void* to, const void* from, std::size_t bytes) override {
    // Of a tensor without elements, which has no memory.
    if (bytes == 0) { return; }
    switch (kind) {
      case MemcpyKind::kHtoD:
        check("to the device", to, true, from, false);
        count(Counter::kToDevice);
        break;
      case MemcpyKind::kDtoH:
        check("to the host", to, false, from, true);
        count(Counter::kToHost);
        break;
      default: check("on the device", to, true, from, true); count(Counter::kOnDevice);
    }
    write(stream, to, bytes, [=, kind = kind] {
      // Of memory that is not there, nothing is to be had, either.
      if (!host().may_write(host_view(from), static_cast<int64_t>(bytes))) { return; }
      if (kind != MemcpyKind::kDtoD) { pass_link(bytes); }
      std::memcpy(host_view(to), host_view(from), bytes);
    });
  }
  const MemcpyKind kind;
};

struct OwnMemset final : Memset {
  void Launch(ep::Stream* stream, void* data, int value, std::size_t bytes) override {
    write(stream, data, bytes, [=] { std::memset(host_view(data), value, bytes); });
  }
};

// Those below wrap the CPU's, whose results are of this type; CopyNd is told it with each copy. What
// waits in a queue keeps the CPU's: OneFlow makes some for one call.
template <typename Base>
struct AroundCpu : Base {
  std::shared_ptr<Base> cpu;
  DataType type = DataType::kInvalidDataType;
};

struct OwnFill final : AroundCpu<Fill> {
  void Launch(ep::Stream* stream, void* to, Scalar value, std::size_t count) override {
    write(stream, to, count * GetSizeOfDataType(type),
          [=, cpu = cpu] { cpu->Launch(cpu_stream(stream), host_view(to), value, count); });
  }
};

struct OwnCopyNd final : AroundCpu<CopyNd> {
  void Launch(ep::Stream* stream, DataType type, std::size_t dims, void* to,
              const int64_t* to_dims, const int64_t* to_pos, const void* from,
              const int64_t* from_dims, const int64_t* from_pos,
              const int64_t* extent) const override {
    const auto copied = [=](const int64_t* values) {
      return std::vector<int64_t>(values, values + dims);
    };
    const std::size_t bytes = std::accumulate(to_dims, to_dims + dims, GetSizeOfDataType(type),
                                              std::multiplies<std::size_t>());
    write(stream, to, bytes,
          [=, cpu = cpu, to_dims = copied(to_dims), to_pos = copied(to_pos), from_dims = copied(from_dims),
           from_pos = copied(from_pos), extent = copied(extent)] {
            cpu->Launch(cpu_stream(stream), type, dims, host_view(to), to_dims.data(),
                        to_pos.data(), host_view(from), from_dims.data(), from_pos.data(),
                        extent.data());
          });
  }
};

struct OwnAdd final : AroundCpu<Add> {
  using Add::Launch;
  void Launch(ep::Stream* stream, const void* const* terms, std::size_t arity, void* to,
              std::size_t count) override {
    std::vector<const void*> views(terms, terms + arity);
    for (auto& view : views) { view = host_view(view); }
    write(stream, to, count * GetSizeOfDataType(type),
          [=, cpu = cpu] { cpu->Launch(cpu_stream(stream), views.data(), arity, host_view(to), count); });
  }
};

struct OwnCast final : AroundCpu<Cast> {
  void Launch(ep::Stream* stream, const void* from, void* to, std::size_t count) override {
    write(stream, to, count * GetSizeOfDataType(type),
          [=, cpu = cpu] { cpu->Launch(cpu_stream(stream), host_view(from), host_view(to), count); });
  }
};

template <typename Own, typename Factory, typename... Arguments>
std::unique_ptr<Own> around_cpu(DataType result, Arguments... arguments) {
  auto cpu = NewPrimitive<Factory>(DeviceType::kCPU, arguments...);
  if (!cpu) { return nullptr; }
  auto own = std::make_unique<Own>();
  own->cpu = std::move(cpu);
  own->type = result;
  return own;
}

#define REGISTER(name) REGISTER_PRIMITIVE_FACTORY(kDevice, name##Factory, Own##name##Factory)

struct OwnMemcpyFactory final : MemcpyFactory {
  std::unique_ptr<Memcpy> New(MemcpyKind kind) override {
    return std::make_unique<OwnMemcpy>(kind);
  }
};
REGISTER(Memcpy);

struct OwnMemsetFactory final : MemsetFactory {
  std::unique_ptr<Memset> New() override { return std::make_unique<OwnMemset>(); }
};
REGISTER(Memset);

struct OwnFillFactory final : FillFactory {
  std::unique_ptr<Fill> New(DataType type) override {
    return around_cpu<OwnFill, FillFactory>(type, type);
  }
};
REGISTER(Fill);

struct OwnCopyNdFactory final : CopyNdFactory {
  std::unique_ptr<CopyNd> New(std::size_t dims) override {
    return around_cpu<OwnCopyNd, CopyNdFactory>(DataType::kInvalidDataType, dims);
  }
};
REGISTER(CopyNd);

struct OwnAddFactory final : AddFactory {
  std::unique_ptr<Add> New(DataType type) override {
    return around_cpu<OwnAdd, AddFactory>(type, type);
  }
};
REGISTER(Add);

struct OwnCastFactory final : CastFactory {
  std::unique_ptr<Cast> New(DataType from, DataType to) override {
    return around_cpu<OwnCast, CastFactory>(to, from, to);
  }
};
REGISTER(Cast);

// None of these.
#define REGISTER_NONE(name, ...)                                                       \
  struct Own##name##Factory final : name##Factory {                                    \
    std::unique_ptr<name> New(__VA_ARGS__) override { return nullptr; }                \
  };                                                                                   \
  REGISTER(name)
REGISTER_NONE(BatchMatmul, DataType, BlasTransposeType, BlasTransposeType);
REGISTER_NONE(BroadcastMatmul, DataType, BlasTransposeType, BlasTransposeType, std::size_t);
REGISTER_NONE(Matmul, DataType, BlasTransposeType, BlasTransposeType);
REGISTER_NONE(ConstantPad, DataType);
REGISTER_NONE(LogSoftmax, DataType);
REGISTER_NONE(LogSoftmaxBackward, DataType);
REGISTER_NONE(Softmax, DataType);
REGISTER_NONE(SoftmaxBackward, DataType);
REGISTER_NONE(TensorFill, DataType);
REGISTER_NONE(Permute, std::size_t);

#define REGISTER_NONE_WITH_NUMBERS(name, ...)                                          \
  struct Own##name##Factory final : name##Factory {                                    \
    std::unique_ptr<name> New(__VA_ARGS__) override { return nullptr; }                \
    std::unique_ptr<name> New(__VA_ARGS__, Scalar) override { return nullptr; }        \
    std::unique_ptr<name> New(__VA_ARGS__, Scalar, Scalar) override { return nullptr; } \
  };                                                                                   \
  REGISTER(name)
REGISTER_NONE_WITH_NUMBERS(ElementwiseUnary, UnaryOp, DataType, DataType);
REGISTER_NONE_WITH_NUMBERS(BroadcastElementwiseUnary, UnaryOp, DataType, DataType, std::size_t);
REGISTER_NONE_WITH_NUMBERS(BroadcastElementwiseBinary, BinaryOp, DataType, DataType, std::size_t);

}  // namespace

}  // namespace oneflow_accel::emulated
