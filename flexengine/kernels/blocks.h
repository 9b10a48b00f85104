// Block types of GGUF files (codec/gguf_blocks.py), decoded for W rows side by side: every lane has a row's block.
#pragma once
#include <type_traits>

#include "int8_dot.h"
#include "transpose.h"

namespace {

// Numbers that codes stand for. BITS: of a code. at(i): the number of code i, for as many i as a table has.
template <int BITS_, int LESS_ = 0> struct Whole {
    static constexpr int BITS = BITS_, LESS = LESS_;
    static constexpr int at(int i) { return i % (1 << BITS) - LESS; }
};
struct Signed { static constexpr int BITS = 8; };
struct Iq4 {
    static constexpr int BITS = 4;
    static constexpr int at(int i) {
        constexpr int values[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        return values[i % 16];
    }
};
struct Fp4 {  // twice the values of E2M1
    static constexpr int BITS = 4;
    static constexpr int at(int i) {
        constexpr int values[] = {0, 1, 2, 3, 4, 6, 8, 12};
        return i & 8 ? -values[i % 8] : values[i % 8];
    }
};
template <class T> struct Table {
    alignas(64) float at[32];
    alignas(16) int8_t bytes[16];
    constexpr Table() : at(), bytes() {
        for (int i = 0; i < 32; i++) at[i] = float(T::at(i));
        for (int i = 0; i < 16; i++) bytes[i] = int8_t(T::at(i));
    }
};
template <class T> constexpr Table<T> TABLE;

// qsign: bytes of x, with the opposite sign where those of w are negative; any where those of w are zero.
#if defined(FLEX_PAIRS) && defined(FLEX_AVX512)
INLINE vp qabs(vp a) { return _mm512_abs_epi8(a); }
INLINE vp qsign(vp x, vp w) { return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x); }
#elif defined(FLEX_PAIRS)
INLINE vp qabs(vp a) { return _mm256_abs_epi8(a); }
INLINE vp qsign(vp x, vp w) { return _mm256_sign_epi8(x, w); }
#endif

#if defined(FLEX_AVX512)
INLINE vp qadd(vp a, vp b) { return _mm512_add_epi32(a, b); }
INLINE vp qsub(vp a, vp b) { return _mm512_sub_epi32(a, b); }
INLINE vp qlook(vp codes, const int8_t* table) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), codes);
}
INLINE vp qless(vp a, uint32_t b) { return _mm512_sub_epi8(a, _mm512_set1_epi32(int(b))); }  // byte by byte
INLINE vp qextend(vp a, int by) { return _mm512_srai_epi32(_mm512_slli_epi32(a, unsigned(by)), 24); }
INLINE vp load_apart(const uint8_t* at, int64_t four, int64_t twelve) {
    vp x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)at));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i*)(at + four)), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i*)(at + 2 * four)), 2);
    return _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i*)(at + twelve)), 3);
}
#elif defined(FLEX_AVX2)
INLINE vp qadd(vp a, vp b) { return _mm256_add_epi32(a, b); }
INLINE vp qsub(vp a, vp b) { return _mm256_sub_epi32(a, b); }
INLINE vp qlook(vp codes, const int8_t* table) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)), codes);
}
INLINE vp qless(vp a, uint32_t b) { return _mm256_sub_epi8(a, _mm256_set1_epi32(int(b))); }
INLINE vp qextend(vp a, int by) { return _mm256_srai_epi32(_mm256_slli_epi32(a, by), 24); }
INLINE vp load_apart(const uint8_t* at, int64_t four, int64_t) {
    const __m256i x = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)at));
    return _mm256_inserti128_si256(x, _mm_loadu_si128((const __m128i*)(at + four)), 1);
}
#else
INLINE vp qadd(vp a, vp b) { return a + b; }
INLINE vp qsub(vp a, vp b) { return a - b; }
INLINE vp qlook(vp codes, const int8_t* table) {
    uint8_t bytes[4 * W];
    qstore(bytes, codes);
    for (uint8_t& byte : bytes) byte = uint8_t(table[byte]);
    return qload(bytes);
}
INLINE vp qless(vp a, uint32_t b) {
    const vp top = qset(int32_t(0x80808080));
    return ((a | top) - qset(int32_t(b))) ^ (~a & top);  // b has no byte above 127
}
INLINE vp qextend(vp a, int by) { return (vp)((vi)(a << by) >> 24); }
INLINE vp load_apart(const uint8_t* at, int64_t, int64_t) { return qload(at); }
#endif

// Blocks of W rows, side by side.
struct Side {
    const uint8_t* at[4];  // of the first rows; the others follow at these distances
    int64_t four, twelve;

    // first: of the first row; the next one is `stride` bytes further.
    INLINE Side(const uint8_t* first, int64_t stride) : four(4 * stride), twelve(12 * stride) {
        UNROLL for (int i = 0; i < 4; i++) {
            at[i] = first + i * stride;
            asm("" : "+r"(at[i]));  // else GCC computes the address of every load anew
        }
    }
};

// Loads 16 bytes of each row from byte `from` on: t[i] has bytes 4 i to 4 i + 3.
INLINE void load_four(const Side& rows, int from, vp* t) {
    vp a[4];
    UNROLL for (int i = 0; i < 4; i++) a[i] = load_apart(rows.at[i] + from, rows.four, rows.twelve);
    const vp p = lo32(a[0], a[1]), q = lo32(a[2], a[3]), r = hi32(a[0], a[1]), s = hi32(a[2], a[3]);
    t[0] = lo64(p, q), t[1] = hi64(p, q), t[2] = lo64(r, s), t[3] = hi64(r, s);
}
INLINE void load_eight(const Side& rows, int from, vp* t) {
    load_four(rows, from, t);
    load_four(rows, from + 16, t + 4);
}

// Returns the number of the code that begins at bit `shift` of each dword.
template <class T> INLINE vf number(vp x, int shift) {
    if constexpr (std::is_same<T, Signed>()) return qfloat(qextend(x, 24 - shift));
    else {
#if defined(FLEX_AVX512)
        const float* table = TABLE<T>.at;
        if constexpr (T::BITS <= 4) return _mm512_permutexvar_ps(qright(x, shift), vload(table));
        else return _mm512_permutex2var_ps(vload(table), qright(x, shift), vload(table + 16));
#else
        if constexpr (std::is_same<T, Iq4>() || std::is_same<T, Fp4>()) {
            const float* table = TABLE<T>.at;
#if defined(FLEX_AVX2)
            const vp i = qright(x, shift);
            const vf low = _mm256_permutevar8x32_ps(vload(table), i);
            const vf high = _mm256_permutevar8x32_ps(vload(table + 8), i);
            return _mm256_blendv_ps(low, high, (vf)qleft(i, 28));
#else
            vf y = vset(0.f);
            for (int e = 0; e < W; e++) y[e] = table[x[e] >> shift & 15];
            return y;
#endif
        } else {
            const vf y = qfloat(qand(qright(x, shift), (1 << T::BITS) - 1));
            return T::LESS ? vsub(y, vset(T::LESS)) : y;
        }
#endif
    }
}

// Returns the numbers of four codes, at bits `shift`, shift + 8, ... of each dword, as signed bytes.
template <class T> INLINE vp number_bytes(vp x, int shift) {
    if constexpr (std::is_same<T, Signed>()) return x;
    else {
        const vp codes = qand(qright(x, shift), 0x01010101u * ((1u << T::BITS) - 1));
        if constexpr (std::is_same<T, Iq4>() || std::is_same<T, Fp4>()) return qlook(codes, TABLE<T>.bytes);
        else return T::LESS ? qless(codes, 0x01010101u * T::LESS) : codes;
    }
}

INLINE vf first_half(vp x) { return even(x, fp16()); }
INLINE vf second_half(vp x) { return odd(x, fp16()); }
INLINE vf times(vf scale, vp whole) { return vmul(scale, qfloat(whole)); }
INLINE vf minus(vf scale, vp whole) { return vmul(vmul(scale, vset(-1.f)), qfloat(whole)); }

// A type has COLUMNS and BYTES of a block, and part<J>(at, put), which decodes columns J * PART to
// (J + 1) * PART of the blocks at `at`. It calls
//     put.template quad<T>(column, x, shift, scale[, minimum])
// for each four neighbouring columns, counted from the part's first one. Their codes are at bits `shift`, `shift` + 8,
// ... of x. A number is scale * number<T>, or that plus the minimum if there are MINIMA. GROUP columns share a scale.
// TOP: the largest absolute value of number<T>. All loads are within the block.

template <class T> struct FourBits {  // Q4_0, IQ4_NL
    static constexpr int COLUMNS = 32, BYTES = 18, PART = 32, GROUP = 32, TOP = std::is_same<T, Iq4>() ? 127 : 8;
    static constexpr bool MINIMA = false;
    template <int, class P> static INLINE void part(const Side& at, P put) {
        vp h[4], x[4];
        load_four(at, 0, h), load_four(at, 2, x);
        const vf scale = first_half(h[0]);
        UNROLL for (int i = 0; i < 8; i++) put.template quad<T>(4 * i, x[i % 4], i / 4 * 4, scale);
    }
};
typedef FourBits<Whole<4, 8>> Q4_0;
typedef FourBits<Iq4> IQ4_NL;

struct MXFP4 {
    static constexpr int COLUMNS = 32, BYTES = 17, PART = 32, GROUP = 32, TOP = 12;
    static constexpr bool MINIMA = false;
    template <int, class P> static INLINE void part(const Side& at, P put) {
        vp h[4], x[4];
        load_four(at, 0, h), load_four(at, 1, x);
        const vp power = qand(h[0], 255), less = qadd(power, qset(-1));  // powers of two, plus 128
        const vf small = vbelow(qfloat(power), vset(1.f), (vf)qset(0x00200000), (vf)qset(0x00400000));
        const vf scale = vbelow(qfloat(power), vset(2.f), small, (vf)qleft(less, 23));
        UNROLL for (int i = 0; i < 8; i++) put.template quad<Fp4>(4 * i, x[i % 4], i / 4 * 4, scale);
    }
};

struct Q4_1 {
    static constexpr int COLUMNS = 32, BYTES = 20, PART = 32, GROUP = 32, TOP = 15;
    static constexpr bool MINIMA = true;
    template <int, class P> static INLINE void part(const Side& at, P put) {
        vp h[4], x[4];
        load_four(at, 0, h), load_four(at, 4, x);
        const vf scale = first_half(h[0]), minimum = second_half(h[0]);
        UNROLL for (int i = 0; i < 8; i++) put.template quad<Whole<4>>(4 * i, x[i % 4], i / 4 * 4, scale, minimum);
    }
};

// Returns bits 4 i to 4 i + 3 of x, each as bit 4 of a byte.
INLINE vp fifth_bits(vp x, int i) {
    const vp four = qand(qright(x, 4 * i), 15), two = qand(qor(four, qleft(four, 14)), 0x00030003);
    return qleft(qand(qor(two, qleft(two, 7)), 0x01010101), 4);
}
INLINE vp nibbles(vp x, int shift) { return qand(qright(x, shift), 0x0f0f0f0f); }

struct Q5_0 {
    static constexpr int COLUMNS = 32, BYTES = 22, PART = 32, GROUP = 32, TOP = 16;
    static constexpr bool MINIMA = false;
    template <int, class P> static INLINE void part(const Side& at, P put) {
        vp h[4], x[4];
        load_four(at, 0, h), load_four(at, 6, x);
        const vp fifth = qor(qright(h[0], 16), qleft(h[1], 16));
        UNROLL for (int i = 0; i < 8; i++) {
            const vp codes = qor(nibbles(x[i % 4], i / 4 * 4), fifth_bits(fifth, i));
            put.template quad<Whole<5, 16>>(4 * i, codes, 0, first_half(h[0]));
        }
    }
};

struct Q5_1 {
    static constexpr int COLUMNS = 32, BYTES = 24, PART = 32, GROUP = 32, TOP = 31;
    static constexpr bool MINIMA = true;
    template <int, class P> static INLINE void part(const Side& at, P put) {
        vp h[4], x[4];
        load_four(at, 0, h), load_four(at, 8, x);
        const vf scale = first_half(h[0]), minimum = second_half(h[0]);
        UNROLL for (int i = 0; i < 8; i++) {
            const vp codes = qor(nibbles(x[i % 4], i / 4 * 4), fifth_bits(h[1], i));
            put.template quad<Whole<5>>(4 * i, codes, 0, scale, minimum);
        }
    }
};

struct Q8_0 {
    static constexpr int COLUMNS = 32, BYTES = 34, PART = 32, GROUP = 32, TOP = 128;
    static constexpr bool MINIMA = false;
    template <int, class P> static INLINE void part(const Side& at, P put) {
        vp h[4], x[8];
        load_four(at, 0, h), load_eight(at, 2, x);
        UNROLL for (int i = 0; i < 8; i++) put.template quad<Signed>(4 * i, x[i], 0, first_half(h[0]));
    }
};

// ---------------------------------------------------------------- K types: blocks of 256 columns, parts of 64

INLINE vp byte_of(vp x, int e) { return qand(qright(x, 8 * e), 255); }

struct Q2_K {
    static constexpr int COLUMNS = 256, BYTES = 84, PART = 64, GROUP = 16, TOP = 3;
    static constexpr bool MINIMA = true;
    template <int J, class P> static INLINE void part(const Side& at, P put) {
        vp s[4], h[4], x[8];
        load_four(at, 0, s), load_four(at, 68, h), load_eight(at, 16 + J / 2 * 32, x);
        const vf d = first_half(h[3]), least = second_half(h[3]);
        UNROLL for (int g = 0; g < 4; g++) {
            const vp pair = byte_of(s[J], g);
            const vf scale = times(d, qand(pair, 15)), minimum = minus(least, qright(pair, 4));
            UNROLL for (int i = 0; i < 4; i++)
                put.template quad<Whole<2>>(16 * g + 4 * i, x[g % 2 * 4 + i], J % 2 * 4 + g / 2 * 2, scale, minimum);
        }
    }
};

struct Q3_K {
    static constexpr int COLUMNS = 256, BYTES = 110, PART = 64, GROUP = 16, TOP = 4;
    static constexpr bool MINIMA = false;
    template <int J, class P> static INLINE void part(const Side& at, P put) {
        vp h[4], top[8], x[8];
        load_four(at, 94, h), load_eight(at, 0, top), load_eight(at, 32 + J / 2 * 32, x);
        const vf d = second_half(h[3]);
        const vp low = qor(qright(h[J % 2], 16), qleft(h[J % 2 + 1], 16));
        const vp high = qor(qright(h[2], 16), qleft(h[3], 16));
        const vp six = qor(nibbles(low, J / 2 * 4), qleft(qand(qright(high, 2 * J), 0x03030303), 4));
        const vp scales = qless(six, 0x20202020);
        UNROLL for (int g = 0; g < 4; g++) {
            const vf scale = times(d, qextend(scales, 24 - 8 * g));
            const int bit = 2 * J + g / 2;
            UNROLL for (int i = 0; i < 4; i++) {
                const vp third = top[g % 2 * 4 + i], two = qright(x[g % 2 * 4 + i], J % 2 * 4 + g / 2 * 2);
                const vp moved = bit < 2 ? qleft(third, 2 - bit) : qright(third, bit - 2);
                const vp codes = qor(qand(two, 0x03030303), qand(moved, 0x04040404));
                put.template quad<Whole<3, 4>>(16 * g + 4 * i, codes, 0, scale);
            }
        }
    }
};

// Scale and minimum of group g of Q4_K and Q5_K, from the dwords of the block's first 16 bytes.
INLINE void six_bits(const vp* h, int g, vf& scale, vf& minimum) {
    const int k = 8 * (g % 4);
    vp s = qand(qright(h[1], k), 63), m = qand(qright(h[2], k), 63);
    if (g >= 4) {
        s = qor(qand(qright(h[3], k), 15), qand(qright(h[1], k + 2), 48));
        m = qor(qand(qright(h[3], k + 4), 15), qand(qright(h[2], k + 2), 48));
    }
    scale = times(first_half(h[0]), s), minimum = minus(second_half(h[0]), m);
}

struct Q4_K {
    static constexpr int COLUMNS = 256, BYTES = 144, PART = 64, GROUP = 32, TOP = 15;
    static constexpr bool MINIMA = true;
    template <int J, class P> static INLINE void part(const Side& at, P put) {
        vp h[4], x[8];
        load_four(at, 0, h), load_eight(at, 16 + 32 * J, x);
        UNROLL for (int g = 0; g < 2; g++) {
            vf scale, minimum;
            six_bits(h, 2 * J + g, scale, minimum);
            UNROLL for (int i = 0; i < 8; i++) put.template quad<Whole<4>>(32 * g + 4 * i, x[i], 4 * g, scale, minimum);
        }
    }
};

struct Q5_K {
    static constexpr int COLUMNS = 256, BYTES = 176, PART = 64, GROUP = 32, TOP = 31;
    static constexpr bool MINIMA = true;
    template <int J, class P> static INLINE void part(const Side& at, P put) {
        vp h[4], top[8], x[8];
        load_four(at, 0, h), load_eight(at, 16, top), load_eight(at, 48 + 32 * J, x);
        UNROLL for (int g = 0; g < 2; g++) {
            vf scale, minimum;
            six_bits(h, 2 * J + g, scale, minimum);
            const int bit = 2 * J + g;
            UNROLL for (int i = 0; i < 8; i++) {
                const vp fifth = bit < 4 ? qleft(top[i], 4 - bit) : qright(top[i], bit - 4);
                const vp codes = qor(nibbles(x[i], 4 * g), qand(fifth, 0x10101010));
                put.template quad<Whole<5>>(32 * g + 4 * i, codes, 0, scale, minimum);
            }
        }
    }
};

struct Q6_K {
    static constexpr int COLUMNS = 256, BYTES = 210, PART = 64, GROUP = 16, TOP = 32;
    static constexpr bool MINIMA = false;
    template <int J, class P> static INLINE void part(const Side& at, P put) {
        vp s[4], h[4], top[8], x[8];
        load_four(at, 192, s), load_four(at, 194, h), load_eight(at, 128 + J / 2 * 32, top);
        const vf d = second_half(h[3]);
        UNROLL for (int g = 0; g < 4; g++) {
            if (g % 2 == 0) load_eight(at, J / 2 * 64 + g / 2 * 32, x);
            const vf scale = times(d, qextend(s[J], 24 - 8 * g));
            const int bit = J % 2 * 4 + g / 2 * 2;  // of the upper two bits
            UNROLL for (int i = 0; i < 4; i++) {
                const vp two = top[g % 2 * 4 + i], moved = bit < 4 ? qleft(two, 4 - bit) : qright(two, bit - 4);
                const vp codes = qor(nibbles(x[g % 2 * 4 + i], J % 2 * 4), qand(moved, 0x30303030));
                put.template quad<Signed>(16 * g + 4 * i, qless(codes, 0x20202020), 0, scale);
            }
        }
    }
};

struct IQ4_XS {
    static constexpr int COLUMNS = 256, BYTES = 136, PART = 64, GROUP = 32, TOP = 127;
    static constexpr bool MINIMA = false;
    template <int J, class P> static INLINE void part(const Side& at, P put) {
        vp h[4], x[8];
        load_four(at, 0, h), load_eight(at, 8 + 32 * J, x);
        UNROLL for (int g = 0; g < 2; g++) {
            const vp low = qand(qright(h[1], 8 * J + 4 * g), 15), high = qand(qright(h[0], 16 + 4 * J + 2 * g), 3);
            const vf whole = vsub(qfloat(qor(low, qleft(high, 4))), vset(32.f));
            const vf scale = vmul(first_half(h[0]), whole);
            UNROLL for (int i = 0; i < 8; i++)
                put.template quad<Iq4>(32 * g + 4 * i, x[4 * g + i % 4], i / 4 * 4, scale);
        }
    }
};

}  // namespace
