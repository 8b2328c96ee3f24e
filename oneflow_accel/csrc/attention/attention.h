// Scaled dot-product attention, softmax(scale Q K^T) V for every batch entry and head, and its
// gradient. Neither keeps a matrix of queries x keys: both work through blocks of it, the gradient
// from the logarithms of the softmax's sums that the forward leaves.
//
// Formulas: Rabe and Staats, "Self-attention does not need O(n^2) memory" (2021); Dao, Fu, Ermon,
// Rudra and Re, "FlashAttention" (2022); heads that share keys and values: Ainslie, Lee-Thorp, de
// Jong, Zemlyanskiy, Lebron and Sanghai, "GQA" (2023).
#pragma once

#include <cstdint>

#include "attention/rows.h"
#include "attention/weight_dropout.h"

namespace oneflow_accel {

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

  bool is_empty() const { return batch * heads * queries * dim == 0; }

  // Heads that share the keys and values of one: head h uses those of h / group().
  int64_t group() const { return heads / kv_heads; }

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

// lse: [batch, heads, queries], the logarithm of the sum of e^score of each row. `dropout` is null
// where no weight is dropped.
template <typename T>
void attention(const AttentionShape& shape, const Heads<const T>& query, const Heads<const T>& key,
               const Heads<const T>& value, const WeightDropout* dropout, const Heads<T>& out,
               float* lse);

struct AttentionGradInputs {
  Heads<const float> query;
  Heads<const float> key;
  Heads<const float> value;
  Heads<const float> out;
  Heads<const float> out_grad;
  const float* lse;
};

struct AttentionGradOutputs {
  Heads<float> query;
  Heads<float> key;
  Heads<float> value;
};

// Gradients of keys and values are sums over the heads that share them.
void attention_grad(const AttentionShape& shape, const AttentionGradInputs& in,
                    const WeightDropout* dropout, const AttentionGradOutputs& out);

}  // namespace oneflow_accel
