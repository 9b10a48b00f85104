// The choice of experts.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>
#include "simd.h"

namespace {

// A token's `top` experts of largest logits, largest first; of equals those that torch.topk returns. Their shares are, before they are
// divided by their sum (`normalised`, which also makes the softmax of the chosen ones of that of all) and multiplied by
// `scale`: SOFTMAX of all logits, or the sigmoid of each. logits: [tokens, experts]; chosen, shares: [tokens, top]
enum Shared : int32_t { SOFTMAX = 0, SIGMOIDS = 1 };
struct Route {
    const float* logits; int64_t* chosen; float* shares;
    int64_t tokens, experts, top;
    float scale;
    int32_t kind, normalised, threads;
};

inline float exp_of(float x) {
    float lanes[W];
    vstore(lanes, vexp(vset(x)));
    return lanes[0];
}

// The choice of torch.topk on a CPU, which depends on the order in which the standard library compares equals.
void choose_of_equals(const float* x, int64_t experts, int64_t top, int64_t* chosen) {
    std::vector<std::pair<float, int64_t>> queue(experts);
    for (int64_t e = 0; e < experts; e++) queue[e] = {x[e], e};
    auto more = [](const auto& a, const auto& b) { return (a.first != a.first && b.first == b.first) || a.first > b.first; };
    const auto begin = queue.begin(), end = queue.end();
    if (top * 64 <= experts) std::partial_sort(begin, begin + top, end, more);
    else std::nth_element(begin, begin + top - 1, end, more), std::sort(begin, begin + top - 1, more);
    for (int64_t i = 0; i < top; i++) chosen[i] = queue[i].second;
}

void choose(const float* x, int64_t experts, int64_t top, int64_t* chosen) {
    int64_t count = 0, equal = 0;
    for (int64_t e = 0; e < experts; e++) {
        if (count == top && !(x[e] > x[chosen[top - 1]])) continue;
        int64_t at = count < top ? count++ : top - 1;
        for (; at && x[e] > x[chosen[at - 1]]; at--) chosen[at] = chosen[at - 1];
        chosen[at] = e;
    }
    const float least = x[chosen[top - 1]];
    for (int64_t e = 0; e < experts; e++) equal += x[e] == least;
    for (int64_t i = 0; i < top; i++) equal -= x[chosen[i]] == least;
    if (equal) choose_of_equals(x, experts, top, chosen);
}

void route_token(const Route& a, int64_t t) {
    const float* x = a.logits + t * a.experts;
    int64_t* chosen = a.chosen + t * a.top;
    float *shares = a.shares + t * a.top, sum = 1.f, total = 0.f;
    choose(x, a.experts, a.top, chosen);
    const float most = x[chosen[0]];
    for (int64_t i = 0; i < a.top; i++) {
        const float y = x[chosen[i]];
        const float e = exp_of(a.kind == SIGMOIDS ? -fabsf(y) : y - most);
        shares[i] = a.kind != SIGMOIDS ? e : y < 0.f ? e / (1.f + e) : 1.f / (1.f + e);
    }
    if (a.kind == SOFTMAX) {
        vf sums = vset(0.f);
        for (int64_t e = 0; e < a.experts; e += W) {
            float part[W];
            for (int i = 0; i < W; i++) part[i] = e + i < a.experts ? x[e + i] - most : -200.f;  // exp: less than 1e-37
            sums = vadd(sums, vexp(vload(part)));
        }
        sum = vsum(sums);
    }
    for (int64_t i = 0; i < a.top; i++) total += shares[i] /= sum;
    for (int64_t i = 0; i < a.top; i++) shares[i] = (a.normalised ? shares[i] / total : shares[i]) * a.scale;
}

constexpr int64_t CHOSEN_ALONE = 1 << 15;  // logits; one thread chooses from at most this many

}  // namespace

FLEX_SIZE(route, Route)

extern "C" {

void flex_route(const Route* args) {
#pragma omp parallel for num_threads(args->threads) if (args->tokens * args->experts > CHOSEN_ALONE)
    for (int64_t t = 0; t < args->tokens; t++) route_token(*args, t);
}

}  // extern "C"
