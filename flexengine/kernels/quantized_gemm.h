// GEMM with quantized weights of 2, 3, 4 or 8 bits, in the layout of codec/packed.py. Plain weights: linear.h.
#pragma once
#include "decoders.h"
#include "int8_dot.h"
#include "linear.h"

namespace {

// W rows of an encoded matrix are read at a time. A quad, four neighbouring columns of a row in 32 bits, of W rows
// fills one register for any W, although a block holds LANES rows. `dot` multiplies a quad of codes by four columns of
// x.
constexpr int LANES = 16, OCTET = 32;  // OCTET: columns in 8 quads, which fill whole registers in planes of any width
constexpr int LONGEST = 4 * OCTET;  // maximum columns of a group
constexpr int32_t BLOCKS = 16;      // Product.bits of types of blocks.cpp are their numbers plus this

// x: [rows, k], fp32 or, for AS_BF16, pairs of bf16; for pairs, k and x_row count pairs, as in Linear. w: [n, k],
// encoded. scratch: for AS_INT8, see `Rounded`.
enum Compute : int32_t { AS_FP32 = 0, AS_BF16 = 1, AS_INT8 = 2 };
// Products by int8 read scratch only, which `RoundTasks` of a call with the same x writes. residual: as in Linear.
struct Product {
    const float* x; const uint8_t* w; const float *bias, *residual; float *out, *scratch;
    int64_t rows, n, k, x_row, out_row, groups;
    int64_t layout;  // address of the Layout of formats in parted.cpp, else 0
    int32_t bits, group, compute, threads;

    const Layout* parts() const { return (const Layout*)layout; }
};

// Division of out into tasks, in the order of `linear`: `down` runs of rows, each of `across` strips of `width`
// columns.
struct Blocks {
    int64_t down, width, across;

    Blocks(const Product& a, int64_t vecs, int64_t least = W) : down((a.rows + GROUP - 1) / GROUP), width(vecs * W) {
        while (width > least && strips(a.n) * down < 3 * a.threads) width /= 2;
        across = strips(a.n);
    }
    int64_t strips(int64_t n) const { return (n + width - 1) / width; }
};

// W rows of w from row c on, of a strip of N * W rows. The same thread later reads the next strip.
template <int BITS> struct Strip {
    static constexpr int LOW = BITS == 3 ? 2 : BITS;  // bits of the first plane
    static constexpr uint32_t MASK = 0x01010101u * ((1u << LOW) - 1);
    static constexpr int TOGETHER = BITS == 3 ? 8 : 8 / BITS;  // quads that share registers
    static constexpr int64_t AHEAD = 4096;                     // bytes
    const uint8_t *at, *end;
    int64_t lane, group, bytes, next;  // lane: number of the first row in its block; bytes: of a block
    int shift;  // group is 2^shift

    Strip() = default;
    Strip(const Product& a, int64_t c, int N)
        : lane(c % LANES), group(a.group), bytes(4 * LANES + LANES * a.group * BITS / 8) {
        const int64_t length = a.groups * bytes;
        at = a.w + c / LANES * length, end = at + length;
        next = (N * W / LANES - 1) * length;
        shift = __builtin_ctz(unsigned(a.group));
    }
    // Prefetches the data AHEAD bytes past column d of group g.
    INLINE void ask(int64_t g, int64_t d) const {
        uintptr_t ahead = uintptr_t(at) + g * bytes + d * LANES * BITS / 8 + AHEAD;
        if (ahead >= uintptr_t(end)) ahead += next;
        UNROLL for (int i = 0; i <= BITS; i++) __builtin_prefetch((const void*)(ahead + 64 * i), 0, 3);
    }
    vf scale(int64_t g) const { return vload((const fp16*)(at + g * bytes) + lane); }
    vf minimum(int64_t g) const { return vload((const fp16*)(at + g * bytes) + LANES + lane); }

    // Returns quad i (a constant), counted from column d of group g; d begins TOGETHER quads, or an octet.
    INLINE vp quad(int64_t g, int64_t d, int i) const {
        const uint8_t* low = at + g * bytes + 4 * LANES + d * LANES * LOW / 8 + lane * 4;
        vp codes = qright(qload(low + i * LOW / 8 * 4 * LANES), i * LOW % 8);
        if (BITS == 8) return codes;
        codes = qand(codes, MASK);
        if (BITS != 3) return codes;
        vp third = qload(low + (group - d) * LANES * LOW / 8 + d * LANES / 8);
        third = i < 2 ? qleft(third, 2 - i) : qright(third, i - 2);
        return qor(codes, qand(third, 0x04040404));
    }
};

// Decodes units d to d + span of W rows of w from row c on into tile [span, W], `width` floats from one unit to the
// next. d begins an OCTET; the tile is written to the end of an OCTET. N: as in Strip.
typedef void (*Decode)(const Product& a, int64_t c, int N, int64_t d, int64_t span, int64_t width, float* tile);

template <int BITS, class U>
void decode_strip(const Product& a, int64_t c, int N, int64_t d, int64_t span, int64_t width, float* tile) {
    const Strip<BITS> w(a, c, N);
    const int64_t stop = (d + span) * COLUMNS<U>;
    for (int64_t column = d * COLUMNS<U>; column < stop; column += OCTET) {
        const int64_t g = column >> w.shift, inside = column - (g << w.shift);
        const vf scale = w.scale(g), minimum = w.minimum(g);
        w.ask(g, inside);
        UNROLL for (int i = 0; i < 8; i++) {
            const vp codes = w.quad(g, inside, i);
            vf x[4];
            UNROLL for (int e = 0; e < 4; e++) x[e] = vfma(qfloat(qand(qright(codes, 8 * e), 255)), scale, minimum);
            store_four(tile, width, x, U());
        }
    }
}

template <class U>
void decode_blocks(const Product& a, int64_t c, int N, int64_t d, int64_t span, int64_t width, float* tile) {
    constexpr int64_t EACH = COLUMNS<U>;
    const BlockDecode decode = flex_block_decoder(a.bits - BLOCKS, EACH == 2);
    decode({a.w, a.n, a.k * EACH, a.parts()}, c, N, d * EACH, (d + span) * EACH, width, tile);
}

template <class U> Decode decoder(int32_t bits) {
    if (bits >= BLOCKS) return decode_blocks<U>;
    if (bits == 2) return decode_strip<2, U>;
    if (bits == 3) return decode_strip<3, U>;
    return bits == 4 ? decode_strip<4, U> : decode_strip<8, U>;
}

// ---------------------------------------------------------------- fp32, bf16

// For at most FEW_ROWS rows, the sums of all rows, FEW_SPAN decoded units and those of x stay in L1 together. More rows
// use a tile of SPAN units in L2. Types of blocks, whose rows are read side by side, do so with more rows of pairs: 193
// instead of 119 GOP/s of 64 rows.
constexpr int FEW_ROWS = 8 * ROWS, FEW_PAIR_ROWS = 22 * ROWS, FEW_SPAN = 64;
template <class U> bool are_few(const Product& p, int64_t rows) {
    return rows <= (p.bits >= BLOCKS && COLUMNS<U> == 2 ? FEW_PAIR_ROWS : FEW_ROWS);
}

// Computes rows m to end of out, if they are few, at N * W columns from c on.
template <class U, int N>
void product_few(const Product& p, const Linear& a, Decode decode, int64_t m, int64_t end, int64_t c) {
    alignas(64) float tile[FEW_SPAN * N * W], sums[(COLUMNS<U> == 2 ? FEW_PAIR_ROWS : FEW_ROWS) * N * W];
    for (int64_t d = 0; d < a.k; d += FEW_SPAN) {
        const int64_t span = a.k - d < FEW_SPAN ? a.k - d : FEW_SPAN;
        for (int n = 0; n < N; n++) decode(p, c + n * W, N, d, span, N * W, tile + n * W);
        for_heights(m, end, [&](auto M, int64_t row) {
            add_units<M, N>(a, row, c, d, span, sums + (row - m) * N * W, [&](vf (&sum)[M][N]) {
                multiply<U>(a.x + row * a.x_row + d, a.x_row, tile, span, sum);
            });
        });
    }
}

// Computes rows m to end of out at N * W columns from c on, as `linear` does.
template <class U, int N>
void product_tile(const Product& p, Decode decode, int64_t m, int64_t end, int64_t c) {
    const Linear a{p.x, nullptr, p.bias, p.residual, p.out, p.rows, p.n, p.k, p.x_row, p.k, p.out_row, 0, 0, 0, 0, p.threads};
    if (are_few<U>(p, end - m)) return product_few<U, N>(p, a, decode, m, end, c);
    alignas(64) float tile[SPAN * N * W];
    for (int64_t d = 0; d < a.k; d += SPAN) {
        const int64_t span = a.k - d < SPAN ? a.k - d : SPAN;
        for (int n = 0; n < N; n++) decode(p, c + n * W, N, d, span, N * W, tile + n * W);
        multiply_group<U, N>(a, tile, m, end, c, d, span);
    }
}

// Tasks of a call without int8.
struct DecodedTasks {
    const Product& a;
    const Blocks blocks;
    const int64_t height, count;

    explicit DecodedTasks(const Product& a)
        : a(a), blocks(a, VECS), height(blocks.down ? (a.rows + blocks.down - 1) / blocks.down : 0),
          count(blocks.across * blocks.down) {}
    int64_t numbers() const { return a.rows * a.n * a.k; }

    template <class U> void multiply(int64_t b) const {
        const Decode decode = decoder<U>(a.bits);
        const int64_t c = b % blocks.across * blocks.width, m = b / blocks.across * height;
        const int64_t end = a.rows - m < height ? a.rows : m + height;
        const int64_t vecs = ((a.n - c < blocks.width ? a.n - c : blocks.width) + W - 1) / W;
        with_vecs(vecs, [&](auto N) { product_tile<U, N>(a, decode, m, end, c); });
    }
    void run(int64_t b) const {
#if defined(FLEX_BF16)
        if (a.compute == AS_BF16) return multiply<pair>(b);
#endif
        multiply<float>(b);
    }
};

// ---------------------------------------------------------------- int8

// A tile has DOT_ROWS x DOT_VECS registers of sums. Codes are unpacked in registers for every tile again, by execution
// units that are idle otherwise. Unpacking once for all tiles would write and read many more bytes of memory. Tall
// tiles unpack least. With groups of 64 columns a core with VNNI reaches 16/19 of its peak of dots, as each 16 dots are
// followed by 3 products with scales and minima, which use the same execution units.
#if defined(FLEX_AVX512)
constexpr int DOT_ROWS = 12, DOT_VECS = 2;
#else
constexpr int DOT_ROWS = ROWS, DOT_VECS = VECS;
#endif

// Division of the rows of x into tiles of nearly equal height.
struct Tiles {
    int64_t rows, count;

    Tiles(int64_t rows, int64_t most) : rows(rows), count((rows + most - 1) / most) {}
    explicit Tiles(const Product& a) : Tiles(a.rows, a.bits < BLOCKS ? DOT_ROWS : BLOCK_ROWS) {}
    int64_t first(int64_t t) const { return t * rows / count; }
    int64_t height(int64_t t) const { return first(t + 1) - first(t); }
};

// x rounded to int8 per group, in the order of reading: tiles of rows, and in each tile its groups. For each group, a
// tile of M rows from row m on has quads of codes [group / 4, M], and [2, M]: scales ("worth") and sums of codes. For
// types of blocks it has codes combined with FLIP, and [1 + 4 + 2, M]: also sums of 16 codes each, and of 32.
struct Rounded {
    int64_t groups, group, each;  // each: numbers beside the codes
    float* worths;
    int8_t* quads;

    explicit Rounded(const Product& a)
        : groups(a.groups), group(a.group), each(a.bits < BLOCKS ? 2 : 1 + group / 16 + group / 32), worths(a.scratch),
          quads((int8_t*)(worths + each * groups * a.rows)) {}
    int8_t* codes(int64_t m, int64_t M, int64_t g) const { return quads + (m * groups + g * M) * group; }
    float* worth(int64_t m, int64_t M, int64_t g) const { return worths + each * (m * groups + g * M); }
};

// Rounds a group of a row: writes codes as quads, M quads apart, and the scale to *worth; adds partial sums (W lanes) of
// 16 codes to totals[0], of the next 16 to totals[next], and so on. flip: combined with codes by exclusive or. If a
// number is not finite, the scale is NaN, and so becomes the whole row of out. A group below 1.5e-36 counts as zeros,
// since its scale would be inexact and its codes could exceed 127.
void round_row(const float* x, int64_t group, int64_t M, float* worth, int8_t* codes, uint32_t flip, vf* totals, int next) {
    vp top = qset(0);  // maximum of absolute values, compared as integers, so that NaN and infinity are found too
    for (int i = 0; i < group; i += W) top = qtop(top, qand(qload(x + i), 0x7fffffff));
    const float scale = float_of(uint32_t(qtop(top))) / 127.f;
    const bool some = scale >= FLT_MIN && scale < INFINITY;
    *worth = scale < INFINITY ? scale : NAN;
    const vf magic = vset(12582912.f), step = vset(scale);  // magic: see vexp
    for (int i = 0; i < group; i += W) {
        int8_t part[W];
        const vf code = some ? vsub(vadd(vdiv(vload(x + i), step), magic), magic) : vset(0.f);
        totals[i / 16 * next] = vadd(totals[i / 16 * next], code);
        qbytes(part, code);
        for (int e = 0; e < W; e += 4, codes += 4 * M) {
            uint32_t four;
            memcpy(&four, part + e, 4);
            memcpy(codes, &(four ^= flip), 4);
        }
    }
}

// Rounds group g of M rows of x from row m on.
void round_tile(const Product& a, const Rounded& to, int64_t m, int64_t M, int64_t g) {
    const int64_t first = g * a.group, there = a.k - first < a.group ? a.k - first : a.group;
    float part[LONGEST] = {}, *worth = to.worth(m, M, g), sums[LONGEST / 16][W];
    vf totals[LONGEST / 16][W] = {};
    const bool blocks = a.bits >= BLOCKS;
    for (int64_t i = 0; i < M; i++) {
        const float* x = a.x + (m + i) * a.x_row + first;
        if (there < a.group) x = (const float*)memcpy(part, x, size_t(there) * 4);
        round_row(x, a.group, M, worth + i, to.codes(m, M, g) + 4 * i, blocks ? FLIP : 0, totals[0] + i,
                  blocks ? W : 0);
    }
    const int sixteens = blocks ? int(a.group / 16) : 1;  // if not blocks, all codes were added to the same total
    for (int j = 0; j < sixteens; j++) {
        vstore(sums[j], vsums(totals[j]));
        memcpy(worth + (1 + j) * M, sums[j], size_t(M) * 4);
    }
    for (int j = 0; blocks && j < sixteens / 2; j++)
        for (int64_t i = 0; i < M; i++) worth[(1 + sixteens + j) * M + i] = sums[2 * j][i] + sums[2 * j + 1][i];
}

template <int M, int N> INLINE void clear(vp (&sum)[M][N]) {
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int n = 0; n < N; n++) sum[i][n] = qset(0);
}

// Calls add(sum, u, v) for each quad in columns d to end of group g and each sum of a tile, with the quads u of w and v
// of x. Returns the address of the codes of column `end`.
template <int BITS, int M, int N, class F>
INLINE const int8_t* add_quads(const Strip<BITS> (&w)[N], const int8_t* codes, int64_t g, int64_t d, int64_t end,
                               vp (&sum)[M][N], F add) {
    constexpr int TOGETHER = Strip<BITS>::TOGETHER;
    for (; d < end; d += 4 * TOGETHER) {
        UNROLL for (int q = 0; q < TOGETHER; q++, codes += 4 * M) {
            vp u[N];
            UNROLL for (int n = 0; n < N; n++) u[n] = w[n].quad(g, d, q);
            UNROLL for (int i = 0; i < M; i++) {
                int32_t four;
                memcpy(&four, codes + 4 * i, 4);
                const vp v = qset(four);
                UNROLL for (int n = 0; n < N; n++) sum[i][n] = add(sum[i][n], u[n], v);
            }
        }
    }
    return codes;
}

// Computes the dots of group g: codes of M rows of x times codes of N * W rows of w.
template <int BITS, int M, int N>
INLINE void dot_group(const Strip<BITS> (&w)[N], const int8_t* codes, int64_t g, vp (&sum)[M][N]) {
    clear(sum);
#if defined(FLEX_PAIRS)
    if constexpr (BITS <= 4) {
        // The most pairs whose sum fits in 16 bits, and the columns summed so: a sum takes a pair of each quad.
        constexpr int MAX_PAIRS = 32767 / (2 * 127 * ((1 << BITS) - 1));
        constexpr int COLUMNS = MAX_PAIRS / Strip<BITS>::TOGETHER * Strip<BITS>::TOGETHER * 4;
        for (int64_t d = 0, end; d < w[0].group; d = end) {
            end = w[0].group - d < COLUMNS ? w[0].group : d + COLUMNS;
            vp part[M][N];
            clear(part);
            codes = add_quads(w, codes, g, d, end, part, [](vp a, vp u, vp v) { return pairs(a, u, v); });
            UNROLL for (int i = 0; i < M; i++)
                UNROLL for (int n = 0; n < N; n++) sum[i][n] = pairs_join(sum[i][n], part[i][n]);
        }
        return;
    }
#endif
    add_quads(w, codes, g, 0, w[0].group, sum, [](vp a, vp u, vp v) { return dot(a, u, v); });
}

// Computes a tile of M rows of out from m on, at N * W columns from c on. For any tiles, an output is the bias plus one
// group after the other. next, ahead: address of the data read after this tile, and bytes prefetched of it per group.
template <int BITS, int M, int N>
__attribute__((noinline)) void dot_tile(const Product& a, const Rounded& x, int64_t m, int64_t c, uintptr_t next,
                                        int64_t ahead) {
    Strip<BITS> w[N];
    UNROLL for (int n = 0; n < N; n++) w[n] = Strip<BITS>(a, c + n * W, N);
    const size_t columns = size_t(a.n - c < N * W ? a.n - c : N * W) * 4;
    alignas(64) float sums[M][N * W] = {};
    for (int i = 0; i < M; i++) {
        if (a.bias) memcpy(sums[i], a.bias + c, columns);
        for (int n = 0; n < N; n++) __builtin_prefetch(a.out + (m + i) * a.out_row + c + n * W, 1, 3);
    }
    for (int64_t g = 0; g < a.groups; g++) {
        for (const uintptr_t end = next + ahead; next < end; next += 64) __builtin_prefetch((const void*)next, 0, 3);
        vp sum[M][N];
        dot_group(w, x.codes(m, M, g), g, sum);
        const float* worth = x.worth(m, M, g);
        vf scale[N], minimum[N];
        UNROLL for (int n = 0; n < N; n++) scale[n] = w[n].scale(g), minimum[n] = w[n].minimum(g);
        UNROLL for (int i = 0; i < M; i++) {
            const vf step = vset(worth[i]), total = vset(worth[M + i]);
            UNROLL for (int n = 0; n < N; n++) {
                const vf value = vfma(scale[n], qfloat(sum[i][n]), vmul(minimum[n], total));
                vstore(sums[i] + n * W, vfma(step, value, vload(sums[i] + n * W)));
            }
        }
    }
    for (int i = 0; i < M; i++) {
        const float* residual = a.residual + (m + i) * a.out_row + c;
        for (size_t e = 0; a.residual && e < columns / 4; e++) sums[i][e] += residual[e];
        memcpy(a.out + (m + i) * a.out_row + c, sums[i], columns);
    }
}

template <int BITS, int M, int N>
void dot_rows(const Product& a, const Rounded& x, int64_t m, int64_t rows, int64_t c, uintptr_t next, int64_t ahead) {
    if constexpr (M > 1)
        if (rows < M) return dot_rows<BITS, M - 1, N>(a, x, m, rows, c, next, ahead);
    dot_tile<BITS, M, N>(a, x, m, c, next, ahead);
}

// Computes tiles t to end of rows, at N * W columns from c on. With few rows, the dots of a tile take less time than
// the loads of its weights. So each of the first SHARE tiles prefetches an equal part of the strip that this thread is
// likely to read next.
constexpr int64_t SHARE = 4;

template <int BITS, int N>
void dot_strip(const Product& a, const Rounded& x, const Tiles& tiles, int64_t t, int64_t end, int64_t c) {
    const Strip<BITS> later(a, c + N * W, N);
    const int64_t share = end - t < SHARE ? end - t : SHARE, group = N * W * later.bytes / LANES;
    const int64_t ahead = (group + share * 64 - 1) / (share * 64) * 64;
    uintptr_t next = uintptr_t(later.at);
    for (const int64_t asking = t + share; t < end; t++, next += uintptr_t(ahead * a.groups))
        dot_rows<BITS, DOT_ROWS, N>(a, x, tiles.first(t), tiles.height(t), c, next, t < asking ? ahead : 0);
}

// Does the same at columns c to stop. If there are many tiles, each of them passes all these columns before the next
// tile, as the codes of all rows would not stay in L2 until the next strip. Few tiles pass each strip together.
template <int BITS>
void dot_block(const Product& a, const Rounded& x, const Tiles& tiles, int64_t t, int64_t end, int64_t c,
               int64_t stop) {
    const int64_t together = end - t > SHARE ? 1 : end - t, width = DOT_VECS * W;
    for (; t < end; t += together) {
        for (int64_t at = c; at < stop; at += width) {
            if (DOT_VECS > 1 && stop - at > W) dot_strip<BITS, DOT_VECS>(a, x, tiles, t, t + together, at);
            else dot_strip<BITS, 1>(a, x, tiles, t, t + together, at);
        }
    }
}

// Tasks that round x to int8: some groups of a tile each.
struct RoundTasks {
    static constexpr int64_t TOGETHER = 4096;  // numbers of a task
    const Product& a;
    const Rounded x;
    const Tiles tiles;
    const int64_t each, parts, count;  // groups of a task, tasks of a tile

    explicit RoundTasks(const Product& a)
        : a(a), x(a), tiles(a), each((TOGETHER + DOT_ROWS * a.group - 1) / (DOT_ROWS * a.group)),
          parts((a.groups + each - 1) / each), count(tiles.count * parts) {}
    int64_t numbers() const { return a.rows * a.k; }
    void run(int64_t i) const {
        const int64_t t = i / parts, end = (i % parts + 1) * each;
        for (int64_t g = i % parts * each; g < (end < a.groups ? end : a.groups); g++)
            round_tile(a, x, tiles.first(t), tiles.height(t), g);
    }
};

// Tasks of a call with int8.
struct DotTasks {
    const Product& a;
    const Rounded x;
    const Tiles tiles;
    const Blocks blocks;
    const int64_t count;

    explicit DotTasks(const Product& a)
        : a(a), x(a), tiles(a), blocks(a, tiles.count > SHARE ? 4 * DOT_VECS : DOT_VECS, a.bits < BLOCKS ? W : 2 * W),
          count(blocks.across * blocks.down) {}
    int64_t numbers() const { return a.rows * a.n * a.k; }

    template <int BITS> void multiply(int64_t b) const {
        const int64_t c = b % blocks.across * blocks.width, stop = a.n - c < blocks.width ? a.n : c + blocks.width;
        const int64_t i = b / blocks.across;
        dot_block<BITS>(a, x, tiles, i * tiles.count / blocks.down, (i + 1) * tiles.count / blocks.down, c, stop);
    }
    void multiply_blocks(int64_t b) const {
        const int64_t c = b % blocks.across * blocks.width, stop = a.n - c < blocks.width ? a.n : c + blocks.width;
        const int64_t i = b / blocks.across;
        const BlockProduct call{{a.w, a.n, a.k, a.parts()}, x.worths, (const uint8_t*)x.quads, a.bias, a.residual, a.out,
                                a.rows, a.out_row, a.groups, tiles.count};
        flex_block_dots(a.bits - BLOCKS, call, i * tiles.count / blocks.down, (i + 1) * tiles.count / blocks.down, c, stop);
    }
    void run(int64_t b) const {
        if (a.bits >= BLOCKS) multiply_blocks(b);
        if (a.bits == 2) multiply<2>(b);
        if (a.bits == 3) multiply<3>(b);
        if (a.bits == 4) multiply<4>(b);
        if (a.bits == 8) multiply<8>(b);
    }
};

// ---------------------------------------------------------------- rows

// Decodes row `id` of w to out[k].
template <int BITS> void decode_row(const uint8_t* w, int64_t id, int64_t k, int64_t group, float* out) {
    constexpr int LOW = Strip<BITS>::LOW;
    const int64_t bytes = 4 * LANES + LANES * group * BITS / 8, groups = (k + group - 1) / group, lane = id % LANES;
    const uint8_t* at = w + id / LANES * groups * bytes;
    for (int64_t column = 0; column < k; at += bytes) {
        const float scale = widen(((const fp16*)at)[lane]), minimum = widen(((const fp16*)at)[LANES + lane]);
        const uint8_t* codes = at + 4 * LANES + lane * 4;
        const uint8_t* third = codes + group * LANES * LOW / 8;
        for (int64_t quad = 0; quad < group / 4 && column < k; quad++)
            for (int e = 0; e < 4 && column < k; e++, column++) {
                int code = codes[quad * LOW / 8 * 4 * LANES + e] >> quad * LOW % 8 & ((1 << LOW) - 1);
                if (BITS == 3) code |= (third[quad / 8 * 4 * LANES + e] >> quad % 8 & 1) << 2;
                out[column] = minimum + float(code) * scale;
            }
    }
}

}  // namespace

extern "C" {

// Decodes rows `ids` of w, which has k columns, to out [n, k]. bits: as in Product.
void flex_encoded_rows(const uint8_t* w, const int64_t* ids, int64_t n, int64_t k, int64_t group, int32_t bits, float* out,
                       int32_t threads) {
    if (bits >= BLOCKS) return flex_block_rows(bits - BLOCKS, {w, 0, k, nullptr}, ids, n, out, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (n * k > 32768)
    for (int64_t i = 0; i < n; i++) {
        if (bits == 2) decode_row<2>(w, ids[i], k, group, out + i * k);
        if (bits == 3) decode_row<3>(w, ids[i], k, group, out + i * k);
        if (bits == 4) decode_row<4>(w, ids[i], k, group, out + i * k);
        if (bits == 8) decode_row<8>(w, ids[i], k, group, out + i * k);
    }
}

}  // extern "C"
