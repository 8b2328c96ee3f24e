// fused_matmul_bias, float32 and bfloat16: a linear layer. OneFlow has it on CUDA only.
#include "common/guard.h"
#include "common/threads.h"
#include "matmul/product.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// out (..., N) = x (..., K) weight (N, K)^T + bias (N).
template <typename T>
class FusedMatmulBiasKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* x = ctx->Tensor4ArgNameAndIndex("x", 0);
    const auto* weight = ctx->Tensor4ArgNameAndIndex("weight", 0);
    const auto* bias = ctx->Tensor4ArgNameAndIndex("bias", 0);
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    if (out->shape_view().elem_cnt() == 0) { return; }
    const ThreadScope threads;
    Product product;
    product.b = padded_shape(*weight, 2);
    product.transpose_b = true;
    const int64_t rows = out->shape_view().elem_cnt() / product.b[0];
    product.a = {rows, product.b[1]};
    product.out = {rows, product.b[0]};
    load_addend(ctx, out, &product);
    run_or_throw([&] { return product.describe(); }, [&] {
      multiply(product, static_cast<const T*>(x->raw_dptr()),
               static_cast<const T*>(weight->raw_dptr()), static_cast<const T*>(bias->raw_dptr()),
               static_cast<T*>(out->mut_raw_dptr()));
    });
  }
};

REGISTER_KERNEL("fused_matmul_bias", make<FusedMatmulBiasKernel<float>>, is_float32_on_cpu("out"),
                in_place("out", "_add_to_output"));
REGISTER_KERNEL("fused_matmul_bias", make<FusedMatmulBiasKernel<Bfloat16>>,
                is_bfloat16_on_cpu("out"), in_place("out", "_add_to_output"));

}  // namespace

}  // namespace oneflow_accel
