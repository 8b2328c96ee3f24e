// Which of attention's weights dropout keeps: a pure function of a seed and of a weight's place, so
// that the gradient finds the forward's weights again and none are stored.
//
// Generator: Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
// 1, 2, 3", 2011). Its key is the seed. A weight takes 16 bits: that of (batch, head, query, key)
// takes, of the counter (key / 128 * 16 + key % 32 / 2, query, head, batch), the word
// key % 64 / 32 * 2 + key % 2, and its lower half where key % 128 < 64. In this order vectors of
// products are stored with few steps.
#pragma once

#include <cstdint>

#include "attention/rows.h"

namespace oneflow_accel {

struct WeightDropout {
  uint64_t seed;
  // A weight is kept where its 16 bits are at least `least`, and is multiplied by `scale` then. The
  // rate is so met to 1 / 2^17.
  int32_t least;
  float scale;
  // What comes first here in the whole tensor, of which this process may hold a part.
  int64_t first_batch;
  int64_t first_head;

  // 0 < rate < 1.
  WeightDropout(int64_t seed, double rate, int64_t first_batch, int64_t first_head);
};

// A block of weights in the part that is here; `key` is a multiple of kWeightGroup.
struct WeightPlace {
  int64_t batch;
  int64_t head;
  int64_t query;
  int64_t key;
};

// Keys that are drawn at a time.
constexpr int64_t kWeightGroup = 128;

// factors[i * stride + j]: what the weight of row i and column j is multiplied by, `scale` or 0,
// for the keys that the row sees. Rows have space for a multiple of kWeightGroup.
void weight_factors(const WeightDropout& dropout, const WeightPlace& place, int64_t rows,
                    int64_t keys, Visible visible, float* factors, int64_t stride);

// x *= factors where a row sees a key.
void multiply_block(const float* factors, int64_t stride, int64_t rows, int64_t keys,
                    Visible visible, float* x);

}  // namespace oneflow_accel
