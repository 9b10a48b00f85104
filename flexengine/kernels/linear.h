// Matrix products with weights of 16 or 32 bits, in fp32 or, if the CPU has the instruction, in pairs of bf16.
#pragma once
#include <type_traits>

#include "convert.h"
#include "transpose.h"

namespace {

// out = x w^T is computed as a sum of outer products. A register holds one row of out at W columns (rows of w), and the
// products of each k in turn are added to it; no sum crosses lanes. SPAN columns of w are summed from zero, and the sum
// is then added to out. So an output's sum takes the same steps in the same order for any M, N and number of threads,
// and in both methods:
// - Up to FEW rows of x: w is read once, and transposed and widened in registers.
// - More rows: they share a tile of SPAN columns, transposed and widened once into L1 or L2, with ROWS x VECS registers
//   of sums at a time.
//
// GFLOP/s of one Zen 5 core, weights of 2048 x 8192, at 1, 8, 32, 128 and 512 rows: 29, 140, 150, 205, 218. oneDNN on
// weights widened before: 15, 62, 136, 197, 213. Dot products, with W-lane partial sums in 5 x 5 registers: 23, 77,
// 140, 169, 177; they move W times as many sums.

constexpr int FEW = 8, SPAN = 512;  // rows; units (numbers, or pairs of bf16), as `k` and `d` are everywhere below
constexpr int GROUP = 512;  // rows of x that use every tile before the next rows do, so that they stay in L3

// x: fp32, or pairs of bf16; for pairs, k, x_row and w_row count pairs.
// across: w is [k, n], and x w is added to out; without it w is [n, k], and out = bias + x w^T.
struct Linear {
    const float *x; const void* w; const float* bias; float* out;
    int64_t rows, n, k, x_row, w_row, out_row;
    int32_t w_dtype, pairs, across, threads;
};

// For weights T: `type` is the unit of multiplication, EACH the number of units per lane of a loaded register, and
// unit(a, e, T()) the e-th of these units.
template <class T> struct Units { typedef float type; static constexpr int EACH = 2; };
template <> struct Units<pair> { typedef pair type; static constexpr int EACH = 1; };
template <> struct Units<float> { typedef float type; static constexpr int EACH = 1; };
template <class T> INLINE vf unit(vp a, int e, T) { return e ? odd(a, T()) : even(a, T()); }
INLINE vf unit(vp a, int, pair) { return (vf)a; }
INLINE vf unit(vp a, int, float) { return (vf)a; }

// Adds one span's sums, [M, N * W], to out at row m and column c. Without `across`, the first span's sums are added to
// the bias instead.
template <int M, int N> inline void add(const Linear& a, const float* sums, int64_t m, int64_t c, bool first) {
    for (int i = 0; i < M * N; i++) {
        const int64_t at = c + i % N * W, count = a.n - at;
        if (count <= 0) continue;
        float *to = a.out + (m + i / N) * a.out_row + at, part[W];
        const float* from = !first || a.across ? to : a.bias ? a.bias + at : nullptr;
        vf total = vload(sums + i * W);
        if (from) total = vadd(count < W ? vload_part(from, int(count)) : vload(from), total);
        vstore(count < W ? part : to, total);
        if (count < W) memcpy(to, part, size_t(count) * 4);
    }
}

template <int M, int N> inline void add(const Linear& a, const vf (&sum)[M][N], int64_t m, int64_t c, bool first) {
    alignas(64) float sums[M * N * W];
    keep(sum, sums);
    add<M, N>(a, sums, m, c, first);
}

// W rows of w from row c on; if there are fewer, the last one is repeated.
template <class T> struct Rows {
    const T* w;
    int64_t k, row, last, next;

    // next: row that is read after the end of row c, for prefetches
    Rows(const Linear& a, int64_t c, int64_t next)
        : w((const T*)a.w + c * a.w_row), k(a.k), row(a.w_row), last(a.n - 1 - c), next((next - c) * row - k) {}

    // Loads `count` units from d on, transposed, and prefetches the data SPAN units later.
    INLINE void load(int64_t d, int count, vp* block) const {
        uintptr_t ahead = uintptr_t(w) + (d + SPAN < k ? d + SPAN : d + SPAN + next) * sizeof(T);
        UNROLL for (int i = 0; i < W; i++, ahead += row * sizeof(T)) __builtin_prefetch((const void*)ahead, 0, 2);
        const T* at = w + d;
        UNROLL for (int i = 0; i < W; i++, at += i <= last ? row : 0) block[i] = vload_pairs(at, count * int(sizeof(T) / 2));
        transpose(block);
    }
};

// Widens units d to d + span of W rows of w into tile [span, W], `width` floats from one unit to the next. The tile is
// written up to a multiple of HELD units, which fill a register.
template <class T> void widen_rows(const Rows<T>& w, int64_t d, int64_t span, int64_t width, float* tile) {
    constexpr int EACH = Units<T>::EACH, HELD = EACH * W;
    for (const int64_t end = d + span; d < end; d += HELD) {
        vp block[W];
        w.load(d, end - d < HELD ? int(end - d) : HELD, block);
        UNROLL for (int j = 0; j < W; j++)
            UNROLL for (int e = 0; e < EACH; e++, tile += width) vstore(tile, unit(block[j], e, T()));
    }
}

// Widens units d to d + span of w, which is [k, n], at up to `width` columns from c on, into tile [span, width].
template <class T> void widen_columns(const Linear& a, int64_t c, int64_t d, int64_t span, int64_t width, float* tile) {
    constexpr int64_t AHEAD = 16;  // rows
    const int64_t columns = a.n - c < width ? a.n - c : width;
    const T* row = (const T*)a.w + d * a.w_row + c;
    for (int64_t i = 0; i < span; i++, row += a.w_row, tile += width) {
        for (int64_t j = 0; j < columns; j += 64 / int64_t(sizeof(T)))
            __builtin_prefetch((const void*)(uintptr_t(row + j) + AHEAD * a.w_row * sizeof(T)));
        convert_row(row, tile, columns);
        for (int64_t j = columns; j < width; j++) tile[j] = 0.f;
    }
}

// Computes M rows of out from m on, at N * W columns from c on; w is widened in registers.
template <class T, int M, int N> void multiply_few(const Linear& a, int64_t m, int64_t c) {
    typedef typename Units<T>::type U;
    constexpr int EACH = Units<T>::EACH, HELD = EACH * W;
    const Rows<T> w(a, c, c + N * W), more(a, c + (N - 1) * W, c + (2 * N - 1) * W);
    for (int64_t low = 0; low < a.k; low += SPAN) {
        const int64_t high = a.k - low < SPAN ? a.k : low + SPAN;
        const float* x = a.x + m * a.x_row + low;
        vf sum[M][N];
        clear(sum);
        int64_t d = low;
        for (; d + HELD <= high; d += HELD, x += HELD) {
            vp block[N][W];
            w.load(d, HELD, block[0]);
            if (N > 1) more.load(d, HELD, block[N - 1]);
            _Pragma("GCC unroll 4") for (int j = 0; j < W; j++) {  // with more unrolling, AVX-512 spills sums
                UNROLL for (int n = 0; n < N; n++) {
                    vf u[EACH];
                    UNROLL for (int e = 0; e < EACH; e++) u[e] = unit(block[n][j], e, T());
                    UNROLL for (int i = 0; i < M; i++)
                        UNROLL for (int e = 0; e < EACH; e++)
                            sum[i][n] = vmadd(vset(x[i * a.x_row + EACH * j + e]), u[e], sum[i][n], U());
                }
            }
        }
        if (d < high) {
            float tail[HELD * N * W];
            widen_rows(w, d, high - d, N * W, tail);
            if (N > 1) widen_rows(more, d, high - d, N * W, tail + (N - 1) * W);
            multiply<U>(x, a.x_row, tail, high - d, sum);
        }
        add(a, sum, m, c, low == 0);
    }
}

// Does the same for `rows` <= M rows and the columns c to end.
template <class T, int M> void multiply_columns(const Linear& a, int64_t m, int64_t rows, int64_t c, int64_t end) {
    if constexpr (M > 1)
        if (rows < M) return multiply_columns<T, M - 1>(a, m, rows, c, end);
    constexpr int N = M < 3 ? 2 : 1;  // with fewer sums every addition would wait for the previous one
    for (; c + W < end; c += N * W) multiply_few<T, M, N>(a, m, c);
    for (; c < end; c += W) multiply_few<T, M, 1>(a, m, c);
}

// Adds M rows of x times a tile [span, N * W] to out.
template <class U, int M, int N>
void multiply_tile(const Linear& a, const float* tile, int64_t m, int64_t c, int64_t d, int64_t span) {
    vf sum[M][N];
    clear(sum);
    multiply<U>(a.x + m * a.x_row + d, a.x_row, tile, span, sum);
    add(a, sum, m, c, d == 0);
}

template <class U, int M, int N>
void multiply_rows(const Linear& a, const float* tile, int64_t m, int64_t rows, int64_t c, int64_t d, int64_t span) {
    if constexpr (M > 1)
        if (rows < M) return multiply_rows<U, M - 1, N>(a, tile, m, rows, c, d, span);
    multiply_tile<U, M, N>(a, tile, m, c, d, span);
}

// Multiplies rows m to end in tiles of nearly equal height.
template <class U, int N>
void multiply_group(const Linear& a, const float* tile, int64_t m, int64_t end, int64_t c, int64_t d, int64_t span) {
    for (int64_t tiles = (end - m + ROWS - 1) / ROWS; tiles; tiles--) {
        const int64_t rows = (end - m + tiles - 1) / tiles;
        multiply_rows<U, ROWS, N>(a, tile, m, rows, c, d, span);
        m += rows;
    }
}

template <class T> void linear(const Linear& a) {
    typedef typename Units<T>::type U;
    const int64_t groups = (a.rows + GROUP - 1) / GROUP, height = (a.rows + groups - 1) / groups;
    int64_t width = VECS * W;  // columns of out per task; fewer if there would be too few tasks for the threads
    while (width > W && (a.n + width - 1) / width * groups < 3 * a.threads) width /= 2;
    const int64_t blocks = (a.n + width - 1) / width;
#pragma omp parallel for num_threads(a.threads) schedule(dynamic)
    for (int64_t b = 0; b < blocks * groups; b++) {
        const int64_t c = b % blocks * width, columns = a.n - c < width ? a.n - c : width, vecs = (columns + W - 1) / W;
        const int64_t m = b / blocks * height, end = a.rows - m < height ? a.rows : m + height;
        if (end - m <= FEW && !a.across) {
            multiply_columns<T, FEW>(a, m, end - m, c, c + columns);
            continue;
        }
        alignas(64) float tile[SPAN * VECS * W];
        for (int64_t d = 0; d < a.k; d += SPAN) {
            const int64_t span = a.k - d < SPAN ? a.k - d : SPAN;
            if constexpr (!std::is_same<T, pair>())
                if (a.across) widen_columns<T>(a, c, d, span, vecs * W, tile);
            for (int64_t n = 0; n < vecs * W && !a.across; n += W)
                widen_rows(Rows<T>(a, c + n, c + n + width * a.threads), d, span, vecs * W, tile + n);
            if (vecs == 1) multiply_group<U, 1>(a, tile, m, end, c, d, span);
            if (vecs == 2) multiply_group<U, 2>(a, tile, m, end, c, d, span);
            if (VECS > 2 && vecs == 3) multiply_group<U, VECS - 1>(a, tile, m, end, c, d, span);
            if (VECS > 2 && vecs == 4) multiply_group<U, VECS>(a, tile, m, end, c, d, span);
        }
    }
}

}  // namespace

extern "C" {

// Returns 1 if products of pairs of bf16 are compiled in, else 0.
int32_t flex_bf16() {
#if defined(FLEX_BF16)
    return 1;
#else
    return 0;
#endif
}

// Computes out[m, :] = x[m, :] @ w.T + bias or, with `across`, adds x[m, :] @ w to out[m, :]. w: bf16, fp16 or fp32; for
// pairs bf16, without `across`. k is at least 1.
void flex_linear(const Linear* args) {
    if (args->rows == 0) return;
#if defined(FLEX_BF16)
    if (args->pairs) return linear<pair>(*args);
#endif
    if (args->w_dtype == BF16) linear<bf16>(*args);
    if (args->w_dtype == FP16) linear<fp16>(*args);
    if (args->w_dtype == FP32) linear<float>(*args);
}

}  // extern "C"
