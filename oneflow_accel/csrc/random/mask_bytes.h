// Tensors of truth values as loops want them: bytes that are 0 or 1.
#pragma once

#include <cstdint>

#include "common/oneflow.h"

namespace oneflow_accel::random {

inline const uint8_t* mask_bytes(const ::oneflow::user_op::Tensor* mask) {
  return reinterpret_cast<const uint8_t*>(mask->dptr<bool>());
}

inline uint8_t* mut_mask_bytes(::oneflow::user_op::Tensor* mask) {
  return reinterpret_cast<uint8_t*>(mask->mut_dptr<bool>());
}

}  // namespace oneflow_accel::random
