#include <algorithm>
#include <vector>

#include "common/threads.h"
#include "conv/grouped.h"
#include "conv/grouped_blocks.h"
#include "conv/shifted_products.h"

namespace oneflow_accel {

namespace {

// to[i] is the sum of the floats of vector i.
void sum_vectors(const float* vectors, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
    for (int64_t lane = 0; lane < kVectorWidth; ++lane) { sum += vectors[i * kVectorWidth + lane]; }
    to[i] = sum;
  }
}

float sum_of(const float* x, int64_t n) {
  float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) { sum += x[i]; }
  return sum;
}

}  // namespace

void grouped_convolution_filter_grad(const GroupedShape& s, const float* in, const float* out_grad,
                                     float* weights_grad, float* bias_grad) {
  const GroupBlocks blocks(s);
  const PlaneLayout in_planes = blocks.in_layout();
  const PlaneLayout out_planes = blocks.out_layout();
  std::vector<int64_t> offsets = kernel_offsets(s, in_planes.size);
  // Sums that nobody reads fill the last part up.
  offsets.resize((s.depth() + kShiftedDots - 1) / kShiftedDots * kShiftedDots, 0);
  const auto depth = static_cast<int64_t>(offsets.size());
  const int64_t outs = blocks.most * s.out_channels;
  // A block sums over all images: the order of sums does not depend on the number of threads.
  parallel_for(blocks.count, 1, [&](int64_t begin, int64_t end) {
    BlockSpace space(s, blocks, outs * depth * kVectorWidth);
    float* sums = space.carver.take(outs * depth * kVectorWidth);
    std::vector<double> bias_sums(outs);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = blocks.begin(block);
      const int64_t groups = blocks.begin(block + 1) - first;
      std::fill_n(sums, outs * depth * kVectorWidth, 0.0F);
      std::fill(bias_sums.begin(), bias_sums.end(), 0.0);
      for (int64_t n = 0; n < s.batch; ++n) {
        load_planes(in_image(s, in, n), first * s.in_channels, groups * s.in_channels, in_planes,
                    space.dense, space.in);
        load_planes(out_image(s, out_grad, n), first * s.out_channels, groups * s.out_channels,
                    out_planes, space.dense, space.out);
        for (int64_t g = 0; g < groups; ++g) {
          shifted_dots({space.out + g * s.out_channels * out_planes.size, s.out_channels,
                        out_planes.size, space.in + g * s.in_channels * in_planes.size,
                        offsets.data(), depth, s.results(),
                        sums + g * s.out_channels * depth * kVectorWidth});
        }
        for (int64_t o = 0; bias_grad != nullptr && o < groups * s.out_channels; ++o) {
          bias_sums[o] += sum_of(space.out + o * out_planes.size, out_planes.size);
        }
      }
      for (int64_t o = 0; o < groups * s.out_channels; ++o) {
        const int64_t channel = first * s.out_channels + o;
        sum_vectors(sums + o * depth * kVectorWidth, s.depth(), weights_grad + channel * s.depth());
        if (bias_grad != nullptr) { bias_grad[channel] = static_cast<float>(bias_sums[o]); }
      }
    }
  });
}

}  // namespace oneflow_accel
