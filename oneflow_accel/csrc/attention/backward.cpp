#include <algorithm>

#include "attention/attention.h"
#include "attention/block_product.h"
#include "common/threads.h"
#include "softmax/row.h"

namespace oneflow_accel {

namespace {

// As in the forward, where fewer matrices share the cache.
constexpr int64_t kGradQueryBlock = 96;
constexpr int64_t kGradKeyBlock = 128;

// With S = scale Q K^T, P = softmax(S) = e^(S - lse) and O = P V:
//   dV = P^T dO,  dP = dO V^T,  dS = P (dP - delta) with delta = rowsum(dO O),
//   dQ = scale dS K,  dK = dS^T (scale Q).
// Where dropout multiplies P by factors F, O = (P F) V: dV = (P F)^T dO and dP = F (dO V^T), while
// delta stays rowsum(dP P) = rowsum(dO O).
struct GradWorkspace {
  Panels keys_transposed;
  Panels values_transposed;
  Panels keys;
  // One block of queries, scaled, and of the output's gradient: both sides of products.
  Panels queries;
  Panels out_grads;
  float* left_queries;
  float* left_out_grads;
  float* scores;
  float* score_grads;
  float* query_grads;
  // Of the weights of one block, where some are dropped.
  float* factors = nullptr;
  // Of all keys; rows of `stride` floats, as those of query_grads.
  float* key_grads;
  float* value_grads;
  int64_t stride;
  float delta[kGradQueryBlock];

  GradWorkspace(const AttentionShape& shape, bool drops, bool bfloat16)
      : stride(padded(shape.dim)) {
    Carver::carve([&](Carver* carver) {
      keys_transposed = carver->take_panels(shape.dim, padded(shape.keys), bfloat16);
      values_transposed = carver->take_panels(shape.dim, padded(shape.keys), bfloat16);
      keys = carver->take_panels(shape.keys, stride, bfloat16);
      key_grads = carver->take(shape.keys * stride);
      value_grads = carver->take(shape.keys * stride);
      queries = carver->take_panels(kGradQueryBlock, stride, bfloat16);
      out_grads = carver->take_panels(kGradQueryBlock, stride, bfloat16);
      left_queries = carver->take(kGradQueryBlock * shape.dim);
      left_out_grads = carver->take(kGradQueryBlock * shape.dim);
      query_grads = carver->take(kGradQueryBlock * stride);
      scores = carver->take(kGradQueryBlock * kGradKeyBlock);
      score_grads = carver->take(kGradQueryBlock * kGradKeyBlock);
      if (drops) { factors = carver->take(kGradQueryBlock * kGradKeyBlock); }
    });
  }
};

// scores becomes p = e^(score - lse), score_grads, which holds dp, becomes p (dp - delta).
void softmax_grad_block(float* scores, float* score_grads, int64_t stride, int64_t rows,
                        int64_t keys, Visible visible, const float* lse, const float* delta) {
  for (int64_t i = 0; i < rows; ++i) {
    float* p = scores + i * stride;
    float* ds = score_grads + i * stride;
    const float row_lse = lse[i];
    const float row_delta = delta[i];
    const int64_t n = visible.keys(i, keys);
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      p[j] = row::exp_of_nonpositive(p[j] - row_lse);
      ds[j] = p[j] * (ds[j] - row_delta);
    }
    for (int64_t j = n; j < keys; ++j) { p[j] = ds[j] = 0.0F; }
  }
}

// The part of the queries [begin, begin + rows) of one head, the first of which has its weights at
// `place`: sets query_grads, adds to key_grads and value_grads.
void attend_grad(const AttentionShape& shape, int64_t begin, WeightPlace place, int64_t rows,
                 const float* lse, const WeightDropout* dropout, GradWorkspace* workspace) {
  GradWorkspace& w = *workspace;
  const int64_t end = shape.keys_before(begin + rows);
  for (int64_t j = 0; j < end; j += kGradKeyBlock) {
    const int64_t keys = std::min(kGradKeyBlock, end - j);
    block_product(rows, keys, shape.dim, {w.left_queries, shape.dim, 1}, w.keys_transposed, 0, j,
                  w.scores, kGradKeyBlock, false);
    block_product(rows, keys, shape.dim, {w.left_out_grads, shape.dim, 1}, w.values_transposed, 0,
                  j, w.score_grads, kGradKeyBlock, false);
    const Visible visible = shape.visible(begin, j);
    if (dropout != nullptr) {
      place.key = j;
      weight_factors(*dropout, place, rows, keys, visible, w.factors, kGradKeyBlock);
      multiply_block(w.factors, kGradKeyBlock, rows, keys, visible, w.score_grads);
    }
    softmax_grad_block(w.scores, w.score_grads, kGradKeyBlock, rows, keys, visible, lse, w.delta);
    if (dropout != nullptr) {
      multiply_block(w.factors, kGradKeyBlock, rows, keys, visible, w.scores);
    }
    block_product(keys, w.stride, rows, {w.scores, 1, kGradKeyBlock}, w.out_grads, 0, 0,
                  w.value_grads + j * w.stride, w.stride, true);
    block_product(keys, w.stride, rows, {w.score_grads, 1, kGradKeyBlock}, w.queries, 0, 0,
                  w.key_grads + j * w.stride, w.stride, true);
    block_product(rows, w.stride, keys, {w.score_grads, kGradKeyBlock, 1}, w.keys, j, 0,
                  w.query_grads, w.stride, j > 0);
  }
}

// One head of keys and values, and all heads of queries that share it, in their order.
template <typename T>
void head_grad(const AttentionShape& all, const Span& span, int64_t kv,
               const AttentionGradInputs<T>& in, const WeightDropout* dropout,
               const AttentionGradOutputs<T>& out, GradWorkspace* workspace) {
  GradWorkspace& w = *workspace;
  const AttentionShape shape = all.of(span);
  const int64_t b = span.batch;
  const int64_t t = span.begin;
  w.keys_transposed.columns = w.values_transposed.columns = padded(shape.keys);
  w.keys.rows = shape.keys;
  pack_transposed(in.key.at(b, kv, t), in.key.time_stride, shape.keys, w.keys_transposed);
  pack_transposed(in.value.at(b, kv, t), in.value.time_stride, shape.keys, w.values_transposed);
  pack(in.key.at(b, kv, t), in.key.time_stride, shape.dim, w.keys);
  std::fill_n(w.key_grads, shape.keys * w.stride, 0.0F);
  std::fill_n(w.value_grads, shape.keys * w.stride, 0.0F);
  const auto store = [&](const float* grads, int64_t rows, float factor, const Heads<T>& to,
                         int64_t h, int64_t time) {
    copy_rows(grads, w.stride, rows, shape.dim, factor, to.at(b, h, time), to.time_stride);
  };
  for (int64_t h = kv * shape.group(); h < (kv + 1) * shape.group(); ++h) {
    const float* lse = in.lse + (b * shape.heads + h) * all.queries + t;
    for (int64_t i = 0; i < shape.queries; i += kGradQueryBlock) {
      const int64_t rows = std::min(kGradQueryBlock, shape.queries - i);
      copy_rows(in.query.at(b, h, t + i), in.query.time_stride, rows, shape.dim, shape.scale,
                w.left_queries, shape.dim);
      copy_rows(in.out_grad.at(b, h, t + i), in.out_grad.time_stride, rows, shape.dim, 1.0F,
                w.left_out_grads, shape.dim);
      w.queries.rows = w.out_grads.rows = rows;
      pack(w.left_queries, shape.dim, shape.dim, w.queries);
      pack(w.left_out_grads, shape.dim, shape.dim, w.out_grads);
      for (int64_t r = 0; r < rows; ++r) {
        w.delta[r] = dot(in.out.at(b, h, t + i + r), in.out_grad.at(b, h, t + i + r), shape.dim);
      }
      attend_grad(shape, i, {b, h, t + i, 0}, rows, lse + i, dropout, &w);
      store(w.query_grads, rows, shape.scale, out.query, h, t + i);
    }
  }
  store(w.key_grads, shape.keys, 1.0F, out.key, kv, t);
  store(w.value_grads, shape.keys, 1.0F, out.value, kv, t);
}

}  // namespace

template <typename T>
void attention_grad(const AttentionShape& shape, const AttentionGradInputs<T>& in,
                    const WeightDropout* dropout, const AttentionGradOutputs<T>& out) {
  parallel_for(shape.parts() * shape.kv_heads, 1, [&](int64_t first, int64_t last) {
    GradWorkspace w(shape, dropout != nullptr, by_tiles<T>());
    for (int64_t task = first; task < last; ++task) {
      head_grad(shape, shape.part(task / shape.kv_heads), task % shape.kv_heads, in, dropout, out,
                &w);
    }
  });
}

template decltype(attention_grad<float>) attention_grad<float>;
template decltype(attention_grad<Bfloat16>) attention_grad<Bfloat16>;

}  // namespace oneflow_accel
