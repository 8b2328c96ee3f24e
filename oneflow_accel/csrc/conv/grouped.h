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

#include "common/bfloat16.h"
#include "conv/activation.h"
#include "conv/geometry.h"

namespace oneflow_accel {

// A convolution of two spatial dimensions and stride 1.
struct GroupedShape {
  int64_t batch;
  int64_t groups;
  int64_t in_channels;  // Of a group.
  int64_t out_channels;
  int64_t height, width;
  int64_t out_height, out_width;
  int64_t kernel_height, kernel_width;
  int64_t row_step, column_step;  // Between the rows and columns of a kernel: dilation.
  int64_t top, left;              // Zeros around the image.
  bool channels_last;
  bool weights_channels_last;

  int64_t kernel_size() const { return kernel_height * kernel_width; }
  // Products that one result sums up.
  int64_t depth() const { return in_channels * kernel_size(); }
  int64_t padded_width() const { return width + 2 * left; }
  int64_t padded_height() const { return height + 2 * top; }
  // Floats from the first result of a plane to its last, in rows as long as the padded input's.
  int64_t results() const { return (out_height - 1) * padded_width() + out_width; }
};

// Null where oneDNN is the better choice, or this one cannot do it.
std::optional<GroupedShape> grouped_shape(const ConvGeometry& geometry);

// `bias` may be null. `in` and `out` in bfloat16 become float32 on the way to their planes, and are
// rounded on the way back.
template <typename T>
void grouped_convolution(const GroupedShape& shape, const T* in, const float* weights,
                         const float* bias, Activation activation, T* out);

void grouped_convolution_data_grad(const GroupedShape& shape, const float* out_grad,
                                   const float* weights, float* in_grad);

// `bias_grad` may be null.
void grouped_convolution_filter_grad(const GroupedShape& shape, const float* in,
                                     const float* out_grad, float* weights_grad, float* bias_grad);

}  // namespace oneflow_accel
