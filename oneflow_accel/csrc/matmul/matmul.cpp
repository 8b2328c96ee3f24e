// Matrix products, float32 and bfloat16: matmul, batch_matmul and broadcast_matmul, the gradient of
// a matrix that many rows were multiplied with, and a linear layer, which OneFlow has on CUDA only.
#include <algorithm>

#include "common/oneflow.h"
#include "common/threads.h"
#include "matmul/product.h"

namespace oneflow_accel {

namespace {

// The tensor's shape, with ones in front where it has less than `rank` dimensions.
dnnl::memory::dims padded_shape(const user_op::Tensor& tensor, std::size_t rank) {
  const auto& shape = tensor.shape_view();
  dnnl::memory::dims sizes(rank, 1);
  const auto offset = static_cast<int64_t>(rank) - shape.NumAxes();
  for (int64_t i = 0; i < shape.NumAxes(); ++i) { sizes[offset + i] = shape.At(i); }
  return sizes;
}

// The product that the operator computes. One form for three of them, which differ in which batch
// dimensions they take: here any that broadcast are taken. The others are
//   broadcast_matmul_grad_b: out (M, N) = alpha a^T b with a (..., M) and b (..., N), summed over
//     all leading dimensions;
//   fused_matmul_bias: out (..., N) = x (..., K) weight (N, K)^T + bias (N).
Product product_of(Context* ctx, const user_op::Tensor& a, const user_op::Tensor& b,
                   const user_op::Tensor& out) {
  const auto rank = static_cast<std::size_t>(out.shape_view().NumAxes());
  const auto sizes = padded_shape(out, rank);
  const auto alpha = [=] { return static_cast<float>(ctx->Attr<double>("alpha")); };
  if (ctx->op_type_name() == "broadcast_matmul_grad_b") {
    const int64_t rows = a.shape_view().elem_cnt() / sizes[0];
    return {{rows, sizes[0]}, {rows, sizes[1]}, sizes, true, false, alpha()};
  }
  const bool linear = ctx->op_type_name() == "fused_matmul_bias";
  return {padded_shape(a, rank),
          padded_shape(b, rank),
          sizes,
          !linear && ctx->Attr<bool>("transpose_a"),
          linear || ctx->Attr<bool>("transpose_b"),
          linear ? 1.0F : alpha()};
}

template <typename T>
void product_kernel(Context* ctx) {
  const auto* out = argument(ctx, "out");
  const int64_t n = out->shape_view().elem_cnt();
  if (n == 0) { return; }
  const ThreadScope threads;
  const bool linear = ctx->has_input("x", 0);
  const char* a = linear ? "x" : "a";
  const char* b = linear ? "weight" : "b";
  Product product = product_of(ctx, *argument(ctx, a), *argument(ctx, b), *out);
  T* to = output<T>(ctx, "out");
  // OneFlow may have given both one memory.
  const T* addend = input_or_null<T>(ctx, "_add_to_output");
  product.accumulate = addend != nullptr;
  if (product.accumulate && addend != to) {
    parallel_for(n, kGrainSize, [=](int64_t begin, int64_t end) {
      std::copy(addend + begin, addend + end, to + begin);
    });
  }
  run_or_throw([&] { return product.describe(); },
               [&] {
                 multiply(product, input<T>(ctx, a), input<T>(ctx, b),
                          input_or_null<T>(ctx, "bias"), to);
               });
}

REGISTER_KERNELS(product_kernel,
                 "matmul batch_matmul broadcast_matmul broadcast_matmul_grad_b fused_matmul_bias",
                 "out", in_place("out", "_add_to_output"));

}  // namespace

}  // namespace oneflow_accel
