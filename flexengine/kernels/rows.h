// Rows of a KV cache in fp32, bf16 or fp16: scores of a tile of K rows, weighted sums of V rows.
//
// Index legend: g query head inside the group of one kv head, s and t token, d element of a head, c vector column
// (d = c * W).
#pragma once
#include <type_traits>

#include "convert.h"

namespace {

constexpr int TILE = 4;      // tokens that share a loaded query vector
constexpr int CHUNK = 64;    // most tokens between two updates of the running softmax
constexpr int PART = 1024;   // tokens of one work item; fixed, so results depend neither on threads nor on the batch

struct Decode {
    const void* q;
    void* out;
    const void* pool;
    const int32_t *tables, *lengths;
    const float* sinks;
    float* lse;                  // null: not wanted
    uint8_t* chosen;             // null: not wanted; else of top-k all there is: [i][j][t], whether V is read
    int64_t n, heads, pages, kv_heads, page_tokens, dim;
    int64_t group;               // elements of a row that share a scale; 0: plain numbers
    int64_t max_pages, q_row, q_head;
    int64_t window;              // 0: none
    double topk;                 // from 1 on: all
    float scale, softcap;        // softcap 0: none
    int32_t q_dtype, pool_dtype, threads;
};

inline int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

struct Scratch {  // of one thread, for the query heads of `J` kv heads: h counts those, g those of one
    float *q, *acc, *scores, *top, *sum, *keep;      // [h][width] twice, [h][CHUNK], [h] each
    float *qsum, *base, *scale, *minimum, *weights;  // of codes: [h][r], [g][r], [r][CHUNK] twice, [g][r][CHUNK]
    float* wide;                                     // of rows decoded first: [CHUNK / 2][width]
    float* all;                                      // of top-k: [h][longest]
    int32_t *kept, *tokens;                          // of top-k: [longest]
    const char** rows;
    char* memory = nullptr;
    size_t used = 0;

    template <class T> T* take(int64_t count) {
        T* at = (T*)(memory + used);
        used += (size_t(count) * sizeof(T) + 63) / 64 * 64;
        return at;
    }
    // longest: tokens that top-k chooses from, or 0.
    Scratch(const Decode& a, int64_t J, int64_t longest) {
        const int64_t group = a.heads / a.kv_heads, heads = J * group, width = padded(a.dim);
        const int64_t R = a.group ? a.dim / a.group : 0;
        for (int pass = 0; pass < 2; pass++) {
            used = 0;
            rows = take<const char*>(PART + 2 * CHUNK);
            q = take<float>(heads * width), acc = take<float>(heads * width), scores = take<float>(heads * CHUNK);
            top = take<float>(heads), sum = take<float>(heads), keep = take<float>(heads);
            qsum = take<float>(heads * R), base = take<float>(group * R), weights = take<float>(group * R * CHUNK);
            scale = take<float>(R * CHUNK), minimum = take<float>(R * CHUNK);
            wide = take<float>(R ? CHUNK / 2 * width : 0);
            all = take<float>(heads * padded(longest));
            kept = take<int32_t>(longest), tokens = take<int32_t>(longest);
            if (!pass && posix_memalign((void**)&memory, 64, used)) abort();
        }
    }
    Scratch(const Scratch&) = delete;
    ~Scratch() { free(memory); }
};

typedef const char* const* Tokens;  // of the K of the first head, by token

// What to prefetch while a row is worked on: `bytes` of the row `rows` on, `shift` bytes from its start.
struct Ahead { int64_t rows, shift, bytes; };

inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 3); }
inline void prefetch_row(Tokens row, const Ahead& ahead) {
    for (int64_t d = 0; d < ahead.bytes; d += 64) prefetch(row[ahead.rows] + ahead.shift + d);
}

// Where the heads from j on of sequence i lie. In bytes, row: from token to token; panel: from a head to the next;
// value: from a head's K to its V.
struct Place {
    const Decode& a;
    Scratch& my;
    const int64_t i, j, P, row, panel, value;

    Place(const Decode& a, int64_t i, int64_t j, Scratch& my, int64_t row, int64_t panel)
        : a(a), my(my), i(i), j(j), P(a.page_tokens), row(row), panel(panel), value(a.kv_heads * panel) {}

    const char* page(int64_t t) const {  // of token t
        return (const char*)a.pool + (int64_t(a.tables[i * a.max_pages + t / P]) * 2 * a.kv_heads + j) * panel;
    }
    // Sets my.rows to those of `count` neighbouring tokens.
    void span(int64_t begin, int64_t count) {
        for (int64_t s = 0, t = begin; s < count;) {
            const char* at = page(t);
            for (int64_t o = t % P; o < P && s < count; o++, s++, t++) my.rows[s] = at + o * row;
        }
        pad(count);
    }
    // Sets my.rows to those of some tokens.
    void pick(const int32_t* tokens, int64_t count) {
        for (int64_t s = 0; s < count; s++) my.rows[s] = page(tokens[s]) + tokens[s] % P * row;
        pad(count);
    }
    void done(int64_t) {}  // J heads: my.acc takes its final order
    void pad(int64_t count) {  // tiles and prefetches go beyond the last
        for (int64_t s = count; s < count + 2 * CHUNK; s++) my.rows[s] = my.rows[count - 1];
    }
};

// Tokens scored together for H query heads: enough that their sums fill vectors.
constexpr int tokens_of(int H) { return H == 3 || H * TILE >= W ? TILE : W / H; }

// The horizontal sums of [H][tokens_of(H)] vectors to scores [H][CHUNK]. There is room for a multiple of W vectors.
template <int H> inline void put_sums(vf* sum, float* scores) {
    constexpr int tokens = tokens_of(H), count = H * tokens, whole = (count + W - 1) / W * W;
    float all[whole];
    for (int x = count; x < whole; x++) sum[x] = vset(0.f);
    for (int x = 0; x < whole; x += W) vstore(all + x, vsums(sum + x));
    for (int g = 0; g < H; g++) memcpy(scores + g * CHUNK, all + g * tokens, size_t(tokens) * 4);
}

// scores[g][0 .. tokens_of(H) - 1] = q[g] . rows[those], `shift` bytes on, for H query heads. NV > 0: dim is NV * W, a
// constant then.
template <class T, int NV, int H>
inline void score_tile(const float* q, int64_t width, Tokens rows, int64_t shift, int64_t dim, float* scores,
                       const Ahead& ahead) {
    constexpr int tokens = tokens_of(H), step = TILE * W * int(sizeof(T));
    const int64_t whole = NV > 0 ? NV : dim / W;
    vf all[(H * tokens + W - 1) / W * W];
    for (int first = 0; first < tokens; first += TILE) {
        vf sum[H][TILE], k[TILE];
        for (int g = 0; g < H; g++) for (int t = 0; t < TILE; t++) sum[g][t] = vset(0.f);
        auto add = [&](int64_t c) {
            for (int g = 0; g < H; g++) {
                vf x = vheld<H>(vload(q + g * width + c * W));
                for (int t = 0; t < TILE; t++) sum[g][t] = vfma(x, k[t], sum[g][t]);
            }
        };
        const T* row[TILE];
        for (int t = 0; t < TILE; t++) row[t] = (const T*)(rows[first + t] + shift);
        const char* next = rows[ahead.rows + first] + ahead.shift;  // TILE rows, evenly over the steps
        int64_t c = 0;
        for (; c + 2 <= whole; c += 2) {
            vf two[TILE][2];
            for (int b = 0; ahead.bytes && b < 2 * step; b += 64) prefetch(next + c * step + b);
            for (int t = 0; t < TILE; t++) vload2(row[t] + c * W, two[t]);
            for (int z = 0; z < 2; z++) {
                for (int t = 0; t < TILE; t++) k[t] = two[t][z];
                add(c + z);
            }
        }
        if (NV == 0 && c < whole) {
            for (int t = 0; t < TILE; t++) k[t] = vload(row[t] + c * W);
            add(c);
        }
        if (NV == 0 && dim % W) {
            for (int t = 0; t < TILE; t++) k[t] = vload_part(row[t] + whole * W, int(dim % W));
            add(whole);
        }
        for (int g = 0; g < H; g++) for (int t = 0; t < TILE; t++) all[g * tokens + first + t] = sum[g][t];
    }
    put_sums<H>(all, scores);
}

// acc[g][C columns] = acc * keep[g] + sum over s of p[g][s] * (V of token s), for H query heads.
// shift: bytes from rows to the V columns wanted; tail: how much of a last, partial column there is.
template <class T, int H, int C>
inline void weigh_columns(const float* p, const float* keep, Tokens rows, int64_t shift, int n, float* acc,
                          int64_t width, const Ahead& ahead, int tail) {
    vf sum[H][C];
    for (int g = 0; g < H; g++)
        for (int c = 0; c < C; c++) sum[g][c] = vmul(vload(acc + g * width + c * W), vset(keep[g]));
    for (int s = 0; s < n; s++) {
        const T* row = (const T*)(rows[s] + shift);
        vf x[C];
        if (C == 1) x[0] = tail ? vload_part(row, tail) : vload(row);
        else for (int c = 0; c < C; c += 2) vload2(row + c * W, x + c);
        if (ahead.bytes)
            for (int c = 0; c < C; c += 64 / W / int(sizeof(T)))
                prefetch((const T*)(rows[ahead.rows + s] + ahead.shift) + c * W);
        for (int g = 0; g < H; g++) {
            vf weight = vheld<H>(vset(p[g * CHUNK + s]));
            for (int c = 0; c < C; c++) sum[g][c] = vfma(weight, x[c], sum[g][c]);
        }
    }
    for (int g = 0; g < H; g++) for (int c = 0; c < C; c++) vstore(acc + g * width + c * W, sum[g][c]);
}

template <class T, int H>
inline void weigh(const float* p, const float* keep, Tokens rows, int64_t shift, int n, float* acc, int64_t width,
                  int64_t dim, const Ahead& ahead) {
    constexpr int C = H <= HEADS / 2 ? 8 : 4;
    auto columns = [&](auto c, int64_t d) {
        const int tail = dim - d < W ? int(dim - d) : 0;
        const int64_t at = d * int64_t(sizeof(T));
        weigh_columns<T, H, c>(p, keep, rows, shift + at, n, acc + d, width,
                               {ahead.rows, ahead.shift + at, ahead.bytes}, tail);
    };
    int64_t d = 0;
    for (; d + C * W <= dim; d += C * W) columns(std::integral_constant<int, C>(), d);
    for (; C > 4 && d + 4 * W <= dim; d += 4 * W) columns(std::integral_constant<int, 4>(), d);
    for (; d < dim; d += W) columns(std::integral_constant<int, 1>(), d);
}

// Calls f(std::integral_constant<int, H>, h) for every set of H query heads, of `group` from h on, that go together.
template <class F> inline void for_heads(int64_t h, int64_t group, F f) {
    const int64_t end = h + group;
    for (; h + HEADS <= end; h += HEADS) f(std::integral_constant<int, HEADS>(), h);
    if (end - h == 1) f(std::integral_constant<int, 1>(), h);
    if constexpr (HEADS > 2) if (end - h == 2) f(std::integral_constant<int, 2>(), h);
    if constexpr (HEADS > 3) if (end - h == 3) f(std::integral_constant<int, 3>(), h);
}

// Blocks of 2 * W numbers in the order in which vload2 gives those of a T, and back.
template <class T> inline void split(float* x, int64_t blocks) {
    float even[W], odd[W];
    for (; SPLIT<T> && blocks > 0; blocks--, x += 2 * W) {
        for (int e = 0; e < W; e++) even[e] = x[2 * e], odd[e] = x[2 * e + 1];
        memcpy(x, even, sizeof even), memcpy(x + W, odd, sizeof odd);
    }
}
template <class T> inline void unsplit(float* x, int64_t blocks) {
    float both[2 * W];
    for (; SPLIT<T> && blocks > 0; blocks--, x += 2 * W) {
        for (int e = 0; e < W; e++) both[2 * e] = x[e], both[2 * e + 1] = x[W + e];
        memcpy(x, both, sizeof both);
    }
}

// Rows of numbers. NV > 0: the head size is NV * W, known when compiling.
template <class T, int NV> struct PlainRows : Place {
    static constexpr int chunk = CHUNK / 2;
    const int64_t dim, group, width;

    PlainRows(const Decode& a, int64_t i, int64_t j, int64_t J, Scratch& my)
        : Place(a, i, j, my, a.dim * int64_t(sizeof(T)), a.page_tokens * a.dim * int64_t(sizeof(T))),
          dim(NV > 0 ? NV * W : a.dim), group(a.heads / a.kv_heads), width(padded(a.dim)) {
        for (int64_t h = 0; h < J * group; h++) split<T>(my.q + h * width, dim / W / 2);
    }
    void done(int64_t J) {
        for (int64_t h = 0; h < J * group; h++) unsplit<T>(my.acc + h * width, dim / W / 4 * 2);
    }

    // my.scores of the query heads of the k-th head over rows s .. s + n - 1. ahead: what will be read next.
    __attribute__((noinline)) void score(int64_t k, int64_t s, int n, Ahead ahead) {
        for_heads(k * group, group, [&](auto H, int64_t h) {
            for (int t = 0; t < n; t += tokens_of(H))
                score_tile<T, NV, H>(my.q + h * width, width, my.rows + s + t, k * panel, dim,
                                     my.scores + h * CHUNK + t, ahead);
            ahead.bytes = 0;
        });
    }
    // my.acc = acc * keep + sum of my.scores, by now weights, times V.
    __attribute__((noinline)) void weigh(int64_t k, int64_t s, int n, Ahead ahead) {
        for_heads(k * group, group, [&](auto H, int64_t h) {
            ::weigh<T, H>(my.scores + h * CHUNK, my.keep + h, my.rows + s, value + k * panel, n, my.acc + h * width,
                          width, dim, ahead);
            ahead.bytes = 0;
        });
    }
};

}  // namespace
