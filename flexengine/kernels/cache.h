// Writes to a paged KV cache, plain or encoded. Index legend: t token, j key/value head.
#pragma once
#include "codes.h"
#include "convert.h"

namespace {

struct Append {
    const void *k, *v; void* pool; const int32_t *pages, *offsets;
    int64_t tokens, pool_pages, kv_heads, page_tokens, dim, group, k_row, k_head, v_row, v_head;
    int32_t from_dtype, pool_dtype, threads;
};

template <class From, class To> void append_plain(const Append& a, int64_t t, int64_t j) {
    const int64_t head = int64_t(a.pages[t]) * 2 * a.kv_heads + j;
    To* k = (To*)a.pool + (head * a.page_tokens + a.offsets[t]) * a.dim;
    convert_row((const From*)a.k + t * a.k_row + j * a.k_head, k, a.dim);
    convert_row((const From*)a.v + t * a.v_row + j * a.v_head, k + a.kv_heads * a.page_tokens * a.dim, a.dim);
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
typedef void Encode(const Append& a, int64_t t);

template <int BITS, int G, class From> void append_heads(const Append& a, int64_t t) {
    for (int64_t j = 0; j < a.kv_heads; j++) {
        append_codes<BITS, G>(a, t, j, false, (const From*)a.k + t * a.k_row + j * a.k_head);
        append_codes<BITS, G>(a, t, j, true, (const From*)a.v + t * a.v_row + j * a.v_head);
    }
}

}  // namespace

extern "C" {

// Returns 0, or t + 1 if the page or offset of token t is outside the pool; then nothing is written.
int64_t flex_append(const Append* args) {
    const Append& a = *args;
    for (int64_t t = 0; t < a.tokens; t++)
        if (uint32_t(a.pages[t]) >= uint64_t(a.pool_pages) || uint32_t(a.offsets[t]) >= uint64_t(a.page_tokens))
            return t + 1;
    if (a.pool_dtype <= FP16) {
        with_dtypes(a.from_dtype, a.pool_dtype, [&](auto from, auto to) {
#pragma omp parallel for num_threads(a.threads) schedule(static) if (a.tokens * a.kv_heads * a.dim > 65536)
            for (int64_t t = 0; t < a.tokens; t++)
                for (int64_t j = 0; j < a.kv_heads; j++) append_plain<decltype(from), decltype(to)>(a, t, j);
        });
        return 0;
    }
    Encode* encode = nullptr;
    with_form(a.pool_dtype, a.group, [&](auto bits, auto group) {
        if (a.from_dtype == FP32) encode = append_heads<bits, group, float>;
        if (a.from_dtype == BF16) encode = append_heads<bits, group, bf16>;
        if (a.from_dtype == FP16) encode = append_heads<bits, group, fp16>;
    });
#pragma omp parallel for num_threads(a.threads) schedule(static) if (a.tokens * a.kv_heads * a.dim > 32768)
    for (int64_t t = 0; t < a.tokens; t++) encode(a, t);
    return 0;
}

}  // extern "C"
