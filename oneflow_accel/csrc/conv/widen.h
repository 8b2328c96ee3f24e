// Float32 copies of bfloat16 tensors, for convolutions that are not computed in bfloat16. Not in
// scratch memory, which the convolutions use themselves.
#pragma once

#include <memory>

#include "common/threads.h"
#include "conv/grouped.h"

namespace oneflow_accel {

inline bool is_convolved_in_float32(const ConvGeometry& geometry) {
  return !has_bfloat16_products() || grouped_shape(geometry).has_value();
}

inline ConvGeometry float32_geometry(ConvGeometry geometry) {
  geometry.data_type = dnnl::memory::data_type::f32;
  return geometry;
}

class FloatCopy {
 public:
  explicit FloatCopy(int64_t n) : n_(n), data_(new float[n]) {}
  FloatCopy(const Bfloat16* from, int64_t n) : FloatCopy(n) {
    parallel_for(n, kGrainSize, [from, to = data()](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) { to[i] = to_float(from[i]); }
    });
  }

  float* data() const { return data_.get(); }

  void round_to(Bfloat16* to) const {
    parallel_for(n_, kGrainSize, [from = data(), to](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) { to[i] = from_float<Bfloat16>(from[i]); }
    });
  }

 private:
  int64_t n_;
  std::unique_ptr<float[]> data_;
};

}  // namespace oneflow_accel
