#include "packed/product.h"

#include <dnnl.h>
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/bfloat16.h"

namespace oneflow_accel::packed {

namespace {

// How words are multiplied: by the instruction for them, or in two parts where the processor has
// none.
enum Kind { kWhole, kPairs, kPairsInParts, kBytes, kBytesInParts };

constexpr bool is_in_parts(Kind kind) { return kind == kPairsInParts || kind == kBytesInParts; }
constexpr bool is_bytes(Kind kind) { return kind == kBytes || kind == kBytesInParts; }

using Floats = Vector<kFloats>;
using Ints __attribute__((vector_size(4 * kFloats))) = int32_t;
using Shorts __attribute__((vector_size(4 * kFloats))) = uint16_t;

// Rows of a tile of c, and its vectors where it has all of them: its sums, a row of b and an element
// of a fill the registers. Fewer rows take a panel in fewer passes.
constexpr int kRows = 6;
constexpr int kPanelVectors = kPanel / kFloats;
constexpr int vectors_of(int rows) {
  return std::min(kPanelVectors, rows == 1 ? kRegisters / 2 : kRegisters / (rows == 2 ? 4 : 8));
}
// Words of a panel that stay in a core's second-level cache while all rows pass over them.
constexpr int64_t kDepth = 256;
// Words of a group of activations of 8 bits.
constexpr int64_t kGroupWords = kGroup / 4;
// So many rows of a panel are fetched ahead for few rows of a, which are bound by memory: the
// processor does not look past the end of a page.
constexpr int64_t kAhead = 32;
// Floats of a line of the caches.
constexpr int64_t kLine = 16;

struct Tile {
  Rows a;
  const float* b;
  int64_t depth;
  float* c;
  bool accumulate;
  // `fetch` floats that are fetched meanwhile.
  const float* next;
  int64_t fetch;
};

// Part `part` of words of b, as the same part of a is to be multiplied with it.
template <Kind kind>
ONEFLOW_ACCEL_INLINE Floats part_of(const Floats& b, int part) {
  if constexpr (kind == kPairsInParts) {
    constexpr auto kUpper = static_cast<int32_t>(0xFFFF0000);
    return part == 0 ? (Floats)((Ints)b << 16) : (Floats)((Ints)b & kUpper);
  } else if constexpr (kind == kBytesInParts) {
    return part == 0 ? (Floats)((Shorts)b & 255) : (Floats)((Shorts)b >> 8);
  } else {
    return b;
  }
}

// The sum of products of pairs of 16 bits.
ONEFLOW_ACCEL_INLINE Ints sum_of_pairs(const Ints& a, const Ints& b) {
#ifdef __AVX512BW__
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

// sum += a b, of words or parts of them; integers for bytes.
template <Kind kind, typename Sum>
ONEFLOW_ACCEL_INLINE void add_product(Sum& sum, int32_t a, const Floats& b) {
  if constexpr (kind == kPairs) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(b), "v"(Ints{} + a));
  } else if constexpr (kind == kBytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"((Ints)b), "v"(Ints{} + a));
  } else if constexpr (kind == kBytesInParts) {
    sum += sum_of_pairs(Ints{} + a, (Ints)b);
  } else {
    sum += __builtin_bit_cast(float, a) * b;
  }
}

// sums += a b over `depth` words from `word` on.
template <Kind kind, int rows, int vectors, typename Sum>
ONEFLOW_ACCEL_INLINE void multiply_words(const Tile& t, int64_t word, int64_t depth,
                                         Sum (&sums)[rows][vectors]) {
  constexpr int kParts = is_in_parts(kind) ? 2 : 1;
  const auto* a = reinterpret_cast<const Aliased<int32_t>*>(t.a.words) + kParts * word;
  const float* b = t.b + word * kPanel;
  const int64_t fetch = ceil_div(t.fetch, t.depth);
  const float* next = t.next + word * fetch;
  for (int64_t k = 0; k < depth; ++k, a += kParts, b += kPanel, next += fetch) {
    for (int64_t line = 0; line < fetch; line += kLine) { __builtin_prefetch(next + line); }
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      Floats right[vectors];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        right[v] = part_of<kind>(*vector_at<kFloats>(b, v), part);
      }
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        const int32_t left = a[i * t.a.stride + part];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) { add_product<kind>(sums[i][v], left, right[v]); }
      }
    }
  }
}

template <Kind kind, int rows, int vectors>
ONEFLOW_ACCEL_INLINE void multiply_bytes(const Tile& t, Floats (&sums)[rows][vectors]) {
  for (int64_t group = 0; group < t.depth / kGroupWords; ++group) {
    Ints parts[rows][vectors];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const int32_t start = t.a.starts[i * t.a.groups + group];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) { parts[i][v] = Ints{} + start; }
    }
    multiply_words<kind>(t, group * kGroupWords, kGroupWords, parts);
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const float scale = t.a.scales[i * t.a.groups + group];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        sums[i][v] += scale * __builtin_convertvector(parts[i][v], Floats);
      }
    }
  }
}

template <Kind kind, int rows>
void multiply_tile(Tile t) {
  constexpr int kVectors = vectors_of(rows);
  constexpr int kPasses = kPanelVectors / kVectors;
  t.fetch /= kPasses;
  for (int pass = 0; pass < kPasses; ++pass) {
    Floats sums[rows][kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sums[i][v] = t.accumulate ? *vector_at<kFloats>(t.c + i * kPanel, v) : Floats{};
      }
    }
    if constexpr (is_bytes(kind)) {
      multiply_bytes<kind>(t, sums);
    } else {
      multiply_words<kind>(t, 0, t.depth, sums);
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        *vector_at<kFloats>(t.c + i * kPanel, v) = sums[i][v];
      }
    }
    t.b += kVectors * kFloats;
    t.c += kVectors * kFloats;
    t.next += t.fetch;
  }
}

// As many of kRows rows as there are.
template <Kind kind, int rows = kRows>
void multiply_some(const Tile& t, int64_t count) {
  if constexpr (rows > 1) {
    if (count < rows) { return multiply_some<kind, rows - 1>(t, count); }
  }
  multiply_tile<kind, rows>(t);
}

Kind kind_of(int values) {
  // Libraries for processors without AVX-512 have no such instructions, whatever this one has.
  constexpr bool kWide = kFloats == 16;
  constexpr unsigned kVnni = dnnl_cpu_isa_avx512_core_vnni;
  static const bool has_bytes = kWide && (dnnl_get_effective_cpu_isa() & kVnni) == kVnni;
  static const bool has_pairs = kWide && has_bfloat16_products();
  if (values == 1) { return kWhole; }
  if (values == 2) { return has_pairs ? kPairs : kPairsInParts; }
  return has_bytes ? kBytes : kBytesInParts;
}

// A group of up to kGroup numbers as whole ones of 8 bits with a scale; the rest of them are 0.
// What is not finite makes the scale NaN.
void round_group(const float* x, int64_t n, int8_t* to, float* scale, int32_t* start) {
  float largest = 0.0F;
  float poison = 0.0F;
#pragma omp simd reduction(max : largest) reduction(+ : poison)
  for (int64_t i = 0; i < n; ++i) {
    largest = std::max(largest, std::fabs(x[i]));
    poison += x[i] * 0.0F;
  }
  // Below it 127 / largest would overflow.
  constexpr float kSmallest = 1e-30F;
  const float inverse = largest < kSmallest || poison != 0.0F ? 0.0F : 127.0F / largest;
  // Adding it rounds to a whole number, half to even.
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23
  int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const auto rounded = __builtin_bit_cast(int32_t, x[i] * inverse + kRound) - 0x4B400000;
    to[i] = static_cast<int8_t>(rounded);
    sum += static_cast<int8_t>(rounded);
  }
  std::fill(to + n, to + kGroup, int8_t{0});
  *scale = largest / 127.0F + poison;
  *start = -128 * sum;
}

// The bytes of a group as pairs of 16 bits, those of the even ones before those of the odd ones of
// each word.
void widen_group(const int8_t* from, Aliased<int16_t>* to) {
  for (int64_t word = 0; word < kGroupWords; ++word) {
    for (int64_t i = 0; i < 4; ++i) { to[4 * word + i] = from[4 * word + i % 2 * 2 + i / 2]; }
  }
}

}  // namespace

Rows as_words(const float* x, int64_t rows, const Weights& weights) {
  const int64_t in = weights.in;
  const Kind kind = kind_of(weights.values);
  if (kind == kWhole) { return {x, in}; }
  const int64_t stride = weights.depth() * (is_in_parts(kind) ? 2 : 1);
  auto* words = scratch<float>(ScratchSlot::kRoundedA, rows * stride);
  if (!is_bytes(kind)) {
    for_each_block(rows, in, [=](int64_t row) {
      const float* from = x + row * in;
      float* to = words + row * stride;
      std::fill(to + in / 2, to + stride, 0.0F);
      if (kind == kPairs) {
        auto* pairs = reinterpret_cast<Bfloat16*>(to);
#pragma omp simd
        for (int64_t i = 0; i < in; ++i) { pairs[i] = from_float<Bfloat16>(from[i]); }
      } else {
#pragma omp simd
        for (int64_t i = 0; i < in; ++i) { to[i] = to_float(from_float<Bfloat16>(from[i])); }
      }
    });
    return {words, stride};
  }
  const int64_t groups = ceil_div(in, kGroup);
  auto* scales = scratch<float>(ScratchSlot::kRoundedB, 2 * rows * groups);
  auto* starts = reinterpret_cast<int32_t*>(scales + rows * groups);
  for_each_block(rows * groups, kGroup, [=](int64_t place) {
    const int64_t row = place / groups;
    const int64_t group = place % groups;
    const int64_t first = group * kGroup;
    int8_t bytes[kGroup];
    round_group(x + row * in + first, std::min(kGroup, in - first), bytes, scales + place,
                starts + place);
    float* to = words + row * stride + group * stride / groups;
    if (kind == kBytes) {
      std::memcpy(to, bytes, kGroup);
    } else {
      widen_group(bytes, reinterpret_cast<Aliased<int16_t>*>(to));
    }
  });
  return {words, stride, scales, starts, groups};
}

void multiply(const Rows& rows, int64_t count, const Weights& weights, int64_t panel, float* c) {
  constexpr void (*kMultiply[])(const Tile&, int64_t) = {
      multiply_some<kWhole>, multiply_some<kPairs>, multiply_some<kPairsInParts>,
      multiply_some<kBytes>, multiply_some<kBytesInParts>};
  const Kind kind = kind_of(weights.values);
  const int64_t depth = weights.depth();
  const int64_t blocks = ceil_div(count, int64_t{kRows});
  for (int64_t k = 0; k < depth; k += kDepth) {
    const int64_t words = std::min(kDepth, depth - k);
    const float* b = weights.panel(panel) + k * kPanel;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = block * kRows;
      // Several blocks of rows share in fetching what they multiply with next, as that takes longer
      // than one of them.
      const int64_t fetch = words * kPanel / blocks;
      const float* next = blocks == 1 ? b + kAhead * kPanel : b + words * kPanel + block * fetch;
      kMultiply[kind]({rows.from(row, is_in_parts(kind) ? 2 * k : k, k / kGroupWords), b, words,
                       c + row * kPanel, k > 0, next, fetch},
                      count - row);
    }
  }
}

}  // namespace oneflow_accel::packed
