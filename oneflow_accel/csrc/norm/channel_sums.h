// The reductions of a normalization: sums over every axis but the channel axis.
//
// The tensor is cut into chunks whose size depends on its shape only, each chunk is summed up by
// one thread, and the chunks are put together in order: results do not depend on the number of
// threads.
#pragma once

#include <algorithm>
#include <vector>

#include "common/oneflow.h"
#include "common/threads.h"
#include "norm/row_norm.h"

namespace oneflow_accel {

// A tensor seen by a normalization over one of its axes: [outer, channels, inner], row-major, the
// axes before, at and after the channel axis. NCHW has inner = H * W; NHWC and (N, C) have
// inner = 1, so that every row of `channels` is contiguous.
struct ChannelView {
  int64_t outer;
  int64_t channels;
  int64_t inner;

  ChannelView(const ::oneflow::ShapeView& shape, int32_t axis)
      : outer(shape.Count(0, axis)), channels(shape.At(axis)), inner(shape.Count(axis + 1)) {}

  bool channels_last() const { return inner == 1; }
  int64_t elements() const { return outer * channels * inner; }
  int64_t elements_per_channel() const { return outer * inner; }
  // Elements of a row of a channels-last tensor, or of a plane of a channels-first one.
  int64_t slice() const { return channels_last() ? channels : inner; }
};

// Rows that are added up in float32 before they go into a double: few enough for float32, many
// enough to make the conversion cheap.
constexpr int64_t kBlockRows = 32;
// Channels whose running sums stay in the first-level cache.
constexpr int64_t kStripChannels = 512;
// Rows whose mean the differences of a chunk are taken from.
constexpr int64_t kShiftRows = 8;
// Enough to keep many threads busy, few enough to merge in no time.
constexpr int64_t kMaxChunks = 64;

// Of each channel two sums are made at once: terms(i, center, first, second) adds to them what
// element i and its channel's center give.

// Adds the terms of `rows` rows of n channels, which begin at `start` and are `stride` apart. One
// row at a time: memory is read fastest in order.
template <typename Terms>
void add_channel_rows(const Terms& terms, int64_t start, int64_t rows, int64_t stride, int64_t n,
                      const float* center, float* first, float* second) {
  for (int64_t row = 0; row < rows; ++row, start += stride) {
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) { terms(start + c, center[c], first[c], second[c]); }
  }
}

// The same for n elements of one channel, which lie one after the other.
template <typename Terms>
void add_segment(const Terms& terms, int64_t start, int64_t n, float center, double* first,
                 double* second) {
  add_up<float>(n, first, second, [=](int64_t i, float& a, float& b) {
    terms(start + i, center, a, b);
  });
}

// total[c] += part[c]; part[c] = 0.
inline void flush(float* part, double* total, int64_t n) {
#pragma omp simd
  for (int64_t c = 0; c < n; ++c) {
    total[c] += part[c];
    part[c] = 0.0F;
  }
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
    size = round_up(ceil_div(view.outer, kMaxChunks), unit);
    count = ceil_div(view.outer, size);
    const int64_t n = count * view.channels;
    firsts = scratch<double>(ScratchSlot::kReduction, 2 * n);
    seconds = firsts + n;
    std::fill_n(firsts, 2 * n, 0.0);
  }
  int64_t begin(int64_t chunk) const { return chunk * size; }
  int64_t length(int64_t chunk) const { return std::min(size, view.outer - chunk * size); }

  // Calls of_chunk(chunk) for channels last, of_channel(chunk, channel) for channels first, in
  // parallel.
  template <typename OfChunk, typename OfChannel>
  void for_each(const OfChunk& of_chunk, const OfChannel& of_channel) const {
    const int64_t each = view.channels_last() ? 1 : view.channels;
    for_each_block(count * each, size * view.slice(), [&](int64_t i) {
      if (view.channels_last()) {
        of_chunk(i);
      } else {
        of_channel(i / each, i % each);
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
        add_channel_rows(terms, (begin(chunk) + row) * n + c, rows, n, columns, center + c,
                         sums + c, sums + n + c);
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
      add_segment(terms, start, view.inner, center, firsts + place, seconds + place);
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

inline float* row_buffer(int64_t floats) {
  return scratch<float>(ScratchSlot::kSource, floats);
}

struct ChannelPairs {
  std::vector<double> first;
  std::vector<double> second;

  explicit ChannelPairs(int64_t channels) : first(channels), second(channels) {}
};

// Mean and biased variance of each channel of `x`. Zeros where a channel has no element.
//
// One pass over memory, and stable where the mean is large against the standard deviation: a chunk
// is summed up as differences from the mean of its own first elements, and chunks are merged by
// their means and centered sums of squares (Chan, Golub, LeVeque, "Algorithms for computing the
// sample variance", 1983), in double precision.
template <typename T>
ChannelPairs channel_moments(const ChannelView& view, const T* x) {
  const int64_t channels = view.channels;
  ChannelPairs moments(channels);
  if (view.elements() == 0) { return moments; }
  const ChunkSums sums(view);
  const auto terms = [=](int64_t i, float center, float& first, float& second) {
    const float d = to_float(x[i]) - center;
    first += d;
    second += d * d;
  };
  sums.for_each(
      [&](int64_t chunk) {
        float* shift = row_buffer(3 * channels);
        float* rest = shift + channels;
        std::fill_n(shift, 3 * channels, 0.0F);
        const int64_t first = std::min(kShiftRows, sums.length(chunk));
        add_channel_rows(terms, sums.begin(chunk) * channels, first, channels, channels, shift,
                         rest, rest + channels);
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
  double* mean = moments.first.data();
  double* variance = moments.second.data();
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
  return moments;
}

// sum(dy) and sum(dy * (x - mean)) of each channel.
template <typename T>
ChannelPairs channel_gradient_sums(const ChannelView& view, const T* dy, const T* x,
                                   const float* mean) {
  const int64_t channels = view.channels;
  ChannelPairs totals(channels);
  if (view.elements() == 0) { return totals; }
  const ChunkSums sums(view);
  const auto terms = [=](int64_t i, float center, float& first, float& second) {
    first += to_float(dy[i]);
    second += to_float(dy[i]) * (to_float(x[i]) - center);
  };
  sums.for_each(
      [&](int64_t chunk) { sums.add_chunk(terms, chunk, mean, row_buffer(2 * channels)); },
      [&](int64_t chunk, int64_t c) { sums.add_channel(terms, chunk, c, mean[c]); });
  parallel_for(channels, ceil_div(kGrainSize, 2 * sums.count), [&](int64_t begin, int64_t end) {
    for (int64_t chunk = 0; chunk < sums.count; ++chunk) {
      for (int64_t c = begin; c < end; ++c) {
        totals.first[c] += sums.firsts[chunk * channels + c];
        totals.second[c] += sums.seconds[chunk * channels + c];
      }
    }
  });
  return totals;
}

}  // namespace oneflow_accel
