// Products of bfloat16 with sums in float32: by AMX, else by AVX-512 BF16.
//
// AMX is a core's eight tiles of 16 rows of 64 bytes each, and what multiplies them (Intel, "Intel 64
// and IA-32 Architectures Software Developer's Manual", volume 1, chapter 18). oneDNN asks the
// system for leave to use them where it finds them.
#include <dnnl.h>

#include <atomic>
#include <cstring>

#include "attention/block_product.h"
#include "common/bfloat16.h"
#include "common/onednn.h"
#include "copy/transpose_tile.h"

namespace oneflow_accel {

namespace {

// Rows of a tile, and words of 32 bits in each: a float, or two of bfloat16.
constexpr int64_t kSide = 16;

std::atomic<bool> g_emulates{false};

// Tiles by number, for as long as one of these exists. oneDNN's kernels set their own each time.
struct Amx {
  Amx() {
    struct {
      uint8_t palette = 1;
      uint8_t unused[15] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const shapes;
    static_assert(sizeof(shapes) == 64);
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~Amx() { asm volatile("tilerelease"); }
  Amx(const Amx&) = delete;
  Amx& operator=(const Amx&) = delete;

  template <int tile>
  void clear() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
  }
  // Rows lie `stride` words apart.
  template <int tile>
  void load(const float* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(4 * stride), "i"(tile)
                 : "memory");
  }
  template <int tile>
  void store(float* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(4 * stride), "i"(tile)
                 : "memory");
  }
  // c += a b, where b has words of two rows.
  template <int c, int a, int b>
  void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
  }
};

// The same without the instructions, for tests on other processors.
struct Emulated {
  float tiles[8][kSide][kSide];

  template <int tile>
  void clear() {
    std::memset(tiles[tile], 0, sizeof(tiles[tile]));
  }
  template <int tile>
  void load(const float* from, int64_t stride) {
    for (int64_t i = 0; i < kSide; ++i) { std::memcpy(tiles[tile][i], from + i * stride, 64); }
  }
  template <int tile>
  void store(float* to, int64_t stride) {
    for (int64_t i = 0; i < kSide; ++i) { std::memcpy(to + i * stride, tiles[tile][i], 64); }
  }
  template <int c, int a, int b>
  void multiply() {
    const auto value = [&](int tile, int64_t row, int64_t column, int half) {
      const auto word = __builtin_bit_cast(uint32_t, tiles[tile][row][column]);
      return to_float(Bfloat16{static_cast<uint16_t>(word >> (16 * half))});
    };
    for (int64_t i = 0; i < kSide; ++i) {
      for (int64_t j = 0; j < kSide; ++j) {
        for (int64_t k = 0; k < kSide; ++k) {
          tiles[c][i][j] += value(a, i, k, 0) * value(b, k, j, 0)
                            + value(a, i, k, 1) * value(b, k, j, 1);
        }
      }
    }
  }
};

// c (+)= a b for up to two tiles of rows and of columns; c has `rows` rows from here on.
struct TilesOfC {
  const Bfloat16* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  int64_t depth;
  float* c;
  int64_t c_stride;
  int64_t rows;
  bool two_columns;
  bool accumulate;
};

// A tile of c with its first `rows` rows: what follows them may be another matrix's.
template <int tile, typename Unit>
void begin_tile(Unit& unit, const float* c, int64_t stride, int64_t rows, bool accumulate) {
  if (!accumulate) { return unit.template clear<tile>(); }
  if (rows >= kSide) { return unit.template load<tile>(c, stride); }
  float some[kSide * kSide] = {};
  for (int64_t i = 0; i < rows; ++i) { std::copy_n(c + i * stride, kSide, some + i * kSide); }
  unit.template load<tile>(some, kSide);
}

template <int tile, typename Unit>
void end_tile(Unit& unit, float* c, int64_t stride, int64_t rows) {
  if (rows >= kSide) { return unit.template store<tile>(c, stride); }
  float some[kSide * kSide];
  unit.template store<tile>(some, kSide);
  for (int64_t i = 0; i < rows; ++i) { std::copy_n(some + i * kSide, kSide, c + i * stride); }
}

// Tiles 0 to 3 are c's, row by row, 4 and 5 a's, 6 and 7 b's.
template <typename Unit>
void multiply(Unit& unit, const TilesOfC& t) {
  const bool two_rows = t.rows > kSide;
  float* below = t.c + kSide * t.c_stride;
  const auto for_c = [&](const auto& fn) {
    fn(std::integral_constant<int, 0>(), t.c, t.rows);
    if (t.two_columns) { fn(std::integral_constant<int, 1>(), t.c + kSide, t.rows); }
    if (two_rows) { fn(std::integral_constant<int, 2>(), below, t.rows - kSide); }
    if (two_rows && t.two_columns) {
      fn(std::integral_constant<int, 3>(), below + kSide, t.rows - kSide);
    }
  };
  for_c([&](auto tile, float* c, int64_t rows) {
    begin_tile<tile>(unit, c, t.c_stride, rows, t.accumulate);
  });
  for (int64_t k = 0; k < t.depth; k += kTileDepth) {
    const auto* a = reinterpret_cast<const float*>(t.a + k);
    const float* b = t.b + k / 2 * t.b_stride;
    unit.template load<4>(a, t.a_stride / 2);
    unit.template load<6>(b, t.b_stride);
    unit.template multiply<0, 4, 6>();
    if (t.two_columns) {
      unit.template load<7>(b + kSide, t.b_stride);
      unit.template multiply<1, 4, 7>();
    }
    if (two_rows) {
      unit.template load<5>(a + kSide * t.a_stride / 2, t.a_stride / 2);
      unit.template multiply<2, 5, 6>();
      if (t.two_columns) { unit.template multiply<3, 5, 7>(); }
    }
  }
  for_c([&](auto tile, float* c, int64_t rows) { end_tile<tile>(unit, c, t.c_stride, rows); });
}

// to[i, k] = a[i, k] in rows of `stride`, with zeros up to there. `space` is as large.
void round_left(int64_t rows, int64_t depth, const Strided& a, Bfloat16* to, int64_t stride,
                Bfloat16* space) {
  const auto round = [](const float* from, int64_t n, Bfloat16* out) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) { out[i] = from_float<Bfloat16>(from[i]); }
  };
  if (a.column_stride == 1) {
    for (int64_t i = 0; i < rows; ++i) { round(a.data + i * a.row_stride, depth, to + i * stride); }
  } else {
    for (int64_t k = 0; k < depth; ++k) {
      round(a.data + k * a.column_stride, rows, space + k * rows);
    }
    transpose_tile(&space->bits, rows, &to->bits, stride, depth, rows);
  }
  for (int64_t i = 0; i < rows; ++i) {
    std::fill(to + i * stride + depth, to + (i + 1) * stride, Bfloat16{});
  }
}

template <typename Unit>
void multiply_rounded(int64_t rows, int64_t columns, const Bfloat16* a, int64_t depth,
                      const Panels& b, int64_t row, int64_t column, float* c, int64_t c_stride,
                      bool accumulate) {
  Unit unit;
  for (int64_t j = 0; j < columns; j += 2 * kSide) {
    const int64_t panel = (column + j) / kPanelWidth * kPanelWidth;
    for (int64_t i = 0; i < rows; i += 2 * kSide) {
      multiply(unit, {a + i * depth, depth, b.at(row, panel) + (column + j - panel),
                      b.width(panel), depth, c + i * c_stride + j, c_stride, rows - i,
                      columns - j > kSide, accumulate});
    }
  }
}

}  // namespace

bool has_tiles() { return has_bfloat16_products() || g_emulates.load(std::memory_order_relaxed); }

void tile_product(int64_t rows, int64_t columns, int64_t depth, const Strided& a, const Panels& b,
                  int64_t row, int64_t column, float* c, int64_t c_stride, bool accumulate) {
  const int64_t stride = round_up(depth, kTileDepth);
  const int64_t n = round_up(rows, kSide) * stride;
  // Rows after the last are whatever the memory has: no result is theirs.
  auto* left = scratch<Bfloat16>(ScratchSlot::kRoundedB, 2 * n);
  round_left(rows, depth, a, left, stride, left + n);
  constexpr unsigned kAmx = dnnl_cpu_isa_avx512_core_amx;
  static const bool has_amx = (dnnl_get_effective_cpu_isa() & kAmx) == kAmx;
  if (g_emulates || has_amx) {
    const auto multiply = g_emulates ? multiply_rounded<Emulated> : multiply_rounded<Amx>;
    return multiply(rows, columns, left, stride, b, row, column, c, c_stride, accumulate);
  }
  const Strided words{reinterpret_cast<const float*>(left), stride / 2, 1};
  for (int64_t j = 0; j < columns; j += kPanelWidth) {
    panel_product(rows, std::min(kPanelWidth, columns - j), ceil_div(depth, 2), words,
                  b.at(row, column + j), b.width(column + j), c + j, c_stride, accumulate, true);
  }
}

}  // namespace oneflow_accel

// For tests: whether products are by tiles on processors without them, too.
extern "C" void oneflow_accel_emulate_tiles(int on) { oneflow_accel::g_emulates.store(on != 0); }
