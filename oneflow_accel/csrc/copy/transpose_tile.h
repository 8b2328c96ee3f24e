// Transposes of small matrices, the inner step of a copy that swaps the contiguous dimension.
#pragma once

#include <cstddef>
#include <cstdint>

namespace oneflow_accel {

// A tile's side in elements.
constexpr int64_t kTransposeTile = 64;

// destination[column * destination_stride + row] = source[row * source_stride + column] for
// rows x columns elements of `element_bytes` (1, 2, 4 or 8) bytes; strides count elements.
void transpose_tile(std::size_t element_bytes, const char* source, int64_t source_stride,
                    char* destination, int64_t destination_stride, int64_t rows, int64_t columns);

// The same for floats.
void transpose_tile(const float* source, int64_t source_stride, float* destination,
                    int64_t destination_stride, int64_t rows, int64_t columns);

}  // namespace oneflow_accel
