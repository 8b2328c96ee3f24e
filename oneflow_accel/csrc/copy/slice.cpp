// slice (in an nn.Graph and for global tensors; elsewhere it is a view) and slice_grad.
#include <algorithm>
#include <numeric>

#include "common/part.h"
#include "common/threads.h"
#include "copy/strided_copy.h"

namespace oneflow_accel {

namespace {

// Where a slice of an axis of `size` elements begins.
int64_t slice_start(int64_t start, int64_t size) {
  return std::clamp<int64_t>(start < 0 ? start + size : start, 0, size);
}

// Where a global tensor is sliced along an axis that it is split along: what of that axis the
// process holds. Its output is then a term of a sum: 0 where the elements lie in another process.
std::shared_ptr<KernelCache> slice_cache(user_op::KernelCacheContext* ctx) {
  if (ctx->parallel_ctx().parallel_num() == 1) { return nullptr; }
  std::vector<int64_t> axes(ctx->LogicalTensorDesc4ArgNameAndIndex("x", 0)->shape().NumAxes());
  std::iota(axes.begin(), axes.end(), 0);
  auto ranges = local_ranges(ctx, "x", axes);
  const auto& sbp = ctx->NdSbp4ArgNameAndIndex("y", 0).sbp_parallel();
  for (const int64_t axis : axes) {
    LocalRange& range = ranges->of_axes[axis];
    // Split on both sides: OneFlow does so only where the whole axis is taken.
    if (std::any_of(sbp.begin(), sbp.end(), [=](const auto& one) { return is_split(one, axis); })) {
      range = {0, range.size, range.size};
    }
  }
  return ranges;
}

void slice_kernel(Context* ctx, const KernelCache* cache) {
  const auto* x = argument(ctx, "x");
  auto* y = argument(ctx, "y");
  const auto& start = ctx->Attr<std::vector<int64_t>>("start");
  const auto& step = ctx->Attr<std::vector<int64_t>>("step");
  const auto to = contiguous_strides(y->shape_view());
  std::vector<CopyDim> dims;
  int64_t source = 0;
  int64_t destination = 0;
  bool whole = true;
  for (std::size_t k = 0; k < to.size(); ++k) {
    const LocalRange range = range_in(cache, k, x->shape_view().At(k));
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

void slice_grad_kernel(Context* ctx) {
  const auto* dy = argument(ctx, "dy");
  auto* dx = argument(ctx, "dx");
  const auto& start = ctx->Attr<std::vector<int64_t>>("start");
  const auto& step = ctx->Attr<std::vector<int64_t>>("step");
  const auto from = contiguous_strides(dy->shape_view());
  const auto to = contiguous_strides(dx->shape_view());
  std::vector<CopyDim> dims;
  int64_t destination = 0;
  for (std::size_t k = 0; k < to.size(); ++k) {
    destination += slice_start(start[k], dx->shape_view().At(k)) * to[k];
    // One element of a vector arrives as a 0-d dy.
    if (k < from.size()) { dims.push_back({dy->shape_view().At(k), from[k], step[k] * to[k]}); }
  }
  zero_fill(dx);
  copy_elements(*dy, dx, std::move(dims), 0, destination);
}

REGISTER_KERNEL("slice", kernel(slice_kernel, slice_cache), is_movable_on_cpu("x"));
REGISTER_KERNEL("slice_grad", kernel(slice_grad_kernel), is_movable_on_cpu("dy"));

}  // namespace

}  // namespace oneflow_accel
