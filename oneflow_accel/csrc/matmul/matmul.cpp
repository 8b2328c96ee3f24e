// Matrix products, float32 and bfloat16: matmul, batch_matmul and broadcast_matmul, the gradient of
// a matrix that many rows were multiplied with, and a linear layer, which OneFlow has on CUDA only.
#include <cstring>

#include "common/arguments.h"
#include "common/guard.h"
#include "common/threads.h"
#include "matmul/product.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// The tensor's shape, with ones in front where it has less than `rank` dimensions.
dnnl::memory::dims padded_shape(const user_op::Tensor& tensor, std::size_t rank) {
  const auto& shape = tensor.shape_view();
  dnnl::memory::dims sizes(rank, 1);
  const auto offset = static_cast<int64_t>(rank) - shape.NumAxes();
  for (int64_t i = 0; i < shape.NumAxes(); ++i) { sizes[offset + i] = shape.At(i); }
  return sizes;
}

// Copies the operator's optional input `_add_to_output` to `out`, unless OneFlow gave both one
// memory. Whether there is one.
bool load_addend(user_op::KernelComputeContext* ctx, user_op::Tensor* out) {
  if (!ctx->has_input("_add_to_output", 0)) { return false; }
  const auto* from = ctx->Tensor4ArgNameAndIndex("_add_to_output", 0)->dptr<char>();
  auto* to = out->mut_dptr<char>();
  const int64_t bytes = out->shape_view().elem_cnt()
                        * static_cast<int64_t>(::oneflow::GetSizeOfDataType(out->data_type()));
  if (from != to) {
    parallel_for(bytes, kGrainSize * static_cast<int64_t>(sizeof(float)),
                 [=](int64_t begin, int64_t end) {
                   std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
                 });
  }
  return true;
}

// One form for three operators: they differ in which batch dimensions they take, and here any that
// broadcast are taken.
struct Batched {
  static constexpr const char* a = "a";
  static constexpr const char* b = "b";
  static Product shapes(user_op::KernelComputeContext* ctx, const user_op::Tensor& a,
                        const user_op::Tensor& b, const user_op::Tensor& out) {
    const auto rank = static_cast<std::size_t>(out.shape_view().NumAxes());
    return {padded_shape(a, rank),
            padded_shape(b, rank),
            padded_shape(out, rank),
            ctx->Attr<bool>("transpose_a"),
            ctx->Attr<bool>("transpose_b"),
            static_cast<float>(ctx->Attr<double>("alpha"))};
  }
};

// out (M, N) = alpha a^T b with a (..., M) and b (..., N), summed over all leading dimensions.
struct GradB {
  static constexpr const char* a = "a";
  static constexpr const char* b = "b";
  static Product shapes(user_op::KernelComputeContext* ctx, const user_op::Tensor& a,
                        const user_op::Tensor&, const user_op::Tensor& out) {
    const auto sizes = padded_shape(out, 2);
    const int64_t rows = a.shape_view().elem_cnt() / sizes[0];
    return {{rows, sizes[0]}, {rows, sizes[1]}, sizes, true, false,
            static_cast<float>(ctx->Attr<double>("alpha"))};
  }
};

// out (..., N) = x (..., K) weight (N, K)^T + bias (N).
struct Linear {
  static constexpr const char* a = "x";
  static constexpr const char* b = "weight";
  static Product shapes(user_op::KernelComputeContext*, const user_op::Tensor&,
                        const user_op::Tensor& weight, const user_op::Tensor& out) {
    const auto sizes = padded_shape(weight, 2);
    const int64_t rows = out.shape_view().elem_cnt() / sizes[0];
    return {{rows, sizes[1]}, sizes, {rows, sizes[0]}, false, true};
  }
};

template <typename T, typename Form>
class ProductKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    if (out->shape_view().elem_cnt() == 0) { return; }
    const ThreadScope threads;
    Product product = Form::shapes(ctx, *ctx->Tensor4ArgNameAndIndex(Form::a, 0),
                                   *ctx->Tensor4ArgNameAndIndex(Form::b, 0), *out);
    product.accumulate = load_addend(ctx, out);
    run_or_throw([&] { return product.describe(); }, [&] {
      multiply(product, input<T>(ctx, Form::a), input<T>(ctx, Form::b),
               input_or_null<T>(ctx, "bias"), output<T>(ctx, "out"));
    });
  }
};

#define REGISTER_PRODUCT(op, Form)                                                             \
  REGISTER_KERNEL(op, (make<ProductKernel<float, Form>>), is_float32_on_cpu("out"),            \
                  in_place("out", "_add_to_output"));                                          \
  REGISTER_KERNEL(op, (make<ProductKernel<Bfloat16, Form>>), is_bfloat16_on_cpu("out"),        \
                  in_place("out", "_add_to_output"))

REGISTER_PRODUCT("matmul", Batched);
REGISTER_PRODUCT("batch_matmul", Batched);
REGISTER_PRODUCT("broadcast_matmul", Batched);
REGISTER_PRODUCT("broadcast_matmul_grad_b", GradB);
REGISTER_PRODUCT("fused_matmul_bias", Linear);

}  // namespace

}  // namespace oneflow_accel
