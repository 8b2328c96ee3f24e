// The words of std::mt19937, many at a time.
//
// OneFlow's generator for CPUs draws one word after another from std::mt19937. These functions draw
// the same words and leave the engine as if it had been asked for each, so that later draws, and
// generator states that are saved, are the same with and without the plug-in.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <random>
#include <type_traits>

#include "common/threads.h"
#include "common/waiting.h"

namespace oneflow_accel::random {

// Words of one state, and of one chunk: what one thread draws before the next one takes over.
constexpr int64_t kStateWords = static_cast<int64_t>(std::mt19937::state_size);
constexpr int64_t kChunkStates = 16;

// Below this many words per thread, waking another thread costs more than it saves.
constexpr int64_t kDrawGrain = 2 * kChunkStates * kStateWords;

// libstdc++'s std::mt19937, whose state can otherwise only be had as text: `words` are those of the
// present block, of which `position` are drawn.
struct EngineLayout {
  std::uint_fast32_t words[kStateWords];
  std::size_t position;
};
static_assert(sizeof(EngineLayout) == sizeof(std::mt19937));
static_assert(std::is_trivially_copyable_v<std::mt19937>);

// Appends n words (before tempering) to the kStateWords that stand before `next`: the recurrence of
// MT19937. A word depends on words that are at least 227 back, so whole registers of them can be
// made at once.
inline void extend(uint32_t* next, int64_t n) {
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

// The word that the engine gives for one of its state.
inline __attribute__((always_inline)) uint32_t temper(uint32_t word) {
  word ^= word >> 11;
  word ^= (word << 7) & 0x9D2C5680U;
  word ^= (word << 15) & 0xEFC60000U;
  return word ^ (word >> 18);
}

// Draws n words and calls consume(words, begin, count) on ranges that cover [0, n), in parallel.
// The words still want temper(). Which words an index gets does not depend on the threads.
template <typename Consume>
void draw(std::mt19937& engine, int64_t n, const Consume& consume) {
  EngineLayout layout;
  std::memcpy(&layout, &engine, sizeof(layout));
  uint32_t state[kStateWords];
  std::copy_n(layout.words, kStateWords, state);
  const auto position = static_cast<int64_t>(layout.position);
  const int64_t left = std::min(n, kStateWords - position);
  if (left > 0) { consume(state + position, int64_t{0}, left); }
  layout.position += left;

  const int64_t rest = n - left;
  constexpr int64_t kChunk = kChunkStates * kStateWords;
  const int64_t chunks = ceil_div(rest, kChunk);
  const int threads =
      static_cast<int>(std::clamp<int64_t>(rest / kDrawGrain, 1, oneflow_accel::num_threads()));
  // One thread after another takes the state on by a chunk, which it then works off while the
  // next thread is at it.
  std::atomic<int64_t> turn{0};
  run_team(threads, [&](int64_t id, int64_t count) {
    for (int64_t chunk = id; chunk < chunks; chunk += count) {
      alignas(64) uint32_t words[kStateWords + kChunk];
      const int64_t begin = chunk * kChunk;
      const int64_t drawn = std::min(kChunk, rest - begin);
      const auto is_mine = [&] { return turn.load(std::memory_order_acquire) == chunk; };
      // Unless the other thread has lost its core.
      while (!comes_true_soon(is_mine)) { sched_yield(); }
      const int64_t whole = round_up(drawn, kStateWords);
      std::memcpy(words, state, sizeof(state));
      extend(words + kStateWords, whole);
      std::memcpy(state, words + whole, sizeof(state));
      layout.position = kStateWords - (whole - drawn);
      turn.store(chunk + 1, std::memory_order_release);
      consume(words + kStateWords, left + begin, drawn);
    }
  });
  std::copy_n(state, kStateWords, layout.words);
  std::memcpy(static_cast<void*>(&engine), &layout, sizeof(layout));
}

}  // namespace oneflow_accel::random
