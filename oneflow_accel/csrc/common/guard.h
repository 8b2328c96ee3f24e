// run_or_throw() of common/oneflow.h.
#pragma once

#include "common/oneflow.h"
