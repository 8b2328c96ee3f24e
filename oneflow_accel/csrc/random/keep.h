// Which elements dropout keeps: a uniform random number per element, compared with the rate.
#pragma once

#include <cstdint>
#include <random>

namespace oneflow_accel::random {

// A word of the engine keeps its element if it is at least `least`; none does where `any` is 0.
struct Threshold {
  uint32_t least;
  uint8_t any;
};

// For uniform numbers at or above `rate` (operator dropout).
Threshold at_least(float rate);
// For uniform numbers above `rate` (operator random_mask_like).
Threshold above(float rate);

// mask = 1 where an element is kept, else 0.
void draw_mask(std::mt19937& engine, Threshold threshold, uint8_t* mask, int64_t n);

// As draw_mask, and y = x * scale where an element is kept, else 0, plus `addend` unless it is
// nullptr. y may be x or addend.
void draw_dropout(std::mt19937& engine, Threshold threshold, float scale, const float* x,
                  const float* addend, uint8_t* mask, float* y, int64_t n);

// y = x * scale where mask is 1, else 0, on the calling thread. y may be x.
void keep_and_scale(const float* x, const uint8_t* mask, float scale, float* y, int64_t n);

// As keep_and_scale, and plus addend. y may be x or addend.
void keep_scale_and_add(const float* x, const uint8_t* mask, float scale, const float* addend,
                        float* y, int64_t n);

}  // namespace oneflow_accel::random
