// max_pool_2d and avg_pool_2d with their gradients: what nn.MaxPool2d and nn.AvgPool2d emit for
// channels first, and for channels last with return_indices or a dilation.
#include "common/arguments.h"
#include "pool/average.h"
#include "pool/maximum.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

SlidingAxis sliding_axis(user_op::KernelComputeContext* ctx, int axis, int32_t dilation) {
  const int32_t padding = ctx->Attr<std::vector<int32_t>>("padding").at(axis);
  return {ctx->Attr<std::vector<int32_t>>("kernel_size").at(axis),
          ctx->Attr<std::vector<int32_t>>("stride").at(axis), padding, padding, dilation};
}

// `x` and `y`: names of the arguments that have the input's and the output's shape.
PoolGeometry max_geometry(user_op::KernelComputeContext* ctx, const char* x, const char* y) {
  const auto& dilation = ctx->Attr<std::vector<int32_t>>("dilation");
  return sliding_geometry(ctx->Tensor4ArgNameAndIndex(x, 0)->shape_view(),
                          ctx->Tensor4ArgNameAndIndex(y, 0)->shape_view(),
                          ctx->Attr<std::string>("data_format"),
                          sliding_axis(ctx, 0, dilation.at(0)),
                          sliding_axis(ctx, 1, dilation.at(1)));
}

PoolGeometry average_geometry(user_op::KernelComputeContext* ctx, const char* x, const char* y) {
  return sliding_geometry(ctx->Tensor4ArgNameAndIndex(x, 0)->shape_view(),
                          ctx->Tensor4ArgNameAndIndex(y, 0)->shape_view(),
                          ctx->Attr<std::string>("data_format"), sliding_axis(ctx, 0, 1),
                          sliding_axis(ctx, 1, 1));
}

PoolDivisor average_divisor(user_op::KernelComputeContext* ctx) {
  return {ctx->Attr<int32_t>("divisor_override"), ctx->Attr<bool>("count_include_pad")};
}

template <typename T>
class MaxPoolKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    max_pool(max_geometry(ctx, "x", "y"), input<T>(ctx, "x"), output<T>(ctx, "y"),
             output<int64_t>(ctx, "indice"));
  }
};

template <typename T>
class MaxPoolGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    max_pool_grad(max_geometry(ctx, "dx", "dy"), input<T>(ctx, "dy"), input<int64_t>(ctx, "indice"),
                  output<T>(ctx, "dx"));
  }
};

template <typename T>
class AveragePoolKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    average_pool(average_geometry(ctx, "x", "y"), average_divisor(ctx), input<T>(ctx, "x"),
                 output<T>(ctx, "y"));
  }
};

template <typename T>
class AveragePoolGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    average_pool_grad(average_geometry(ctx, "dx", "dy"), average_divisor(ctx), input<T>(ctx, "dy"),
                      output<T>(ctx, "dx"));
  }
};

REGISTER_KERNEL("max_pool_2d", make<MaxPoolKernel<float>>, is_float32_on_cpu("x"));
REGISTER_KERNEL("max_pool_2d", make<MaxPoolKernel<Bfloat16>>, is_bfloat16_on_cpu("x"));
REGISTER_KERNEL("max_pool_2d_grad", make<MaxPoolGradKernel<float>>, is_float32_on_cpu("dx"));
REGISTER_KERNEL("max_pool_2d_grad", make<MaxPoolGradKernel<Bfloat16>>, is_bfloat16_on_cpu("dx"));
REGISTER_KERNEL("avg_pool_2d", make<AveragePoolKernel<float>>, is_float32_on_cpu("x"));
REGISTER_KERNEL("avg_pool_2d", make<AveragePoolKernel<Bfloat16>>, is_bfloat16_on_cpu("x"));
REGISTER_KERNEL("avg_pool_2d_grad", make<AveragePoolGradKernel<float>>, is_float32_on_cpu("dx"));
REGISTER_KERNEL("avg_pool_2d_grad", make<AveragePoolGradKernel<Bfloat16>>,
                is_bfloat16_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
