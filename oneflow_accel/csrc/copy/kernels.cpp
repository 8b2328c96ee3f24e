// The operators that are one strided copy, or one for each tensor, or fill one.
#include <algorithm>

#include "common/oneflow.h"
#include "common/threads.h"
#include "copy/strided_copy.h"

namespace oneflow_accel {

namespace {

// Copies to the whole of `out`; strides(k) is how far apart the elements of its axis k are in `in`.
template <typename Strides>
void copy_to_all(const user_op::Tensor& in, user_op::Tensor* out, const Strides& strides) {
  const auto to = contiguous_strides(out->shape_view());
  std::vector<CopyDim> dims;
  for (std::size_t k = 0; k < to.size(); ++k) {
    dims.push_back({out->shape_view().At(k), strides(k), to[k]});
  }
  copy_elements(in, out, std::move(dims));
}

// What OneFlow emits in eager mode before an operator reads a view (permute, chunk, slice, expand),
// and for Tensor.contiguous().
void to_contiguous(Context* ctx) {
  const auto* in = argument(ctx, "in");
  copy_to_all(*in, argument(ctx, "out"), [in](std::size_t k) { return in->stride().at(k); });
}

// permute and transpose in an nn.Graph, where OneFlow has no views.
void transpose(Context* ctx) {
  const auto* in = argument(ctx, "input");
  const auto& perm = ctx->Attr<std::vector<int32_t>>("perm");
  const auto from = contiguous_strides(in->shape_view());
  copy_to_all(*in, argument(ctx, "output"), [&](std::size_t k) { return from[perm[k]]; });
}

// Repeats dimensions of size 1, where OneFlow cannot return a view (in an nn.Graph).
void expand(Context* ctx) {
  const auto* in = argument(ctx, "in");
  auto* out = argument(ctx, "out");
  const auto& shape = in->shape_view();
  const auto from = contiguous_strides(shape);
  // Dimensions are matched from the last one on; the leading ones are new.
  const int64_t added = out->shape_view().NumAxes() - shape.NumAxes();
  copy_to_all(*in, out, [&](int64_t k) {
    const bool repeated = k < added || shape.At(k - added) == 1;
    return repeated ? 0 : from[k - added];
  });
}

// The gradient of sums and means, repeated along the axes that they went over.
void broadcast_like(Context* ctx) {
  auto* y = argument(ctx, "y");
  const auto& axes = ctx->Attr<std::vector<int32_t>>("broadcast_axes");
  const int64_t rank = y->shape_view().NumAxes();
  // No axis stands for all of them. x may have these as axes of size 1, or not at all.
  std::vector<bool> repeated(rank, axes.empty());
  for (const int64_t axis : axes) { repeated[axis < 0 ? axis + rank : axis] = true; }
  std::vector<int64_t> from(rank, 0);
  int64_t stride = 1;
  for (int64_t k = rank - 1; k >= 0; --k) {
    if (repeated[k]) { continue; }
    from[k] = stride;
    stride *= y->shape_view().At(k);
  }
  copy_to_all(*argument(ctx, "x"), y, [&](std::size_t k) { return from[k]; });
}

// Takes both tensors as matrices whose rows are the dimensions before `axis`. The one of fewer
// columns is copied, or written, whole, the other from `first` of that axis on. Returns how much of
// the axis that was.
int64_t copy_columns(const user_op::Tensor& in, user_op::Tensor* out, int64_t axis, int64_t first) {
  const int64_t from = in.shape_view().Count(axis);
  const int64_t to = out->shape_view().Count(axis);
  const auto& narrow = from < to ? in.shape_view() : out->shape_view();
  const int64_t column = first * narrow.Count(axis + 1);
  copy_elements(in, out, {{narrow.Count(0, axis), from, to}, {std::min(from, to), 1, 1}},
                from > to ? column : 0, from < to ? column : 0);
  return narrow.At(axis);
}

// cat.
void concat(Context* ctx) {
  int64_t first = 0;
  for (const auto& [name, index] : ctx->inputs()) {
    first += copy_columns(*argument(ctx, name, index), argument(ctx, "out"),
                          ctx->Attr<int64_t>("axis"), first);
  }
}

// chunk and split in an nn.Graph, and the gradient of concat.
void split_like(Context* ctx) {
  int64_t first = 0;
  for (const auto& [name, index] : ctx->outputs()) {
    first += copy_columns(*argument(ctx, "in"), argument(ctx, name, index),
                          ctx->Attr<int64_t>("axis"), first);
  }
}

// A range of one dimension.
void narrow(Context* ctx) {
  copy_columns(*argument(ctx, "in"), argument(ctx, "out"), ctx->Attr<int64_t>("dim"),
               ctx->Attr<int64_t>("start"));
}

void narrow_grad(Context* ctx) {
  auto* dx = argument(ctx, "dx");
  zero_fill(dx);
  copy_columns(*argument(ctx, "dy"), dx, ctx->Attr<int64_t>("dim"), ctx->Attr<int64_t>("start"));
}

// Other shapes of the same data, in an nn.Graph; and what OneFlow's autograd keeps a gradient with,
// at every backward pass a copy of the gradients of all parameters.
void identity(Context* ctx) {
  const auto* in = argument(ctx, "in");
  auto* out = argument(ctx, "out");
  // The gradient of an empty tensor is zero.
  if (in->shape_view().elem_cnt() == 0) { return zero_fill(out); }
  // In nn.Graph they may be one buffer.
  if (in->raw_dptr() == out->raw_dptr()) { return; }
  copy_elements(*in, out, {{out->shape_view().elem_cnt(), 1, 1}});
}

// zeros, ones and full: on all threads, which also share the work of the system that hands out the
// pages.
template <typename T>
void constant(Context* ctx) {
  auto* out = argument(ctx, "out");
  const T value = scalar_attr<T>(ctx, "value");
  T* to = out->mut_dptr<T>();
  parallel_for(out->shape_view().elem_cnt(), kGrainSize, [=](int64_t begin, int64_t end) {
    std::fill(to + begin, to + end, value);
  });
}

void zero_like(Context* ctx) { zero_fill(argument(ctx, "out")); }

REGISTER_KERNEL("to_contiguous", kernel(to_contiguous), is_movable_on_cpu("in"));
REGISTER_KERNEL("transpose", kernel(transpose), is_movable_on_cpu("output"));
REGISTER_KERNEL("expand", kernel(expand), is_movable_on_cpu("in"));
REGISTER_KERNEL("broadcast_like", kernel(broadcast_like), is_movable_on_cpu("y"));
REGISTER_KERNEL("concat", kernel(concat), is_movable_on_cpu("out"));
REGISTER_KERNEL("split_like", kernel(split_like), is_movable_on_cpu("in"));
REGISTER_KERNEL("narrow", kernel(narrow), is_movable_on_cpu("in"));
REGISTER_KERNEL("narrow_grad", kernel(narrow_grad), is_movable_on_cpu("dy"));
REGISTER_KERNEL("identity reshape reshape_like squeeze expand_dims", kernel(identity),
                is_movable_on_cpu("in"), in_place("out", "in", /*changes=*/false));
REGISTER_TYPED_KERNELS((float, double, int64_t), constant, "constant", "out");
REGISTER_KERNEL("zero_like", kernel(zero_like), is_movable_on_cpu("out"));

}  // namespace

}  // namespace oneflow_accel
