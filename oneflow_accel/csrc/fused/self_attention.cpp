// fused_self_attention_query_mul_key_and_value and its gradient, float32.
//
// hidden_states is (sequence, batch, heads * 3 * size), where the 3 are query, key and value of one
// head. The operator gives alpha * query key^T, (batch, heads, sequence, sequence), and the value
// as (batch, heads, sequence, size). The parts are multiplied where they lie.
#include "attention/rows.h"
#include "common/oneflow.h"
#include "common/threads.h"
#include "matmul/product.h"

namespace oneflow_accel {

namespace {

struct Projection {
  int64_t sequence;
  int64_t heads;
  // Of a head.
  int64_t size;
  // From one position of the sequence to the next.
  int64_t stride;
  float alpha;
  const float* data;
  std::string text;

  Projection(Context* ctx, int64_t size)
      : size(size), alpha(ctx->Attr<float>("alpha")), data(input(ctx, "hidden_states")) {
    const auto shape = shape_of(ctx, "hidden_states");
    sequence = shape.At(0);
    stride = shape.Count(1);
    heads = stride / (3 * size);
    text = (ctx->has_input("value_grad", 0) ? "gradient of fused_self_attention of "
                                            : "fused_self_attention of ")
           + shape.ToString();
  }

  // Calls fn(head, where its query is, its query, its key, threads), in parallel.
  template <typename Fn>
  void for_each(const Fn& fn) const {
    const ThreadScope scope;
    run_or_throw([&] { return text; }, [&] {
      for_each_matrix(heads, sequence * sequence * size, [&](int64_t head, int threads) {
        const int64_t at = head * 3 * size;
        fn(head, at, Matrix{data + at, stride}, Matrix{data + at + size, stride}, threads);
      });
    });
  }
};

void self_attention_kernel(Context* ctx) {
  const Projection in(ctx, ctx->Attr<int64_t>("head_size"));
  float* product = output(ctx, "query_mul_key");
  float* value = output(ctx, "value");
  const int64_t n = in.sequence;
  in.for_each([&](int64_t head, int64_t at, const Matrix& query, Matrix key, int threads) {
    key.transposed = true;
    sgemm(n, n, in.size, in.alpha, query, key, false, product + head * n * n, n, threads);
    copy_rows(in.data + at + 2 * in.size, in.stride, n, in.size, 1.0F, value + head * n * in.size,
              in.size);
  });
}

void self_attention_grad_kernel(Context* ctx) {
  const Projection in(ctx, shape_of(ctx, "value_grad").At(3));
  const float* value_grad = input(ctx, "value_grad");
  const float* product_grad = input(ctx, "query_mul_key_grad");
  float* hidden_grad = output(ctx, "hidden_states_grad");
  const int64_t n = in.sequence;
  in.for_each([&](int64_t head, int64_t at, const Matrix& query, const Matrix& key, int threads) {
    const float* grad = product_grad + head * n * n;
    float* dx = hidden_grad + at;
    sgemm(n, in.size, n, in.alpha, {grad, n}, key, false, dx, in.stride, threads);
    sgemm(n, in.size, n, in.alpha, {grad, n, true}, query, false, dx + in.size, in.stride, threads);
    copy_rows(value_grad + head * n * in.size, in.size, n, in.size, 1.0F, dx + 2 * in.size,
              in.stride);
  });
}

REGISTER_FLOAT_KERNEL(self_attention_kernel, "fused_self_attention_query_mul_key_and_value",
                      "hidden_states");
REGISTER_FLOAT_KERNEL(self_attention_grad_kernel,
                      "fused_self_attention_query_mul_key_and_value_grad", "hidden_states");

}  // namespace

}  // namespace oneflow_accel
