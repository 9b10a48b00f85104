// The softmax of attention, updated with one block of scores after the other.
#pragma once
#include "simd.h"

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

// Replaces the scores that `rows` <= W rows see by exp(score - top), and the others by 0; updates the softmax. Rows have
// `columns` scores, a multiple of W; `apart` numbers are from one row to the next. The maxima and the sums of all rows are
// made together, with fewer instructions than one by one. A row's result does not depend on other rows.
inline void soften(float* scores, int64_t apart, int64_t columns, int64_t rows, const Seen* seen, float softcap,
                   const Softmax& to) {
    vf most[W], total[W];
    for (int i = 0; i < W; i++) most[i] = vset(-FLT_MAX), total[i] = vset(0.f);
    for (int64_t i = 0; i < rows; i++) {
        const bool whole = seen[i].whole();
        float* at = scores + i * apart;
        for (int64_t s = seen[i].first(); s < seen[i].end(); s += W) {
            vf x = vload(at + s);
            if (softcap > 0) x = vmul(vtanh(vmul(x, vset(1 / softcap))), vset(softcap));
            if (!whole) x = seen[i].inside(s, x, -FLT_MAX);
            if (softcap > 0 || !whole) vstore(at + s, x);
            most[i] = vmax(x, most[i]);
        }
    }
    float tops[W] = {}, sums[W] = {}, factors[W];
    memcpy(tops, to.top, size_t(rows) * 4);
    memcpy(sums, to.sum, size_t(rows) * 4);
    const vf above = vmax(vtops(most), vload(tops)), factor = vexp(vsub(vload(tops), above));
    vstore(tops, above);
    vstore(factors, factor);
    for (int64_t i = 0; i < rows; i++) {
        const bool whole = seen[i].whole();
        float* at = scores + i * apart;
        for (int64_t s = 0; s < seen[i].first(); s += W) vstore(at + s, vset(0.f));
        for (int64_t s = seen[i].first(); s < seen[i].end(); s += W) {
            vf e = vexp(vsub(vload(at + s), vset(tops[i])));
            if (!whole) e = seen[i].inside(s, e, 0.f);
            vstore(at + s, e);
            total[i] = vadd(total[i], e);
        }
        for (int64_t s = seen[i].end(); s < columns; s += W) vstore(at + s, vset(0.f));
    }
    vstore(sums, vfma(vload(sums), factor, vsums(total)));
    memcpy(to.top, tops, size_t(rows) * 4);
    memcpy(to.sum, sums, size_t(rows) * 4);
    memcpy(to.keep, factors, size_t(rows) * 4);
}

}  // namespace
