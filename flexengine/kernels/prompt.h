// Causal attention of whole prompts, or of chunks of them, in fp32.
//
// Index legend: b prompt, h query head, j key/value head, t query, s key, d element of a head.
#pragma once
#include "tile.h"

namespace {

// q: [batch, queries, heads, dim]; k, v: [batch, keys, kv_heads, dim], all with unit stride along dim only; out is
// contiguous. Query t sits at position keys - queries + t.
struct Prompt {
    const float *q, *k, *v, *sinks; float* out;
    int64_t batch, queries, keys, heads, kv_heads, dim, window;
    int64_t q_prompt, q_row, q_head, k_prompt, k_row, k_head, v_prompt, v_row, v_head;
    float scale, softcap;
    int32_t threads;
};

// QUERIES queries of all heads of a group meet KEYS keys at a time. Blocks of keys begin at multiples of KEYS, so that
// a query's sums take the same steps wherever a chunk begins. PANEL: columns of a tile.
constexpr int64_t QUERIES = 32, KEYS = 64, PANEL = VECS * W;

inline int64_t panels(int64_t columns) { return (columns + PANEL - 1) / PANEL; }

// Of one thread. Row r of a block: query r % n of head r / n in its group.
struct Block {
    int64_t dim, wide;
    float *q, *k, *v, *scores, *acc, *top, *sum;  // k: panels [dim, PANEL] of keys; v: panels [KEYS, PANEL] of elements

    static int64_t floats(const Prompt& a) {
        const int64_t rows = QUERIES * (a.heads / a.kv_heads), wide = panels(a.dim) * PANEL;
        return rows * (a.dim + wide + 2) + KEYS * (a.dim + wide) + ROWS * KEYS + 8 * W;
    }
    Block(const Prompt& a, float* at) : dim(a.dim), wide(panels(a.dim) * PANEL) {
        const int64_t rows = QUERIES * (a.heads / a.kv_heads);
        k = at, v = k + KEYS * dim, scores = v + KEYS * wide, acc = scores + ROWS * KEYS;
        q = acc + rows * wide, top = q + rows * dim, sum = top + rows;
    }
};

// The queries t to t + n of kv head j's group, times the scale.
void read_block(const Prompt& a, int64_t b, int64_t j, int64_t t, int64_t n, Block& my) {
    const int64_t group = a.heads / a.kv_heads;
    float* to = my.q;
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < n; i++, to += a.dim) {
            const float* from = a.q + b * a.q_prompt + (t + i) * a.q_row + (j * group + g) * a.q_head;
            for (int64_t d = 0; d < a.dim; d++) to[d] = from[d] * a.scale;
        }
    memset(my.acc, 0, size_t(group * n * my.wide) * 4);
    for (int64_t r = 0; r < group * n; r++) my.top[r] = -FLT_MAX, my.sum[r] = 0;
}

// Keys and values s to s + n; what is missing of KEYS is zero.
void read_keys(const Prompt& a, int64_t b, int64_t j, int64_t s, int64_t n, Block& my) {
    const float *k = a.k + b * a.k_prompt + s * a.k_row + j * a.k_head, *v = a.v + b * a.v_prompt + s * a.v_row + j * a.v_head;
    for (int64_t p = 0; p < KEYS; p += PANEL) {
        float* to = my.k + p * a.dim;
        const int64_t there = n - p < 0 ? 0 : n - p < PANEL ? n - p : PANEL;
        for (int64_t d = 0; d < a.dim; d++, to += PANEL) {
            for (int64_t i = 0; i < there; i++) to[i] = k[(p + i) * a.k_row + d];
            for (int64_t i = there; i < PANEL; i++) to[i] = 0;
        }
    }
    for (int64_t low = 0; low < a.dim; low += PANEL) {
        float* to = my.v + low * KEYS;
        const int64_t there = a.dim - low < PANEL ? a.dim - low : PANEL;
        for (int64_t i = 0; i < KEYS; i++, to += PANEL) {
            if (i < n) memcpy(to, v + i * a.v_row + low, size_t(there) * 4);
            memset(to + (i < n ? there : 0), 0, size_t(PANEL - (i < n ? there : 0)) * 4);
        }
    }
}

// KEYS scores in place to exp(score - top), to 0 outside of low .. high - 1; updates top and sum; returns the factor
// for what was summed before. At least one score is inside.
inline float soften_between(float* scores, int64_t low, int64_t high, float softcap, float& top, float& sum) {
    for (int64_t s = 0; softcap > 0 && s < KEYS; s += W)
        vstore(scores + s, vmul(vtanh(vmul(vload(scores + s), vset(1 / softcap))), vset(softcap)));
    for (int64_t s = 0; s < low; s++) scores[s] = -FLT_MAX;
    for (int64_t s = high; s < KEYS; s++) scores[s] = -FLT_MAX;
    vf most = vset(top);
    for (int64_t s = 0; s < KEYS; s += W) most = vmax(vload(scores + s), most);
    const float above = vtop(most), keep = above > top ? expf(top - above) : 1.f;
    for (int64_t s = 0; s < KEYS; s += W) vstore(scores + s, vexp(vsub(vload(scores + s), vset(above))));
    for (int64_t s = 0; s < low; s++) scores[s] = 0;
    for (int64_t s = high; s < KEYS; s++) scores[s] = 0;
    vf total = vset(0.f);
    for (int64_t s = 0; s < KEYS; s += W) total = vadd(total, vload(scores + s));
    top = above, sum = sum * keep + vsum(total);
    return keep;
}

// The M rows from r on meet KEYS keys from s on. position: of the block's first query, of which there are n.
template <int M> void meet(const Prompt& a, int64_t r, int64_t s, int64_t position, int64_t n, Block& my) {
    float keep[M];
    int64_t last = 0;
    int64_t low[M], high[M];
    for (int i = 0; i < M; i++) {
        const int64_t at = position + (r + i) % n, first = a.window > 0 && at + 1 > a.window ? at + 1 - a.window : 0;
        low[i] = first > s ? first - s : 0, high[i] = at + 1 - s < KEYS ? at + 1 - s : KEYS;
        if (low[i] < high[i] && high[i] > last) last = high[i];
    }
    if (last == 0) return;
    for (int64_t p = 0; p < KEYS; p += PANEL) {
        vf sum[M][VECS];
        clear(sum);
        multiply<float>(my.q + r * a.dim, a.dim, my.k + p * a.dim, a.dim, sum);
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int v = 0; v < VECS; v++) vstore(my.scores + i * KEYS + p + v * W, sum[i][v]);
    }
    for (int i = 0; i < M; i++) {
        if (low[i] < high[i]) {
            keep[i] = soften_between(my.scores + i * KEYS, low[i], high[i], a.softcap, my.top[r + i], my.sum[r + i]);
        } else {
            memset(my.scores + i * KEYS, 0, KEYS * 4);
            keep[i] = 1;
        }
    }
    for (int64_t d = 0; d < a.dim; d += PANEL) {
        vf sum[M][VECS];
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int v = 0; v < VECS; v++)
                sum[i][v] = vmul(vload(my.acc + (r + i) * my.wide + d + v * W), vset(keep[i]));
        multiply<float>(my.scores, KEYS, my.v + d * KEYS, last, sum);
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int v = 0; v < VECS; v++) vstore(my.acc + (r + i) * my.wide + d + v * W, sum[i][v]);
    }
}

template <int M> void meet_rows(const Prompt& a, int64_t r, int64_t rows, int64_t s, int64_t position, int64_t n, Block& my) {
    if constexpr (M > 1)
        if (rows < M) return meet_rows<M - 1>(a, r, rows, s, position, n, my);
    meet<M>(a, r, s, position, n, my);
}

void write_block(const Prompt& a, int64_t b, int64_t j, int64_t t, int64_t n, const Block& my) {
    const int64_t group = a.heads / a.kv_heads;
    for (int64_t r = 0; r < group * n; r++) {
        const int64_t h = j * group + r / n;
        const float under = my.sum[r] + (a.sinks ? expf(a.sinks[h] - my.top[r]) : 0.f);
        float* to = a.out + ((b * a.queries + t + r % n) * a.heads + h) * a.dim;
        for (int64_t d = 0; d < a.dim; d++) to[d] = my.acc[r * my.wide + d] / under;
    }
}

void attend_block(const Prompt& a, int64_t b, int64_t j, int64_t t, Block& my) {
    const int64_t n = a.queries - t < QUERIES ? a.queries - t : QUERIES, position = a.keys - a.queries + t;
    const int64_t rows = n * (a.heads / a.kv_heads), end = position + n;
    int64_t s = a.window > 0 && position + 1 > a.window ? (position + 1 - a.window) / KEYS * KEYS : 0;
    read_block(a, b, j, t, n, my);
    for (; s < end; s += KEYS) {
        read_keys(a, b, j, s, end - s < KEYS ? end - s : KEYS, my);
        for (int64_t tiles = (rows + ROWS - 1) / ROWS, r = 0; tiles; tiles--) {  // of nearly equal height
            const int64_t height = (rows - r + tiles - 1) / tiles;
            meet_rows<ROWS>(a, r, height, s, position, n, my);
            r += height;
        }
    }
    write_block(a, b, j, t, n, my);
}

// Returns 0, or the bytes of a thread's scratch if there was no memory for it.
int64_t attend_prompts(const Prompt& a) {
    const int64_t blocks = (a.queries + QUERIES - 1) / QUERIES, items = a.batch * a.kv_heads * blocks;
    const size_t size = size_t(Block::floats(a) * 4 + 63) / 64 * 64;
    bool room = true;
#pragma omp parallel num_threads(a.threads)
    {
        float* scratch = (float*)aligned_alloc(64, size);
        if (!scratch) {
#pragma omp atomic write
            room = false;
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < items; i++) {
            if (!scratch) continue;
            Block my(a, scratch);  // the last blocks of queries take longest, so they come first
            attend_block(a, i / a.kv_heads % a.batch, i % a.kv_heads, (blocks - 1 - i / a.kv_heads / a.batch) * QUERIES, my);
        }
        free(scratch);
    }
    return room ? 0 : int64_t(size);
}

}  // namespace

extern "C" {

int64_t flex_prompt(const Prompt* args) { return attend_prompts(*args); }

}  // extern "C"
