// Scaled dot-product attention, softmax(scale Q K^T) V for every batch entry and head, and its
// gradient. Neither keeps a matrix of queries x keys: both work through blocks of it, the gradient
// from the logarithms of the softmax's sums that the forward leaves.
//
// Formulas: Rabe and Staats, "Self-attention does not need O(n^2) memory" (2021); Dao, Fu, Ermon,
// Rudra and Re, "FlashAttention" (2022); heads that share keys and values: Ainslie, Lee-Thorp, de
// Jong, Zemlyanskiy, Lebron and Sanghai, "GQA" (2023).
#pragma once

#include <cstdint>
#include <vector>

#include "attention/rows.h"
#include "attention/weight_dropout.h"

namespace oneflow_accel {

// A sequence that lies in a row of time with others, which it does not see: tokens
// [begin, begin + length) of a batch entry.
struct Span {
  int64_t batch;
  int64_t begin;
  int64_t length;
};

struct AttentionShape {
  int64_t batch;
  int64_t heads;
  // Of keys and values; they divide `heads` (grouped-query attention).
  int64_t kv_heads;
  int64_t queries;
  int64_t keys;
  int64_t dim;
  // Query i sees key j where j <= i + keys - queries. keys >= queries.
  bool causal;
  float scale;
  // Where sequences are packed in rows; queries and keys are as many then.
  std::vector<Span> spans = {};

  bool is_empty() const { return batch * heads * queries * dim == 0; }

  // Heads that share the keys and values of one: head h uses those of h / group().
  int64_t group() const { return heads / kv_heads; }

  // What is attended to by itself: spans, or batch entries.
  int64_t parts() const { return spans.empty() ? batch : static_cast<int64_t>(spans.size()); }
  Span part(int64_t index) const {
    return spans.empty() ? Span{index, 0, queries} : spans[index];
  }
  AttentionShape of(const Span& span) const {
    const bool whole = spans.empty();
    return {batch, heads, kv_heads, span.length, whole ? keys : span.length, dim, causal, scale};
  }

  // Keys that some query before `queries_end` sees.
  int64_t keys_before(int64_t queries_end) const {
    return causal ? std::min(keys, queries_end + keys - queries) : keys;
  }

  // For the block of queries and keys that starts at these.
  Visible visible(int64_t query, int64_t key) const {
    return causal ? Visible{query + keys - queries + 1 - key, 1} : Visible{keys, 0};
  }
};

// A tensor of [batch, heads, time, dim] in any order of the first three; rows are contiguous.
template <typename T>
struct Heads {
  T* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t time_stride;

  T* at(int64_t batch, int64_t head, int64_t time) const {
    return data + batch * batch_stride + head * head_stride + time * time_stride;
  }
};

// Of packed sequences a weight is dropped by the key's place in its sequence.
// lse: [batch, heads, queries], the logarithm of the sum of e^score of each row. `dropout` is null
// where no weight is dropped.
template <typename T>
void attention(const AttentionShape& shape, const Heads<const T>& query, const Heads<const T>& key,
               const Heads<const T>& value, const WeightDropout* dropout, const Heads<T>& out,
               float* lse);

template <typename T>
struct AttentionGradInputs {
  Heads<const T> query;
  Heads<const T> key;
  Heads<const T> value;
  Heads<const T> out;
  Heads<const T> out_grad;
  const float* lse;
};

template <typename T>
struct AttentionGradOutputs {
  Heads<T> query;
  Heads<T> key;
  Heads<T> value;
};

// Gradients of keys and values are sums over the heads that share them.
template <typename T>
void attention_grad(const AttentionShape& shape, const AttentionGradInputs<T>& in,
                    const WeightDropout* dropout, const AttentionGradOutputs<T>& out);

}  // namespace oneflow_accel
