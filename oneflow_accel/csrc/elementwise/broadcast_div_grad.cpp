// broadcast_div_grad, float32 and bfloat16: the gradient of z = x / y by y, dy = -sum(dz z) / y over
// the axes along which y was broadcast.
#include <algorithm>

#include "common/onednn.h"
#include "elementwise/broadcast.h"
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

// Adds dz z to the sums of the elements of y that the rows belong to.
template <typename T>
void add_products(const T* dz, const T* z, double* sums, const Rows& rows) {
  // Terms that a sum in float32 takes.
  constexpr int64_t kBlock = 4096;
  for (int64_t r = 0; r < rows.count; ++r, sums += rows.b_row) {
    const T* dz_row = dz + r * rows.length;
    const T* z_row = z + r * rows.length;
    if (rows.b_is_scalar) {
      for (int64_t i = 0; i < rows.length; i += kBlock) {
        const int64_t end = std::min(rows.length, i + kBlock);
        float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = i; j < end; ++j) { sum += to_float(dz_row[j]) * to_float(z_row[j]); }
        *sums += sum;
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < rows.length; ++i) {
        sums[i] += to_float(dz_row[i]) * to_float(z_row[i]);
      }
    }
  }
}

// The sums of dz z over what each element of y was broadcast to. They are made in parts, whose
// number depends on the shapes alone, so that the result does not depend on the number of threads.
template <typename T>
void reduced_div_grad(const Broadcast& broadcast, int64_t y_elements, const T* dz, const T* z,
                      const T* y, T* dy) {
  constexpr int64_t kMostParts = 16;
  const int64_t n = broadcast.elements();
  // The parts' sums take no more room than z, counted in elements.
  const int64_t parts = std::clamp<int64_t>(
      std::min(n / kGrainSize, n / y_elements), 1, kMostParts);
  auto* sums = scratch<double>(ScratchSlot::kReduction, parts * y_elements);
  for_each_block(parts, kGrainSize, [&](int64_t part) {
    double* part_sums = sums + part * y_elements;
    std::fill_n(part_sums, y_elements, 0.0);
    broadcast.for_blocks(n * part / parts, n * (part + 1) / parts,
                         [&](int64_t begin, int64_t, int64_t y_offset, const Rows& rows) {
                           add_products(dz + begin, z + begin, part_sums + y_offset, rows);
                         });
  });
  parallel_for(y_elements, kGrainSize, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double sum = 0.0;
      for (int64_t part = 0; part < parts; ++part) { sum += sums[part * y_elements + i]; }
      dy[i] = from_float<T>(static_cast<float>(-sum / to_float(y[i])));
    }
  });
}

template <typename T>
void broadcast_div_grad_kernel(Context* ctx) {
  const auto& y = shape_of(ctx, "y");
  const Broadcast broadcast(shape_of(ctx, "z"), y);
  if (broadcast.elements() != y.elem_cnt()) {
    return reduced_div_grad(broadcast, y.elem_cnt(), input<T>(ctx, "dz"), input<T>(ctx, "z"),
                            input<T>(ctx, "y"), output<T>(ctx, "dy"));
  }
  // y was not broadcast.
  map<T>(ctx, "dy", [](float a, float b, float c) { return -(a * b) / c; }, "dz", "z", "y");
}

REGISTER_KERNELS(broadcast_div_grad_kernel, "broadcast_div_grad", "dy");

}  // namespace

}  // namespace oneflow_accel
