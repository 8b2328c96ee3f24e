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

struct Heads {
  int64_t sequence;
  int64_t count;
  int64_t size;
  // From one position of the sequence to the next.
  int64_t stride;

  Heads(const ::oneflow::ShapeView& hidden_states, int64_t size)
      : sequence(hidden_states.At(0)),
        count(hidden_states.Count(1) / (3 * size)),
        size(size),
        stride(hidden_states.Count(1)) {}

  // Calls fn(head, where its query is in hidden_states, threads), in parallel.
  template <typename Fn>
  void for_each(const Fn& fn) const {
    for_each_matrix(count, sequence * sequence * size,
                    [&](int64_t head, int threads) { fn(head, head * 3 * size, threads); });
  }
};

class SelfAttentionKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const ThreadScope threads;
    const auto& shape = ctx->Tensor4ArgNameAndIndex("hidden_states", 0)->shape_view();
    const float* hidden = input(ctx, "hidden_states");
    float* product = output(ctx, "query_mul_key");
    float* value = output(ctx, "value");
    const auto alpha = ctx->Attr<float>("alpha");
    const Heads heads(shape, ctx->Attr<int64_t>("head_size"));
    const int64_t n = heads.sequence;
    run_or_throw([&] { return "fused_self_attention of " + shape.ToString(); }, [&] {
      heads.for_each([&](int64_t head, int64_t at, int head_threads) {
        const Matrix query{hidden + at, heads.stride};
        const Matrix key{hidden + at + heads.size, heads.stride, true};
        sgemm(n, n, heads.size, alpha, query, key, false, product + head * n * n, n, head_threads);
        copy_rows(hidden + at + 2 * heads.size, heads.stride, n, heads.size, 1.0F,
                  value + head * n * heads.size, heads.size);
      });
    });
  }
};

class SelfAttentionGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const ThreadScope threads;
    const auto& shape = ctx->Tensor4ArgNameAndIndex("hidden_states", 0)->shape_view();
    const float* hidden = input(ctx, "hidden_states");
    const float* value_grad = input(ctx, "value_grad");
    const float* product_grad = input(ctx, "query_mul_key_grad");
    float* hidden_grad = output(ctx, "hidden_states_grad");
    const auto alpha = ctx->Attr<float>("alpha");
    const Heads heads(shape, ctx->Tensor4ArgNameAndIndex("value_grad", 0)->shape_view().At(3));
    const int64_t n = heads.sequence;
    run_or_throw([&] { return "gradient of fused_self_attention of " + shape.ToString(); }, [&] {
      heads.for_each([&](int64_t head, int64_t at, int head_threads) {
        const float* grad = product_grad + head * n * n;
        const Matrix query{hidden + at, heads.stride};
        const Matrix key{hidden + at + heads.size, heads.stride};
        float* dx = hidden_grad + at;
        sgemm(n, heads.size, n, alpha, {grad, n}, key, false, dx, heads.stride, head_threads);
        sgemm(n, heads.size, n, alpha, {grad, n, true}, query, false, dx + heads.size, heads.stride,
              head_threads);
        copy_rows(value_grad + head * n * heads.size, heads.size, n, heads.size, 1.0F,
                  dx + 2 * heads.size, heads.stride);
      });
    });
  }
};

REGISTER_KERNEL("fused_self_attention_query_mul_key_and_value", make<SelfAttentionKernel>,
                is_float32_on_cpu("hidden_states"));
REGISTER_KERNEL("fused_self_attention_query_mul_key_and_value_grad", make<SelfAttentionGradKernel>,
                is_float32_on_cpu("hidden_states"));

}  // namespace

}  // namespace oneflow_accel
