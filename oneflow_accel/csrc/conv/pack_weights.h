// Weights from (O, K...) rows to oneDNN's blocks of output channels.
#pragma once

#include <algorithm>

#include "common/onednn.h"
#include "common/threads.h"
#include "copy/transpose_tile.h"

namespace oneflow_accel {

// Whether pack_weights() does this reorder: from dense rows of one output channel each, to blocks
// [O / B][K][B] with K in the same order; in bfloat16 of pairs of input channels. oneDNN's own reorder
// for it reaches 2 to 6 GB/s on rows of a power of two of bytes, which is a third of the time of
// ResNet50's last convolutions.
inline bool can_pack_weights(const dnnl::memory::desc& rows, const dnnl::memory::desc& blocks) {
  using Dims = dnnl::memory::dims;
  const bool pairs = rows.get_data_type() == dnnl::memory::data_type::bf16;
  const Dims dims = rows.get_dims();
  const Dims row_strides = rows.get_strides();
  if (rows.get_inner_nblks() != 0 || blocks.get_inner_idxs() != (pairs ? Dims{0, 1} : Dims{0})
      || (pairs && (dims[1] % 2 != 0 || row_strides[1] != 1 || blocks.get_inner_blks()[1] != 2))) {
    return false;
  }
  const int64_t block = blocks.get_inner_blks()[0];
  const Dims block_strides = blocks.get_strides();
  const Dims padded = blocks.get_padded_dims();
  for (std::size_t i = 0; i < dims.size(); ++i) {
    const int64_t stride = row_strides[i] * block * (pairs && i == 1 ? 2 : 1);
    const bool only_channels_padded = i == 0 || padded[i] == dims[i];
    if ((dims[i] != 1 && block_strides[i] != stride) || !only_channels_padded) { return false; }
  }
  // Neither has gaps.
  const auto size = static_cast<int64_t>(rows.get_size());
  return size == dims[0] * row_strides[0] * (pairs ? 2 : 4)
         && static_cast<int64_t>(blocks.get_size()) == size / dims[0] * padded[0];
}

// blocks[o / B][k][o % B] = rows[o][k], of words: a float or two bfloat16. Zero where o is past the last
// output channel.
inline void pack_weights(const dnnl::memory::desc& blocks, const float* rows, float* packed) {
  constexpr int64_t kLine = 16;  // Floats of one cache line.
  const int64_t channels = blocks.get_dims()[0];
  const int64_t block = blocks.get_inner_blks()[0];
  const int64_t padded = blocks.get_padded_dims()[0];
  const auto columns = static_cast<int64_t>(blocks.get_size() / sizeof(float)) / padded;
  for_each_block(padded / block, block * columns, [=](int64_t i) {
    const int64_t o = i * block;
    const int64_t valid = std::clamp<int64_t>(channels - o, 0, block);
    for (int64_t k = 0; k < columns; k += kLine) {
      transpose_tile(rows + o * columns + k, columns, packed + o * columns + k * block, block,
                     valid, std::min(kLine, columns - k));
    }
    for (int64_t k = 0; k < columns; ++k) {
      float* to = packed + o * columns + k * block;
      std::fill(to + valid, to + block, 0.0F);
    }
  });
}

}  // namespace oneflow_accel
