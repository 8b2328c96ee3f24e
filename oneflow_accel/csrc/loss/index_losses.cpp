// OneFlow's losses of rows against class indices, float32, and their gradients:
//   nll, the second half of F.cross_entropy, after log_softmax, also bfloat16;
//   sparse_cross_entropy, -log(prediction[label]);
//   sparse_softmax_cross_entropy, whose `prob` holds log(softmax(prediction)), as in OneFlow's own.
// ..._ms are for classes split over processes. sparse_softmax_cross_entropy_ms is replaced by small
// operators before it would run; what of it remains is sparse_softmax_cross_entropy_ms_grad, whose
// `prob` is the softmax, and sparse_cross_entropy_ms.
#include <algorithm>
#include <cmath>

#include "common/oneflow.h"
#include "loss/labels.h"
#include "softmax/row.h"
#include "softmax/row_set.h"

namespace oneflow_accel {

namespace {

using Function = void (*)(Context* ctx, const RowSet& rows, const Labels& labels);

// Kernels of rows of which each process may hold some of the classes: those of the argument
// `classes`. nll, whose labels are a `target`, says which of them does not count.
template <typename T = float>
bool index_loss(const char* ops, Function function, const char* classes,
                const char* label = "label") {
  const auto compute = [=](Context* ctx, const KernelCache* range) {
    std::optional<int64_t> ignored;
    if (ctx->has_input("target", 0)) { ignored = ctx->Attr<int64_t>("ignore_index"); }
    const RowSet rows(ctx, classes);
    function(ctx, rows, Labels(ctx, label, rows.n, range, ignored));
  };
  const auto class_range = [=](user_op::KernelCacheContext* ctx) {
    return local_ranges(ctx, classes, {-1});
  };
  return register_kernels(ops, kernel(compute, class_range),
                          is_on_cpu(classes, kDataType<T>) && is_label(label),
                          in_place("prediction_diff", "prob"));
}

// loss[row] = of_label(row, index of the row's label), 0 where its label is not here.
template <typename T, typename OfLabel>
void losses_of(const RowSet& rows, const Labels& labels, T* loss, const OfLabel& of_label) {
  for_each_block(rows.count, 8, [&](int64_t row) {
    const int64_t place = labels.place(row);
    loss[row] = from_float<T>(place < 0 ? 0.0F : of_label(row, row * rows.n + place));
  });
}

// grad = 0 but at the rows' labels, where it is of_label(row, index).
template <typename T, typename OfLabel>
void grads_of(const RowSet& rows, const Labels& labels, T* grad, const OfLabel& of_label) {
  rows.for_each(1, [&](int64_t row, int64_t first) {
    std::fill_n(grad + first, rows.n, T{});
    const int64_t place = labels.place(row);
    if (place >= 0) { grad[first + place] = from_float<T>(of_label(row, first + place)); }
  });
}

template <typename T>
float weight_of(const T* weight, int64_t label) {
  return weight == nullptr ? 1.0F : to_float(weight[label]);
}

template <typename T>
void nll(Context* ctx, const RowSet& rows, const Labels& labels) {
  const T* x = input<T>(ctx, "input");
  const T* weight = input_or_null<T>(ctx, "weight");
  losses_of(rows, labels, output<T>(ctx, "out_weight"),
            [=](int64_t, int64_t at) { return weight_of(weight, at % rows.n); });
  losses_of(rows, labels, output<T>(ctx, "output"), [=](int64_t, int64_t at) {
    return -to_float(x[at]) * weight_of(weight, at % rows.n);
  });
}

template <typename T>
void nll_grad(Context* ctx, const RowSet& rows, const Labels& labels) {
  const T* dy = input<T>(ctx, "out_grad");
  const T* weight = input_or_null<T>(ctx, "weight");
  grads_of(rows, labels, output<T>(ctx, "in_grad"), [=](int64_t row, int64_t at) {
    return -to_float(dy[row]) * weight_of(weight, at % rows.n);
  });
}

// Probabilities below 1e-20 count as this much, as in OneFlow's own kernels. Not std::max: NaN
// stays.
float at_least_smallest(float prob) { return prob < 1e-20F ? 1e-20F : prob; }

void sparse(Context* ctx, const RowSet& rows, const Labels& labels) {
  const float* prob = input(ctx, "prediction");
  losses_of(rows, labels, output(ctx, "out"),
            [=](int64_t, int64_t at) { return -std::log(at_least_smallest(prob[at])); });
}

void sparse_grad(Context* ctx, const RowSet& rows, const Labels& labels) {
  const float* prob = input(ctx, "prediction");
  const float* dy = input(ctx, "dy");
  grads_of(rows, labels, output(ctx, "prediction_diff"),
           [=](int64_t row, int64_t at) { return -dy[row] / at_least_smallest(prob[at]); });
}

void sparse_softmax(Context* ctx, const RowSet& rows, const Labels& labels) {
  const float* x = input(ctx, "prediction");
  float* prob = output(ctx, "prob");
  float* out = output(ctx, "out");
  rows.for_each(1, [&](int64_t row, int64_t first) {
    const int64_t target = labels.checked(row);
    row::log_softmax(x + first, prob + first, rows.n);
    out[row] = -prob[first + target];
  });
}

// The gradients dy * probability(y), less dy at the labels that are here: at_label(dy, y) there.
template <typename Probability, typename AtLabel>
void softmax_grads_of(Context* ctx, const RowSet& rows, const Labels& labels,
                      const Probability& probability, const AtLabel& at_label) {
  const float* prob = input(ctx, "prob");
  const float* dy = input(ctx, "dy");
  float* grad = output(ctx, "prediction_diff");
  rows.for_each(1, [&](int64_t row, int64_t first) {
    const float factor = dy[row];
    const int64_t place = labels.place(row);
    const float* y = prob + first;
    float* dx = grad + first;  // may be y
    const float at_place = place < 0 ? 0.0F : at_label(factor, y[place]);
#pragma omp simd
    for (int64_t i = 0; i < rows.n; ++i) { dx[i] = factor * probability(y[i]); }
    if (place >= 0) { dx[place] = at_place; }
  });
}

void sparse_softmax_grad(Context* ctx, const RowSet& rows, const Labels& labels) {
  softmax_grads_of(
      ctx, rows, labels, [](float y) { return row::exp_of_nonpositive(y); },
      [](float factor, float y) { return factor * std::expm1(y); });
}

void sparse_softmax_ms_grad(Context* ctx, const RowSet& rows, const Labels& labels) {
  softmax_grads_of(
      ctx, rows, labels, [](float y) { return y; },
      [](float factor, float y) { return factor * y - factor; });
}

const bool g_index_losses[] = {
    index_loss("nll", nll<float>, "input", "target"),
    index_loss<Bfloat16>("nll", nll<Bfloat16>, "input", "target"),
    index_loss("nll_grad", nll_grad<float>, "input", "target"),
    index_loss<Bfloat16>("nll_grad", nll_grad<Bfloat16>, "input", "target"),
    index_loss("sparse_cross_entropy sparse_cross_entropy_ms", sparse, "prediction"),
    index_loss("sparse_cross_entropy_grad sparse_cross_entropy_ms_grad", sparse_grad, "prediction"),
    index_loss("sparse_softmax_cross_entropy", sparse_softmax, "prediction"),
    index_loss("sparse_softmax_cross_entropy_grad", sparse_softmax_grad, "prob"),
    index_loss("sparse_softmax_cross_entropy_ms_grad", sparse_softmax_ms_grad, "prob")};

}  // namespace

}  // namespace oneflow_accel
