// Dot products of bytes, u8 by s8 with 32-bit sums, for quantized_gemm.h: vectors of quads, four bytes that one
// instruction multiplies.
#pragma once
#include "simd.h"

namespace {

// `dot` multiplies u8 by s8, a quad of each, and adds the products to a 32-bit sum. The instruction (vpdpbusd) is inline
// assembly: through its intrinsic GCC 12 copies each sum before and after, which halves the speed. CPUs without it
// multiply two neighbours at once: `pairs` adds their sum to a 16-bit sum, for codes of at most 4 bits, whose sums fit
// as long as `dot_group` adds them, and `pairs_join` widens it. The addition in `pairs` is inline assembly, too: GCC 12
// else adds several products first, and keeps the sums in memory.
#if (defined(FLEX_AVX512) && defined(__AVX512VNNI__)) || (defined(FLEX_AVX2) && defined(__AVXVNNI__))
#define FLEX_VNNI 1
#elif defined(FLEX_AVX512) || defined(FLEX_AVX2)
#define FLEX_PAIRS 1
#endif

// What is added to bytes of x for products with block types (blocks.cpp), where w is the signed factor of `dot`.
#if defined(FLEX_PAIRS)
constexpr uint32_t FLIP = 0;
#else
constexpr uint32_t FLIP = 0x80808080;
#endif

#if defined(FLEX_AVX512)
inline vp qload(const void* p) { return _mm512_loadu_si512(p); }
inline vp qset(int32_t x) { return _mm512_set1_epi32(x); }
inline void qstore(void* p, vp a) { _mm512_storeu_si512(p, a); }
inline vp qleft(vp a, int by) { return _mm512_slli_epi32(a, unsigned(by)); }
inline vp qright(vp a, int by) { return _mm512_srli_epi32(a, unsigned(by)); }
inline vp qand(vp a, uint32_t m) { return _mm512_and_si512(a, _mm512_set1_epi32(int(m))); }
inline vp qor(vp a, vp b) { return _mm512_or_si512(a, b); }
inline vf qfloat(vp a) { return _mm512_cvtepi32_ps(a); }
inline vp qtop(vp a, vp b) { return _mm512_max_epi32(a, b); }
inline int32_t qtop(vp a) { return _mm512_reduce_max_epi32(a); }
inline void qbytes(int8_t* p, vf a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a))); }
inline vp dot(vp sum, vp u, vp x) {
#if defined(FLEX_VNNI)
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(x));
    return sum;
#else
    vp even = _mm512_madd_epi16(qand(u, 0x00ff00ff), _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
    vp odd = _mm512_madd_epi16(_mm512_srli_epi16(u, 8), _mm512_srai_epi16(x, 8));
    return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
#endif
}
inline vp pairs(vp sum, vp u, vp x) {
    asm("vpaddw %1, %0, %0" : "+v"(sum) : "v"(_mm512_maddubs_epi16(u, x)));
    return sum;
}
inline vp pairs_join(vp sum, vp a) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, _mm512_set1_epi16(1))); }
#elif defined(FLEX_AVX2)
inline vp qload(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline vp qset(int32_t x) { return _mm256_set1_epi32(x); }
inline void qstore(void* p, vp a) { _mm256_storeu_si256((__m256i*)p, a); }
inline vp qleft(vp a, int by) { return _mm256_slli_epi32(a, by); }
inline vp qright(vp a, int by) { return _mm256_srli_epi32(a, by); }
inline vp qand(vp a, uint32_t m) { return _mm256_and_si256(a, _mm256_set1_epi32(int(m))); }
inline vp qor(vp a, vp b) { return _mm256_or_si256(a, b); }
inline vf qfloat(vp a) { return _mm256_cvtepi32_ps(a); }
inline vp qtop(vp a, vp b) { return _mm256_max_epi32(a, b); }
inline int32_t qtop(vp a) {
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
inline void qbytes(int8_t* p, vf a) {
    const __m256i whole = _mm256_cvtps_epi32(a);
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(half, half));
}
inline vp dot(vp sum, vp u, vp x) {
#if defined(FLEX_VNNI)
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(u), "x"(x));
    return sum;
#else
    vp even = _mm256_madd_epi16(qand(u, 0x00ff00ff), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    vp odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
#endif
}
inline vp pairs(vp sum, vp u, vp x) {
    asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(_mm256_maddubs_epi16(u, x)));
    return sum;
}
inline vp pairs_join(vp sum, vp a) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, _mm256_set1_epi16(1))); }
#else
inline vp qload(const void* p) { vp a; memcpy(&a, p, sizeof a); return a; }
inline vp qset(int32_t x) { const uint32_t u = uint32_t(x); return vp{u, u, u, u}; }
inline void qstore(void* p, vp a) { memcpy(p, &a, sizeof a); }
inline vp qleft(vp a, int by) { return a << by; }
inline vp qright(vp a, int by) { return a >> by; }
inline vp qand(vp a, uint32_t m) { return a & m; }
inline vp qor(vp a, vp b) { return a | b; }
inline vf qfloat(vp a) { return __builtin_convertvector((vi)a, vf); }
inline vp qtop(vp a, vp b) { return (vp)vpick((vi)a > (vi)b, (vf)a, (vf)b); }
inline int32_t qtop(vp a) {
    int32_t top = int32_t(a[0]);
    for (int e = 1; e < W; e++) top = int32_t(a[e]) > top ? int32_t(a[e]) : top;
    return top;
}
inline void qbytes(int8_t* p, vf a) { for (int e = 0; e < W; e++) p[e] = int8_t(a[e]); }
inline vp dot(vp sum, vp u, vp x) {
    for (int e = 0; e < 4; e++) sum += (u >> (8 * e) & 255) * (vp)((vi)(x << (24 - 8 * e)) >> 24);
    return sum;
}
#endif

}  // namespace
