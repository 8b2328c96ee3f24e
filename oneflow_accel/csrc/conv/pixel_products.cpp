#include "conv/primitive.h"

#include <algorithm>

#include "attention/block_product.h"
#include "common/onednn.h"
#include "common/threads.h"

namespace oneflow_accel {

namespace {

// From as many input channels on oneDNN copies nothing, if the kernel is dense.
constexpr int64_t kFewChannels = 16;

// Parts of the output's rows that are summed up by themselves: always as many, so that the order
// of sums does not depend on the number of threads.
constexpr int64_t kParts = 8;

int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -ceil_div(-a, b); }

// One axis of a convolution.
struct Axis {
  int64_t in, out, kernel, stride, step, padding;

  // Where the kernel's element k reads for the output's element x.
  int64_t source(int64_t x, int64_t k) const { return x * stride + k * step - padding; }
  // The output's elements [first, last) for which that lies inside.
  int64_t first(int64_t k) const {
    return std::max<int64_t>(0, floor_div(padding - k * step + stride - 1, stride));
  }
  int64_t last(int64_t k) const {
    return std::min(out, floor_div(in - 1 + padding - k * step, stride) + 1);
  }
};

struct PixelShape {
  int64_t batch, in_channels, out_channels;
  Axis rows, columns;

  explicit PixelShape(const ConvGeometry& g)
      : batch(g.in[0]),
        in_channels(g.in[1]),
        out_channels(g.out[1]),
        rows{g.in[2], g.out[2], g.weights[3], g.strides[0], g.dilation[0] + 1, g.padding[0]},
        columns{g.in[3], g.out[3], g.weights[4], g.strides[1], g.dilation[1] + 1, g.padding[1]} {}

  int64_t kernel_size() const { return rows.kernel * columns.kernel; }
  int64_t weights() const { return kernel_size() * in_channels * out_channels; }
};

// sums[k, c, o] += what one row of the output gives: for each element k of the kernel the product
// of the row's gradients and the pixels that it read. After these come the sums of the gradients.
void add_row(const PixelShape& s, const float* in, const float* out_grad, int64_t row,
             float* sums) {
  const int64_t n = row / s.rows.out;
  const float* grads = out_grad + row * s.columns.out * s.out_channels;
  for (int64_t ky = 0; ky < s.rows.kernel; ++ky) {
    const int64_t y = s.rows.source(row % s.rows.out, ky);
    if (y < 0 || y >= s.rows.in) { continue; }
    const float* pixels = in + (n * s.rows.in + y) * s.columns.in * s.in_channels;
    for (int64_t kx = 0; kx < s.columns.kernel; ++kx) {
      const int64_t first = s.columns.first(kx);
      const int64_t last = s.columns.last(kx);
      if (first >= last) { continue; }
      const Strided left{pixels + s.columns.source(first, kx) * s.in_channels, 1,
                         s.columns.stride * s.in_channels};
      float* to = sums + (ky * s.columns.kernel + kx) * s.in_channels * s.out_channels;
      for (int64_t o = 0; o < s.out_channels; o += kPanelWidth) {
        panel_product(s.in_channels, std::min(kPanelWidth, s.out_channels - o), last - first, left,
                      grads + first * s.out_channels + o, s.out_channels, to + o, s.out_channels,
                      true);
      }
    }
  }
  float* bias_sums = sums + s.weights();
  for (int64_t x = 0; x < s.columns.out; ++x, grads += s.out_channels) {
#pragma omp simd
    for (int64_t o = 0; o < s.out_channels; ++o) { bias_sums[o] += grads[o]; }
  }
}

}  // namespace

bool has_pixel_products(const ConvGeometry& g, ConvRole result) {
  return result == kConvWeights && g.in.size() == 4 && g.channels_last && g.groups() == 1
         && g.out[1] % kVectorWidth == 0 && !g.is_pointwise()
         && (g.in[1] < kFewChannels || g.dilation[0] > 0 || g.dilation[1] > 0);
}

void pixel_products_filter_grad(const ConvGeometry& geometry, const ConvCall& call) {
  const PixelShape s(geometry);
  const auto* in = call.tensor<float>(kConvIn);
  const auto* out_grad = call.tensor<float>(kConvOut);
  const int64_t rows = s.batch * s.rows.out;
  const int64_t each = s.weights() + s.out_channels;
  auto* parts = scratch<float>(ScratchSlot::kReduction, kParts * each);
  for_each_block(kParts, kGrainSize, [&](int64_t part) {
    float* sums = parts + part * each;
    std::fill_n(sums, each, 0.0F);
    for (int64_t row = rows * part / kParts; row < rows * (part + 1) / kParts; ++row) {
      add_row(s, in, out_grad, row, sums);
    }
  });
  parallel_for(each, kGrainSize, [&](int64_t begin, int64_t end) {
    for (int64_t part = 1; part < kParts; ++part) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) { parts[i] += parts[part * each + i]; }
    }
  });
  const int64_t size = s.kernel_size();
  const int64_t pixel = geometry.weights_channels_last ? s.in_channels : 1;
  const int64_t channel = geometry.weights_channels_last ? 1 : size;
  for (int64_t o = 0; o < s.out_channels; ++o) {
    float* to = call.tensor<float>(kConvWeights) + o * size * s.in_channels;
    for (int64_t k = 0; k < size; ++k) {
      const float* from = parts + k * s.in_channels * s.out_channels + o;
      for (int64_t c = 0; c < s.in_channels; ++c) {
        to[k * pixel + c * channel] = from[c * s.out_channels];
      }
    }
  }
  if (call.bias != nullptr) {
    std::copy_n(parts + s.weights(), s.out_channels, static_cast<float*>(call.bias));
  }
}

}  // namespace oneflow_accel
