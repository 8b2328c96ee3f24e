#include "attention/performer.h"

#include "attention/performer_rows.h"

namespace oneflow_accel {

namespace {

// S and z of one chunk of keys and values.
struct Summarizer {
  const PerformerShape& shape;
  Carver carver;
  PerformerFeatures features;
  float* keys;
  float* values;
  float* space;
  float* sums;
  float* column;

  static int64_t floats(const PerformerShape& s) {
    return PerformerFeatures::space(s) + kPerformerRows * (padded(s.features) + 2 * padded(s.dim))
           + s.features * padded(s.dim) + padded(s.features) + 6 * kVectorWidth;
  }
  Summarizer(const PerformerShape& s, const float* w)
      : shape(s), carver(floats(s)), features(s, w, &carver) {
    keys = carver.take(kPerformerRows * padded(s.features));
    values = carver.take(kPerformerRows * padded(s.dim));
    space = carver.take(kPerformerRows * padded(s.dim));
    sums = carver.take(s.features * padded(s.dim));
    column = carver.take(padded(s.features));
  }

  void run(const PerformerChunk& chunk, const float* kqv, float* summary) {
    const int64_t stride = 3 * shape.dim;
    const int64_t width = padded(shape.dim);
    std::fill_n(sums, shape.features * width, 0.0F);
    std::fill_n(column, shape.features, 0.0F);
    std::fill_n(values, kPerformerRows * width, 0.0F);
    for_performer_tiles(chunk, [&](int64_t row, int64_t rows) {
      const float* key = kqv + (chunk.entry * shape.time + row) * stride;
      features.compute(key, stride, rows, keys);
      for (int64_t i = 0; i < rows; ++i) {
        std::copy_n(key + i * stride + 2 * shape.dim, shape.dim, values + i * width);
      }
      add_to_summary(shape, keys, rows, values, nullptr, space, sums, column);
    });
    for (int64_t j = 0; j < shape.features; ++j) {
      float* to = summary + j * (shape.dim + 1);
      std::copy_n(sums + j * width, shape.dim, to);
      to[shape.dim] = column[j];
    }
  }
};

// The outputs of one chunk of queries.
struct Reader {
  const PerformerShape& shape;
  Carver carver;
  PerformerFeatures features;
  Panels panels;
  float* queries;
  float* out;
  float* column;
  int64_t entry = -1;

  static int64_t floats(const PerformerShape& s) {
    return PerformerFeatures::space(s) + kPerformerRows * (padded(s.features) + padded(s.dim))
           + s.features * padded(s.dim) + padded(s.features) + 5 * kVectorWidth;
  }
  Reader(const PerformerShape& s, const float* w)
      : shape(s), carver(floats(s)), features(s, w, &carver) {
    panels = {nullptr, s.features, padded(s.dim)};
    panels.data = carver.take(panels.size());
    queries = carver.take(kPerformerRows * padded(s.features));
    out = carver.take(kPerformerRows * padded(s.dim));
    column = carver.take(padded(s.features));
  }

  void run(const PerformerChunk& chunk, const float* kqv, const float* summary, float* result,
           float* value) {
    const int64_t stride = 3 * shape.dim;
    const int64_t width = padded(shape.dim);
    const int64_t features_stride = padded(shape.features);
    if (entry != chunk.entry) {
      entry = chunk.entry;
      const float* of_entry = summary + entry * shape.summary();
      pack(of_entry, shape.dim + 1, shape.dim, panels);
      for (int64_t j = 0; j < shape.features; ++j) {
        column[j] = of_entry[j * (shape.dim + 1) + shape.dim];
      }
    }
    for_performer_tiles(chunk, [&](int64_t row, int64_t rows) {
      const int64_t token = chunk.entry * shape.time + row;
      features.compute(kqv + token * stride + shape.dim, stride, rows, queries);
      block_product(rows, width, shape.features, {queries, features_stride, 1}, panels, 0, 0, out,
                    width, false);
      for (int64_t i = 0; i < rows; ++i) {
        const float total = dot(queries + i * features_stride, column, shape.features);
        store_scaled(out + i * width, shape.dim, 1.0F / (total + shape.epsilon),
                     result + (token + i) * shape.dim);
        std::copy_n(kqv + (token + i) * stride + 2 * shape.dim, shape.dim,
                    value + (token + i) * shape.dim);
      }
    });
  }
};

}  // namespace

void performer(const PerformerShape& s, const float* kqv, const float* w, float* out, float* value,
               float* summary) {
  const int64_t chunks = s.batch * performer_chunks(s);
  auto* parts = static_cast<float*>(
      scratch(ScratchSlot::kReduction, chunks * s.summary() * sizeof(float)));
  for_performer_chunks(s, [&](int64_t first, int64_t last) {
    Summarizer summarizer(s, w);
    for (int64_t i = first; i < last; ++i) {
      summarizer.run(performer_chunk(s, i), kqv, parts + i * s.summary());
    }
  });
  add_performer_chunks(s, parts, summary);
  for_performer_chunks(s, [&](int64_t first, int64_t last) {
    Reader reader(s, w);
    for (int64_t i = first; i < last; ++i) {
      reader.run(performer_chunk(s, i), kqv, summary, out, value);
    }
  });
}

}  // namespace oneflow_accel
