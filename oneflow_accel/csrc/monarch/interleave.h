// The permutations of a Monarch product: short rows are read as matrices and transposed.
#pragma once

#include <cstdint>
#include <utility>

#include "common/vector.h"

namespace oneflow_accel {

// Rows of a source and where they go; strides are from one row to the next.
struct RowCopy {
  const float* from;
  int64_t from_stride;
  float* to;
  int64_t to_stride;
  int64_t rows;
};

using Lanes = Vector<kFloats>;

// Of vectors whose elements are to alternate, those of the lower half of the vectors go to the even
// places and those of the upper half to the odd ones: for each factor of 2 in their number l, after
// which each alternates with all others. `apart`: the way back.
template <bool apart, int l, int left = l, int... lane>
ONEFLOW_ACCEL_INLINE void zip(Lanes (&vectors)[l], std::integer_sequence<int, lane...> lanes) {
  if constexpr (left > 1) {
    Lanes next[l];
#pragma GCC unroll 8
    for (int i = 0; i < l / 2; ++i) {
      const Lanes a = vectors[apart ? 2 * i : i];
      const Lanes b = vectors[apart ? 2 * i + 1 : i + l / 2];
      if constexpr (apart) {
        next[i] = ONEFLOW_ACCEL_SHUFFLE(a, b, (2 * lane)...);
        next[i + l / 2] = ONEFLOW_ACCEL_SHUFFLE(a, b, (2 * lane + 1)...);
      } else {
        next[2 * i] = ONEFLOW_ACCEL_SHUFFLE(a, b, (lane / 2 + (lane % 2) * kFloats)...);
        next[2 * i + 1] =
            ONEFLOW_ACCEL_SHUFFLE(a, b, (kFloats / 2 + lane / 2 + (lane % 2) * kFloats)...);
      }
    }
    zip<apart, l, left / 2>(next, lanes);
#pragma GCC unroll 16
    for (int i = 0; i < l; ++i) { vectors[i] = next[i]; }
  }
}

constexpr std::make_integer_sequence<int, kFloats> kLanes;

// A row, whole vectors at a time as far as they go: returns where they end. l is a power of 2 up to
// 16, or 1 for others, which are rare: no vectors then.
template <int l>
int64_t deinterleave_vectors(const float* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; l > 1 && i + kFloats <= n; i += kFloats) {
    Lanes vectors[l];
#pragma GCC unroll 16
    for (int v = 0; v < l; ++v) { vectors[v] = *vector_at<kFloats>(from + i * l, v); }
    zip<true, l>(vectors, kLanes);
#pragma GCC unroll 16
    for (int j = 0; j < l; ++j) { *vector_at<kFloats>(to + j * n + i, 0) = vectors[j]; }
  }
  return i;
}

template <int l>
int64_t interleave_vectors(const float* from, int64_t n, int64_t columns, const float* addend,
                           float* to) {
  int64_t i = 0;
  for (; l > 1 && (i + kFloats) * l <= columns; i += kFloats) {
    Lanes vectors[l];
#pragma GCC unroll 16
    for (int j = 0; j < l; ++j) { vectors[j] = *vector_at<kFloats>(from + j * n + i, 0); }
    zip<false, l>(vectors, kLanes);
#pragma GCC unroll 16
    for (int v = 0; v < l; ++v) {
      if (addend != nullptr) { vectors[v] += *vector_at<kFloats>(addend + i * l, v); }
      *vector_at<kFloats>(to + i * l, v) = vectors[v];
    }
  }
  return i;
}

// Calls fn(l, from, to) for each row, with l, or 1, as a constant.
template <typename Fn>
void for_each_row(const RowCopy& copy, int64_t l, const Fn& fn) {
  const auto rows = [&](auto blocks) {
    for (int64_t row = 0; row < copy.rows; ++row) {
      fn(blocks, copy.from + row * copy.from_stride, copy.to + row * copy.to_stride);
    }
  };
  switch (l) {
    case 2: return rows(std::integral_constant<int, 2>());
    case 4: return rows(std::integral_constant<int, 4>());
    case 8: return rows(std::integral_constant<int, 8>());
    case 16: return rows(std::integral_constant<int, 16>());
    default: return rows(std::integral_constant<int, 1>());
  }
}

// to[j * n + i] = from[i * l + j] in each row, for i < n and j < l.
inline void deinterleave(const RowCopy& copy, int64_t n, int64_t l) {
  for_each_row(copy, l, [&](auto blocks, const float* from, float* to) {
    const int64_t rest = deinterleave_vectors<blocks>(from, n, to);
    for (int64_t j = 0; j < l; ++j) {
      for (int64_t i = rest; i < n; ++i) { to[j * n + i] = from[i * l + j]; }
    }
  });
}

// to[i * l + j] = from[j * n + i] in each row, for j < l and as far as i * l + j < columns, with
// addend[i * l + j] added if that is not null.
inline void interleave(const RowCopy& copy, int64_t n, int64_t l, int64_t columns,
                       const float* addend) {
  for_each_row(copy, l, [&](auto blocks, const float* from, float* to) {
    const int64_t rest = interleave_vectors<blocks>(from, n, columns, addend, to);
    for (int64_t j = 0; j < l; ++j) {
      for (int64_t i = rest; i * l + j < columns; ++i) {
        to[i * l + j] = from[j * n + i] + (addend == nullptr ? 0.0F : addend[i * l + j]);
      }
    }
  });
}

}  // namespace oneflow_accel
