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

// The outer axis cut into `count` chunks of `size` (the last may be shorter).
struct Chunks {
  int64_t size;
  int64_t count;

  explicit Chunks(const ChannelView& view) {
    const int64_t unit = view.channels_last() ? kBlockRows : 1;
    size = ceil_div(ceil_div(view.outer, kMaxChunks), unit) * unit;
    count = size == 0 ? 0 : ceil_div(view.outer, size);
  }
  int64_t begin(int64_t chunk) const { return chunk * size; }
  int64_t length(const ChannelView& view, int64_t chunk) const {
    return std::min(size, view.outer - chunk * size);
  }
};

// sum[c] += sum of (x - shift[c]), squares[c] += sum of (x - shift[c])^2 over `rows` rows of n
// channels that are `stride` apart. One row at a time: memory is read fastest in order.
template <typename T>
void add_moments_of_rows(const T* x, int64_t rows, int64_t stride, int64_t n,
                         const float* shift, float* sum, float* squares) {
  for (int64_t row = 0; row < rows; ++row, x += stride) {
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      const float d = to_float(x[c]) - shift[c];
      sum[c] += d;
      squares[c] += d * d;
    }
  }
}

// sum[c] += sum of dy, product[c] += sum of dy * (x - mean[c]), as above.
template <typename T>
void add_gradients_of_rows(const T* dy, const T* x, int64_t rows, int64_t stride, int64_t n,
                           const float* mean, float* sum, float* product) {
  for (int64_t row = 0; row < rows; ++row, dy += stride, x += stride) {
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      const float d = to_float(dy[c]);
      sum[c] += d;
      product[c] += d * (to_float(x[c]) - mean[c]);
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

struct SumPair {
  double first = 0.0;
  double second = 0.0;
};

// The same for `n` contiguous elements of one channel, n <= kSegment.
template <typename T>
void add_moments_of_segment(const T* x, int64_t n, float shift, SumPair* sums) {
  float sum = 0.0F;
  float squares = 0.0F;
#pragma omp simd reduction(+ : sum, squares)
  for (int64_t i = 0; i < n; ++i) {
    const float d = to_float(x[i]) - shift;
    sum += d;
    squares += d * d;
  }
  sums->first += sum;
  sums->second += squares;
}

template <typename T>
void add_gradients_of_segment(const T* dy, const T* x, int64_t n, float mean, SumPair* sums) {
  float sum = 0.0F;
  float product = 0.0F;
#pragma omp simd reduction(+ : sum, product)
  for (int64_t i = 0; i < n; ++i) {
    const float d = to_float(dy[i]);
    sum += d;
    product += d * (to_float(x[i]) - mean);
  }
  sums->first += sum;
  sums->second += product;
}

// Calls fn(offset, length) for the pieces of at most kSegment elements that channel `c` has in
// the outer indices [begin, begin + length) of a channels-first tensor.
template <typename Fn>
void for_each_segment(const ChannelView& view, int64_t begin, int64_t length, int64_t c,
                      const Fn& fn) {
  for (int64_t o = begin; o < begin + length; ++o) {
    const int64_t start = (o * view.channels + c) * view.inner;
    for (int64_t i = 0; i < view.inner; i += kSegment) {
      fn(start + i, std::min(kSegment, view.inner - i));
    }
  }
}

// Calls fn(first row, rows, first channel, channels) for the pieces of a channels-last chunk that
// are added up in float32.
template <typename Fn>
void for_each_block(const ChannelView& view, int64_t rows, const Fn& fn) {
  for (int64_t row = 0; row < rows; row += kBlockRows) {
    for (int64_t c = 0; c < view.channels; c += kStripChannels) {
      fn(row, std::min(kBlockRows, rows - row), c, std::min(kStripChannels, view.channels - c));
    }
  }
}

// Mean and centered sum of squares from sums of differences from `shift` over n elements.
void finish_moments(double shift, int64_t n, double sum, double squares, double* mean,
                    double* centered) {
  const double m2 = squares - sum * sum / n;
  *mean = shift + sum / n;
  *centered = m2 < 0.0 ? 0.0 : m2;  // not std::max, which would turn NaN into 0
}

template <typename T>
void moments_of_chunk_channels_last(const ChannelView& view, const T* x, int64_t rows,
                                    double* mean, double* centered) {
  const int64_t channels = view.channels;
  auto* shift = static_cast<float*>(scratch(ScratchSlot::kSource, 3 * channels * sizeof(float)));
  float* sum = shift + channels;
  float* squares = sum + channels;
  std::fill_n(shift, 3 * channels, 0.0F);
  const int64_t first = std::min(kShiftRows, rows);
  add_moments_of_rows(x, first, channels, channels, shift, sum, squares);
  for (int64_t c = 0; c < channels; ++c) { shift[c] = sum[c] / first; }
  std::fill_n(sum, 2 * channels, 0.0F);
  std::fill_n(mean, channels, 0.0);
  std::fill_n(centered, channels, 0.0);
  for_each_block(view, rows, [&](int64_t row, int64_t count, int64_t c, int64_t n) {
    add_moments_of_rows(x + row * channels + c, count, channels, n, shift + c, sum + c,
                        squares + c);
    flush(sum + c, mean + c, n);
    flush(squares + c, centered + c, n);
  });
  for (int64_t c = 0; c < channels; ++c) {
    finish_moments(shift[c], rows, mean[c], centered[c], &mean[c], &centered[c]);
  }
}

template <typename T>
void moments_of_chunk_channel(const ChannelView& view, const T* x, int64_t begin,
                              int64_t length, int64_t c, double* mean, double* centered) {
  const T* start = x + (begin * view.channels + c) * view.inner;
  const int64_t first = std::min(kSegment, view.inner);
  SumPair sums;
  add_moments_of_segment(start, first, 0.0F, &sums);
  const auto shift = static_cast<float>(sums.first / first);
  sums = SumPair();
  for_each_segment(view, begin, length, c, [&](int64_t offset, int64_t n) {
    add_moments_of_segment(x + offset, n, shift, &sums);
  });
  finish_moments(shift, length * view.inner, sums.first, sums.second, mean, centered);
}

template <typename T>
void gradients_of_chunk_channels_last(const ChannelView& view, const T* dy, const T* x,
                                      int64_t rows, const float* mean, double* sum_dy,
                                      double* sum_dy_centered) {
  const int64_t channels = view.channels;
  auto* sum = static_cast<float*>(scratch(ScratchSlot::kSource, 2 * channels * sizeof(float)));
  float* product = sum + channels;
  std::fill_n(sum, 2 * channels, 0.0F);
  std::fill_n(sum_dy, channels, 0.0);
  std::fill_n(sum_dy_centered, channels, 0.0);
  for_each_block(view, rows, [&](int64_t row, int64_t count, int64_t c, int64_t n) {
    const int64_t offset = row * channels + c;
    add_gradients_of_rows(dy + offset, x + offset, count, channels, n, mean + c, sum + c,
                          product + c);
    flush(sum + c, sum_dy + c, n);
    flush(product + c, sum_dy_centered + c, n);
  });
}

// Two doubles per chunk and channel: first[chunk * channels + c], second[...].
struct Partials {
  double* first;
  double* second;

  Partials(const ChannelView& view, const Chunks& chunks) {
    const int64_t n = chunks.count * view.channels;
    first = static_cast<double*>(scratch(ScratchSlot::kReduction, 2 * n * sizeof(double)));
    second = first + n;
  }
};

// Runs of_chunk(chunk) for channels last, of_channel(chunk, channel) for channels first, in
// parallel.
template <typename OfChunk, typename OfChannel>
void for_each_chunk(const ChannelView& view, const Chunks& chunks, const OfChunk& of_chunk,
                    const OfChannel& of_channel) {
  if (view.channels_last()) {
    const int64_t grain = ceil_div(kGrainSize, chunks.size * view.channels);
    parallel_for(chunks.count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) { of_chunk(chunk); }
    });
  } else {
    const int64_t grain = ceil_div(kGrainSize, chunks.size * view.inner);
    parallel_for(chunks.count * view.channels, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) { of_channel(i / view.channels, i % view.channels); }
    });
  }
}

}  // namespace

template <typename T>
void channel_moments(const ChannelView& view, const T* x, double* mean, double* variance) {
  std::fill_n(mean, view.channels, 0.0);
  std::fill_n(variance, view.channels, 0.0);
  if (view.elements() == 0) { return; }
  const int64_t channels = view.channels;
  const Chunks chunks(view);
  const Partials partials(view, chunks);
  for_each_chunk(
      view, chunks,
      [&](int64_t chunk) {
        moments_of_chunk_channels_last(view, x + chunks.begin(chunk) * channels,
                                       chunks.length(view, chunk),
                                       partials.first + chunk * channels,
                                       partials.second + chunk * channels);
      },
      [&](int64_t chunk, int64_t c) {
        moments_of_chunk_channel(view, x, chunks.begin(chunk), chunks.length(view, chunk), c,
                                 partials.first + chunk * channels + c,
                                 partials.second + chunk * channels + c);
      });
  const auto total = static_cast<double>(view.elements_per_channel());
  parallel_for(channels, ceil_div(kGrainSize, 4 * chunks.count), [&](int64_t begin, int64_t end) {
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
      const double share = chunks.length(view, chunk) * view.inner / total;
      const double* chunk_mean = partials.first + chunk * channels;
      for (int64_t c = begin; c < end; ++c) { mean[c] += share * chunk_mean[c]; }
    }
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
      const double share = chunks.length(view, chunk) * view.inner / total;
      const double* chunk_mean = partials.first + chunk * channels;
      const double* centered = partials.second + chunk * channels;
      for (int64_t c = begin; c < end; ++c) {
        const double d = chunk_mean[c] - mean[c];
        variance[c] += centered[c] / total + share * d * d;
      }
    }
  });
}

template <typename T>
void channel_gradient_sums(const ChannelView& view, const T* dy, const T* x,
                           const float* mean, double* sum_dy, double* sum_dy_centered) {
  std::fill_n(sum_dy, view.channels, 0.0);
  std::fill_n(sum_dy_centered, view.channels, 0.0);
  if (view.elements() == 0) { return; }
  const int64_t channels = view.channels;
  const Chunks chunks(view);
  const Partials partials(view, chunks);
  for_each_chunk(
      view, chunks,
      [&](int64_t chunk) {
        const int64_t offset = chunks.begin(chunk) * channels;
        gradients_of_chunk_channels_last(view, dy + offset, x + offset,
                                         chunks.length(view, chunk), mean,
                                         partials.first + chunk * channels,
                                         partials.second + chunk * channels);
      },
      [&](int64_t chunk, int64_t c) {
        SumPair sums;
        for_each_segment(view, chunks.begin(chunk), chunks.length(view, chunk), c,
                         [&](int64_t offset, int64_t n) {
                           add_gradients_of_segment(dy + offset, x + offset, n, mean[c], &sums);
                         });
        partials.first[chunk * channels + c] = sums.first;
        partials.second[chunk * channels + c] = sums.second;
      });
  parallel_for(channels, ceil_div(kGrainSize, 2 * chunks.count), [&](int64_t begin, int64_t end) {
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
      for (int64_t c = begin; c < end; ++c) {
        sum_dy[c] += partials.first[chunk * channels + c];
        sum_dy_centered[c] += partials.second[chunk * channels + c];
      }
    }
  });
}

template void channel_moments(const ChannelView&, const float*, double*, double*);
template void channel_gradient_sums(const ChannelView&, const float*, const float*, const float*,
                                    double*, double*);
template void channel_moments(const ChannelView&, const Bfloat16*, double*, double*);
template void channel_gradient_sums(const ChannelView&, const Bfloat16*, const Bfloat16*,
                                    const float*, double*, double*);

}  // namespace oneflow_accel
