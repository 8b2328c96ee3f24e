// Rows of the last axis, each treated by itself.
#pragma once

#include <algorithm>
#include <string>

#include "common/oneflow.h"
#include "common/threads.h"

namespace oneflow_accel {

struct RowSet {
  int64_t count;
  // Elements of each.
  int64_t n;

  RowSet(int64_t count, int64_t n) : count(count), n(n) {}
  RowSet(Context* ctx, const std::string& name) {
    const auto& shape = shape_of(ctx, name);
    n = shape.At(shape.NumAxes() - 1);
    count = shape.Count(0, shape.NumAxes() - 1);
  }

  // Calls fn(row, where it starts) for every row, in parallel, where an element takes `operations`.
  template <typename Fn>
  void for_each(int64_t operations, const Fn& fn) const {
    for_each_block(count, n * operations, [&](int64_t row) { fn(row, row * n); });
  }
};

// How many columns a row of the argument `name` sees, as a function: in each matrix of its last two
// axes, row i sees those up to i + diagonal. Rows are counted through all matrices.
inline auto columns_seen(Context* ctx, const std::string& name) {
  const auto& shape = shape_of(ctx, name);
  const int64_t rows = shape.At(shape.NumAxes() - 2);
  const int64_t columns = shape.At(shape.NumAxes() - 1);
  const auto diagonal = ctx->Attr<int64_t>("diagonal");
  return [=](int64_t row) { return std::clamp<int64_t>(row % rows + diagonal + 1, 0, columns); };
}

}  // namespace oneflow_accel
