// Vectors of W floats in a register, for AVX-512, AVX2 and, with the compiler's own vector type, any other CPU; loads
// and stores of 16-bit numbers; exp and tanh. All other code is written once, with these functions. -DFLEX_PORTABLE
// selects the compiler's vector type.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if !defined(FLEX_PORTABLE) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define FLEX_AVX512 1
#elif !defined(FLEX_PORTABLE) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FLEX_AVX2 1
#endif
#if defined(FLEX_AVX512) || defined(FLEX_AVX2)
#include <immintrin.h>
#endif

// Exports the size of a struct that Python fills, for a check when the library is loaded.
#define FLEX_SIZE(name, Struct) \
    extern "C" int64_t flex_##name##_size() { return int64_t(sizeof(Struct)); }

namespace {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };
enum Dtype : int32_t { FP32 = 0, BF16 = 1, FP16 = 2 };

// ---------------------------------------------------------------- one number

inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return float_of(uint32_t(x.bits) << 16); }
inline float widen(fp16 x) {
    uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff, quiet = rest > 0x7c00 ? 0x400000 : 0;
    if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | ((rest & 0x3ff) << 13) | quiet);
    return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));  // moves the exponent bias, subnormals included
}

template <class T> inline T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline bf16 narrow<bf16>(float x) {
    uint32_t u = bits_of(x);
    if ((u & 0x7fffffff) > 0x7f800000) return {uint16_t((u >> 16) | 0x40)};
    return {uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
template <> inline fp16 narrow<fp16>(float x) {
    uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return {uint16_t(sign | 0x7e00 | ((rest >> 13) & 0x3ff))};
    if (rest >= 0x477ff000) return {uint16_t(sign | 0x7c00)};              // rounds to infinity
    if (rest < 0x38800000) {                                               // subnormal: adding 0.5 rounds at bit 2^-24
        return {uint16_t(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000))};
    }
    rest += 0xfff + ((rest >> 13) & 1);
    return {uint16_t(sign | ((rest - 0x38000000) >> 13))};
}

// ---------------------------------------------------------------- W numbers

#if defined(FLEX_AVX512)
constexpr int W = 16, REGISTERS = 32;
typedef __m512 vf;
typedef __m512i vp;
inline vf vset(float x) { return _mm512_set1_ps(x); }
inline vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }  // b if either is NaN
inline vf vshift23(vf a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23)); }
inline vf vand(vf a, uint32_t m) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(int(m))));
}
inline vf vor(vf a, vf b) {
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
inline vf vbelow(vf a, vf b, vf yes, vf no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
inline float vsum(vf a) { return _mm512_reduce_add_ps(a); }
inline vf vload(const float* p) { return _mm512_loadu_ps(p); }
inline vf vload(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline vf vload(const fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline __m256i vnarrow(vf a, bf16) {
    __m512i u = _mm512_castps_si512(a), top = _mm512_srli_epi32(u, 16);
    __m512i bias = _mm512_add_epi32(_mm512_and_si512(top, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
    __m512i near = _mm512_srli_epi32(_mm512_add_epi32(u, bias), 16);
    near = _mm512_mask_or_epi32(near, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), top, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(near);
}
inline __m256i vnarrow(vf a, fp16) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void vstore(float* p, vf a) { _mm512_storeu_ps(p, a); }
template <class T> inline void vstore(T* p, vf a) { _mm256_storeu_si256((__m256i*)p, vnarrow(a, T())); }
inline void vstream(float* p, vf a) { _mm512_stream_ps(p, a); }
template <class T> inline void vstream(T* p, vf a) { _mm256_stream_si256((__m256i*)p, vnarrow(a, T())); }
inline __m256 vfold(vf a) {
    return _mm256_add_ps(_mm512_castps512_ps256(a), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)));
}
#elif defined(FLEX_AVX2)
constexpr int W = 8, REGISTERS = 16;
typedef __m256 vf;
typedef __m256i vp;
inline vf vset(float x) { return _mm256_set1_ps(x); }
inline vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf vshift23(vf a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23)); }
inline vf vand(vf a, uint32_t m) { return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(int(m)))); }
inline vf vor(vf a, vf b) { return _mm256_or_ps(a, b); }
inline vf vbelow(vf a, vf b, vf yes, vf no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline float vsum(vf a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline vf vload(const float* p) { return _mm256_loadu_ps(p); }
inline vf vload(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline vf vload(const fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline __m128i vnarrow(vf a, bf16) {
    __m256i u = _mm256_castps_si256(a), top = _mm256_srli_epi32(u, 16);
    __m256i bias = _mm256_add_epi32(_mm256_and_si256(top, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
    __m256i near = _mm256_srli_epi32(_mm256_add_epi32(u, bias), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    near = _mm256_blendv_epi8(near, _mm256_or_si256(top, _mm256_set1_epi32(0x40)), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(near), _mm256_extracti128_si256(near, 1));
}
inline __m128i vnarrow(vf a, fp16) { return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void vstore(float* p, vf a) { _mm256_storeu_ps(p, a); }
template <class T> inline void vstore(T* p, vf a) { _mm_storeu_si128((__m128i*)p, vnarrow(a, T())); }
inline void vstream(float* p, vf a) { _mm256_stream_ps(p, a); }
template <class T> inline void vstream(T* p, vf a) { _mm_stream_si128((__m128i*)p, vnarrow(a, T())); }
inline __m256 vfold(vf a) { return a; }
#else
constexpr int W = 4, REGISTERS = 16;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vp __attribute__((vector_size(16)));
inline vf vset(float x) { return vf{x, x, x, x}; }
inline vf vadd(vf a, vf b) { return a + b; }
inline vf vsub(vf a, vf b) { return a - b; }
inline vf vmul(vf a, vf b) { return a * b; }
inline vf vdiv(vf a, vf b) { return a / b; }
inline vf vfma(vf a, vf b, vf c) { return a * b + c; }
inline vf vpick(vi m, vf yes, vf no) { return (vf)(((vi)yes & m) | ((vi)no & ~m)); }
inline vf vmax(vf a, vf b) { return vpick((vi)(a > b), a, b); }
inline vf vshift23(vf a) { return (vf)((vi)a << 23); }
inline vf vand(vf a, uint32_t m) { int32_t x = int32_t(m); return (vf)((vi)a & vi{x, x, x, x}); }
inline vf vor(vf a, vf b) { return (vf)((vi)a | (vi)b); }
inline vf vbelow(vf a, vf b, vf yes, vf no) { return vpick((vi)(a < b), yes, no); }
inline float vsum(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }
template <class T> inline vf vload(const T* p) { return vf{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
template <class T> inline void vstore(T* p, vf a) { for (int e = 0; e < W; e++) p[e] = narrow<T>(a[e]); }
template <class T> inline void vstream(T* p, vf a) { vstore(p, a); }
#endif

// Returns x, kept in a register if it is a factor of several products; compilers would otherwise load it for each.
template <int PRODUCTS> inline vf vheld(vf x) {
    if (PRODUCTS == 1) return x;
#if defined(FLEX_AVX512)
    asm("" : "+v"(x));
#elif defined(FLEX_AVX2)
    asm("" : "+x"(x));
#endif
    return x;
}

// Combines the lanes of each of W vectors by f, in the same order for each of them: element e of the result is that of
// a[e].
template <class F> inline vf vfolded(const vf* a, F f) {
#if defined(FLEX_AVX512)
    auto four = [&](const vf* x) {  // element e of every quarter is this quarter of x[e], combined
        vf ab = f(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
        vf cd = f(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
        return f(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    };
    auto two = [&](vf x, vf y) {  // combines neighbouring quarters
        return f(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
    };
    return two(two(four(a), four(a + 4)), two(four(a + 8), four(a + 12)));
#elif defined(FLEX_AVX2)
    auto four = [&](const vf* x) {
        vf ab = f(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
        vf cd = f(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
        return f(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    };
    vf x = four(a), y = four(a + 4);
    return f(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
#else
    vf all[W];
    for (int e = 0; e < W; e++) {
        const vf x = f(a[e], vf{a[e][2], a[e][3], a[e][0], a[e][1]});
        all[e] = f(x, vf{x[1], x[0], x[3], x[2]});
    }
    return vf{all[0][0], all[1][0], all[2][0], all[3][0]};
#endif
}
inline vf vsums(const vf* a) { return vfolded(a, [](vf x, vf y) { return vadd(x, y); }); }
inline vf vtops(const vf* a) { return vfolded(a, [](vf x, vf y) { return vmax(x, y); }); }

// Loads the first n < W numbers; the others are zero.
template <class T> inline vf vload_part(const T* p, int n) {
    float x[W] = {};
    for (int e = 0; e < n; e++) x[e] = widen(p[e]);
    return vload(x);
}
#if defined(FLEX_AVX512)
inline vf vload_part(const float* p, int n) { return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p); }
inline vf vload_part(const bf16* p, int n) {
    __m256i x = _mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
#endif

// Returns exp(x) for x <= 0, with a relative error below 1.2e-7 (Cephes' expf polynomial); 1.2e-38 for x < -87.3; NaN
// for NaN.
inline vf vexp(vf x) {
    x = vmax(vset(-87.3f), x);
    const vf magic = vset(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number, kept in the low mantissa bits
    vf shifted = vfma(x, vset(1.44269504f), magic), n = vsub(shifted, magic);
    vf r = vfma(n, vset(-0.693359375f), x);
    r = vfma(n, vset(2.12194440e-4f), r);
    vf y = vfma(vset(1.9875691500e-4f), r, vset(1.3981999507e-3f));
    y = vfma(y, r, vset(8.3334519073e-3f));
    y = vfma(y, r, vset(4.1665795894e-2f));
    y = vfma(y, r, vset(1.6666665459e-1f));
    y = vfma(y, r, vset(5.0000001201e-1f));
    y = vadd(vfma(vmul(y, r), r, r), vset(1.f));
    return vmul(y, vshift23(vadd(n, vset(12582912.f + 127.f))));
}

// Returns 2^x for x <= 0, with a relative error below 1.2e-7, or, if not EXACT, 8e-5; at most 1.2e-38 for x < -126; NaN for
// NaN. Terms are added in pairs, as that takes half the time of one after the other.
template <bool EXACT> inline vf vexp2(vf x) {
#if defined(FLEX_AVX512)
    const vf n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vf r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);  // x - n; 0 for -inf
#else
    x = vmax(vset(-126.f), x);
    const vf shifted = vadd(x, vset(12582912.f)), n = vsub(shifted, vset(12582912.f)), r = vsub(x, n);  // as in vexp
#endif
    const vf square = vmul(r, r);
    vf y;
    if (EXACT) {
        const vf low = vfma(r, vset(6.9314720574e-1f), vset(1.f));
        const vf middle = vfma(r, vset(5.5503287771e-2f), vset(2.4022646890e-1f));
        y = vfma(r, vset(1.3399931183e-3f), vset(9.6184889739e-3f));
        y = vfma(square, vset(1.5345807499e-4f), y);
        y = vfma(vfma(y, square, middle), square, low);
    } else {
        const vf low = vfma(r, vset(6.9326099384e-1f), vset(9.9992807397e-01f));
        y = vfma(vfma(r, vset(5.5171623653e-2f), vset(2.4261111871e-1f)), square, low);
    }
#if defined(FLEX_AVX512)
    return _mm512_scalef_ps(y, n);
#else
    return vmul(y, vshift23(vadd(n, vset(12582912.f + 127.f))));
#endif
}

inline vf vtanh(vf x) {
    vf a = vand(x, 0x7fffffff), z = vmul(x, x);
    vf e = vexp(vmul(a, vset(-2.f)));
    vf far = vor(vdiv(vsub(vset(1.f), e), vadd(vset(1.f), e)), vand(x, 0x80000000));
    vf y = vfma(vset(-5.70498872745e-3f), z, vset(2.06390887954e-2f));
    y = vfma(y, z, vset(-5.37397155531e-2f));
    y = vfma(y, z, vset(1.33314422036e-1f));
    y = vfma(y, z, vset(-3.33332819422e-1f));
    vf close = vfma(vmul(y, z), x, x);  // for small x, where 1 - e loses digits
    return vbelow(a, vset(0.625f), close, far);
}

int64_t size_of(int32_t dtype) { return dtype == FP32 ? 4 : 2; }

// Calls f(From(), To()) for a pair of dtype codes.
template <class F> inline void with_dtypes(int32_t from, int32_t to, F f) {
    auto second = [&](auto x) {
        if (to == FP32) f(x, float());
        if (to == BF16) f(x, bf16());
        if (to == FP16) f(x, fp16());
    };
    if (from == FP32) second(float());
    if (from == BF16) second(bf16());
    if (from == FP16) second(fp16());
}

}  // namespace
