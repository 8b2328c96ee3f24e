// Max pooling in two dimensions, both layouts, float32 and bfloat16 (T is float or Bfloat16). A
// window's maximum is its first one, as in PyTorch, or NaN if it has any; an empty window's is
// -inf.
#pragma once

#include <limits>

#include "pool/windows.h"

namespace oneflow_accel {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The value of type T that `value`, which came from one, is.
template <typename T>
ONEFLOW_ACCEL_INLINE T exact(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return {static_cast<uint16_t>(__builtin_bit_cast(uint32_t, value) >> 16)};
  }
}

// Whether `value` takes the place of the maximum so far.
ONEFLOW_ACCEL_INLINE bool replaces(float value, float best) {
  return (value > best) | (value != value);
}

// y[c] = maximum of x[tap + c] over the taps, n channels.
template <typename T>
void max_of_taps(const T* x, const PoolTaps& taps, int64_t n, T* y) {
  if (taps.count() == 0) {
    std::fill_n(y, n, exact<T>(kLowest));
    return;
  }
  std::copy_n(x + taps[0], n, y);
  // Two at a time: fewer passes over y. The last one may be taken twice.
  for (int64_t k = 1; k < taps.count(); k += 2) {
    const T* x0 = x + taps[k];
    const T* x1 = x + taps[std::min(k + 1, taps.count() - 1)];
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      const float first = to_float(x0[c]);
      const float second = to_float(x1[c]);
      const float before = to_float(y[c]);
      const float best = replaces(first, before) ? first : before;
      y[c] = exact<T>(replaces(second, best) ? second : best);
    }
  }
}

// The same, and found[c] = which one it was.
template <typename T>
void max_of_taps_with_index(const T* x, const PoolTaps& taps, int64_t n, T* best, int32_t* found) {
  std::fill_n(best, n, exact<T>(kLowest));
  std::fill_n(found, n, 0);
  for (int64_t k = 0; k < taps.count(); ++k) {
    const T* pixel = x + taps[k];
    const auto tap = static_cast<int32_t>(k);
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      const float value = to_float(pixel[c]);
      const float before = to_float(best[c]);
      const bool better = replaces(value, before);
      best[c] = exact<T>(better ? value : before);
      found[c] = better ? tap : found[c];
    }
  }
}

// dx[tap + c] += rest[c] for the first tap whose x is best[c] or NaN; `rest` holds the output
// gradient and is used up.
template <typename T>
void add_to_first_maximum(const T* x, const T* best, const PoolTaps& taps, int64_t n, float* rest,
                          float* dx) {
  for (int64_t k = 0; k < taps.count(); ++k) {
    const T* pixel = x + taps[k];
    float* pixel_grad = dx + taps[k];
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      const float value = to_float(pixel[c]);
      const float grad = rest[c];
      const bool hit = (value == to_float(best[c])) | (value != value);
      pixel_grad[c] += hit ? grad : 0.0F;
      rest[c] = hit ? 0.0F : grad;
    }
  }
}

// Offset in the plane of one window's maximum, -1 if the window is empty.
template <typename T>
int64_t find_maximum(const PoolGeometry& g, const PoolWindow& row, const PoolWindow& column,
                     const T* x) {
  if (row.begin >= row.end || column.begin >= column.end) { return -1; }
  int64_t found = row.begin * g.width + column.begin;
  float best = kLowest;
  for (int64_t h = row.begin; h < row.end; h += row.step) {
    for (int64_t w = column.begin; w < column.end; w += column.step) {
      const float value = to_float(x[h * g.width + w]);
      if (replaces(value, best)) {
        best = value;
        found = h * g.width + w;
      }
    }
  }
  return found;
}

// Calls fn(offset of the maximum, output) for each window of a plane, whose first output is `out`.
template <typename T, typename Fn>
void for_each_maximum(const PoolGeometry& g, const T* x, int64_t out, const Fn& fn) {
  for (const PoolWindow& row : g.rows) {
    for (const PoolWindow& column : g.columns) { fn(find_maximum(g, row, column, x), out++); }
  }
}

// `index`, if not null, gets where each maximum was found: its offset in its plane (channels
// first) or in its image (channels last), -1 for an empty window.
template <typename T>
void max_pool(const PoolGeometry& g, const T* x, T* y, int64_t* index) {
  if (!g.channels_last) {
    return for_each_plane(g, [&](int64_t in, int64_t out) {
      for_each_maximum(g, x + in, out, [&](int64_t found, int64_t i) {
        y[i] = found < 0 ? exact<T>(kLowest) : x[in + found];
        if (index != nullptr) { index[i] = found; }
      });
    });
  }
  for_each_part(g, g.out_height(), [&](int64_t row, const PoolPart& part) {
    PoolTaps taps;
    std::vector<int32_t> found(part.channels());
    const T* from = x + part.in + part.begin;
    int64_t out = part.out + part.begin;
    for (const PoolWindow& column : g.columns) {
      taps.find(g, g.rows[row], column);
      if (index != nullptr) {
        max_of_taps_with_index(from, taps, part.channels(), y + out, found.data());
        for (int64_t c = 0; c < part.channels(); ++c) {
          index[out + c] = taps.count() == 0 ? -1 : taps[found[c]] + part.begin + c;
        }
      } else {
        max_of_taps(from, taps, part.channels(), y + out);
      }
      out += g.channels;
    }
  });
}

// The gradient where max_pool's `index` is at hand.
template <typename T>
void max_pool_grad(const PoolGeometry& g, const T* dy, const int64_t* index, T* dx) {
  const int64_t depth = g.channels_last ? g.channels : 1;
  const int64_t in_size = g.in_pixels() * depth;
  const int64_t out_size = g.out_pixels() * depth;
  for_each_block(g.batch * g.channels / depth, in_size, [&](int64_t block) {
    GradSums<T> sums(dx + block * in_size, in_size);
    for (int64_t i = block * out_size; i < (block + 1) * out_size; ++i) {
      if (index[i] >= 0) { sums.data()[index[i]] += to_float(dy[i]); }
    }
    sums.store();
  });
}

// The same from the input alone, which finds the maxima again: the output may have been changed in
// place since.
template <typename T>
void max_pool_grad_from_input(const PoolGeometry& g, const T* x, const T* dy, T* dx) {
  if (!g.channels_last) {
    return for_each_plane(g, [&](int64_t in, int64_t out) {
      GradSums<T> sums(dx + in, g.in_pixels());
      for_each_maximum(g, x + in, out, [&](int64_t found, int64_t i) {
        if (found >= 0) { sums.data()[found] += to_float(dy[i]); }
      });
      sums.store();
    });
  }
  for_each_part(g, 1, [&](int64_t, const PoolPart& part) {
    const int64_t n = part.channels();
    PoolTaps taps;
    std::vector<T> best(n);
    std::vector<float> rest(n);
    GradSums<T> sums(dx + part.in, g.in_pixels(), g.channels, part.begin, part.end);
    const T* from = x + part.in + part.begin;
    const T* grad = dy + part.out + part.begin;
    for (const PoolWindow& row : g.rows) {
      sums.clear_up_to(row.end * g.width);  // just before they are first added to
      for (const PoolWindow& column : g.columns) {
        taps.find(g, row, column);
        max_of_taps(from, taps, n, best.data());
        std::transform(grad, grad + n, rest.data(), [](T value) { return to_float(value); });
        add_to_first_maximum(from, best.data(), taps, n, rest.data(), sums.data() + part.begin);
        grad += g.channels;
      }
    }
    sums.store();
  });
}

}  // namespace oneflow_accel
