// The four operations of arithmetic on rows that broadcast.
#pragma once

#include "elementwise/broadcast.h"

namespace oneflow_accel {

void add_rows(const float* a, const float* b, float* out, const Rows& rows);
void add_rows(const Bfloat16* a, const Bfloat16* b, Bfloat16* out, const Rows& rows);
void subtract_rows(const float* a, const float* b, float* out, const Rows& rows);
void subtract_rows(const Bfloat16* a, const Bfloat16* b, Bfloat16* out, const Rows& rows);
void multiply_rows(const float* a, const float* b, float* out, const Rows& rows);
void multiply_rows(const Bfloat16* a, const Bfloat16* b, Bfloat16* out, const Rows& rows);
void divide_rows(const float* a, const float* b, float* out, const Rows& rows);
void divide_rows(const Bfloat16* a, const Bfloat16* b, Bfloat16* out, const Rows& rows);

// What SetCreateFn takes: out = function(a, b), the shapes of a and b broadcast. For float and
// Bfloat16.
template <typename T>
::oneflow::user_op::OpKernelCreateFn broadcast_kernel(const char* a, const char* b, const char* out,
                                                      RowsFunction<T> function);

}  // namespace oneflow_accel
