#include "norm/channel_sums.h"

#include <algorithm>

#include "common/onednn.h"
#include "common/threads.h"

namespace oneflow_accel {

namespace {

// Rows that are added up in float32 before they go into a double: few enough for float32, many
// enough to make the conversion cheap.
constexpr int64_t kBlockRows = 32;
// Channels whose running sums stay in the first-level cache.
constexpr int64_t kStripChannels = 512;
// Rows whose mean the differences of a chunk are taken from.
constexpr int64_t kShiftRows = 8;
// Elements of one channel that are added up in float32, in SIMD lanes.
constexpr int64_t kSegment = 1024;
// Enough to keep many threads busy, few enough to merge in no time.
constexpr int64_t kMaxChunks = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of each channel two sums are made at once, of terms that element i has with the channel's center.
// Moments are made of differences,
template <typename T>
struct MomentTerms {
  const T* x;
  ONEFLOW_ACCEL_INLINE float first(int64_t i, float center) const {
    return to_float(x[i]) - center;
  }
  ONEFLOW_ACCEL_INLINE float second(int64_t i, float center) const {
    const float d = to_float(x[i]) - center;
    return d * d;
  }
};
// its sums of dy, and of dy and the differences.
template <typename T>
struct GradientTerms {
  const T* dy;
  const T* x;
  ONEFLOW_ACCEL_INLINE float first(int64_t i, float) const { return to_float(dy[i]); }
  ONEFLOW_ACCEL_INLINE float second(int64_t i, float center) const {
    return to_float(dy[i]) * (to_float(x[i]) - center);
  }
};

// Adds the terms of `rows` rows of n channels, which begin at `start` and are `stride` apart. One
// row at a time: memory is read fastest in order.
template <typename Terms>
void add_rows(const Terms& terms, int64_t start, int64_t rows, int64_t stride, int64_t n,
              const float* center, float* first, float* second) {
  for (int64_t row = 0; row < rows; ++row, start += stride) {
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      first[c] += terms.first(start + c, center[c]);
      second[c] += terms.second(start + c, center[c]);
    }
  }
}

// total[c] += part[c]; part[c] = 0.
void flush(float* part, double* total, int64_t n) {
#pragma omp simd
  for (int64_t c = 0; c < n; ++c) {
    total[c] += part[c];
    part[c] = 0.0F;
  }
}

// The same for n elements of one channel, which lie one after the other, n <= kSegment.
template <typename Terms>
void add_segment(const Terms& terms, int64_t start, int64_t n, float center, double* first,
                 double* second) {
  float a = 0.0F;
  float b = 0.0F;
#pragma omp simd reduction(+ : a, b)
  for (int64_t i = start; i < start + n; ++i) {
    a += terms.first(i, center);
    b += terms.second(i, center);
  }
  *first += a;
  *second += b;
}

// The outer axis cut into `count` chunks of `size` (the last may be shorter), and two sums for each
// chunk and channel, by chunk: of the calling thread's scratch memory.
struct ChunkSums {
  ChannelView view;
  int64_t size;
  int64_t count;
  double* firsts;
  double* seconds;

  explicit ChunkSums(const ChannelView& all) : view(all) {
    const int64_t unit = view.channels_last() ? kBlockRows : 1;
    size = ceil_div(ceil_div(view.outer, kMaxChunks), unit) * unit;
    count = ceil_div(view.outer, size);
    const int64_t n = count * view.channels;
    firsts = static_cast<double*>(scratch(ScratchSlot::kReduction, 2 * n * sizeof(double)));
    seconds = firsts + n;
    std::fill_n(firsts, 2 * n, 0.0);
  }
  int64_t begin(int64_t chunk) const { return chunk * size; }
  int64_t length(int64_t chunk) const { return std::min(size, view.outer - chunk * size); }

  // Calls of_chunk(chunk) for channels last, of_channel(chunk, channel) for channels first, in
  // parallel.
  template <typename OfChunk, typename OfChannel>
  void for_each(const OfChunk& of_chunk, const OfChannel& of_channel) const {
    const int64_t grain = ceil_div(kGrainSize, size * view.slice());
    const int64_t each = view.channels_last() ? 1 : view.channels;
    parallel_for(count * each, grain, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        if (view.channels_last()) {
          of_chunk(i);
        } else {
          of_channel(i / each, i % each);
        }
      }
    });
  }

  // Adds the terms of a chunk of a channels-last tensor. `sums` has room for 2 floats per channel.
  template <typename Terms>
  void add_chunk(const Terms& terms, int64_t chunk, const float* center, float* sums) const {
    const int64_t n = view.channels;
    std::fill_n(sums, 2 * n, 0.0F);
    for (int64_t row = 0; row < length(chunk); row += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, length(chunk) - row);
      for (int64_t c = 0; c < n; c += kStripChannels) {
        const int64_t columns = std::min(kStripChannels, n - c);
        add_rows(terms, (begin(chunk) + row) * n + c, rows, n, columns, center + c, sums + c,
                 sums + n + c);
        flush(sums + c, firsts + chunk * n + c, columns);
        flush(sums + n + c, seconds + chunk * n + c, columns);
      }
    }
  }

  // Those of channel c in a chunk of a channels-first one.
  template <typename Terms>
  void add_channel(const Terms& terms, int64_t chunk, int64_t c, float center) const {
    const int64_t place = chunk * view.channels + c;
    for (int64_t o = begin(chunk); o < begin(chunk) + length(chunk); ++o) {
      const int64_t start = (o * view.channels + c) * view.inner;
      for (int64_t i = 0; i < view.inner; i += kSegment) {
        add_segment(terms, start + i, std::min(kSegment, view.inner - i), center, firsts + place,
                    seconds + place);
      }
    }
  }

  // Makes the mean and the centered sum of squares of the sums of n differences from `shift`.
  void finish_moments(int64_t place, double shift, int64_t n) const {
    const double sum = firsts[place];
    const double centered = seconds[place] - sum * sum / n;
    firsts[place] = shift + sum / n;
    seconds[place] = centered < 0.0 ? 0.0 : centered;  // not std::max, which would turn NaN into 0
  }
};

float* row_buffer(int64_t floats) {
  return static_cast<float*>(scratch(ScratchSlot::kSource, floats * sizeof(float)));
}

}  // namespace

template <typename T>
void channel_moments(const ChannelView& view, const T* x, double* mean, double* variance) {
  std::fill_n(mean, view.channels, 0.0);
  std::fill_n(variance, view.channels, 0.0);
  if (view.elements() == 0) { return; }
  const int64_t channels = view.channels;
  const ChunkSums sums(view);
  const MomentTerms<T> terms{x};
  sums.for_each(
      [&](int64_t chunk) {
        float* shift = row_buffer(3 * channels);
        float* rest = shift + channels;
        std::fill_n(shift, 3 * channels, 0.0F);
        const int64_t first = std::min(kShiftRows, sums.length(chunk));
        add_rows(terms, sums.begin(chunk) * channels, first, channels, channels, shift, rest,
                 rest + channels);
        for (int64_t c = 0; c < channels; ++c) { shift[c] = rest[c] / first; }
        sums.add_chunk(terms, chunk, shift, rest);
        for (int64_t c = 0; c < channels; ++c) {
          sums.finish_moments(chunk * channels + c, shift[c], sums.length(chunk));
        }
      },
      [&](int64_t chunk, int64_t c) {
        const int64_t first = std::min(kSegment, view.inner);
        double sum = 0.0;
        double squares = 0.0;
        add_segment(terms, (sums.begin(chunk) * channels + c) * view.inner, first, 0.0F, &sum,
                    &squares);
        const auto shift = static_cast<float>(sum / first);
        sums.add_channel(terms, chunk, c, shift);
        sums.finish_moments(chunk * channels + c, shift, sums.length(chunk) * view.inner);
      });
  const auto total = static_cast<double>(view.elements_per_channel());
  parallel_for(channels, ceil_div(kGrainSize, 4 * sums.count), [&](int64_t begin, int64_t end) {
    for (int64_t chunk = 0; chunk < sums.count; ++chunk) {
      const double share = sums.length(chunk) * view.inner / total;
      const double* chunk_mean = sums.firsts + chunk * channels;
      for (int64_t c = begin; c < end; ++c) { mean[c] += share * chunk_mean[c]; }
    }
    for (int64_t chunk = 0; chunk < sums.count; ++chunk) {
      const double share = sums.length(chunk) * view.inner / total;
      const double* chunk_mean = sums.firsts + chunk * channels;
      const double* centered = sums.seconds + chunk * channels;
      for (int64_t c = begin; c < end; ++c) {
        const double d = chunk_mean[c] - mean[c];
        variance[c] += centered[c] / total + share * d * d;
      }
    }
  });
}

template <typename T>
void channel_gradient_sums(const ChannelView& view, const T* dy, const T* x, const float* mean,
                           double* sum_dy, double* sum_dy_centered) {
  std::fill_n(sum_dy, view.channels, 0.0);
  std::fill_n(sum_dy_centered, view.channels, 0.0);
  if (view.elements() == 0) { return; }
  const int64_t channels = view.channels;
  const ChunkSums sums(view);
  const GradientTerms<T> terms{dy, x};
  sums.for_each(
      [&](int64_t chunk) { sums.add_chunk(terms, chunk, mean, row_buffer(2 * channels)); },
      [&](int64_t chunk, int64_t c) { sums.add_channel(terms, chunk, c, mean[c]); });
  parallel_for(channels, ceil_div(kGrainSize, 2 * sums.count), [&](int64_t begin, int64_t end) {
    for (int64_t chunk = 0; chunk < sums.count; ++chunk) {
      for (int64_t c = begin; c < end; ++c) {
        sum_dy[c] += sums.firsts[chunk * channels + c];
        sum_dy_centered[c] += sums.seconds[chunk * channels + c];
      }
    }
  });
}

#define INSTANTIATE_SUMS(T)                                                                 \
  template void channel_moments(const ChannelView&, const T*, double*, double*);            \
  template void channel_gradient_sums(const ChannelView&, const T*, const T*, const float*, \
                                      double*, double*);
INSTANTIATE_SUMS(float)
INSTANTIATE_SUMS(Bfloat16)
#undef INSTANTIATE_SUMS

}  // namespace oneflow_accel
