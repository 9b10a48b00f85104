// Rows of a KV cache in fp32, bf16 or fp16: scores of a tile of K rows, weighted sums of V rows.
//
// Index legend: g query head inside the group of one kv head, s and t token, d element of a head, c vector column
// (d = c * W).
#pragma once
#include <type_traits>

#include "convert.h"
#include "tile.h"

namespace {

// Maximum number of query heads that share a loaded and decoded vector of K (SCORED), or of V (WEIGHED, which is
// smaller as weights are loaded too).
constexpr int SCORED = 8, WEIGHED = REGISTERS / 4;
constexpr int TILE = 4;      // maximum tokens that share a loaded query vector
constexpr int CHUNK = 64;    // maximum tokens between two updates of the running softmax
constexpr int PART = 1024;   // tokens of one work item; fixed, so that results are independent of threads and batch

struct Decode {
    const void* q;
    void* out;
    const void* pool;
    const int32_t *tables, *lengths;
    const float* sinks;
    float* lse;                  // null if not requested
    uint8_t* chosen;             // [i][j][t], whether top-k reads V; null to compute attention
    char* memory;                // flex_decode_bytes, at a multiple of 64; written by flex_decode_plan; else null
    int64_t n, heads, pages, kv_heads, page_tokens, dim;
    int64_t group;               // elements of a row that share a scale; 0 for plain numbers
    int64_t max_pages, q_row, q_head;
    int64_t window;              // tokens; 0 for all
    double topk;                 // share of past positions; 1 for all
    float scale, softcap;        // softcap 0 for none
    int32_t q_dtype, pool_dtype, threads;
};

inline int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

// One part of `users` neighbouring sequences from i on, whose first `shared` tokens of this part are in the same pages.
struct Item { int32_t i, users, part, shared; };

// Scratch of one thread, for the query heads h of J kv heads. g counts the query heads of one kv head: those of the
// first user, then those of the next.
struct Scratch {
    float *q, *acc, *scores, *top, *sum, *keep;      // [h][width] twice, [h][CHUNK], [h] each
    float *qsum, *base, *scale, *minimum, *weights;  // for codes: [h][r], [g][r], [r][CHUNK] twice, [g][r][CHUNK]
    float* wide;                                     // for rows that are decoded first: [CHUNK / 2][width]
    float* all;                                      // for top-k: [h][longest]
    int32_t *kept, *tokens;                          // for top-k: [longest]
    const char** rows;
    char* memory;
    size_t used = 0;

    template <class T> T* take(int64_t count) {
        T* at = (T*)(memory + used);
        used += (size_t(count) * sizeof(T) + 63) / 64 * 64;
        return at;
    }
    // memory: `used` bytes; a first Scratch with memory null gives this number. longest: tokens for top-k, or 0.
    Scratch(const Decode& a, int64_t J, int64_t users, int64_t longest, char* memory) : memory(memory) {
        const int64_t group = a.heads / a.kv_heads * users, heads = J * group, width = padded(a.dim);
        const int64_t R = a.group ? a.dim / a.group : 0;
        rows = take<const char*>(PART + 2 * CHUNK);
        q = take<float>(heads * width), acc = take<float>(heads * width), scores = take<float>(heads * CHUNK);
        top = take<float>(heads), sum = take<float>(heads), keep = take<float>(heads);
        qsum = take<float>(heads * R), base = take<float>(group * R), weights = take<float>(group * R * CHUNK);
        scale = take<float>(R * CHUNK), minimum = take<float>(R * CHUNK);
        wide = take<float>(R ? CHUNK / 2 * width : 0);
        all = take<float>(heads * padded(longest));
        kept = take<int32_t>(longest), tokens = take<int32_t>(longest);
    }
};

typedef const char* const* Tokens;  // address of the first head's K, by token

// Data to prefetch during work on a row: `bytes` bytes, at `shift` bytes from the start of the row that is `rows` rows
// on.
struct Ahead { int64_t rows, shift, bytes; };

inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 3); }
inline void prefetch_row(Tokens row, const Ahead& ahead) {
    for (int64_t d = 0; d < ahead.bytes; d += 64) prefetch(row[ahead.rows] + ahead.shift + d);
}

// Location of the heads from j on of the users of an item. Distances in bytes: row, from a token to the next; panel,
// from a head to the next; value, from a head's K to its V.
struct Place {
    const Decode& a;
    Scratch& my;
    const Item& item;
    const int64_t j, P, row, panel, value, apart;  // apart: query heads from a kv head to the next
    int64_t i, at, group;                          // sequence; first of its query heads in `apart`; number of them

    Place(const Decode& a, const Item& item, int64_t j, Scratch& my, int64_t row, int64_t panel)
        : a(a), my(my), item(item), j(j), P(a.page_tokens), row(row), panel(panel), value(a.kv_heads * panel),
          apart(a.heads / a.kv_heads * item.users), i(item.i), at(0), group(apart) {}

    // Limits the next calls to the rows and queries of one user. Before, the queries of all users read the rows of the
    // first user.
    void only(int64_t user) {
        group = a.heads / a.kv_heads;
        i = item.i + user, at = user * group;
    }
    int64_t head(int64_t k) const { return k * apart + at; }  // first query head of the k-th kv head

    const char* page(int64_t t) const {  // page of token t
        return (const char*)a.pool + (int64_t(a.tables[i * a.max_pages + t / P]) * 2 * a.kv_heads + j) * panel;
    }
    // Sets my.rows to the rows of `count` neighbouring tokens.
    void span(int64_t begin, int64_t count) {
        for (int64_t s = 0, t = begin; s < count;) {
            const char* at = page(t);
            for (int64_t o = t % P; o < P && s < count; o++, s++, t++) my.rows[s] = at + o * row;
        }
        pad(count);
    }
    // Sets my.rows to the rows of some tokens.
    void pick(const int32_t* tokens, int64_t count) {
        for (int64_t s = 0; s < count; s++) my.rows[s] = page(tokens[s]) + tokens[s] % P * row;
        pad(count);
    }
    void pad(int64_t count) {  // tiles and prefetches read rows after the last one
        for (int64_t s = count; s < count + 2 * CHUNK; s++) my.rows[s] = my.rows[count - 1];
    }
};

// Number of tokens scored together for H query heads, such that their sums fill vectors.
constexpr int tokens_of(int H) { return H == 3 || H * TILE >= W ? TILE : W / H; }

// Number of tokens, and of vectors of V, in a tile with H query heads. Their sums take at most half of the registers,
// as many as a core can update at a time (two products per cycle, of four cycles each).
constexpr int tile_of(int H) { return H * 8 <= REGISTERS ? 4 : H * 4 <= REGISTERS ? 2 : 1; }

// Writes the horizontal sums of [H][tokens_of(H)] vectors to scores [H][CHUNK]. `sum` has a multiple of W vectors.
template <int H> inline void put_sums(vf* sum, float* scores) {
    constexpr int tokens = tokens_of(H), count = H * tokens, whole = (count + W - 1) / W * W;
    float all[whole];
    for (int x = count; x < whole; x++) sum[x] = vset(0.f);
    for (int x = 0; x < whole; x += W) vstore(all + x, vsums(sum + x));
    for (int g = 0; g < H; g++) memcpy(scores + g * CHUNK, all + g * tokens, size_t(tokens) * 4);
}

// sum[g][t] += q[g] * k[t], W numbers each.
template <int H, int T> INLINE void add_products(const float* q, int64_t width, const vf (&k)[T], vf (&sum)[H][T]) {
    UNROLL for (int g = 0; g < H; g++) {
        const vf x = vheld<T>(vload(q + g * width));
        UNROLL for (int t = 0; t < T; t++) sum[g][t] = vfma(x, k[t], sum[g][t]);
    }
}

// scores[g][t] = q[g] . (row t, `shift` bytes on), for t < tokens_of(H) and H query heads.
template <class N, int H>
inline void score_tile(const float* q, int64_t width, Tokens rows, int64_t shift, int64_t dim, float* scores,
                       const Ahead& ahead) {
    constexpr int tokens = tokens_of(H), T = tile_of(H), step = T * W * int(sizeof(N));
    const int64_t whole = dim / W;
    vf all[(H * tokens + W - 1) / W * W];
    for (int first = 0; first < tokens; first += T) {
        vf sum[H][T], k[T];
        clear(sum);
        const N* row[T];
        for (int t = 0; t < T; t++) row[t] = (const N*)(rows[first + t] + shift);
        const char* next = rows[ahead.rows + first] + ahead.shift;  // prefetches of T rows, spread over the steps
        for (int64_t c = 0; c < whole; c++) {
            for (int b = 0; ahead.bytes && b < step; b += 64) prefetch(next + c * step + b);
            UNROLL for (int t = 0; t < T; t++) k[t] = vheld<H>(vload(row[t] + c * W));
            add_products(q + c * W, width, k, sum);
        }
        if (dim % W) {
            UNROLL for (int t = 0; t < T; t++) k[t] = vload_part(row[t] + whole * W, int(dim % W));
            add_products(q + whole * W, width, k, sum);
        }
        UNROLL for (int g = 0; g < H; g++)
            UNROLL for (int t = 0; t < T; t++) all[g * tokens + first + t] = sum[g][t];
    }
    put_sums<H>(all, scores);
}

// sum[g][c] += p[g][0] * v[c], C vectors.
template <int H, int C> INLINE void weigh_token(const float* p, int64_t apart, const vf (&v)[C], vf (&sum)[H][C]) {
    UNROLL for (int g = 0; g < H; g++) {
        const vf weight = vheld<C>(vset(p[g * apart]));
        UNROLL for (int c = 0; c < C; c++) sum[g][c] = vfma(weight, v[c], sum[g][c]);
    }
}

// acc[g][C columns] = acc * keep[g] + sum over s of p[g][s] * (V of token s), for H query heads.
// shift: bytes from rows to these V columns; tail: number of elements in a last, partial column.
template <class N, int H, int C>
inline void weigh_columns(const float* p, const float* keep, Tokens rows, int64_t shift, int n, float* acc,
                          int64_t width, const Ahead& ahead, int tail) {
    vf sum[H][C];
    UNROLL for (int g = 0; g < H; g++)
        UNROLL for (int c = 0; c < C; c++) sum[g][c] = vmul(vload(acc + g * width + c * W), vset(keep[g]));
    for (int s = 0; s < n; s++) {
        const N* row = (const N*)(rows[s] + shift);
        vf x[C];
        UNROLL for (int c = 0; c < C; c++) x[c] = vheld<H>(C == 1 && tail ? vload_part(row, tail) : vload(row + c * W));
        if (ahead.bytes)
            for (int c = 0; c < C; c += 64 / W / int(sizeof(N)))
                prefetch((const N*)(rows[ahead.rows + s] + ahead.shift) + c * W);
        weigh_token(p + s, CHUNK, x, sum);
    }
    UNROLL for (int g = 0; g < H; g++) UNROLL for (int c = 0; c < C; c++) vstore(acc + g * width + c * W, sum[g][c]);
}

template <class T, int H>
inline void weigh(const float* p, const float* keep, Tokens rows, int64_t shift, int n, float* acc, int64_t width,
                  int64_t dim, const Ahead& ahead) {
    constexpr int C = H == 1 ? 8 : tile_of(H);
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

// Calls f(std::integral_constant<int, H>, h) for runs of at most MOST query heads, which cover `group` heads from h on.
// The sizes H of the runs differ by at most one. If several runs are needed, they have at most 4 heads: tiles of 4 heads
// by 4 tokens take the fewest loads for a product (72 instead of 47 GFLOPS with 30 heads, one core of Zen 5).
template <int MOST, class F> inline void for_heads(int64_t h, int64_t group, F f) {
    const int64_t most = group > MOST ? 4 : MOST;
    for (int64_t runs = (group + most - 1) / most, end = h + group; runs; runs--) {
        const int64_t heads = (end - h + runs - 1) / runs;
        if (heads == 1) f(std::integral_constant<int, 1>(), h);
        if (heads == 2) f(std::integral_constant<int, 2>(), h);
        if (heads == 3) f(std::integral_constant<int, 3>(), h);
        if (heads == 4) f(std::integral_constant<int, 4>(), h);
        if constexpr (MOST > 4) if (heads == 5) f(std::integral_constant<int, 5>(), h);
        if constexpr (MOST > 4) if (heads == 6) f(std::integral_constant<int, 6>(), h);
        if constexpr (MOST > 4) if (heads == 7) f(std::integral_constant<int, 7>(), h);
        if constexpr (MOST > 4) if (heads == 8) f(std::integral_constant<int, 8>(), h);
        h += heads;
    }
}

// Rows of plain numbers.
template <class T> struct PlainRows : Place {
    static constexpr int chunk = CHUNK / 2;
    const int64_t dim, width;

    PlainRows(const Decode& a, const Item& item, int64_t j, int64_t, Scratch& my)
        : Place(a, item, j, my, a.dim * int64_t(sizeof(T)), a.page_tokens * a.dim * int64_t(sizeof(T))), dim(a.dim),
          width(padded(a.dim)) {}

    // Computes my.scores of the query heads of the k-th head over rows s .. s + n - 1. ahead: data read next.
    __attribute__((noinline)) void score(int64_t k, int64_t s, int n, Ahead ahead) {
        for_heads<SCORED>(head(k), group, [&](auto H, int64_t h) {
            for (int t = 0; t < n; t += tokens_of(H))
                score_tile<T, H>(my.q + h * width, width, my.rows + s + t, k * panel, dim,
                                     my.scores + h * CHUNK + t, ahead);
            ahead.bytes = 0;
        });
    }
    // Computes my.acc = acc * keep + sum of my.scores (which are weights now) times V.
    __attribute__((noinline)) void weigh(int64_t k, int64_t s, int n, Ahead ahead) {
        for_heads<WEIGHED>(head(k), group, [&](auto H, int64_t h) {
            ::weigh<T, H>(my.scores + h * CHUNK, my.keep + h, my.rows + s, value + k * panel, n, my.acc + h * width,
                          width, dim, ahead);
            ahead.bytes = 0;
        });
    }
};

}  // namespace
