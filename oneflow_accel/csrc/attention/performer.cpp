// oneflow_accel_performer and its gradient, float32 and bfloat16: attention that is linear in the
// number of tokens, by positive random features (Choromanski et al., "Rethinking Attention with
// Performers", 2021, section 2.3, without the factor of d^(1/4)), of one head.
//
// Key, query and value are the parts of one projection kqv, [batch, time, 3 x dim], in this order,
// and the matrix w of random features, [features, dim], is constant, in float32. With
// phi(x) = e^(w x - |x|^2 / 2) / sqrt(features) for the rows w of the matrix:
//   S = sum over t of phi(k_t) v_t^T,  z = sum over t of phi(k_t),
//   out_t = phi(q_t) S / (phi(q_t) z + epsilon).
// The value is an output too, because models add it to what they make of the attention, and so is
// `summary`, [batch, features, dim + 1], float32, S and z, which the gradient needs.
#include <cmath>

#include "attention/block_product.h"
#include "attention/rows.h"
#include "common/infer.h"
#include "common/oneflow.h"
#include "common/threads.h"

namespace oneflow_accel {

namespace performer {

using ::oneflow::Shape;

Maybe<void> infer(user_op::InferContext* ctx) {
  const Shape& kqv = ctx->InputShape("kqv", 0);
  const Shape& w = ctx->InputShape("w", 0);
  if (kqv.NumAxes() != 3 || w.NumAxes() != 2 || kqv.At(2) != 3 * w.At(1) || w.elem_cnt() == 0) {
    return Error::RuntimeError() << "a performer needs a projection of (batch, time, 3 x dim) and "
                                    "random features of (features, dim), not "
                                 << kqv.ToString() << " and " << w.ToString();
  }
  for (const char* name : {"out", "value"}) {
    describe_output(ctx, name, Shape({kqv.At(0), kqv.At(1), w.At(1)}));
  }
  describe_output(ctx, "summary", Shape({kqv.At(0), w.At(0), w.At(1) + 1}));
  return Maybe<void>::Ok();
}

Maybe<void> infer_types(user_op::InferContext* ctx) {
  if (ctx->InputDType("w", 0) != DataType::kFloat) {
    return Error::RuntimeError() << "a performer needs random features in float32";
  }
  for (const auto& [name, index] : ctx->outputs()) {
    ctx->SetOutputDType(name, index, ctx->InputDType(name == "summary" ? "w" : "kqv", 0));
  }
  return Maybe<void>::Ok();
}

// Batch entries do not know of each other.
const auto kSplit = split_first_axis("w");
const NewOperator g_operators[] = {
    new_operator("oneflow_accel_performer", "kqv w", "out value summary", infer, infer_types,
                 kSplit)
        .Attr<double>("epsilon"),
    new_operator("oneflow_accel_performer_grad", "out_grad value_grad kqv w out summary",
                 "kqv_grad", describe_gradients, infer_types, kSplit)
        .Attr<double>("epsilon")};

// Tokens that are worked on at a time: what belongs to them stays in the first two caches.
constexpr int64_t kTile = 64;

// Tokens that one thread sums over. Always the same, so that the order of sums does not depend on
// the number of threads.
constexpr int64_t kChunk = 512;

struct PerformerShape {
  int64_t batch;
  int64_t time;
  int64_t dim;
  int64_t features;
  float epsilon;

  explicit PerformerShape(Context* ctx)
      : epsilon(static_cast<float>(ctx->Attr<double>("epsilon"))) {
    const auto& kqv = shape_of(ctx, "kqv");
    const auto& w = shape_of(ctx, "w");
    batch = kqv.At(0);
    time = kqv.At(1);
    dim = w.At(1);
    features = w.At(0);
  }

  // Floats from one row to the next: of values and one more column, of features and of what a batch
  // entry is summed up to.
  int64_t width() const { return padded(dim + 1); }
  int64_t stride() const { return padded(features); }
  int64_t summary() const { return features * (dim + 1); }
  int64_t chunks() const { return ceil_div(time, kChunk); }

  std::string describe() const {
    return "performer of " + std::to_string(batch) + " x " + std::to_string(time) + " tokens of "
           + std::to_string(dim) + " values, " + std::to_string(features) + " random features";
  }
};

// What one thread works with.
struct Performer {
  const PerformerShape& s;
  // w in both roles of a product.
  Panels w_transposed;
  Panels w_panels;
  // Of a batch entry: S or dS, z or dz, and the two side by side, transposed.
  int64_t entry = -1;
  Panels panels;
  float* column;
  Panels transposed;
  // Of a tile. Values have a factor of their row of phi behind them, 1 for keys.
  float* x;
  float* phi;
  float* phi_grads;
  float* values;
  float* space;
  float* row_sums;
  // Of a chunk: what it adds to a summary.
  float* sums;

  Performer(const PerformerShape& shape, const float* w) : s(shape) {
    Carver::carve([&](Carver* carver) {
      w_transposed = carver->take_panels(s.dim, s.stride());
      w_panels = carver->take_panels(s.features, padded(s.dim));
      panels = carver->take_panels(s.features, padded(s.dim));
      column = carver->take(s.features);
      transposed = carver->take_panels(s.dim + 1, s.stride());
      x = carver->take(kTile * s.dim);
      phi = carver->take(kTile * s.stride());
      phi_grads = carver->take(kTile * s.stride());
      values = carver->take(kTile * s.width());
      space = carver->take(kTile * s.width());
      row_sums = carver->take(kTile);
      sums = carver->take(s.features * s.width());
    });
    pack_transposed(w, s.dim, s.features, w_transposed);
    pack(w, s.dim, s.dim, w_panels);
  }

  // Reads the summary, or its gradient, of a batch entry.
  void load(int64_t of_entry, const float* summaries) {
    if (entry == of_entry) { return; }
    entry = of_entry;
    const float* summary = summaries + entry * s.summary();
    pack(summary, s.dim + 1, s.dim, panels);
    pack_transposed(summary, s.dim + 1, s.features, transposed);
    for (int64_t j = 0; j < s.features; ++j) { column[j] = summary[j * (s.dim + 1) + s.dim]; }
  }

  // Sets x and phi of a tile's keys or queries.
  template <typename T>
  void set_phi(const T* of_kqv, int64_t rows) {
    copy_rows(of_kqv, 3 * s.dim, rows, s.dim, 1.0F, x, s.dim);
    block_product(rows, s.stride(), s.dim, {x, s.dim, 1}, w_transposed, 0, 0, phi, s.stride(),
                  false);
    const float scale = 1.0F / std::sqrt(static_cast<float>(s.features));
    for (int64_t i = 0; i < rows; ++i) {
      const float half = 0.5F * dot(x + i * s.dim, x + i * s.dim, s.dim);
      float* to = phi + i * s.stride();
#pragma omp simd
      for (int64_t j = 0; j < s.features; ++j) { to[j] = simd::exp(to[j] - half) * scale; }
      for (int64_t j = s.features; j < s.stride(); ++j) { to[j] = 0.0F; }
    }
  }

  // The same of its keys, and its values.
  template <typename T>
  void set_keys(const T* of_kqv, int64_t rows) {
    set_phi(of_kqv, rows);
    copy_rows(of_kqv + 2 * s.dim, 3 * s.dim, rows, s.dim, 1.0F, values, s.width());
    for (int64_t i = 0; i < rows; ++i) { values[i * s.width() + s.dim] = 1.0F; }
  }

  // space = phi S, of a tile's keys or queries.
  void multiply_phi(int64_t rows) {
    block_product(rows, s.dim, s.features, {phi, s.stride(), 1}, panels, 0, 0, space, s.width(),
                  false);
  }

  // The gradient of a tile's keys or queries, (dphi phi) w - sum(dphi phi) x with dphi being the
  // products of values and their factors with the summary.
  template <typename T>
  void grad_by_x(int64_t rows, T* of_kqv_grad) {
    block_product(rows, s.stride(), s.dim + 1, {values, s.width(), 1}, transposed, 0, 0, phi_grads,
                  s.stride(), false);
    for (int64_t i = 0; i < rows; ++i) {
      const float* feature = phi + i * s.stride();
      float* grad = phi_grads + i * s.stride();
      float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < s.features; ++j) {
        grad[j] *= feature[j];
        sum += grad[j];
      }
      row_sums[i] = sum;
    }
    block_product(rows, s.dim, s.features, {phi_grads, s.stride(), 1}, w_panels, 0, 0, space,
                  s.width(), false);
    for (int64_t i = 0; i < rows; ++i) {
      const float* product = space + i * s.width();
      const float* row = x + i * s.dim;
      T* to = of_kqv_grad + i * 3 * s.dim;
      const float sum = row_sums[i];
#pragma omp simd
      for (int64_t d = 0; d < s.dim; ++d) { to[d] = from_float<T>(product[d] - sum * row[d]); }
    }
  }

  // sums += phi^T values, with the factors' column.
  void add_to_sums(int64_t rows) {
    const Panels right{space, rows, s.width()};
    pack(values, s.width(), s.dim + 1, right);
    block_product(s.features, s.width(), rows, {phi, 1, s.stride()}, right, 0, 0, sums, s.width(),
                  true);
  }
};

// Calls fn(performer, token, rows) for all tiles, in parallel by chunks; tokens are counted through
// the batch. What it needs of `summary`, if that is not null, is loaded, and what it adds to the
// sums of each chunk goes to `parts`, if that is not null.
template <typename Fn>
void for_tiles(const PerformerShape& s, const float* w, const float* summary, float* parts,
               const Fn& fn) {
  parallel_for(s.batch * s.chunks(), 1, [&](int64_t first, int64_t last) {
    Performer p(s, w);
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t entry = chunk / s.chunks();
      if (summary != nullptr) { p.load(entry, summary); }
      if (parts != nullptr) { std::fill_n(p.sums, s.features * s.width(), 0.0F); }
      const int64_t begin = chunk % s.chunks() * kChunk;
      const int64_t end = std::min(s.time, begin + kChunk);
      for (int64_t row = begin; row < end; row += kTile) {
        fn(&p, entry * s.time + row, std::min(kTile, end - row));
      }
      if (parts != nullptr) {
        copy_rows(p.sums, s.width(), s.features, s.dim + 1, 1.0F, parts + chunk * s.summary(),
                  s.dim + 1);
      }
    }
  });
}

// Sets `sums`, or the scratch memory that it returns where that is null, to the sums of what
// add(performer, token, rows) adds to the sums of each chunk, in their order.
template <typename Add>
const float* summarize(const PerformerShape& s, const float* w, const float* summary, float* sums,
                       const Add& add) {
  const int64_t chunks = s.batch * s.chunks();
  auto* parts = scratch<float>(ScratchSlot::kReduction, (chunks + s.batch) * s.summary());
  for_tiles(s, w, summary, parts, add);
  if (sums == nullptr) { sums = parts + chunks * s.summary(); }
  std::fill_n(sums, s.batch * s.summary(), 0.0F);
  for (int64_t i = 0; i < chunks; ++i) {
    float* to = sums + i / s.chunks() * s.summary();
    const float* from = parts + i * s.summary();
#pragma omp simd
    for (int64_t j = 0; j < s.summary(); ++j) { to[j] += from[j]; }
  }
  return sums;
}

template <typename T>
void performer_kernel(Context* ctx) {
  const PerformerShape s(ctx);
  const T* kqv = input<T>(ctx, "kqv");
  const float* w = input(ctx, "w");
  T* out = output<T>(ctx, "out");
  T* value = output<T>(ctx, "value");
  const auto add_keys = [&](Performer* p, int64_t token, int64_t rows) {
    p->set_keys(kqv + token * 3 * s.dim, rows);
    p->add_to_sums(rows);
  };
  const auto queries = [&](Performer* p, int64_t token, int64_t rows) {
    const T* tile = kqv + token * 3 * s.dim;
    p->set_phi(tile + s.dim, rows);
    p->multiply_phi(rows);
    for (int64_t i = 0; i < rows; ++i) {
      const float total = dot(p->phi + i * s.stride(), p->column, s.features);
      copy_row(p->space + i * s.width(), s.dim, 1.0F / (total + s.epsilon),
               out + (token + i) * s.dim);
    }
    copy_rows(tile + 2 * s.dim, 3 * s.dim, rows, s.dim, 1.0F, value + token * s.dim, s.dim);
  };
  run_or_throw([&] { return s.describe(); },
               [&] {
                 for_tiles(s, w, summarize(s, w, nullptr, output(ctx, "summary"), add_keys),
                           nullptr, queries);
               });
}

// With n_t = dout_t / (phi(q_t) z + epsilon) and d_t = -n_t . out_t:
//   dphi(q_t) = n_t S^T + d_t z,  dS = sum of phi(q_t) n_t^T,  dz = sum of d_t phi(q_t),
//   dphi(k_t) = v_t dS^T + dz,  dv_t = phi(k_t) dS + dvalue_t.
template <typename T>
void performer_grad_kernel(Context* ctx) {
  const PerformerShape s(ctx);
  const T* kqv = input<T>(ctx, "kqv");
  const float* w = input(ctx, "w");
  const T* out = input<T>(ctx, "out");
  const T* out_grad = input<T>(ctx, "out_grad");
  const T* value_grad = input<T>(ctx, "value_grad");
  T* kqv_grad = output<T>(ctx, "kqv_grad");
  const auto add_queries = [&](Performer* p, int64_t token, int64_t rows) {
    const int64_t queries = token * 3 * s.dim + s.dim;
    p->set_phi(kqv + queries, rows);
    for (int64_t i = 0; i < rows; ++i) {
      const T* token_grad = out_grad + (token + i) * s.dim;
      const float total = dot(p->phi + i * s.stride(), p->column, s.features) + s.epsilon;
      float* n = p->values + i * s.width();
      copy_row(token_grad, s.dim, 1.0F / total, n);
      n[s.dim] = -dot(token_grad, out + (token + i) * s.dim, s.dim) / total;
    }
    p->add_to_sums(rows);
    p->grad_by_x(rows, kqv_grad + queries);
  };
  const auto keys_and_values = [&](Performer* p, int64_t token, int64_t rows) {
    T* key_grads = kqv_grad + token * 3 * s.dim;
    p->set_keys(kqv + token * 3 * s.dim, rows);
    p->multiply_phi(rows);
    for (int64_t i = 0; i < rows; ++i) {
      const float* of_sums = p->space + i * s.width();
      const T* of_value = value_grad + (token + i) * s.dim;
      T* to = key_grads + i * 3 * s.dim + 2 * s.dim;
#pragma omp simd
      for (int64_t d = 0; d < s.dim; ++d) {
        to[d] = from_float<T>(of_sums[d] + to_float(of_value[d]));
      }
    }
    p->grad_by_x(rows, key_grads);
  };
  run_or_throw([&] { return "gradient of a " + s.describe(); },
               [&] {
                 const float* summary_grad =
                     summarize(s, w, input(ctx, "summary"), nullptr, add_queries);
                 for_tiles(s, w, summary_grad, nullptr, keys_and_values);
               });
}

REGISTER_KERNELS(performer_kernel, "oneflow_accel_performer", "out");
REGISTER_KERNELS(performer_grad_kernel, "oneflow_accel_performer_grad", "kqv_grad");

}  // namespace performer

}  // namespace oneflow_accel
