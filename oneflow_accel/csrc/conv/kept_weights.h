// Constant weights of inference in the layouts that primitives chose, kept between calls.
#pragma once

#include <functional>

#include "common/onednn.h"

namespace oneflow_accel {

// `weights` in `layout`. copy(memory) makes the copy at the first call, and it is kept for `owner`,
// a number that Python gives to a set of weights that do not change, until
// oneflow_accel_release_weights(owner). One owner may have several copies: oneDNN's choice of a
// layout depends on the shape of the input. The memory stays valid while it is held. An owner's
// copies are bounded: the one that was not used for longest goes first.
dnnl::memory kept_weights(int64_t owner, const void* weights, const dnnl::memory::desc& layout,
                          const std::function<void(const dnnl::memory&)>& copy);

}  // namespace oneflow_accel
