// broadcast_matmul_grad_b, float32 and bfloat16: the gradient of a matrix that many rows were multiplied with,
// as the weight of a linear layer is.
#include "common/guard.h"
#include "common/threads.h"
#include "matmul/product.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// out (M, N) = alpha a^T b with a (..., M) and b (..., N), summed over all leading dimensions.
template <typename T>
class BroadcastMatmulGradBKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* a = ctx->Tensor4ArgNameAndIndex("a", 0);
    const auto* b = ctx->Tensor4ArgNameAndIndex("b", 0);
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    if (out->shape_view().elem_cnt() == 0) { return; }
    const ThreadScope threads;
    Product product;
    product.out = padded_shape(*out, 2);
    const int64_t rows = a->shape_view().elem_cnt() / product.m();
    product.a = {rows, product.m()};
    product.b = {rows, product.n()};
    product.transpose_a = true;
    product.alpha = static_cast<float>(ctx->Attr<double>("alpha"));
    load_addend(ctx, out, &product);
    run_or_throw([&] { return product.describe(); }, [&] {
      multiply(product, static_cast<const T*>(a->raw_dptr()), static_cast<const T*>(b->raw_dptr()),
               nullptr, static_cast<T*>(out->mut_raw_dptr()));
    });
  }
};

REGISTER_KERNEL("broadcast_matmul_grad_b", make<BroadcastMatmulGradBKernel<float>>,
                is_float32_on_cpu("out"), in_place("out", "_add_to_output"));
REGISTER_KERNEL("broadcast_matmul_grad_b", make<BroadcastMatmulGradBKernel<Bfloat16>>,
                is_bfloat16_on_cpu("out"), in_place("out", "_add_to_output"));

}  // namespace

}  // namespace oneflow_accel
