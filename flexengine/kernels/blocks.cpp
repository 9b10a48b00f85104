// Decoders of the block types of GGUF files, for products (quantized_gemm.h) and for rows of embeddings.
#include "blocks.h"

#include "decoders.h"

namespace {

// Writes numbers into a tile of units U from the part's first column on.
template <class U> struct Tile {
    float* at;
    int64_t width;

    INLINE void store(int column, const vf* x) const {
        float* to = at + column / COLUMNS<U> * width;
        store_four(to, width, x, U());
    }
    template <class T> INLINE void quad(int column, vp codes, int shift, vf scale) const {
        vf x[4];
        UNROLL for (int e = 0; e < 4; e++) x[e] = vmul(number<T>(codes, shift + 8 * e), scale);
        store(column, x);
    }
    template <class T> INLINE void quad(int column, vp codes, int shift, vf scale, vf minimum) const {
        vf x[4];
        UNROLL for (int e = 0; e < 4; e++) x[e] = vfma(number<T>(codes, shift + 8 * e), scale, minimum);
        store(column, x);
    }
};

// Calls put with part `number` of a block.
template <class F, class P, int J = 0> INLINE void with_part(int number, const Side& at, P put) {
    if constexpr ((J + 1) * F::PART < F::COLUMNS)
        if (number != J) return with_part<F, P, J + 1>(number, at, put);
    F::template part<J>(at, put);
}

constexpr int64_t AHEAD = 1024;  // bytes of each row that are prefetched before they are decoded
constexpr int LARGEST = 256;     // at least the bytes of any block

// Prefetches the lines that begin in `bytes` bytes, AHEAD bytes after `at` in each row of `row` bytes; past a row's
// end, in the row `next` bytes after it.
INLINE void ask(const uint8_t* at, const uint8_t* end, int64_t row, int64_t next) {
    uintptr_t ahead = uintptr_t(at) + AHEAD;
    if (ahead >= uintptr_t(end)) ahead += uintptr_t(next - row);
    UNROLL for (int i = 0; i < W; i++) __builtin_prefetch((const void*)(ahead + i * row), 0, 3);
}

// Decodes columns begin to end of W rows of w from row c on, see BlockDecode.
template <class F, class U>
void decode_blocks(const Matrix& w, int64_t c, int N, int64_t begin, int64_t end, int64_t width, float* tile) {
    const int64_t row = w.columns / F::COLUMNS * F::BYTES, last = w.rows - 1 - c;
    const uint8_t* const first = w.data + c * row;
    for (int64_t column = begin; column < end; column += F::PART, tile += F::PART / COLUMNS<U> * width) {
        const uint8_t* at = first + column / F::COLUMNS * F::BYTES;
        const int number = int(column % F::COLUMNS / F::PART);
        if (last >= W - 1) {
            ask(at + number * (F::BYTES * F::PART / F::COLUMNS), first + row, row, N * W * row);
            with_part<F>(number, Side(at, row), Tile<U>{tile, width});
        } else {  // the last rows: copies of their blocks, and the last one again
            uint8_t copies[W * LARGEST];
            for (int i = 0; i < W; i++) memcpy(copies + i * F::BYTES, at + (i < last ? i : last) * row, F::BYTES);
            with_part<F>(number, Side(copies, F::BYTES), Tile<U>{tile, width});
        }
    }
}

// Decodes rows ids[0] to ids[n - 1] of w, at most W, to out [n, columns].
template <class F> void decode_rows(const Matrix& w, const int64_t* ids, int n, float* out) {
    const int64_t row = w.columns / F::COLUMNS * F::BYTES;
    uint8_t copies[W * LARGEST];
    alignas(64) float tile[F::PART * W];
    for (int64_t block = 0; block < w.columns / F::COLUMNS; block++) {
        for (int i = 0; i < W; i++)
            memcpy(copies + i * F::BYTES, w.data + ids[i < n ? i : 0] * row + block * F::BYTES, F::BYTES);
        for (int number = 0; number < F::COLUMNS / F::PART; number++) {
            with_part<F>(number, Side(copies, F::BYTES), Tile<float>{tile, W});
            float* to = out + block * F::COLUMNS + number * F::PART;
            for (int i = 0; i < n; i++, to += w.columns)
                for (int e = 0; e < F::PART; e++) to[e] = tile[e * W + i];
        }
    }
}

// ---------------------------------------------------------------- int8

constexpr int CHUNK = 256, GROUP64 = 64, TWO = 2 * W;  // columns of w unpacked at a time, of a scale of x; rows of w

// Columns of 2 W rows of w: numbers as signed bytes in quads; by group of columns scales, minima, and what corrects the
// dots for FLIP: -128 times the sums of numbers.
struct Chunk {
    alignas(64) int32_t codes[CHUNK / 4 * TWO], starts[CHUNK / 16 * TWO];
    alignas(64) float scales[CHUNK / 16 * TWO], minima[CHUNK / 16 * TWO];
};

template <int GROUP> struct Unpacked {
    int32_t* codes;  // of the part's first numbers, as the others are
    float *scales, *minima;

    INLINE Unpacked(Chunk& to, int64_t column, int row)
        : codes(to.codes + column / 4 * TWO + row), scales(to.scales + column / GROUP * TWO + row),
          minima(to.minima + column / GROUP * TWO + row) {}
    template <class T> INLINE void quad(int column, vp x, int shift, vf scale) const {
        qstore(codes + column / 4 * TWO, number_bytes<T>(x, shift));
        if (column % GROUP == 0) vstore(scales + column / GROUP * TWO, scale);
    }
    template <class T> INLINE void quad(int column, vp x, int shift, vf scale, vf minimum) const {
        quad<T>(column, x, shift, scale);
        if (column % GROUP == 0) vstore(minima + column / GROUP * TWO, minimum);
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
template <class F> void unpack(const Matrix& w, int64_t c, int64_t begin, int64_t end, Chunk& to) {
    const int64_t row = w.columns / F::COLUMNS * F::BYTES;
    for (int half = 0; half < TWO; half += W) {
        const int64_t last = w.rows - 1 - c - half;  // negative if only the first half is there
        for (int64_t column = begin; column < end; column += F::PART) {
            const uint8_t* at = w.data + (last < 0 ? w.rows - 1 : c + half) * row + column / F::COLUMNS * F::BYTES;
            const int number = int(column % F::COLUMNS / F::PART);
            const Unpacked<F::GROUP> put(to, column - begin, half);
            if (last >= W - 1) {
                ask(at + number * (F::BYTES * F::PART / F::COLUMNS), w.data + (c + half + 1) * row, row, TWO * row);
                with_part<F>(number, Side(at, row), put);
            } else {
                uint8_t copies[W * LARGEST];
                for (int i = 0; i < W; i++)
                    memcpy(copies + i * F::BYTES, at + (i < last ? i : last < 0 ? 0 : last) * row, F::BYTES);
                with_part<F>(number, Side(copies, F::BYTES), put);
            }
        }
    }
    finish<F::GROUP>(int(end - begin), to);
}

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
template <int GROUP, int TOP, bool MINIMA, int M>
__attribute__((noinline)) void add_dots(const Chunk& w, int64_t count, const uint8_t* codes, const float* worth,
                                        float* sums) {
    for (int64_t g = 0, at = 0; g < count; g++, worth += 7 * M) {
        vf value[M][2];
        for (int j = 0; j < GROUP64 / GROUP; j++, at += TWO) {
            vp sum[M][2];
            UNROLL for (int i = 0; i < M; i++)
                UNROLL for (int n = 0; n < 2; n++) sum[i][n] = qload(w.starts + at + n * W);
            codes = add_group<GROUP, TOP, M>(w.codes + at * (GROUP / 4), codes, sum, !MINIMA);
            const vf scale[2] = {vload(w.scales + at), vload(w.scales + at + W)};
            UNROLL for (int i = 0; i < M; i++)
                UNROLL for (int n = 0; n < 2; n++) {
                    const vf dots = qfloat(sum[i][n]);
                    value[i][n] = j ? vfma(scale[n], dots, value[i][n]) : vmul(scale[n], dots);
                }
            if (!MINIMA) continue;
            const vf minimum[2] = {vload(w.minima + at), vload(w.minima + at + W)};
            UNROLL for (int i = 0; i < M; i++) {
                const vf total = vset(worth[((GROUP == 16 ? 1 : 5) + j) * M + i]);
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

template <int GROUP, int TOP, bool MINIMA, int M>
void add_tile(int64_t rows, const Chunk& w, int64_t count, const uint8_t* codes, const float* worth, float* sums) {
    if constexpr (M > 1)
        if (rows < M) return add_tile<GROUP, TOP, MINIMA, M - 1>(rows, w, count, codes, worth, sums);
    add_dots<GROUP, TOP, MINIMA, M>(w, count, codes, worth, sums);
}

// Computes rows of tiles t to end of out, in 2 W columns from c on. For any tiles, an output is the bias plus one group
// after the other.
template <class F> void dot_strip(const BlockProduct& a, int64_t t, int64_t end, int64_t c) {
    const int64_t first = t * a.rows / a.tiles, count = end * a.rows / a.tiles - first;
    const size_t bytes = size_t(a.w.rows - c < TWO ? a.w.rows - c : TWO) * 4;
    alignas(64) float sums[(MOST_ROWS + BLOCK_ROWS) * TWO];
    memset(sums, 0, size_t(count) * TWO * 4);
    for (int64_t i = 0; i < count && a.bias; i++) memcpy(sums + i * TWO, a.bias + c, bytes);
    constexpr int KIND = FLIP ? 0 : F::TOP >= 64 ? 128 : F::TOP > 16 ? 32 : 16;  // fewer versions of add_dots
    Chunk chunk;
    for (int64_t begin = 0; begin < a.w.columns; begin += CHUNK) {
        const int64_t stop = a.w.columns - begin < CHUNK ? a.w.columns : begin + CHUNK, g = begin / GROUP64;
        unpack<F>(a.w, c, begin, stop, chunk);
        for (int64_t tile = t; tile < end; tile++) {
            const int64_t m = tile * a.rows / a.tiles, M = (tile + 1) * a.rows / a.tiles - m, at = m * a.groups + g * M;
            const int64_t groups = (stop - begin + GROUP64 - 1) / GROUP64;
            add_tile<F::GROUP, KIND, F::MINIMA, BLOCK_ROWS>(M, chunk, groups, a.codes + at * GROUP64, a.worths + at * 7,
                                                      sums + (m - first) * TWO);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        float* from = sums + i * TWO;
        const float* more = a.residual + (first + i) * a.w.rows + c;
        for (size_t e = 0; a.residual && e < bytes / 4; e++) from[e] += more[e];
        memcpy(a.out + (first + i) * a.out_row + c, from, bytes);
    }
}

typedef void (*RowsDecode)(const Matrix&, const int64_t*, int, float*);
struct Type {
    BlockDecode units, pairs;
    RowsDecode rows;
    void (*dots)(const BlockProduct&, int64_t, int64_t, int64_t);
};
template <class F> constexpr Type type() {
#if defined(FLEX_BF16)
    return {decode_blocks<F, float>, decode_blocks<F, pair>, decode_rows<F>, dot_strip<F>};
#else
    return {decode_blocks<F, float>, nullptr, decode_rows<F>, dot_strip<F>};
#endif
}

// In the order of NATIVE in codec/gguf_blocks.py.
constexpr Type TYPES[] = {type<Q4_0>(), type<Q4_1>(), type<Q5_0>(), type<Q5_1>(), type<Q8_0>(),
                          type<Q2_K>(), type<Q3_K>(), type<Q4_K>(), type<Q5_K>(), type<Q6_K>(),
                          type<IQ4_NL>(), type<IQ4_XS>(), type<MXFP4>()};

}  // namespace

extern "C" {

BlockDecode flex_block_decoder(int32_t kind, int32_t pairs) { return pairs ? TYPES[kind].pairs : TYPES[kind].units; }

void flex_block_dots(int32_t kind, const BlockProduct& a, int64_t t, int64_t end, int64_t c, int64_t stop) {
    for (; c < stop; c += TWO) TYPES[kind].dots(a, t, end, c);
}

void flex_block_rows(int32_t kind, const Matrix& w, const int64_t* ids, int64_t n, float* out, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n * w.columns > 32768)
    for (int64_t i = 0; i < n; i += W)
        TYPES[kind].rows(w, ids + i, int(n - i < W ? n - i : W), out + i * w.columns);
}

}  // extern "C"
