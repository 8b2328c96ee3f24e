// Products of rows with weights in packed panels, as generating text token by token has them.
#pragma once

#include <cstdint>

#include "common/scratch.h"
#include "common/threads.h"
#include "common/vector.h"

namespace oneflow_accel::packed {

// Outputs of a panel: its words of 32 bits lie row by row along the inputs, and hold one float, two
// of bfloat16 or four of 8 bits of one output, which is what vdpbf16ps and vpdpbusd multiply.
constexpr int64_t kPanel = 64;
// Activations that share a scale where the weights are of 8 bits.
constexpr int64_t kGroup = 64;

// A matrix (outputs, in). Bytes are weights + 128, as vpdpbusd wants one side without a sign.
struct Weights {
  const float* words;
  int values;
  int64_t in;

  // Rows of words in a panel.
  int64_t depth() const {
    return values == 1 ? in : round_up(in, values == 2 ? kGroup / 2 : kGroup) / values;
  }
  const float* panel(int64_t number) const { return words + number * depth() * kPanel; }
};

// Rows as the words of weights want them: words like theirs or, where the processor has no
// instruction for those, two for each: floats of the lower and the upper half of bfloat16, pairs of
// 16 bits of the even and the odd bytes. Of a group of 8 bits: its scale, and what its integer sums
// begin with, so that the 128 in the weights adds nothing.
struct Rows {
  const Aliased<float>* words;
  int64_t stride;
  const float* scales = nullptr;
  const int32_t* starts = nullptr;
  int64_t groups = 0;

  // From a row and a group of it on.
  Rows from(int64_t row, int64_t word = 0, int64_t group = 0) const {
    const int64_t place = row * groups + group;
    const bool bytes = scales != nullptr;
    return {words + row * stride + word, stride, bytes ? scales + place : nullptr,
            bytes ? starts + place : nullptr, groups};
  }
};

// x (rows, weights.in), rounded to the words of the weights in memory of the calling thread, in
// parallel.
Rows as_words(const float* x, int64_t rows, const Weights& weights);

// c (count, kPanel) = rows times a panel of the weights, on the calling thread. Each row's sums are
// added up in one order, whatever rows lie beside it.
void multiply(const Rows& rows, int64_t count, const Weights& weights, int64_t panel, float* c);

}  // namespace oneflow_accel::packed
