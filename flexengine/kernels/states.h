// States of sequences: gated delta rules, Mamba 1 and 2, and short convolutions, token by token.
//
// The tokens of some pieces of sequences are packed. The state of a piece lies in a record, `record` numbers after that
// of the record before, and is changed in place; it is zero before a piece that is fresh. A head, or some channels, of a
// piece is computed by one thread, with the state in its cache, so a piece's result depends on no other piece, and on
// no cut of a sequence into pieces.
#pragma once
#include <omp.h>

#include <type_traits>

#include "elementwise.h"
#include "tile.h"

namespace {

constexpr int64_t TOGETHER = 16;  // tokens whose coefficients are computed before the state is visited
constexpr int64_t CHANNELS = 256;  // of a task

inline int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

inline void copy_padded(const float* x, int64_t n, float* to) {
    int64_t i = 0;
    for (; i + W <= n; i += W) vstore(to + i, vload(x + i));
    if (i < n) vstore(to + i, vload_part(x + i, int(n - i)));
}

inline float dot(const float* a, const float* b, int64_t n) {  // n: whole vectors
    vf sum = vset(0.f);
    for (int64_t i = 0; i < n; i += W) sum = vfma(vload(a + i), vload(b + i), sum);
    return vsum(sum);
}

// Copies a matrix of `columns` numbers a row to rows of whole vectors, or back.
inline void pad_rows(const float* x, int64_t rows, int64_t columns, float* to, bool zero) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0, all = padded(columns); c < all; c++)
            to[r * all + c] = c < columns && !zero ? x[r * columns + c] : 0.f;
}
inline void unpad_rows(const float* x, int64_t rows, int64_t columns, float* to) {
    for (int64_t r = 0; r < rows; r++) memcpy(to + r * columns, x + r * padded(columns), columns * sizeof(float));
}

// ---------------------------------------------------------------- gated delta rule

// S = diag(exp(g)) S + k d^T with d = beta (v - (diag(exp(g)) S)^T k), and o = S^T q scale. S is dk x dv.
struct Delta {
    const float *q, *k, *v, *g, *beta;  // of a token and head: dk, dk, dv numbers, 1 or dk, and 1
    float *states, *out, *scratch;  // out: [tokens, heads, dv]
    const int64_t *starts, *numbers;  // by piece: its first token, and the end of the last; number of its record
    const uint8_t* fresh;  // by piece
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head;
    int64_t pieces, heads, key_heads, dk, dv, record;
    float scale;
    int32_t norm;  // whether q and k are divided by their lengths
    int32_t channels;  // whether g has dk numbers
    int32_t threads;

    int64_t floats() const {  // of scratch memory, of a thread
        return TOGETHER * (4 * padded(dk) + 2 * padded(dv) + W) + (dv % W ? dk * padded(dv) : 0);
    }
};

// Reads of S of a token before it changes: m = S^T kg, o = S^T qg; and the change before it, S = diag(d) S + k delta^T.
template <int NV, bool WRITE, bool READ>
INLINE void visit(float* s, int64_t row, int64_t dk, const float* d, const float* k, const vf* delta, const float* kg,
                  const float* qg, vf* m, vf* o) {
    for (int64_t r = 0; r < dk; r++, s += row) {
        vf x[NV];
        UNROLL for (int j = 0; j < NV; j++) x[j] = vload(s + j * W);
        if (!WRITE && NV == 8)  // a single token: the state comes from memory
            UNROLL for (int j = 0; j < NV; j++) __builtin_prefetch(s + 16 * row + j * W, 1);
        if (WRITE) {
            const vf decay = vset(d[r]), key = vset(k[r]);
            UNROLL for (int j = 0; j < NV; j++) vstore(s + j * W, x[j] = vfma(key, delta[j], vmul(decay, x[j])));
        }
        if (READ) {
            const vf key = vset(kg[r]), query = vset(qg[r]);
            UNROLL for (int j = 0; j < NV; j++) {
                m[j] = vfma(key, x[j], m[j]);
                o[j] = vfma(query, x[j], o[j]);
            }
        }
    }
}

// Coefficients of some tokens and a head, [tokens, padded(dk)] each: exp(g), k, k exp(g), q exp(g); and beta and k . q
// in pairs.
struct Coefficients {
    float *d, *k, *kg, *qg, *pairs;
    int64_t width;

    Coefficients(float* memory, int64_t dk) : width(padded(dk)) {
        const int64_t n = TOGETHER * width;
        d = memory, k = d + n, kg = k + n, qg = kg + n, pairs = qg + n;
    }

    void fill(const Delta& a, int64_t token, int64_t head, int64_t at) {
        const int64_t group = head / (a.heads / a.key_heads), to = at * width;
        copy_padded(a.k + token * a.k_token + group * a.k_head, a.dk, k + to);
        copy_padded(a.q + token * a.q_token + group * a.q_head, a.dk, qg + to);
        float key = 1.f, query = a.scale;
        if (a.norm) {
            key = 1.f / std::sqrt(dot(k + to, k + to, width) + 1e-6f);
            query = a.scale / std::sqrt(dot(qg + to, qg + to, width) + 1e-6f);
        }
        const float* g = a.g + token * a.g_token + head * a.g_head;
        if (a.channels) copy_padded(g, a.dk, d + to);
        const vf one = a.channels ? vset(0.f) : vexp(vset(*g));
        vf product = vset(0.f);
        for (int64_t i = to; i < to + width; i += W) {
            const vf decay = a.channels ? vexp(vload(d + i)) : one;
            const vf x = vmul(vload(k + i), vset(key)), y = vmul(vload(qg + i), vset(query));
            product = vfma(x, y, product);
            vstore(d + i, decay), vstore(k + i, x), vstore(kg + i, vmul(x, decay)), vstore(qg + i, vmul(y, decay));
        }
        pairs[2 * at] = a.beta[token * a.beta_token + head * a.beta_head], pairs[2 * at + 1] = vsum(product);
    }
};

// Columns of S, and n tokens: v and out have rows `v_row` and `out_row` apart.
template <int NV>
void delta_columns(const Coefficients& c, int64_t n, int64_t dk, float* s, int64_t row, const float* v, int64_t v_row,
                   float* out, int64_t out_row) {
    vf delta[NV], m[NV], o[NV];
    for (int64_t t = 0; t < n; t++) {
        const float *kg = c.kg + t * c.width, *qg = c.qg + t * c.width;
        const int64_t before = (t - 1) * c.width;
        UNROLL for (int j = 0; j < NV; j++) m[j] = o[j] = vset(0.f);
        if (t)
            visit<NV, true, true>(s, row, dk, c.d + before, c.k + before, delta, kg, qg, m, o);
        else
            visit<NV, false, true>(s, row, dk, c.d, c.k, delta, kg, qg, m, o);
        const vf beta = vset(c.pairs[2 * t]), both = vset(c.pairs[2 * t + 1]);
        UNROLL for (int j = 0; j < NV; j++) {
            delta[j] = vmul(beta, vsub(vload(v + t * v_row + j * W), m[j]));
            vstore(out + t * out_row + j * W, vfma(both, delta[j], o[j]));
        }
    }
    const int64_t last = (n - 1) * c.width;
    visit<NV, true, false>(s, row, dk, c.d + last, c.k + last, delta, c.kg, c.qg, m, o);
}

void delta_head(const Delta& a, int64_t piece, int64_t head, float* memory) {
    const int64_t width = padded(a.dv), first = a.starts[piece], end = a.starts[piece + 1];
    const bool ragged = width != a.dv;
    float* const own = a.states + a.numbers[piece] * a.record + head * a.dk * a.dv;
    Coefficients c(memory, a.dk);
    float *values = c.pairs + TOGETHER * W, *outs = values + TOGETHER * width, *s = ragged ? outs + TOGETHER * width : own;
    if (ragged)
        pad_rows(own, a.dk, a.dv, s, a.fresh[piece]);
    else if (a.fresh[piece])
        memset(s, 0, a.dk * a.dv * sizeof(float));
    for (int64_t begin = first; begin < end; begin += TOGETHER) {
        const int64_t n = end - begin < TOGETHER ? end - begin : TOGETHER;
        for (int64_t t = 0; t < n; t++) c.fill(a, begin + t, head, t);
        const float* v = a.v + begin * a.v_token + head * a.v_head;
        float* out = a.out + (begin * a.heads + head) * a.dv;
        int64_t v_row = a.v_token, out_row = a.heads * a.dv;
        if (ragged) {
            for (int64_t t = 0; t < n; t++) copy_padded(v + t * v_row, a.dv, values + t * width);
            v = values, v_row = out_row = width;
        }
        float* const to = ragged ? outs : out;
        int64_t at = 0;
        auto columns = [&](auto count) {
            constexpr int NV = decltype(count)::value;
            for (; at + NV * W <= width; at += NV * W)
                delta_columns<NV>(c, n, a.dk, s + at, width, v + at, v_row, to + at, out_row);
        };
        if (REGISTERS == 32 && n == 1) columns(std::integral_constant<int, 8>());  // whole rows, as the state comes from memory
        if (REGISTERS == 32) columns(std::integral_constant<int, 4>());
        columns(std::integral_constant<int, 2>());
        columns(std::integral_constant<int, 1>());
        if (ragged)
            for (int64_t t = 0; t < n; t++) memcpy(out + t * a.heads * a.dv, to + t * width, a.dv * sizeof(float));
    }
    if (ragged) unpad_rows(s, a.dk, a.dv, own);
}

// ---------------------------------------------------------------- Mamba 2

// S = exp(dt A) S + (dt x) B^T, y = S C + D x, with dt = clamp(softplus(dt + bias)). S is dim x size.
struct Scan {
    const float *x, *dt, *a, *b, *c, *d, *bias;  // of a token and head: dim numbers, 1; a, d, bias: [heads]; b, c: size
    float *states, *out, *scratch;  // out: [tokens, heads, dim]
    const int64_t *starts, *numbers;  // as in Delta
    const uint8_t* fresh;
    int64_t x_token, x_head, dt_token, dt_head, b_token, b_group, c_token, c_group;
    int64_t pieces, heads, groups, dim, size, record;
    float low, high;
    int32_t soft, threads;  // soft: whether dt is that of a softplus

    int64_t floats() const {  // of scratch memory, of a thread
        return TOGETHER * 2 * W + (size % W ? (2 * TOGETHER + dim) * padded(size) : 0);
    }
};

// AHEAD: whether the next rows are prefetched, as the state comes from memory.
template <int R, bool AHEAD>
INLINE void scan_rows(float* s, int64_t size, vf decay, const float* x, float dt, const float* b, const float* c, vf* y) {
    vf added[R], sums[R];
    UNROLL for (int r = 0; r < R; r++) added[r] = vset(x[r] * dt), sums[r] = vset(0.f);
    for (int64_t i = 0; i < size; i += W) {
        const vf in = vload(b + i), out = vload(c + i);
        UNROLL for (int r = 0; r < R; r++) {
            if (AHEAD) __builtin_prefetch(s + (4 * R + r) * size + i, 1);
            const vf state = vfma(added[r], in, vmul(decay, vload(s + r * size + i)));
            vstore(s + r * size + i, state);
            sums[r] = vfma(state, out, sums[r]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) y[r] = sums[r];
}

void scan_head(const Scan& a, int64_t piece, int64_t head, float* memory) {
    const int64_t width = padded(a.size), group = head / (a.heads / a.groups), end = a.starts[piece + 1];
    const bool ragged = width != a.size;
    float* const own = a.states + a.numbers[piece] * a.record + head * a.dim * a.size;
    float *pairs = memory, *bs = pairs + TOGETHER * 2 * W, *cs = bs + TOGETHER * width;
    float* const s = ragged ? cs + TOGETHER * width : own;
    if (ragged)
        pad_rows(own, a.dim, a.size, s, a.fresh[piece]);
    else if (a.fresh[piece])
        memset(s, 0, a.dim * a.size * sizeof(float));
    for (int64_t begin = a.starts[piece]; begin < end; begin += TOGETHER) {
        const int64_t n = end - begin < TOGETHER ? end - begin : TOGETHER;
        const float *b = a.b + begin * a.b_token + group * a.b_group, *c = a.c + begin * a.c_token + group * a.c_group;
        int64_t b_row = a.b_token, c_row = a.c_token;
        for (int64_t t = 0; t < n; t++) {
            float dt = a.dt[(begin + t) * a.dt_token + head * a.dt_head] + (a.bias ? a.bias[head] : 0.f);
            if (a.soft && !(dt > 20.f)) dt = std::log1p(std::exp(dt));
            dt = dt < a.low ? a.low : dt > a.high ? a.high : dt;
            pairs[2 * t] = dt, pairs[2 * t + 1] = std::exp(dt * a.a[head]);
            if (ragged) copy_padded(b + t * b_row, a.size, bs + t * width), copy_padded(c + t * c_row, a.size, cs + t * width);
        }
        if (ragged) b = bs, c = cs, b_row = c_row = width;
        const float skip = a.d ? a.d[head] : 0.f;
        for (int64_t p = 0; p < a.dim; p += W) {
            const int64_t rows = a.dim - p < W ? a.dim - p : W;
            for (int64_t t = 0; t < n; t++) {
                const float* x = a.x + (begin + t) * a.x_token + head * a.x_head + p;
                float *out = a.out + ((begin + t) * a.heads + head) * a.dim + p, *at = s + p * width, part[W];
                const float dt = pairs[2 * t];
                const vf decay = vset(pairs[2 * t + 1]);
                vf y[W];
                int64_t r = 0;
                auto some = [&](auto count, auto ahead) {
                    constexpr int R = decltype(count)::value;
                    for (; r + R <= rows; r += R)
                        scan_rows<R, decltype(ahead)::value>(at + r * width, width, decay, x + r, dt, b + t * b_row,
                                                             c + t * c_row, y + r);
                };
                if (n == 1) some(std::integral_constant<int, 4>(), std::true_type());
                some(std::integral_constant<int, 4>(), std::false_type());
                some(std::integral_constant<int, 1>(), std::false_type());
                for (; r < W; r++) y[r] = vset(0.f);
                const vf sums = vfma(vset(skip), rows == W ? vload(x) : vload_part(x, int(rows)), vsums(y));
                if (rows == W) {
                    vstore(out, sums);
                } else {
                    vstore(part, sums);
                    memcpy(out, part, rows * sizeof(float));
                }
            }
        }
    }
    if (ragged) unpad_rows(s, a.dim, a.size, own);
}

// ---------------------------------------------------------------- Mamba 1

// S[n] = exp(dt A[n]) S[n] + dt x B[n], y = (S . C + D x) silu(z) for each channel, with dt = softplus(dt + bias).
struct Select {
    const float *x, *dt, *a, *b, *c, *d, *bias, *z;  // x, z: a token's channels side by side; a: [channels, size]
    float *states, *out, *scratch;  // out: [tokens, channels]
    const int64_t *starts, *numbers;  // as in Delta
    const uint8_t* fresh;
    int64_t x_token, dt_token, dt_channel, b_token, c_token, z_token, pieces, channels, size, record;
    int32_t soft, threads;

    int64_t floats() const { return 2 * (W + TOGETHER) * padded(size); }  // of scratch memory, of a thread
};

// The first n channels of W, from `first` on. They are computed in scratch memory, in whole vectors.
void select_channels(const Select& a, int64_t piece, int64_t first, int n, float* memory) {
    const int64_t width = padded(a.size), end = a.starts[piece + 1];
    float* const own = a.states + a.numbers[piece] * a.record + first * a.size;
    float *s = memory, *rates = s + W * width, *bs = rates + W * width, *cs = bs + TOGETHER * width, lane[W] = {};
    pad_rows(own, n, a.size, s, a.fresh[piece]);
    pad_rows(a.a + first * a.size, n, a.size, rates, false);
    auto load = [&](const float* from) { return n == W ? vload(from) : vload_part(from, n); };
    const vf skip = a.d ? load(a.d + first) : vset(0.f), bias = a.bias ? load(a.bias + first) : vset(0.f);
    for (int64_t begin = a.starts[piece]; begin < end; begin += TOGETHER) {
        const int64_t count = end - begin < TOGETHER ? end - begin : TOGETHER;
        for (int64_t t = 0; t < count; t++) {
            copy_padded(a.b + (begin + t) * a.b_token, a.size, bs + t * width);
            copy_padded(a.c + (begin + t) * a.c_token, a.size, cs + t * width);
        }
        for (int64_t t = 0; t < count; t++) {
            const int64_t token = begin + t;
            for (int e = 0; e < n; e++) lane[e] = a.dt[token * a.dt_token + (first + e) * a.dt_channel];
            const vf x = load(a.x + token * a.x_token + first), step = vadd(vload(lane), bias);
            float dts[W], ins[W];
            vstore(dts, a.soft ? softplus(step) : step);
            vstore(ins, vmul(vload(dts), x));
            vf sums[W];
            for (int e = 0; e < n; e++) {
                const vf dt = vset(dts[e]), in = vset(ins[e]);
                float* const row = s + e * width;
                sums[e] = vset(0.f);
                for (int64_t i = 0; i < width; i += W) {
                    const vf decay = vexp(vmul(dt, vload(rates + e * width + i)));
                    const vf state = vfma(in, vload(bs + t * width + i), vmul(decay, vload(row + i)));
                    vstore(row + i, state);
                    sums[e] = vfma(state, vload(cs + t * width + i), sums[e]);
                }
            }
            for (int e = n; e < W; e++) sums[e] = vset(0.f);
            vf y = vfma(skip, x, vsums(sums));
            if (a.z) y = vmul(y, silu(load(a.z + token * a.z_token + first)));
            float* const out = a.out + token * a.channels + first;
            vstore(n == W ? out : lane, y);
            if (n < W) memcpy(out, lane, n * sizeof(float));
        }
    }
    unpad_rows(s, n, a.size, own);
}

// ---------------------------------------------------------------- short convolution

// y[t] = act(bias + sum_j w[j] x[t - taps + 1 + j]) for each channel; a state holds the last `columns` of x.
struct Conv {
    const float *x, *weight, *bias;  // x: a token's channels side by side; weight: [taps, channels]; bias: [channels]
    float *states, *out;  // states: [channels, columns] each; out: [tokens, channels]
    const int64_t *starts, *numbers;  // as in Delta
    const uint8_t* fresh;
    int64_t x_token, pieces, channels, taps, columns, record;
    int32_t silu, threads;
};

constexpr int64_t MOST_TAPS = 16;

inline float fused(float a, float b, float c) {  // as vfma
#if defined(FLEX_AVX512) || defined(FLEX_AVX2)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// The token of a piece that has no other, n channels from `first` on; COLUMNS taps and columns.
template <int COLUMNS>
void convolve_token(const Conv& a, float* state, int64_t token, int64_t first, int64_t n) {
    const float* __restrict x = a.x + token * a.x_token + first;
    const float* __restrict w = a.weight + first;
    float* __restrict out = a.out + token * a.channels + first;
    float* __restrict s = state;
    const int64_t row = a.channels;
    for (int64_t e = 0; e < n; e++) out[e] = a.bias ? a.bias[first + e] : 0.f;
    _Pragma("GCC ivdep") for (int64_t e = 0; e < n; e++) {
        float column[COLUMNS], y = out[e];
        UNROLL for (int j = 0; j + 1 < COLUMNS; j++) column[j] = s[e * COLUMNS + j + 1];
        column[COLUMNS - 1] = x[e];
        UNROLL for (int j = 0; j < COLUMNS; j++) y = fused(w[j * row + e], column[j], y);
        UNROLL for (int j = 0; j < COLUMNS; j++) s[e * COLUMNS + j] = column[j];
        out[e] = y;
    }
    if (!a.silu) return;
    int64_t e = 0;
    for (; e + W <= n; e += W) {
        UNROLL for (int j = 0; j < COLUMNS; j++) __builtin_prefetch(s + (n + e) * COLUMNS + j * W, 1);  // of the next channels
        vstore(out + e, silu(vload(out + e)));
    }
    for (float part[W]; e < n; e += W) {
        vstore(part, silu(vload_part(out + e, int(n - e))));
        memcpy(out + e, part, (n - e) * sizeof(float));
    }
}

// The first n channels of W, from `first` on. TAPS: their number, or 0 for any.
template <int TAPS>
void convolve_vector(const Conv& a, float* own, int64_t begin, int64_t count, int64_t first, int n) {
    const int64_t taps = TAPS ? TAPS : a.taps, past = taps - 1;
    float lane[W] = {};
    vf w[TAPS ? TAPS : MOST_TAPS], before[TAPS ? TAPS : MOST_TAPS];
    auto load = [&](const float* from) { return n == W ? vload(from) : vload_part(from, n); };
    UNROLL for (int64_t j = 0; j < taps; j++) w[j] = load(a.weight + j * a.channels + first);
    UNROLL for (int64_t j = 0; j < past; j++) {
        for (int64_t e = 0; e < n; e++) lane[e] = own[(e + 1) * a.columns - past + j];
        before[j] = vload(lane);
    }
    const vf bias = a.bias ? load(a.bias + first) : vset(0.f);
    for (int64_t t = begin; t < begin + count; t++) {
        before[past] = load(a.x + t * a.x_token + first);
        vf y = bias;
        UNROLL for (int64_t j = 0; j < taps; j++) y = vfma(w[j], before[j], y);
        UNROLL for (int64_t j = 0; j < past; j++) before[j] = before[j + 1];
        if (a.silu) y = silu(y);
        float* const out = a.out + t * a.channels + first;
        vstore(n == W ? out : lane, y);
        if (n < W) memcpy(out, lane, n * sizeof(float));
    }
    const int64_t kept = count < a.columns ? a.columns - count : 0;  // columns of the state that stay
    for (int64_t e = 0; e < n; e++) {
        float* const state = own + e * a.columns;
        memmove(state, state + a.columns - kept, kept * sizeof(float));
        const float* x = a.x + (begin + count - a.columns + kept) * a.x_token + first + e;
        for (int64_t j = kept; j < a.columns; j++, x += a.x_token) state[j] = *x;
    }
}

// n channels of a piece, from `first` on.
void convolve(const Conv& a, int64_t piece, int64_t first, int64_t n) {
    float* const own = a.states + a.numbers[piece] * a.record + first * a.columns;
    const int64_t begin = a.starts[piece], count = a.starts[piece + 1] - begin;
    if (a.fresh[piece]) memset(own, 0, n * a.columns * sizeof(float));
    if (count == 1 && a.taps == a.columns && a.taps == 4) return convolve_token<4>(a, own, begin, first, n);
    for (int64_t e = 0; e < n; e += W) {
        const int part = int(n - e < W ? n - e : W);
        float* const state = own + e * a.columns;
        if (a.taps == 4)
            convolve_vector<4>(a, state, begin, count, first + e, part);
        else if (a.taps == 3)
            convolve_vector<3>(a, state, begin, count, first + e, part);
        else
            convolve_vector<0>(a, state, begin, count, first + e, part);
    }
}

}  // namespace
