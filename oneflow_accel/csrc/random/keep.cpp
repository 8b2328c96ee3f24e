#include "random/keep.h"

#include "random/mersenne.h"

namespace oneflow_accel::random {

namespace {

// std::uniform_real_distribution<float>(0, 1) of libstdc++ for one word.
float uniform(uint32_t word) {
  constexpr float kLargestBelowOne = 0x1.fffffep-1F;
  return std::min(static_cast<float>(word) * 0x1p-32F, kLargestBelowOne);
}

// The first word for which keeps(uniform(word)) holds: it holds for all larger ones too.
template <typename Keeps>
Threshold first_word(const Keeps& keeps) {
  uint64_t low = 0;
  uint64_t high = uint64_t{1} << 32;
  while (low < high) {
    const uint64_t middle = (low + high) / 2;
    if (keeps(uniform(static_cast<uint32_t>(middle)))) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const bool any = low >> 32 == 0;
  return {any ? static_cast<uint32_t>(low) : 0, static_cast<uint8_t>(any)};
}

void keep(const uint32_t* words, Threshold threshold, uint8_t* mask, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    mask[i] = (temper(words[i]) >= threshold.least ? 1 : 0) & threshold.any;
  }
}

}  // namespace

Threshold at_least(float rate) {
  return first_word([=](float number) { return number >= rate; });
}

Threshold above(float rate) {
  return first_word([=](float number) { return number > rate; });
}

void draw_mask(std::mt19937& engine, Threshold threshold, uint8_t* mask, int64_t n) {
  draw(engine, n, [&](const uint32_t* words, int64_t begin, int64_t count) {
    keep(words, threshold, mask + begin, count);
  });
}

void draw_dropout(std::mt19937& engine, Threshold threshold, float scale, const float* x,
                  const float* addend, uint8_t* mask, float* y, int64_t n) {
  draw(engine, n, [&](const uint32_t* words, int64_t begin, int64_t count) {
    keep(words, threshold, mask + begin, count);
    if (addend == nullptr) {
      keep_and_scale(x + begin, mask + begin, scale, y + begin, count);
    } else {
      keep_scale_and_add(x + begin, mask + begin, scale, addend + begin, y + begin, count);
    }
  });
}

void keep_and_scale(const float* x, const uint8_t* mask, float scale, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = x[i] * (mask[i] != 0 ? scale : 0.0F); }
}

void keep_scale_and_add(const float* x, const uint8_t* mask, float scale, const float* addend,
                        float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = x[i] * (mask[i] != 0 ? scale : 0.0F) + addend[i]; }
}

}  // namespace oneflow_accel::random
