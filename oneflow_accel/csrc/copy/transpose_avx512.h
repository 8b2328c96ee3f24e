// A transpose of 16 x 16 floats in AVX-512 registers.
#pragma once

#include <immintrin.h>

namespace oneflow_accel {

// columns[c] holds element c of each of the rows, which are used up. In pairs of rows, of pairs, of
// fours and of eights.
inline __attribute__((always_inline)) void transpose_16x16(__m512 (&rows)[16],
                                                           __m512 (&columns)[16]) {
  __m512 pairs[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512d a = _mm512_castps_pd(pairs[i]), b = _mm512_castps_pd(pairs[i + 1]);
    const __m512d c = _mm512_castps_pd(pairs[i + 2]), d = _mm512_castps_pd(pairs[i + 3]);
    rows[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    rows[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    rows[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    rows[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  // rows[4 g + c] holds, in each of its four lanes, column 4 lane + c of the rows 4 g to 4 g + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 even = _mm512_shuffle_f32x4(rows[c], rows[4 + c], 0x88);
    const __m512 odd = _mm512_shuffle_f32x4(rows[c], rows[4 + c], 0xdd);
    const __m512 even2 = _mm512_shuffle_f32x4(rows[8 + c], rows[12 + c], 0x88);
    const __m512 odd2 = _mm512_shuffle_f32x4(rows[8 + c], rows[12 + c], 0xdd);
    columns[c] = _mm512_shuffle_f32x4(even, even2, 0x88);
    columns[c + 4] = _mm512_shuffle_f32x4(odd, odd2, 0x88);
    columns[c + 8] = _mm512_shuffle_f32x4(even, even2, 0xdd);
    columns[c + 12] = _mm512_shuffle_f32x4(odd, odd2, 0xdd);
  }
}

}  // namespace oneflow_accel
