// fused_tril_scale_softmax_mask_scale and its gradient, float32: causal softmax and dropout with a
// given mask. In each matrix of the last two axes, row i keeps the columns up to i + diagonal.
#include <algorithm>

#include "common/arguments.h"
#include "fused/softmax_rows.h"
#include "random/keep.h"
#include "random/mask_bytes.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// The matrices of the last two axes.
struct Matrices {
  int64_t rows;
  int64_t columns;
  int64_t all_rows;
  int64_t diagonal;

  Matrices(const ::oneflow::ShapeView& shape, int64_t diagonal)
      : rows(shape.At(shape.NumAxes() - 2)),
        columns(shape.At(shape.NumAxes() - 1)),
        all_rows(shape.elem_cnt() / columns),
        diagonal(diagonal) {}

  // How many columns a row keeps; `row` counts through all matrices.
  int64_t kept(int64_t row) const {
    return std::clamp<int64_t>(row % rows + diagonal + 1, 0, columns);
  }
};

class FusedTrilScaleSoftmaxMaskScaleKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* x = ctx->Tensor4ArgNameAndIndex("x", 0);
    const uint8_t* keep = random::mask_bytes(ctx->Tensor4ArgNameAndIndex("mask", 0));
    const float* in = x->dptr<float>();
    float* softmax_y = output(ctx, "softmax_y");
    float* y = output(ctx, "y");
    const float scale = ctx->Attr<float>("tril_scale_value");
    const float fill = ctx->Attr<float>("tril_fill_value");
    const float dropout_scale = ctx->Attr<float>("mask_scale_value");
    const Matrices matrices(x->shape_view(), ctx->Attr<int64_t>("diagonal"));
    const int64_t n = matrices.columns;
    fused::for_each_row(matrices.all_rows, n, [&](int64_t row) {
      const int64_t i = row * n;
      fused::leading_softmax(in + i, matrices.kept(row), scale, fill, softmax_y + i, n);
      random::keep_and_scale(softmax_y + i, keep + i, dropout_scale, y + i, n);
    });
  }
};

class FusedTrilScaleSoftmaxMaskScaleGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* softmax_y = ctx->Tensor4ArgNameAndIndex("softmax_y", 0);
    const uint8_t* keep = random::mask_bytes(ctx->Tensor4ArgNameAndIndex("mask", 0));
    const float* out = softmax_y->dptr<float>();
    const float* dy = input(ctx, "dy");
    float* dx = output(ctx, "dx");
    const float scale = ctx->Attr<float>("tril_scale_value");
    const float dropout_scale = ctx->Attr<float>("mask_scale_value");
    const Matrices matrices(softmax_y->shape_view(), ctx->Attr<int64_t>("diagonal"));
    const int64_t n = matrices.columns;
    fused::for_each_row(matrices.all_rows, n, [&](int64_t row) {
      const int64_t i = row * n;
      random::keep_and_scale(dy + i, keep + i, dropout_scale, dx + i, n);
      fused::leading_softmax_grad(out + i, dx + i, matrices.kept(row), scale, dx + i, n);
    });
  }
};

REGISTER_KERNEL("fused_tril_scale_softmax_mask_scale", make<FusedTrilScaleSoftmaxMaskScaleKernel>,
                is_float32_on_cpu("y"));
REGISTER_KERNEL("fused_tril_scale_softmax_mask_scale_grad",
                make<FusedTrilScaleSoftmaxMaskScaleGradKernel>, is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
