#include "pool/maximum.h"

#include <algorithm>
#include <limits>

#include "common/threads.h"
#include "pool/grad_sums.h"

namespace oneflow_accel {

namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The value of type T that `value`, which came from one, is.
template <typename T>
ONEFLOW_ACCEL_INLINE T exact(float value);
template <>
ONEFLOW_ACCEL_INLINE float exact<float>(float value) {
  return value;
}
template <>
ONEFLOW_ACCEL_INLINE Bfloat16 exact<Bfloat16>(float value) {
  return {static_cast<uint16_t>(__builtin_bit_cast(uint32_t, value) >> 16)};
}

// Whether `value` takes the place of the maximum so far.
inline bool replaces(float value, float best) { return (value > best) | (value != value); }

template <typename T>
ONEFLOW_ACCEL_INLINE void max_of_taps_loop(const T* x, const int64_t* taps, int64_t count,
                                           int64_t n, T* y) {
  std::copy_n(x + taps[0], n, y);
  int64_t k = 1;
  for (; k + 2 <= count; k += 2) {  // two at a time: fewer passes over y
    const T* x0 = x + taps[k];
    const T* x1 = x + taps[k + 1];
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      const float first = to_float(x0[c]);
      const float second = to_float(x1[c]);
      const float before = to_float(y[c]);
      const float best = replaces(first, before) ? first : before;
      y[c] = exact<T>(replaces(second, best) ? second : best);
    }
  }
  for (; k < count; ++k) {
    const T* x0 = x + taps[k];
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      const float value = to_float(x0[c]);
      const float before = to_float(y[c]);
      y[c] = exact<T>(replaces(value, before) ? value : before);
    }
  }
}

// y[c] = maximum of x[taps[k] + c] over the `count` > 0 taps, n channels.
void max_of_taps(const float* x, const int64_t* taps, int64_t count, int64_t n, float* y) {
  max_of_taps_loop(x, taps, count, n, y);
}

void max_of_taps(const Bfloat16* x, const int64_t* taps, int64_t count, int64_t n, Bfloat16* y) {
  max_of_taps_loop(x, taps, count, n, y);
}

template <typename T>
ONEFLOW_ACCEL_INLINE void max_of_taps_with_index_loop(const T* x, const int64_t* taps,
                                                      int64_t count, int64_t n, T* best,
                                                      int32_t* found) {
  std::fill_n(best, n, exact<T>(kLowest));
  std::fill_n(found, n, 0);
  for (int64_t k = 0; k < count; ++k) {
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

// The same for any count, and found[c] = which tap it was.
void max_of_taps_with_index(const float* x, const int64_t* taps, int64_t count, int64_t n,
                            float* best, int32_t* found) {
  max_of_taps_with_index_loop(x, taps, count, n, best, found);
}

void max_of_taps_with_index(const Bfloat16* x, const int64_t* taps, int64_t count, int64_t n,
                            Bfloat16* best, int32_t* found) {
  max_of_taps_with_index_loop(x, taps, count, n, best, found);
}

// dx[taps[k] + c] += rest[c] for the first tap k whose x is best[c] or NaN; `rest` holds the output
// gradient and is used up.
template <typename T>
void add_to_first_maximum(const T* x, const T* best, const int64_t* taps, int64_t count, int64_t n,
                          float* rest, float* dx) {
  for (int64_t k = 0; k < count; ++k) {
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

// One output row, channels [begin, end); x, y and index start at the image and at the row.
template <typename T>
void max_row_channels_last(const PoolGeometry& g, const PoolWindow& row, int64_t begin,
                           int64_t end, const T* x, T* y, int64_t* index) {
  const int64_t n = end - begin;
  PoolTaps taps;
  std::vector<int32_t> found(n);
  for (const PoolWindow& column : g.columns) {
    find_taps(g, row, column, &taps);
    const auto count = static_cast<int64_t>(taps.size());
    if (index != nullptr) {
      max_of_taps_with_index(x + begin, taps.data(), count, n, y + begin, found.data());
      for (int64_t c = 0; c < n; ++c) {
        index[begin + c] = taps.empty() ? -1 : taps[found[c]] + begin + c;
      }
      index += g.channels;
    } else if (taps.empty()) {
      std::fill(y + begin, y + end, exact<T>(kLowest));
    } else {
      max_of_taps(x + begin, taps.data(), count, n, y + begin);
    }
    y += g.channels;
  }
}

// One image, channels [begin, end).
template <typename T>
void max_grad_image_channels_last(const PoolGeometry& g, int64_t begin, int64_t end, const T* x,
                                  const T* dy, T* dx) {
  const int64_t n = end - begin;
  PoolTaps taps;
  std::vector<T> best(n);
  std::vector<float> rest(n);
  GradSums<T> sums(dx, g.in_pixels(), g.channels, begin, end);
  for (const PoolWindow& row : g.rows) {
    sums.clear_up_to(row.end * g.width);  // just before they are first added to
    for (const PoolWindow& column : g.columns) {
      find_taps(g, row, column, &taps);
      const auto count = static_cast<int64_t>(taps.size());
      if (count > 0) {
        max_of_taps(x + begin, taps.data(), count, n, best.data());
        std::transform(dy + begin, dy + end, rest.data(), [](T grad) { return to_float(grad); });
        add_to_first_maximum(x + begin, best.data(), taps.data(), count, n, rest.data(),
                             sums.data() + begin);
      }
      dy += g.channels;
    }
  }
  sums.store();
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

template <typename T>
void max_plane(const PoolGeometry& g, const T* x, T* y, int64_t* index) {
  for (const PoolWindow& row : g.rows) {
    for (const PoolWindow& column : g.columns) {
      const int64_t found = find_maximum(g, row, column, x);
      *y++ = found < 0 ? exact<T>(kLowest) : x[found];
      if (index != nullptr) { *index++ = found; }
    }
  }
}

template <typename T>
void max_grad_plane(const PoolGeometry& g, const T* x, const T* dy, T* dx) {
  GradSums<T> sums(dx, g.in_pixels());
  for (const PoolWindow& row : g.rows) {
    for (const PoolWindow& column : g.columns) {
      const int64_t found = find_maximum(g, row, column, x);
      if (found >= 0) { sums.data()[found] += to_float(*dy); }
      ++dy;
    }
  }
  sums.store();
}

// Runs fn(block) for blocks that do not depend on each other, in parallel.
template <typename Fn>
void for_each_block(int64_t blocks, int64_t work, const Fn& fn) {
  parallel_for(blocks, std::max<int64_t>(1, kGrainSize / std::max<int64_t>(1, work)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t block = begin; block < end; ++block) { fn(block); }
               });
}

}  // namespace

template <typename T>
void max_pool(const PoolGeometry& g, const T* x, T* y, int64_t* index) {
  if (!g.channels_last) {
    for_each_block(g.batch * g.channels, g.in_pixels(), [&](int64_t plane) {
      const int64_t offset = plane * g.out_pixels();
      max_plane(g, x + plane * g.in_pixels(), y + offset,
                index == nullptr ? nullptr : index + offset);
    });
    return;
  }
  const auto rows = static_cast<int64_t>(g.rows.size());
  for_each_channels_last_task(
      g.batch * rows, g.channels, g.in_pixels() / std::max<int64_t>(1, rows),
      [&](int64_t task, int64_t begin, int64_t end) {
        const int64_t offset = task * static_cast<int64_t>(g.columns.size()) * g.channels;
        max_row_channels_last(g, g.rows[task % rows], begin, end,
                              x + task / rows * g.in_pixels() * g.channels, y + offset,
                              index == nullptr ? nullptr : index + offset);
      });
}

template void max_pool(const PoolGeometry&, const float*, float*, int64_t*);
template void max_pool(const PoolGeometry&, const Bfloat16*, Bfloat16*, int64_t*);

template <typename T>
void max_pool_grad(const PoolGeometry& g, const T* dy, const int64_t* index, T* dx) {
  const int64_t blocks = g.channels_last ? g.batch : g.batch * g.channels;
  const int64_t depth = g.channels_last ? g.channels : 1;
  const int64_t in_size = g.in_pixels() * depth;
  const int64_t out_size = g.out_pixels() * depth;
  for_each_block(blocks, in_size, [&](int64_t block) {
    GradSums<T> sums(dx + block * in_size, in_size);
    for (int64_t i = block * out_size; i < (block + 1) * out_size; ++i) {
      if (index[i] >= 0) { sums.data()[index[i]] += to_float(dy[i]); }
    }
    sums.store();
  });
}

template void max_pool_grad(const PoolGeometry&, const float*, const int64_t*, float*);
template void max_pool_grad(const PoolGeometry&, const Bfloat16*, const int64_t*, Bfloat16*);

template <typename T>
void max_pool_grad_from_input(const PoolGeometry& g, const T* x, const T* dy, T* dx) {
  if (!g.channels_last) {
    for_each_block(g.batch * g.channels, g.in_pixels(), [&](int64_t plane) {
      max_grad_plane(g, x + plane * g.in_pixels(), dy + plane * g.out_pixels(),
                     dx + plane * g.in_pixels());
    });
    return;
  }
  for_each_channels_last_task(
      g.batch, g.channels, g.in_pixels(), [&](int64_t image, int64_t begin, int64_t end) {
        const int64_t offset = image * g.in_pixels() * g.channels;
        max_grad_image_channels_last(g, begin, end, x + offset,
                                     dy + image * g.out_pixels() * g.channels, dx + offset);
      });
}

template void max_pool_grad_from_input(const PoolGeometry&, const float*, const float*, float*);
template void max_pool_grad_from_input(const PoolGeometry&, const Bfloat16*, const Bfloat16*,
                                       Bfloat16*);

}  // namespace oneflow_accel
