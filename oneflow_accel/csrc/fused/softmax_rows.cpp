#include "fused/softmax_rows.h"

#include "softmax/row.h"

namespace oneflow_accel::fused {

void masked_softmax(const float* x, const uint8_t* mask, float scale, float fill, float* y,
                    int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = mask[i] != 0 ? x[i] * scale : fill; }
  row::softmax(y, y, n);
}

void masked_softmax_grad(const float* y, const float* dy, const uint8_t* mask, float scale,
                         float* dx, int64_t n) {
  row::softmax_grad(y, dy, dx, n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { dx[i] = mask[i] != 0 ? dx[i] * scale : 0.0F; }
}

void leading_softmax(const float* x, int64_t kept, float scale, float fill, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < kept; ++i) { y[i] = x[i] * scale; }
  // So far below the largest element e^z is 0 in float32: the rest need not be computed.
  constexpr float kNegligible = -105.0F;
  if (fill - row::maximum(y, kept) < kNegligible) {
    row::softmax(y, y, kept);
    std::fill(y + kept, y + n, 0.0F);
  } else {
    std::fill(y + kept, y + n, fill);
    row::softmax(y, y, n);
  }
}

void leading_softmax_grad(const float* y, const float* dy, int64_t kept, float scale, float* dx,
                          int64_t n) {
  // All of the rest has one value; where it is 0 it adds nothing to the sum over the row.
  row::softmax_grad(y, dy, dx, kept < n && y[kept] == 0.0F ? kept : n);
#pragma omp simd
  for (int64_t i = 0; i < kept; ++i) { dx[i] *= scale; }
  std::fill(dx + kept, dx + n, 0.0F);
}

}  // namespace oneflow_accel::fused
