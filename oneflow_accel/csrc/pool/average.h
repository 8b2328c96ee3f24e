// Average pooling in two dimensions, both layouts, float32 and bfloat16 (T is float or Bfloat16).
#pragma once

#include "pool/windows.h"

namespace oneflow_accel {

// sum[c] = sum of x[tap + c] over the taps, n channels.
template <typename T>
void sum_of_taps(const T* x, const PoolTaps& taps, int64_t n, float* sum) {
  std::fill_n(sum, n, 0.0F);
  int64_t k = 0;
  // Four at a time: fewer passes over `sum`, and smaller rounding errors in large windows.
  for (; k + 4 <= taps.count(); k += 4) {
    const T* x0 = x + taps[k];
    const T* x1 = x + taps[k + 1];
    const T* x2 = x + taps[k + 2];
    const T* x3 = x + taps[k + 3];
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      sum[c] += (to_float(x0[c]) + to_float(x1[c])) + (to_float(x2[c]) + to_float(x3[c]));
    }
  }
  for (; k < taps.count(); ++k) {
    const T* x0 = x + taps[k];
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) { sum[c] += to_float(x0[c]); }
  }
}

template <typename T>
void average_plane(const PoolGeometry& g, const T* x, T* y) {
  for (const PoolWindow& row : g.rows) {
    for (const PoolWindow& column : g.columns) {
      double sum = 0.0;
      for (int64_t h = row.begin; h < row.end; h += row.step) {
        float part = 0.0F;
        for (int64_t w = column.begin; w < column.end; w += column.step) {
          part += to_float(x[h * g.width + w]);
        }
        sum += part;
      }
      *y++ = from_float<T>(static_cast<float>(sum / g.divisor(row, column)));
    }
  }
}

template <typename T>
void average_pool(const PoolGeometry& g, const T* x, T* y) {
  if (!g.channels_last) {
    return for_each_plane(g, [&](int64_t in, int64_t out) { average_plane(g, x + in, y + out); });
  }
  for_each_part(g, g.out_height(), [&](int64_t row, const PoolPart& part) {
    PoolTaps taps;
    std::vector<float> sums(part.channels());
    T* to = y + part.out + part.begin;
    for (const PoolWindow& column : g.columns) {
      taps.find(g, g.rows[row], column);
      sum_of_taps(x + part.in + part.begin, taps, part.channels(), sums.data());
      const float factor = 1.0F / g.divisor(g.rows[row], column);
#pragma omp simd
      for (int64_t c = 0; c < part.channels(); ++c) { to[c] = from_float<T>(sums[c] * factor); }
      to += g.channels;
    }
  });
}

template <typename T>
void average_grad_plane(const PoolGeometry& g, const T* dy, T* dx) {
  GradSums<T> sums(dx, g.in_pixels());
  for (const PoolWindow& row : g.rows) {
    for (const PoolWindow& column : g.columns) {
      const float value = to_float(*dy++) / g.divisor(row, column);
      for (int64_t h = row.begin; h < row.end; h += row.step) {
        for (int64_t w = column.begin; w < column.end; w += column.step) {
          sums.data()[h * g.width + w] += value;
        }
      }
    }
  }
  sums.store();
}

template <typename T>
void average_pool_grad(const PoolGeometry& g, const T* dy, T* dx) {
  if (!g.channels_last) {
    return for_each_plane(
        g, [&](int64_t in, int64_t out) { average_grad_plane(g, dy + out, dx + in); });
  }
  for_each_part(g, 1, [&](int64_t, const PoolPart& part) {
    GradSums<T> sums(dx + part.in, g.in_pixels(), g.channels, part.begin, part.end);
    sums.clear_up_to(g.in_pixels());
    PoolTaps taps;
    const T* from = dy + part.out + part.begin;
    for (const PoolWindow& row : g.rows) {
      for (const PoolWindow& column : g.columns) {
        taps.find(g, row, column);
        const float factor = 1.0F / g.divisor(row, column);
        for (int64_t k = 0; k < taps.count(); ++k) {
          float* pixel = sums.data() + taps[k] + part.begin;
#pragma omp simd
          for (int64_t c = 0; c < part.channels(); ++c) { pixel[c] += to_float(from[c]) * factor; }
        }
        from += g.channels;
      }
    }
    sums.store();
  });
}

}  // namespace oneflow_accel
