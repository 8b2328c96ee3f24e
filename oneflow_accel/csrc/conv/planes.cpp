#include "conv/planes.h"

#include <algorithm>

#include "attention/block_product.h"
#include "copy/transpose_tile.h"

namespace oneflow_accel {

namespace {

// Floats from one plane to the next without borders: whole vectors, and not a power of two.
int64_t dense_size(int64_t height, int64_t width) { return padded(height * width) + kVectorWidth; }

// Rows of one plane between two layouts.
void copy_rows(const float* from, int64_t from_row, int64_t height, int64_t width, float addend,
               float* to, int64_t to_row) {
  for (int64_t y = 0; y < height; ++y) {
    const float* source = from + y * from_row;
    float* target = to + y * to_row;
    for (int64_t x = 0; x < width; ++x) { target[x] = source[x] + addend; }
  }
}

}  // namespace

int64_t planes_space(int64_t channels, int64_t height, int64_t width, bool channels_last) {
  return channels_last ? channels * dense_size(height, width) : 0;
}

void load_planes(const ImageView<const float>& image, int64_t channel, int64_t count,
                 const PlaneLayout& layout, float* space, float* planes) {
  const int64_t pixels = image.height * image.width;
  const float* dense = image.data + channel * pixels;
  int64_t dense_plane = pixels;
  if (image.channels_last) {
    dense = space;
    dense_plane = dense_size(image.height, image.width);
    transpose_tile_add(image.data + channel, image.channels, nullptr, space, dense_plane, pixels,
                       count);
  }
  for (int64_t c = 0; c < count; ++c) {
    copy_rows(dense + c * dense_plane, image.width, image.height, image.width, 0.0F,
              planes + c * layout.size + layout.first, layout.row);
  }
}

void store_planes(const float* planes, const PlaneLayout& layout, int64_t channel, int64_t count,
                  const float* bias, float* space, const ImageView<float>& image) {
  const int64_t pixels = image.height * image.width;
  const int64_t dense_plane =
      image.channels_last ? dense_size(image.height, image.width) : pixels;
  float* dense = image.channels_last ? space : image.data + channel * pixels;
  for (int64_t c = 0; c < count; ++c) {
    const float addend = bias == nullptr ? 0.0F : bias[channel + c];
    copy_rows(planes + c * layout.size + layout.first, layout.row, image.height, image.width,
              addend, dense + c * dense_plane, image.width);
  }
  if (image.channels_last) {
    transpose_tile_add(space, dense_plane, nullptr, image.data + channel, image.channels, count,
                       pixels);
  }
}

}  // namespace oneflow_accel
