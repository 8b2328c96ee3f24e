#include "conv/grouped.h"

#include <algorithm>
#include <vector>

#include "attention/block_product.h"
#include "common/threads.h"
#include "conv/planes.h"
#include "conv/shifted_products.h"

namespace oneflow_accel {

namespace {

// Channels of a group from which on oneDNN has a kernel, whose vectors run over channels.
constexpr int64_t kMostChannels = 15;

// Floats of the planes of one group that are worth it: they should stay in a second-level cache.
constexpr int64_t kMostFloats = 128 * 1024;

// The gradient of the input as a convolution: channels in and out, and borders, change places.
GroupedShape transposed(const GroupedShape& s) {
  GroupedShape t = s;
  std::swap(t.in, t.out);
  t.top = (s.kernel_height - 1) * s.row_step - s.top;
  t.left = (s.kernel_width - 1) * s.column_step - s.left;
  t.weights_channels_last = false;
  return t;
}

// weights[g][o][i] mirrored, as flipped[g][i][o], whichever order the kernel has.
void flip(const GroupedShape& s, const float* weights, float* flipped) {
  const int64_t size = s.kernel_size();
  const int64_t channel = s.weights_channels_last ? 1 : size;
  const int64_t pixel = s.weights_channels_last ? s.in.channels : 1;
  for (int64_t g = 0; g < s.groups; ++g) {
    for (int64_t i = 0; i < s.in.channels; ++i) {
      for (int64_t o = 0; o < s.out.channels; ++o) {
        const float* from = weights + (g * s.out.channels + o) * s.depth() + i * channel;
        for (int64_t k = 0; k < size; ++k) { *flipped++ = from[(size - 1 - k) * pixel]; }
      }
    }
  }
}

// Groups in blocks: of some 64 channels, so that whole cache lines of channels-last tensors are
// read and written, and of few enough planes for a second-level cache.
struct GroupBlocks {
  const GroupedShape& shape;
  PlaneLayout in;   // Vectors are read beyond the last pixel.
  PlaneLayout out;  // In rows as long as the padded input's, what is computed for no pixel between.
  int64_t most;     // Groups of a block.
  int64_t count;    // Blocks.

  explicit GroupBlocks(const GroupedShape& s)
      : shape(s),
        in{s.top * s.padded_width() + s.left, s.padded_width(),
           padded(s.padded_height() * s.padded_width()) + kVectorWidth},
        out{0, s.padded_width(), padded(s.results())} {
    constexpr int64_t kChannels = 64;
    constexpr int64_t kFloats = 256 * 1024;
    const int64_t each = s.in.channels * in.size + s.out.channels * out.size;
    const int64_t fit = std::min(kChannels / std::max(s.in.channels, s.out.channels),
                                 kFloats / std::max<int64_t>(1, each));
    most = std::clamp<int64_t>(fit, 1, s.groups);
    // Groups of 4, 8 or 12 channels are whole vectors then.
    if (most > 4) { most = most / 4 * 4; }
    count = ceil_div(s.groups, most);
  }

  int64_t begin(int64_t block) const { return std::min(block * most, shape.groups); }
  int64_t in_floats() const { return most * shape.in.channels * in.size; }
  int64_t out_floats() const { return most * shape.out.channels * out.size; }
};

// Planes of a block, with zeros outside the images' pixels.
struct BlockSpace {
  Carver carver;
  float* in;
  float* out;

  // `more` floats are left to take.
  explicit BlockSpace(const GroupBlocks& blocks, int64_t more = 0)
      : carver(blocks.in_floats() + blocks.out_floats() + more + 3 * kVectorWidth),
        in(carver.take(blocks.in_floats())),
        out(carver.take(blocks.out_floats())) {
    std::fill_n(in, blocks.in_floats(), 0.0F);
    std::fill_n(out, blocks.out_floats(), 0.0F);
  }
};

// Where the products of one result read, relative to it: in the order of the weights.
std::vector<int64_t> kernel_offsets(const GroupedShape& s, int64_t plane) {
  std::vector<int64_t> offsets;
  offsets.reserve(s.depth());
  for (int64_t k = 0; k < s.depth(); ++k) {
    const int64_t channel = s.weights_channels_last ? k % s.in.channels : k / s.kernel_size();
    const int64_t pixel = s.weights_channels_last ? k / s.in.channels : k % s.kernel_size();
    const int64_t y = pixel / s.kernel_width * s.row_step;
    const int64_t x = pixel % s.kernel_width * s.column_step;
    offsets.push_back(channel * plane + y * s.padded_width() + x);
  }
  return offsets;
}

template <typename T>
ImageView<T> image(const GroupedShape& s, const GroupedImages& of, T* data, int64_t n) {
  const int64_t channels = s.groups * of.channels;
  return {data + n * channels * of.height * of.width, channels, of.height, of.width,
          s.channels_last};
}

float sum_of(const float* x, int64_t n) {
  float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) { sum += x[i]; }
  return sum;
}

// `bias` may be null.
template <typename T>
void forward(const GroupedShape& s, const T* in, const float* weights, const float* bias,
             Activation activation, T* out) {
  const GroupBlocks blocks(s);
  const std::vector<int64_t> offsets = kernel_offsets(s, blocks.in.size);
  const int64_t work = blocks.most * s.out.channels * s.depth() * s.results();
  parallel_for(s.batch * blocks.count, grain_of(work), [&](int64_t begin, int64_t end) {
    const BlockSpace space(blocks);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t n = unit / blocks.count;
      const int64_t first = blocks.begin(unit % blocks.count);
      const int64_t groups = blocks.begin(unit % blocks.count + 1) - first;
      load_planes(image(s, s.in, in, n), first * s.in.channels, groups * s.in.channels, blocks.in,
                  space.in);
      for (int64_t g = 0; g < groups; ++g) {
        shifted_product({weights + (first + g) * s.out.channels * s.depth(), s.out.channels,
                         s.depth(), space.in + g * s.in.channels * blocks.in.size, offsets.data(),
                         s.results(), space.out + g * s.out.channels * blocks.out.size,
                         blocks.out.size});
      }
      const int64_t channel = first * s.out.channels;
      const int64_t channels = groups * s.out.channels;
      const bool activates = activation != Activation::kNone;
      // Here the results are in a core's cache still.
      if (activates) {
        with_activation(activation, [&](auto function) {
          for (int64_t c = 0; c < channels; ++c) {
            const float addend = bias == nullptr ? 0.0F : bias[channel + c];
            float* x = space.out + c * blocks.out.size;
#pragma omp simd
            for (int64_t i = 0; i < s.results(); ++i) { x[i] = function(x[i] + addend); }
          }
        });
      }
      store_planes(space.out, blocks.out, channel, channels, activates ? nullptr : bias,
                   image(s, s.out, out, n));
    }
  });
}

void data_grad(const GroupedShape& s, const float* out_grad, const float* weights,
               float* in_grad) {
  const int64_t count = s.groups * s.out.channels * s.depth();
  auto* flipped = scratch<float>(ScratchSlot::kWeights, count);
  flip(s, weights, flipped);
  forward(transposed(s), out_grad, flipped, nullptr, Activation::kNone, in_grad);
}

// `bias_grad` may be null.
void filter_grad(const GroupedShape& s, const float* in, const float* out_grad,
                 float* weights_grad, float* bias_grad) {
  const GroupBlocks blocks(s);
  std::vector<int64_t> offsets = kernel_offsets(s, blocks.in.size);
  // Sums that nobody reads fill the last part up.
  offsets.resize(round_up(s.depth(), kShiftedDots), 0);
  const auto depth = static_cast<int64_t>(offsets.size());
  const int64_t outs = blocks.most * s.out.channels;
  // A block sums over all images: the order of sums does not depend on the number of threads.
  parallel_for(blocks.count, 1, [&](int64_t begin, int64_t end) {
    BlockSpace space(blocks, outs * depth * kVectorWidth);
    float* sums = space.carver.take(outs * depth * kVectorWidth);
    std::vector<double> bias_sums(outs);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = blocks.begin(block);
      const int64_t groups = blocks.begin(block + 1) - first;
      std::fill_n(sums, outs * depth * kVectorWidth, 0.0F);
      std::fill(bias_sums.begin(), bias_sums.end(), 0.0);
      for (int64_t n = 0; n < s.batch; ++n) {
        load_planes(image(s, s.in, in, n), first * s.in.channels, groups * s.in.channels, blocks.in,
                    space.in);
        load_planes(image(s, s.out, out_grad, n), first * s.out.channels, groups * s.out.channels,
                    blocks.out, space.out);
        for (int64_t g = 0; g < groups; ++g) {
          shifted_dots({space.out + g * s.out.channels * blocks.out.size, s.out.channels,
                        blocks.out.size, space.in + g * s.in.channels * blocks.in.size,
                        offsets.data(), depth, s.results(),
                        sums + g * s.out.channels * depth * kVectorWidth});
        }
        for (int64_t o = 0; bias_grad != nullptr && o < groups * s.out.channels; ++o) {
          bias_sums[o] += sum_of(space.out + o * blocks.out.size, blocks.out.size);
        }
      }
      for (int64_t o = 0; o < groups * s.out.channels; ++o) {
        const int64_t channel = first * s.out.channels + o;
        for (int64_t k = 0; k < s.depth(); ++k) {
          weights_grad[channel * s.depth() + k] =
              sum_of(sums + (o * depth + k) * kVectorWidth, kVectorWidth);
        }
        if (bias_grad != nullptr) { bias_grad[channel] = static_cast<float>(bias_sums[o]); }
      }
    }
  });
}

}  // namespace

std::optional<GroupedShape> grouped_shape(const ConvGeometry& geometry) {
  if (geometry.in.size() != 4 || geometry.groups() == 1) { return std::nullopt; }
  const auto& weights = geometry.weights;
  const GroupedShape shape{
      geometry.in[0], geometry.groups(),
      {weights[2], geometry.in[2], geometry.in[3]},
      {weights[1], geometry.out[2], geometry.out[3]},
      weights[3], weights[4], geometry.dilation[0] + 1, geometry.dilation[1] + 1,
      geometry.padding[0], geometry.padding[1], geometry.channels_last,
      geometry.weights_channels_last};
  const bool few = shape.in.channels <= kMostChannels && shape.out.channels <= kMostChannels;
  const bool depthwise = shape.in.channels == 1 && shape.out.channels == 1;
  const bool steps_of_one = geometry.strides[0] == 1 && geometry.strides[1] == 1;
  // Else the gradient of the input would need negative borders.
  const bool inside = shape.top <= (shape.kernel_height - 1) * shape.row_step
                      && shape.left <= (shape.kernel_width - 1) * shape.column_step;
  const int64_t floats = (shape.in.channels + shape.out.channels) * shape.padded_height()
                         * shape.padded_width();
  if (!few || depthwise || !steps_of_one || !inside || floats > kMostFloats) {
    return std::nullopt;
  }
  return shape;
}

template <typename T>
void run_grouped(const GroupedShape& s, const ConvCall& call) {
  T* in = call.tensor<T>(kConvIn);
  T* out = call.tensor<T>(kConvOut);
  auto* weights = call.tensor<float>(kConvWeights);
  auto* bias = static_cast<float*>(call.bias);
  if constexpr (std::is_same_v<T, float>) {
    if (call.result == kConvIn) { return data_grad(s, out, weights, in); }
    if (call.result == kConvWeights) { return filter_grad(s, in, out, weights, bias); }
  }
  forward<T>(s, in, weights, bias, call.activation, out);
}

template void run_grouped<float>(const GroupedShape&, const ConvCall&);
template void run_grouped<Bfloat16>(const GroupedShape&, const ConvCall&);

}  // namespace oneflow_accel
