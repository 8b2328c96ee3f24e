// slice (in an nn.Graph and for global tensors; elsewhere it is a view) and slice_grad.
#include <algorithm>

#include "common/part.h"
#include "common/threads.h"
#include "copy/strided_copy.h"

namespace oneflow_accel {

namespace {

// Where a global tensor is sliced along an axis that it is split along: what of that axis the
// process holds. Its output is then a term of a sum: 0 where the elements lie in another process.
struct SliceRanges final : user_op::OpKernelCache {
  std::vector<LocalRange> ranges;
};

// Where a slice of an axis of `size` elements begins.
int64_t slice_start(int64_t start, int64_t size) {
  return std::clamp<int64_t>(start < 0 ? start + size : start, 0, size);
}

class SliceKernel final : public Kernel {
 public:
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    if (ctx->parallel_ctx().parallel_num() == 1) { return nullptr; }
    auto cache = std::make_shared<SliceRanges>();
    const auto& sbp = ctx->NdSbp4ArgNameAndIndex("y", 0).sbp_parallel();
    const int64_t rank = ctx->LogicalTensorDesc4ArgNameAndIndex("x", 0)->shape().NumAxes();
    for (int64_t axis = 0; axis < rank; ++axis) {
      LocalRange range = local_range(ctx, "x", axis);
      // Split on both sides: OneFlow does so only where the whole axis is taken.
      if (std::any_of(sbp.begin(), sbp.end(),
                      [=](const auto& one) { return is_split(one, axis); })) {
        range = {0, range.size, range.size};
      }
      cache->ranges.push_back(range);
    }
    return cache;
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const override {
    const auto* x = ctx->Tensor4ArgNameAndIndex("x", 0);
    auto* y = ctx->Tensor4ArgNameAndIndex("y", 0);
    const auto& start = ctx->Attr<std::vector<int64_t>>("start");
    const auto& step = ctx->Attr<std::vector<int64_t>>("step");
    const auto to = contiguous_strides(y->shape_view());
    std::vector<CopyDim> dims;
    int64_t source = 0;
    int64_t destination = 0;
    bool whole = true;
    for (std::size_t k = 0; k < to.size(); ++k) {
      const int64_t size = x->shape_view().At(k);
      const LocalRange range =
          cache ? dynamic_cast<const SliceRanges&>(*cache).ranges[k] : LocalRange{0, size, size};
      const int64_t begin = slice_start(start[k], range.total);
      // Elements [first, last) of y's axis lie in this process.
      const int64_t first = ceil_div(std::max<int64_t>(range.first - begin, 0), step[k]);
      const int64_t last =
          std::min(y->shape_view().At(k),
                   ceil_div(std::max<int64_t>(range.first + range.size - begin, 0), step[k]));
      source += (begin + first * step[k] - range.first) * x->stride().at(k);
      destination += first * to[k];
      whole = whole && last - first == y->shape_view().At(k);
      dims.push_back({std::max<int64_t>(last - first, 0), step[k] * x->stride().at(k), to[k]});
    }
    if (!whole) { zero_fill(y); }
    copy_elements(*x, y, std::move(dims), source, destination);
  }
};

class SliceGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* dy = ctx->Tensor4ArgNameAndIndex("dy", 0);
    auto* dx = ctx->Tensor4ArgNameAndIndex("dx", 0);
    const auto& start = ctx->Attr<std::vector<int64_t>>("start");
    const auto& step = ctx->Attr<std::vector<int64_t>>("step");
    const auto from = contiguous_strides(dy->shape_view());
    const auto to = contiguous_strides(dx->shape_view());
    std::vector<CopyDim> dims;
    int64_t destination = 0;
    for (std::size_t k = 0; k < to.size(); ++k) {
      destination += slice_start(start[k], dx->shape_view().At(k)) * to[k];
      // One element of a vector arrives as a 0-d dy.
      if (k < from.size()) {
        dims.push_back({dy->shape_view().At(k), from[k], step[k] * to[k]});
      }
    }
    zero_fill(dx);
    copy_elements(*dy, dx, std::move(dims), 0, destination);
  }
};

REGISTER_KERNEL("slice", make<SliceKernel>, is_movable_on_cpu("x"));
REGISTER_KERNEL("slice_grad", make<SliceGradKernel>, is_movable_on_cpu("dy"));

}  // namespace

}  // namespace oneflow_accel
