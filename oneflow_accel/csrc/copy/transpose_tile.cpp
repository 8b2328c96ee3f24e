#include "copy/transpose_tile.h"

#include <cstring>
#include <utility>

#include "common/simd_math.h"
#include "common/vector.h"
#include "copy/transpose_avx512.h"

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
  ONEFLOW_ACCEL_INLINE
  static void swap(Vector& a, Vector& b, std::integer_sequence<int, kLane...>) {
    const Vector low =
        ONEFLOW_ACCEL_SHUFFLE(a, b, ((kLane & S) ? kLanes + kLane - S : kLane)...);
    const Vector high = ONEFLOW_ACCEL_SHUFFLE(a, b, ((kLane & S) ? kLanes + kLane : kLane + S)...);
    a = low;
    b = high;
  }

  template <int S, int kRow>
  ONEFLOW_ACCEL_INLINE
  static void swap_row(Vector* rows) {
    if constexpr ((kRow & S) == 0) { swap<S>(rows[kRow], rows[kRow + S], Lanes()); }
  }

  template <int S, int... kRow>
  ONEFLOW_ACCEL_INLINE
  static void steps(Vector* rows, std::integer_sequence<int, kRow...> all) {
    (swap_row<S, kRow>(rows), ...);
    if constexpr (2 * S < kLanes) { steps<2 * S>(rows, all); }
  }

  template <int... kRow>
  ONEFLOW_ACCEL_INLINE
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
ONEFLOW_ACCEL_INLINE
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

#ifdef __AVX512F__
// 16 x 16 elements of 4 bytes: whole cache lines are read and written.
ONEFLOW_ACCEL_INLINE
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

void transpose_squares(const float* source, int64_t source_stride, float* destination,
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

#endif

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
      return transpose_blocks<uint64_t, 32>(as<uint64_t>(source), source_stride, as<uint64_t>(destination),
                              destination_stride, rows, columns);
    case 4:
      return transpose_tile(as<float>(source), source_stride, as<float>(destination),
                            destination_stride, rows, columns);
    case 2:
      return transpose_blocks<uint16_t, 16>(as<uint16_t>(source), source_stride, as<uint16_t>(destination),
                              destination_stride, rows, columns);
    default:
      return transpose_edge(source, source_stride, destination, destination_stride, rows, columns);
  }
}

void transpose_tile(const float* source, int64_t source_stride, float* destination,
                    int64_t destination_stride, int64_t rows, int64_t columns) {
#ifdef __AVX512F__
  transpose_squares(source, source_stride, destination, destination_stride, rows, columns);
#else
  transpose_blocks<float, 32>(source, source_stride, destination, destination_stride, rows, columns);
#endif
}

}  // namespace oneflow_accel
