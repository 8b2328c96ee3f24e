// tril (float32) and fused_scale_tril (float32 and float64): in each matrix of the last two axes,
// row i keeps the columns up to i + diagonal, times a scale; a fill value stands in the rest.
#include <algorithm>

#include "common/oneflow.h"
#include "softmax/row_set.h"

namespace oneflow_accel {

namespace {

template <typename T>
void tril_kernel(Context* ctx) {
  const T* x = input<T>(ctx, "in");
  T* y = output<T>(ctx, "out");
  const T fill = scalar_attr<T>(ctx, "fill_value");
  const T scale = ctx->op_type_name() == "tril" ? T{1} : scalar_attr<T>(ctx, "scale_value");
  const RowSet rows(ctx, "in");
  const auto columns = columns_seen(ctx, "in");
  rows.for_each(1, [=](int64_t row, int64_t first) {
    const int64_t seen = columns(row);
    std::transform(x + first, x + first + seen, y + first, [=](T value) { return value * scale; });
    std::fill(y + first + seen, y + first + rows.n, fill);
  });
}

REGISTER_TYPED_KERNELS((float), tril_kernel, "tril", "out");
REGISTER_TYPED_KERNELS((float, double), tril_kernel, "fused_scale_tril", "out");

}  // namespace

}  // namespace oneflow_accel
