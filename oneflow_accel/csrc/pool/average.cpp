#include "pool/average.h"

#include <algorithm>

#include "common/threads.h"
#include "pool/grad_sums.h"

namespace oneflow_accel {

namespace {

template <typename T>
ONEFLOW_ACCEL_INLINE void sum_of_taps_loop(const T* x, const int64_t* taps, int64_t count,
                                           int64_t n, float* sum) {
  std::fill_n(sum, n, 0.0F);
  int64_t k = 0;
  // Four at a time: fewer passes over `sum`, and smaller rounding errors in large windows.
  for (; k + 4 <= count; k += 4) {
    const T* x0 = x + taps[k];
    const T* x1 = x + taps[k + 1];
    const T* x2 = x + taps[k + 2];
    const T* x3 = x + taps[k + 3];
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      sum[c] += (to_float(x0[c]) + to_float(x1[c])) + (to_float(x2[c]) + to_float(x3[c]));
    }
  }
  for (; k < count; ++k) {
    const T* x0 = x + taps[k];
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) { sum[c] += to_float(x0[c]); }
  }
}

// sum[c] = sum of x[taps[k] + c] over `count` taps, n channels.
void sum_of_taps(const float* x, const int64_t* taps, int64_t count, int64_t n, float* sum) {
  sum_of_taps_loop(x, taps, count, n, sum);
}

void sum_of_taps(const Bfloat16* x, const int64_t* taps, int64_t count, int64_t n, float* sum) {
  sum_of_taps_loop(x, taps, count, n, sum);
}

// y[i] = sum[i] * factor.
void scale(const float* sum, int64_t n, float factor, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = sum[i] * factor; }
}

void scale(const float* sum, int64_t n, float factor, Bfloat16* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<Bfloat16>(sum[i] * factor); }
}

// x[taps[k] + c] += dy[c] * factor for all `count` taps, n channels.
template <typename T>
void add_to_taps(const T* dy, float factor, const int64_t* taps, int64_t count, int64_t n,
                 float* x) {
  for (int64_t k = 0; k < count; ++k) {
    float* pixel = x + taps[k];
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) { pixel[c] += to_float(dy[c]) * factor; }
  }
}

// One output row, channels [begin, end); x and y start at the image and at the row.
template <typename T>
void average_row_channels_last(const PoolGeometry& g, const PoolDivisor& divisor,
                               const PoolWindow& row, int64_t begin, int64_t end, const T* x,
                               T* y) {
  PoolTaps taps;
  std::vector<float> sum(end - begin);
  for (const PoolWindow& column : g.columns) {
    find_taps(g, row, column, &taps);
    sum_of_taps(x + begin, taps.data(), static_cast<int64_t>(taps.size()), end - begin,
                sum.data());
    scale(sum.data(), end - begin, 1.0F / divisor(row, column), y + begin);
    y += g.channels;
  }
}

// One image, channels [begin, end).
template <typename T>
void average_grad_image_channels_last(const PoolGeometry& g, const PoolDivisor& divisor,
                                      int64_t begin, int64_t end, const T* dy, T* dx) {
  GradSums<T> sums(dx, g.in_pixels(), g.channels, begin, end);
  sums.clear_up_to(g.in_pixels());
  PoolTaps taps;
  for (const PoolWindow& row : g.rows) {
    for (const PoolWindow& column : g.columns) {
      find_taps(g, row, column, &taps);
      add_to_taps(dy + begin, 1.0F / divisor(row, column), taps.data(),
                  static_cast<int64_t>(taps.size()), end - begin, sums.data() + begin);
      dy += g.channels;
    }
  }
  sums.store();
}

template <typename T>
void average_plane(const PoolGeometry& g, const PoolDivisor& divisor, const T* x, T* y) {
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
      *y++ = from_float<T>(static_cast<float>(sum / divisor(row, column)));
    }
  }
}

template <typename T>
void average_grad_plane(const PoolGeometry& g, const PoolDivisor& divisor, const T* dy, T* dx) {
  GradSums<T> sums(dx, g.in_pixels());
  for (const PoolWindow& row : g.rows) {
    for (const PoolWindow& column : g.columns) {
      const float value = to_float(*dy++) / divisor(row, column);
      for (int64_t h = row.begin; h < row.end; h += row.step) {
        for (int64_t w = column.begin; w < column.end; w += column.step) {
          sums.data()[h * g.width + w] += value;
        }
      }
    }
  }
  sums.store();
}

// Planes of one channel each, in parallel.
template <typename Fn>
void for_each_plane(const PoolGeometry& g, const Fn& fn) {
  const int64_t work = std::max<int64_t>(1, g.in_pixels());
  parallel_for(g.batch * g.channels, std::max<int64_t>(1, kGrainSize / work),
               [&](int64_t begin, int64_t end) {
                 for (int64_t plane = begin; plane < end; ++plane) { fn(plane); }
               });
}

}  // namespace

float PoolDivisor::operator()(const PoolWindow& row, const PoolWindow& column) const {
  if (fixed != 0) { return static_cast<float>(fixed); }
  const int64_t size = count_padding ? row.full * column.full : row.count() * column.count();
  return static_cast<float>(std::max<int64_t>(size, 1));  // an empty window's average is 0
}

template <typename T>
void average_pool(const PoolGeometry& g, const PoolDivisor& divisor, const T* x, T* y) {
  if (!g.channels_last) {
    for_each_plane(g, [&](int64_t plane) {
      average_plane(g, divisor, x + plane * g.in_pixels(), y + plane * g.out_pixels());
    });
    return;
  }
  const auto rows = static_cast<int64_t>(g.rows.size());
  for_each_channels_last_task(
      g.batch * rows, g.channels, g.in_pixels() / std::max<int64_t>(1, rows),
      [&](int64_t task, int64_t begin, int64_t end) {
        const auto row_size = static_cast<int64_t>(g.columns.size()) * g.channels;
        average_row_channels_last(g, divisor, g.rows[task % rows], begin, end,
                                  x + task / rows * g.in_pixels() * g.channels,
                                  y + task * row_size);
      });
}

template void average_pool(const PoolGeometry&, const PoolDivisor&, const float*, float*);
template void average_pool(const PoolGeometry&, const PoolDivisor&, const Bfloat16*, Bfloat16*);

template <typename T>
void average_pool_grad(const PoolGeometry& g, const PoolDivisor& divisor, const T* dy, T* dx) {
  if (!g.channels_last) {
    for_each_plane(g, [&](int64_t plane) {
      average_grad_plane(g, divisor, dy + plane * g.out_pixels(), dx + plane * g.in_pixels());
    });
    return;
  }
  for_each_channels_last_task(
      g.batch, g.channels, g.in_pixels(), [&](int64_t image, int64_t begin, int64_t end) {
        average_grad_image_channels_last(g, divisor, begin, end,
                                         dy + image * g.out_pixels() * g.channels,
                                         dx + image * g.in_pixels() * g.channels);
      });
}

template void average_pool_grad(const PoolGeometry&, const PoolDivisor&, const float*, float*);
template void average_pool_grad(const PoolGeometry&, const PoolDivisor&, const Bfloat16*,
                                Bfloat16*);

}  // namespace oneflow_accel
