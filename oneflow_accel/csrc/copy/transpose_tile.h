// Transposes of small matrices, the inner step of a copy that swaps the contiguous dimension.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "common/vector.h"

namespace oneflow_accel {

// A tile's side in elements.
constexpr int64_t kTransposeTile = 64;

// A square block of kLanes x kLanes elements in kLanes vector registers.
template <typename T>
struct TransposeBlock {
  // Of 4 bytes, 16 x 16 are whole cache lines where registers are as long.
  static constexpr int kBytes = sizeof(T) == 4 ? 4 * kFloats : sizeof(T) == 2 ? 16 : 32;
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(T));
  using Vector __attribute__((vector_size(kBytes))) = T;

  // In log2(kLanes) steps: step S swaps the off-diagonal S x S quarters of every 2S x 2S block.
  template <int S = 1>
  ONEFLOW_ACCEL_INLINE static void transpose(Vector (&rows)[kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & S) == 0) {
        swap<S>(rows[i], rows[i + S], std::make_integer_sequence<int, kLanes>());
      }
    }
    if constexpr (2 * S < kLanes) { transpose<2 * S>(rows); }
  }

 private:
  template <int S, int... kLane>
  ONEFLOW_ACCEL_INLINE static void swap(Vector& a, Vector& b,
                                        std::integer_sequence<int, kLane...>) {
    const Vector low = ONEFLOW_ACCEL_SHUFFLE(a, b, ((kLane & S) ? kLanes + kLane - S : kLane)...);
    b = ONEFLOW_ACCEL_SHUFFLE(a, b, ((kLane & S) ? kLanes + kLane : kLane + S)...);
    a = low;
  }
};

template <typename T>
void transpose_one_by_one(const Aliased<T>* source, int64_t source_stride, Aliased<T>* destination,
                          int64_t destination_stride, int64_t rows, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) {
      destination[c * destination_stride + r] = source[r * source_stride + c];
    }
  }
}

// destination[column * destination_stride + row] = source[row * source_stride + column] for
// rows x columns elements of 1, 2, 4 or 8 bytes; strides count elements.
template <typename T>
void transpose_tile(const T* source, int64_t source_stride, T* destination,
                    int64_t destination_stride, int64_t rows, int64_t columns) {
  using Block = TransposeBlock<T>;
  constexpr int kSide = Block::kLanes;
  const int64_t whole_rows = rows - rows % kSide;
  // Bytes one by one.
  const int64_t whole_columns = sizeof(T) == 1 ? 0 : columns - columns % kSide;
  for (int64_t c = 0; c < whole_columns; c += kSide) {
    for (int64_t r = 0; r < whole_rows; r += kSide) {
      typename Block::Vector block[kSide];
#pragma GCC unroll 16
      for (int i = 0; i < kSide; ++i) {
        std::memcpy(&block[i], source + (r + i) * source_stride + c, Block::kBytes);
      }
      Block::transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kSide; ++i) {
        std::memcpy(destination + (c + i) * destination_stride + r, &block[i], Block::kBytes);
      }
    }
  }
  transpose_one_by_one(source + whole_rows * source_stride, source_stride,
                       destination + whole_rows, destination_stride, rows - whole_rows,
                       whole_columns);
  transpose_one_by_one(source + whole_columns, source_stride,
                       destination + whole_columns * destination_stride, destination_stride, rows,
                       columns - whole_columns);
}

}  // namespace oneflow_accel
