// GEMM with plain weights of 16 or 32 bits, in fp32 or, if the CPU has the instruction, in pairs of bf16.
#pragma once
#include <omp.h>

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
constexpr int32_t ADDED = 1, ACROSS = 2;
constexpr int GROUP = 512;  // rows of x that use every tile before the next rows do, so that they stay in L3

// x: fp32, or pairs of bf16; for pairs, k, x_row and w_row count pairs.
// across: w is [k, n], and x w is added to out (ADDED), or out = residual + (bias + x w) (ACROSS). Without it w is [n, k],
// and out = residual + (bias + x w^T).
// residual: [rows, n], may be null, with rows as far apart as those of out; w: bf16, fp16 or fp32; for pairs bf16, `across` is 0. k is at least 1.
struct Linear {
    const float *x; const void* w; const float *bias, *residual; float* out;
    int64_t rows, n, k, x_row, w_row, out_row;
    int32_t w_dtype, pairs, across, panels, threads;
};

// With `panels`, w is packed: its first n / PANEL * PANEL rows are panels of PANEL rows. A panel has the bytes of its
// rows, transposed as units of 32 bits, [units, PANEL]: numbers, or pairs of numbers of 16 bits. Rows of w are contiguous
// and have whole units; w_row is not read.
constexpr int64_t PANEL = VECS * W;

// For weights T: `type` is the unit of multiplication, EACH the number of units per lane of a loaded register, and
// unit(a, e, T()) the e-th of these units.
template <class T> struct Units { typedef float type; static constexpr int EACH = 2; };
template <> struct Units<pair> { typedef pair type; static constexpr int EACH = 1; };
template <> struct Units<float> { typedef float type; static constexpr int EACH = 1; };
template <class T> INLINE vf unit(vp a, int e, T) { return e ? odd(a, T()) : even(a, T()); }
INLINE vf unit(vp a, int, pair) { return (vf)a; }
INLINE vf unit(vp a, int, float) { return (vf)a; }

// Adds the sums of `span` units from d on, [M, N * W], to out at row m and column c. Unless `across` is ADDED, the first
// sums are added to the bias instead, and the residual is added with the last ones.
template <int M, int N>
inline void add(const Linear& a, const float* sums, int64_t m, int64_t c, int64_t d, int64_t span) {
    const bool first = d == 0, last = d + span == a.k;
    for (int i = 0; i < M * N; i++) {
        const int64_t at = c + i % N * W, count = a.n - at;
        if (count <= 0) continue;
        auto load = [&](const float* from) { return count < W ? vload_part(from, int(count)) : vload(from); };
        float *to = a.out + (m + i / N) * a.out_row + at, part[W];
        const float* from = !first || a.across == ADDED ? to : a.bias ? a.bias + at : nullptr;
        vf total = vload(sums + i * W);
        if (from) total = vadd(load(from), total);
        if (last && a.residual) total = vadd(load(a.residual + (m + i / N) * a.out_row + at), total);
        vstore(count < W ? part : to, total);
        if (count < W) memcpy(to, part, size_t(count) * 4);
    }
}

template <int M, int N>
inline void add(const Linear& a, const vf (&sum)[M][N], int64_t m, int64_t c, int64_t d, int64_t span) {
    if (c + N * W > a.n) {
        alignas(64) float sums[M * N * W];
        keep(sum, sums);
        return add<M, N>(a, sums, m, c, d, span);
    }
    const bool first = d == 0, residual = a.residual && d + span == a.k;
    UNROLL for (int i = 0; i < M; i++) {
        float* to = a.out + (m + i) * a.out_row + c;
        const float* from = !first || a.across == ADDED ? to : a.bias ? a.bias + c : nullptr;
        const float* more = residual ? a.residual + (m + i) * a.out_row + c : nullptr;
        UNROLL for (int n = 0; n < N; n++) {
            vf total = sum[i][n];
            if (from) total = vadd(vload(from + n * W), total);
            if (more) total = vadd(vload(more + n * W), total);
            vstore(to + n * W, total);
        }
    }
}

// W rows of w from row c on; if there are fewer, the last one is repeated.
template <class T> struct Rows {
    const T* w;
    int64_t k, row, last, next;

    // next: row that is read after the end of row c, for prefetches
    Rows(const Linear& a, int64_t c, int64_t next)
        : w((const T*)a.w + c * a.w_row), k(a.k), row(a.w_row), last(a.n - 1 - c), next((next - c) * row - k) {}

    // Loads `count` units from d on, transposed, and prefetches the data SPAN units later with a LOCALITY of
    // __builtin_prefetch. In products of few rows they are read once, with 0: kept out of L2 and L3, they came at 38 GB/s
    // instead of 33, of 42 at which memory was read alone. Tiles are read again for every GROUP of rows, with 2.
    template <int LOCALITY> INLINE void load(int64_t d, int count, vp* block) const {
        uintptr_t ahead = uintptr_t(w) + (d + SPAN < k ? d + SPAN : d + SPAN + next) * sizeof(T);
        UNROLL for (int i = 0; i < W; i++, ahead += row * sizeof(T))
            __builtin_prefetch((const void*)ahead, 0, LOCALITY);
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
        w.template load<2>(d, end - d < HELD ? int(end - d) : HELD, block);
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

// Computes M rows of out from m on, at W columns from c on; w is widened in registers. With more columns at a time, so many
// rows of w would be read at once that memory gave a sixth less.
template <class T, int M> void multiply_few(const Linear& a, int64_t m, int64_t c) {
    typedef typename Units<T>::type U;
    constexpr int EACH = Units<T>::EACH, HELD = EACH * W;
    const Rows<T> w(a, c, c + W);
    for (int64_t low = 0; low < a.k; low += SPAN) {
        const int64_t high = a.k - low < SPAN ? a.k : low + SPAN;
        const float* x = a.x + m * a.x_row + low;
        vf sum[M][1];
        clear(sum);
        int64_t d = low;
        for (; d + HELD <= high; d += HELD, x += HELD) {
            vp block[W];
            w.template load<0>(d, HELD, block);
            _Pragma("GCC unroll 4") for (int j = 0; j < W; j++) {  // with more unrolling, AVX-512 spills sums
                vf u[EACH];
                UNROLL for (int e = 0; e < EACH; e++) u[e] = unit(block[j], e, T());
                UNROLL for (int i = 0; i < M; i++)
                    UNROLL for (int e = 0; e < EACH; e++)
                        sum[i][0] = vmadd(vset(x[i * a.x_row + EACH * j + e]), u[e], sum[i][0], U());
            }
        }
        if (d < high) {
            float tail[HELD * W];
            widen_rows(w, d, high - d, W, tail);
            multiply<U>(x, a.x_row, tail, high - d, sum);
        }
        add(a, sum, m, c, low, high - low);
    }
}

// Computes M rows of out from m on, at N * W columns from c on, of w [k, n], which is widened in registers.
template <class T, int M, int N> void multiply_across(const Linear& a, int64_t m, int64_t c) {
    constexpr int64_t AHEAD = 16;  // rows
    for (int64_t low = 0; low < a.k; low += SPAN) {
        const int64_t span = a.k - low < SPAN ? a.k - low : SPAN;
        const T* w = (const T*)a.w + low * a.w_row + c;
        const float* x = a.x + m * a.x_row + low;
        vf sum[M][N];
        clear(sum);
        for (int64_t d = 0; d < span; d++, w += a.w_row) {
            UNROLL for (int n = 0; n < N; n += 64 / (W * int(sizeof(T))))
                __builtin_prefetch((const void*)(uintptr_t(w + n * W) + AHEAD * a.w_row * sizeof(T)));
            vf u[N];
            UNROLL for (int n = 0; n < N; n++) u[n] = vload(w + n * W);
            UNROLL for (int i = 0; i < M; i++) {
                const vf v = vset(x[i * a.x_row + d]);
                UNROLL for (int n = 0; n < N; n++) sum[i][n] = vmadd(v, u[n], sum[i][n], float());
            }
        }
        add(a, sum, m, c, low, span);
    }
}

// Does as `multiply_few` for `rows` <= M rows and the columns c to end.
template <class T, int M> void multiply_columns(const Linear& a, int64_t m, int64_t rows, int64_t c, int64_t end) {
    if constexpr (M > 1)
        if (rows < M) return multiply_columns<T, M - 1>(a, m, rows, c, end);
    for (; c < end; c += W) multiply_few<T, M>(a, m, c);
}

// Adds M rows of x times a tile [span, N * W] to out.
template <class U, int M, int N>
void multiply_tile(const Linear& a, const float* tile, int64_t m, int64_t c, int64_t d, int64_t span) {
    vf sum[M][N];
    clear(sum);
    multiply<U>(a.x + m * a.x_row + d, a.x_row, tile, span, sum);
    add(a, sum, m, c, d, span);
}

// sum += x [M, span] @ `span` numbers from a panel of two numbers per unit, at N * W columns. span is even.
template <class T, int M, int N>
INLINE void multiply_halves(const float* x, int64_t x_row, const float* at, int64_t span, vf (&sum)[M][N]) {
    for (int64_t i = 0; i < span; i += 2, at += PANEL) {
        UNROLL for (int e = 0; e < 2; e++) {
            vf u[N];
            UNROLL for (int n = 0; n < N; n++) u[n] = unit(vload_pairs(at + n * W, 2 * W), e, T());
            UNROLL for (int r = 0; r < M; r++) {
                const vf v = vset(x[r * x_row + i + e]);
                UNROLL for (int n = 0; n < N; n++) sum[r][n] = vmadd(v, u[n], sum[r][n], float());
            }
        }
    }
}

// Widens the same part of a panel into tile [span, N * W].
template <class T, int N> void widen_panel(const float* at, int64_t span, float* tile) {
    for (int64_t i = 0; i < span; i += 2, at += PANEL)
        UNROLL for (int e = 0; e < 2; e++)
            UNROLL for (int n = 0; n < N; n++, tile += W) vstore(tile, unit(vload_pairs(at + n * W, 2 * W), e, T()));
}

// Adds what `multiply` adds to registers, of units d to d + span, to `sums`, [M, N * W]. Sums start at zero every SPAN
// units and are added to out after SPAN units.
template <int M, int N, class F>
INLINE void add_units(const Linear& a, int64_t m, int64_t c, int64_t d, int64_t span, float* sums, F multiply) {
    vf sum[M][N];
    if (d % SPAN == 0) clear(sum);
    else
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int n = 0; n < N; n++) sum[i][n] = vload(sums + (i * N + n) * W);
    multiply(sum);
    keep(sum, sums);
    const int64_t end = d + span, begin = (end - 1) / SPAN * SPAN;
    if (end == a.k || end % SPAN == 0) add<M, N>(a, sums, m, c, begin, end - begin);
}

// Calls f(M) for runs of at most ROWS rows of nearly equal number from m to end: f(std::integral_constant, first row).
template <int M, class F> INLINE void with_height(int64_t rows, int64_t m, F f) {
    if constexpr (M > 1)
        if (rows < M) return with_height<M - 1>(rows, m, f);
    f(std::integral_constant<int, M>(), m);
}
template <class F> INLINE void for_heights(int64_t m, int64_t end, F f) {
    for (int64_t tiles = (end - m + ROWS - 1) / ROWS; tiles; tiles--) {
        const int64_t rows = (end - m + tiles - 1) / tiles;
        with_height<ROWS>(rows, m, f);
        m += rows;
    }
}

// Adds rows m to end of x times a tile to out.
template <class U, int N>
void multiply_group(const Linear& a, const float* tile, int64_t m, int64_t end, int64_t c, int64_t d, int64_t span) {
    for_heights(m, end, [&](auto M, int64_t row) { multiply_tile<U, M, N>(a, tile, row, c, d, span); });
}

// Computes rows m to end of out, at most GROUP, at N * W columns from c on, of one panel. SPAN units of it stay in L2 for
// all rows; many rows widen numbers of 16 bits once. The first tiles prefetch the units after them into L2: with 64 rows,
// waits for memory took up to a tenth of the time.
template <class T, int N> void multiply_panels(const Linear& a, int64_t m, int64_t end, int64_t c) {
    typedef typename Units<T>::type U;
    constexpr int64_t EACH = Units<T>::EACH, LINES = PANEL * 4 / 64;
    alignas(64) float tile[EACH == 1 ? W : SPAN * N * W];
    const bool wide = EACH == 2 && end - m > 4 * ROWS, few = end - m <= (LINES - 1) * ROWS;  // few: fewer tiles than LINES
    for (int64_t d = 0; d < a.k; d += SPAN) {
        const float* at = (const float*)a.w + c / PANEL * PANEL * (a.k / EACH) + c % PANEL + d / EACH * PANEL;
        const int64_t span = a.k - d < SPAN ? a.k - d : SPAN;
        const uintptr_t next = uintptr_t(at + span / EACH * PANEL);
        if constexpr (EACH == 2)
            if (wide) widen_panel<T, N>(at, span, tile);
        for_heights(m, end, [&](auto M, int64_t row) {
            const float* x = a.x + row * a.x_row + d;
            const int64_t t = (row - m + ROWS - 1) / ROWS;  // number of the tile
            vf sum[M][N];
            clear(sum);
            if constexpr (EACH == 1) {
                if (few && t < 2) multiply<U, M, N, 2>(x, a.x_row, at, span, sum, PANEL, next + 2 * t * SPAN * 64);
                else if (!few && t < LINES) multiply<U, M, N, 1>(x, a.x_row, at, span, sum, PANEL, next + t * SPAN * 64);
                else multiply<U>(x, a.x_row, at, span, sum, PANEL);
            } else {
                if (!wide) multiply_halves<T>(x, a.x_row, at, span, sum);
                else if (2 * t < LINES) multiply<U, M, N, 1>(x, a.x_row, tile, span, sum, N * W, next + t * SPAN * 64);
                else multiply<U>(x, a.x_row, tile, span, sum);
            }
            add(a, sum, row, c, d, span);
        });
    }
}

// Calls f(N) with the number of vectors, 1 to VECS.
template <class F> INLINE void with_vecs(int64_t vecs, F f) {
    if (vecs == 1) f(std::integral_constant<int, 1>());
    if (vecs == 2) f(std::integral_constant<int, 2>());
    if constexpr (VECS > 2) {
        if (vecs == 3) f(std::integral_constant<int, 3>());
        if (vecs == 4) f(std::integral_constant<int, 4>());
    }
}

// A call's tasks, which are independent of each other. Each computes some columns of out for some rows.
struct LinearTasks {
    static constexpr int64_t MANY = 16, LEAST = 4 * ROWS;  // tasks per thread; rows of a task
    const Linear& a;
    int64_t groups, height, width, blocks, count;

    explicit LinearTasks(const Linear& a) : a(a), groups((a.rows + GROUP - 1) / GROUP), width(VECS * W) {
        // Fewer columns per task if there would be too few tasks for the threads.
        while (width > W && (a.n + width - 1) / width * groups < 3 * a.threads) width /= 2;
        blocks = (a.n + width - 1) / width;
        // Panels need no work before they are multiplied, so fewer rows per task cost little: equal shares for threads.
        const auto uneven = [&] { return blocks * groups % a.threads && blocks * groups < MANY * a.threads; };
        while (a.panels && uneven() && a.rows >= 2 * groups * LEAST) groups *= 2;
        height = groups ? (a.rows + groups - 1) / groups : 1;
        groups = (a.rows + height - 1) / height, count = blocks * groups;
    }
    int64_t numbers() const { return a.rows * a.n * a.k; }

    template <class T> void multiply(int64_t b) const {
        typedef typename Units<T>::type U;
        const int64_t c = b % blocks * width, columns = a.n - c < width ? a.n - c : width, vecs = (columns + W - 1) / W;
        const int64_t m = b / blocks * height, end = a.rows - m < height ? a.rows : m + height;
        if (a.panels && c < a.n / PANEL * PANEL)
            return with_vecs(vecs, [&](auto N) { multiply_panels<T, N>(a, m, end, c); });
        if (end - m <= FEW && !a.across) return multiply_columns<T, FEW>(a, m, end - m, c, c + columns);
        if constexpr (!std::is_same<T, pair>())
            if (a.across && end - m <= ROWS && columns % W == 0)
                return with_height<ROWS>(end - m, m, [&](auto M, int64_t row) {
                    with_vecs(vecs, [&](auto N) { multiply_across<T, M, N>(a, row, c); });
                });
        alignas(64) float tile[SPAN * VECS * W];
        for (int64_t d = 0; d < a.k; d += SPAN) {
            const int64_t span = a.k - d < SPAN ? a.k - d : SPAN;
            if constexpr (!std::is_same<T, pair>())
                if (a.across) widen_columns<T>(a, c, d, span, vecs * W, tile);
            for (int64_t n = 0; n < vecs * W && !a.across; n += W)
                widen_rows(Rows<T>(a, c + n, c + n + width), d, span, vecs * W, tile + n);
            with_vecs(vecs, [&](auto N) { multiply_group<U, N>(a, tile, m, end, c, d, span); });
        }
    }
    void run(int64_t b) const {
#if defined(FLEX_BF16)
        if (a.pairs) return multiply<pair>(b);
#endif
        if (a.w_dtype == BF16) multiply<bf16>(b);
        if (a.w_dtype == FP16) multiply<fp16>(b);
        if (a.w_dtype == FP32) multiply<float>(b);
    }
};

// Packs the first n / PANEL * PANEL rows of w [n, units], in place. scratch: PANEL * units units per thread.
void pack_panels(float* w, int64_t n, int64_t units, float* scratch, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < n / PANEL; p++) {
        float *panel = w + p * PANEL * units, *rows = scratch + omp_get_thread_num() * PANEL * units;
        memcpy(rows, panel, size_t(PANEL * units) * 4);
        for (int64_t i = 0; i < PANEL; i += W)
            for (int64_t d = 0; d < units; d += W) {
                const int count = units - d < W ? int(units - d) : W;
                vp block[W];
                UNROLL for (int e = 0; e < W; e++) block[e] = vload_pairs(rows + (i + e) * units + d, 2 * count);
                transpose(block);
                for (int e = 0; e < count; e++) vstore(panel + (d + e) * PANEL + i, (vf)block[e]);
            }
    }
}

}  // namespace

extern "C" {

// Returns the rows of a panel.
int64_t flex_panel() { return PANEL; }

void flex_pack(float* w, int64_t n, int64_t units, float* scratch, int32_t threads) {
    pack_panels(w, n, units, scratch, threads);
}

// Returns 1 if products of pairs of bf16 are compiled in, else 0.
int32_t flex_bf16() {
#if defined(FLEX_BF16)
    return 1;
#else
    return 0;
#endif
}

}  // extern "C"
