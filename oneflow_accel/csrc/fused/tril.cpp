// tril (float32) and fused_scale_tril (float32 and float64): in each matrix of the last two axes,
// row i keeps the columns up to i + diagonal, times a scale; a fill value stands in the rest.
#include <algorithm>

#include "common/oneflow.h"
#include "softmax/row_set.h"

namespace oneflow_accel {

namespace {

// An attribute of OneFlow's type Scalar: NAME is floating_NAME or integer_NAME.
template <typename T>
T scalar_attr(user_op::KernelComputeContext* ctx, const std::string& name) {
  return ctx->Attr<bool>("is_floating_" + name)
             ? static_cast<T>(ctx->Attr<double>("floating_" + name))
             : static_cast<T>(ctx->Attr<int64_t>("integer_" + name));
}

template <typename T>
class TrilKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const T* x = input<T>(ctx, "in");
    T* y = output<T>(ctx, "out");
    const T fill = scalar_attr<T>(ctx, "fill_value");
    const T scale = ctx->op_type_name() == "tril" ? T{1} : scalar_attr<T>(ctx, "scale_value");
    const RowSet rows(ctx, "in");
    const auto columns = columns_seen(ctx, "in");
    rows.for_each(1, [=](int64_t row, int64_t first) {
      const int64_t seen = columns(row);
      std::transform(x + first, x + first + seen, y + first,
                     [=](T value) { return value * scale; });
      std::fill(y + first + seen, y + first + rows.n, fill);
    });
  }
};

REGISTER_KERNELS(TrilKernel, float)("tril", "out");
REGISTER_KERNELS(TrilKernel, float, double)("fused_scale_tril", "out");

}  // namespace

}  // namespace oneflow_accel
