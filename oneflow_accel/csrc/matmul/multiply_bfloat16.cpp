// Matrix products in bfloat16: oneDNN's matmul primitive, which uses the processor's bfloat16
// instructions. On processors for which oneDNN has none, float32 copies are multiplied.
#include <functional>
#include <numeric>

#include "common/threads.h"
#include "matmul/primitive.h"
#include "matmul/product.h"

namespace oneflow_accel {

namespace {

using dims = dnnl::memory::dims;
constexpr auto kBfloat16 = dnnl::memory::data_type::bf16;

void widen(const Bfloat16* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) { to[i] = to_float(from[i]); }
}

void narrow(const float* from, Bfloat16* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) { to[i] = from_float<Bfloat16>(from[i]); }
}

int64_t count(const dims& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<int64_t>());
}

const Bfloat16* narrowed(ScratchSlot slot, const float* from, int64_t n) {
  auto* to = static_cast<Bfloat16*>(scratch(slot, static_cast<std::size_t>(n) * sizeof(Bfloat16)));
  parallel_for(n, kGrainSize,
               [=](int64_t begin, int64_t end) { narrow(from + begin, to + begin, end - begin); });
  return to;
}

float* float_scratch(ScratchSlot slot, int64_t n) {
  return static_cast<float*>(scratch(slot, static_cast<std::size_t>(n) * sizeof(float)));
}

const float* widened(ScratchSlot slot, const Bfloat16* from, int64_t n) {
  float* to = float_scratch(slot, n);
  parallel_for(n, kGrainSize,
               [=](int64_t begin, int64_t end) { widen(from + begin, to + begin, end - begin); });
  return to;
}

void multiply_in_float32(const Product& product, const Bfloat16* a, const Bfloat16* b,
                         const Bfloat16* bias, Bfloat16* out) {
  const int64_t n = count(product.out);
  float* sum = float_scratch(ScratchSlot::kDestination, n);
  if (product.accumulate) { widened(ScratchSlot::kDestination, out, n); }
  multiply(product, widened(ScratchSlot::kSource, a, count(product.a)),
           widened(ScratchSlot::kWeights, b, count(product.b)),
           bias == nullptr ? nullptr : widened(ScratchSlot::kReduction, bias, product.n()), sum);
  parallel_for(n, kGrainSize, [=](int64_t begin, int64_t end) {
    narrow(sum + begin, out + begin, end - begin);
  });
}

}  // namespace

bool multiply_rounded(const Product& product, const float* a, const float* b, const float* bias,
                      float* out) {
  return multiply_by_primitive(product, {kBfloat16, dnnl::memory::data_type::f32},
                               narrowed(ScratchSlot::kRoundedA, a, count(product.a)),
                               narrowed(ScratchSlot::kRoundedB, b, count(product.b)), bias, out);
}

void multiply(const Product& product, const Bfloat16* a, const Bfloat16* b, const Bfloat16* bias,
              Bfloat16* out) {
  const Product flat = product.folded();
  if (flat.adds_up_nothing() || !has_bfloat16_products()
      || !multiply_by_primitive(flat, {kBfloat16, kBfloat16}, a, b, bias, out)) {
    multiply_in_float32(flat, a, b, bias, out);
  }
}

}  // namespace oneflow_accel
