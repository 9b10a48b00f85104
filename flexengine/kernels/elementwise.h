// Norms, rotary positions, gates, sums, and rounding to bf16. The result of a number is independent of its position in the
// tensor.
#pragma once
#include "convert.h"

namespace {

constexpr int64_t EACH_TASK = 1 << 12;  // elements of a task, or one row if it has more

// Tasks over rows of `width` elements: run(low, high) computes the rows low to high - 1.
template <class Call> struct RowTasks {
    const Call& a;
    const int64_t rows, width, each, count;

    explicit RowTasks(const Call& a)
        : a(a), rows(a.rows_of_tasks()), width(a.row_elements()), each(width < EACH_TASK ? EACH_TASK / (width + 1) + 1 : 1),
          count((rows + each - 1) / each) {}
    int64_t numbers() const { return rows * width; }
    void run(int64_t i) const { a.run(i * each, (i + 1) * each < rows ? (i + 1) * each : rows); }
};

// Row m of [rows, n] is head m % heads of token m / heads; x may have longer rows, tokens and heads.
// out[m, :] = residual[m, :] + weight * (x[m, :] / sqrt(mean of squares + eps)) + bias, with weight + shift in weight's
// place. weight: null for ones, and w_head numbers from one head's to the next; bias, residual: null for none;
// centred: subtract the mean of x[m, :] first.
struct Norm {
    const float *x, *weight, *bias, *residual; float* out;
    int64_t rows, n, heads, x_row, x_head, w_head;
    float eps, shift;
    int32_t centred;

    int64_t rows_of_tasks() const { return rows; }
    int64_t row_elements() const { return n; }
    void run(int64_t low, int64_t high) const;
};

void norm_row(const Norm& a, int64_t m) {
    const int64_t head = m % a.heads;
    const float *x = a.x + m / a.heads * a.x_row + head * a.x_head, *more = a.residual ? a.residual + m * a.n : nullptr;
    const float *weight = a.weight ? a.weight + head * a.w_head : nullptr, *bias = a.bias ? a.bias + head * a.w_head : nullptr;
    float* out = a.out + m * a.n;
    const int64_t whole = a.n / W * W;
    const int rest = int(a.n - whole);
    auto total = [](const vf* sum) { return vsum(vadd(vadd(sum[0], sum[1]), vadd(sum[2], sum[3]))); };
    float middle = 0.f;
    if (a.centred) {
        vf sum[4] = {vset(0.f), vset(0.f), vset(0.f), vset(0.f)};
        for (int64_t d = 0; d < whole; d += W) sum[d / W % 4] = vadd(vload(x + d), sum[d / W % 4]);
        if (rest) sum[0] = vadd(vload_part(x + whole, rest), sum[0]);
        middle = total(sum) / float(a.n);
    }
    const vf mean = vset(middle);
    vf sum[4] = {vset(0.f), vset(0.f), vset(0.f), vset(0.f)};
    for (int64_t d = 0; d < whole; d += W) {
        const vf y = vsub(vload(x + d), mean);
        sum[d / W % 4] = vfma(y, y, sum[d / W % 4]);
    }
    float part[W] = {};
    for (int e = 0; e < rest; e++) part[e] = x[whole + e] - middle;
    const vf last = vload(part);
    sum[0] = vfma(last, last, sum[0]);
    const vf factor = vset(1.f / sqrtf(total(sum) / float(a.n) + a.eps)), shift = vset(a.shift);
    auto finished = [&](vf y, int64_t d, auto load) {
        y = vmul(y, factor);
        if (weight) y = vmul(vadd(load(weight + d), shift), y);
        if (bias) y = vadd(y, load(bias + d));
        return more ? vadd(load(more + d), y) : y;
    };
    for (int64_t d = 0; d < whole; d += W)
        vstore(out + d, finished(vsub(vload(x + d), mean), d, [](const float* from) { return vload(from); }));
    if (!rest) return;
    vstore(part, finished(last, whole, [&](const float* from) { return vload_part(from, rest); }));
    memcpy(out + whole, part, size_t(rest) * 4);
}

void Norm::run(int64_t low, int64_t high) const {
    for (int64_t m = low; m < high; m++) norm_row(*this, m);
}

// Which elements of a head rotary positions turn together: d and half + d; 2 * d and 2 * d + 1; or these, with the results
// at d and half + d.
enum Pairing : int32_t { HALVES = 0, PAIRS = 1, PAIRS_TO_HALVES = 2 };

// Head by head: out = x, but its first `turned` elements are x * cos + y * sin, where y are the same elements, exchanged
// within each pair, the new first one negated. After the `dim` elements of x follow extra[token, head], if extra is not
// null, and zeros, up to `width` elements.
struct Rotate {
    const float *x, *cos, *sin, *extra; float* out;
    int64_t tokens, heads, dim, turned, width, x_row, x_head, out_row, out_head, angle_row, extra_row;
    int32_t pairing;

    int64_t rows_of_tasks() const { return tokens; }
    int64_t row_elements() const { return heads * width; }
    void run(int64_t low, int64_t high) const;
};

void rotate_token(const Rotate& a, int64_t t) {
    const int64_t half = a.turned / 2;
    const float *cos = a.cos + t * a.angle_row, *sin = a.sin + t * a.angle_row;
    for (int64_t h = 0; h < a.heads; h++) {
        const float *x = a.x + t * a.x_row + h * a.x_head, *y = x + half;
        float* out = a.out + t * a.out_row + h * a.out_head;
        if (a.pairing == PAIRS) {
            for (int64_t d = 0; d < a.turned; d += 2) {
                out[d] = x[d] * cos[d] + -x[d + 1] * sin[d];
                out[d + 1] = x[d + 1] * cos[d + 1] + x[d] * sin[d + 1];
            }
        } else if (a.pairing == PAIRS_TO_HALVES) {
            for (int64_t d = 0; d < half; d++) out[d] = x[2 * d] * cos[d] + -x[2 * d + 1] * sin[d];
            for (int64_t d = 0; d < half; d++) out[half + d] = x[2 * d + 1] * cos[half + d] + x[2 * d] * sin[half + d];
        } else {
            for (int64_t d = 0; d < half; d++) out[d] = x[d] * cos[d] + -y[d] * sin[d];
            for (int64_t d = 0; d < half; d++) out[half + d] = y[d] * cos[half + d] + x[d] * sin[half + d];
        }
        if (a.turned < a.dim) memcpy(out + a.turned, x + a.turned, size_t(a.dim - a.turned) * 4);
        int64_t end = a.dim;
        if (a.extra) out[end++] = a.extra[t * a.extra_row + h];
        if (end < a.width) memset(out + end, 0, size_t(a.width - end) * 4);
    }
}

void Rotate::run(int64_t low, int64_t high) const {
    for (int64_t t = low; t < high; t++) rotate_token(*this, t);
}

// out = x + factor * y, all [rows, n]; out is contiguous
struct Add {
    const float *x, *y; float* out;
    int64_t rows, n, x_row, y_row;
    float factor;

    int64_t rows_of_tasks() const { return rows; }
    int64_t row_elements() const { return n; }
    void run(int64_t low, int64_t high) const {
        for (int64_t m = low; m < high; m++)
            for (int64_t d = 0; d < n; d++) out[m * n + d] = x[m * x_row + d] + factor * y[m * y_row + d];
    }
};

// out = act(gate) * up; up: null for ones. gate: [rows, n]. up and out: [rows, n * each], whose `each` neighbours have one
// gate. CLIP limits a number to -limit and limit, SCALE multiplies it by limit; others do not use limit. out may be the
// memory of gate if `each` is 1.
enum Act : int32_t {
    SILU = 0, GELU_TANH = 1, RELU = 2, GELU = 3, GELU_QUICK = 4, RELU_SQUARED = 5, LOGISTIC = 6, SOFTPLUS = 7, CLIP = 8,
    SCALE = 9
};
struct Gate {
    const float *gate, *up; float* out;
    int64_t rows, n, each, row, up_row, out_row;
    int32_t act;
    float limit;

    int64_t spans() const { return (n + EACH_TASK - 1) / EACH_TASK; }  // of a row
    int64_t rows_of_tasks() const { return rows * spans(); }
    int64_t row_elements() const { return n < EACH_TASK ? n : EACH_TASK; }
    void run(int64_t low, int64_t high) const;
};

inline vf sigmoid_times(vf x, vf y) {  // y / (1 + exp(-x)); e = exp(-|x|) does not overflow
    const vf e = vexp(vor(vand(x, 0x7fffffff), vset(-0.f))), under = vdiv(y, vadd(vset(1.f), e));
    return vbelow(x, vset(0.f), vmul(under, e), under);
}

inline vf silu(vf x) { return sigmoid_times(x, x); }

inline vf gelu_quick(vf x) { return sigmoid_times(vmul(vset(1.702f), x), x); }

inline vf gelu_tanh(vf x) {
    const vf cube = vmul(vmul(x, x), x), inner = vmul(vset(0.79788456080286536f), vfma(vset(0.044715f), cube, x));
    return vmul(vmul(vset(0.5f), x), vadd(vset(1.f), vtanh(inner)));
}

// Error function: a quotient of polynomials, from Eigen; it is 1 to the last bit from 4 on.
inline vf verf(vf x) {
    x = vbelow(x, vset(-4.f), vset(-4.f), vbelow(vset(4.f), x, vset(4.f), x));
    const vf s = vmul(x, x);
    vf p = vset(-2.72614225801306e-10f), q = vset(-1.45660718464996e-05f);
    constexpr float P[] = {2.77068142495902e-08f, -2.10102402082508e-06f, -5.69250639462346e-05f,
                           -7.34990630326855e-04f, -2.95459980854025e-03f, -1.60960333262415e-02f};
    constexpr float Q[] = {-2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f, -1.42647390514189e-02f};
    for (float c : P) p = vfma(p, s, vset(c));
    for (float c : Q) q = vfma(q, s, vset(c));
    return vdiv(vmul(x, p), q);
}

inline vf gelu(vf x) { return vmul(vmul(vset(0.5f), x), vadd(vset(1.f), verf(vmul(x, vset(0.70710678118654752f))))); }

inline vf relu(vf x) { return vbelow(x, vset(0.f), vset(0.f), x); }  // NaN stays NaN

inline vf softplus(vf x) {  // as torch.nn.functional.softplus
    float y[W];
    vstore(y, x);
    for (int e = 0; e < W; e++) y[e] = y[e] > 20.f ? y[e] : log1pf(expf(y[e]));
    return vload(y);
}

inline vf clipped(float limit, vf x) {  // NaN stays NaN
    const vf low = vset(-limit), high = vset(limit);
    return vbelow(x, low, low, vbelow(high, x, high, x));
}

inline vf activated(int32_t act, vf x, float limit) {
    switch (act) {
        case SILU: return silu(x);
        case RELU: return relu(x);
        case GELU: return gelu(x);
        case GELU_QUICK: return gelu_quick(x);
        case RELU_SQUARED: return vmul(relu(x), relu(x));
        case LOGISTIC: return sigmoid_times(x, vset(1.f));
        case SOFTPLUS: return softplus(x);
        case CLIP: return clipped(limit, x);
        case SCALE: return vmul(vset(limit), x);
        default: return gelu_tanh(x);
    }
}

void gate_span(const Gate& a, const float* gate, const float* up, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const vf x = activated(a.act, vload(gate + i), a.limit);
        vstore(out + i, up ? vmul(x, vload(up + i)) : x);
    }
    if (i == n) return;
    float part[W];
    const int rest = int(n - i);
    const vf x = activated(a.act, vload_part(gate + i, rest), a.limit);
    vstore(part, up ? vmul(x, vload_part(up + i, rest)) : x);
    memcpy(out + i, part, size_t(rest) * 4);
}

void gate_heads(const Gate& a, const float* gate, const float* up, float* out, int64_t n) {
    for (int64_t i = 0; i < n; i += W) {
        float part[W];
        const int64_t some = n - i < W ? n - i : W;
        vstore(part, activated(a.act, some < W ? vload_part(gate + i, int(some)) : vload(gate + i), a.limit));
        for (int64_t d = 0; d < some * a.each; d++) out[i * a.each + d] = part[d / a.each] * up[i * a.each + d];
    }
}

void Gate::run(int64_t low, int64_t high) const {
    for (int64_t i = low; i < high; i++) {
        const int64_t m = i / spans(), from = i % spans() * EACH_TASK, span = n - from < EACH_TASK ? n - from : EACH_TASK;
        const float* other = up ? up + m * up_row + from * each : nullptr;
        (each == 1 ? gate_span : gate_heads)(*this, gate + m * row + from, other, out + m * out_row + from * each, span);
    }
}

// Rounds n numbers to int8 by groups of 64 columns, as round_row of quantized_gemm.h does, in fp32.
inline void round_groups(const float* x, int64_t n, float* out) {
    for (int64_t low = 0; low < n; low += 64) {
        const int64_t end = low + 64 < n ? low + 64 : n;
        uint32_t top = 0;
        for (int64_t i = low; i < end; i++) {
            const uint32_t size = bits_of(x[i]) & 0x7fffffff;
            top = size > top ? size : top;
        }
        const float scale = float_of(top) / 127.f, magic = 12582912.f;  // magic: see vexp
        const bool some = scale >= FLT_MIN && scale < INFINITY;
        for (int64_t i = low; i < end; i++)
            out[i] = some ? (x[i] / scale + magic - magic) * scale : scale < INFINITY ? 0.f : NAN;
    }
}

// Rounds x [rows, n] to bf16: to pairs in out [rows, (n + 1) / 2], with a zero after an odd last number, or, if wide is 1,
// to fp32 numbers in out [rows, n]. If wide is 2, it rounds to int8 instead, in fp32.
struct Narrow {
    const float* x; float* out;
    int64_t rows, n, x_row;
    int32_t wide;

    int64_t rows_of_tasks() const { return rows; }
    int64_t row_elements() const { return n; }
    void run(int64_t low, int64_t high) const {
        for (int64_t m = low; m < high; m++) {
            const float* from = x + m * x_row;
            if (wide == 2) {
                round_groups(from, n, out + m * n);
                continue;
            }
            if (wide) {
                for (int64_t i = 0; i < n; i++) out[m * n + i] = widen(narrow<bf16>(from[i]));
                continue;
            }
            bf16* to = (bf16*)(out + m * ((n + 1) / 2));
            convert_row(from, to, n);
            if (n % 2) to[n] = {0};
        }
    }
};

}  // namespace
