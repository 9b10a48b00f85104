// Norms, rotary positions and gates. The result of a number is independent of its position in the tensor.
#pragma once
#include "simd.h"

namespace {

constexpr int64_t ALONE = 1 << 15;  // elements; for at most this many, one thread is faster than several

// out[m, :] = weight * (x[m, :] / sqrt(mean of squares + eps)), with weight + shift in weight's place.
struct Norm {
    const float *x, *weight; float* out;
    int64_t rows, n, x_row;
    float eps, shift;
    int32_t threads;
};

void norm_row(const Norm& a, int64_t m) {
    const float* x = a.x + m * a.x_row;
    float* out = a.out + m * a.n;
    const int64_t whole = a.n / W * W;
    const int rest = int(a.n - whole);
    vf sum[4] = {vset(0.f), vset(0.f), vset(0.f), vset(0.f)};
    for (int64_t d = 0; d < whole; d += W) sum[d / W % 4] = vfma(vload(x + d), vload(x + d), sum[d / W % 4]);
    const vf last = rest ? vload_part(x + whole, rest) : vset(0.f);
    sum[0] = vfma(last, last, sum[0]);
    const float square = vsum(vadd(vadd(sum[0], sum[1]), vadd(sum[2], sum[3])));
    const vf factor = vset(1.f / sqrtf(square / float(a.n) + a.eps)), shift = vset(a.shift);
    for (int64_t d = 0; d < whole; d += W)
        vstore(out + d, vmul(vadd(vload(a.weight + d), shift), vmul(vload(x + d), factor)));
    if (!rest) return;
    float part[W];
    vstore(part, vmul(vadd(vload_part(a.weight + whole, rest), shift), vmul(last, factor)));
    memcpy(out + whole, part, size_t(rest) * 4);
}

// Head by head: out = x * cos + (-second half of x, first half of x) * sin. out: [tokens, heads, dim].
struct Rotate {
    const float *x, *cos, *sin; float* out;
    int64_t tokens, heads, dim, x_row, x_head, angle_row;
    int32_t threads;
};

void rotate_token(const Rotate& a, int64_t t) {
    const int64_t half = a.dim / 2;
    const float *cos = a.cos + t * a.angle_row, *sin = a.sin + t * a.angle_row;
    for (int64_t h = 0; h < a.heads; h++) {
        const float *x = a.x + t * a.x_row + h * a.x_head, *y = x + half;
        float* out = a.out + (t * a.heads + h) * a.dim;
        for (int64_t d = 0; d < half; d++) out[d] = x[d] * cos[d] + -y[d] * sin[d];
        for (int64_t d = 0; d < half; d++) out[half + d] = y[d] * cos[half + d] + x[d] * sin[half + d];
    }
}

// gate = act(gate) * up
enum Act : int32_t { SILU = 0, GELU_TANH = 1 };
struct Gate {
    float* gate; const float* up;
    int64_t n;
    int32_t act, threads;
};

inline vf silu(vf x) {  // e = exp(-|x|) does not overflow
    const vf e = vexp(vor(vand(x, 0x7fffffff), vset(-0.f))), under = vdiv(x, vadd(vset(1.f), e));
    return vbelow(x, vset(0.f), vmul(under, e), under);
}

inline vf gelu_tanh(vf x) {
    const vf cube = vmul(vmul(x, x), x), inner = vmul(vset(0.79788456080286536f), vfma(vset(0.044715f), cube, x));
    return vmul(vmul(vset(0.5f), x), vadd(vset(1.f), vtanh(inner)));
}

inline vf activated(int32_t act, vf x) { return act == SILU ? silu(x) : gelu_tanh(x); }

void gate_span(const Gate& a, int64_t from, int64_t end) {
    int64_t i = from;
    for (; i + W <= end; i += W) vstore(a.gate + i, vmul(activated(a.act, vload(a.gate + i)), vload(a.up + i)));
    if (i == end) return;
    float part[W];
    const int rest = int(end - i);
    vstore(part, vmul(activated(a.act, vload_part(a.gate + i, rest)), vload_part(a.up + i, rest)));
    memcpy(a.gate + i, part, size_t(rest) * 4);
}

}  // namespace

extern "C" {

void flex_norm(const Norm* a) {
#pragma omp parallel for num_threads(a->threads) if (a->rows * a->n > ALONE)
    for (int64_t m = 0; m < a->rows; m++) norm_row(*a, m);
}

void flex_rotate(const Rotate* a) {
#pragma omp parallel for num_threads(a->threads) if (a->tokens * a->heads * a->dim > ALONE)
    for (int64_t t = 0; t < a->tokens; t++) rotate_token(*a, t);
}

void flex_gate(const Gate* a) {
    const int64_t spans = (a->n + ALONE - 1) / ALONE;
#pragma omp parallel for num_threads(a->threads) if (spans > 1)
    for (int64_t i = 0; i < spans; i++) gate_span(*a, i * ALONE, (i + 1) * ALONE < a->n ? (i + 1) * ALONE : a->n);
}

}  // extern "C"
