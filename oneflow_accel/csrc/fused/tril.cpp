// tril (float32) and fused_scale_tril (float32 and float64): in each matrix of the last two axes,
// row i keeps the columns up to i + diagonal, times a scale; a fill value stands in the rest.
#include <algorithm>

#include "common/oneflow.h"
#include "common/threads.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// An attribute of OneFlow's type Scalar: NAME is floating_NAME or integer_NAME.
template <typename T>
T scalar_attr(user_op::KernelComputeContext* ctx, const std::string& name) {
  return ctx->Attr<bool>("is_floating_" + name)
             ? static_cast<T>(ctx->Attr<double>("floating_" + name))
             : static_cast<T>(ctx->Attr<int64_t>("integer_" + name));
}

template <typename T>
void scale_tril(user_op::KernelComputeContext* ctx, T scale) {
  const auto* in = ctx->Tensor4ArgNameAndIndex("in", 0);
  const T* x = in->dptr<T>();
  T* y = ctx->Tensor4ArgNameAndIndex("out", 0)->mut_dptr<T>();
  const T fill = scalar_attr<T>(ctx, "fill_value");
  const int64_t diagonal = ctx->Attr<int64_t>("diagonal");
  const auto& shape = in->shape_view();
  const int64_t rows = shape.At(shape.NumAxes() - 2);
  const int64_t columns = shape.At(shape.NumAxes() - 1);
  const int64_t grain = std::max<int64_t>(1, kGrainSize / columns);
  parallel_for(shape.elem_cnt() / columns, grain, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t kept = std::clamp<int64_t>(row % rows + diagonal + 1, 0, columns);
      const T* from = x + row * columns;
      T* to = y + row * columns;
      std::transform(from, from + kept, to, [=](T value) { return value * scale; });
      std::fill(to + kept, to + columns, fill);
    }
  });
}

class TrilKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override { scale_tril(ctx, 1.0F); }
};

template <typename T>
class FusedScaleTrilKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    scale_tril(ctx, scalar_attr<T>(ctx, "scale_value"));
  }
};

REGISTER_KERNEL("tril", make<TrilKernel>, is_float32_on_cpu("out"));
REGISTER_KERNEL("fused_scale_tril", make<FusedScaleTrilKernel<float>>, is_float32_on_cpu("out"));
REGISTER_KERNEL("fused_scale_tril", make<FusedScaleTrilKernel<double>>,
                is_on_cpu("out", ::oneflow::DataType::kDouble));

}  // namespace

}  // namespace oneflow_accel
