// Loops compiled for several instruction sets.
#pragma once

// A function marked with this is compiled three times, and the first call picks the version for
// the CPU it runs on: AVX-512, AVX2 + FMA, or plain x86-64. It must not be a template, and what it
// calls inside its loops must be inlined.
#define ONEFLOW_ACCEL_SIMD \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
