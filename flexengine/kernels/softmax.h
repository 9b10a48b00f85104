// The softmax of attention, updated with one block of scores after the other.
#pragma once
#include <type_traits>

#include "tile.h"

namespace {

alignas(64) constexpr float LANE_NUMBERS[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The scores that a row sees: low .. high - 1.
struct Seen {
    int64_t low, high;

    bool any() const { return low < high; }
    int64_t first() const { return any() ? low / W * W : 0; }  // whole vectors that hold these scores
    int64_t end() const { return any() ? (high + W - 1) / W * W : 0; }
    bool whole() const { return first() == low && end() == high; }
    // Returns x at these scores in the vector from score s on, and `other` elsewhere.
    vf inside(int64_t s, vf x, float other) const {
        const vf at = vload(LANE_NUMBERS);
        return vbelow(at, vset(float(low - s)), vset(other), vbelow(at, vset(float(high - s)), x, vset(other)));
    }
};

// State of rows: their maximum, and the sum of exp(score - top), of all scores so far. keep: factor for sums that were
// made with the maximum before.
struct Softmax { float *top, *sum, *keep; };

// How `soften` computes: exp(score), or, if scores are multiplied by UNIT = log2(e), as 2^score, with fewer instructions. U:
// units of the results, see tile.h. Results in pairs are rounded anyway. keep: the same, but exactly 1 for 0, as rows that
// see none of the scores may be left out of a product.
struct Natural {
    typedef float U;
    static constexpr float UNIT = 1;
    static vf power(vf x) { return vexp(x); }
    static vf keep(vf x) { return vexp(x); }
};
template <class Unit> struct Binary {
    typedef Unit U;
    static constexpr float UNIT = 1.44269504f;
    static vf power(vf x) { return vexp2<COLUMNS<U> == 1>(x); }
    static vf keep(vf x) { return vexp2<true>(x); }
};

// Calls f(s, plain) for each vector of scores, the s-th being its first: those from `first` to `end`, or all N, unrolled.
// plain: whether they are unrolled.
template <int N, class F> INLINE void for_vectors(bool all, int64_t first, int64_t end, F f) {
    if (N > 0 && all) {
        UNROLL for (int v = 0; v < N; v++) f(v * W, std::true_type());
        return;
    }
    for (int64_t s = first; s < end; s += W) f(s, std::false_type());
}

// Replaces the scores that `rows` <= W rows see by exp(score - top), and the others by 0; updates the softmax. Rows have
// `columns` scores, a multiple of W; `apart` numbers are from one row to the next. The maxima and the sums of all rows are
// made together, with fewer instructions than one by one. A row's result does not depend on other rows. Pairs of results
// take the first half of a row. N: vectors of a row, if it is a constant; then rows that see all scores take less time.
template <class E = Natural, int N = 0> inline void soften(float* scores, int64_t apart, int64_t columns, int64_t rows,
                                                const Seen* seen, float softcap, const Softmax& to) {
    typedef typename E::U U;
    vf most[W], total[W];
    for (int i = 0; i < W; i++) most[i] = vset(-FLT_MAX), total[i] = vset(0.f);
    for (int64_t i = 0; i < rows; i++) {
        const bool whole = seen[i].whole();
        const int64_t first = seen[i].first(), end = seen[i].end();
        float* at = scores + i * apart;
        vf highest = vset(-FLT_MAX);  // in a register, as the loop must not wait for memory
        for_vectors<N>(whole && end - first == columns && softcap <= 0, first, end, [&](int64_t s, auto plain) FORCED {
            vf x = vload(at + s);
            if (!plain && softcap > 0) x = vmul(vtanh(vmul(x, vset(1 / softcap))), vset(softcap * E::UNIT));
            if (!plain && !whole) x = seen[i].inside(s, x, -FLT_MAX);
            if (!plain && (softcap > 0 || !whole)) vstore(at + s, x);
            highest = vmax(x, highest);
        });
        most[i] = highest;
    }
    float tops[W] = {}, sums[W] = {}, factors[W];
    memcpy(tops, to.top, size_t(rows) * 4);
    memcpy(sums, to.sum, size_t(rows) * 4);
    const vf above = vmax(vtops(most), vload(tops)), factor = E::keep(vsub(vload(tops), above));
    vstore(tops, above);
    vstore(factors, factor);
    for (int64_t i = 0; i < rows; i++) {
        const bool whole = seen[i].whole();
        const int64_t first = seen[i].first(), end = seen[i].end();
        const vf top = vset(tops[i]);
        vf sum = vset(0.f);
        float* at = scores + i * apart;
        auto place = [&](int64_t s) { return (U*)at + s / COLUMNS<U>; };
        for (int64_t s = 0; s < first; s += W) put(place(s), vset(0.f));
        for_vectors<N>(whole && end - first == columns, first, end, [&](int64_t s, auto plain) FORCED {
            vf e = E::power(vsub(vload(at + s), top));
            if (!plain && !whole) e = seen[i].inside(s, e, 0.f);
            put(place(s), e);
            sum = vadd(sum, e);
        });
        for (int64_t s = end; s < columns; s += W) put(place(s), vset(0.f));
        total[i] = sum;
    }
    vstore(sums, vfma(vload(sums), factor, vsums(total)));
    memcpy(to.top, tops, size_t(rows) * 4);
    memcpy(to.sum, sums, size_t(rows) * 4);
    memcpy(to.keep, factors, size_t(rows) * 4);
}

}  // namespace
