// tf_max_pool_2d and tf_avg_pool_2d with their gradients: what nn.MaxPool2d and nn.AvgPool2d emit
// for channels last. The averages leave the padding out; the maxima come without their index.
#include <algorithm>

#include "common/arguments.h"
#include "pool/average.h"
#include "pool/maximum.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

int64_t padding_before(user_op::KernelComputeContext* ctx, int axis, int64_t input,
                       int64_t output) {
  const std::string& padding = ctx->Attr<std::string>("padding");
  if (padding == "valid") { return 0; }
  if (padding == "customized") {
    return ctx->Attr<std::vector<int32_t>>("padding_before").at(axis);
  }
  const int64_t kernel = ctx->Attr<std::vector<int32_t>>("pool_size").at(axis);
  const int64_t stride = ctx->Attr<std::vector<int32_t>>("strides").at(axis);
  const int64_t needed = std::max<int64_t>(0, (output - 1) * stride + kernel - input);
  return padding == "same_lower" ? needed - needed / 2 : needed / 2;  // else "same_upper"
}

PoolGeometry tf_geometry(user_op::KernelComputeContext* ctx, const char* x_name,
                         const char* y_name) {
  const auto& x = ctx->Tensor4ArgNameAndIndex(x_name, 0)->shape_view();
  const auto& y = ctx->Tensor4ArgNameAndIndex(y_name, 0)->shape_view();
  const std::string& format = ctx->Attr<std::string>("data_format");
  const int first = format == "channels_last" ? 1 : 2;
  const auto axis = [&](int i) -> SlidingAxis {
    return {ctx->Attr<std::vector<int32_t>>("pool_size").at(i),
            ctx->Attr<std::vector<int32_t>>("strides").at(i),
            padding_before(ctx, i, x.At(first + i), y.At(first + i)), 0, 1};
  };
  return sliding_geometry(x, y, format, axis(0), axis(1));
}

template <typename T>
class TfMaxPoolKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    max_pool(tf_geometry(ctx, "x", "y"), input<T>(ctx, "x"), output<T>(ctx, "y"), nullptr);
  }
};

template <typename T>
class TfMaxPoolGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    max_pool_grad_from_input(tf_geometry(ctx, "dx", "dy"), input<T>(ctx, "x"), input<T>(ctx, "dy"),
                             output<T>(ctx, "dx"));
  }
};

template <typename T>
class TfAveragePoolKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    average_pool(tf_geometry(ctx, "x", "y"), PoolDivisor{0, false}, input<T>(ctx, "x"),
                 output<T>(ctx, "y"));
  }
};

template <typename T>
class TfAveragePoolGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    average_pool_grad(tf_geometry(ctx, "dx", "dy"), PoolDivisor{0, false}, input<T>(ctx, "dy"),
                      output<T>(ctx, "dx"));
  }
};

REGISTER_KERNEL("tf_max_pool_2d", make<TfMaxPoolKernel<float>>, is_float32_on_cpu("y"));
REGISTER_KERNEL("tf_max_pool_2d", make<TfMaxPoolKernel<Bfloat16>>, is_bfloat16_on_cpu("y"));
REGISTER_KERNEL("tf_max_pool_2d_grad", make<TfMaxPoolGradKernel<float>>, is_float32_on_cpu("dx"));
REGISTER_KERNEL("tf_max_pool_2d_grad", make<TfMaxPoolGradKernel<Bfloat16>>,
                is_bfloat16_on_cpu("dx"));
REGISTER_KERNEL("tf_avg_pool_2d", make<TfAveragePoolKernel<float>>, is_float32_on_cpu("y"));
REGISTER_KERNEL("tf_avg_pool_2d", make<TfAveragePoolKernel<Bfloat16>>, is_bfloat16_on_cpu("y"));
REGISTER_KERNEL("tf_avg_pool_2d_grad", make<TfAveragePoolGradKernel<float>>,
                is_float32_on_cpu("dx"));
REGISTER_KERNEL("tf_avg_pool_2d_grad", make<TfAveragePoolGradKernel<Bfloat16>>,
                is_bfloat16_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
