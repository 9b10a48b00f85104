// Writes to a paged KV cache, plain or encoded. Index legend: t token, j key/value head.
#pragma once
#include "quantized_kv.h"
#include "convert.h"
#include "parts.h"

namespace {

constexpr int64_t BLOCK_TOKENS = 8;

struct Append {
    const void *k, *v; void* pool; const int32_t *pages, *offsets;
    int64_t tokens, pool_pages, kv_heads, page_tokens, dim, group, k_row, k_head, v_row, v_head;
    int32_t from_dtype, pool_dtype, threads;
};

// Returns where K of head j of token t goes; V is kv_heads panels behind.
template <class To> To* plain_row(const Append& a, int64_t t, int64_t j) {
    const int64_t head = int64_t(a.pages[t]) * 2 * a.kv_heads + j;
    return (To*)a.pool + (head * a.page_tokens + a.offsets[t]) * a.dim;
}

template <class From, class To> void append_plain(const Append& a, int64_t t, int64_t j) {
    constexpr int64_t AHEAD = 2;  // tokens; those of different sequences are in different pages
    const int64_t values = a.kv_heads * a.page_tokens * a.dim;
    if (t + AHEAD < a.tokens) {
        const uintptr_t next = uintptr_t(plain_row<To>(a, t + AHEAD, j));
        for (int64_t d = 0; d < a.dim * int64_t(sizeof(To)); d += 64) {
            __builtin_prefetch((const void*)(next + d), 1);
            __builtin_prefetch((const void*)(next + values * sizeof(To) + d), 1);
        }
    }
    To* k = plain_row<To>(a, t, j);
    convert_row((const From*)a.k + t * a.k_row + j * a.k_head, k, a.dim);
    convert_row((const From*)a.v + t * a.v_row + j * a.v_head, k + values, a.dim);
}

// Encodes one row of K, or of V, group by group, so that no scratch memory is needed.
template <int BITS, int G, class From> void append_codes(const Append& a, int64_t t, int64_t j, bool value, const From* x) {
    const Panels at(BITS, a.kv_heads, a.page_tokens, a.dim, G);
    const int64_t o = a.offsets[t], panel = (int64_t(a.pages[t]) * 2 + value) * a.kv_heads + j;
    uint8_t* to = (uint8_t*)a.pool + panel * at.panel;
    for (int64_t r = 0; r < a.dim / G; r++) {
        float group[G];
        convert_row(x + r * G, group, G);
        encode_row<BITS, G>(group, 1, to + o * at.row + r * (G * BITS / 8), (fp16*)(to + at.scales) + r * a.page_tokens + o,
                            (fp16*)(to + at.minima) + r * a.page_tokens + o, a.page_tokens);
    }
}

// Encodes all heads of token t.
template <int BITS, int G, class From> void append_heads(const Append& a, int64_t t) {
    for (int64_t j = 0; j < a.kv_heads; j++) {
        append_codes<BITS, G>(a, t, j, false, (const From*)a.k + t * a.k_row + j * a.k_head);
        append_codes<BITS, G>(a, t, j, true, (const From*)a.v + t * a.v_row + j * a.v_head);
    }
}

// Appends token t.
void append_token(const Append& a, int64_t t) {
    if (a.pool_dtype <= FP16)
        return with_dtypes(a.from_dtype, a.pool_dtype, [&](auto from, auto to) {
            for (int64_t j = 0; j < a.kv_heads; j++) append_plain<decltype(from), decltype(to)>(a, t, j);
        });
    with_form(a.pool_dtype, a.group, [&](auto bits, auto group) {
        if (a.from_dtype == FP32) append_heads<bits, group, float>(a, t);
        if (a.from_dtype == BF16) append_heads<bits, group, bf16>(a, t);
        if (a.from_dtype == FP16) append_heads<bits, group, fp16>(a, t);
    });
}

// Returns 0, or t + 1 if the page or offset of token t is outside the pool.
int64_t bad_token(const Append& a) {
    for (int64_t t = 0; t < a.tokens; t++)
        if (uint32_t(a.pages[t]) >= uint64_t(a.pool_pages) || uint32_t(a.offsets[t]) >= uint64_t(a.page_tokens))
            return t + 1;
    return 0;
}

}  // namespace

extern "C" {

// Returns 0, or t + 1 if the page or offset of token t is outside the pool.
int64_t flex_append_check(const Append* a) { return bad_token(*a); }

int64_t flex_append_blocks(const void* a) { return (((const Append*)a)->tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS; }
void flex_append_block(const void* a, int64_t w) {
    const Append& append = *(const Append*)a;
    for (int64_t t = w * BLOCK_TOKENS; t < append.tokens && t < (w + 1) * BLOCK_TOKENS; t++) append_token(append, t);
}

// Returns what flex_append_check returns; if it is not 0, nothing is written.
int64_t flex_append(const Append* args) {
    const Append& a = *args;
    if (const int64_t bad = bad_token(a)) return bad;
    const int64_t alone = a.pool_dtype <= FP16 ? 65536 : 32768;  // numbers that one thread writes faster than several
#pragma omp parallel for num_threads(a.threads) schedule(static) if (a.tokens * a.kv_heads * a.dim > alone)
    for (int64_t t = 0; t < a.tokens; t++) append_token(a, t);
    return 0;
}

}  // extern "C"
