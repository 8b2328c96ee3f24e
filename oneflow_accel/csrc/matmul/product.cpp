#include "matmul/product.h"

#include <cstring>
#include <functional>
#include <numeric>
#include <sstream>

#include "common/threads.h"

namespace oneflow_accel {

namespace {

using dims = dnnl::memory::dims;

int64_t count(dims::const_iterator begin, dims::const_iterator end) {
  return std::accumulate(begin, end, int64_t{1}, std::multiplies<int64_t>());
}

std::string text(const dims& sizes) {
  std::ostringstream out;
  for (std::size_t i = 0; i < sizes.size(); ++i) { out << (i == 0 ? "(" : ", ") << sizes[i]; }
  out << ")";
  return out.str();
}

void copy_bytes(const char* from, char* to, int64_t n) {
  if (from == to) { return; }
  parallel_for(n, kGrainSize * static_cast<int64_t>(sizeof(float)),
               [=](int64_t begin, int64_t end) {
                 std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
               });
}

}  // namespace

int64_t Product::batch() const { return count(out.begin(), out.end() - 2); }

bool Product::adds_up_nothing() const {
  return count(a.begin(), a.end()) == 0 || count(b.begin(), b.end()) == 0;
}

Product Product::folded() const {
  if (out.size() == 2 || transpose_a || adds_up_nothing() || count(b.begin(), b.end() - 2) != 1) { return *this; }
  Product flat = *this;
  const int64_t rows = batch() * m();
  flat.a = {rows, k()};
  flat.b = dims(b.end() - 2, b.end());
  flat.out = {rows, n()};
  return flat;
}

std::string Product::describe() const {
  std::ostringstream message;
  message << "product of " << text(a) << (transpose_a ? " (transposed)" : "") << " and " << text(b)
          << (transpose_b ? " (transposed)" : "") << " to " << text(out)
          << (accumulate ? ", added to the output" : "");
  return message.str();
}

void load_addend(::oneflow::user_op::KernelComputeContext* ctx, ::oneflow::user_op::Tensor* out,
                 Product* product) {
  product->accumulate = ctx->has_input("_add_to_output", 0);
  if (!product->accumulate) { return; }
  const auto* addend = ctx->Tensor4ArgNameAndIndex("_add_to_output", 0);
  const int64_t bytes = out->shape_view().elem_cnt()
                        * static_cast<int64_t>(::oneflow::GetSizeOfDataType(out->data_type()));
  copy_bytes(static_cast<const char*>(addend->raw_dptr()), static_cast<char*>(out->mut_raw_dptr()),
             bytes);
}

dnnl::memory::dims padded_shape(const ::oneflow::user_op::Tensor& tensor, std::size_t rank) {
  const auto& shape = tensor.shape_view();
  dims sizes(rank, 1);
  const auto offset = static_cast<int64_t>(rank) - shape.NumAxes();
  for (int64_t i = 0; i < shape.NumAxes(); ++i) { sizes[offset + i] = shape.At(i); }
  return sizes;
}

}  // namespace oneflow_accel
