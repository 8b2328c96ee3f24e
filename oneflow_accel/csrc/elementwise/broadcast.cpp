#include "elementwise/broadcast.h"

#include <algorithm>

namespace oneflow_accel {

Broadcast::Broadcast(const ::oneflow::ShapeView& a, const ::oneflow::ShapeView& b) {
  const int rank = static_cast<int>(std::max(a.NumAxes(), b.NumAxes()));
  for (int i = 1; i <= rank; ++i) {
    const int64_t a_extent = i <= a.NumAxes() ? a.At(a.NumAxes() - i) : 1;
    const int64_t b_extent = i <= b.NumAxes() ? b.At(b.NumAxes() - i) : 1;
    prepend(a_extent == 1 ? b_extent : a_extent, a_extent != 1, b_extent != 1);
  }
}

Broadcast::Broadcast(int64_t outer, int64_t n, int64_t inner) {
  prepend(inner, true, false);
  prepend(n, true, true);
  prepend(outer, true, false);
}

void Broadcast::prepend(int64_t extent, bool a_varies, bool b_varies) {
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

}  // namespace oneflow_accel
