// An operand of an operation that may be in place.
#pragma once

#include <cstdint>
#include <vector>

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

}  // namespace oneflow_accel
