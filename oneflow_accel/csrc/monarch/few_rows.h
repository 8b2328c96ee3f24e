// Products of a few rows, as answering a request has them: reading the factors is what they cost.
#pragma once

#include "matmul/few_rows.h"
#include "monarch/monarch.h"

namespace oneflow_accel {

// As monarch() does it, for at most kMostFewRows rows.
void monarch_few_rows(const MonarchShape& shape, const MonarchInputs& in, const float* bias,
                      float* middle, float* y);

}  // namespace oneflow_accel
