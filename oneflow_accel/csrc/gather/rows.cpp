#include "gather/rows.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/simd_math.h"
#include "common/threads.h"
#include "copy/local_range.h"
#include "copy/strided_copy.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

void add_to(const float* x, float* sum, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { sum[i] += x[i]; }
}

void add_to(const double* x, double* sum, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { sum[i] += x[i]; }
}

// Whether 0 <= each x <= last: else x or last - x has the sign bit set.
bool all_in_range(const int64_t* x, int64_t n, int64_t last) {
  uint64_t signs = 0;
#pragma omp simd reduction(| : signs)
  for (int64_t i = 0; i < n; ++i) {
    const auto index = static_cast<uint64_t>(x[i]);
    signs |= index | (static_cast<uint64_t>(last) - index);
  }
  return (signs >> 63U) == 0;
}

bool all_in_range(const int32_t* x, int64_t n, int64_t last) {
  uint64_t signs = 0;
#pragma omp simd reduction(| : signs)
  for (int64_t i = 0; i < n; ++i) {
    const auto index = static_cast<uint64_t>(static_cast<int64_t>(x[i]));
    signs |= index | (static_cast<uint64_t>(last) - index);
  }
  return (signs >> 63U) == 0;
}

}  // namespace

Indices::Indices(const user_op::Tensor& tensor) : count_(tensor.shape_view().elem_cnt()) {
  if (tensor.data_type() == ::oneflow::DataType::kInt64) {
    wide_ = tensor.dptr<int64_t>();
  } else {
    narrow_ = tensor.dptr<int32_t>();
  }
}

void Indices::check(int64_t size) const {
  if (wide_ != nullptr ? all_in_range(wide_, count_, size - 1)
                       : all_in_range(narrow_, count_, size - 1)) {
    return;
  }
  int64_t i = 0;
  while ((*this)[i] >= 0 && (*this)[i] < size) { ++i; }
  throw std::out_of_range("index " + std::to_string((*this)[i]) + " at position "
                          + std::to_string(i) + " is out of range for " + std::to_string(size)
                          + " rows");
}

void gather_rows(const TableShape& shape, const Indices& indices, std::size_t element_bytes,
                 const void* table, void* out) {
  const int64_t row_bytes = shape.row * static_cast<int64_t>(element_bytes);
  const int64_t count = indices.count();
  const auto* from = static_cast<const char*>(table);
  auto* to = static_cast<char*>(out);
  const int64_t grain = std::max<int64_t>(4 * kGrainSize / std::max<int64_t>(row_bytes, 1), 1);
  parallel_for(shape.outer * count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = indices[i % count] - shape.first;
      if (row >= 0 && row < shape.rows) {
        std::memcpy(to + i * row_bytes, from + (i / count * shape.rows + row) * row_bytes,
                    row_bytes);
      } else {
        std::memset(to + i * row_bytes, 0, row_bytes);
      }
    }
  });
}

template <typename T>
void sum_rows_by_index(const TableShape& shape, const Indices& indices, const T* data, T* table,
                       int64_t skipped) {
  const int64_t count = indices.count();
  zero_fill(table, shape.outer * shape.rows * shape.row * static_cast<int64_t>(sizeof(T)));
  // The threads share out the columns, so that no two of them add to the same element and each
  // adds in the order of the indices.
  const int64_t work = std::max<int64_t>(shape.outer * count, 1);
  const int64_t grain = std::max<int64_t>(kGrainSize / work, 16);
  parallel_for(shape.row, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < shape.outer * count; ++i) {
      const int64_t index = indices[i % count];
      const int64_t row = index - shape.first;
      if (index == skipped || row < 0 || row >= shape.rows) { continue; }
      T* to = table + (i / count * shape.rows + row) * shape.row;
      add_to(data + i * shape.row + begin, to + begin, end - begin);
    }
  });
}

template void sum_rows_by_index<float>(const TableShape&, const Indices&, const float*, float*,
                                       int64_t);
template void sum_rows_by_index<double>(const TableShape&, const Indices&, const double*, double*,
                                        int64_t);

std::shared_ptr<user_op::OpKernelCache> RowRange::of(user_op::KernelCacheContext* ctx,
                                                     const std::string& name) {
  if (ctx->parallel_ctx().parallel_num() == 1) { return nullptr; }
  const LocalRange range = local_range(ctx, name, ctx->Attr<int64_t>("axis"));
  return std::make_shared<RowRange>(range.first, range.total);
}

}  // namespace oneflow_accel
