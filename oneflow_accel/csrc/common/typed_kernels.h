// REGISTER_KERNELS of common/oneflow.h.
#pragma once

#include "common/oneflow.h"
