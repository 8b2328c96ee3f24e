#include "matmul/product.h"

#include <optional>
#include <utility>

namespace oneflow_accel {

namespace {

using dims = dnnl::memory::dims;

// The matrices of contiguous memory of shape `sizes`, or their transposes.
dnnl::memory::desc matrices(dims sizes, bool transpose, dnnl::memory::data_type type) {
  const std::size_t rank = sizes.size();
  dims strides(rank, 1);
  for (std::size_t i = rank - 1; i-- > 0;) { strides[i] = strides[i + 1] * sizes[i + 1]; }
  if (transpose) {
    std::swap(sizes[rank - 2], sizes[rank - 1]);
    std::swap(strides[rank - 2], strides[rank - 1]);
  }
  return dnnl::memory::desc(sizes, type, strides);
}

struct Call {
  dnnl::memory::desc a, b, bias, out, scratchpad;
  // Empty where oneDNN has none for this processor.
  std::optional<dnnl::matmul> primitive;
};

Call make_call(const Product& product, dnnl::memory::data_type operands,
               dnnl::memory::data_type result, bool has_bias) {
  Call call;
  call.a = matrices(product.a, product.transpose_a, operands);
  call.b = matrices(product.b, product.transpose_b, operands);
  call.out = matrices(product.out, false, result);
  if (has_bias) {
    dims sizes(product.out.size(), 1);
    sizes.back() = product.n();
    call.bias = matrices(sizes, false, result);
  }
  dnnl::post_ops post_ops;
  if (product.alpha != 1.0F) {
    post_ops.append_eltwise(dnnl::algorithm::eltwise_linear, product.alpha, 0.0F);
  }
  if (product.accumulate) { post_ops.append_sum(); }
  dnnl::primitive_attr attr = user_scratchpad_attr();
  attr.set_post_ops(post_ops);
  const dnnl::matmul::primitive_desc desc(cpu_engine(), call.a, call.b, call.bias, call.out, attr,
                                          /*allow_empty=*/true);
  if (desc) {
    call.scratchpad = desc.scratchpad_desc();
    call.primitive.emplace(desc);
  }
  return call;
}

}  // namespace

int64_t Product::batch() const { return count(dims(out.begin(), out.end() - 2)); }

bool Product::adds_up_nothing() const { return count(a) == 0 || count(b) == 0; }

Product Product::folded() const {
  const dims matrix(b.end() - 2, b.end());
  if (out.size() == 2 || transpose_a || adds_up_nothing() || count(b) != count(matrix)) {
    return *this;
  }
  Product flat = *this;
  const int64_t rows = batch() * m();
  flat.a = {rows, k()};
  flat.b = matrix;
  flat.out = {rows, n()};
  return flat;
}

std::string Product::describe() const {
  return "product of " + text(a) + (transpose_a ? " (transposed)" : "") + " and " + text(b)
         + (transpose_b ? " (transposed)" : "") + " to " + text(out)
         + (accumulate ? ", added to the output" : "");
}

bool multiply_by_primitive(const Product& product, dnnl::memory::data_type operands,
                           dnnl::memory::data_type result, const void* a, const void* b,
                           const void* bias, void* out) {
  KeyBuilder key("matmul");
  key.add_all(product.a).add_all(product.b).add_all(product.out);
  key.add(product.transpose_a, product.transpose_b, product.accumulate);
  key.add(__builtin_bit_cast(int32_t, product.alpha), bias != nullptr, operands, result);
  const Call& call = PrimitiveCache<Call>::get_or_create(
      key.str(), [&] { return make_call(product, operands, result, bias != nullptr); });
  if (!call.primitive) { return false; }
  std::unordered_map<int, dnnl::memory> arguments{
      {DNNL_ARG_SRC, wrap(call.a, a)},
      {DNNL_ARG_WEIGHTS, wrap(call.b, b)},
      {DNNL_ARG_DST, wrap(call.out, out)},
      {DNNL_ARG_SCRATCHPAD, scratchpad_memory(call.scratchpad)}};
  if (bias != nullptr) { arguments.emplace(DNNL_ARG_BIAS, wrap(call.bias, bias)); }
  call.primitive->execute(cpu_stream(), arguments);
  return true;
}

}  // namespace oneflow_accel
