// Codes of a KV cache in 8, 4 or 2 bits, as codec/cache.py lays them out: widening, encoding and decoding of rows.
//
// Index legend: r group of a row, e which of the 8 / BITS codes in a byte, i byte of a group. Element of a group:
// i + e * stride, where a group of G elements has stride = G * BITS / 8 bytes.
#pragma once
#include <type_traits>

#include "convert.h"

namespace {

enum Codes : int32_t { CODES8 = 128, CODES4 = 64, CODES2 = 32 };  // beside Dtype: what a pool holds

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));

// Eight bytes as numbers, and numbers below 256 as bytes. The compiler's own conversions go through memory.
#if defined(FLEX_AVX512) || defined(FLEX_AVX2)
inline v8i load_bytes(const uint8_t* p) { return (v8i)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline v8 to_float(v8i x) { return (v8)_mm256_cvtepi32_ps((__m256i)x); }
inline v8i to_int(v8 x) { return (v8i)_mm256_cvttps_epi32((__m256)x); }
inline void store_bytes(uint8_t* p, v8i x) {
    __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(halves, halves));
}
#else
inline v8i load_bytes(const uint8_t* p) { return v8i{p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]}; }
inline v8 to_float(v8i x) { return __builtin_convertvector(x, v8); }
inline v8i to_int(v8 x) { return __builtin_convertvector(x, v8i); }
inline void store_bytes(uint8_t* p, v8i x) { for (int l = 0; l < 8; l++) p[l] = uint8_t(x[l]); }
#endif

// ---------------------------------------------------------------- widening

// W neighbouring bytes, each in a lane of its own; code<BITS, e> of every lane as a float.
#if defined(FLEX_AVX512)
typedef __m512i vcodes;
inline vcodes load_codes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
template <int BITS, int e> inline vf code(vcodes x) {
    if (BITS == 8) return _mm512_cvtepi32_ps(x);
    constexpr int m = BITS == 2 ? 3 : 15;  // looked up by the lowest four bits: that masks and converts at once
    const vf table = _mm512_setr_ps(0, 1, 2, 3, 4 & m, 5 & m, 6 & m, 7 & m, 8 & m, 9 & m, 10 & m, 11 & m, 12 & m,
                                    13 & m, 14 & m, 15 & m);
    return _mm512_permutexvar_ps(e ? _mm512_srli_epi32(x, e * BITS) : x, table);
}
#elif defined(FLEX_AVX2)
typedef __m256i vcodes;
inline vcodes load_codes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
template <int BITS, int e> inline vf code(vcodes x) {
    if (e) x = _mm256_srli_epi32(x, e * BITS);
    if (e + 1 < 8 / BITS) x = _mm256_and_si256(x, _mm256_set1_epi32((1 << BITS) - 1));
    return _mm256_cvtepi32_ps(x);
}
#else
typedef vi vcodes;
inline vcodes load_codes(const uint8_t* p) { return vi{p[0], p[1], p[2], p[3]}; }
template <int BITS, int e> inline vf code(vcodes x) {
    constexpr int32_t mask = (1 << BITS) - 1;
    x = x >> (e * BITS) & vi{mask, mask, mask, mask};
    return vf{float(x[0]), float(x[1]), float(x[2]), float(x[3])};
}
#endif

// f(std::integral_constant<int, e>) for e = 0 .. 8 / BITS - 1.
template <int BITS, int e = 0, class F> inline void for_codes(F f) {
    f(std::integral_constant<int, e>());
    if constexpr ((e + 1) * BITS < 8) for_codes<BITS, e + 1>(f);
}

// ---------------------------------------------------------------- one row

// minimum + code * scale, rounded as the reference does. scale, minimum: fp32, `apart` floats from group to group.
template <int BITS, int G>
__attribute__((noinline)) void decode_row(const uint8_t* codes, const float* scale, const float* minimum,
                                          int64_t apart, int64_t groups, float* to) {
    constexpr int stride = G * BITS / 8;
    for (int64_t r = 0; r < groups; r++, codes += stride, to += G) {
        const float step = scale[r * apart], low = minimum[r * apart];
        for_codes<BITS>([&](auto e) {
            for (int i = 0; i + 8 <= stride; i += 8) {
                const v8i code = load_bytes(codes + i) >> (e * BITS) & ((1 << BITS) - 1);
                const v8 x = low + to_float(code) * step;
                memcpy(to + e * stride + i, &x, sizeof x);
            }
            for (int i = stride / 8 * 8; i < stride; i++)
                to[e * stride + i] = low + float(codes[i] >> (e * BITS) & ((1 << BITS) - 1)) * step;
        });
    }
}

// Codes of a group of 8 * n numbers into at[], as floats; returns the squared error.
template <int BITS> inline float code_group(const v8* x, int n, float scale, float minimum, v8* at) {
    const v8 zero = {}, most = zero + float((1 << BITS) - 1), magic = zero + 12582912.f;  // adding it rounds to even
    const float step = scale > 0 ? scale : INFINITY;  // equal numbers: all codes are 0
    v8 error = zero;
    for (int i = 0; i < n; i++) {
        v8 y = (x[i] - minimum) / step;
        y = y > zero ? y : zero;
        y = y < most ? y : most;
        at[i] = (y + magic) - magic;
        v8 off = at[i] * scale + minimum - x[i];
        error += off * off;
    }
    return ((error[0] + error[4]) + (error[2] + error[6])) + ((error[1] + error[5]) + (error[3] + error[7]));
}

// x [groups * size] to codes, scales and minima; the latter two `apart` from group to group. Of the shares of a group's
// range it keeps the one with the least squared error. What is not finite or beyond fp16 turns its group into NaN.
template <int BITS>
__attribute__((noinline)) void encode_row(const float* x, int64_t size, int64_t groups, uint8_t* codes, fp16* scales,
                                          fp16* minima, int64_t apart) {
    constexpr int shares = BITS < 8 ? 4 : 1;
    constexpr float cut[4] = {0.f, float((1 - 0.925) / 2), float((1 - 0.85) / 2), float((1 - 0.775) / 2)};
    const int n = int(size / 8), stride = int(size) * BITS / 8;
    for (int64_t r = 0; r < groups; r++, x += size, codes += stride) {
        v8 group[8], tried[8], kept[8] = {};
        memcpy(group, x, size_t(size) * 4);
        v8 low = group[0], high = group[0];
        v8i fits = low == low;
        for (int i = 0; i < n; i++) {
            low = group[i] < low ? group[i] : low, high = group[i] > high ? group[i] : high;
            fits &= (group[i] <= 65504.f) & (group[i] >= -65504.f);
        }
        float bottom = low[0], top = high[0], best = 0;
        int32_t good = fits[0];
        for (int l = 1; l < 8; l++) {
            bottom = low[l] < bottom ? low[l] : bottom, top = high[l] > top ? high[l] : top;
            good &= fits[l];
        }
        fp16 scale = {0x7e00}, minimum = {0x7e00};
        for (int c = 0; good && c < shares; c++) {
            const float width = top - bottom, start = bottom + cut[c] * width, end = top - cut[c] * width;
            const fp16 base = narrow<fp16>(start);
            const float above = end - widen(base);
            const fp16 step = narrow<fp16>((above > 0 ? above : 0.f) / float((1 << BITS) - 1));
            const float error = code_group<BITS>(group, n, widen(step), widen(base), tried);
            if (c && !(error < best)) continue;
            best = error, scale = step, minimum = base;
            memcpy(kept, tried, sizeof kept);
        }
        scales[r * apart] = scale, minima[r * apart] = minimum;
        for (int i = 0; i + 8 <= stride; i += 8) {
            v8i whole = {};
            for_codes<BITS>([&](auto e) { whole |= to_int(kept[(e * stride + i) / 8]) << (e * BITS); });
            store_bytes(codes + i, whole);
        }
        if (stride % 8 == 0) continue;
        float one[64];
        memcpy(one, kept, sizeof one);
        for (int i = stride / 8 * 8; i < stride; i++) {
            int32_t byte = 0;
            for_codes<BITS>([&](auto e) { byte |= int32_t(one[e * stride + i]) << (e * BITS); });
            codes[i] = uint8_t(byte);
        }
    }
}

// Calls f(bits, group) with a pool's bits and group as constants. dtype: as in Decode.
template <class F> inline void with_form(int32_t dtype, int64_t group, F f) {
    auto second = [&](auto bits) {
        if (group == 64) f(bits, std::integral_constant<int, 64>());
        if (group == 32) f(bits, std::integral_constant<int, 32>());
        if (group == 16) f(bits, std::integral_constant<int, 16>());
        if (group == 8) f(bits, std::integral_constant<int, 8>());
    };
    if (dtype == CODES8) second(std::integral_constant<int, 8>());
    if (dtype == CODES4) second(std::integral_constant<int, 4>());
    if (dtype == CODES2) second(std::integral_constant<int, 2>());
}

// Where things lie in a pool of codes, in bytes.
struct Panels {
    int64_t row, scales, minima, panel, value;  // value: from a head's K to its V
    Panels(int64_t bits, int64_t kv_heads, int64_t page_tokens, int64_t dim, int64_t group)
        : row(dim * bits / 8), scales(page_tokens * row), minima(scales + dim / group * page_tokens * 2),
          panel(minima + dim / group * page_tokens * 2), value(kv_heads * panel) {}
};

}  // namespace
