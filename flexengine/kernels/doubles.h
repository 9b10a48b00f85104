// Vectors of fp64 numbers, for sampling.cpp: exp, sums, comparisons; all else are operators of the compiler's vectors.
#pragma once
#include "simd.h"

namespace {

#if defined(FLEX_AVX512)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#pragma GCC diagnostic ignored "-Wpsabi"  // all functions with vectors are inline
#endif
constexpr double INF = INFINITY;

typedef float floats __attribute__((vector_size(LANES * 4)));
typedef double doubles __attribute__((vector_size(LANES * 8)));
typedef int64_t longs __attribute__((vector_size(LANES * 8)));

template <class V, class X> inline V loaded(const X* p) { V x; memcpy(&x, p, sizeof(x)); return x; }
inline doubles where(longs mask, doubles x) { return (doubles)((longs)x & mask); }
inline double sum(doubles x) {
    for (int half = LANES / 2; half; half /= 2) {
        for (int e = 0; e < half; e++) x[e] += x[e + half];
    }
    return x[0];
}

#if defined(FLEX_AVX512)
// Returns exp(x) for x <= 0, with a relative error below 4e-16: 2 ** (n / 16) * exp(r), where |r| <= log(2) / 32.
inline doubles exp_of(doubles x) {
    alignas(64) static const double POWERS[16] = {
        1.0, 1.0442737824274138, 1.0905077326652577, 1.1387886347566916,
        1.189207115002721, 1.241857812073484, 1.2968395546510096, 1.3542555469368927,
        1.4142135623730951, 1.4768261459394993, 1.5422108254079407, 1.6104903319492543,
        1.681792830507429, 1.7562521603732995, 1.8340080864093424, 1.9152065613971474};
    const __m512d magic = _mm512_set1_pd(0x1.8p52);  // adding it rounds to a whole number, in the low mantissa bits
    const __m512d least = _mm512_max_pd(_mm512_set1_pd(-1e4), (__m512d)x);  // gives 0, as -inf does
    const __m512d shifted = _mm512_fmadd_pd(least, _mm512_set1_pd(16 * 1.4426950408889634), magic);
    const __m512d n = _mm512_sub_pd(shifted, magic);
    __m512d r = _mm512_fnmadd_pd(n, _mm512_set1_pd(0.693147180559663 / 16), least);
    r = _mm512_fnmadd_pd(n, _mm512_set1_pd(2.8235290563031577e-13 / 16), r);
    __m512d y = _mm512_fmadd_pd(r, _mm512_set1_pd(1.0 / 5040), _mm512_set1_pd(1.0 / 720));
    for (double factorial : {120.0, 24.0, 6.0, 2.0, 1.0, 1.0}) y = _mm512_fmadd_pd(y, r, _mm512_set1_pd(1 / factorial));
    const __m512d power = _mm512_permutex2var_pd(
        _mm512_load_pd(POWERS), _mm512_castpd_si512(shifted), _mm512_load_pd(POWERS + 8));
    return (doubles)_mm512_scalef_pd(_mm512_mul_pd(y, power), _mm512_mul_pd(n, _mm512_set1_pd(1.0 / 16)));
}
#else
// Returns exp(x) for x <= 0, with a relative error below 3e-16; 0 below -708, where numbers are no longer normal. The
// polynomial is that of SLEEF's xexp (Boost licence).
inline doubles exp_of(doubles x) {
    const longs normal = x >= -708.0;
    x = where(normal, x);
    const doubles magic = doubles{} + 0x1.8p52;  // adding it rounds to a whole number, kept in the low mantissa bits
    const doubles shifted = x * 1.4426950408889634 + magic, n = shifted - magic;
    const doubles r = (x - n * 0.693147180559663) - n * 2.8235290563031577e-13;
    const doubles r2 = r * r, r4 = r2 * r2;
    const doubles a = (r * 2.08860621107283687536e-09 + 2.51112930892876518611e-08) * r2
                      + (r * 2.75573911234900471893e-07 + 2.75572362911928827629e-06);
    const doubles b = (r * 2.4801587159235472999e-05 + 0.000198412698960509205565) * r2
                      + (r * 0.00138888888889774492208 + 0.00833333333331652721665);
    const doubles c = r * 0.0416666666666665047591 + 0.166666666666666851704;
    const doubles y = ((a * r4 + b) * r2 + c) * (r * r2) + r2 * 0.5 + r + 1.0;
    const longs power = ((longs)shifted + 1023) << 52;
    return where(normal, y * (doubles)power);
}
#endif

// Returns the bits of the numbers from low to high.
inline unsigned within(doubles x, double low, double high) {
#if defined(FLEX_AVX512)
    return _mm512_cmp_pd_mask((__m512d)x, _mm512_set1_pd(low), _CMP_GE_OQ)
           & _mm512_cmp_pd_mask((__m512d)x, _mm512_set1_pd(high), _CMP_LE_OQ);
#else
    const longs in = (x >= low) & (x <= high);
    unsigned bits = 0;
    for (int e = 0; e < LANES; e++) bits |= unsigned(in[e] & 1) << e;
    return bits;
#endif
}

}  // namespace
