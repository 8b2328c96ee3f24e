// Weights of inference in the layouts that primitives chose, kept between calls.
#pragma once

#include <functional>

#include "common/onednn.h"

namespace oneflow_accel {

// `weights`, which the tensor `plain` describes, in `layout`. copy(memory) makes the copy at the first
// call, and it is kept until a kernel writes to the weights, or their owner has others or is gone.
// Null where there is no such owner: a number from oneflow_accel_new_owner(), until
// oneflow_accel_release_weights() takes it back, which may be while calls of it are queued. One
// owner may have several copies: oneDNN's choice of a layout depends on the shape of the input. The
// memory stays valid while it is held.
dnnl::memory kept_weights(int64_t owner, const void* weights, const dnnl::memory::desc& plain,
                          const dnnl::memory::desc& layout,
                          const std::function<void(const dnnl::memory&)>& copy);

// Whether there are any, so that writes are worth a look.
bool keeps_weights();

// To be called before a kernel changes these bytes: copies of weights among them are dropped.
void drop_copies_of(const void* data, int64_t bytes);

}  // namespace oneflow_accel
