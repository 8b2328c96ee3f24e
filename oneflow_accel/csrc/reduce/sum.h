// Sums over any axes of a float32, bfloat16 or float64 tensor.
#pragma once

#include <cstdint>
#include <vector>

#include "common/oneflow.h"

namespace oneflow_accel {

// out = the sum of x over `axes` (none, some or all; negative ones count from the end). The result
// does not depend on the number of threads: blocks of a fixed size are summed up, then the blocks'
// sums in a fixed order, in float64. The sum of nothing is 0.
// bfloat16 is summed up in float32.
template <typename T>
void sum_over(const ::oneflow::ShapeView& shape, const std::vector<int32_t>& axes, const T* x,
              T* out);

}  // namespace oneflow_accel
