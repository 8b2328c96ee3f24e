// eager_ccl_all_gather, _all_reduce, _reduce_scatter and _broadcast between processes of one
// machine: through memory that they share, where OneFlow's go through TCP on the loopback device
// and take milliseconds each.
//
// OneFlow's kernels stay, inside ours: for processes on several machines, and for sums of data
// types that nobody sums up here.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "collective/group.h"
#include "common/all_kernels.h"
#include "common/oneflow.h"
#include "oneflow/core/common/protobuf.h"
#include "oneflow/core/job/parallel_desc.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using ::oneflow::DataType;

int64_t bytes_of(const user_op::Tensor& tensor) {
  return tensor.shape_view().elem_cnt() * ::oneflow::GetSizeOfDataType(tensor.data_type());
}

// Calls sum(in, out, elements of out) on numbers of the tensors' type; false where their sums are
// OneFlow's.
template <typename Sum>
bool with_numbers(user_op::KernelComputeContext* ctx, const Sum& sum) {
  const auto* in = ctx->Tensor4ArgNameAndIndex("in", 0);
  auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
  const int64_t elements = out->shape_view().elem_cnt();
  switch (in->data_type()) {
    case DataType::kFloat: sum(in->dptr<float>(), out->mut_dptr<float>(), elements); return true;
    case DataType::kDouble: sum(in->dptr<double>(), out->mut_dptr<double>(), elements); return true;
    case DataType::kInt32: sum(in->dptr<int32_t>(), out->mut_dptr<int32_t>(), elements); return true;
    case DataType::kInt64: sum(in->dptr<int64_t>(), out->mut_dptr<int64_t>(), elements); return true;
    default: return false;
  }
}

bool all_gather(Group& group, user_op::KernelComputeContext* ctx) {
  const auto* in = ctx->Tensor4ArgNameAndIndex("in", 0);
  auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
  group.all_gather(in->dptr<char>(), out->mut_dptr<char>(), bytes_of(*in));
  return true;
}

bool all_reduce(Group& group, user_op::KernelComputeContext* ctx) {
  return with_numbers(ctx, [&](const auto* in, auto* out, int64_t elements) {
    group.all_reduce(in, out, elements);
  });
}

bool reduce_scatter(Group& group, user_op::KernelComputeContext* ctx) {
  return with_numbers(ctx, [&](const auto* in, auto* out, int64_t elements) {
    group.reduce_scatter(in, out, elements);
  });
}

bool broadcast(Group& group, const std::vector<int64_t>& ranks,
               user_op::KernelComputeContext* ctx) {
  const auto root = std::find(ranks.begin(), ranks.end(), ctx->Attr<int64_t>("root"));
  if (root == ranks.end()) { return false; }
  const int place = static_cast<int>(root - ranks.begin());
  for (int i = 0; i < ctx->input_size("in"); ++i) {
    auto* out = ctx->Tensor4ArgNameAndIndex("out", i);
    const char* in = nullptr;
    if (place == group.index()) { in = ctx->Tensor4ArgNameAndIndex("in", i)->dptr<char>(); }
    group.broadcast(in, out->mut_dptr<char>(), bytes_of(*out), place);
  }
  return true;
}

// Of both kernels; that of OneFlow's is made once for a placement, and so is this one.
struct Cache final : public user_op::OpKernelCache {
  std::vector<int64_t> ranks;
  std::shared_ptr<user_op::OpKernelCache> stock;
};

class Collective final : public user_op::OpKernel {
 public:
  Collective(std::string op, const user_op::OpKernel* stock)
      : op_(std::move(op)), stock_(stock) {}

  bool AlwaysComputeWhenAllOutputsEmpty() const override {
    return stock_->AlwaysComputeWhenAllOutputsEmpty();
  }
  void InitOpKernelCacheWithFlags(user_op::KernelCacheContext* ctx, int8_t flag,
                                  std::shared_ptr<user_op::OpKernelCache>* cache) const override {
    if (*cache != nullptr) { return; }
    auto made = std::make_shared<Cache>();
    ::oneflow::ParallelConf conf;
    CHECK(::oneflow::TxtString2PbMessage(ctx->Attr<std::string>("parallel_conf"), &conf));
    if (ctx->device_type() == ::oneflow::DeviceType::kCPU) {
      made->ranks = ::oneflow::ParallelDesc(conf).parallel_id2machine_id();
    }
    stock_->InitOpKernelCacheWithFlags(ctx, flag, &made->stock);
    *cache = std::move(made);
  }
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState* state,
               const user_op::OpKernelCache* cache) const override {
    const auto& ours = static_cast<const Cache&>(*cache);
    Group* group = ours.ranks.empty() ? nullptr : Group::of(ours.ranks);
    if (group != nullptr && run(*group, ours.ranks, ctx)) { return; }
    stock_->Compute(ctx, state, ours.stock.get());
  }

 private:
  using user_op::OpKernel::Compute;
  bool run(Group& group, const std::vector<int64_t>& ranks,
           user_op::KernelComputeContext* ctx) const {
    if (op_ == "eager_ccl_all_gather") { return all_gather(group, ctx); }
    if (op_ == "eager_ccl_all_reduce") { return all_reduce(group, ctx); }
    if (op_ == "eager_ccl_reduce_scatter") { return reduce_scatter(group, ctx); }
    return broadcast(group, ranks, ctx);
  }

  const std::string op_;
  const std::unique_ptr<const user_op::OpKernel> stock_;
};

// When the library is loaded.
bool wrap_stock_kernels() {
  for (const char* op : {"eager_ccl_all_gather", "eager_ccl_all_reduce",
                         "eager_ccl_reduce_scatter", "eager_ccl_broadcast"}) {
    for (auto& kernel : all_kernels()[op]) {
      kernel.create_fn = [op, create = std::move(kernel.create_fn)]() -> const user_op::OpKernel* {
        return user_op::NewOpKernel<Collective>(op, create());
      };
    }
  }
  return true;
}

const bool g_wrapped = wrap_stock_kernels();

}  // namespace

}  // namespace oneflow_accel
