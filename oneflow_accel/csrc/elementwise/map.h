// Kernels whose output has one element for each element of their inputs, all of one shape.
#pragma once

#include <type_traits>
#include <vector>

#include "common/oneflow.h"
#include "common/threads.h"

namespace oneflow_accel {

// The n elements of an operand, for a loop that writes `out_n` elements at `out`. Where both share
// memory the operand is copied, or the loop would change it before it is read: x /= x[0], or
// x[1:] += x[:-1]. Not where operand and output are the same elements in the same order.
template <typename T>
class Operand {
 public:
  Operand(const T* data, int64_t n, const T* out, int64_t out_n) : data_(data) {
    if ((data == out && n == out_n) || data + n <= out || out + out_n <= data) { return; }
    copy_.assign(data, data + n);
    data_ = copy_.data();
  }
  Operand(Operand&&) = default;

  const T* data() const { return data_; }

 private:
  const T* data_;
  std::vector<T> copy_;
};

// out[i] = formula(in[i]...) for i < n, in float, in parallel; `out` may be one of the inputs.
template <typename T, typename Formula, typename... In>
void map(int64_t n, T* out, const Formula& formula, const In*... in) {
  parallel_for(n, kGrainSize, [=](int64_t begin, int64_t end) {
    const Formula f = formula;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) { out[i] = from_float<T>(f(to_float(in[i])...)); }
  });
}

// out[i] = in[i], of another type.
template <typename From, typename To>
void convert(const From* in, To* out, int64_t n) {
  map(n, out, [](float x) { return x; }, in);
}

// A formula of all elements of arguments, by their names.
template <typename T, typename Formula, typename... Name>
void map(Context* ctx, const char* out, const Formula& formula, Name... in) {
  map(shape_of(ctx, out).elem_cnt(), output<T>(ctx, out), formula, input<T>(ctx, in)...);
}

// Such kernels of float32 and bfloat16: out = formula(in), or formula(a, b), where `names` are
// those of the inputs, then that of the output.
template <typename Formula>
bool register_map(const char* op, const std::vector<const char*>& names, const Formula& formula,
                  const InPlace& in_place = {}) {
  const auto typed = [&](auto zero) {
    return [=](Context* ctx) {
      if constexpr (std::is_invocable_v<Formula, float>) {
        map<decltype(zero)>(ctx, names[1], formula, names[0]);
      } else {
        map<decltype(zero)>(ctx, names[2], formula, names[0], names[1]);
      }
    };
  };
  return register_typed_kernels<float, Bfloat16>(typed, op, names.back(), in_place);
}

}  // namespace oneflow_accel

#define REGISTER_MAP(...)                                      \
  static const bool OF_PP_CAT(g_map_registered, __COUNTER__) = \
      ::oneflow_accel::register_map(__VA_ARGS__)
