// Groups that are worked on together, and the planes of their channels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/buffer.h"
#include "conv/grouped.h"
#include "conv/planes.h"

namespace oneflow_accel {

// Groups in blocks: of some 64 channels, so that whole cache lines of channels-last tensors are
// read and written, and of few enough planes for a second-level cache.
struct GroupBlocks {
  const GroupedShape& shape;
  int64_t most;   // Groups of a block.
  int64_t count;  // Blocks.

  explicit GroupBlocks(const GroupedShape& s) : shape(s) {
    constexpr int64_t kChannels = 64;
    constexpr int64_t kFloats = 256 * 1024;
    const int64_t each = s.in_channels * in_layout().size + s.out_channels * out_layout().size;
    const int64_t fit = std::min(kChannels / std::max(s.in_channels, s.out_channels),
                                 kFloats / std::max<int64_t>(1, each));
    most = std::clamp<int64_t>(fit, 1, s.groups);
    // Groups of 4, 8 or 12 channels are whole vectors then.
    if (most > 4) { most = most / 4 * 4; }
    count = (s.groups + most - 1) / most;
  }

  int64_t begin(int64_t block) const { return std::min(block * most, shape.groups); }

  // Vectors are read beyond the last pixel.
  PlaneLayout in_layout() const {
    const int64_t row = shape.padded_width();
    return {shape.top * row + shape.left, row,
            padded(shape.padded_height() * row) + kVectorWidth};
  }
  // In rows as long as the padded input's, with what is computed for no pixel between them.
  PlaneLayout out_layout() const { return {0, shape.padded_width(), padded(shape.results())}; }
};

// Planes of a block, with zeros outside the images' pixels, and what load_planes() needs.
struct BlockSpace {
  Carver carver;
  float* in;
  float* out;
  float* dense;

  // `more` floats are left to take.
  BlockSpace(const GroupedShape& s, const GroupBlocks& blocks, int64_t more = 0)
      : BlockSpace(Floats(s, blocks), more) {}

 private:
  struct Floats {
    int64_t in, out, dense;

    Floats(const GroupedShape& s, const GroupBlocks& blocks) {
      const int64_t ins = blocks.most * s.in_channels;
      const int64_t outs = blocks.most * s.out_channels;
      in = ins * blocks.in_layout().size;
      out = outs * blocks.out_layout().size;
      dense = std::max(planes_space(ins, s.height, s.width, s.channels_last),
                       planes_space(outs, s.out_height, s.out_width, s.channels_last));
    }
  };

  BlockSpace(const Floats& floats, int64_t more)
      : carver(floats.in + floats.out + floats.dense + more + 4 * kVectorWidth),
        in(carver.take(floats.in)),
        out(carver.take(floats.out)),
        dense(carver.take(floats.dense)) {
    std::fill_n(in, floats.in, 0.0F);
    std::fill_n(out, floats.out, 0.0F);
  }
};

// Where the products of one result read, relative to it: in the order of the weights.
inline std::vector<int64_t> kernel_offsets(const GroupedShape& s, int64_t plane) {
  std::vector<int64_t> offsets;
  offsets.reserve(s.depth());
  const auto add = [&](int64_t i, int64_t y, int64_t x) {
    offsets.push_back(i * plane + y * s.row_step * s.padded_width() + x * s.column_step);
  };
  for (int64_t k = 0; k < s.depth(); ++k) {
    const int64_t channel =
        s.weights_channels_last ? k % s.in_channels : k / s.kernel_size();
    const int64_t pixel = s.weights_channels_last ? k / s.in_channels : k % s.kernel_size();
    add(channel, pixel / s.kernel_width, pixel % s.kernel_width);
  }
  return offsets;
}

template <typename T>
ImageView<const T> in_image(const GroupedShape& s, const T* in, int64_t n) {
  const int64_t channels = s.groups * s.in_channels;
  return {in + n * channels * s.height * s.width, channels, s.height, s.width, s.channels_last};
}

template <typename T>
ImageView<T> out_image(const GroupedShape& s, T* out, int64_t n) {
  const int64_t channels = s.groups * s.out_channels;
  return {out + n * channels * s.out_height * s.out_width, channels, s.out_height, s.out_width,
          s.channels_last};
}

}  // namespace oneflow_accel
