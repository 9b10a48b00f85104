// Norms, rotary positions, gates, and rounding to bf16. The result of a number is independent of its position in the
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

// out[m, :] = weight * (x[m, :] / sqrt(mean of squares + eps)) + bias, with weight + shift in weight's place.
// bias: null for none; centred: subtract the mean of x[m, :] first.
struct Norm {
    const float *x, *weight, *bias; float* out;
    int64_t rows, n, x_row;
    float eps, shift;
    int32_t centred;

    int64_t rows_of_tasks() const { return rows; }
    int64_t row_elements() const { return n; }
    void run(int64_t low, int64_t high) const;
};

void norm_row(const Norm& a, int64_t m) {
    const float* x = a.x + m * a.x_row;
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
    for (int64_t d = 0; d < whole; d += W) {
        const vf y = vmul(vadd(vload(a.weight + d), shift), vmul(vsub(vload(x + d), mean), factor));
        vstore(out + d, a.bias ? vadd(y, vload(a.bias + d)) : y);
    }
    if (!rest) return;
    const vf y = vmul(vadd(vload_part(a.weight + whole, rest), shift), vmul(last, factor));
    vstore(part, a.bias ? vadd(y, vload_part(a.bias + whole, rest)) : y);
    memcpy(out + whole, part, size_t(rest) * 4);
}

void Norm::run(int64_t low, int64_t high) const {
    for (int64_t m = low; m < high; m++) norm_row(*this, m);
}

// Head by head: out = x * cos + (-second half of x, first half of x) * sin. out: [tokens, heads, dim].
struct Rotate {
    const float *x, *cos, *sin; float* out;
    int64_t tokens, heads, dim, x_row, x_head, angle_row;

    int64_t rows_of_tasks() const { return tokens; }
    int64_t row_elements() const { return heads * dim; }
    void run(int64_t low, int64_t high) const;
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

void Rotate::run(int64_t low, int64_t high) const {
    for (int64_t t = low; t < high; t++) rotate_token(*this, t);
}

// gate = act(gate) * up, n numbers; up: null for 1
enum Act : int32_t { SILU = 0, GELU_TANH = 1, RELU = 2 };
struct Gate {
    float* gate; const float* up;
    int64_t n;
    int32_t act;

    int64_t rows_of_tasks() const { return (n + EACH_TASK - 1) / EACH_TASK; }
    int64_t row_elements() const { return EACH_TASK; }
    void run(int64_t low, int64_t high) const;
};

inline vf silu(vf x) {  // e = exp(-|x|) does not overflow
    const vf e = vexp(vor(vand(x, 0x7fffffff), vset(-0.f))), under = vdiv(x, vadd(vset(1.f), e));
    return vbelow(x, vset(0.f), vmul(under, e), under);
}

inline vf gelu_tanh(vf x) {
    const vf cube = vmul(vmul(x, x), x), inner = vmul(vset(0.79788456080286536f), vfma(vset(0.044715f), cube, x));
    return vmul(vmul(vset(0.5f), x), vadd(vset(1.f), vtanh(inner)));
}

inline vf relu(vf x) { return vbelow(x, vset(0.f), vset(0.f), x); }  // NaN stays NaN

inline vf activated(int32_t act, vf x) { return act == SILU ? silu(x) : act == RELU ? relu(x) : gelu_tanh(x); }

void gate_span(const Gate& a, int64_t from, int64_t end) {
    int64_t i = from;
    for (; i + W <= end; i += W) {
        const vf x = activated(a.act, vload(a.gate + i));
        vstore(a.gate + i, a.up ? vmul(x, vload(a.up + i)) : x);
    }
    if (i == end) return;
    float part[W];
    const int rest = int(end - i);
    const vf x = activated(a.act, vload_part(a.gate + i, rest));
    vstore(part, a.up ? vmul(x, vload_part(a.up + i, rest)) : x);
    memcpy(a.gate + i, part, size_t(rest) * 4);
}

void Gate::run(int64_t low, int64_t high) const {
    gate_span(*this, low * EACH_TASK, high * EACH_TASK < n ? high * EACH_TASK : n);
}

// Rounds x [rows, n] to bf16: to pairs in out [rows, (n + 1) / 2], with a zero after an odd last number, or `wide`, to
// fp32 numbers in out [rows, n].
struct Narrow {
    const float* x; float* out;
    int64_t rows, n, x_row;
    int32_t wide;

    int64_t rows_of_tasks() const { return rows; }
    int64_t row_elements() const { return n; }
    void run(int64_t low, int64_t high) const {
        for (int64_t m = low; m < high; m++) {
            const float* from = x + m * x_row;
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
