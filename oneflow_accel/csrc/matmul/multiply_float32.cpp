// Matrix products in float32. Products of a few rows are in few_rows.cpp; oneDNN's sgemm does most
// of the others: measured against its matmul primitive on the shapes of ViT-S, GPT-2 and ResNet50
// it is as fast or faster, in all transposed forms and for odd leading dimensions, and it needs no
// primitive for each shape.
#include <dnnl.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "common/threads.h"
#include "matmul/few_rows.h"
#include "matmul/primitive.h"
#include "matmul/product.h"

namespace oneflow_accel {

namespace {

using dims = dnnl::memory::dims;
constexpr auto kFloat32 = dnnl::memory::data_type::f32;

void sgemm(const Product& product, const float* a, const float* b, float* out) {
  const int64_t m = product.m();
  const int64_t n = product.n();
  const int64_t k = product.k();
  const dnnl_status_t status =
      dnnl_sgemm(product.transpose_a ? 'T' : 'N', product.transpose_b ? 'T' : 'N', m, n, k,
                 product.alpha, a, product.transpose_a ? m : k, b, product.transpose_b ? k : n,
                 product.accumulate ? 1.0F : 0.0F, out, n);
  if (status != dnnl_success) { throw std::runtime_error("dnnl_sgemm failed"); }
}

// For each matrix of `out`, which matrix of an operand of shape `sizes` belongs to it.
std::vector<int64_t> matrix_indices(const dims& sizes, const dims& out) {
  std::vector<int64_t> indices{0};
  int64_t matrices = 1;
  for (std::size_t axis = out.size() - 2; axis-- > 0;) {
    const int64_t step = sizes[axis] == 1 ? 0 : matrices;
    const std::size_t inner = indices.size();
    indices.resize(inner * out[axis]);
    for (std::size_t i = inner; i < indices.size(); ++i) {
      indices[i] = indices[i % inner] + static_cast<int64_t>(i / inner) * step;
    }
    matrices *= sizes[axis];
  }
  return indices;
}

void multiply_batch(const Product& product, const float* a, const float* b, float* out) {
  const std::vector<int64_t> a_indices = matrix_indices(product.a, product.out);
  const std::vector<int64_t> b_indices = matrix_indices(product.b, product.out);
  const int64_t m = product.m();
  const int64_t n = product.n();
  const int64_t k = product.k();
  const auto each = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      sgemm(product, a + a_indices[i] * m * k, b + b_indices[i] * k * n, out + i * m * n);
    }
  };
  // A matrix for each thread is best, unless some threads would be left without work for long.
  const int64_t batch = product.batch();
  const int64_t threads = num_threads();
  if (batch % threads == 0 || batch >= 4 * threads) {
    parallel_for(batch, std::max<int64_t>(1, 4 * kGrainSize / (m * n * k)), each);
  } else {
    each(0, batch);
  }
}

void add_row(const float* row, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) { out[i] += row[i]; }
}

// Every row of `out` becomes `bias`, or has it added.
void load_bias(const Product& product, const float* bias, float* out) {
  const int64_t n = product.n();
  const int64_t rows = product.batch() * product.m();
  parallel_for(rows, std::max<int64_t>(1, kGrainSize / n), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (product.accumulate) {
        add_row(bias, out + i * n, n);
      } else {
        std::copy_n(bias, n, out + i * n);
      }
    }
  });
}

// Whether oneDNN's matmul primitive, which adds the bias as it stores, is the faster way. It was
// measured to take 1.4 to 2.5 times as long as sgemm for 8 rows, and 1.3 times as long for the
// 50257 columns of GPT-2's vocabulary; between, the two differ by a few percent.
bool primitive_is_faster_with_bias(const Product& product) {
  return product.m() >= 64 && product.n() <= 16384;
}

// The same for long sums without a bias, as in the second layer of an MLP: sgemm took 1.2 to 1.3
// times as long for 1576 x 1536 x 384 and 512 x 3072 x 768 on two threads, b being transposed. In
// the other forms sgemm is the faster way.
bool primitive_is_faster(const Product& product) {
  return !product.transpose_a && product.transpose_b && product.m() >= 64 && product.k() >= 1024
         && product.k() >= 2 * product.n();
}

}  // namespace

void multiply(const Product& product, const float* a, const float* b, const float* bias,
              float* out) {
  Product flat = product.folded();
  if (has_few_rows(flat)) { return multiply_few_rows(flat, a, b, bias, out); }
  if (float32_products_in_bfloat16() && !flat.adds_up_nothing()
      && multiply_rounded(flat, a, b, bias, out)) {
    return;
  }
  if (bias != nullptr) {
    if (!flat.adds_up_nothing() && primitive_is_faster_with_bias(flat)
        && multiply_by_primitive(flat, {kFloat32, kFloat32}, a, b, bias, out)) {
      return;
    }
    load_bias(flat, bias, out);
    flat.accumulate = true;
  }
  if (flat.adds_up_nothing()) {
    if (!flat.accumulate) { std::fill_n(out, flat.batch() * flat.m() * flat.n(), 0.0F); }
  } else if (flat.out.size() == 2) {
    if (primitive_is_faster(flat)
        && multiply_by_primitive(flat, {kFloat32, kFloat32}, a, b, nullptr, out)) {
      return;
    }
    sgemm(flat, a, b, out);
  } else {
    multiply_batch(flat, a, b, out);
  }
}

}  // namespace oneflow_accel
