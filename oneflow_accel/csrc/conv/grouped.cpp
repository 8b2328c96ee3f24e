#include "conv/grouped.h"

#include <algorithm>
#include <vector>

#include "attention/buffer.h"
#include "common/threads.h"
#include "conv/grouped_blocks.h"
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
  t.in_channels = s.out_channels;
  t.out_channels = s.in_channels;
  t.height = s.out_height;
  t.width = s.out_width;
  t.out_height = s.height;
  t.out_width = s.width;
  t.top = (s.kernel_height - 1) * s.row_step - s.top;
  t.left = (s.kernel_width - 1) * s.column_step - s.left;
  t.weights_channels_last = false;
  return t;
}

// weights[g][o][i] mirrored, as flipped[g][i][o], whichever order the kernel has.
void flip(const GroupedShape& s, const float* weights, float* flipped) {
  const int64_t size = s.kernel_size();
  const int64_t channel = s.weights_channels_last ? 1 : size;
  const int64_t pixel = s.weights_channels_last ? s.in_channels : 1;
  for (int64_t g = 0; g < s.groups; ++g) {
    for (int64_t i = 0; i < s.in_channels; ++i) {
      for (int64_t o = 0; o < s.out_channels; ++o) {
        const float* from = weights + (g * s.out_channels + o) * s.depth() + i * channel;
        for (int64_t k = 0; k < size; ++k) { *flipped++ = from[(size - 1 - k) * pixel]; }
      }
    }
  }
}

}  // namespace

std::optional<GroupedShape> grouped_shape(const ConvGeometry& geometry) {
  if (geometry.in.size() != 4 || geometry.groups() == 1) { return std::nullopt; }
  const auto& weights = geometry.weights;
  const GroupedShape shape{geometry.in[0],
                           geometry.groups(),
                           weights[2],
                           weights[1],
                           geometry.in[2],
                           geometry.in[3],
                           geometry.out[2],
                           geometry.out[3],
                           weights[3],
                           weights[4],
                           geometry.dilation[0] + 1,
                           geometry.dilation[1] + 1,
                           geometry.padding[0],
                           geometry.padding[1],
                           geometry.channels_last,
                           geometry.weights_channels_last};
  const bool few = shape.in_channels <= kMostChannels && shape.out_channels <= kMostChannels;
  const bool depthwise = shape.in_channels == 1 && shape.out_channels == 1;
  const bool steps_of_one = geometry.strides[0] == 1 && geometry.strides[1] == 1;
  // Else the gradient of the input would need negative borders.
  const bool inside = shape.top <= (shape.kernel_height - 1) * shape.row_step
                      && shape.left <= (shape.kernel_width - 1) * shape.column_step;
  const int64_t floats = (shape.in_channels + shape.out_channels) * shape.padded_height()
                         * shape.padded_width();
  if (!few || depthwise || !steps_of_one || !inside || floats > kMostFloats) {
    return std::nullopt;
  }
  return shape;
}

template <typename T>
void grouped_convolution(const GroupedShape& s, const T* in, const float* weights,
                         const float* bias, Activation activation, T* out) {
  const GroupBlocks blocks(s);
  const std::vector<int64_t> offsets = kernel_offsets(s, blocks.in_layout().size);
  const PlaneLayout in_planes = blocks.in_layout();
  const PlaneLayout out_planes = blocks.out_layout();
  const int64_t work = blocks.most * s.out_channels * s.depth() * s.results();
  const int64_t grain = std::max<int64_t>(1, kGrainSize / work);
  parallel_for(s.batch * blocks.count, grain, [&](int64_t begin, int64_t end) {
    BlockSpace space(s, blocks);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t n = unit / blocks.count;
      const int64_t first = blocks.begin(unit % blocks.count);
      const int64_t groups = blocks.begin(unit % blocks.count + 1) - first;
      load_planes(in_image(s, in, n), first * s.in_channels, groups * s.in_channels, in_planes,
                  space.dense, space.in);
      for (int64_t g = 0; g < groups; ++g) {
        shifted_product({weights + (first + g) * s.out_channels * s.depth(), s.out_channels,
                         s.depth(), space.in + g * s.in_channels * in_planes.size, offsets.data(),
                         s.results(), space.out + g * s.out_channels * out_planes.size,
                         out_planes.size});
      }
      const int64_t channel = first * s.out_channels;
      const int64_t channels = groups * s.out_channels;
      // Here the results are in a core's cache still.
      const bool activates = activation != Activation::kNone;
      for (int64_t c = 0; activates && c < channels; ++c) {
        activate(activation, bias == nullptr ? 0.0F : bias[channel + c], s.results(),
                 space.out + c * out_planes.size);
      }
      store_planes(space.out, out_planes, channel, channels, activates ? nullptr : bias,
                   space.dense, out_image(s, out, n));
    }
  });
}

template void grouped_convolution(const GroupedShape&, const float*, const float*, const float*,
                                  Activation, float*);
template void grouped_convolution(const GroupedShape&, const Bfloat16*, const float*, const float*,
                                  Activation, Bfloat16*);

void grouped_convolution_data_grad(const GroupedShape& shape, const float* out_grad,
                                   const float* weights, float* in_grad) {
  const int64_t count = shape.groups * shape.out_channels * shape.depth();
  auto* flipped = static_cast<float*>(scratch(ScratchSlot::kWeights, count * sizeof(float)));
  flip(shape, weights, flipped);
  grouped_convolution<float>(transposed(shape), out_grad, flipped, nullptr, Activation::kNone, in_grad);
}

}  // namespace oneflow_accel
