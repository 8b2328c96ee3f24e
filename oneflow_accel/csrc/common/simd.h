// Loops compiled for several instruction sets.
#pragma once

// A function marked with this is compiled three times, and the first call picks the version for
// the CPU it runs on: AVX-512, AVX2 + FMA, or plain x86-64. It must not be a template, and what it
// calls inside its loops must be inlined.
#if defined(__clang__)
// One version, for the least that the plug-in is loaded on: Clang gives functions of one name in two
// files' anonymous namespaces one resolver.
#define ONEFLOW_ACCEL_SIMD __attribute__((target("arch=x86-64-v3")))
#elif __GNUC__ < 12
// Knows single features only. AVX-512 has FMA.
#define ONEFLOW_ACCEL_SIMD __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ONEFLOW_ACCEL_SIMD \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
