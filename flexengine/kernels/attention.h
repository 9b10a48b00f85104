// Decode attention: attention of one new token per sequence over a paged KV cache.
//
// Index legend: i sequence, h query head, j key/value head, g query head inside the group of one j, s token of a part,
// t position. Pool: [page, 2 (K, V), j, offset, d], contiguous; for a pool of codes see codec/cache.py.
#pragma once
#include <omp.h>

#include <new>

#include "quantized_attention.h"
#include "parts.h"
#include "rows.h"
#include "softmax.h"

namespace {

constexpr int LEAST = 8;     // minimum number of work items per thread
constexpr int64_t EARLY = 8192;  // bytes; distance of prefetches ahead of reads
constexpr int64_t TOGETHER = 32;  // maximum number of query heads, of all users of an item, for one kv head

inline int64_t first_token(const Decode& a, int64_t i) {
    int64_t length = a.lengths[i];
    return a.window > 0 && length > a.window ? length - a.window : 0;
}

// Replaces n scores of `heads` heads from h on by exp(score - top), and updates the heads' softmax and `keep`. scores:
// those of head 0; apart: numbers from the scores of a head to those of the next.
inline void soften_heads(const Decode& a, int64_t h, int64_t heads, float* scores, int64_t apart, int64_t n,
                         Scratch& my) {
    Seen seen[W];
    for (int i = 0; i < W; i++) seen[i] = {0, n};
    for (const int64_t end = h + heads; h < end; h += W)
        soften(scores + h * apart, apart, padded(n), end - h < W ? end - h : W, seen, a.softcap,
               {my.top + h, my.sum + h, my.keep + h});
}

// Reads the queries of `heads` heads from h on, times the scale.
template <class Q> void read_queries(const Decode& a, int64_t i, int64_t h, int64_t heads, float* to) {
    for (int64_t g = 0; g < heads; g++, to += padded(a.dim)) {
        const Q* from = (const Q*)a.q + i * a.q_row + (h + g) * a.q_head;
        for (int64_t d = 0; d < a.dim; d++) to[d] = widen(from[d]) * a.scale;
        for (int64_t d = a.dim; d < padded(a.dim); d++) to[d] = 0.f;
    }
}

// Calls f with a null pointer to the row type R of the pool's format.
template <class F> void with_rows(const Decode& a, F f) {
    if (a.pool_dtype == FP32) f((PlainRows<float>*)nullptr);
    if (a.pool_dtype == BF16) f((PlainRows<bf16>*)nullptr);
    if (a.pool_dtype == FP16) f((PlainRows<fp16>*)nullptr);
    with_form(a.pool_dtype, a.group, [&](auto bits, auto size) {
        if constexpr (size == WIDE<bits>) f((CodedRows<bits>*)nullptr);
        else f((DecodedRows<bits, size>*)nullptr);
    });
}

void start(const Decode& a, const Item& item, int64_t j, int64_t J, Scratch& my) {
    const int64_t group = a.heads / a.kv_heads, width = padded(a.dim), heads = J * item.users * group;
    float* to = my.q;
    for (int64_t h = j * group; h < (j + J) * group; h += group)
        for (int64_t i = item.i; i < item.i + item.users; i++, to += group * width) {
            if (a.q_dtype == FP32) read_queries<float>(a, i, h, group, to);
            if (a.q_dtype == BF16) read_queries<bf16>(a, i, h, group, to);
            if (a.q_dtype == FP16) read_queries<fp16>(a, i, h, group, to);
        }
    memset(my.acc, 0, size_t(heads * width) * 4);
    for (int64_t g = 0; g < heads; g++) my.top[g] = -FLT_MAX, my.sum[g] = 0, my.keep[g] = 1;
}

// Updates acc = sum over s of exp(score - top) * V, with top and sum, for the query heads of J kv heads from head `first`
// on, over `count` tokens from `begin` on. A chunk of tokens is read head by head, all K before all V, as in memory
// within a page. This order reads bf16 at 28 GB/s instead of 21 GB/s (one core of Zen 5, random pages).
template <class R>
void attend_tokens(const Decode& a, R& rows, int64_t first, int64_t J, int64_t begin, int64_t count, Scratch& my) {
    if (count <= 0) return;
    rows.span(begin, count);
    const int64_t run = R::chunk * rows.row, early = run < EARLY ? EARLY / run < 2 * J ? EARLY / run : 2 * J : 1;
    for (int64_t s = 0, n; s < count; s += n) {
        n = R::chunk - (begin + s) % R::chunk;
        n = count - s < n ? count - s : n;
        auto ahead = [&](int64_t panel) {  // panels are counted from the chunk's first K
            panel += early;
            if (panel < J) return Ahead{0, (first + panel) * rows.panel, rows.row};
            if (panel < 2 * J) return Ahead{0, rows.value + (first + panel - J) * rows.panel, rows.row};
            return Ahead{n, (first + panel - 2 * J) * rows.panel, rows.row};
        };
        for (int64_t k = first; k < first + J; k++) rows.score(k, s, int(n), ahead(k - first));
        const bool together = rows.group == rows.apart;  // the query heads of all J heads are neighbours
        for (int64_t k = first; k < first + J; k += together ? J : 1)
            soften_heads(a, rows.head(k), together ? J * rows.group : rows.group, my.scores, CHUNK, n, my);
        for (int64_t k = first; k < first + J; k++) rows.weigh(k, s, int(n), ahead(J + k - first));
    }
}

// Attends over one part of an item's sequences: first all users to the tokens that they share, whose rows are read
// once, then each user to its own. A query takes the same steps as without sharing.
template <class R> void attend_part(const Decode& a, const Item& item, int64_t j, int64_t J, Scratch& my) {
    const int64_t begin = first_token(a, item.i) + int64_t(item.part) * PART;
    start(a, item, j, J, my);
    R rows(a, item, j, J, my);
    for (int64_t k = 0; k < J; k++)  // one head at a time: queries and sums of all users fill a core's fastest cache
        attend_tokens(a, rows, k, 1, begin, item.shared, my);
    for (int64_t u = 0; u < item.users; u++) {
        const int64_t left = a.lengths[item.i + u] - begin, count = left < PART ? left : PART;
        rows.only(u);
        attend_tokens(a, rows, 0, J, begin + item.shared, count - item.shared, my);
    }
}

// Sets all but the k largest of p[0 .. n - 1] to 0; of equal ones, the earlier stay. Sets kept[t] to 1 for those that
// stay. Weights are not negative, so their bits as integers have the same order.
void keep_largest(float* p, int64_t n, int64_t k, int32_t* kept) {
    auto bits = [&](int64_t t) { return int32_t(bits_of(p[t])); };
    auto from = [&](int32_t least) {
        int32_t count = 0;
        for (int64_t t = 0; t < n; t++) count += bits(t) >= least;
        return int64_t(count);
    };
    int32_t least = 0;  // minimum of the bits of weights that stay
    int64_t found = n;
    for (int32_t bit = 1 << 30; bit && found != k; bit >>= 1)
        if (const int64_t count = from(least | bit); count >= k) least |= bit, found = count;
    if (found > k) {  // several weights equal the k-th largest
        int64_t equal = k - from(least + 1);
        for (int64_t t = 0; t < n; t++) if (bits(t) == least && equal-- <= 0) p[t] = 0.f;
        least += least == 0;
    }
    for (int64_t t = 0; t < n; t++) {
        kept[t] |= bits(t) >= least;
        p[t] = bits(t) >= least ? p[t] : 0.f;
    }
}

// Turns the scores of head j + k over a whole sequence into weights, and keeps the largest per query head. If a.chosen
// is set, writes there the mask of tokens with a kept weight, and returns 0. Else stores the positions of these tokens
// in my.tokens and the indices of their weights in my.kept, and returns their number.
int64_t choose_top(const Decode& a, int64_t i, int64_t j, int64_t k, int64_t seen, Scratch& my) {
    const int64_t group = a.heads / a.kv_heads, begin = first_token(a, i), apart = padded(seen);
    const int64_t count = int64_t(a.topk * double(seen - 1));
    memset(my.kept, 0, size_t(seen) * 4);
    soften_heads(a, k * group, group, my.all, apart, seen, my);
    for (int64_t h = k * group; h < (k + 1) * group; h++) {
        my.keep[h] = 1;  // all chunks have weights of the same maximum: sums of earlier chunks stay
        keep_largest(my.all + h * apart, seen - 1, count, my.kept);
    }
    my.kept[seen - 1] = 1;
    int64_t some = 0;
    if (a.chosen) {
        uint8_t* to = a.chosen + (i * a.kv_heads + j + k) * a.max_pages * a.page_tokens + begin;
        for (int64_t t = 0; t < seen; t++) to[t] = uint8_t(my.kept[t]);
        return some;
    }
    for (int64_t t = 0, stays; t < seen; t++, some += stays)
        stays = my.kept[t], my.kept[some] = int32_t(t), my.tokens[some] = int32_t(begin + t);
    return some;
}

// Does the same as attend_part over a whole sequence, with only the values of the largest weights per query head.
template <class R> void attend_top(const Decode& a, const Item& item, int64_t j, int64_t J, Scratch& my) {
    const int64_t i = item.i, group = a.heads / a.kv_heads, begin = first_token(a, i), seen = a.lengths[i] - begin;
    const int64_t apart = padded(seen);
    start(a, item, j, J, my);
    R rows(a, item, j, J, my);
    for (int64_t from = 0; from < seen; from += PART) {
        const int64_t left = seen - from < PART ? seen - from : PART;
        rows.span(begin + from, left);
        for (int64_t s = 0; s < left; s += R::chunk) {
            const int n = int(left - s < R::chunk ? left - s : R::chunk);
            for (int64_t k = 0; k < J; k++)
                rows.score(k, s, n, {k + 1 < J ? 0 : R::chunk, k + 1 < J ? (k + 1) * rows.panel : 0, rows.row});
            for (int64_t h = 0; h < J * group; h++)
                memcpy(my.all + h * apart + from + s, my.scores + h * CHUNK, size_t(n) * 4);
        }
    }
    for (int64_t k = 0; k < J; k++) {
        const int64_t some = choose_top(a, i, j, k, seen, my);
        for (int64_t from = 0; from < some; from += PART) {
            const int64_t left = some - from < PART ? some - from : PART;
            rows.pick(my.tokens + from, left);
            for (int64_t s = 0; s < left; s += R::chunk) {
                const int n = int(left - s < R::chunk ? left - s : R::chunk);
                for (int64_t h = k * group; h < (k + 1) * group; h++)
                    for (int t = 0; t < padded(n); t++)
                        my.scores[h * CHUNK + t] = t < n ? my.all[h * apart + my.kept[from + s + t]] : 0.f;
                rows.weigh(k, s, n, {R::chunk, rows.value + k * rows.panel, rows.row});
            }
        }
    }
}

// Writes one head's output from `parts` partial results, which are `step` floats apart. Their sum overwrites the first.
// The sink is added to the denominator only.
template <class Q>
void finish(const Decode& a, int64_t i, int64_t h, int parts, float* acc, const float* top, const float* sum,
            int64_t step) {
    float most = a.sinks ? a.sinks[h] : -FLT_MAX;
    for (int p = 0; p < parts; p++) if (!(top[p * step] <= most)) most = top[p * step];
    float total = a.sinks ? expf(a.sinks[h] - most) : 0.f;
    for (int p = 0; p < parts; p++) {
        const float share = expf(top[p * step] - most);
        const float* more = acc + p * step;
        total += sum[p * step] * share;
        for (int64_t d = 0; d < a.dim; d++) acc[d] = p ? acc[d] + more[d] * share : acc[d] * share;
    }
    if (a.lse) a.lse[i * a.heads + h] = logf(total) + most;
    Q* to = (Q*)a.out + (i * a.heads + h) * a.dim;
    for (int64_t d = 0; d < a.dim; d++) to[d] = narrow<Q>(acc[d] / total);
}

void finish_head(const Decode& a, int64_t i, int64_t h, int parts, float* acc, const float* top, const float* sum,
                 int64_t step) {
    if (a.q_dtype == FP32) finish<float>(a, i, h, parts, acc, top, sum, step);
    if (a.q_dtype == BF16) finish<bf16>(a, i, h, parts, acc, top, sum, step);
    if (a.q_dtype == FP16) finish<fp16>(a, i, h, parts, acc, top, sum, step);
}

// Returns 0, or i + 1 if the length or a page of sequence i is outside its table or the pool.
int64_t bad_sequence(const Decode& a) {
    for (int64_t i = 0; i < a.n; i++) {
        if (a.lengths[i] < 1 || a.lengths[i] > a.max_pages * a.page_tokens) return i + 1;
        for (int64_t t = first_token(a, i) / a.page_tokens; t * a.page_tokens < a.lengths[i]; t++)
            if (uint32_t(a.tables[i * a.max_pages + t]) >= uint64_t(a.pages)) return i + 1;
    }
    return 0;
}

// Returns how many tokens of two sequences, from `begin` on and within a part, are in the same pages: a multiple of
// CHUNK. 0 if the window of either begins later than at token 0.
int64_t shared_tokens(const Decode& a, int64_t i, int64_t other, int64_t begin) {
    if (first_token(a, i) || first_token(a, other)) return 0;
    int64_t end = a.lengths[i] < a.lengths[other] ? a.lengths[i] : a.lengths[other], t = begin / a.page_tokens;
    end = end < begin + PART ? end : begin + PART;
    const int32_t *one = a.tables + i * a.max_pages, *two = a.tables + other * a.max_pages;
    while (t * a.page_tokens < end && one[t] == two[t]) t++;
    end = end < t * a.page_tokens ? end : t * a.page_tokens;
    return end > begin ? (end - begin) / CHUNK * CHUNK : 0;
}

// Division of a call into items, and of each item into blocks of J heads; with many items, an item is one block.
// `bytes` is the memory for the lists of items and slots, the partial results and the scratch of each thread.
struct Work {
    bool some;  // top-k, or only its mask: an item is a whole sequence
    int64_t items = 0, slots = 0, longest = 0, most_parts = 0, users, J, blocks, step;
    size_t listed, slotted, partial, scratch, bytes;

    explicit Work(const Decode& a) : some(a.topk < 1 || a.chosen) {
        const int64_t group = a.heads / a.kv_heads, shares = int64_t(LEAST) * a.threads;
        const int64_t fit = TOGETHER / group, even = a.n * a.kv_heads / shares;  // even: leaves each thread its shares
        users = some ? 1 : fit < even ? fit : even;
        users = users < 1 ? 1 : users;
        for (int64_t i = 0; i < a.n; i++) {
            const int64_t seen = a.lengths[i] - first_token(a, i), n = parts(a, i);
            slots += n > 1 ? n : 0, most_parts = n > most_parts ? n : most_parts;
            longest = some && seen > longest ? seen : longest;
        }
        for_items(a, [&](const Item&) { items++; });
        const int64_t most = items ? (shares + items - 1) / items : 1;
        J = (a.kv_heads + most - 1) / most, blocks = (a.kv_heads + J - 1) / J, step = group * (padded(a.dim) + 2);
        listed = (size_t(items) * sizeof(Item) + 63) / 64 * 64, slotted = (size_t(a.n) * 4 + 63) / 64 * 64;
        partial = (size_t(slots * a.kv_heads * step) * 4 + 63) / 64 * 64;
        scratch = Scratch(a, J, users, longest, nullptr).used;
        bytes = listed + slotted + partial + size_t(a.threads) * scratch;
    }
    int64_t parts(const Decode& a, int64_t i) const {
        return some ? 1 : (a.lengths[i] - first_token(a, i) + PART - 1) / PART;
    }
    // Calls f with all items. Neighbouring sequences that share most of a part are one item.
    template <class F> void for_items(const Decode& a, F f) const {
        for (int64_t p = 0; p < most_parts; p++)
            for (int64_t i = 0; i < a.n; i++) {
                if (p >= parts(a, i)) continue;
                Item item{int32_t(i), 1, int32_t(p), 0};
                for (; item.users < users && i + 1 < a.n; item.users++, i++) {
                    const int64_t same = shared_tokens(a, item.i, i + 1, p * PART);
                    if (same == 0 || 2 * same < item.shared) break;
                    item.shared = item.users == 1 || same < item.shared ? int32_t(same) : item.shared;
                }
                f(item);
            }
    }
    // Writes the items, and the number of each sequence's first partial result; -1 for a sequence of a single part.
    void list(const Decode& a, Item* to, int32_t* slot) const {
        for_items(a, [&](const Item& item) { *to++ = item; });
        int64_t used = 0;
        for (int64_t i = 0; i < a.n; i++) {
            const int64_t n = parts(a, i);
            slot[i] = n > 1 ? int32_t(used) : -1, used += n > 1 ? n : 0;
        }
    }
};

// Computes J heads of one item, from head j on. place(i, j) returns where the partial results of sequence i go: acc
// [group, width], top [group], sum [group]; null if the sequence has no other part.
template <class F>
void decode_block(const Decode& a, const Work& work, const Item& item, int64_t j, F place, Scratch& my) {
    const int64_t group = a.heads / a.kv_heads, width = padded(a.dim), left = a.kv_heads - j;
    const int64_t J = left < work.J ? left : work.J;
    with_rows(a, [&](auto* kind) {
        typedef std::remove_pointer_t<decltype(kind)> R;
        work.some ? attend_top<R>(a, item, j, J, my) : attend_part<R>(a, item, j, J, my);
    });
    int64_t from = 0;  // query head in the scratch
    for (int64_t k = 0; k < J && !a.chosen; k++)
        for (int64_t i = item.i; i < item.i + item.users; i++, from += group) {
            float* to = place(i, j + k);
            for (int64_t g = 0; g < group && !to; g++)
                finish_head(a, i, (j + k) * group + g, 1, my.acc + (from + g) * width, my.top + from + g,
                            my.sum + from + g, 0);
            if (!to) continue;
            memcpy(to, my.acc + from * width, size_t(group * width) * 4);
            memcpy(to + group * width, my.top + from, size_t(group) * 4);
            memcpy(to + group * width + group, my.sum + from, size_t(group) * 4);
        }
}

// Memory of a call: the Work, its lists, the partial results of decode_block by slot and kv head, scratch of each thread.
struct Memory {
    static constexpr size_t HEAD = (sizeof(Work) + 63) / 64 * 64;
    const Work& work;
    Item* list;
    int32_t* slot;
    float* partial;
    char* scratch;

    explicit Memory(const Decode& a) : work(*(const Work*)a.memory) {
        char* at = a.memory + HEAD;
        list = (Item*)at, slot = (int32_t*)(at += work.listed), partial = (float*)(at += work.slotted);
        scratch = at + work.partial;
    }
    // Returns where the partial results of a sequence go; null if it has a single part.
    float* place(const Decode& a, int64_t i, int64_t part, int64_t j) const {
        return slot[i] < 0 ? nullptr : partial + ((slot[i] + part) * a.kv_heads + j) * work.step;
    }
};

void plan(const Decode& a) {
    new (a.memory) Work(a);
    const Memory memory(a);
    memory.work.list(a, memory.list, memory.slot);
}

inline int64_t attended_blocks(const Decode& a) {
    const Work& work = Memory(a).work;
    return work.items * work.blocks;
}

void attend_block(const Decode& a, int64_t w) {
    const Memory memory(a);
    const Work& work = memory.work;
    Scratch my(a, work.J, work.users, work.longest, memory.scratch + size_t(omp_get_thread_num()) * work.scratch);
    const Item& item = memory.list[w / work.blocks];
    auto to = [&](int64_t i, int64_t j) { return memory.place(a, i, item.part, j); };
    decode_block(a, work, item, w % work.blocks * work.J, to, my);
}

// Sequences, times kv heads, whose parts are merged.
inline int64_t merged_heads(const Decode& a) { return Memory(a).work.slots ? a.n * a.kv_heads : 0; }

void merge_head(const Decode& a, int64_t w) {
    const Memory memory(a);
    const int64_t i = w / a.kv_heads, j = w % a.kv_heads, group = a.heads / a.kv_heads, width = padded(a.dim);
    float* from = memory.place(a, i, 0, j);
    for (int64_t g = 0; g < group && from; g++)
        finish_head(a, i, j * group + g, int(memory.work.parts(a, i)), from + g * width, from + group * width + g,
                    from + group * width + group + g, a.kv_heads * memory.work.step);
}

}  // namespace

extern "C" {

// Returns the bytes of memory for a call; -(i + 1) if the length or a page of sequence i is outside its table or the
// pool.
int64_t flex_decode_bytes(const Decode* a) {
    if (const int64_t bad = bad_sequence(*a)) return -bad;
    return int64_t(Memory::HEAD + Work(*a).bytes);
}

void flex_decode_plan(const void* a) { plan(*(const Decode*)a); }
int64_t flex_decode_blocks(const void* a) { return attended_blocks(*(const Decode*)a); }
void flex_decode_block(const void* a, int64_t w) { attend_block(*(const Decode*)a, w); }
int64_t flex_decode_merges(const void* a) { return merged_heads(*(const Decode*)a); }
void flex_decode_merge(const void* a, int64_t w) { merge_head(*(const Decode*)a, w); }

// Returns 0 for success; i + 1 if the length or a page of sequence i is outside its table or the pool; minus the bytes
// of a failed allocation. After an error nothing was written.
int64_t flex_decode(const Decode* args) {
    const int64_t bytes = flex_decode_bytes(args);
    if (bytes < 0) return -bytes;
    Decode a = *args;
    if (!(a.memory = (char*)aligned_alloc(64, size_t(bytes)))) return -bytes;
    plan(a);
    const int64_t blocks = attended_blocks(a), merges = merged_heads(a);
#pragma omp parallel num_threads(a.threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t w = 0; w < blocks; w++) attend_block(a, w);
#pragma omp for schedule(dynamic)
        for (int64_t w = 0; w < merges; w++) merge_head(a, w);
    }
    free(a.memory);
    return 0;
}

}  // extern "C"
