// Attention on rows of codes: minima are applied to sums, not to elements; so are scales, but where LOOKUP.
//
// Index legend: r group of a row, e and i as in codes.h; the rest as in rows.h.
#pragma once
#include "codes.h"
#include "rows.h"

namespace {

// The group that is multiplied as codes; other ones are decoded first, they are rare.
template <int BITS> constexpr int WIDE = BITS == 4 ? 32 : 64;

// scores[g][0 .. tokens_of(H) - 1] = sum over groups of scale * (q[g] . codes of those rows), for H query heads.
// scale: [r][CHUNK].
template <int BITS, int NG, int H>
inline void score_codes(const float* q, int64_t width, Tokens rows, int64_t shift, int64_t groups, const float* scale,
                        float* scores, const Ahead& ahead) {
    constexpr int stride = WIDE<BITS> * BITS / 8, tokens = tokens_of(H);
    constexpr int T = LOOKUP<BITS> || H * 4 <= W / 2 || H == 1 ? TILE : 2;  // bounded by the registers
    const int64_t R = NG > 0 ? NG : groups;
    vf all[(H * tokens + W - 1) / W * W];
    for (int first = 0; first < tokens; first += T) {
        vf total[H][T];
        for (int g = 0; g < H; g++) for (int t = 0; t < T; t++) total[g][t] = vset(0.f);
        for (int t = 0; t < T; t++) prefetch_row(rows + first + t, ahead);
        for (int64_t r = 0; r < R; r++) {
            vf part[H][T], table[T];
            vf(&sum)[H][T] = LOOKUP<BITS> ? total : part;
            for (int t = 0; t < T; t++) table[t] = multiples<BITS>(scale[r * CHUNK + first + t]);
            for (int g = 0; g < H; g++) for (int t = 0; t < T; t++) part[g][t] = vset(0.f);
            for (int i = 0; i < stride; i += W) {
                vcodes raw[T];
                const int64_t at = shift + r * stride + i;
                for (int t = 0; t < T; t++) raw[t] = load_codes((const uint8_t*)rows[first + t] + at);
                for_codes<BITS>([&](auto e) {
                    vf k[T];
                    for (int t = 0; t < T; t++) k[t] = code<BITS, e>(raw[t], table[t]);
                    for (int g = 0; g < H; g++) {
                        vf x = vheld<H>(vload(q + g * width + r * WIDE<BITS> + e * stride + i));
                        for (int t = 0; t < T; t++) sum[g][t] = vfma(x, k[t], sum[g][t]);
                    }
                });
            }
            for (int t = 0; t < T && !LOOKUP<BITS>; t++) {
                vf step = vset(scale[r * CHUNK + first + t]);
                for (int g = 0; g < H; g++) total[g][t] = vfma(part[g][t], step, total[g][t]);
            }
        }
        for (int g = 0; g < H; g++) for (int t = 0; t < T; t++) all[g * tokens + first + t] = total[g][t];
    }
    put_sums<H>(all, scores);
}

// acc[g][C columns] = acc * keep[g] + base[g][r] + sum over s of p[g][r][s] * (codes of token s), for H query heads.
// p: where LOOKUP, weights [g][CHUNK], and scale [r][CHUNK] is apart; else their products [g][r][CHUNK]. base: [g][r];
// shift: bytes from rows to the V codes wanted.
template <int BITS, int H, int C>
inline void weigh_codes(const float* p, const float* scale, const float* base, const float* keep, Tokens rows,
                        int64_t shift, int n, float* acc, int64_t width, int64_t groups, Ahead ahead) {
    constexpr int E = 8 / BITS, N = C / E, U = WIDE<BITS> * BITS / 8 / W;  // pieces of W bytes: here, in a group
    constexpr int R = N > U ? N / U : 1;                                   // groups
    auto column = [](int z, int e) { return z / U * WIDE<BITS> + e * (WIDE<BITS> / E) + z % U * W; };
    vf sum[H][N][E];
    for (int g = 0; g < H; g++)
        for (int z = 0; z < N; z++)
            for (int e = 0; e < E; e++) {
                const vf old = vload(acc + g * width + column(z, e));
                sum[g][z][e] = vfma(old, vset(keep[g]), vset(base[g * groups + z / U]));
            }
    for (int s = 0; s < n; s++) {
        const uint8_t* row = (const uint8_t*)rows[s] + shift;
        vf x[N][E], table[R];
        for (int r = 0; r < R; r++) table[r] = multiples<BITS>(scale[r * CHUNK + s]);
        for (int z = 0; z < N; z++) {
            vcodes raw = load_codes(row + z * W);
            for_codes<BITS>([&](auto e) { x[z][e] = code<BITS, e>(raw, table[z * R / N]); });
        }
        prefetch_row(rows + s, ahead);
        for (int g = 0; g < H; g++)
            for (int r = 0; r < R; r++) {
                vf weight = vheld<H>(vset(LOOKUP<BITS> ? p[g * CHUNK + s] : p[(g * groups + r) * CHUNK + s]));
                for (int z = r * N / R; z < (r + 1) * N / R; z++)
                    for (int e = 0; e < E; e++) sum[g][z][e] = vfma(weight, x[z][e], sum[g][z][e]);
            }
    }
    for (int g = 0; g < H; g++)
        for (int z = 0; z < N; z++)
            for (int e = 0; e < E; e++) vstore(acc + g * width + column(z, e), sum[g][z][e]);
}

template <int BITS, int H>
inline void weigh_groups(const float* p, const float* scale, const float* base, const float* keep, Tokens rows,
                         int64_t shift, int n, float* acc, int64_t width, int64_t groups, Ahead ahead) {
    constexpr int E = 8 / BITS, U = WIDE<BITS> * BITS / 8 / W;
    constexpr int C = H <= HEADS / 2 ? 8 : 4, N = C / E > 0 ? C / E : 1;
    const int64_t pieces = groups * U;
    for (int64_t z = 0; z < pieces; ahead.bytes = 0) {
        const int64_t r = z / U, to = r * WIDE<BITS> + z % U * W;
        const float* weight = LOOKUP<BITS> ? p : p + r * CHUNK;
        if (N == 1 || z + N <= pieces) {
            weigh_codes<BITS, H, N * E>(weight, scale + r * CHUNK, base + r, keep, rows, shift + z * W, n, acc + to,
                                        width, groups, ahead);
            z += N;
        } else {
            weigh_codes<BITS, H, U * E>(weight, scale + r * CHUNK, base + r, keep, rows, shift + z * W, n, acc + to,
                                        width, groups, ahead);
            z += U;
        }
    }
}

// The scales and minima of rows of codes.
template <int BITS> struct Scaled : Place {
    const int64_t R, group, width;
    const Panels panels;
    const int32_t* picked = nullptr;  // null: the tokens are neighbours, from `begin` on
    int64_t begin = 0;

    Scaled(const Decode& a, int64_t i, int64_t j, Scratch& my, const Panels& panels)
        : Place(a, i, j, my, panels.row, panels.panel), R(a.dim / a.group), group(a.heads / a.kv_heads),
          width(padded(a.dim)), panels(panels) {}

    void span(int64_t first, int64_t count) { picked = nullptr, begin = first, Place::span(first, count); }
    void pick(const int32_t* tokens, int64_t count) { picked = tokens, Place::pick(tokens, count); }

    // my.scale and my.minimum [r][CHUNK] of rows s .. s + n - 1, `shift` bytes from their panels; 0 to a multiple of W.
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

// Groups of WIDE elements, multiplied as codes. NG > 0: groups of a row, known when compiling.
template <int BITS, int NG> struct CodedRows : Scaled<BITS> {
    static constexpr int chunk = CHUNK;
    using Scaled<BITS>::my, Scaled<BITS>::R, Scaled<BITS>::group, Scaled<BITS>::width, Place::panel, Place::value;

    CodedRows(const Decode& a, int64_t i, int64_t j, int64_t J, Scratch& my)
        : Scaled<BITS>(a, i, j, my, Panels(BITS, a.kv_heads, a.page_tokens, a.dim, WIDE<BITS>)) {
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
        for_heads(k * group, group, [&](auto H, int64_t h) {
            for (int t = 0; t < n; t += tokens_of(H))
                score_codes<BITS, NG, H>(my.q + h * width, width, my.rows + s + t, k * panel, R, my.scale + t,
                                         my.scores + h * CHUNK + t, ahead);
            ahead.bytes = 0;
        });
        for (int64_t h = k * group; h < (k + 1) * group; h++)
            for (int t = 0; t < n; t += W) {
                vf all = vload(my.scores + h * CHUNK + t);
                for (int64_t r = 0; r < R; r++)
                    all = vfma(vload(my.minimum + r * CHUNK + t), vset(my.qsum[h * R + r]), all);
                vstore(my.scores + h * CHUNK + t, all);
            }
    }
    __attribute__((noinline)) void weigh(int64_t k, int64_t s, int n, Ahead ahead) {
        const int64_t first = k * group;
        this->read_scales(s, n, value + k * panel);
        for (int64_t g = 0; g < group; g++)
            for (int64_t r = 0; r < R; r++) {
                vf sum = vset(0.f);
                for (int t = 0; t < n; t += W) {
                    vf p = vload(my.scores + (first + g) * CHUNK + t);
                    if (!LOOKUP<BITS>)
                        vstore(my.weights + (g * R + r) * CHUNK + t, vmul(p, vload(my.scale + r * CHUNK + t)));
                    sum = vfma(p, vload(my.minimum + r * CHUNK + t), sum);
                }
                my.base[g * R + r] = vsum(sum);
            }
        for_heads(0, group, [&](auto H, int64_t g) {
            const float* p = LOOKUP<BITS> ? my.scores + (first + g) * CHUNK : my.weights + g * R * CHUNK;
            weigh_groups<BITS, H>(p, my.scale, my.base + g * R, my.keep + first + g, my.rows + s,
                                  value + k * panel, n, my.acc + (first + g) * width, width, R, ahead);
            ahead.bytes = 0;
        });
    }
};

// Smaller groups: a chunk of rows is decoded, and taken as fp32 from there.
template <int BITS, int G> struct DecodedRows : Scaled<BITS> {
    static constexpr int chunk = CHUNK / 2;
    using Scaled<BITS>::my, Scaled<BITS>::R, Scaled<BITS>::group, Scaled<BITS>::width, Place::panel, Place::value;
    const char* wide[chunk];

    DecodedRows(const Decode& a, int64_t i, int64_t j, int64_t, Scratch& my)
        : Scaled<BITS>(a, i, j, my, Panels(BITS, a.kv_heads, a.page_tokens, a.dim, G)) {
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
        for_heads(k * group, group, [&](auto H, int64_t h) {
            for (int t = 0; t < n; t += tokens_of(H))
                score_tile<float, 0, H>(my.q + h * width, width, wide + t, 0, width, my.scores + h * CHUNK + t, {});
        });
    }
    __attribute__((noinline)) void weigh(int64_t k, int64_t s, int n, Ahead ahead) {
        decode(s, n, value + k * panel, ahead);
        for_heads(k * group, group, [&](auto H, int64_t h) {
            ::weigh<float, H>(my.scores + h * CHUNK, my.keep + h, wide, 0, n, my.acc + h * width, width, width, {});
        });
    }
};

}  // namespace
