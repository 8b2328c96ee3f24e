#include "random/mersenne.h"

#include <type_traits>


namespace oneflow_accel::random {

namespace {

// libstdc++'s std::mt19937, whose state can otherwise only be had as text.
struct Layout {
  std::uint_fast32_t words[kStateWords];
  std::size_t position;
};
static_assert(sizeof(Layout) == sizeof(std::mt19937));
static_assert(std::is_trivially_copyable_v<std::mt19937>);

}  // namespace

EngineState load(const std::mt19937& engine) {
  Layout layout;
  std::memcpy(&layout, &engine, sizeof(layout));
  EngineState state;
  std::copy_n(layout.words, kStateWords, state.words);
  state.position = static_cast<int64_t>(layout.position);
  return state;
}

void store(const EngineState& state, std::mt19937& engine) {
  Layout layout;
  std::copy_n(state.words, kStateWords, layout.words);
  layout.position = static_cast<std::size_t>(state.position);
  std::memcpy(static_cast<void*>(&engine), &layout, sizeof(layout));
}

// The recurrence of MT19937. A word depends on words that are at least 227 back: whole registers
// of them can be made at once.
void extend(uint32_t* next, int64_t n) {
  constexpr uint32_t kUpper = 0x80000000U;
  constexpr uint32_t kTwist = 0x9908B0DFU;
  constexpr int64_t kMiddle = static_cast<int64_t>(std::mt19937::shift_size);
#pragma omp simd safelen(128)
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t low = next[i - kStateWords + 1];
    const uint32_t mixed = (next[i - kStateWords] & kUpper) | (low & ~kUpper);
    next[i] = next[i - kStateWords + kMiddle] ^ (mixed >> 1) ^ ((0U - (low & 1U)) & kTwist);
  }
}

}  // namespace oneflow_accel::random
