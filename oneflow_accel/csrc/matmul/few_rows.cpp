// Each element of b is used a few times only, so that reading it from memory is what takes the
// time: b is read once, in the order it lies in, all rows of a being multiplied with what has been
// read. oneDNN's sgemm packs b first. What comes next is prefetched: the processor does not look
// past the end of a page or a row. Measured on two threads for the shapes of GPT-2 small: one row
// 40 to 55 GB/s (sgemm 15), 8 rows 70 to 120 GFLOP/s (sgemm 30).
#include "matmul/product.h"

#include <algorithm>

#include "common/threads.h"
#include "common/vector.h"

namespace oneflow_accel {

namespace {

// Columns of the output that are added up at a time: all rows of them fit the first-level cache.
constexpr int64_t kColumns = 512;
// Rows of sums are apart by a little more, or stores to one would hold up loads of another.
constexpr int64_t kSumsStride = kColumns + 16;
// What one thread takes at least, and a multiple of it.
constexpr int64_t kColumnsPerPart = 64;

// Strides are from one row to the next, of b as it lies in memory.
struct Operands {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  // Null for none.
  const float* bias;
  float* out;
  int64_t out_stride;
  int64_t k;
  float alpha;
  bool accumulate;
};

ONEFLOW_ACCEL_INLINE void store(const Operands& p, int64_t row, int64_t column, float sum) {
  float* out = p.out + row * p.out_stride + column;
  const float base = p.accumulate ? *out : 0.0F;
  *out = base + (p.bias == nullptr ? 0.0F : p.bias[column]) + p.alpha * sum;
}

// sums (rows, columns) += a (rows, depth) b (depth, columns), parts of the operands.
template <int rows, int depth>
ONEFLOW_ACCEL_INLINE void add_rows(const Operands& p, const float* a, const float* b, float* sums,
                                   int64_t columns) {
  float left[rows][depth];
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int k = 0; k < depth; ++k) { left[i][k] = a[i * p.a_stride + k]; }
  }
  int64_t j = 0;
  for (; j + kFloats <= columns; j += kFloats) {
    Vector<kFloats> right[depth];
#pragma GCC unroll 8
    for (int k = 0; k < depth; ++k) {
      right[k] = *vector_at<kFloats>(b + k * p.b_stride + j, 0);
      __builtin_prefetch(b + (k + depth) * p.b_stride + j);
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      auto* place = vector_at<kFloats>(sums + i * kSumsStride + j, 0);
      Vector<kFloats> sum = *place;
#pragma GCC unroll 8
      for (int k = 0; k < depth; ++k) { sum += left[i][k] * right[k]; }
      *place = sum;
    }
  }
  for (; j < columns; ++j) {
    for (int i = 0; i < rows; ++i) {
      for (int k = 0; k < depth; ++k) {
        sums[i * kSumsStride + j] += left[i][k] * b[k * p.b_stride + j];
      }
    }
  }
}

// The same in groups of rows, so that a group's elements of a stay in registers.
template <int rows, int depth>
ONEFLOW_ACCEL_INLINE void add_row_groups(const Operands& p, const float* a, const float* b,
                                         float* sums, int64_t columns) {
  constexpr int kGroup = 4;
  add_rows<std::min(rows, kGroup), depth>(p, a, b, sums, columns);
  if constexpr (rows > kGroup) {
    add_row_groups<rows - kGroup, depth>(p, a + kGroup * p.a_stride, b, sums + kGroup * kSumsStride,
                                         columns);
  }
}

// Columns [begin, end) of the output, b being (k, n).
template <int rows>
ONEFLOW_ACCEL_INLINE void multiply_plain(const Operands& p, int64_t begin, int64_t end) {
  constexpr int kDepth = rows == 1 ? 8 : 4;
  alignas(64) float sums[rows * kSumsStride];
  for (int64_t column = begin; column < end; column += kColumns) {
    const int64_t columns = std::min(kColumns, end - column);
    std::fill_n(sums, rows * kSumsStride, 0.0F);
    const float* b = p.b + column;
    int64_t k = 0;
    for (; k + kDepth <= p.k; k += kDepth) {
      add_row_groups<rows, kDepth>(p, p.a + k, b + k * p.b_stride, sums, columns);
    }
    for (; k < p.k; ++k) { add_row_groups<rows, 1>(p, p.a + k, b + k * p.b_stride, sums, columns); }
    for (int i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) { store(p, i, column + j, sums[i * kSumsStride + j]); }
    }
  }
}

// The sum of count floats, count being a power of two, added pairwise.
template <int count>
ONEFLOW_ACCEL_INLINE float sum_of(const float* values) {
  if constexpr (count == 1) {
    return values[0];
  } else {
    return sum_of<count / 2>(values) + sum_of<count / 2>(values + count / 2);
  }
}

// `columns` columns of the output from `column` on, b being (n, k): each is a row of b.
template <int rows, int columns>
ONEFLOW_ACCEL_INLINE void multiply_columns(const Operands& p, int64_t column) {
  const float* b = p.b + column * p.b_stride;
  Vector<kFloats> sums[rows][columns] = {};
  int64_t k = 0;
  for (; k + kFloats <= p.k; k += kFloats) {
    Vector<kFloats> right[columns];
#pragma GCC unroll 8
    for (int j = 0; j < columns; ++j) {
      right[j] = *vector_at<kFloats>(b + j * p.b_stride + k, 0);
      __builtin_prefetch(b + (j + columns) * p.b_stride + k);
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const Vector<kFloats> left = *vector_at<kFloats>(p.a + i * p.a_stride + k, 0);
#pragma GCC unroll 8
      for (int j = 0; j < columns; ++j) { sums[i][j] += left * right[j]; }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < columns; ++j) {
      alignas(64) float parts[kFloats];
      *vector_at<kFloats>(parts, 0) = sums[i][j];
      float sum = sum_of<kFloats>(parts);
      for (int64_t rest = k; rest < p.k; ++rest) {
        sum += p.a[i * p.a_stride + rest] * b[j * p.b_stride + rest];
      }
      store(p, i, column + j, sum);
    }
  }
}

template <int rows>
ONEFLOW_ACCEL_INLINE void multiply_transposed(const Operands& p, int64_t begin, int64_t end) {
  // What fits the registers beside a vector of each column and one of a.
  constexpr int kAtOnce = kFloats < 16 ? (rows <= 3 ? 3 : 1) : (rows <= 4 ? 4 : 3);
  int64_t column = begin;
  for (; column + kAtOnce <= end; column += kAtOnce) {
    multiply_columns<rows, kAtOnce>(p, column);
  }
  for (; column < end; ++column) { multiply_columns<rows, 1>(p, column); }
}

// The first `count` rows, made for each number of them.
template <int rows = kMostFewRows>
void multiply_part(const Operands& p, bool transposed, int64_t count, int64_t begin, int64_t end) {
  if constexpr (rows > 1) {
    if (count < rows) { return multiply_part<rows - 1>(p, transposed, count, begin, end); }
  }
  if (transposed) {
    multiply_transposed<rows>(p, begin, end);
  } else {
    multiply_plain<rows>(p, begin, end);
  }
}

}  // namespace

bool has_few_rows(const Product& product) {
  return product.out.size() == 2 && !product.transpose_a && product.m() <= kMostFewRows
         && product.n() >= kColumnsPerPart && product.k() >= kColumnsPerPart;
}

void multiply_few_rows(const Product& product, const float* a, const float* b, const float* bias,
                       float* out) {
  const int64_t n = product.n();
  const int64_t k = product.k();
  const Operands operands{
      a, k, b, product.transpose_b ? k : n, bias, out, n, k, product.alpha, product.accumulate};
  const int64_t parts = ceil_div(n, kColumnsPerPart);
  parallel_for(parts, grain_of(kColumnsPerPart * k), [&](int64_t begin, int64_t end) {
    multiply_part(operands, product.transpose_b, product.m(), begin * kColumnsPerPart,
                  std::min(end * kColumnsPerPart, n));
  });
}

void few_rows_product(int64_t rows, int64_t columns, int64_t depth, const float* a,
                      int64_t a_stride, const float* b, int64_t b_stride, float* out,
                      int64_t out_stride) {
  const Operands operands{a,   a_stride,   b,     b_stride, nullptr,
                          out, out_stride, depth, 1.0F,     false};
  multiply_part(operands, true, rows, 0, columns);
}

}  // namespace oneflow_accel
