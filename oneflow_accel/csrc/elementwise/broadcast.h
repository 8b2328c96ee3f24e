// out = f(a, b) where the shapes of a and b broadcast to the shape of out.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/bfloat16.h"
#include "common/oneflow.h"
#include "common/threads.h"
#include "elementwise/map.h"

namespace oneflow_accel {

// `count` rows of `length` elements of the output, one after the other. In an operand a row starts
// `*_row` elements after the one before (0: all rows share one), and holds `length` elements or,
// where `*_is_scalar`, one.
struct Rows {
  int64_t count;
  int64_t length;
  int64_t a_row;
  int64_t b_row;
  bool a_is_scalar;
  bool b_is_scalar;
};

// out = operation(a, b). One loop for each way in which operands lie in a row, so that each is
// vector code. The output may be one of the operands.
template <typename Operation, typename T, typename Out>
void for_rows(Operation operation, const T* a, const T* b, Out* out, const Rows& rows) {
  const int64_t n = rows.length;
  for (int64_t r = 0; r < rows.count; ++r, a += rows.a_row, b += rows.b_row, out += n) {
    if (rows.b_is_scalar) {
      const float y = to_float(*b);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) { out[i] = from_float<Out>(operation(to_float(a[i]), y)); }
    } else if (rows.a_is_scalar) {
      const float x = to_float(*a);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) { out[i] = from_float<Out>(operation(x, to_float(b[i]))); }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        out[i] = from_float<Out>(operation(to_float(a[i]), to_float(b[i])));
      }
    }
  }
}

// Shapes that broadcast, in as few dimensions as they can be described in: dimensions of one
// element are left out, and neighbors that broadcast alike are one.
class Broadcast {
 public:
  // Shapes are aligned at their last dimensions, as NumPy does.
  Broadcast(const ::oneflow::ShapeView& a, const ::oneflow::ShapeView& b) {
    const int rank = static_cast<int>(std::max(a.NumAxes(), b.NumAxes()));
    for (int i = 1; i <= rank; ++i) {
      const int64_t a_extent = i <= a.NumAxes() ? a.At(a.NumAxes() - i) : 1;
      const int64_t b_extent = i <= b.NumAxes() ? b.At(b.NumAxes() - i) : 1;
      prepend(a_extent == 1 ? b_extent : a_extent, a_extent != 1, b_extent != 1);
    }
  }
  // b lies along one axis of a.
  Broadcast(const ::oneflow::ShapeView& a, int32_t axis) {
    prepend(a.Count(axis + 1), true, false);
    prepend(a.At(axis), true, true);
    prepend(a.Count(0, axis), true, false);
  }

  // Calls fn(a, b, out, rows) for all rows, in parallel, with pointers to the first of them. `out`
  // may share memory with `a` and `b`.
  template <typename T, typename Fn>
  void run(const T* a, const T* b, T* out, const Fn& fn) const {
    const Operand<T> a_operand(a, a_elements_, out, elements_);
    const Operand<T> b_operand(b, b_elements_, out, elements_);
    parallel_for(elements_, kGrainSize, [&](int64_t begin, int64_t end) {
      for_blocks(begin, end, [&](int64_t offset, int64_t a_offset, int64_t b_offset,
                                 const Rows& rows) {
        fn(a_operand.data() + a_offset, b_operand.data() + b_offset, out + offset, rows);
      });
    });
  }

  // Cuts the elements [begin, end) of the output into rows and calls
  // fn(offset in the output, offset in a, offset in b, rows) for each run of them.
  template <typename Fn>
  ONEFLOW_ACCEL_INLINE void for_blocks(int64_t begin, int64_t end, const Fn& fn) const {
    const Dimension& inner = dims_[0];
    const Dimension& outer = dims_[1];
    while (begin < end) {
      // Where the element `begin` lies.
      const int64_t column = begin % inner.extent;
      int64_t rest = begin / inner.extent;
      const int64_t row = rest % outer.extent;
      int64_t a = column * inner.a_stride + row * outer.a_stride;
      int64_t b = column * inner.b_stride + row * outer.b_stride;
      rest /= outer.extent;
      for (int d = 2; d < num_dims_; ++d) {
        const int64_t index = rest % dims_[d].extent;
        rest /= dims_[d].extent;
        a += index * dims_[d].a_stride;
        b += index * dims_[d].b_stride;
      }
      // A part of one row, or whole rows up to the end of the second dimension.
      const int64_t left = end - begin;
      Rows rows{1, std::min(left, inner.extent - column), outer.a_stride, outer.b_stride,
                inner.a_stride == 0, inner.b_stride == 0};
      if (column == 0 && left >= inner.extent) {
        rows.count = std::min(left / inner.extent, outer.extent - row);
      }
      fn(begin, a, b, rows);
      begin += rows.count * rows.length;
    }
  }

  int64_t elements() const { return elements_; }

 private:
  static constexpr int kMaxDims = 32;
  struct Dimension {
    int64_t extent = 1;
    // Elements from one index to the next, 0 where the operand broadcasts.
    int64_t a_stride = 0;
    int64_t b_stride = 0;
  };

  void prepend(int64_t extent, bool a_varies, bool b_varies) {
    elements_ *= extent;
    if (extent == 1) { return; }
    const int64_t a_stride = a_varies ? a_elements_ : 0;
    const int64_t b_stride = b_varies ? b_elements_ : 0;
    if (a_varies) { a_elements_ *= extent; }
    if (b_varies) { b_elements_ *= extent; }
    if (num_dims_ > 0) {
      Dimension& last = dims_[num_dims_ - 1];
      if ((last.a_stride != 0) == a_varies && (last.b_stride != 0) == b_varies) {
        last.extent *= extent;
        return;
      }
    }
    CHECK_LT(num_dims_, kMaxDims);
    dims_[num_dims_++] = {extent, a_stride, b_stride};
  }

  // Innermost first.
  std::array<Dimension, kMaxDims> dims_;
  int num_dims_ = 0;
  int64_t elements_ = 1;
  int64_t a_elements_ = 1;
  int64_t b_elements_ = 1;
};

}  // namespace oneflow_accel
