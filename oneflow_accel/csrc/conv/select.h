// Which layout of the activations a convolution runs in.
#pragma once

#include "conv/geometry.h"

namespace oneflow_accel {

// The activations' layout as asked of oneDNN: OneFlow's own, or whichever it likes best (a blocked
// one), which costs a copy of each activation in exchange for faster inner loops.
enum class ActivationLayout { kPlain, kAny };

// Measured on 2 cores with AVX-512, for all convolutions of ResNet50. Channels last: oneDNN's
// kernels read it as fast as blocked layouts. Channels first: as it stands there is only
// im2col + GEMM, which wins where im2col has nothing to do and one image makes a large GEMM.
ActivationLayout forward_layout(const ConvGeometry& geometry);
ActivationLayout data_grad_layout(const ConvGeometry& geometry);
ActivationLayout filter_grad_layout(const ConvGeometry& geometry);

dnnl::memory::desc in_desc(const ConvGeometry& geometry, ActivationLayout layout);
dnnl::memory::desc out_desc(const ConvGeometry& geometry, ActivationLayout layout);
dnnl::memory::desc any_weights(const ConvGeometry& geometry);

}  // namespace oneflow_accel
