#include "matmul/primitive.h"

#include <optional>
#include <utility>

namespace oneflow_accel {

namespace {

using dims = dnnl::memory::dims;

// The matrices of contiguous memory of shape `stored`, or their transposes.
dnnl::memory::desc matrices(const dims& stored, bool transpose, dnnl::memory::data_type type) {
  const std::size_t rank = stored.size();
  dims strides(rank);
  int64_t stride = 1;
  for (std::size_t i = rank; i-- > 0;) {
    strides[i] = stride;
    stride *= stored[i];
  }
  dims sizes = stored;
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

Call make_call(const Product& product, ProductTypes types, bool has_bias) {
  Call call;
  call.a = matrices(product.a, product.transpose_a, types.operands);
  call.b = matrices(product.b, product.transpose_b, types.operands);
  call.out = matrices(product.out, false, types.out);
  if (has_bias) {
    dims sizes(product.out.size(), 1);
    sizes.back() = product.n();
    call.bias = matrices(sizes, false, types.out);
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

bool multiply_by_primitive(const Product& product, ProductTypes types, const void* a, const void* b,
                           const void* bias, void* out) {
  KeyBuilder key("matmul");
  key.add_all(product.a).add_all(product.b).add_all(product.out);
  key.add(product.transpose_a).add(product.transpose_b).add(product.accumulate);
  key.add(__builtin_bit_cast(int32_t, product.alpha));
  key.add(static_cast<int64_t>(types.operands)).add(static_cast<int64_t>(types.out));
  key.add(bias != nullptr);
  const Call& call = PrimitiveCache<Call>::get_or_create(
      key.str(), [&] { return make_call(product, types, bias != nullptr); });
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
