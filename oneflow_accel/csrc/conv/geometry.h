// Shapes and attributes of a convolution, as oneDNN counts them.
#pragma once

#include <string>

#include "common/oneflow.h"
#include "common/onednn.h"

namespace oneflow_accel {

// The tensors of a convolution: one of them, or its gradient, is computed from the two others.
enum ConvRole { kConvIn, kConvWeights, kConvOut };

// A convolution of 1 to 3 spatial dimensions. All dims are in oneDNN's logical order, whichever
// layout the data has: (N, C, spatial...) and (groups, O / groups, I / groups, kernel...).
struct ConvGeometry {
  bool channels_last;                 // The activations.
  bool weights_channels_last;         // As the activations, unless it is changed after.
  dnnl::memory::data_type data_type;  // Not the bias's: float32.
  dnnl::memory::dims in;
  dnnl::memory::dims out;
  dnnl::memory::dims weights;
  dnnl::memory::dims strides;
  dnnl::memory::dims dilation;  // 0 is a dense kernel.
  dnnl::memory::dims padding;   // The same on both sides.

  // From the attributes that conv1d to conv3d and their gradients share; `in` and `out` name the
  // arguments that have the shapes of the convolution's input and output.
  ConvGeometry(Context* ctx, const char* in, const char* out, dnnl::memory::data_type type,
               bool channels_last);

  int64_t groups() const { return weights[0]; }
  bool is_pointwise() const;

  // Elements of a tensor, and of one image, of which there is at least one.
  int64_t count(ConvRole role) const;
  int64_t in_image() const { return count(kConvIn) / in[0]; }
  int64_t out_image() const { return count(kConvOut) / out[0]; }
  int64_t out_pixels() const { return out_image() / out[1]; }
  int64_t element_bytes() const {
    return static_cast<int64_t>(dnnl::memory::data_type_size(data_type));
  }

  // Whether the input, the output or the weights have no element: all results are sums of no
  // terms then.
  bool is_empty() const;

  // OneFlow's layouts: activations (N, C, spatial...) or (N, spatial..., C), weights
  // (O, I / groups, kernel...) or (O, kernel..., I / groups).
  dnnl::memory::desc desc(ConvRole role) const;

  // Memory of this convolution's data type in the layout that a primitive likes best.
  dnnl::memory::desc any_layout(const dnnl::memory::dims& dims) const;

  KeyBuilder key(const char* operation) const;
  std::string describe(const char* operation) const;
};

}  // namespace oneflow_accel
