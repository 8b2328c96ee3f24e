#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/attention.h"
#include "attention/block_product.h"
#include "common/threads.h"
#include "softmax/row.h"

namespace oneflow_accel {

namespace {

// Queries and keys of a block: with 64 dimensions, what a block needs stays in a second-level
// cache of 512 KiB. Multiples of the rows of a product's tile, and of a panel.
constexpr int64_t kQueryBlock = 48;
constexpr int64_t kKeyBlock = 256;

// Up to this many queries (generation has one), keys and values are used where they lie: preparing
// them for products would cost more than the products.
constexpr int64_t kFewQueries = 2;

// Space for one block of queries, and the keys and values of one head, ready for products.
struct Workspace {
  Panels keys;
  Panels values;
  float* queries;
  float* scores;
  float* out;
  // Whether products may multiply values that a query does not see by 0.
  bool finite = false;
  // Of the weights of one block, where some are dropped.
  float* factors = nullptr;
  float largest[kQueryBlock];
  float sum[kQueryBlock];

  Workspace(const AttentionShape& shape, bool drops, bool bfloat16) {
    const bool few = shape.queries <= kFewQueries;
    Carver::carve([&](Carver* carver) {
      keys = carver->take_panels(shape.dim, few ? 0 : padded(shape.keys), bfloat16);
      values = carver->take_panels(few ? 0 : shape.keys, padded(shape.dim), bfloat16);
      queries = carver->take(kQueryBlock * shape.dim);
      scores = carver->take(kQueryBlock * kKeyBlock);
      out = carver->take(kQueryBlock * values.columns);
      if (drops) { factors = carver->take(kQueryBlock * kKeyBlock); }
    });
  }
};

// One row of a block of scores and the softmax as far as it is known: the largest score, the sum of
// e^(score - largest), and the output that belongs to them, not yet divided by the sum. Scores
// become e^(score - largest), 0 where a key is not visible. Where all scores of a row are
// -infinity, its softmax is NaN, as the formula says.
void softmax_row(float* scores, int64_t visible, int64_t keys, float* largest, float* sum,
                 float* out, int64_t out_columns) {
  float most = *largest;
#pragma omp simd reduction(max : most)
  for (int64_t j = 0; j < visible; ++j) { most = scores[j] > most ? scores[j] : most; }
  float total = 0.0F;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < visible; ++j) {
    scores[j] = row::exp_of_nonpositive(scores[j] - most);
    total += scores[j];
  }
  for (int64_t j = visible; j < keys; ++j) { scores[j] = 0.0F; }
  if (most > *largest) {
    const float factor = simd::exp(*largest - most);
    *sum *= factor;
    for (int64_t d = 0; d < out_columns; ++d) { out[d] *= factor; }
    *largest = most;
  }
  *sum += total;
}

// The queries [begin, begin + rows) of one head, the first of which has its weights at `place`:
// workspace.out, divided by workspace.sum. Keys and values are used as the workspace has them or,
// for a few queries, where they lie from `key` and `value` on.
template <typename T>
void attend(const AttentionShape& shape, int64_t begin, int64_t rows, bool few, const T* key,
            int64_t key_stride, const T* value, int64_t value_stride, const WeightDropout* dropout,
            WeightPlace place, Workspace* workspace) {
  Workspace& w = *workspace;
  const int64_t stride = w.values.columns;
  std::fill_n(w.largest, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(w.sum, rows, 0.0F);
  const int64_t end = shape.keys_before(begin + rows);
  for (int64_t j = 0; j < end; j += kKeyBlock) {
    const int64_t keys = std::min(kKeyBlock, end - j);
    if (few) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t n = 0; n < keys; ++n) {
          w.scores[i * kKeyBlock + n] =
              dot(w.queries + i * shape.dim, key + (j + n) * key_stride, shape.dim);
        }
      }
    } else {
      block_product(rows, keys, shape.dim, {w.queries, shape.dim, 1}, w.keys, 0, j, w.scores,
                    kKeyBlock, false);
    }
    const Visible visible = shape.visible(begin, j);
    for (int64_t i = 0; i < rows; ++i) {
      softmax_row(w.scores + i * kKeyBlock, visible.keys(i, keys), keys, w.largest + i, w.sum + i,
                  w.out + i * stride, stride);
    }
    // The sum is that of all weights.
    if (dropout != nullptr) {
      place.key = j;
      weight_factors(*dropout, place, rows, keys, visible, w.factors, kKeyBlock);
      multiply_block(w.factors, kKeyBlock, rows, keys, visible, w.scores);
    }
    if (few || !w.finite) {
      for (int64_t i = 0; i < rows; ++i) {
        weighted_sum(w.scores + i * kKeyBlock, value + j * value_stride, value_stride,
                     visible.keys(i, keys), shape.dim, w.out + i * stride, j > 0);
      }
    } else {
      block_product(rows, stride, keys, {w.scores, kKeyBlock, 1}, w.values, j, 0, w.out, stride,
                    j > 0);
    }
  }
}

}  // namespace

template <typename T>
void attention(const AttentionShape& shape, const Heads<const T>& query, const Heads<const T>& key,
               const Heads<const T>& value, const WeightDropout* dropout, const Heads<T>& out,
               float* lse) {
  if (shape.is_empty()) { return; }
  const bool few = shape.queries <= kFewQueries;
  const int64_t heads = shape.parts() * shape.heads;
  const int64_t group = shape.group();
  const int64_t blocks = ceil_div(shape.queries, kQueryBlock);
  // Heads alone feed all threads where there are enough; else their queries are shared out too,
  // and each part prepares the keys and values again.
  const int64_t parts = std::min(blocks, ceil_div(num_threads(), heads));
  parallel_for(heads * parts, 1, [&](int64_t first, int64_t last) {
    Workspace w(shape, dropout != nullptr, by_tiles<T>());
    for (int64_t task = first; task < last; ++task) {
      const Span span = shape.part(task / parts / shape.heads);
      const AttentionShape own = shape.of(span);
      const int64_t b = span.batch;
      const int64_t t = span.begin;
      const int64_t h = task / parts % shape.heads;
      const int64_t kv = h / group;
      if (!few && (task == first || task % (parts * group) == 0)) {
        w.keys.columns = padded(own.keys);
        w.values.rows = own.keys;
        pack_transposed(key.at(b, kv, t), key.time_stride, own.keys, w.keys);
        pack(value.at(b, kv, t), value.time_stride, shape.dim, w.values);
        w.finite = is_finite(value.at(b, kv, t), value.time_stride, own.keys, shape.dim);
      }
      const int64_t part = task % parts;
      const int64_t all = ceil_div(own.queries, kQueryBlock);
      const int64_t end = std::min(own.queries, all * (part + 1) / parts * kQueryBlock);
      for (int64_t i = all * part / parts * kQueryBlock; i < end; i += kQueryBlock) {
        const int64_t rows = std::min(kQueryBlock, end - i);
        copy_rows(query.at(b, h, t + i), query.time_stride, rows, shape.dim, shape.scale,
                  w.queries, shape.dim);
        attend(own, i, rows, few, key.at(b, kv, t), key.time_stride, value.at(b, kv, t),
               value.time_stride, dropout, {b, h, t + i, 0}, &w);
        float* block_lse = lse + (b * shape.heads + h) * shape.queries + t + i;
        for (int64_t r = 0; r < rows; ++r) {
          copy_row(w.out + r * w.values.columns, shape.dim, 1.0F / w.sum[r],
                   out.at(b, h, t + i + r));
          block_lse[r] = w.largest[r] + std::log(w.sum[r]);
        }
      }
    }
  });
}

template decltype(attention<float>) attention<float>;
template decltype(attention<Bfloat16>) attention<Bfloat16>;

}  // namespace oneflow_accel
