#include "gather/rows.h"

#include <algorithm>
#include <cstring>

#include "common/simd.h"
#include "common/simd_math.h"
#include "common/threads.h"
#include "copy/local_range.h"
#include "copy/strided_copy.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

ONEFLOW_ACCEL_SIMD
void add_to(const float* x, float* sum, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { sum[i] += x[i]; }
}

ONEFLOW_ACCEL_SIMD
void add_to(const double* x, double* sum, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { sum[i] += x[i]; }
}

}  // namespace

Indices::Indices(const user_op::Tensor& tensor) : count_(tensor.shape_view().elem_cnt()) {
  if (tensor.data_type() == ::oneflow::DataType::kInt64) {
    wide_ = tensor.dptr<int64_t>();
  } else {
    narrow_ = tensor.dptr<int32_t>();
  }
}

void Indices::check(const char* op, int64_t size) const {
  for (int64_t i = 0; i < count_; ++i) {
    const int64_t index = (*this)[i];
    LOG_IF(FATAL, index < 0 || index >= size)
        << "oneflow_accel: " << op << ": index " << index << " at position " << i
        << " is out of range for " << size << " rows";
  }
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
