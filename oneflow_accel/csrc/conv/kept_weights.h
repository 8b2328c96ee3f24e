// Constant weights of inference in the layouts that primitives chose, kept between calls.
#pragma once

#include <memory>

#include "conv/relayout.h"

namespace oneflow_accel {

// `weights` in `layout`. The copy is made at the first call and kept for `owner`, a number that
// Python gives to a set of weights that do not change, until release_kept_weights(owner). One
// owner may have several copies: oneDNN's choice of a layout depends on the shape of the input.
// The pointer stays valid while it is held. An owner's copies are bounded: the one that was not
// used for longest goes first.
std::shared_ptr<void> kept_weights(int64_t owner, const void* weights, const InputLayout& layout);

void release_kept_weights(int64_t owner);
void release_all_kept_weights();

// How many copies there are of an owner's weights.
std::size_t num_kept_weights(int64_t owner);

}  // namespace oneflow_accel
