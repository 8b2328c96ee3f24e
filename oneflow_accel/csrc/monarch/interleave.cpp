#include "monarch/interleave.h"

#include <utility>

#include "common/vector.h"

namespace oneflow_accel {

namespace {

template <int floats>
using Lanes = std::make_integer_sequence<int, floats>;

// Of vectors whose elements are to alternate, those of the lower half of the vectors go to the even
// places and those of the upper half to the odd ones: for each factor of 2 in their number l, after
// which each alternates with all others.
template <int floats, int l, int left = l, int... lane>
ONEFLOW_ACCEL_INLINE void zip(Vector<floats> (&vectors)[l],
                              std::integer_sequence<int, lane...> lanes) {
  if constexpr (left > 1) {
    Vector<floats> next[l];
#pragma GCC unroll 8
    for (int i = 0; i < l / 2; ++i) {
      const Vector<floats> a = vectors[i];
      const Vector<floats> b = vectors[i + l / 2];
      next[2 * i] = ONEFLOW_ACCEL_SHUFFLE(a, b, (lane / 2 + (lane % 2) * floats)...);
      next[2 * i + 1] =
          ONEFLOW_ACCEL_SHUFFLE(a, b, (floats / 2 + lane / 2 + (lane % 2) * floats)...);
    }
    zip<floats, l, left / 2>(next, lanes);
#pragma GCC unroll 16
    for (int i = 0; i < l; ++i) { vectors[i] = next[i]; }
  }
}

// The way back.
template <int floats, int l, int left = l, int... lane>
ONEFLOW_ACCEL_INLINE void unzip(Vector<floats> (&vectors)[l],
                                std::integer_sequence<int, lane...> lanes) {
  if constexpr (left > 1) {
    Vector<floats> next[l];
#pragma GCC unroll 8
    for (int i = 0; i < l / 2; ++i) {
      const Vector<floats> a = vectors[2 * i];
      const Vector<floats> b = vectors[2 * i + 1];
      next[i] = ONEFLOW_ACCEL_SHUFFLE(a, b, (2 * lane)...);
      next[i + l / 2] = ONEFLOW_ACCEL_SHUFFLE(a, b, (2 * lane + 1)...);
    }
    unzip<floats, l, left / 2>(next, lanes);
#pragma GCC unroll 16
    for (int i = 0; i < l; ++i) { vectors[i] = next[i]; }
  }
}

ONEFLOW_ACCEL_INLINE void deinterleave_plainly(const float* from, int64_t first, int64_t n,
                                               int64_t l, float* to) {
  for (int64_t j = 0; j < l; ++j) {
    for (int64_t i = first; i < n; ++i) { to[j * n + i] = from[i * l + j]; }
  }
}

ONEFLOW_ACCEL_INLINE void interleave_plainly(const float* from, int64_t first, int64_t n,
                                             int64_t l, int64_t columns, const float* addend,
                                             float* to) {
  for (int64_t j = 0; j < l; ++j) {
    for (int64_t i = first; i * l + j < columns; ++i) {
      to[i * l + j] = from[j * n + i] + (addend == nullptr ? 0.0F : addend[i * l + j]);
    }
  }
}

template <int floats, int l>
ONEFLOW_ACCEL_INLINE void deinterleave_rows(const RowCopy& copy, int64_t n) {
  for (int64_t row = 0; row < copy.rows; ++row) {
    const float* from = copy.from + row * copy.from_stride;
    float* to = copy.to + row * copy.to_stride;
    int64_t i = 0;
    for (; i + floats <= n; i += floats) {
      Vector<floats> vectors[l];
#pragma GCC unroll 16
      for (int v = 0; v < l; ++v) { vectors[v] = *vector_at<floats>(from + i * l, v); }
      unzip<floats, l>(vectors, Lanes<floats>());
#pragma GCC unroll 16
      for (int j = 0; j < l; ++j) { *vector_at<floats>(to + j * n + i, 0) = vectors[j]; }
    }
    deinterleave_plainly(from, i, n, l, to);
  }
}

template <int floats, int l>
ONEFLOW_ACCEL_INLINE void interleave_rows(const RowCopy& copy, int64_t n, int64_t columns,
                                          const float* addend) {
  for (int64_t row = 0; row < copy.rows; ++row) {
    const float* from = copy.from + row * copy.from_stride;
    float* to = copy.to + row * copy.to_stride;
    int64_t i = 0;
    for (; (i + floats) * l <= columns; i += floats) {
      Vector<floats> vectors[l];
#pragma GCC unroll 16
      for (int j = 0; j < l; ++j) { vectors[j] = *vector_at<floats>(from + j * n + i, 0); }
      zip<floats, l>(vectors, Lanes<floats>());
#pragma GCC unroll 16
      for (int v = 0; v < l; ++v) {
        if (addend != nullptr) { vectors[v] += *vector_at<floats>(addend + i * l, v); }
        *vector_at<floats>(to + i * l, v) = vectors[v];
      }
    }
    interleave_plainly(from, i, n, l, columns, addend, to);
  }
}

// By the number of blocks. Others than powers of 2 are rare.
template <int floats>
ONEFLOW_ACCEL_INLINE void deinterleave_any(const RowCopy& copy, int64_t n, int64_t l) {
  switch (l) {
    case 2: return deinterleave_rows<floats, 2>(copy, n);
    case 4: return deinterleave_rows<floats, 4>(copy, n);
    case 8: return deinterleave_rows<floats, 8>(copy, n);
    case 16: return deinterleave_rows<floats, 16>(copy, n);
    default: break;
  }
  for (int64_t row = 0; row < copy.rows; ++row) {
    deinterleave_plainly(copy.from + row * copy.from_stride, 0, n, l,
                         copy.to + row * copy.to_stride);
  }
}

template <int floats>
ONEFLOW_ACCEL_INLINE void interleave_any(const RowCopy& copy, int64_t n, int64_t l,
                                         int64_t columns, const float* addend) {
  switch (l) {
    case 2: return interleave_rows<floats, 2>(copy, n, columns, addend);
    case 4: return interleave_rows<floats, 4>(copy, n, columns, addend);
    case 8: return interleave_rows<floats, 8>(copy, n, columns, addend);
    case 16: return interleave_rows<floats, 16>(copy, n, columns, addend);
    default: break;
  }
  for (int64_t row = 0; row < copy.rows; ++row) {
    interleave_plainly(copy.from + row * copy.from_stride, 0, n, l, columns, addend,
                       copy.to + row * copy.to_stride);
  }
}

}  // namespace

void deinterleave(const RowCopy& copy, int64_t n, int64_t l) {
  deinterleave_any<kFloats>(copy, n, l);
}

void interleave(const RowCopy& copy, int64_t n, int64_t l, int64_t columns, const float* addend) {
  interleave_any<kFloats>(copy, n, l, columns, addend);
}

}  // namespace oneflow_accel
