// The inner loop of all fp32 products: a tile of sums that stays in registers.
#pragma once
#include "simd.h"

namespace {

#define UNROLL _Pragma("GCC unroll 32")  // without these two GCC keeps arrays of registers in memory
#define INLINE inline __attribute__((always_inline))

// ROWS x VECS registers of sums leave enough for a row of factors.
#if defined(FLEX_AVX512)
constexpr int ROWS = 6, VECS = 4;
#elif defined(FLEX_AVX2)
constexpr int ROWS = 6, VECS = 2;
#else
constexpr int ROWS = 4, VECS = 2;
#endif

// sum += x [M, span] times tile [span, N * W]
template <int M, int N>
INLINE void multiply(const float* x, int64_t x_row, const float* tile, int64_t span, vf (&sum)[M][N]) {
    for (int64_t d = 0; d < span; d++, tile += N * W) {
        vf u[N];
        UNROLL for (int n = 0; n < N; n++) u[n] = vload(tile + n * W);
        UNROLL for (int i = 0; i < M; i++) {
            const vf v = vset(x[i * x_row + d]);
            UNROLL for (int n = 0; n < N; n++) sum[i][n] = vfma(v, u[n], sum[i][n]);
        }
    }
}

template <int M, int N> INLINE void clear(vf (&sum)[M][N]) {
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int n = 0; n < N; n++) sum[i][n] = vset(0.f);
}

}  // namespace
