// Causal attention of whole prompts, or of prefill chunks whose earlier tokens are in a KV cache. Products are of fp32, or
// of pairs of bf16: then q times the scale, k, v and the weights are rounded to bf16; sums are in fp32.
//
// Index legend: b prompt, h query head, j key/value head, t query, s position of a key, d element of a head.
#pragma once
#include <omp.h>

#include <algorithm>
#include <new>

#include "quantized_kv.h"
#include "shares.h"
#include "softmax.h"
#include "transpose.h"

namespace {

// q: [batch, queries, heads, dim]; k, v: [batch, keys, kv_heads, dim], all with unit stride along dim only; out is
// contiguous. If past > 0, batch is 1 and positions 0 .. past - 1 are in the pool's pages of `table`. Key i has
// position past + i, query t position past + keys - queries + t. Pool: as in attention.h. rounded: whether products are of
// pairs of bf16, where the CPU has them.
struct Prompt {
    const float *q, *k, *v, *sinks; float* out;
    const void* pool; const int32_t* table;
    int64_t batch, queries, keys, heads, kv_heads, dim, window;
    int64_t past, pages, page_tokens, group;  // group: elements of a row that share a scale; 0 for plain numbers
    int64_t q_prompt, q_row, q_head, k_prompt, k_row, k_head, v_prompt, v_row, v_head;
    float scale, softcap;
    int32_t pool_dtype, rounded, threads;

    int64_t first() const { return past + keys - queries; }  // position of the first query
    int64_t shared() const { return heads / kv_heads; }      // query heads of a key/value head
};

// A block has at most BLOCK rows (queries of all heads of a group) and processes KEYS keys at a time. Blocks of keys
// begin at multiples of KEYS, so that a query's sums take the same steps for any start of a chunk and any grouping of
// rows. STRIP: rows whose scores are computed before their values are added; PANEL: columns of a tile; LEAST_ROWS: of a
// block that is divided no further.
constexpr int64_t BLOCK = 512, KEYS = 128, STRIP = 8 * ROWS, PANEL = VECS * W, LEAST_ROWS = 4 * ROWS;

// Returns the queries of a block; fewer if there would be too few blocks for the threads. calls: number of such calls that
// the threads compute together.
inline int64_t block_queries(const Prompt& a, int64_t calls) {
    int64_t n = a.shared() < BLOCK ? BLOCK / a.shared() : 1;
    auto blocks = [&] { return (a.queries + n - 1) / n * a.batch * a.kv_heads * calls; };
    while (n > 1 && n * a.shared() > LEAST_ROWS && blocks() < 3 * a.threads) n /= 2;
    return n;
}

// Scratch of one thread, for products of units U (tile.h). Row r of a block: query r % n of head r / n in its group.
template <class U> struct Block {
    static constexpr int64_t C = COLUMNS<U>;
    int64_t dim, units, row, panel;  // units: of a row of q or k; row: numbers from one row to the next; panel: of values
    float *k, *v;                    // panels [units, PANEL] of keys; panels [KEYS / C, panel] of elements
    float *scores, *acc, *q, *top, *sum, *rows, *scales;  // rows: of W keys; scales: scales and minima of one row

    Block(int64_t dim)
        : dim(dim), units((dim + C - 1) / C), row((dim + W - 1) / W * W), panel(row < PANEL ? row : PANEL) {}
    int64_t values() const { return (dim + PANEL - 1) / PANEL * panel * (KEYS / C); }

    static size_t bytes(const Prompt& a, int64_t height) {
        const Block of(a.dim);
        const int64_t rows = height * a.shared() * (of.row / C + of.row + 2) + (W + 2) * of.row;
        return size_t((rows + KEYS * of.units + of.values() + STRIP * KEYS) * 4 + 63) / 64 * 64;
    }
    Block(const Prompt& a, int64_t height, float* at) : Block(a.dim) {
        const int64_t most = height * a.shared();
        v = at, k = v + values(), scores = k + KEYS * units, acc = scores + STRIP * KEYS, q = acc + most * row;
        rows = q + most * row / C, scales = rows + W * row, top = scales + 2 * row, sum = top + most;
    }
};

// Work of one block: prompt b, key/value head j, n queries from t on; `position` is that of query t.
struct Part { int64_t b, j, t, n, position; };

// Writes a row, times a factor, in units. `to` has room for the numbers of whole vectors in these units, and may be `from`.
inline void write_units(const float* from, int64_t dim, float factor, float* to, float) {
    for (int64_t d = 0; d < dim; d++) to[d] = from[d] * factor;
}
#if defined(FLEX_BF16)
inline void write_units(const float* from, int64_t dim, float factor, float* to, pair) {
    for (int64_t d = 0; d < dim; d += W)
        put((pair*)(to + d / 2), vmul(vload_part(from + d, dim - d < W ? int(dim - d) : W), vset(factor)));
}
#endif

// Reads the part's queries, times the scale. The heads of a query are neighbours in memory, so they are read together.
template <class U> void read_queries(const Prompt& a, const Part& p, Block<U>& my) {
    constexpr int64_t AHEAD = 4;  // queries
    const float factor = a.softcap > 0 ? a.scale : a.scale * Binary<U>::UNIT;
    for (int64_t i = 0; i < p.n; i++) {
        const float* from = a.q + p.b * a.q_prompt + (p.t + i) * a.q_row + p.j * a.shared() * a.q_head;
        for (int64_t h = 0; h < a.shared(); h++, from += a.q_head) {
            const uintptr_t ahead = uintptr_t(from) + AHEAD * a.q_row * 4;
            for (int64_t d = 0; d < a.dim; d += 16) __builtin_prefetch((const void*)(ahead + d * 4));
            write_units(from, a.dim, factor, my.q + (h * p.n + i) * my.row / my.C, U());
        }
    }
    const int64_t rows = a.shared() * p.n;
    memset(my.acc, 0, size_t(rows * my.row) * 4);
    for (int64_t r = 0; r < rows; r++) my.top[r] = -FLT_MAX, my.sum[r] = 0;
}

template <class T> const float* widened(const T* row, int64_t dim, float* to) {
    convert_row(row, to, dim);
    return to;
}

// Returns K (V if `value`) of head j at position s in the pool: `dim` floats, in the pool itself if it holds fp32, else
// written to `to`.
const float* cached_row(const Prompt& a, int64_t j, int64_t s, bool value, float* scales, float* to) {
    const int64_t P = a.page_tokens, o = s % P, panel = (int64_t(a.table[s / P]) * 2 + value) * a.kv_heads + j;
    const int64_t row = (panel * P + o) * a.dim;
    if (a.pool_dtype == FP32) return (const float*)a.pool + row;
    if (a.pool_dtype == BF16) return widened((const bf16*)a.pool + row, a.dim, to);
    if (a.pool_dtype == FP16) return widened((const fp16*)a.pool + row, a.dim, to);
    with_form(a.pool_dtype, a.group, [&](auto bits, auto group) {
        const Panels at(bits, a.kv_heads, P, a.dim, group);
        const uint8_t* from = (const uint8_t*)a.pool + panel * at.panel;
        const int64_t R = a.dim / group;
        for (int64_t r = 0; r < R; r++) {
            scales[r] = widen(((const fp16*)(from + at.scales))[r * P + o]);
            scales[R + r] = widen(((const fp16*)(from + at.minima))[r * P + o]);
        }
        decode_row<bits, group>(from + o * at.row, scales, scales + R, 1, R, to);
    });
    return to;
}

// Returns K (V if `value`) at position s, where it lies or written to `to`.
const float* read_row(const Prompt& a, const Part& p, int64_t s, bool value, float* scales, float* to) {
    if (s < a.past) return cached_row(a, p.j, s, value, scales, to);
    const int64_t i = s - a.past;
    return value ? a.v + p.b * a.v_prompt + i * a.v_row + p.j * a.v_head
                 : a.k + p.b * a.k_prompt + i * a.k_row + p.j * a.k_head;
}

// Prefetches K and V at the positions s to end, as rows that are far apart come late else. Those in the pool are not.
inline void prefetch_rows(const Prompt& a, const Part& p, int64_t s, int64_t end) {
    for (s = s < a.past ? a.past : s; s < end; s++) {
        const float *k = read_row(a, p, s, false, nullptr, nullptr), *v = read_row(a, p, s, true, nullptr, nullptr);
        for (int64_t d = 0; d < a.dim; d += 16) __builtin_prefetch(k + d, 0, 2), __builtin_prefetch(v + d, 0, 2);
    }
}

// Returns how many keys from position s on are before the window of every query of the part: their pages may be freed.
inline int64_t unseen(const Prompt& a, const Part& p, int64_t s) {
    const int64_t first = a.window > 0 ? p.position + 1 - a.window : 0;
    return first > s ? first - s : 0;
}

// Reads the keys at positions s to s + n, transposed into panels, with zeros for unseen keys and up to KEYS keys.
template <class U> void read_keys(const Prompt& a, const Part& p, int64_t s, int64_t n, Block<U>& my) {
    const int64_t low = unseen(a, p, s);
    for (int64_t i = 0; i < KEYS; i += W) {
        float* to = my.k + i / PANEL * PANEL * my.units + i % PANEL;
        const float* row[W];
        for (int64_t e = 0; e < W; e++) {
            float* own = my.rows + e * my.row;
            if (i + e >= low && i + e < n) {
                row[e] = read_row(a, p, s + i + e, false, my.scales, own);
                if (my.C > 1) write_units(row[e], a.dim, 1.f, own, U()), row[e] = own;
            } else row[e] = (float*)memset(own, 0, size_t(my.row) * 4);
        }
        for (int64_t d = 0; d < my.units; d += W) {
            const int count = my.units - d < W ? int(my.units - d) : W;
            vp tile[W];
            UNROLL for (int e = 0; e < W; e++) tile[e] = vload_pairs(row[e] + d, 2 * count);
            transpose(tile);
            for (int e = 0; e < count; e++, to += PANEL) vstore(to, (vf)tile[e]);
        }
    }
}

// Returns a unit of each of W columns from two rows; of numbers, those of the first.
INLINE vf joined(vf first, vf, float) { return first; }
#if defined(FLEX_BF16)
INLINE vf joined(vf first, vf second, pair) { return vpair(first, second); }
#endif

// Reads the values at positions s to s + n, cut into panels, with zeros for unseen values and up to KEYS values.
template <class U> void read_values(const Prompt& a, const Part& p, int64_t s, int64_t n, Block<U>& my) {
    const int64_t low = unseen(a, p, s);
    for (int64_t i = 0; i < KEYS; i += my.C) {
        const float* row[2];
        for (int64_t e = 0; e < my.C; e++) {
            float* own = my.rows + e * my.row;
            if (i + e >= low && i + e < n) row[e] = read_row(a, p, s + i + e, true, my.scales, own);
            else row[e] = (float*)memset(own, 0, size_t(my.row) * 4);
        }
        for (int64_t d = 0; d < a.dim; d += W) {
            auto part = [&](const float* x) { return d + W <= a.dim ? vload(x + d) : vload_part(x + d, int(a.dim - d)); };
            float* to = my.v + (d / PANEL * KEYS + i) / my.C * my.panel + d % PANEL;
            vstore(to, joined(part(row[0]), part(row[my.C - 1]), U()));
        }
    }
}

// At most ROWS rows from row `first` of a strip on. last: number of keys of the block up to the last one that a row
// sees.
struct Tile { int64_t first, rows, last; };

// Computes scores [M, KEYS] of a tile's rows for N * W keys from the s-th on, which is the first of a panel.
template <class U, int M, int N>
void score_tile(const Tile& at, const float* q, int64_t s, const Block<U>& my, float* scores) {
    if constexpr (M > 1)
        if (at.rows < M) return score_tile<U, M - 1, N>(at, q, s, my, scores);
    if constexpr (N > 1)
        if (at.last - s <= (N - 1) * W) return score_tile<U, M, N - 1>(at, q, s, my, scores);
    vf sum[M][N];
    clear(sum);
    multiply<U>(q, my.row / my.C, my.k + s * my.units, my.units, sum, PANEL);
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int v = 0; v < N; v++) vstore(scores + i * KEYS + s + v * W, sum[i][v]);
}

// Computes acc = acc * keep + scores @ values for N * W elements from d on, which is the first of a panel.
template <class U, int M, int N>
void weigh_tile(const Tile& at, const float* keep, const float* scores, int64_t d, const Block<U>& my, float* acc) {
    if constexpr (M > 1)
        if (at.rows < M) return weigh_tile<U, M - 1, N>(at, keep, scores, d, my, acc);
    if constexpr (N > 1)
        if (my.dim - d <= (N - 1) * W) return weigh_tile<U, M, N - 1>(at, keep, scores, d, my, acc);
    vf sum[M][N];
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int v = 0; v < N; v++) sum[i][v] = vmul(vload(acc + i * my.row + d + v * W), vset(keep[i]));
    multiply<U>(scores, KEYS, my.v + d / PANEL * (KEYS / my.C) * my.panel, (at.last + my.C - 1) / my.C, sum,
                my.panel);
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int v = 0; v < N; v++) vstore(acc + i * my.row + d + v * W, sum[i][v]);
}

// Updates `rows` rows of a block, from row r on, with the keys at positions s to s + KEYS.
template <class U> void meet(const Prompt& a, const Part& p, int64_t r, int64_t rows, int64_t s, Block<U>& my) {
    Seen seen[STRIP];
    float keep[STRIP];
    Tile tiles[STRIP];
    int64_t count = 0;
    const int64_t heights = (rows + ROWS - 1) / ROWS;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t at = p.position + (r + i) % p.n, first = a.window > 0 && at + 1 > a.window ? at + 1 - a.window : 0;
        seen[i] = {first > s ? first - s : 0, at + 1 - s < KEYS ? at + 1 - s : KEYS};
    }
    for (int64_t k = 0; k < heights; k++) {
        Tile tile{k * rows / heights, (k + 1) * rows / heights - k * rows / heights, 0};
        for (int64_t i = tile.first; i < tile.first + tile.rows; i++)
            if (seen[i].any() && seen[i].high > tile.last) tile.last = seen[i].high;
        if (tile.last) tiles[count++] = tile;
    }
    if (!count) return;
    for (int64_t c = 0; c < KEYS; c += PANEL)
        for (const Tile* tile = tiles; tile < tiles + count; tile++)
            if (tile->last > c)
                score_tile<U, ROWS, VECS>(*tile, my.q + (r + tile->first) * my.row / my.C, c, my,
                                          my.scores + tile->first * KEYS);
    for (int64_t i = 0; i < rows; i += W)
        soften<Binary<U>, KEYS / W>(my.scores + i * KEYS, KEYS, KEYS, rows - i < W ? rows - i : W, seen + i, a.softcap,
                          {my.top + r + i, my.sum + r + i, keep + i});
    for (int64_t d = 0; d < a.dim; d += PANEL)
        for (const Tile* tile = tiles; tile < tiles + count; tile++)
            weigh_tile<U, ROWS, VECS>(*tile, keep + tile->first, my.scores + tile->first * KEYS, d, my,
                                      my.acc + (r + tile->first) * my.row);
}

template <class U> void write_block(const Prompt& a, const Part& p, const Block<U>& my) {
    for (int64_t i = 0; i < p.n; i++)
        for (int64_t g = 0; g < a.shared(); g++) {
            const int64_t h = p.j * a.shared() + g, r = g * p.n + i;
            const float under = my.sum[r] + (a.sinks ? exp2f(a.sinks[h] * Binary<U>::UNIT - my.top[r]) : 0.f);
            const float factor = 1 / under, *acc = my.acc + r * my.row;
            float* to = a.out + ((p.b * a.queries + p.t + i) * a.heads + h) * a.dim;
            for (int64_t d = 0; d < a.dim; d++) to[d] = acc[d] * factor;
        }
}

template <class U> void attend_block(const Prompt& a, const Part& p, Block<U> my) {
    const int64_t rows = p.n * a.shared(), end = p.position + p.n, strips = (rows + STRIP - 1) / STRIP;
    int64_t s = a.window > 0 && p.position + 1 > a.window ? (p.position + 1 - a.window) / KEYS * KEYS : 0;
    read_queries(a, p, my);
    for (; s < end; s += KEYS) {
        const int64_t n = end - s < KEYS ? end - s : KEYS;
        read_keys(a, p, s, n, my);
        read_values(a, p, s, n, my);
        const int64_t next = s + KEYS, most = end - next < KEYS ? end - next : KEYS;
        for (int64_t k = 0; k < strips; k++) {
            if (most > 0) prefetch_rows(a, p, next + k * most / strips, next + (k + 1) * most / strips);
            meet(a, p, k * rows / strips, (k + 1) * rows / strips - k * rows / strips, s, my);
        }
    }
    write_block(a, p, my);
}

// Calls f with a unit of the call's products.
template <class F> auto with_units(const Prompt& a, F f) {
#if defined(FLEX_BF16)
    if (a.rounded) return f(pair());
#endif
    return f(float());
}

// Returns the bytes of a thread's scratch for blocks of `height` queries.
inline size_t block_bytes(const Prompt& a, int64_t height) {
    return with_units(a, [&](auto unit) { return Block<decltype(unit)>::bytes(a, height); });
}

// Division of a call into tasks, one per prompt, key/value head and block. first: tasks of the calls before it.
struct Division {
    int64_t height, blocks, first, count;

    Division(const Prompt& a, int64_t calls, int64_t first)
        : height(block_queries(a, calls)), blocks((a.queries + height - 1) / height), first(first),
          count(a.batch * blocks * a.kv_heads) {}

    void run(const Prompt& a, int64_t i, float* scratch) const {
        const int64_t b = i / a.kv_heads / blocks;
        const int64_t t = (blocks - 1 - i / a.kv_heads % blocks) * height;  // the last block first: it takes longest
        const int64_t n = a.queries - t < height ? a.queries - t : height;
        const Part part{b, i % a.kv_heads, t, n, a.first() + t};
        with_units(a, [&](auto unit) { attend_block(a, part, Block<decltype(unit)>(a, height, scratch)); });
    }
};

// The division of calls that threads compute together. Its memory has this head, a Division of each call, and scratch of
// each thread. call(c) is the c-th call. Only its sizes matter here: the calls of several layers, whose pools differ, use
// the same memory, and may all be planned before the first one runs.
struct Plan {
    int64_t count, tasks;
    size_t scratch;  // bytes of a thread
    Division* divided;
    char* first;  // scratch of the first thread

    static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

    // Returns the bytes of the memory.
    template <class F> static size_t bytes(int64_t count, int64_t threads, F call) {
        size_t most = 0;
        for (int64_t c = 0; c < count; c++) {
            const Prompt a = call(c);
            most = std::max(most, block_bytes(a, block_queries(a, count)));
        }
        return padded(sizeof(Plan)) + padded(size_t(count) * sizeof(Division)) + most * size_t(threads);
    }

    // Writes the head and the divisions to memory of `bytes` bytes.
    template <class F> static const Plan& in(char* memory, int64_t count, F call) {
        Plan& all = *new (memory) Plan{count, 0, 0, (Division*)(memory + padded(sizeof(Plan))), nullptr};
        all.first = (char*)all.divided + padded(size_t(count) * sizeof(Division));
        for (int64_t c = 0; c < count; c++) {
            const Prompt a = call(c);
            const Division& d = *new (all.divided + c) Division(a, count, all.tasks);
            all.tasks += d.count;
            all.scratch = std::max(all.scratch, block_bytes(a, d.height));
        }
        return all;
    }

    // Computes task i of all calls.
    template <class F> void run(int64_t i, int64_t thread, F call) const {
        const auto after = [](int64_t i, const Division& d) { return i < d.first; };
        const Division& d = *(std::upper_bound(divided, divided + count, i, after) - 1);
        d.run(call(&d - divided), i - d.first, (float*)(first + size_t(thread) * scratch));
    }
};

// Returns whether all pages of a call are in the pool.
inline bool pages_exist(const Prompt& a) {
    for (int64_t i = 0; i * a.page_tokens < a.past; i++)
        if (uint32_t(a.table[i]) >= uint64_t(a.pages)) return false;
    return true;
}

// Attention of all prompts of a gpu_batch, for steps.h. q, k, v: [tokens, heads, dim] with unit stride along dim; out is
// contiguous. Prompts of equal length without cached tokens are one Piece: its first token, number and length of its
// prompts, their cached tokens, and the first of `entries` in their page table.
struct Piece { int64_t first, rows, length, past, entry; };
struct Batch {
    const float *q, *k, *v, *sinks; float* out;
    const void* pool; const Piece* pieces; const int32_t* entries;
    char* memory;  // flex_batch_bytes, at a multiple of 64; written by flex_batch_plan
    int64_t count, heads, kv_heads, dim, window, pages, page_tokens, group;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;
    float scale, softcap;
    int32_t pool_dtype, rounded, threads;

    Prompt operator()(int64_t c) const {
        const Piece& p = pieces[c];
        return {q + p.first * q_row, k + p.first * k_row, v + p.first * v_row, sinks,
                out + p.first * heads * dim, pool, entries + p.entry,
                p.rows, p.length, p.length, heads, kv_heads, dim, window, p.past, pages, page_tokens, group,
                p.length * q_row, q_row, q_head, p.length * k_row, k_row, k_head, p.length * v_row, v_row, v_head,
                scale, softcap, pool_dtype, rounded, threads};
    }
};

// Returns 0 for success; i + 1 if a page of call i is outside the pool; minus the bytes of the memory if its allocation
// failed. After an error nothing was written.
int64_t attend_prompts(const Prompt* calls, int64_t count) {
    for (int64_t c = 0; c < count; c++)
        if (!pages_exist(calls[c])) return c + 1;
    if (!count) return 0;
    const auto call = [&](int64_t c) { return calls[c]; };
    const size_t bytes = Plan::bytes(count, calls->threads, call);
    char* memory = (char*)aligned_alloc(64, bytes);
    if (!memory) return -int64_t(bytes);
    const Plan& all = Plan::in(memory, count, call);
    Shares shares;
#pragma omp parallel num_threads(calls->threads)
    {
        const int64_t thread = omp_get_thread_num();
        shares.take(all.tasks, calls->threads, thread, [&](int64_t i) { all.run(i, thread, call); });
    }
    free(memory);
    return 0;
}

}  // namespace

extern "C" {

int64_t flex_prompts(const Prompt* calls, int64_t count) { return attend_prompts(calls, count); }

// Returns the bytes of `memory`; -(i + 1) if a page of piece i is outside the pool.
int64_t flex_batch_bytes(const Batch* a) {
    for (int64_t c = 0; c < a->count; c++)
        if (!pages_exist((*a)(c))) return -(c + 1);
    return int64_t(Plan::bytes(a->count, a->threads, *a));
}

void flex_batch_plan(const void* call) {
    const Batch& a = *(const Batch*)call;
    Plan::in(a.memory, a.count, a);
}
int64_t flex_batch_blocks(const void* call) { return ((const Plan*)((const Batch*)call)->memory)->tasks; }
void flex_batch_block(const void* call, int64_t w) {
    const Batch& a = *(const Batch*)call;
    ((const Plan*)a.memory)->run(w, omp_get_thread_num(), a);
}

// Returns the bytes of all threads' scratch. It uses only batch, queries, heads, kv_heads, dim and threads.
int64_t flex_prompt_scratch(const Prompt* args) {
    return int64_t(block_bytes(*args, block_queries(*args, 1))) * args->threads;
}

}  // extern "C"
