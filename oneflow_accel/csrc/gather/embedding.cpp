// embedding and embedding_grad: nn.Embedding with a padding index or with gradients scaled by
// frequency (without, it is gather).
#include <vector>

#include "common/arguments.h"
#include "copy/elements.h"
#include "gather/rows.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

TableShape table_shape(const user_op::Tensor& weight) {
  return {1, weight.shape_view().At(0), weight.shape_view().At(1), 0};
}

class EmbeddingKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* weight = ctx->Tensor4ArgNameAndIndex("weight", 0);
    const Indices indices(*ctx->Tensor4ArgNameAndIndex("indices", 0));
    const TableShape shape = table_shape(*weight);
    indices.check(shape.rows);
    gather_rows(shape, indices, element_bytes(*weight), weight->dptr(),
                ctx->Tensor4ArgNameAndIndex("out", 0)->mut_dptr());
  }
};

// Divides each row by how often its index occurs.
void divide_by_frequency(const TableShape& shape, const Indices& indices, float* table) {
  std::vector<int64_t> frequency(shape.rows, 0);
  for (int64_t i = 0; i < indices.count(); ++i) { ++frequency[indices[i]]; }
  for (int64_t r = 0; r < shape.rows; ++r) {
    if (frequency[r] < 2) { continue; }
    for (int64_t k = 0; k < shape.row; ++k) {
      table[r * shape.row + k] /= static_cast<float>(frequency[r]);
    }
  }
}

class EmbeddingGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const Indices indices(*ctx->Tensor4ArgNameAndIndex("indices", 0));
    const TableShape shape = table_shape(*ctx->Tensor4ArgNameAndIndex("weight", 0));
    indices.check(shape.rows);
    auto* dx = output(ctx, "dx");
    sum_rows_by_index(shape, indices, input(ctx, "dy"), dx, ctx->Attr<int64_t>("padding_idx"));
    if (ctx->Attr<bool>("scale_grad_by_freq")) { divide_by_frequency(shape, indices, dx); }
  }
};

REGISTER_KERNEL("embedding", make<EmbeddingKernel>, is_movable_on_cpu("weight"));
REGISTER_KERNEL("embedding_grad", make<EmbeddingGradKernel>, is_float32_on_cpu("weight"));

}  // namespace

}  // namespace oneflow_accel
