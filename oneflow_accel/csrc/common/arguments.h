// input() and output() of common/oneflow.h.
#pragma once

#include "common/oneflow.h"
