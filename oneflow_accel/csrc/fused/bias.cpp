#include "fused/bias.h"


namespace oneflow_accel::fused {

void add_row(const float* a, const float* b, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { out[i] = a[i] + b[i]; }
}

void add_value(const float* a, float b, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { out[i] = a[i] + b; }
}

void add_bias(const BiasAxis& axis, const float* a, const float* b, float* out, int64_t begin,
              int64_t end) {
  int64_t count = 0;
  for (int64_t i = begin; i < end; i += count) {
    if (axis.inner == 1) {
      const int64_t channel = i % axis.channels;
      count = std::min(axis.channels - channel, end - i);
      add_row(a + i, b + channel, out + i, count);
    } else {
      count = std::min(axis.inner - i % axis.inner, end - i);
      add_value(a + i, b[i / axis.inner % axis.channels], out + i, count);
    }
  }
}

}  // namespace oneflow_accel::fused
