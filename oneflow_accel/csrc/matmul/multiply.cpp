// How a matrix product is done. Products of a few rows are in few_rows.cpp. In float32 a library's
// sgemm does most of the others: MKL's where Python has chosen it as the plug-in was loaded
// (plugin.py), else oneDNN's. Measured against oneDNN's matmul primitive on the shapes of ViT-S,
// GPT-2 and ResNet50 oneDNN's is as fast or faster, in all transposed forms and for odd leading
// dimensions, and it needs no primitive for each shape. bfloat16 is that primitive's, which uses
// the processor's bfloat16 instructions; where there are none, float32 copies are multiplied.
#include <dnnl.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "common/library.h"
#include "common/threads.h"
#include "elementwise/map.h"
#include "matmul/product.h"

namespace oneflow_accel {

namespace {

using dims = dnnl::memory::dims;
constexpr auto kFloat32 = dnnl::memory::data_type::f32;
constexpr auto kBfloat16 = dnnl::memory::data_type::bf16;

// Of MKL's C interface; null where oneDNN multiplies.
struct Mkl {
  void (*sgemm)(int layout, int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k,
                float alpha, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                float beta, float* out, int64_t out_stride) = nullptr;
  // For the calling thread.
  int (*set_threads)(int) = nullptr;
};

// Set before the first kernel runs.
Mkl g_mkl;

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

void multiply_matrices(const Product& product, const float* a, const float* b, float* out) {
  const std::vector<int64_t> a_indices = matrix_indices(product.a, product.out);
  const std::vector<int64_t> b_indices = matrix_indices(product.b, product.out);
  const int64_t m = product.m();
  const int64_t n = product.n();
  const int64_t k = product.k();
  for_each_matrix(product.batch(), m * n * k, [&](int64_t i, int threads) {
    sgemm(m, n, k, product.alpha,
          {a + a_indices[i] * m * k, product.transpose_a ? m : k, product.transpose_a},
          {b + b_indices[i] * k * n, product.transpose_b ? k : n, product.transpose_b},
          product.accumulate, out + i * m * n, n, threads);
  });
}

// Every row of `out` becomes `bias`, or has it added.
void load_bias(const Product& product, const float* bias, float* out) {
  const int64_t n = product.n();
  const int64_t rows = product.batch() * product.m();
  for_each_block(rows, n, [&](int64_t i) {
    float* row = out + i * n;
    if (product.accumulate) {
      for (int64_t j = 0; j < n; ++j) { row[j] += bias[j]; }
    } else {
      std::copy_n(bias, n, row);
    }
  });
}

// Whether oneDNN's matmul primitive is faster than its sgemm, for one matrix. With a bias, which it
// adds as it stores, it was measured to take 1.4 to 2.5 times as long for 8 rows, and 1.3 times as
// long for the 50257 columns of GPT-2's vocabulary; between, the two differ by a few percent.
// Without, sgemm took 1.2 to 1.3 times as long for long sums, as in the second layer of an MLP
// (1576 x 1536 x 384 and 512 x 3072 x 768 on two threads, b being transposed), and less in the
// other forms.
bool primitive_is_faster(const Product& product, bool has_bias) {
  if (product.m() < 64) { return false; }
  if (has_bias) { return product.n() <= 16384; }
  return product.out.size() == 2 && !product.transpose_a && product.transpose_b
         && product.k() >= std::max<int64_t>(1024, 2 * product.n());
}

// A copy in scratch memory; null for null.
template <typename To, typename From>
To* converted(ScratchSlot slot, const From* from, int64_t n) {
  if (from == nullptr) { return nullptr; }
  To* to = scratch<To>(slot, n);
  convert(from, to, n);
  return to;
}

// A copy of what bfloat16 keeps of it.
const float* rounded(ScratchSlot slot, const float* from, int64_t n) {
  auto* to = scratch<float>(slot, n);
  map(n, to, [](float x) { return to_float(from_float<Bfloat16>(x)); }, from);
  return to;
}

}  // namespace

void sgemm(int64_t m, int64_t n, int64_t k, float alpha, const Matrix& a, const Matrix& b,
           bool accumulate, float* out, int64_t out_stride, int threads) {
  const float beta = accumulate ? 1.0F : 0.0F;
  if (g_mkl.sgemm != nullptr) {
    // cblas.h: row by row; as it is stored, or transposed.
    constexpr int kRowMajor = 101;
    constexpr int kPlain = 111;
    constexpr int kTransposed = 112;
    g_mkl.set_threads(threads);
    g_mkl.sgemm(kRowMajor, a.transposed ? kTransposed : kPlain,
                b.transposed ? kTransposed : kPlain, m, n, k, alpha, a.data, a.stride, b.data,
                b.stride, beta, out, out_stride);
  } else if (dnnl_sgemm(a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', m, n, k, alpha, a.data,
                        a.stride, b.data, b.stride, beta, out, out_stride)
             != dnnl_success) {
    throw std::runtime_error("dnnl_sgemm failed");
  }
}

void for_each_matrix(int64_t count, int64_t work,
                     const std::function<void(int64_t i, int threads)>& fn) {
  const int threads = num_threads();
  if (count % threads == 0 || count >= 4 * threads) {
    parallel_for(count, std::max<int64_t>(1, 4 * kGrainSize / work),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) { fn(i, 1); }
                 });
  } else {
    for (int64_t i = 0; i < count; ++i) { fn(i, threads); }
  }
}

const Bfloat16* rounded_copy(const float* b, int64_t n) {
  const bool rounds = float32_products_in_bfloat16() && has_bfloat16_products();
  return rounds ? converted<Bfloat16>(ScratchSlot::kWeights, b, n) : nullptr;
}

void multiply(const Product& product, const float* a, const float* b, const float* bias,
              float* out, const Bfloat16* rounded_b) {
  Product flat = product.folded();
  if (has_few_rows(flat)) { return multiply_few_rows(flat, a, b, bias, out); }
  const bool empty = flat.adds_up_nothing();
  if (!empty && float32_products_in_bfloat16()) {
    if (has_bfloat16_products()) {
      const auto* rounded_a = converted<Bfloat16>(ScratchSlot::kRoundedA, a, count(flat.a));
      if (rounded_b == nullptr) {
        rounded_b = converted<Bfloat16>(ScratchSlot::kRoundedB, b, count(flat.b));
      }
      if (multiply_by_primitive(flat, kBfloat16, kFloat32, rounded_a, rounded_b, bias, out)) {
        return;
      }
    }
    // Products of two bfloat16 numbers are exact in float32, and so are these.
    a = rounded(ScratchSlot::kRoundedA, a, count(flat.a));
    b = rounded(ScratchSlot::kRoundedB, b, count(flat.b));
  }
  if (!empty && g_mkl.sgemm == nullptr && primitive_is_faster(flat, bias != nullptr)
      && multiply_by_primitive(flat, kFloat32, kFloat32, a, b, bias, out)) {
    return;
  }
  if (bias != nullptr) {
    load_bias(flat, bias, out);
    flat.accumulate = true;
  }
  if (empty) {
    if (!flat.accumulate) { std::fill_n(out, count(flat.out), 0.0F); }
  } else {
    multiply_matrices(flat, a, b, out);
  }
}

void multiply(const Product& product, const Bfloat16* a, const Bfloat16* b, const Bfloat16* bias,
              Bfloat16* out) {
  const Product flat = product.folded();
  if (!flat.adds_up_nothing() && has_bfloat16_products()
      && multiply_by_primitive(flat, kBfloat16, kBfloat16, a, b, bias, out)) {
    return;
  }
  const int64_t n = count(flat.out);
  auto* sum = scratch<float>(ScratchSlot::kDestination, n);
  if (flat.accumulate) { convert(out, sum, n); }
  multiply(flat, converted<float>(ScratchSlot::kSource, a, count(flat.a)),
           converted<float>(ScratchSlot::kWeights, b, count(flat.b)),
           converted<float>(ScratchSlot::kReduction, bias, flat.n()), sum);
  convert(sum, out, n);
}

}  // namespace oneflow_accel

// Lets MKL, whose libmkl_rt.so is at `path`, multiply float32 matrices on libgomp's threads. Null,
// or what is wrong with it. To be called before the first kernel runs.
extern "C" const char* oneflow_accel_use_mkl(const char* path) {
  return oneflow_accel::reason_against([&] {
    // Local: oneflow and NumPy have BLAS functions of the same names.
    const oneflow_accel::Library library(path, RTLD_LAZY | RTLD_LOCAL);
    constexpr int kGnu = 3;
    int (*set_layer)(int);
    library.look_up("MKL_Set_Threading_Layer", &set_layer);
    if (set_layer(kGnu) != kGnu) { throw std::runtime_error("it has threads of another kind"); }
    // As many threads as it is told to use, always: libgomp makes new ones where they change.
    void (*set_dynamic)(int);
    library.look_up("MKL_Set_Dynamic", &set_dynamic);
    set_dynamic(0);
    oneflow_accel::Mkl mkl;
    library.look_up("MKL_Set_Num_Threads_Local", &mkl.set_threads);
    library.look_up("cblas_sgemm_64", &mkl.sgemm);
    oneflow_accel::g_mkl = mkl;
  });
}
