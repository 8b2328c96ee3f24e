// fused_self_attention_query_mul_key_and_value and its gradient, float32.
//
// hidden_states is (sequence, batch, heads * 3 * size), where the 3 are query, key and value of one
// head. The operator gives alpha * query key^T, (batch, heads, sequence, sequence), and the value
// as (batch, heads, sequence, size). oneDNN multiplies the parts where they lie.
#include <algorithm>
#include <array>
#include <string>

#include "common/arguments.h"
#include "common/guard.h"
#include "common/onednn.h"
#include "common/threads.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using dnnl::memory;

struct Heads {
  int64_t sequence;
  int64_t batch;
  int64_t heads;
  int64_t size;

  Heads(const ::oneflow::ShapeView& hidden_states, int64_t size)
      : sequence(hidden_states.At(0)),
        batch(hidden_states.At(1)),
        heads(hidden_states.At(2) / (3 * size)),
        size(size) {}

  // From one position of the sequence to the next.
  int64_t position_stride() const { return batch * heads * 3 * size; }

  // Matrices of all heads, (batch * heads, rows, columns), with these strides.
  memory::desc matrices(int64_t rows, int64_t columns, const memory::dims& strides) const {
    return {{batch * heads, rows, columns}, memory::data_type::f32, strides};
  }
  // Query, key or value within hidden_states, (sequence, size), and transposed.
  memory::desc part() const { return matrices(sequence, size, {3 * size, position_stride(), 1}); }
  memory::desc part_transposed() const {
    return matrices(size, sequence, {3 * size, 1, position_stride()});
  }
  // query key^T, (sequence, sequence), and transposed.
  memory::desc product() const {
    return matrices(sequence, sequence, {sequence * sequence, sequence, 1});
  }
  memory::desc product_transposed() const {
    return matrices(sequence, sequence, {sequence * sequence, 1, sequence});
  }
};

struct Product {
  dnnl::matmul primitive;
  memory::desc scratchpad;
};

// out = alpha * a b. `name` tells the products of this file apart, which differ in layout.
void multiply(const char* name, const Heads& heads, float alpha, const memory::desc& a_desc,
              const float* a, const memory::desc& b_desc, const float* b,
              const memory::desc& out_desc, float* out) {
  const std::array sizes{heads.sequence, heads.batch, heads.heads, heads.size};
  const std::string key =
      KeyBuilder(name).add_all(sizes).add(__builtin_bit_cast(int32_t, alpha)).str();
  const Product& product = PrimitiveCache<Product>::get_or_create(key, [&] {
    dnnl::post_ops scale;
    scale.append_eltwise(dnnl::algorithm::eltwise_linear, alpha, 0.0F);
    dnnl::primitive_attr attr = user_scratchpad_attr();
    attr.set_post_ops(scale);
    const dnnl::matmul::primitive_desc desc(cpu_engine(), a_desc, b_desc, out_desc, attr);
    return Product{dnnl::matmul(desc), desc.scratchpad_desc()};
  });
  product.primitive.execute(cpu_stream(),
                            {{DNNL_ARG_SRC, wrap(a_desc, a)},
                             {DNNL_ARG_WEIGHTS, wrap(b_desc, b)},
                             {DNNL_ARG_DST, wrap(out_desc, out)},
                             {DNNL_ARG_SCRATCHPAD, scratchpad_memory(product.scratchpad)}});
}

// Calls fn(within, packed) for every row of `size` values: where it starts in hidden_states (as
// the value's part) and in the packed (batch, heads, sequence, size).
template <typename Fn>
void for_each_value_row(const Heads& heads, const Fn& fn) {
  const int64_t rows = heads.batch * heads.heads * heads.sequence;
  const int64_t grain = std::max<int64_t>(1, kGrainSize / heads.size);
  parallel_for(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t head = row / heads.sequence;
      const int64_t position = row % heads.sequence;
      fn(position * heads.position_stride() + (3 * head + 2) * heads.size, row * heads.size);
    }
  });
}

class SelfAttentionKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const ThreadScope threads;
    const auto* hidden_states = ctx->Tensor4ArgNameAndIndex("hidden_states", 0);
    const float* hidden = hidden_states->dptr<float>();
    float* product = output(ctx, "query_mul_key");
    float* value = output(ctx, "value");
    const Heads heads(hidden_states->shape_view(), ctx->Attr<int64_t>("head_size"));
    run_or_throw(
        [&] { return "fused_self_attention of " + hidden_states->shape_view().ToString(); },
        [&] {
          multiply("query_mul_key", heads, ctx->Attr<float>("alpha"), heads.part(), hidden,
                   heads.part_transposed(), hidden + heads.size, heads.product(), product);
        });
    for_each_value_row(heads, [&](int64_t within, int64_t packed) {
      std::copy_n(hidden + within, heads.size, value + packed);
    });
  }
};

class SelfAttentionGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const ThreadScope threads;
    const auto* hidden_states = ctx->Tensor4ArgNameAndIndex("hidden_states", 0);
    const auto* value_grad = ctx->Tensor4ArgNameAndIndex("value_grad", 0);
    const float* hidden = hidden_states->dptr<float>();
    const float* grad = input(ctx, "query_mul_key_grad");
    float* dx = output(ctx, "hidden_states_grad");
    const float alpha = ctx->Attr<float>("alpha");
    const Heads heads(hidden_states->shape_view(), value_grad->shape_view().At(3));
    run_or_throw(
        [&] {
          return "the gradient of fused_self_attention of "
                 + hidden_states->shape_view().ToString();
        },
        [&] {
          multiply("query_grad", heads, alpha, heads.product(), grad, heads.part(),
                   hidden + heads.size, heads.part(), dx);
          multiply("key_grad", heads, alpha, heads.product_transposed(), grad, heads.part(), hidden,
                   heads.part(), dx + heads.size);
        });
    const float* dvalue = value_grad->dptr<float>();
    for_each_value_row(heads, [&](int64_t within, int64_t packed) {
      std::copy_n(dvalue + packed, heads.size, dx + within);
    });
  }
};

REGISTER_KERNEL("fused_self_attention_query_mul_key_and_value", make<SelfAttentionKernel>,
                is_float32_on_cpu("hidden_states"));
REGISTER_KERNEL("fused_self_attention_query_mul_key_and_value_grad", make<SelfAttentionGradKernel>,
                is_float32_on_cpu("hidden_states"));

}  // namespace

}  // namespace oneflow_accel
