// The inner loop of all products in fp32 and bf16: a tile of sums that stays in registers.
#pragma once
#include "simd.h"

namespace {

#define UNROLL _Pragma("GCC unroll 32")  // without UNROLL and INLINE, GCC keeps arrays of registers in memory
#define FORCED __attribute__((always_inline))
#define INLINE inline FORCED

// ROWS x VECS registers of sums leave enough registers for a row of factors.
#if defined(FLEX_AVX512)
constexpr int ROWS = 6, VECS = 4;
#elif defined(FLEX_AVX2)
constexpr int ROWS = 6, VECS = 2;
#else
constexpr int ROWS = 4, VECS = 2;
#endif

// Units of 32 bits in which products count columns: numbers, or pairs of neighbouring bf16, which the CPU multiplies by
// one instruction. COLUMNS: columns per unit. vmadd: sum + x w, in fp32.
struct pair { bf16 first, second; };
template <class U> constexpr int COLUMNS = 1;
template <> constexpr int COLUMNS<pair> = 2;
INLINE vf vmadd(vf x, vf w, vf sum, float) { return vfma(x, w, sum); }
#if defined(FLEX_AVX512) && defined(__AVX512BF16__)
#define FLEX_BF16 1
INLINE vf vmadd(vf x, vf w, vf sum, pair) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));  // with the intrinsic, GCC 12 copies the sum
    return sum;
}
INLINE vf vpair(vf first, vf second) {  // rounded
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, halves));
}
INLINE void put(pair* to, vf x) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x)); }  // W / 2 pairs
#endif
INLINE void put(float* to, vf x) { vstore(to, x); }

// Stores four columns of W rows of w as units, `width` floats from one unit to the next.
INLINE void store_four(float*& tile, int64_t width, const vf* x, float) {
    UNROLL for (int e = 0; e < 4; e++, tile += width) vstore(tile, x[e]);
}
#if defined(FLEX_BF16)
INLINE void store_four(float*& tile, int64_t width, const vf* x, pair) {
    UNROLL for (int e = 0; e < 4; e += 2, tile += width) vstore(tile, vpair(x[e], x[e + 1]));
}
#endif

// sum += x [M, span] @ tile [span, N * W], both of units U. width: units from a row of the tile to the next. AHEAD lines
// of 64 bytes per unit are prefetched from `ahead` on.
template <class U, int M, int N, int AHEAD = 0>
INLINE void multiply(const float* x, int64_t x_row, const float* tile, int64_t span, vf (&sum)[M][N],
                     int64_t width = N * W, uintptr_t ahead = 0) {
    for (int64_t d = 0; d < span; d++, tile += width) {
        UNROLL for (int i = 0; i < AHEAD; i++) __builtin_prefetch((const void*)(ahead + (d * AHEAD + i) * 64), 0, 2);
        vf u[N];
        UNROLL for (int n = 0; n < N; n++) u[n] = vload(tile + n * W);
        UNROLL for (int i = 0; i < M; i++) {
            const vf v = vset(x[i * x_row + d]);
            UNROLL for (int n = 0; n < N; n++) sum[i][n] = vmadd(v, u[n], sum[i][n], U());
        }
    }
}

template <int M, int N> INLINE void keep(const vf (&sum)[M][N], float* sums) {
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int n = 0; n < N; n++) vstore(sums + (i * N + n) * W, sum[i][n]);
}

template <int M, int N> INLINE void clear(vf (&sum)[M][N]) {
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int n = 0; n < N; n++) sum[i][n] = vset(0.f);
}

}  // namespace
