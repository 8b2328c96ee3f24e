#include "attention/performer_rows.h"

#include <cmath>

#include "common/simd_math.h"

namespace oneflow_accel {

namespace {

// features[i, j] = e^(features[i, j] - |x_i|^2 / 2) scale for j < columns, 0 up to `stride`.
void exponentials(const float* x, int64_t x_stride, int64_t dim, float scale, int64_t rows,
                  int64_t columns, int64_t stride, float* features) {
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = x + i * x_stride;
    float squares = 0.0F;
#pragma omp simd reduction(+ : squares)
    for (int64_t d = 0; d < dim; ++d) { squares += row[d] * row[d]; }
    const float half = 0.5F * squares;
    float* to = features + i * stride;
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) { to[j] = simd::exp(to[j] - half) * scale; }
    for (int64_t j = columns; j < stride; ++j) { to[j] = 0.0F; }
  }
}

// column[j] += sum over i of factors[i] features[i, j].
void add_rows(const float* features, int64_t stride, const float* factors, int64_t rows,
              int64_t columns, float* column) {
  for (int64_t i = 0; i < rows; ++i) {
    const float factor = factors == nullptr ? 1.0F : factors[i];
    const float* row = features + i * stride;
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) { column[j] += factor * row[j]; }
  }
}

// grads[i, j] = (grads[i, j] + factors[i] column[j]) features[i, j], and the sums of its rows.
void through_exponentials(const float* features, const float* factors, const float* column,
                          int64_t rows, int64_t columns, int64_t stride, float* grads,
                          float* sums) {
  for (int64_t i = 0; i < rows; ++i) {
    const float factor = factors == nullptr ? 1.0F : factors[i];
    const float* feature = features + i * stride;
    float* grad = grads + i * stride;
    float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < columns; ++j) {
      grad[j] = (grad[j] + factor * column[j]) * feature[j];
      sum += grad[j];
    }
    sums[i] = sum;
  }
}

// x_grad[i, d] = products[i, d] - sums[i] x[i, d].
void less_squares(const float* products, int64_t products_stride, const float* sums,
                  const float* x, int64_t stride, int64_t rows, int64_t dim, float* x_grad) {
  for (int64_t i = 0; i < rows; ++i) {
    const float* product = products + i * products_stride;
    const float* row = x + i * stride;
    float* to = x_grad + i * stride;
    const float sum = sums[i];
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) { to[d] = product[d] - sum * row[d]; }
  }
}

// to[i] += from[i].
void add(const float* from, int64_t n, float* to) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { to[i] += from[i]; }
}

}  // namespace

std::string PerformerShape::describe() const {
  return "performer of " + std::to_string(batch) + " x " + std::to_string(time) + " tokens of "
         + std::to_string(dim) + " values, " + std::to_string(features) + " random features";
}

void add_performer_chunks(const PerformerShape& s, const float* parts, float* sums) {
  const int64_t chunks = performer_chunks(s);
  for (int64_t entry = 0; entry < s.batch; ++entry) {
    float* to = sums + entry * s.summary();
    std::fill_n(to, s.summary(), 0.0F);
    for (int64_t part = 0; part < chunks; ++part) {
      add(parts + (entry * chunks + part) * s.summary(), s.summary(), to);
    }
  }
}

void add_to_summary(const PerformerShape& s, const float* features, int64_t rows, const float* x,
                    const float* factors, float* space, float* sums, float* column) {
  const int64_t width = padded(s.dim);
  const int64_t stride = padded(s.features);
  const Panels right{space, rows, width};
  pack(x, width, width, right);
  block_product(s.features, width, rows, {features, 1, stride}, right, 0, 0, sums, width, true);
  add_rows(features, stride, factors, rows, s.features, column);
}

PerformerFeatures::PerformerFeatures(const PerformerShape& shape, const float* w, Carver* carver)
    : shape_(shape),
      transposed_{nullptr, shape.dim, padded(shape.features)},
      panels_{nullptr, shape.features, padded(shape.dim)} {
  transposed_.data = carver->take(transposed_.size());
  panels_.data = carver->take(panels_.size());
  pack_transposed(w, shape.dim, shape.features, transposed_);
  pack(w, shape.dim, shape.dim, panels_);
}

void PerformerFeatures::compute(const float* x, int64_t stride, int64_t rows,
                                float* features) const {
  const int64_t width = transposed_.columns;
  block_product(rows, width, shape_.dim, {x, stride, 1}, transposed_, 0, 0, features, width, false);
  const float scale = 1.0F / std::sqrt(static_cast<float>(shape_.features));
  exponentials(x, stride, shape_.dim, scale, rows, shape_.features, width, features);
}

void PerformerFeatures::grad(const float* x, int64_t stride, int64_t rows, const float* features,
                             const float* factors, const float* column, float* feature_grads,
                             float* space, float* x_grad) const {
  const int64_t width = transposed_.columns;
  float* sums = space;
  float* products = space + kPerformerRows;
  through_exponentials(features, factors, column, rows, shape_.features, width, feature_grads,
                       sums);
  block_product(rows, panels_.columns, shape_.features, {feature_grads, width, 1}, panels_, 0, 0,
                products, panels_.columns, false);
  less_squares(products, panels_.columns, sums, x, stride, rows, shape_.dim, x_grad);
}

}  // namespace oneflow_accel
