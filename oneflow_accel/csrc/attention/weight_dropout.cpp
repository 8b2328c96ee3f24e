#include "attention/weight_dropout.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "common/vector.h"

namespace oneflow_accel {

namespace {

// Counters of a group of weights.
constexpr int64_t kCounters = 16;
constexpr int kRounds = 10;

// Numbers of 32 bits, each in the lower half of a lane; what stands in the upper halves does not
// matter.
template <int lanes>
using Wide __attribute__((vector_size(8 * lanes))) = uint64_t;
template <int count>
using Ints __attribute__((vector_size(4 * count))) = int32_t;
template <int count>
using Words __attribute__((vector_size(4 * count))) = uint32_t;

// Products of the lower halves, one instruction. GCC makes five of the formula; and it warns of
// what a function of another target would return, which this never is, as it is inlined.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"
template <int lanes>
ONEFLOW_ACCEL_INLINE void multiply(const Wide<lanes>& a, const Wide<lanes>& b,
                                   Wide<lanes>* product) {
#ifdef __clang__
  *product = (a & 0xFFFFFFFFU) * (b & 0xFFFFFFFFU);
#else
  const auto left = (Ints<2 * lanes>)a;
  const auto right = (Ints<2 * lanes>)b;
  if constexpr (lanes == 8) {
    *product = (Wide<lanes>)__builtin_ia32_pmuludq512_mask(left, right, (__v8di)a,
                                                           static_cast<__mmask8>(-1));
  } else {
    *product = (Wide<lanes>)__builtin_ia32_pmuludq256(left, right);
  }
#endif
}
#pragma GCC diagnostic pop

struct Block {
  const WeightDropout* dropout;
  const WeightPlace* place;
  int64_t rows;
  int64_t keys;
  Visible visible;
  float* factors;
  int64_t stride;
};

// The factors that the two words of each lane decide: those of the lower halves to out, those of
// the upper ones 64 further on.
template <int lanes>
ONEFLOW_ACCEL_INLINE void store(const Wide<lanes>& even, const Wide<lanes>& odd, int32_t least,
                                int32_t scale, float* out) {
  const auto words = (Words<2 * lanes>)((even & 0xFFFFFFFFU) | (odd << 32));
  const auto lower = (Ints<2 * lanes>)(words & 0xFFFFU);
  const auto upper = (Ints<2 * lanes>)(words >> 16);
  *vector_at<2 * lanes>(out, 0) = (Vector<2 * lanes>)((lower >= least) & scale);
  *vector_at<2 * lanes>(out + kWeightGroup / 2, 0)
      = (Vector<2 * lanes>)((upper >= least) & scale);
}

template <int lanes>
ONEFLOW_ACCEL_INLINE void draw(const Block& block) {
  const WeightDropout& dropout = *block.dropout;
  const Wide<lanes> zero{};
  const Wide<lanes> multiplier_a = zero + 0xD2511F53U;
  const Wide<lanes> multiplier_c = zero + 0xCD9E8D57U;
  const auto scale = __builtin_bit_cast(int32_t, dropout.scale);
  Wide<lanes> keys[kRounds][2];
  for (uint32_t round = 0; round < kRounds; ++round) {
    keys[round][0] = zero + (static_cast<uint32_t>(dropout.seed) + round * 0x9E3779B9U);
    keys[round][1] = zero + (static_cast<uint32_t>(dropout.seed >> 32) + round * 0xBB67AE85U);
  }
  Wide<lanes> numbers;
  for (int lane = 0; lane < lanes; ++lane) { numbers[lane] = lane; }
  const WeightPlace& place = *block.place;
  const Wide<lanes> head = zero + static_cast<uint32_t>(dropout.first_head + place.head);
  const Wide<lanes> batch = zero + static_cast<uint32_t>(dropout.first_batch + place.batch);
  for (int64_t i = 0; i < block.rows; ++i) {
    const Wide<lanes> query = zero + static_cast<uint32_t>(place.query + i);
    const int64_t seen = block.visible.keys(i, block.keys);
    for (int64_t j = 0; j < seen; j += kWeightGroup) {
      const int64_t first = (place.key + j) / kWeightGroup * kCounters;
      float* out = block.factors + i * block.stride + j;
      for (int64_t n = 0; n < kCounters; n += lanes) {
        Wide<lanes> a = numbers + static_cast<uint64_t>(first + n);
        Wide<lanes> b = query;
        Wide<lanes> c = head;
        Wide<lanes> d = batch;
#pragma GCC unroll 10
        for (int round = 0; round < kRounds; ++round) {
          Wide<lanes> left;
          Wide<lanes> right;
          multiply<lanes>(a, multiplier_a, &left);
          multiply<lanes>(c, multiplier_c, &right);
          a = (right >> 32) ^ b ^ keys[round][0];
          b = right;
          c = (left >> 32) ^ d ^ keys[round][1];
          d = left;
        }
        store<lanes>(a, b, dropout.least, scale, out + 2 * n);
        store<lanes>(c, d, dropout.least, scale, out + 2 * n + 2 * kCounters);
      }
    }
  }
}

}  // namespace

WeightDropout::WeightDropout(int64_t seed, double rate, int64_t first_batch, int64_t first_head)
    : seed(static_cast<uint64_t>(seed)),
      least(static_cast<int32_t>(std::min(std::nearbyint(rate * 0x1p16), 0x1p16 - 1))),
      scale(static_cast<float>(1.0 / (1.0 - rate))),
      first_batch(first_batch),
      first_head(first_head) {}

void weight_factors(const WeightDropout& dropout, const WeightPlace& place, int64_t rows,
                    int64_t keys, Visible visible, float* factors, int64_t stride) {
  draw<kFloats / 2>({&dropout, &place, rows, keys, visible, factors, stride});
}

void multiply_block(const float* factors, int64_t stride, int64_t rows, int64_t keys,
                    Visible visible, float* x) {
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t seen = visible.keys(i, keys);
#pragma omp simd
    for (int64_t j = 0; j < seen; ++j) { x[i * stride + j] *= factors[i * stride + j]; }
  }
}

}  // namespace oneflow_accel
