// matmul, batch_matmul and broadcast_matmul, float32 and bfloat16.
#include "common/guard.h"
#include "common/threads.h"
#include "matmul/product.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// One kernel for the three operators: they differ in which batch dimensions they take, and here
// any that broadcast are taken.
template <typename T>
class MatmulKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* a = ctx->Tensor4ArgNameAndIndex("a", 0);
    const auto* b = ctx->Tensor4ArgNameAndIndex("b", 0);
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    if (out->shape_view().elem_cnt() == 0) { return; }
    const ThreadScope threads;
    const auto rank = static_cast<std::size_t>(out->shape_view().NumAxes());
    Product product;
    product.a = padded_shape(*a, rank);
    product.b = padded_shape(*b, rank);
    product.out = padded_shape(*out, rank);
    product.transpose_a = ctx->Attr<bool>("transpose_a");
    product.transpose_b = ctx->Attr<bool>("transpose_b");
    product.alpha = static_cast<float>(ctx->Attr<double>("alpha"));
    load_addend(ctx, out, &product);
    run_or_throw([&] { return product.describe(); }, [&] {
      multiply(product, static_cast<const T*>(a->raw_dptr()), static_cast<const T*>(b->raw_dptr()),
               nullptr, static_cast<T*>(out->mut_raw_dptr()));
    });
  }
};

REGISTER_KERNEL("matmul", make<MatmulKernel<float>>, is_float32_on_cpu("out"),
                in_place("out", "_add_to_output"));
REGISTER_KERNEL("batch_matmul", make<MatmulKernel<float>>, is_float32_on_cpu("out"),
                in_place("out", "_add_to_output"));
REGISTER_KERNEL("broadcast_matmul", make<MatmulKernel<float>>, is_float32_on_cpu("out"),
                in_place("out", "_add_to_output"));
REGISTER_KERNEL("matmul", make<MatmulKernel<Bfloat16>>, is_bfloat16_on_cpu("out"),
                in_place("out", "_add_to_output"));
REGISTER_KERNEL("batch_matmul", make<MatmulKernel<Bfloat16>>, is_bfloat16_on_cpu("out"),
                in_place("out", "_add_to_output"));
REGISTER_KERNEL("broadcast_matmul", make<MatmulKernel<Bfloat16>>, is_bfloat16_on_cpu("out"),
                in_place("out", "_add_to_output"));

}  // namespace

}  // namespace oneflow_accel
