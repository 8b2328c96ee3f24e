// What both directions of a performer do to some rows of tokens.
#pragma once

#include "attention/buffer.h"
#include "attention/performer.h"
#include "attention/rows.h"
#include "common/threads.h"

namespace oneflow_accel {

// Tokens that are worked on at a time: what belongs to them stays in the first two caches.
constexpr int64_t kPerformerRows = 64;

// Tokens that one thread sums over. Always the same, so that the order of sums does not depend on
// the number of threads.
constexpr int64_t kPerformerChunk = 512;

// Tokens [begin, end) of one batch entry.
struct PerformerChunk {
  int64_t entry;
  int64_t begin;
  int64_t end;
};

inline int64_t performer_chunks(const PerformerShape& s) {
  return (s.time + kPerformerChunk - 1) / kPerformerChunk;
}

// Calls fn(first, last) for ranges of chunks, in parallel, each of one thread.
template <typename Fn>
void for_performer_chunks(const PerformerShape& s, const Fn& fn) {
  parallel_for(s.batch * performer_chunks(s), 1, fn);
}

inline PerformerChunk performer_chunk(const PerformerShape& s, int64_t index) {
  const int64_t part = index % performer_chunks(s);
  return {index / performer_chunks(s), part * kPerformerChunk,
          std::min(s.time, (part + 1) * kPerformerChunk)};
}

// Calls fn(row, rows) for tiles of a chunk.
template <typename Fn>
void for_performer_tiles(const PerformerChunk& chunk, const Fn& fn) {
  for (int64_t row = chunk.begin; row < chunk.end; row += kPerformerRows) {
    fn(row, std::min(kPerformerRows, chunk.end - row));
  }
}

// The sums of all chunks of each batch entry, in their order: `parts` and `sums` hold
// shape.summary() floats for each.
void add_performer_chunks(const PerformerShape& shape, const float* parts, float* sums);

// sums += features^T [x, factors]: what a tile of rows adds to a summary, whose rows are `stride`
// floats apart in `sums` and whose last column is apart in `column`. x has rows of padded(dim)
// floats; factors[i] is 1 where it is null. `space` is for kPerformerRows x padded(dim) floats.
void add_to_summary(const PerformerShape& shape, const float* features, int64_t rows, const float* x,
                    const float* factors, float* space, float* sums, float* column);

// Features of rows of a projection, with what they need: w in both roles of a product.
class PerformerFeatures {
 public:
  static int64_t space(const PerformerShape& s) {
    return s.dim * padded(s.features) + s.features * padded(s.dim) + 2 * kVectorWidth;
  }
  PerformerFeatures(const PerformerShape& shape, const float* w, Carver* carver);

  // features[i, j] = phi_j(x_i), rows of padded(features) floats, zeros in the padding.
  void compute(const float* x, int64_t stride, int64_t rows, float* features) const;

  // The gradient of x from that of the features: feature_grads[i, j] becomes itself
  // + factors[i] column[j] (factors: null for 1), times the feature. `space` is for
  // kPerformerRows x (padded(dim) + 1) floats.
  void grad(const float* x, int64_t stride, int64_t rows, const float* features,
            const float* factors, const float* column, float* feature_grads, float* space,
            float* x_grad) const;

 private:
  const PerformerShape& shape_;
  Panels transposed_;
  Panels panels_;
};

}  // namespace oneflow_accel
