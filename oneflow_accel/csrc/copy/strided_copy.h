// Copies between strided arrays of any element type: what permute, contiguous, expand, slice,
// narrow, concat and split come down to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace oneflow_accel {

// One dimension that source and destination share; strides count elements. A source stride is 0
// where an element is repeated and negative where a slice walks backwards.
struct CopyDim {
  int64_t size;
  int64_t source_stride;
  int64_t destination_stride;
};

// Copies every element, on all threads. The order of `dims` does not matter; without any, one
// element is copied. `element_bytes` is 1, 2, 4 or 8. Source and destination must not overlap.
void strided_copy(std::vector<CopyDim> dims, std::size_t element_bytes, const void* source,
                  void* destination);

// Sets `bytes` bytes to 0, on all threads.
void zero_fill(void* destination, int64_t bytes);

}  // namespace oneflow_accel
