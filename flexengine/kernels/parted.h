// Formats of matrices that are several tensors of a checkpoint (codec/scaled.py, by_inputs.py, flat_blocks.py), decoded
// for W rows side by side: every lane has a row.
#pragma once
#include "unpacked.h"

namespace {

// What a layout's numbers mean, in the order of codec/layouts.py.
enum ScaleKind : int64_t { SCALE_F32, SCALE_F16, SCALE_BF16, SCALE_E8M0, SCALE_E4M3, SCALE_NESTED };
enum ZeroKind : int64_t { NO_ZEROS, ZERO_BYTES, ZEROS_DOWN };      // ZEROS_DOWN: words that hold several rows
enum WholeKind : int64_t { NO_WHOLE, DIVIDES, MULTIPLIES, PER_127 };  // what a number changes: all scales, or elements

// qwords: dwords of W rows. qright_each: shifts every lane by its own number. qany: whether a lane has one of some bits.
INLINE int32_t word_at(const uint8_t* at) { int32_t x; memcpy(&x, at, 4); return x; }
#if defined(FLEX_AVX512)
INLINE __m128i four_words(const Side& rows, int64_t from) {
    const uint8_t* const* at = rows.at;
    return _mm_set_epi32(word_at(at[3] + from), word_at(at[2] + from), word_at(at[1] + from), word_at(at[0] + from));
}
INLINE vp qwords(const Side& rows, int64_t from) {
    const int64_t four = rows.four;
    const __m256i low = _mm256_set_m128i(four_words(rows, from + four), four_words(rows, from));
    const __m256i high = _mm256_set_m128i(four_words(rows, from + rows.twelve), four_words(rows, from + 2 * four));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
INLINE vp qright_each(vp a, vp by) { return _mm512_srlv_epi32(a, by); }
INLINE vp qxor(vp a, vp b) { return _mm512_xor_si512(a, b); }
INLINE bool qany(vp a, uint32_t bits) { return _mm512_test_epi32_mask(a, qset(int32_t(bits))); }
INLINE vp qshifted(vp a, int left) { return _mm512_srai_epi32(_mm512_slli_epi32(a, unsigned(left)), 4); }
INLINE vf looked(const float* table, vp codes) { return _mm512_permutexvar_ps(codes, vload(table)); }
INLINE vp bytes_along(const uint8_t* at) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)); }
INLINE vp nibbles_along(const uint8_t* at) {
    const __m128i x = _mm_loadl_epi64((const __m128i*)at), low = _mm_set1_epi8(15);
    return _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(_mm_and_si128(x, low), _mm_and_si128(_mm_srli_epi16(x, 4), low)));
}
INLINE vp words_of_eight(const uint8_t* at) {  // one for each 8 lanes
    return _mm512_inserti64x4(qset(word_at(at)), _mm256_set1_epi32(word_at(at + 4)), 1);
}
#elif defined(FLEX_AVX2)
INLINE vp qwords(const Side& rows, int64_t from) {
    const uint8_t* const* at = rows.at;
    const int64_t more = from + rows.four;
    return _mm256_set_epi32(word_at(at[3] + more), word_at(at[2] + more), word_at(at[1] + more), word_at(at[0] + more),
                            word_at(at[3] + from), word_at(at[2] + from), word_at(at[1] + from), word_at(at[0] + from));
}
INLINE vp qright_each(vp a, vp by) { return _mm256_srlv_epi32(a, by); }
INLINE vp qxor(vp a, vp b) { return _mm256_xor_si256(a, b); }
INLINE bool qany(vp a, uint32_t bits) { return !_mm256_testz_si256(a, qset(int32_t(bits))); }
INLINE vp qshifted(vp a, int left) { return _mm256_srai_epi32(_mm256_slli_epi32(a, left), 4); }
INLINE vf looked(const float* table, vp codes) {
    const vf low = _mm256_permutevar8x32_ps(vload(table), codes), high = _mm256_permutevar8x32_ps(vload(table + 8), codes);
    return _mm256_blendv_ps(low, high, (vf)qleft(codes, 28));
}
INLINE vp bytes_along(const uint8_t* at) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)); }
INLINE vp nibbles_along(const uint8_t* at) {
    const __m128i x = _mm_cvtsi32_si128(word_at(at)), low = _mm_set1_epi8(15);
    return _mm256_cvtepu8_epi32(_mm_unpacklo_epi8(_mm_and_si128(x, low), _mm_and_si128(_mm_srli_epi16(x, 4), low)));
}
INLINE vp words_of_eight(const uint8_t* at) { return qset(word_at(at)); }
#else
INLINE vp qwords(const Side& rows, int64_t from) {
    uint32_t x[W];
    for (int i = 0; i < W; i++) x[i] = uint32_t(word_at(rows.at[i] + from));
    return qload(x);
}
INLINE vp qright_each(vp a, vp by) { return a >> by; }
INLINE vp qxor(vp a, vp b) { return a ^ b; }
INLINE bool qany(vp a, uint32_t bits) { return (a[0] | a[1] | a[2] | a[3]) & bits; }
INLINE vp qshifted(vp a, int left) { return (vp)((vi)(a << left) >> 4); }
INLINE vf looked(const float* table, vp codes) {
    vf y = vset(0.f);
    for (int e = 0; e < W; e++) y[e] = table[codes[e] & 15];
    return y;
}
INLINE vp bytes_along(const uint8_t* at) { return vp{at[0], at[1], at[2], at[3]}; }
INLINE vp nibbles_along(const uint8_t* at) { return vp{at[0] & 15u, uint32_t(at[0] >> 4), at[1] & 15u, uint32_t(at[1] >> 4)}; }
INLINE vp words_of_eight(const uint8_t* at) { return qset(word_at(at)); }
#endif

constexpr int PART = 32;  // columns decoded together

// Numbers of E4M3 codes, at bits `shift` to `shift` + 7 of each dword, times 2^-120; NaN becomes 480.
INLINE vf small_e4m3(vp x, int shift) { return (vf)qand(qshifted(x, 24 - shift), 0x87f00000); }
INLINE vf e4m3(vp x, int shift) {
    const vf y = vmul(small_e4m3(x, shift), vset(0x1p120f));
    return vbelow(vset(448.f), vand(y, 0x7fffffff), vset(NAN), y);
}
INLINE vf e8m0(vp power) {
    const vf p = qfloat(power);
    const vf some = vbelow(vset(254.f), p, vset(NAN), (vf)qleft(power, 23));
    return vbelow(p, vset(1.f), vset(0x1p-127f), some);
}
alignas(64) constexpr float E2M1[16] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

INLINE float float_at(const uint8_t* at) { return float_of(uint32_t(word_at(at))); }

// Scales and zero points of W rows from row c on, of which those after the last row are copies of it.
struct Grid {
    const uint8_t* data;
    const Layout& l;
    const int64_t c, last, size;  // last: row; size: of a scale in bytes
    const int64_t first;          // row of the grid
    const bool alike;             // whether all rows share their cells
    int64_t kept = -1;            // the last cell in `four`
    vp four = qset(0);            // scales of one byte are loaded four at a time

    INLINE Grid(const Matrix& w, int64_t c)
        : data(w.data), l(*w.layout), c(c), last(w.rows - 1),
          size(l.scale_kind <= SCALE_F32 ? 4 : l.scale_kind <= SCALE_BF16 ? 2 : 1), first(row(0)),
          alike(l.down > 1 && first == row(W - 1)) {}
    int64_t row(int i) const { return l.down == 1 ? (c + i < last ? c + i : last) : (c + i < last ? c + i : last) / l.down; }

    // Returns dwords at byte `from` of vectors, one of `stride` bytes for each row of the grid.
    vp words(int64_t from, int64_t stride) const {
        if (alike) return qset(word_at(data + from + first * stride));
        if (l.down == 1 && c + W - 1 <= last) return qwords(Side(data + c * stride, stride), from);
        int32_t x[W];
        for (int i = 0; i < W; i++) x[i] = word_at(data + from + row(i) * stride);
        return qload(x);
    }
    // Returns dwords whose last bytes are those of the cell's scales.
    vp scale_words(int64_t cell) {
        const int64_t from = l.scales + size - 4;
        if (size != 1) return words(from + cell * size, l.cells * size);
        if (cell > kept || cell < kept - 3) {
            kept = (cell | 3) < l.cells ? cell | 3 : l.cells - 1;
            four = words(from + kept, l.cells);
        }
        return qleft(four, int(8 * (kept - cell)));
    }
    vf scale(int64_t cell) {
        if (l.scale_kind == SCALE_NESTED) return nested(cell);
        const vp x = scale_words(cell);
        vf found = (vf)x;
        if (l.scale_kind == SCALE_F16) found = second_half(x);
        if (l.scale_kind == SCALE_BF16) found = (vf)qand(x, 0xffff0000);
        if (l.scale_kind == SCALE_E8M0) found = e8m0(qright(x, 24));
        if (l.scale_kind == SCALE_E4M3) found = e4m3(x, 24);
        if (l.whole_kind == DIVIDES) found = vdiv(found, vset(float_at(data + l.more)));
        if (l.whole_kind == MULTIPLIES) found = vmul(found, vset(float_at(data + l.more)));
        return found;
    }
    vf nested(int64_t cell) const {
        const uint8_t* const each = data + l.more + 4 * 16;  // after the numbers of codes
        float x[W];
        for (int i = 0; i < W; i++) {
            const int64_t block = row(i) * l.cells + cell;
            const float number = float_at(data + l.order + 4 * data[l.scales + block]);
            x[i] = number * float_at(each + (block >> l.nested) * 4) + float_of(uint32_t(l.offset));
        }
        return vload(x);
    }
    vf zero(int64_t cell) const {
        if (l.zero_kind == NO_ZEROS) return vset(0.f);
        if (l.zero_kind == ZERO_BYTES) return qfloat(qextend(words(l.zeros - 3 + cell, l.cells), 0));
        const int bits = l.flip ? 8 : 4, number = 32 / bits;
        int32_t x[W];
        for (int i = 0; i < W; i++) {
            const int64_t own = row(i);
            x[i] = word_at(data + l.zeros + (own / number * l.cells + cell) * 4) >> own % number * bits & ((1 << bits) - 1);
        }
        return vsub(qfloat(qload(x)), vset(float(1 << (bits - 1))));
    }
};

// A family of formats has decode<N>(w, c, next, begin, end, put): it decodes columns begin to end of W rows of w from row c
// on, in parts of PART columns, which it writes by put(first column). The same thread reads the rows from row c + next on
// later. Of the columns after the last one, any finite numbers are written. What put returns is a Tile or an Unpacked;
// CODES says whether it takes codes, or numbers.

// ---------------------------------------------------------------- codes row by row

// Copies `there` bytes, at most BYTES, of W rows, of which those after the last one are copies of it; zeros follow.
template <int BYTES>
__attribute__((noinline)) void copy_rows(const uint8_t* at, int64_t row, int64_t last, int64_t there, uint8_t* to) {
    memset(to, 0, W * BYTES);
    for (int i = 0; i < W; i++)
        memcpy(to + i * BYTES, at + (i < last ? i : last) * row, size_t(there < BYTES ? there : BYTES));
}

// Families in which a row's codes follow each other. BITS: of a code. part(at, scale, zero, put, w): scale and zero of
// either half of the part's columns.
template <class F> struct ByRows : F {
    template <class P> static INLINE void decode(const Matrix& w, int64_t c, int64_t next, int64_t begin, int64_t end, P put) {
        const Layout& l = *w.layout;
        const int64_t row = l.row_bytes, last = w.rows - 1 - c;
        const uint8_t* const first = w.data + c * row;
        Grid grid(w, c);
        int64_t cell = begin / l.right, until = (cell + 1) * l.right;
        vf scale[2], zero[2];
        scale[1] = grid.scale(cell), zero[1] = grid.zero(cell);
        for (int64_t column = begin; column < end; column += PART) {
            UNROLL for (int half = 0; half < 2; half++) {
                if (column + half * 16 >= until && cell + 1 < l.cells) {
                    until = (++cell + 1) * l.right;
                    scale[1] = grid.scale(cell), zero[1] = grid.zero(cell);
                }
                if (!half) scale[0] = scale[1], zero[0] = zero[1];
            }
            constexpr int BYTES = PART * F::BITS / 8;
            const int64_t at = column * F::BITS / 8, there = row - at;
            const bool whole = last >= W - 1 && column + PART <= l.columns;
            uint8_t copies[W * BYTES];
            if (!whole) copy_rows<BYTES>(first + at, row, last, there, copies);
            else if (at % 64 == 0) ask(first + at, first + row, row, next * row);
            F::part(Side(whole ? first + at : copies, whole ? row : BYTES), scale, zero, put(column), w);
        }
    }
};

struct Fp8 {
    static constexpr int BITS = 8;
    template <class P> static INLINE void part(const Side& at, const vf* scale, const vf*, P put, const Matrix&) {
        vp x[8];
        load_eight(at, 0, x);
        if constexpr (P::CODES) UNROLL for (int i = 0; i < 8; i++) put.quad(4 * i, x[i], scale[i / 4]);
        else scaled(at, x, scale, put);
    }
    template <class P> static INLINE void scaled(const Side& at, const vp* x, const vf* scale, P put) {
        vp bad = qset(0);
        UNROLL for (int i = 0; i < 8; i++) bad = qor(bad, qadd(qand(x[i], 0x7f7f7f7f), qset(0x01010101)));
        vf big[2];
        UNROLL for (int half = 0; half < 2; half++) {
            big[half] = vmul(scale[half], vset(0x1p120f));  // finite for scales below 2^7
            bad = qor(bad, qadd(qand((vp)scale[half], 0x7fffffff), qset(0x3d000000)));
        }
        if (__builtin_expect(qany(bad, 0x80808080), 0)) return rare(at, scale[0], scale[1], put);
        UNROLL for (int i = 0; i < 8; i++) {
            vf y[4];
            UNROLL for (int e = 0; e < 4; e++) y[e] = vmul(small_e4m3(x[i], 8 * e), big[i / 4]);
            put.store(4 * i, y);
        }
    }
    // Does the same for codes that are NaN, and any scales.
    template <class P> static __attribute__((noinline)) void rare(Side at, vf first, vf second, P put) {
        vp x[8];
        load_eight(at, 0, x);
        for (int i = 0; i < 8; i++) {
            vf y[4];
            UNROLL for (int e = 0; e < 4; e++) y[e] = vmul(e4m3(x[i], 8 * e), i < 4 ? first : second);
            put.store(4 * i, y);
        }
    }
};

struct Fp4Codes {
    static constexpr int BITS = 4;
    template <class P> static INLINE void part(const Side& at, const vf* scale, const vf*, P put, const Matrix&) {
        vp x[4];
        load_four(at, 0, x);
        UNROLL for (int i = 0; i < 8; i++) {
            if constexpr (P::CODES) put.template quad<Fp4, 4>(4 * i, x[i / 2], i % 2 * 16, vmul(scale[i / 4], vset(.5f)));
            else {
                vf y[4];
                UNROLL for (int e = 0; e < 4; e++) y[e] = vmul(looked(E2M1, qright(x[i / 2], i % 2 * 16 + 4 * e)), scale[i / 4]);
                put.store(4 * i, y);
            }
        }
    }
};

// bitsandbytes: the first code of a byte is in its upper bits; the matrix has the numbers of codes.
struct TableCodes {
    static constexpr int BITS = 4;
    template <class P> static INLINE void part(const Side& at, const vf* scale, const vf*, P put, const Matrix& w) {
        float table[16];
        memcpy(table, w.data + w.layout->more, sizeof table);
        vp x[4];
        load_four(at, 0, x);
        UNROLL for (int i = 0; i < 8; i++) {
            vf y[4];
            UNROLL for (int e = 0; e < 4; e++) y[e] = vmul(looked(table, qright(x[i / 2], i % 2 * 16 + 4 * (e ^ 1))), scale[i / 4]);
            put.store(4 * i, y);
        }
    }
};

template <bool ZEROS> struct Whole4 {
    static constexpr int BITS = 4;
    template <class P> static INLINE void part(const Side& at, const vf* scale, const vf* zero, P put, const Matrix&) {
        vp x[4];
        load_four(at, 0, x);
        UNROLL for (int i = 0; i < 8; i++) {
            if (ZEROS) put.template less<Whole<4, 8>, 4>(4 * i, x[i / 2], i % 2 * 16, scale[i / 4], zero[i / 4]);
            else put.template quad<Whole<4, 8>, 4>(4 * i, x[i / 2], i % 2 * 16, scale[i / 4]);
        }
    }
};

template <bool ZEROS> struct Whole8 {
    static constexpr int BITS = 8;
    template <class P> static INLINE void part(const Side& at, const vf* scale, const vf* zero, P put, const Matrix& w) {
        vp x[8];
        load_eight(at, 0, x);
        const vp flip = qset(int32_t(w.layout->flip));
        UNROLL for (int i = 0; i < 8; i++) {
            x[i] = qxor(x[i], flip);
            if (ZEROS) put.template less<Signed>(4 * i, x[i], 0, scale[i / 4], zero[i / 4]);
            else put.template quad<Signed>(4 * i, x[i], 0, scale[i / 4]);
        }
    }
};

// LLM.int8: elements are multiplied by a constant at last.
struct Per127 {
    static constexpr int BITS = 8;
    template <class P> static INLINE void part(const Side& at, const vf* scale, const vf*, P put, const Matrix&) {
        const vf factor = vset(7.874015718698502e-3f);
        vp x[8];
        load_eight(at, 0, x);
        UNROLL for (int i = 0; i < 8; i++) {
            if constexpr (P::CODES) put.template quad<Signed>(4 * i, x[i], 0, vmul(scale[0], factor));
            else {
                vf y[4];
                UNROLL for (int e = 0; e < 4; e++) y[e] = vmul(vmul(number<Signed>(x[i], 8 * e), scale[0]), factor);
                put.store(4 * i, y);
            }
        }
    }
};

// ---------------------------------------------------------------- codes input by input

// W rows from row c on.
struct Across {
    int64_t c, rows;
    bool whole;

    Across(const Matrix& w, int64_t c) : c(c), rows(w.rows), whole(c + W <= w.rows) {}
    // Returns the rows' numbers of a vector with one for each row. Those after the last row are copies of it.
    template <class T> INLINE vf numbers(const uint8_t* at) const {
        if (whole) return vload((const T*)at + c);
        T some[W];
        for (int i = 0; i < W; i++) memcpy(some + i, at + (c + i < rows ? c + i : rows - 1) * int64_t(sizeof(T)), sizeof(T));
        return vload(some);
    }
    vf scales(const uint8_t* at, int64_t kind) const {
        return kind == SCALE_F16 ? numbers<fp16>(at) : kind == SCALE_BF16 ? numbers<bf16>(at) : numbers<float>(at);
    }
};

// GPTQ: a word has codes of several inputs, or three words have those of 32 inputs; zero points are strings of bits.
// A family has COLUMNS with WORDS of each row, or eight rows; bytes(r): of words of r rows; load(at): of W rows;
// code(words, column): in the lowest bits.
template <int BITS> struct Gptq {
    typedef typename std::conditional<BITS == 8, Signed, Whole<BITS % 8, ((1 << BITS % 8) >> 1)>>::type T;
    static constexpr int COLUMNS = BITS == 3 ? 32 : 32 / BITS, WORDS = BITS == 3 ? 3 : 1, LESS = 1 << (BITS - 1);

    explicit Gptq(const Across&) {}
    static INLINE int64_t bytes(int64_t rows) { return rows * 4; }
    INLINE vp load(const uint8_t* at) const { return BITS == 8 ? qxor(qload(at), qset(int32_t(0x80808080))) : qload(at); }
    INLINE vp code(const vp* x, int column) const {
        const int bit = column * BITS, from = bit % 32;
        const vp low = qright(x[bit / 32], from);
        return from + BITS <= 32 ? low : qor(low, qleft(x[bit / 32 + 1], 32 - from));
    }
    template <class P> INLINE void put_four(P put, const vp* x, int column, vf scale, vf zero) const {
        if constexpr (BITS == 3) {
            vp codes[4];
            UNROLL for (int e = 0; e < 4; e++) codes[e] = code(x, column + e);
            put.template each<T>(column, codes, scale, zero);
        } else put.template less<T, BITS>(column, x[0], column * BITS, scale, zero);
    }
    INLINE vf zeros(const Matrix& w, const Across& rows, int64_t group) const {
        const uint8_t* const at = w.data + w.layout->zeros + group * w.rows * BITS / 8;
        vp codes;
        if (BITS == 8 && rows.whole) codes = bytes_along(at + rows.c);
        else if (BITS == 4 && rows.whole) codes = nibbles_along(at + rows.c / 2);
        else {
            int32_t some[W];
            for (int64_t i = 0; i < W; i++) {
                const int64_t bit = (rows.c + i < w.rows ? rows.c + i : w.rows - 1) * BITS;
                some[i] = word_at(at + bit / 8) >> bit % 8 & ((1 << BITS) - 1);
            }
            codes = qload(some);
        }
        return vadd(qfloat(codes), vset(float(w.layout->less - LESS)));
    }
};

// AWQ: a word has the codes of eight rows.
struct Awq {
    typedef Whole<4, 8> T;
    static constexpr int COLUMNS = 4, WORDS = 4;
    vp shifts;

    explicit Awq(const Across& rows) {
        constexpr int32_t bits[8] = {0, 16, 4, 20, 8, 24, 12, 28};  // first bits of eight rows
        int32_t own[W];
        for (int i = 0; i < W; i++) own[i] = bits[(rows.c + i) % 8];
        shifts = qload(own);
    }
    static INLINE int64_t bytes(int64_t rows) { return rows / 8 * 4; }
    INLINE vp load(const uint8_t* at) const { return qright_each(words_of_eight(at), shifts); }
    INLINE vp code(const vp* x, int column) const { return x[column]; }
    template <class P> INLINE void put_four(P put, const vp* x, int, vf scale, vf zero) const {
        put.template each<T>(0, x, scale, zero);
    }
    INLINE vf zeros(const Matrix& w, const Across& rows, int64_t group) const {
        const uint8_t* const at = w.data + w.layout->zeros + group * w.rows / 2 + bytes(rows.c);
        uint8_t some[W / 8 * 4 + 4] = {};
        if (!rows.whole) memcpy(some, at, size_t(bytes(rows.rows - rows.c)));
        return vadd(qfloat(qand(load(rows.whole ? at : some), 15)), vset(-8.f));
    }
};

constexpr int64_t FURTHER = 128;  // columns that are prefetched before they are decoded

template <class F> struct ByInputs {
    template <class P> static INLINE void decode(const Matrix& w, int64_t c, int64_t next, int64_t begin, int64_t end, P put) {
        constexpr int EACH = F::COLUMNS, WORDS = F::WORDS;
        const Layout& l = *w.layout;
        const Across rows(w, c);
        const F family(rows);
        const int64_t size = l.scale_kind <= SCALE_F32 ? 4 : 2, step = F::bytes(w.rows), own = F::bytes(rows.whole ? W : w.rows - c), bytes = own > 4 ? own : 4;
        vf scale = vset(0.f), zero = vset(0.f);
        const int64_t all = (end - begin + PART - 1) / PART * PART + begin;
        for (int64_t column = begin, until = begin; column < all; column += EACH) {
            const uint8_t* at = w.data + column / EACH * WORDS * step + F::bytes(c);
            if (c % next == 0) ask(w, at, column, step, F::bytes(next));
            vp x[WORDS];
            if (rows.whole && column + EACH <= l.columns) UNROLL for (int i = 0; i < WORDS; i++) x[i] = family.load(at + i * step);
            else
                for (int i = 0; i < WORDS; i++) {  // zeros after the last row and the last column
                    uint8_t some[4 * W] = {};
                    if (column + i * EACH / WORDS < l.columns) memcpy(some, at + i * step, size_t(bytes));
                    x[i] = family.load(some);
                }
            const auto to = put(column);
            if (l.order) {
                ordered(w, rows, family, column, x, to);
                continue;
            }
            if (column >= until && column < l.columns) {
                const int64_t group = column / l.right;
                until = (group + 1) * l.right;
                scale = rows.scales(w.data + l.scales + group * w.rows * size, l.scale_kind), zero = family.zeros(w, rows, group);
            }
            UNROLL for (int i = 0; i < EACH; i += 4) family.put_four(to, x, i, scale, zero);
        }
    }
    // Prefetches what is decoded FURTHER columns later, of all rows that a thread decodes together.
    static INLINE void ask(const Matrix& w, const uint8_t* at, int64_t column, int64_t step, int64_t bytes) {
        if (column + FURTHER + F::COLUMNS > w.layout->columns) return;
        at += FURTHER / F::COLUMNS * F::WORDS * step;
        UNROLL for (int i = 0; i < F::WORDS; i++)
            for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + i * step + line, 0, 3);
    }
    // Every column has a group of its own.
    template <class P>
    static INLINE void ordered(const Matrix& w, const Across& rows, const F& family, int64_t column, const vp* x, P to) {
        const Layout& l = *w.layout;
        const int64_t size = l.scale_kind <= SCALE_F32 ? 4 : 2;
        if constexpr (!P::CODES) {
            UNROLL for (int i = 0; i < F::COLUMNS; i += 4) {
                vf y[4];
                UNROLL for (int e = 0; e < 4; e++) {
                    const int64_t given = column + i + e < l.columns ? word_at(w.data + l.order + 4 * (column + i + e)) : 0;
                    const int64_t group = given < 0 ? 0 : given < l.cells ? given : l.cells - 1;
                    const vf scale = rows.scales(w.data + l.scales + group * w.rows * size, l.scale_kind);
                    y[e] = vmul(vsub(number<typename F::T>(family.code(x, i + e), 0), family.zeros(w, rows, group)), scale);
                }
                to.store(i, y);
            }
        }
    }
};

}  // namespace
