#include "copy/transpose_tile.h"

#include <cstring>
#include <utility>

#include "common/simd_math.h"
#include "common/vector.h"
#include "copy/transpose_avx512.h"

// GCC splits wide vectors up before it makes the versions of a function that ONEFLOW_ACCEL_SIMD
// asks for, so this file names its one instruction set: the least that the plug-in is loaded on.
#define ONEFLOW_ACCEL_AVX2 __attribute__((target("avx2")))

namespace oneflow_accel {

namespace {

// A square block of kLanes x kLanes elements in kLanes vector registers. It is transposed in
// log2(kLanes) steps: step S swaps the off-diagonal S x S quarters of every 2S x 2S block.
template <typename T, int kBytes>
struct Block {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(T));
  using Vector __attribute__((vector_size(kBytes))) = T;
  using Lanes = std::make_integer_sequence<int, kLanes>;

  template <int S, int... kLane>
  ONEFLOW_ACCEL_AVX2 ONEFLOW_ACCEL_INLINE
  static void swap(Vector& a, Vector& b, std::integer_sequence<int, kLane...>) {
    const Vector low =
        ONEFLOW_ACCEL_SHUFFLE(a, b, ((kLane & S) ? kLanes + kLane - S : kLane)...);
    const Vector high = ONEFLOW_ACCEL_SHUFFLE(a, b, ((kLane & S) ? kLanes + kLane : kLane + S)...);
    a = low;
    b = high;
  }

  template <int S, int kRow>
  ONEFLOW_ACCEL_AVX2 ONEFLOW_ACCEL_INLINE
  static void swap_row(Vector* rows) {
    if constexpr ((kRow & S) == 0) { swap<S>(rows[kRow], rows[kRow + S], Lanes()); }
  }

  template <int S, int... kRow>
  ONEFLOW_ACCEL_AVX2 ONEFLOW_ACCEL_INLINE
  static void steps(Vector* rows, std::integer_sequence<int, kRow...> all) {
    (swap_row<S, kRow>(rows), ...);
    if constexpr (2 * S < kLanes) { steps<2 * S>(rows, all); }
  }

  template <int... kRow>
  ONEFLOW_ACCEL_AVX2 ONEFLOW_ACCEL_INLINE
  static void transpose(const T* source, int64_t source_stride, T* destination,
                        int64_t destination_stride, std::integer_sequence<int, kRow...> all) {
    Vector rows[kLanes];
    (std::memcpy(&rows[kRow], source + kRow * source_stride, kBytes), ...);
    steps<1>(rows, all);
    (std::memcpy(destination + kRow * destination_stride, &rows[kRow], kBytes), ...);
  }
};

template <typename T>
inline void transpose_edge(const T* source, int64_t source_stride, T* destination,
                           int64_t destination_stride, int64_t rows, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) {
      destination[c * destination_stride + r] = source[r * source_stride + c];
    }
  }
}

template <typename T, int kBytes>
ONEFLOW_ACCEL_AVX2 ONEFLOW_ACCEL_INLINE
void transpose_blocks(const T* source, int64_t source_stride, T* destination,
                      int64_t destination_stride, int64_t rows, int64_t columns) {
  using B = Block<T, kBytes>;
  const int64_t whole_rows = rows - rows % B::kLanes;
  const int64_t whole_columns = columns - columns % B::kLanes;
  for (int64_t c = 0; c < whole_columns; c += B::kLanes) {
    for (int64_t r = 0; r < whole_rows; r += B::kLanes) {
      B::transpose(source + r * source_stride + c, source_stride,
                   destination + c * destination_stride + r, destination_stride,
                   typename B::Lanes());
    }
  }
  transpose_edge(source + whole_rows * source_stride, source_stride, destination + whole_rows,
                 destination_stride, rows - whole_rows, whole_columns);
  transpose_edge(source + whole_columns, source_stride,
                 destination + whole_columns * destination_stride, destination_stride, rows,
                 columns - whole_columns);
}

ONEFLOW_ACCEL_AVX2
void transpose_8bytes(const uint64_t* source, int64_t source_stride, uint64_t* destination,
                      int64_t destination_stride, int64_t rows, int64_t columns) {
  transpose_blocks<uint64_t, 32>(source, source_stride, destination, destination_stride, rows,
                                 columns);
}

ONEFLOW_ACCEL_AVX2
void transpose_4bytes(const uint32_t* source, int64_t source_stride, uint32_t* destination,
                      int64_t destination_stride, int64_t rows, int64_t columns) {
  transpose_blocks<uint32_t, 32>(source, source_stride, destination, destination_stride, rows,
                                 columns);
}

ONEFLOW_ACCEL_AVX2
void transpose_2bytes(const uint16_t* source, int64_t source_stride, uint16_t* destination,
                      int64_t destination_stride, int64_t rows, int64_t columns) {
  transpose_blocks<uint16_t, 16>(source, source_stride, destination, destination_stride, rows,
                                 columns);
}

// 16 x 16 elements of 4 bytes: whole cache lines are read and written.
ONEFLOW_ACCEL_AVX512 ONEFLOW_ACCEL_INLINE
void transpose_square(const float* source, int64_t source_stride, float* destination,
                      int64_t destination_stride) {
  __m512 rows[16], columns[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) { rows[i] = _mm512_loadu_ps(source + i * source_stride); }
  transpose_16x16(rows, columns);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    _mm512_storeu_ps(destination + i * destination_stride, columns[i]);
  }
}

ONEFLOW_ACCEL_AVX512
void transpose_floats_avx512(const float* source, int64_t source_stride, float* destination,
                             int64_t destination_stride, int64_t rows, int64_t columns) {
  constexpr int64_t kSide = 16;
  const int64_t whole_rows = rows - rows % kSide;
  const int64_t whole_columns = columns - columns % kSide;
  for (int64_t c = 0; c < whole_columns; c += kSide) {
    for (int64_t r = 0; r < whole_rows; r += kSide) {
      transpose_square(source + r * source_stride + c, source_stride,
                       destination + c * destination_stride + r, destination_stride);
    }
  }
  transpose_edge(source + whole_rows * source_stride, source_stride, destination + whole_rows,
                 destination_stride, rows - whole_rows, whole_columns);
  transpose_edge(source + whole_columns, source_stride,
                 destination + whole_columns * destination_stride, destination_stride, rows,
                 columns - whole_columns);
}

void transpose_floats_avx2(const float* source, int64_t source_stride, float* destination,
                           int64_t destination_stride, int64_t rows, int64_t columns) {
  transpose_4bytes(reinterpret_cast<const uint32_t*>(source), source_stride,
                   reinterpret_cast<uint32_t*>(destination), destination_stride, rows, columns);
}

using TransposeFloats = void (*)(const float*, int64_t, float*, int64_t, int64_t, int64_t);

template <typename T>
const T* as(const char* data) {
  return reinterpret_cast<const T*>(data);
}

template <typename T>
T* as(char* data) {
  return reinterpret_cast<T*>(data);
}

}  // namespace

void transpose_tile(std::size_t element_bytes, const char* source, int64_t source_stride,
                    char* destination, int64_t destination_stride, int64_t rows, int64_t columns) {
  switch (element_bytes) {
    case 8:
      return transpose_8bytes(as<uint64_t>(source), source_stride, as<uint64_t>(destination),
                              destination_stride, rows, columns);
    case 4:
      return transpose_tile(as<float>(source), source_stride, as<float>(destination),
                            destination_stride, rows, columns);
    case 2:
      return transpose_2bytes(as<uint16_t>(source), source_stride, as<uint16_t>(destination),
                              destination_stride, rows, columns);
    default:
      return transpose_edge(source, source_stride, destination, destination_stride, rows, columns);
  }
}

void transpose_tile(const float* source, int64_t source_stride, float* destination,
                    int64_t destination_stride, int64_t rows, int64_t columns) {
  static const auto here = choose_version<TransposeFloats>(
      transpose_floats_avx512, transpose_floats_avx2, transpose_floats_avx2);
  here(source, source_stride, destination, destination_stride, rows, columns);
}

}  // namespace oneflow_accel
