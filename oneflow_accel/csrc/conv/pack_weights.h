// Weights from (O, K...) rows to oneDNN's blocks of output channels.
#pragma once

#include "common/onednn.h"

namespace oneflow_accel {

// Whether pack_weights() does this reorder: from dense rows of one output channel each, to blocks
// [O / B][K][B] with K in the same order. oneDNN's own reorder for it reaches 2 to 3 GB/s on rows
// of a power of two of bytes, which is a third of the time of ResNet50's last convolutions.
bool can_pack_weights(const dnnl::memory::desc& rows, const dnnl::memory::desc& blocks);

// blocks[o / B][k][o % B] = rows[o][k]; zero where o is past the last output channel.
void pack_weights(const dnnl::memory::desc& blocks, const float* rows, float* packed);

}  // namespace oneflow_accel
