// Shapes and attributes of a convolution, as oneDNN counts them.
#pragma once

#include <string>

#include "common/oneflow.h"
#include "common/onednn.h"

namespace oneflow_accel {

// A convolution of 1 to 3 spatial dimensions. All dims are in oneDNN's logical order, whichever
// layout the data has: (N, C, spatial...) and (groups, O / groups, I / groups, kernel...).
struct ConvGeometry {
  bool channels_last = false;          // The activations.
  bool weights_channels_last = false;  // As the activations, unless it is changed after.
  dnnl::memory::data_type data_type = dnnl::memory::data_type::f32;  // Not the bias's: float32.
  dnnl::memory::dims in;
  dnnl::memory::dims out;
  dnnl::memory::dims weights;
  dnnl::memory::dims strides;
  dnnl::memory::dims dilation;  // 0 is a dense kernel.
  dnnl::memory::dims padding;   // The same on both sides.

  // From the attributes that conv1d to conv3d and their gradients share, and the shapes of the
  // convolution's input and output. float32, unless `data_type` is set after.
  ConvGeometry(const ::oneflow::user_op::KernelComputeContext& ctx,
               const ::oneflow::ShapeView& in_shape, const ::oneflow::ShapeView& out_shape);

  // The same for operators that have no attribute `data_format`.
  ConvGeometry(const ::oneflow::user_op::KernelComputeContext& ctx,
               const ::oneflow::ShapeView& in_shape, const ::oneflow::ShapeView& out_shape,
               bool channels_last);

  int64_t groups() const { return weights[0]; }
  bool is_pointwise() const;

  // Elements of one image; there is at least one.
  int64_t in_image() const { return elements(in) / in[0]; }
  int64_t out_image() const { return elements(out) / out[0]; }
  int64_t weight_count() const { return elements(weights); }

  // Whether the input, the output or the weights have no element: all results are sums of no
  // terms then.
  bool is_empty() const;

  // OneFlow's layouts: activations (N, C, spatial...) or (N, spatial..., C), weights
  // (O, I / groups, kernel...) or (O, kernel..., I / groups).
  dnnl::memory::desc in_desc() const;
  dnnl::memory::desc out_desc() const;
  dnnl::memory::desc weights_desc() const;
  dnnl::memory::desc bias_desc() const;

  // Memory of this convolution's data type in the layout that a primitive likes best.
  dnnl::memory::desc any_layout(const dnnl::memory::dims& dims) const;

  KeyBuilder key(const char* operation) const;
  std::string describe(const char* operation) const;

 private:
  static int64_t elements(const dnnl::memory::dims& sizes) {
    int64_t count = 1;
    for (const int64_t size : sizes) { count *= size; }
    return count;
  }
};

}  // namespace oneflow_accel
