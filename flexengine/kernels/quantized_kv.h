// Rows of a quantized KV cache in 8, 4 or 2 bits, in the layout of codec/cache.py: their encoding, decoding and widening.
// Encoded records of neurons (neurons.h) have the same codes.
//
// Index legend: r group of a row, e number of the code in its byte (of 8 / BITS codes), i byte of a group. The element
// of the group is i + e * stride, where a group of G elements has stride = G * BITS / 8 bytes.
#pragma once
#include <type_traits>

#include "convert.h"

namespace {

enum Codes : int32_t { CODES8 = 128, CODES4 = 64, CODES2 = 32 };  // formats of a pool, in addition to enum Dtype

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));

// Eight bytes to integers and back; sum and minimum of eight floats; float to half. These use intrinsics, as the
// compiler's own code for them goes through memory.
#if defined(FLEX_AVX512) || defined(FLEX_AVX2)
inline v8i load_bytes(const uint8_t* p) { return (v8i)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline v8 to_float(v8i x) { return (v8)_mm256_cvtepi32_ps((__m256i)x); }
inline v8i to_int(v8 x) { return (v8i)_mm256_cvttps_epi32((__m256)x); }
inline void store_bytes(uint8_t* p, v8i x) {
    __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(halves, halves));
}
inline float total(v8 x) {  // ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7))
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline float least(v8 x) {
    __m128 four = _mm_min_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    four = _mm_min_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_min_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline fp16 to_half(float x) { return {uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))}; }
#else
inline v8i load_bytes(const uint8_t* p) { return v8i{p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]}; }
inline v8 to_float(v8i x) { return __builtin_convertvector(x, v8); }
inline v8i to_int(v8 x) { return __builtin_convertvector(x, v8i); }
inline void store_bytes(uint8_t* p, v8i x) { for (int l = 0; l < 8; l++) p[l] = uint8_t(x[l]); }
inline float total(v8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }
inline float least(v8 x) {
    float least = x[0];
    for (int l = 1; l < 8; l++) least = x[l] < least ? x[l] : least;
    return least;
}
inline fp16 to_half(float x) { return narrow<fp16>(x); }
#endif

// ---------------------------------------------------------------- widening

// vcodes holds W neighbouring bytes, one per lane. code<BITS, e> is the e-th code of every lane as a float, and
// scaled<BITS, e> this code times the step that multiples<BITS>(step) was made for.
#if defined(FLEX_AVX512)
typedef __m512i vcodes;
inline vcodes load_codes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline vcodes shifted(vcodes x, int by) { return _mm512_srli_epi32(x, unsigned(by)); }
inline vcodes masked(vcodes x, int m) { return _mm512_and_si512(x, _mm512_set1_epi32(m)); }
inline vf number(vcodes x) { return _mm512_cvtepi32_ps(x); }
#elif defined(FLEX_AVX2)
typedef __m256i vcodes;
inline vcodes load_codes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline vcodes shifted(vcodes x, int by) { return _mm256_srli_epi32(x, by); }
inline vcodes masked(vcodes x, int m) { return _mm256_and_si256(x, _mm256_set1_epi32(m)); }
inline vf number(vcodes x) { return _mm256_cvtepi32_ps(x); }
#else
typedef vi vcodes;
inline vcodes load_codes(const uint8_t* p) { return vi{p[0], p[1], p[2], p[3]}; }
inline vcodes shifted(vcodes x, int by) { return x >> by; }
inline vcodes masked(vcodes x, int m) { return x & vi{m, m, m, m}; }
inline vf number(vcodes x) { return vf{float(x[0]), float(x[1]), float(x[2]), float(x[3])}; }
#endif

#if defined(FLEX_AVX512)  // the lowest four bits select from a table, which masks and converts in one instruction
template <int BITS> inline vf multiples(float step) {
    constexpr int m = BITS == 2 ? 3 : 15;
    const vf table = _mm512_setr_ps(0, 1, 2, 3, 4 & m, 5 & m, 6 & m, 7 & m, 8 & m, 9 & m, 10 & m, 11 & m, 12 & m,
                                    13 & m, 14 & m, 15 & m);
    return BITS == 8 ? vset(step) : vmul(table, vset(step));
}
template <int BITS, int e> inline vf scaled(vcodes x, vf multiples) {
    if (BITS == 8) return vmul(number(x), multiples);
    return _mm512_permutexvar_ps(e ? shifted(x, e * BITS) : x, multiples);
}
template <int BITS, int e> inline vf code(vcodes x) {
    return BITS == 8 ? number(x) : scaled<BITS, e>(x, multiples<BITS>(1.f));
}
#else
template <int BITS> inline vf multiples(float step) { return vset(step); }
template <int BITS, int e> inline vf code(vcodes x) {
    if (e) x = shifted(x, e * BITS);
    return number(e + 1 < 8 / BITS ? masked(x, (1 << BITS) - 1) : x);
}
template <int BITS, int e> inline vf scaled(vcodes x, vf step) { return vmul(code<BITS, e>(x), step); }
#endif

// Calls f(std::integral_constant<int, e>) for e = 0 .. 8 / BITS - 1.
template <int BITS, int e = 0, class F> inline void for_codes(F f) {
    f(std::integral_constant<int, e>());
    if constexpr ((e + 1) * BITS < 8) for_codes<BITS, e + 1>(f);
}

// ---------------------------------------------------------------- one row

// Decodes a row: minimum + code * scale, rounded as in the reference kernels. scale, minimum: fp32, `apart` floats from
// one group to the next.
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

// Writes the codes of a group of 8 * N numbers into at[], as floats. Returns the squared error.
template <int BITS, int N> inline float code_group(const v8* x, float scale, float minimum, v8* at) {
    const v8 zero = {}, most = zero + float((1 << BITS) - 1), magic = zero + 12582912.f;  // adding it rounds to even
    const float step = scale > 0 ? scale : INFINITY;  // for equal numbers, all codes are 0
    v8 error = zero;
    for (int i = 0; i < N; i++) {
        v8 y = (x[i] - minimum) / step;
        y = y > zero ? y : zero;
        y = y < most ? y : most;
        at[i] = (y + magic) - magic;
        v8 off = at[i] * scale + minimum - x[i];
        error += off * off;
    }
    return total(error);
}

// Encodes x [groups * G] to codes, scales and minima; scales and minima are `apart` elements from one group to the
// next. Of several shares of a group's range, the one with the least squared error is used. A number that is not finite
// or beyond fp16 sets scale and minimum of its group to NaN.
template <int BITS, int G>
__attribute__((noinline)) void encode_row(const float* x, int64_t groups, uint8_t* codes, fp16* scales, fp16* minima,
                                          int64_t apart) {
    constexpr int N = G / 8, stride = G * BITS / 8, shares = BITS < 8 ? 4 : 1;
    constexpr float cut[4] = {0.f, float((1 - 0.925) / 2), float((1 - 0.85) / 2), float((1 - 0.775) / 2)};
    for (int64_t r = 0; r < groups; r++, x += G, codes += stride) {
        v8 group[N], at[shares][N] = {};
        memcpy(group, x, sizeof group);
        v8 low = group[0], high = group[0];
        v8i bad = low != low;
        for (int i = 0; i < N; i++) {
            low = group[i] < low ? group[i] : low, high = group[i] > high ? group[i] : high;
            bad |= ~((group[i] <= 65504.f) & (group[i] >= -65504.f));
        }
        const float bottom = least(low), top = -least(-high);
        const bool good = total((v8)(bad & 0x3f800000)) == 0;
        float best = 0;
        fp16 scale = {0x7e00}, minimum = {0x7e00};
        int kept = 0;  // number of the best share, found without branches, which would often be mispredicted
        for (int c = 0; good && c < shares; c++) {
            const float width = top - bottom, start = bottom + cut[c] * width, end = top - cut[c] * width;
            const fp16 base = to_half(start);
            const float above = end - widen(base);
            const fp16 step = to_half((above > 0 ? above : 0.f) / float((1 << BITS) - 1));
            const float error = code_group<BITS, N>(group, widen(step), widen(base), at[c]);
            const bool better = !c | (error < best);
            best = better ? error : best, kept = better ? c : kept;
            scale.bits = better ? step.bits : scale.bits, minimum.bits = better ? base.bits : minimum.bits;
        }
        scales[r * apart] = scale, minima[r * apart] = minimum;
        for (int i = 0; i + 8 <= stride; i += 8) {
            v8i whole = {};
            for_codes<BITS>([&](auto e) { whole |= to_int(at[kept][(e * stride + i) / 8]) << (e * BITS); });
            store_bytes(codes + i, whole);
        }
        if (stride % 8 == 0) continue;
        float one[G];
        memcpy(one, at[kept], sizeof one);
        for (int i = stride / 8 * 8; i < stride; i++) {
            int32_t byte = 0;
            for_codes<BITS>([&](auto e) { byte |= int32_t(one[e * stride + i]) << (e * BITS); });
            codes[i] = uint8_t(byte);
        }
    }
}

// Calls f(bits, group) with the bits and the group size of a pool as constants. dtype: as in Decode.
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

// Sizes and offsets in a pool of codes, in bytes. row: codes of a token; scales, minima: offsets in a panel; panel:
// size of a panel; value: distance from a head's K to its V.
struct Panels {
    int64_t row, scales, minima, panel, value;
    Panels(int64_t bits, int64_t kv_heads, int64_t page_tokens, int64_t dim, int64_t group)
        : row(dim * bits / 8), scales(page_tokens * row), minima(scales + dim / group * page_tokens * 2),
          panel(minima + dim / group * page_tokens * 2), value(kv_heads * panel) {}
};

}  // namespace
