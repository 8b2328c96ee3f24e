// Attention that is linear in the number of tokens, by positive random features (Choromanski et al.,
// "Rethinking Attention with Performers", 2021, section 2.3, without the factor of d^(1/4)), and its
// gradient. One head.
#pragma once

#include <cstdint>
#include <string>

namespace oneflow_accel {

// With phi(x) = e^(w x - |x|^2 / 2) / sqrt(features) for the rows w of (features, dim):
//   S = sum over t of phi(k_t) v_t^T,  z = sum over t of phi(k_t),
//   out_t = phi(q_t) S / (phi(q_t) z + epsilon).
// A row of kqv holds key, query and value; `value` is a copy of the last, and `summary` is (batch,
// features, dim + 1): S and z.
struct PerformerShape {
  int64_t batch;
  int64_t time;
  int64_t dim;
  int64_t features;
  float epsilon;

  int64_t summary() const { return features * (dim + 1); }
  std::string describe() const;
};

void performer(const PerformerShape& shape, const float* kqv, const float* w, float* out,
               float* value, float* summary);

struct PerformerGradInputs {
  const float* out_grad;
  const float* value_grad;
  const float* kqv;
  const float* w;
  const float* out;
  const float* summary;
};
void performer_grad(const PerformerShape& shape, const PerformerGradInputs& in, float* kqv_grad);

}  // namespace oneflow_accel
