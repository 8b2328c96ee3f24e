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

// Vectors of numbers of 32 bits, each in the lower half of a lane; what stands in the upper halves
// does not matter. And the same memory as numbers of 32 bits.
constexpr int kLanes = kFloats / 2;
using Wide __attribute__((vector_size(8 * kLanes))) = uint64_t;
using Ints __attribute__((vector_size(4 * kFloats))) = int32_t;
using Words __attribute__((vector_size(4 * kFloats))) = uint32_t;

// Products of the lower halves, one instruction: GCC makes five of the formula.
ONEFLOW_ACCEL_INLINE Wide multiply_lower(const Wide& a, const Wide& b) {
#ifdef __AVX512F__
  return (Wide)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#else
  return (Wide)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#endif
}

// The factors that the two words of each lane decide: those of the lower halves to out, those of
// the upper ones 64 further on.
ONEFLOW_ACCEL_INLINE void store(const Wide& even, const Wide& odd, int32_t least, int32_t scale,
                                float* out) {
  const auto words = (Words)((even & 0xFFFFFFFFU) | (odd << 32));
  const auto lower = (Ints)(words & 0xFFFFU);
  const auto upper = (Ints)(words >> 16);
  *vector_at<kFloats>(out, 0) = (Vector<kFloats>)((lower >= least) & scale);
  *vector_at<kFloats>(out + kWeightGroup / 2, 0) = (Vector<kFloats>)((upper >= least) & scale);
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
  const Wide zero{};
  const Wide multiplier_a = zero + 0xD2511F53U;
  const Wide multiplier_c = zero + 0xCD9E8D57U;
  const auto scale = __builtin_bit_cast(int32_t, dropout.scale);
  Wide round_keys[kRounds][2];
  for (uint32_t round = 0; round < kRounds; ++round) {
    round_keys[round][0] = zero + (static_cast<uint32_t>(dropout.seed) + round * 0x9E3779B9U);
    round_keys[round][1] = zero + (static_cast<uint32_t>(dropout.seed >> 32) + round * 0xBB67AE85U);
  }
  Wide numbers;
  for (int lane = 0; lane < kLanes; ++lane) { numbers[lane] = lane; }
  const Wide head = zero + static_cast<uint32_t>(dropout.first_head + place.head);
  const Wide batch = zero + static_cast<uint32_t>(dropout.first_batch + place.batch);
  for (int64_t i = 0; i < rows; ++i) {
    const Wide query = zero + static_cast<uint32_t>(place.query + i);
    const int64_t seen = visible.keys(i, keys);
    for (int64_t j = 0; j < seen; j += kWeightGroup) {
      const int64_t first = (place.key + j) / kWeightGroup * kCounters;
      float* out = factors + i * stride + j;
      for (int64_t n = 0; n < kCounters; n += kLanes) {
        Wide a = numbers + static_cast<uint64_t>(first + n);
        Wide b = query;
        Wide c = head;
        Wide d = batch;
#pragma GCC unroll 10
        for (int round = 0; round < kRounds; ++round) {
          const Wide left = multiply_lower(a, multiplier_a);
          const Wide right = multiply_lower(c, multiplier_c);
          a = (right >> 32) ^ b ^ round_keys[round][0];
          b = right;
          c = (left >> 32) ^ d ^ round_keys[round][1];
          d = left;
        }
        store(a, b, dropout.least, scale, out + 2 * n);
        store(c, d, dropout.least, scale, out + 2 * n + 2 * kCounters);
      }
    }
  }
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
