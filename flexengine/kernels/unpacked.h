// What decoders write into: tiles of numbers for products in fp32 and bf16, and chunks of codes for products by int8.
#pragma once
#include "blocks.h"
#include "decoders.h"

namespace {

// Writes numbers into a tile of units U from the part's first column on. STEP: bits from one code to the next.
template <class U> struct Tile {
    static constexpr bool CODES = false;
    float* at;
    int64_t width;

    INLINE void store(int column, const vf* x) const {
        float* to = at + column / COLUMNS<U> * width;
        store_four(to, width, x, U());
    }
    template <class T, int STEP = 8> INLINE void quad(int column, vp codes, int shift, vf scale) const {
        vf x[4];
        UNROLL for (int e = 0; e < 4; e++) x[e] = vmul(number<T>(codes, shift + STEP * e), scale);
        store(column, x);
    }
    template <class T> INLINE void quad(int column, vp codes, int shift, vf scale, vf minimum) const {
        vf x[4];
        UNROLL for (int e = 0; e < 4; e++) x[e] = vfma(number<T>(codes, shift + 8 * e), scale, minimum);
        store(column, x);
    }
    template <class T, int STEP = 8> INLINE void less(int column, vp codes, int shift, vf scale, vf zero) const {
        vf x[4];
        UNROLL for (int e = 0; e < 4; e++) x[e] = vmul(vsub(number<T>(codes, shift + STEP * e), zero), scale);
        store(column, x);
    }
    template <class T> INLINE void each(int column, const vp* codes, vf scale, vf zero) const {
        vf x[4];
        UNROLL for (int e = 0; e < 4; e++) x[e] = vmul(vsub(number<T>(codes[e], 0), zero), scale);
        store(column, x);
    }
};

constexpr int64_t AHEAD = 1024;  // bytes of each row that are prefetched before they are decoded
constexpr int LARGEST = 256;     // at least the bytes of any block

// Prefetches the lines that begin in `bytes` bytes, AHEAD bytes after `at` in each row of `row` bytes; past a row's
// end, in the row `next` bytes after it.
INLINE void ask(const uint8_t* at, const uint8_t* end, int64_t row, int64_t next) {
    uintptr_t ahead = uintptr_t(at) + AHEAD;
    if (ahead >= uintptr_t(end)) ahead += uintptr_t(next - row);
    UNROLL for (int i = 0; i < W; i++) __builtin_prefetch((const void*)(ahead + i * row), 0, 3);
}

// ---------------------------------------------------------------- int8

constexpr int CHUNK = 256, GROUP64 = 64, TWO = 2 * W;  // columns of w unpacked at a time, of a scale of x; rows of w

// Columns of 2 W rows of w: numbers as signed bytes in quads; by group of columns scales, minima, and what corrects the
// dots for FLIP: -128 times the sums of numbers.
struct Chunk {
    alignas(64) int32_t codes[CHUNK / 4 * TWO], starts[CHUNK / 16 * TWO];
    alignas(64) float scales[CHUNK / 16 * TWO], minima[CHUNK / 16 * TWO];
};

// Returns four codes of STEP bits each, from bit `shift` on, as bytes.
template <int STEP> INLINE vp spread_codes(vp x, int shift) {
    if (STEP == 8) return x;
    constexpr uint32_t MASK = (1u << STEP % 8) - 1;
    x = qand(qright(x, shift), (1u << 4 * STEP % 32) - 1);
    x = qand(qor(x, qleft(x, 16 - 2 * STEP)), 0x00010001u * ((1u << 2 * STEP % 16) - 1));
    return qand(qor(x, qleft(x, 8 - STEP)), 0x01010101u * MASK);
}

template <int GROUP> struct Unpacked {
    static constexpr bool CODES = true;
    int32_t* codes;  // of the part's first numbers, as the others are
    float *scales, *minima;

    INLINE Unpacked(Chunk& to, int64_t column, int row)
        : codes(to.codes + column / 4 * TWO + row), scales(to.scales + column / GROUP * TWO + row),
          minima(to.minima + column / GROUP * TWO + row) {}
    template <class T, int STEP = 8> INLINE void quad(int column, vp x, int shift, vf scale) const {
        qstore(codes + column / 4 * TWO, number_bytes<T>(spread_codes<STEP>(x, shift), STEP == 8 ? shift : 0));
        if (column % GROUP == 0) vstore(scales + column / GROUP * TWO, scale);
    }
    template <class T> INLINE void quad(int column, vp x, int shift, vf scale, vf minimum) const {
        quad<T>(column, x, shift, scale);
        if (column % GROUP == 0) vstore(minima + column / GROUP * TWO, minimum);
    }
    template <class T, int STEP = 8> INLINE void less(int column, vp x, int shift, vf scale, vf zero) const {
        quad<T, STEP>(column, x, shift, scale);
        if (column % GROUP == 0) vstore(minima + column / GROUP * TWO, vmul(vsub(vset(0.f), zero), scale));
    }
    template <class T> INLINE void each(int column, const vp* x, vf scale, vf zero) const {
        vp all = qset(0);
        UNROLL for (int e = 0; e < 4; e++) all = qor(all, qleft(qand(x[e], (1u << T::BITS) - 1), 8 * e));
        less<T>(column, all, 0, scale, zero);
    }
};

// Computes the starts of `columns` unpacked columns. Columns up to a multiple of 64 get numbers and scales of zero.
template <int GROUP> void finish(int columns, Chunk& to) {
    const int all = (columns + GROUP64 - 1) / GROUP64 * GROUP64;
    const size_t more = size_t(all - columns), from = size_t(columns / GROUP * TWO), count = more / GROUP * TWO * 4;
    memset(to.codes + columns / 4 * TWO, 0, more * TWO);
    memset(to.scales + from, 0, count), memset(to.minima + from, 0, count);
    for (int g = 0; g < all / GROUP; g++)
        for (int half = 0; half < TWO; half += W) {
            vp sum = qset(0);
            for (int q = 0; q < GROUP / 4 && FLIP; q++)
                sum = dot(sum, qset(int32_t(FLIP)), qload(to.codes + (g * GROUP / 4 + q) * TWO + half));
            qstore(to.starts + g * TWO + half, qsub(qset(0), sum));
        }
}

// Unpacks columns begin to end of rows c to c + 2 W of w.
template <class F> void unpack(const Matrix& w, int64_t c, int64_t begin, int64_t end, Chunk& to);

// Adds quads q to end of w and x to sum; returns the address of the codes of quad `end`. x: quads of a tile of M rows.
template <int M>
INLINE const uint8_t* add_quads(const int32_t* w, int q, int end, const uint8_t* x, vp (&sum)[M][2], bool sizes) {
    _Pragma("GCC unroll 4") for (; q < end; q++, x += 4 * M) {
        const vp u[2] = {qload(w + q * TWO), qload(w + q * TWO + W)};
#if defined(FLEX_PAIRS)
        const vp size[2] = {sizes ? qabs(u[0]) : u[0], sizes ? qabs(u[1]) : u[1]};
#endif
        UNROLL for (int i = 0; i < M; i++) {
            int32_t four;
            memcpy(&four, x + 4 * i, 4);
            const vp v = qset(four);
#if defined(FLEX_PAIRS)
            UNROLL for (int n = 0; n < 2; n++) sum[i][n] = pairs(sum[i][n], size[n], sizes ? qsign(v, u[n]) : v);
#else
            UNROLL for (int n = 0; n < 2; n++) sum[i][n] = dot(sum[i][n], v, u[n]);
#endif
        }
    }
    return x;
}

// Adds the dots of a group of columns of w and x to sum. TOP: the largest absolute value of a number of w.
template <int GROUP, int TOP, int M>
INLINE const uint8_t* add_group(const int32_t* w, const uint8_t* x, vp (&sum)[M][2], bool sizes) {
#if defined(FLEX_PAIRS)
    constexpr int MOST = 32767 / (2 * 127 * TOP), EACH = MOST >= 8 ? 8 : MOST >= 4 ? 4 : 1;  // quads that 16 bits hold
    for (int q = 0; q < GROUP / 4; q += EACH) {
        vp part[M][2];
        UNROLL for (int i = 0; i < M; i++) part[i][0] = part[i][1] = qset(0);
        x = add_quads<M>(w, q, q + EACH < GROUP / 4 ? q + EACH : GROUP / 4, x, part, sizes);
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int n = 0; n < 2; n++) sum[i][n] = pairs_join(sum[i][n], part[i][n]);
    }
    return x;
#else
    return add_quads<M>(w, 0, GROUP / 4, x, sum, sizes);
#endif
}

// Adds the products of `count` groups of 64 columns to sums [M, 2 W]. codes: of the tile and the first group; worth
// likewise: [scale, sums of 16 codes, of 32] [7, M] per group.
template <int GROUP, int TOP, bool MINIMA, bool SIGNED, int M>
__attribute__((noinline)) void add_dots(const Chunk& w, int64_t count, const uint8_t* codes, const float* worth,
                                        float* sums) {
    for (int64_t g = 0, at = 0; g < count; g++, worth += 7 * M) {
        vf value[M][2];
        for (int j = 0; j < GROUP64 / GROUP; j++, at += TWO) {
            vp sum[M][2];
            UNROLL for (int i = 0; i < M; i++)
                UNROLL for (int n = 0; n < 2; n++) sum[i][n] = qload(w.starts + at + n * W);
            codes = add_group<GROUP, TOP, M>(w.codes + at * (GROUP / 4), codes, sum, SIGNED);
            const vf scale[2] = {vload(w.scales + at), vload(w.scales + at + W)};
            UNROLL for (int i = 0; i < M; i++)
                UNROLL for (int n = 0; n < 2; n++) {
                    const vf dots = qfloat(sum[i][n]);
                    value[i][n] = j ? vfma(scale[n], dots, value[i][n]) : vmul(scale[n], dots);
                }
            if (!MINIMA) continue;
            const vf minimum[2] = {vload(w.minima + at), vload(w.minima + at + W)};
            UNROLL for (int i = 0; i < M; i++) {
                const float* own = worth + (GROUP == 16 ? 1 + j : 5 + j) * M + i;  // of 16 or 32 columns
                const vf total = vset(GROUP == 64 ? own[0] + own[M] : own[0]);
                UNROLL for (int n = 0; n < 2; n++) value[i][n] = vfma(minimum[n], total, value[i][n]);
            }
        }
        UNROLL for (int i = 0; i < M; i++) {
            const vf step = vset(worth[i]);
            UNROLL for (int n = 0; n < 2; n++) {
                float* to = sums + i * TWO + n * W;
                vstore(to, vfma(step, value[i][n], vload(to)));
            }
        }
    }
}

template <int GROUP, int TOP, bool MINIMA, bool SIGNED, int M>
void add_tile(int64_t rows, const Chunk& w, int64_t count, const uint8_t* codes, const float* worth, float* sums) {
    if constexpr (M > 1)
        if (rows < M) return add_tile<GROUP, TOP, MINIMA, SIGNED, M - 1>(rows, w, count, codes, worth, sums);
    add_dots<GROUP, TOP, MINIMA, SIGNED, M>(w, count, codes, worth, sums);
}

// Computes rows of tiles t to end of out, in WIDTH columns from c on: add(first row, sums [rows, WIDTH]) adds products
// to the bias. For any tiles, an output is the bias plus one group after the other.
template <int WIDTH, class F> INLINE void with_sums(const BlockProduct& a, int64_t t, int64_t end, int64_t c, F add) {
    const int64_t first = t * a.rows / a.tiles, count = end * a.rows / a.tiles - first;
    const size_t bytes = size_t(a.w.rows - c < WIDTH ? a.w.rows - c : WIDTH) * 4;
    alignas(64) float sums[(MOST_ROWS + BLOCK_ROWS) * WIDTH];
    memset(sums, 0, size_t(count) * WIDTH * 4);
    for (int64_t i = 0; i < count && a.bias; i++) memcpy(sums + i * WIDTH, a.bias + c, bytes);
    add(first, sums);
    for (int64_t i = 0; i < count; i++) {
        float* from = sums + i * WIDTH;
        const float* more = a.residual + (first + i) * a.out_row + c;
        for (size_t e = 0; a.residual && e < bytes / 4; e++) from[e] += more[e];
        memcpy(a.out + (first + i) * a.out_row + c, from, bytes);
    }
}

// Adds the products of 2 W rows of w from c on to sums of tiles t to end.
template <class F, bool SIGNED>
INLINE void add_strip(const BlockProduct& a, int64_t t, int64_t end, int64_t c, int64_t first, float* sums) {
    constexpr int KIND = FLIP ? 0 : F::TOP >= 64 ? 128 : F::TOP > 16 ? 32 : 16;  // fewer versions of add_dots
    Chunk chunk;
    for (int64_t begin = 0; begin < a.w.columns; begin += CHUNK) {
        const int64_t stop = a.w.columns - begin < CHUNK ? a.w.columns : begin + CHUNK, g = begin / GROUP64;
        unpack<F>(a.w, c, begin, stop, chunk);
        for (int64_t tile = t; tile < end; tile++) {
            const int64_t m = tile * a.rows / a.tiles, M = (tile + 1) * a.rows / a.tiles - m, at = m * a.groups + g * M;
            const int64_t groups = (stop - begin + GROUP64 - 1) / GROUP64;
            add_tile<F::GROUP, KIND, F::MINIMA, SIGNED, BLOCK_ROWS>(M, chunk, groups, a.codes + at * GROUP64,
                                                                    a.worths + at * 7, sums + (m - first) * TWO);
        }
    }
}

template <class F, bool SIGNED = !F::MINIMA> void dot_strip(const BlockProduct& a, int64_t t, int64_t end, int64_t c) {
    with_sums<TWO>(a, t, end, c, [&](int64_t first, float* sums) FORCED {
        add_strip<F, SIGNED>(a, t, end, c, first, sums);
    });
}

}  // namespace
