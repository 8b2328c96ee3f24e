#include "conv/pack_weights.h"

#include <immintrin.h>

#include <algorithm>

#include "common/threads.h"

namespace oneflow_accel {

namespace {

// Floats of one cache line.
constexpr int64_t kLine = 16;

int64_t elements_per_output_channel(const dnnl::memory::desc& weights) {
  const auto dims = weights.get_dims();
  int64_t count = 1;
  for (std::size_t i = 1; i < dims.size(); ++i) { count *= dims[i]; }
  return count;
}

// Transposes 4 rows, `stride` apart, of 4 floats each.
inline void transpose4x4(const float* rows, int64_t stride, float* packed, int64_t block) {
  __m128 a = _mm_loadu_ps(rows);
  __m128 b = _mm_loadu_ps(rows + stride);
  __m128 c = _mm_loadu_ps(rows + 2 * stride);
  __m128 d = _mm_loadu_ps(rows + 3 * stride);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(packed, a);
  _mm_storeu_ps(packed + block, b);
  _mm_storeu_ps(packed + 2 * block, c);
  _mm_storeu_ps(packed + 3 * block, d);
}

// One block: `rows` has `valid` rows of `columns` floats; `packed` has `columns` rows of `block`.
void pack_block(const float* rows, int64_t valid, int64_t columns, int64_t block, float* packed) {
  const int64_t fast_rows = valid / 4 * 4;
  for (int64_t k0 = 0; k0 < columns; k0 += kLine) {
    const int64_t k1 = std::min(k0 + kLine, columns);
    const int64_t fast_columns = k0 + (k1 - k0) / 4 * 4;
    for (int64_t r = 0; r < fast_rows; r += 4) {
      for (int64_t k = k0; k < fast_columns; k += 4) {
        transpose4x4(rows + r * columns + k, columns, packed + k * block + r, block);
      }
      for (int64_t k = fast_columns; k < k1; ++k) {
        for (int64_t i = r; i < r + 4; ++i) { packed[k * block + i] = rows[i * columns + k]; }
      }
    }
    for (int64_t r = fast_rows; r < block; ++r) {
      for (int64_t k = k0; k < k1; ++k) {
        packed[k * block + r] = r < valid ? rows[r * columns + k] : 0.0F;
      }
    }
  }
}

}  // namespace

bool can_pack_weights(const dnnl::memory::desc& rows, const dnnl::memory::desc& blocks) {
  if (rows.get_data_type() != dnnl::memory::data_type::f32) { return false; }
  const auto dims = rows.get_dims();
  const auto row_strides = rows.get_strides();
  const auto block_strides = blocks.get_strides();
  const int64_t columns = elements_per_output_channel(rows);
  if (rows.get_inner_nblks() != 0 || row_strides[0] != columns) { return false; }
  if (blocks.get_inner_nblks() != 1 || blocks.get_inner_idxs()[0] != 0) { return false; }
  const int64_t block = blocks.get_inner_blks()[0];
  const auto padded = blocks.get_padded_dims();
  for (std::size_t i = 0; i < dims.size(); ++i) {
    const bool same_order = dims[i] == 1 || block_strides[i] == row_strides[i] * block;
    const bool only_channels_padded = i == 0 || padded[i] == dims[i];
    if (!same_order || !only_channels_padded) { return false; }
  }
  return blocks.get_size() == static_cast<std::size_t>(padded[0] * columns) * sizeof(float);
}

void pack_weights(const dnnl::memory::desc& blocks, const float* rows, float* packed) {
  const int64_t channels = blocks.get_dims()[0];
  const int64_t block = blocks.get_inner_blks()[0];
  const int64_t columns = elements_per_output_channel(blocks);
  const int64_t count = blocks.get_padded_dims()[0] / block;
  const int64_t grain = std::max<int64_t>(1, kGrainSize / (block * columns));
  parallel_for(count, grain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i * block;
      const int64_t valid = std::clamp<int64_t>(channels - first, 0, block);
      pack_block(rows + first * columns, valid, columns, block, packed + first * columns);
    }
  });
}

}  // namespace oneflow_accel
