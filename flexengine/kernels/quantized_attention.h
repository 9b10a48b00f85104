// Scores and weighted sums of attention over rows of a quantized KV cache, computed from their codes without decoding
// the rows first, for attention.h. Minima are applied to sums, not to elements, and the scales of V to the weights.
//
// Index legend: r group of a row, e and i as in quantized_kv.h; other indices as in rows.h.
#pragma once
#include "quantized_kv.h"
#include "rows.h"

namespace {

// Size of a group that is multiplied as codes. Groups of other sizes, which are rare, are decoded first.
template <int BITS> constexpr int WIDE = BITS == 4 ? 32 : 64;

// scores[g][t] = q[g] . (row t without its minima), for t < tokens_of(H) and H query heads. scale: [r][CHUNK].
template <int BITS, int H>
inline void score_codes(const float* q, int64_t width, Tokens rows, int64_t shift, int64_t groups, const float* scale,
                        float* scores, const Ahead& ahead) {
    constexpr int stride = WIDE<BITS> * BITS / 8, tokens = tokens_of(H), T = tile_of(H);
    vf all[(H * tokens + W - 1) / W * W];
    for (int first = 0; first < tokens; first += T) {
        vf sum[H][T];
        clear(sum);
        for (int t = 0; t < T; t++) prefetch_row(rows + first + t, ahead);
        for (int64_t r = 0; r < groups; r++) {
            vf step[T];
            UNROLL for (int t = 0; t < T; t++) step[t] = multiples<BITS>(scale[r * CHUNK + first + t]);
            UNROLL for (int i = 0; i < stride; i += W) {
                vcodes raw[T];
                const int64_t at = shift + r * stride + i;
                UNROLL for (int t = 0; t < T; t++) raw[t] = load_codes((const uint8_t*)rows[first + t] + at);
                for_codes<BITS>([&](auto e) {
                    vf k[T];
                    UNROLL for (int t = 0; t < T; t++) k[t] = vheld<H>(scaled<BITS, e>(raw[t], step[t]));
                    add_products(q + r * WIDE<BITS> + e * stride + i, width, k, sum);
                });
            }
        }
        UNROLL for (int g = 0; g < H; g++)
            UNROLL for (int t = 0; t < T; t++) all[g * tokens + first + t] = sum[g][t];
    }
    put_sums<H>(all, scores);
}

// acc[g][columns] = acc * keep[g] + base[g][r] + sum over s of p[g][s] * (codes of token s), for H query heads. The
// columns are those of codes E to E + N - 1 in each byte of C pieces of W bytes of group r.
// p: weights times the scales of r; base: [g][r] with `groups` entries in a row; shift: bytes from rows to the pieces.
template <int BITS, int H, int C, int E, int N>
inline void weigh_codes(const float* p, int64_t apart, const float* base, const float* keep, Tokens rows, int64_t shift,
                        int n, float* acc, int64_t width, int64_t groups, const Ahead& ahead) {
    constexpr int stride = WIDE<BITS> * BITS / 8;
    auto column = [](int c) { return c / N * W + c % N * stride; };
    vf sum[H][C * N];
    UNROLL for (int g = 0; g < H; g++)
        UNROLL for (int c = 0; c < C * N; c++)
            sum[g][c] = vfma(vload(acc + g * width + column(c)), vset(keep[g]), vset(base[g * groups]));
    for (int s = 0; s < n; s++) {
        const uint8_t* row = (const uint8_t*)rows[s] + shift;
        vf x[C * N];
        UNROLL for (int z = 0; z < C; z++) {
            const vcodes raw = load_codes(row + z * W);
            for_codes<BITS>([&](auto e) {
                if constexpr (e >= E && e < E + N) x[z * N + e - E] = vheld<H>(code<BITS, e>(raw));
            });
        }
        prefetch_row(rows + s, ahead);
        weigh_token(p + s, apart, x, sum);
    }
    UNROLL for (int g = 0; g < H; g++)
        UNROLL for (int c = 0; c < C * N; c++) vstore(acc + g * width + column(c), sum[g][c]);
}

// Updates all columns of acc for H query heads. p: [g][r][CHUNK].
template <int BITS, int H>
inline void weigh_groups(const float* p, const float* base, const float* keep, Tokens rows, int64_t shift, int n,
                         float* acc, int64_t width, int64_t groups, Ahead ahead) {
    constexpr int TOGETHER = H == 1 ? 8 : tile_of(H), codes = 8 / BITS, stride = WIDE<BITS> * BITS / 8;
    constexpr int N = codes < TOGETHER ? codes : TOGETHER, whole = stride / W;
    constexpr int C = TOGETHER / N < whole ? TOGETHER / N : whole;
    for (int64_t r = 0; r < groups; r++)
        for (int i = 0; i < stride; i += C * W)
            for_codes<BITS>([&](auto e) {
                if constexpr (e % N == 0) {
                    weigh_codes<BITS, H, C, e, N>(p + r * CHUNK, groups * CHUNK, base + r, keep, rows,
                                                  shift + r * stride + i, n, acc + r * WIDE<BITS> + e * stride + i,
                                                  width, groups, ahead);
                    ahead.bytes = 0;
                }
            });
}

// Rows of codes with their scales and minima.
template <int BITS> struct Scaled : Place {
    const int64_t R, width;
    const Panels panels;
    const int32_t* picked = nullptr;  // null if the tokens are neighbours, from `begin` on
    int64_t begin = 0;

    Scaled(const Decode& a, const Item& item, int64_t j, Scratch& my, const Panels& panels)
        : Place(a, item, j, my, panels.row, panels.panel), R(a.dim / a.group), width(padded(a.dim)), panels(panels) {}

    void span(int64_t first, int64_t count) { picked = nullptr, begin = first, Place::span(first, count); }
    void pick(const int32_t* tokens, int64_t count) { picked = tokens, Place::pick(tokens, count); }

    // Reads my.scale and my.minimum [r][CHUNK] of rows s .. s + n - 1, with 0 up to a multiple of W. shift: bytes from
    // the first panel of a page to the panel read.
    void read_scales(int64_t s, int n, int64_t shift) {
        for (int done = 0; done < n;) {
            const int64_t t = picked ? picked[s + done] : begin + s + done, o = t % P;
            const int64_t run = picked ? 1 : P - o < n - done ? P - o : n - done;
            const char* at = page(t) + shift + o * 2;
            for (int64_t r = 0; r < R; r++) {
                convert_row((const fp16*)(at + panels.scales) + r * P, my.scale + r * CHUNK + done, run);
                convert_row((const fp16*)(at + panels.minima) + r * P, my.minimum + r * CHUNK + done, run);
            }
            done += int(run);
        }
        for (int64_t r = 0; r < R; r++)
            for (int k = n; k % W; k++) my.scale[r * CHUNK + k] = my.minimum[r * CHUNK + k] = 0.f;
    }
};

// Rows with groups of WIDE elements, which are multiplied as codes.
template <int BITS> struct CodedRows : Scaled<BITS> {
    static constexpr int chunk = CHUNK;
    using Scaled<BITS>::my, Scaled<BITS>::R, Scaled<BITS>::width, Place::group, Place::panel, Place::value, Place::head;

    CodedRows(const Decode& a, const Item& item, int64_t j, int64_t J, Scratch& my)
        : Scaled<BITS>(a, item, j, my, Panels(BITS, a.kv_heads, a.page_tokens, a.dim, WIDE<BITS>)) {
        for (int64_t h = 0; h < J * group; h++)
            for (int64_t r = 0; r < R; r++) {
                vf sum = vset(0.f);
                const float* q = my.q + h * width + r * WIDE<BITS>;
                for (int64_t d = 0; d < WIDE<BITS>; d += W) sum = vadd(sum, vload(q + d));
                my.qsum[h * R + r] = vsum(sum);
            }
    }
    __attribute__((noinline)) void score(int64_t k, int64_t s, int n, Ahead ahead) {
        this->read_scales(s, n, k * panel);
        for_heads<SCORED>(head(k), group, [&](auto H, int64_t h) {
            for (int t = 0; t < n; t += tokens_of(H))
                score_codes<BITS, H>(my.q + h * width, width, my.rows + s + t, k * panel, R, my.scale + t,
                                         my.scores + h * CHUNK + t, ahead);
            ahead.bytes = 0;
        });
        for (int64_t h = head(k); h < head(k) + group; h++)
            for (int t = 0; t < n; t += W) {
                vf all = vload(my.scores + h * CHUNK + t);
                for (int64_t r = 0; r < R; r++)
                    all = vfma(vload(my.minimum + r * CHUNK + t), vset(my.qsum[h * R + r]), all);
                vstore(my.scores + h * CHUNK + t, all);
            }
    }
    __attribute__((noinline)) void weigh(int64_t k, int64_t s, int n, Ahead ahead) {
        const int64_t first = head(k);
        this->read_scales(s, n, value + k * panel);
        for (int64_t g = 0; g < group; g++)
            for (int64_t r = 0; r < R; r++) {
                vf sum = vset(0.f);
                for (int t = 0; t < n; t += W) {
                    vf p = vload(my.scores + (first + g) * CHUNK + t);
                    vstore(my.weights + (g * R + r) * CHUNK + t, vmul(p, vload(my.scale + r * CHUNK + t)));
                    sum = vfma(p, vload(my.minimum + r * CHUNK + t), sum);
                }
                my.base[g * R + r] = vsum(sum);
            }
        for_heads<WEIGHED>(0, group, [&](auto H, int64_t g) {
            weigh_groups<BITS, H>(my.weights + g * R * CHUNK, my.base + g * R, my.keep + first + g, my.rows + s,
                                  value + k * panel, n, my.acc + (first + g) * width, width, R, ahead);
            ahead.bytes = 0;
        });
    }
};

// Rows with smaller groups: a chunk of rows is decoded to fp32 first.
template <int BITS, int G> struct DecodedRows : Scaled<BITS> {
    static constexpr int chunk = CHUNK / 2;
    using Scaled<BITS>::my, Scaled<BITS>::R, Scaled<BITS>::width, Place::group, Place::panel, Place::value, Place::head;
    const char* wide[chunk];

    DecodedRows(const Decode& a, const Item& item, int64_t j, int64_t, Scratch& my)
        : Scaled<BITS>(a, item, j, my, Panels(BITS, a.kv_heads, a.page_tokens, a.dim, G)) {
        memset(my.wide, 0, size_t(chunk * width) * 4);
        for (int s = 0; s < chunk; s++) wide[s] = (const char*)(my.wide + s * width);
    }
    void decode(int64_t s, int n, int64_t shift, const Ahead& ahead) {
        this->read_scales(s, n, shift);
        for (int t = 0; t < n; t++) {
            prefetch_row(my.rows + s + t, ahead);
            decode_row<BITS, G>((const uint8_t*)my.rows[s + t] + shift, my.scale + t, my.minimum + t, CHUNK, R,
                                my.wide + t * width);
        }
    }
    __attribute__((noinline)) void score(int64_t k, int64_t s, int n, Ahead ahead) {
        decode(s, n, k * panel, ahead);
        for_heads<SCORED>(head(k), group, [&](auto H, int64_t h) {
            for (int t = 0; t < n; t += tokens_of(H))
                score_tile<float, H>(my.q + h * width, width, wide + t, 0, width, my.scores + h * CHUNK + t, {});
        });
    }
    __attribute__((noinline)) void weigh(int64_t k, int64_t s, int n, Ahead ahead) {
        decode(s, n, value + k * panel, ahead);
        for_heads<WEIGHED>(head(k), group, [&](auto H, int64_t h) {
            ::weigh<float, H>(my.scores + h * CHUNK, my.keep + h, wide, 0, n, my.acc + h * width, width, width, {});
        });
    }
};

}  // namespace
