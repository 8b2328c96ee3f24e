#include "attention/performer_rows.h"

namespace oneflow_accel {

namespace {

// With n_t = dout_t / (phi(q_t) z + epsilon) and d_t = -n_t . out_t:
//   dphi(q_t) = n_t S^T + d_t z,  dS = sum of phi(q_t) n_t^T,  dz = sum of d_t phi(q_t),
//   dphi(k_t) = v_t dS^T + dz,  dv_t = phi(k_t) dS + dvalue_t,
// and dx = (dphi phi) w - sum(dphi phi) x of either.
struct PerformerGradWorkspace {
  const PerformerShape& shape;
  Carver carver;
  PerformerFeatures features;
  // Of one batch entry: S or dS in both roles of a product, and z or dz.
  Panels panels;
  Panels transposed;
  float* column;
  int64_t entry = -1;
  // Of a tile.
  float* phi;
  float* phi_grads;
  float* rows;
  float* space;
  float* factors;
  // Of a chunk: dS and dz.
  float* sums;
  float* sums_column;

  static int64_t floats(const PerformerShape& s) {
    const int64_t width = padded(s.dim), stride = padded(s.features);
    return PerformerFeatures::space(s) + 2 * s.features * width + s.dim * stride + 2 * stride
           + kPerformerRows * (2 * stride + 2 * width + 2) + 10 * kVectorWidth;
  }
  PerformerGradWorkspace(const PerformerShape& s, const float* w)
      : shape(s), carver(floats(s)), features(s, w, &carver) {
    panels = {nullptr, s.features, padded(s.dim)};
    transposed = {nullptr, s.dim, padded(s.features)};
    panels.data = carver.take(panels.size());
    transposed.data = carver.take(transposed.size());
    column = carver.take(padded(s.features));
    phi = carver.take(kPerformerRows * padded(s.features));
    phi_grads = carver.take(kPerformerRows * padded(s.features));
    rows = carver.take(kPerformerRows * padded(s.dim));
    space = carver.take(kPerformerRows * (padded(s.dim) + 1));
    factors = carver.take(kPerformerRows);
    sums = carver.take(s.features * padded(s.dim));
    sums_column = carver.take(padded(s.features));
  }

  int64_t width() const { return padded(shape.dim); }
  int64_t stride() const { return padded(shape.features); }

  // Reads the summary, or its gradient, of a batch entry.
  void load(int64_t of_entry, const float* summaries) {
    if (entry == of_entry) { return; }
    entry = of_entry;
    const float* summary = summaries + entry * shape.summary();
    const int64_t row = shape.dim + 1;
    pack(summary, row, shape.dim, panels);
    pack_transposed(summary, row, shape.features, transposed);
    for (int64_t j = 0; j < shape.features; ++j) { column[j] = summary[j * row + shape.dim]; }
  }
};

// out = a + b.
void add_rows(const float* a, const float* b, int64_t n, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { out[i] = a[i] + b[i]; }
}

void query_grads(const PerformerChunk& chunk, const PerformerGradInputs& in, PerformerGradWorkspace* workspace,
                 float* summary_grad, float* kqv_grad) {
  PerformerGradWorkspace& w = *workspace;
  const PerformerShape& s = w.shape;
  w.load(chunk.entry, in.summary);
  std::fill_n(w.sums, s.features * w.width(), 0.0F);
  std::fill_n(w.sums_column, s.features, 0.0F);
  std::fill_n(w.rows, kPerformerRows * w.width(), 0.0F);
  for_performer_tiles(chunk, [&](int64_t row, int64_t rows) {
    const int64_t token = chunk.entry * s.time + row;
    const float* query = in.kqv + token * 3 * s.dim + s.dim;
    w.features.compute(query, 3 * s.dim, rows, w.phi);
    for (int64_t i = 0; i < rows; ++i) {
      const float* out_grad = in.out_grad + (token + i) * s.dim;
      const float total = dot(w.phi + i * w.stride(), w.column, s.features) + s.epsilon;
      store_scaled(out_grad, s.dim, 1.0F / total, w.rows + i * w.width());
      w.factors[i] = -dot(out_grad, in.out + (token + i) * s.dim, s.dim) / total;
    }
    block_product(rows, w.stride(), s.dim, {w.rows, w.width(), 1}, w.transposed, 0, 0, w.phi_grads,
                  w.stride(), false);
    add_to_summary(s, w.phi, rows, w.rows, w.factors, w.space, w.sums, w.sums_column);
    w.features.grad(query, 3 * s.dim, rows, w.phi, w.factors, w.column, w.phi_grads, w.space,
                    kqv_grad + token * 3 * s.dim + s.dim);
  });
  for (int64_t j = 0; j < s.features; ++j) {
    float* to = summary_grad + j * (s.dim + 1);
    std::copy_n(w.sums + j * w.width(), s.dim, to);
    to[s.dim] = w.sums_column[j];
  }
}

void key_and_value_grads(const PerformerChunk& chunk, const PerformerGradInputs& in,
                         const float* summary_grads, PerformerGradWorkspace* workspace, float* kqv_grad) {
  PerformerGradWorkspace& w = *workspace;
  const PerformerShape& s = w.shape;
  w.load(chunk.entry, summary_grads);
  for_performer_tiles(chunk, [&](int64_t row, int64_t rows) {
    const int64_t token = chunk.entry * s.time + row;
    const float* key = in.kqv + token * 3 * s.dim;
    float* key_grad = kqv_grad + token * 3 * s.dim;
    w.features.compute(key, 3 * s.dim, rows, w.phi);
    block_product(rows, w.width(), s.features, {w.phi, w.stride(), 1}, w.panels, 0, 0, w.rows,
                  w.width(), false);
    for (int64_t i = 0; i < rows; ++i) {
      add_rows(w.rows + i * w.width(), in.value_grad + (token + i) * s.dim, s.dim,
               key_grad + i * 3 * s.dim + 2 * s.dim);
    }
    block_product(rows, w.stride(), s.dim, {key + 2 * s.dim, 3 * s.dim, 1}, w.transposed, 0, 0,
                  w.phi_grads, w.stride(), false);
    w.features.grad(key, 3 * s.dim, rows, w.phi, nullptr, w.column, w.phi_grads, w.space, key_grad);
  });
}

}  // namespace

void performer_grad(const PerformerShape& s, const PerformerGradInputs& in, float* kqv_grad) {
  const int64_t chunks = s.batch * performer_chunks(s);
  auto* parts = static_cast<float*>(scratch(
      ScratchSlot::kReduction, (chunks + s.batch) * s.summary() * sizeof(float)));
  float* summary_grads = parts + chunks * s.summary();
  for_performer_chunks(s, [&](int64_t first, int64_t last) {
    PerformerGradWorkspace w(s, in.w);
    for (int64_t i = first; i < last; ++i) {
      query_grads(performer_chunk(s, i), in, &w, parts + i * s.summary(), kqv_grad);
    }
  });
  add_performer_chunks(s, parts, summary_grads);
  for_performer_chunks(s, [&](int64_t first, int64_t last) {
    PerformerGradWorkspace w(s, in.w);
    for (int64_t i = first; i < last; ++i) {
      key_and_value_grads(performer_chunk(s, i), in, summary_grads, &w, kqv_grad);
    }
  });
}

}  // namespace oneflow_accel
