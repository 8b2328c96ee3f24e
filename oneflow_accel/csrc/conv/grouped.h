// Convolutions of many groups with a few channels each (Xie et al. 2017, section 3, has 32; ViTAE's
// local branches have 64 and more). oneDNN has no kernel for so few channels: its general one takes
// longer than all the rest of a model together.
//
// Channels are made planes with borders of zeros, in a core's cache. A kernel's offset is then one
// distance in memory for all pixels, and vectors run over the pixels of a whole plane: what is
// computed at the ends of rows is left out. See planes.h and shifted_products.h.
#pragma once

#include <cstdint>
#include <optional>

#include "conv/primitive.h"

namespace oneflow_accel {

// Images as one group has them.
struct GroupedImages {
  int64_t channels;
  int64_t height, width;
};

// A convolution of two spatial dimensions and stride 1.
struct GroupedShape {
  int64_t batch;
  int64_t groups;
  GroupedImages in;
  GroupedImages out;
  int64_t kernel_height, kernel_width;
  int64_t row_step, column_step;  // Between the rows and columns of a kernel: dilation.
  int64_t top, left;              // Zeros around the image.
  bool channels_last;
  bool weights_channels_last;

  int64_t kernel_size() const { return kernel_height * kernel_width; }
  // Products that one result sums up.
  int64_t depth() const { return in.channels * kernel_size(); }
  int64_t padded_width() const { return in.width + 2 * left; }
  int64_t padded_height() const { return in.height + 2 * top; }
  // Floats from the first result of a plane to its last, in rows as long as the padded input's.
  int64_t results() const { return (out.height - 1) * padded_width() + out.width; }
};

// Null where oneDNN is the better choice, or this one cannot do it.
std::optional<GroupedShape> grouped_shape(const ConvGeometry& geometry);

// A call without a summand. T is that of the activations: those in bfloat16, of forward
// convolutions only, become float32 on the way to their planes, and are rounded on the way back.
// Weights and bias are float32.
template <typename T>
void run_grouped(const GroupedShape& shape, const ConvCall& call);

}  // namespace oneflow_accel
