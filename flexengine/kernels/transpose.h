// Transposition of W rows of 32-bit units in registers.
#pragma once
#include "tile.h"

namespace {

// W rows of w at 2 W columns of 16 bits take W registers: first one register per row; after `transpose`, of 32-bit
// units, one register per pair of columns, with a row in each lane. `even` and `odd` widen the two columns of a pair.
// `lo32` to `hi64` interleave two registers as the x86 unpack instructions do, within each 128 bits.
#if defined(FLEX_AVX512)
inline vp vload_pairs(const void* p, int n) {
    if (n == 2 * W) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi16((__mmask32(1) << n) - 1, p);
}
inline vp lo32(vp a, vp b) { return _mm512_unpacklo_epi32(a, b); }
inline vp hi32(vp a, vp b) { return _mm512_unpackhi_epi32(a, b); }
inline vp lo64(vp a, vp b) { return _mm512_unpacklo_epi64(a, b); }
inline vp hi64(vp a, vp b) { return _mm512_unpackhi_epi64(a, b); }
inline vf even(vp a, bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
inline vf odd(vp a, bf16) { return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(int(0xffff0000)))); }
inline vf even(vp a, fp16) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }
inline vf odd(vp a, fp16) { return even(_mm512_srli_epi32(a, 16), fp16()); }
INLINE void spread(const vp* b, vp* a) {
    UNROLL for (int j = 0; j < 4; j++) {
        vp p = _mm512_shuffle_i32x4(b[j], b[j + 4], 0x88), q = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0x88);
        vp r = _mm512_shuffle_i32x4(b[j], b[j + 4], 0xdd), s = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0xdd);
        a[j] = _mm512_shuffle_i32x4(p, q, 0x88), a[j + 8] = _mm512_shuffle_i32x4(p, q, 0xdd);
        a[j + 4] = _mm512_shuffle_i32x4(r, s, 0x88), a[j + 12] = _mm512_shuffle_i32x4(r, s, 0xdd);
    }
}
#elif defined(FLEX_AVX2)
inline vp vload_pairs(const void* p, int n) {
    uint16_t part[2 * W] = {};
    if (n < 2 * W) p = memcpy(part, p, size_t(n) * 2);
    return _mm256_loadu_si256((const __m256i*)p);
}
inline vp lo32(vp a, vp b) { return _mm256_unpacklo_epi32(a, b); }
inline vp hi32(vp a, vp b) { return _mm256_unpackhi_epi32(a, b); }
inline vp lo64(vp a, vp b) { return _mm256_unpacklo_epi64(a, b); }
inline vp hi64(vp a, vp b) { return _mm256_unpackhi_epi64(a, b); }
inline vf even(vp a, bf16) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
inline vf odd(vp a, bf16) { return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(int(0xffff0000)))); }
inline vf odd(vp a, fp16) {
    vp top = _mm256_srli_epi32(a, 16);
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1)));
}
inline vf even(vp a, fp16) { return odd(_mm256_slli_epi32(a, 16), fp16()); }
INLINE void spread(const vp* b, vp* a) {
    UNROLL for (int j = 0; j < 4; j++) {
        a[j] = _mm256_permute2x128_si256(b[j], b[j + 4], 0x20);
        a[j + 4] = _mm256_permute2x128_si256(b[j], b[j + 4], 0x31);
    }
}
#else
inline vp vload_pairs(const void* p, int n) {
    vp a = {};
    if (n == 2 * W) memcpy(&a, p, sizeof a);  // a constant size is one load, a variable one a call
    else memcpy(&a, p, size_t(n) * 2);
    return a;
}
#if defined(__clang__)
#define MIX(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(...) __builtin_shuffle(a, b, vp{__VA_ARGS__})
#endif
inline vp lo32(vp a, vp b) { return MIX(0, 4, 1, 5); }
inline vp hi32(vp a, vp b) { return MIX(2, 6, 3, 7); }
inline vp lo64(vp a, vp b) { return MIX(0, 1, 4, 5); }
inline vp hi64(vp a, vp b) { return MIX(2, 3, 6, 7); }
inline vf even(vp a, bf16) { return (vf)(a << 16); }
inline vf odd(vp a, bf16) { return (vf)(a & 0xffff0000); }
inline vf odd(vp a, fp16) {  // same computation as `widen`
    vp rest = (a & 0x7fff0000) >> 3;
    vf number = (vf)rest * 0x1p112f, special = (vf)(rest | 0x7f800000);  // infinities and NaN
    return vor(vpick((vi)(rest >= 0x7c00u << 13), special, number), (vf)(a & 0x80000000));
}
inline vf even(vp a, fp16) { return odd(a << 16, fp16()); }
INLINE void spread(const vp* b, vp* a) { memcpy(a, b, sizeof(vp) * W); }
#endif
INLINE void transpose(vp* a) {
    vp b[W];
    UNROLL for (int i = 0; i < W; i += 4) {  // b[i + j] holds rows i to i + 3 at pairs j, j + 4, ...
        vp p = lo32(a[i], a[i + 1]), q = lo32(a[i + 2], a[i + 3]);
        vp r = hi32(a[i], a[i + 1]), s = hi32(a[i + 2], a[i + 3]);
        b[i] = lo64(p, q), b[i + 1] = hi64(p, q), b[i + 2] = lo64(r, s), b[i + 3] = hi64(r, s);
    }
    spread(b, a);
}

}  // namespace
