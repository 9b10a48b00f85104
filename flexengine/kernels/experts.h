// The products of a layer's experts in one call. Rows (token, expert) are sorted by expert. The steps that compute one
// expert are given for its first row; they run for the rows of every expert, each step for all experts at once.
#pragma once
#include <algorithm>

#include "steps.h"

namespace {

// out = min(act(gate), act_most) * (clamp(up, -up_most, up_most) + shift), or without `gated` act(x). x: gate and up,
// [rows, 2 n], one after the other or, `mixed`, gate 0, up 0, gate 1, ...
enum GatedAct : int32_t { SIGMOID = 0, TANH = 1, ERF = 2, RECTIFIED = 3, SQUARED = 4 };  // SIGMOID: x sigmoid(alpha x)
struct Gated {
    const float* x; float* out;
    int64_t rows, n, x_row;
    float alpha, act_most, up_most, shift;
    int32_t act, gated, mixed;

    int64_t rows_of_tasks() const { return rows; }
    int64_t row_elements() const { return n; }
    void run(int64_t low, int64_t high) const;
};

// Returns x Phi(x), with N. Juffa's erf, whose error is below 1 ulp.
inline vf gelu_erf(vf x) {
    const vf a = vmul(x, vset(0.70710678118654752f)), t = vand(a, 0x7fffffff), s = vmul(a, a);
    vf far = vfma(vset(-1.72853470e-5f), t, vset(3.83197126e-4f));
    far = vfma(far, s, vfma(vset(-3.88396438e-3f), t, vset(2.42546219e-2f)));
    far = vfma(far, t, vset(-1.06777877e-1f));
    far = vfma(far, t, vset(-6.34846687e-1f));
    far = vfma(far, t, vset(-1.28717512e-1f));
    far = vsub(vset(1.f), vexp(vfma(far, t, vor(t, vset(-0.f)))));
    far = vor(vand(far, 0x7fffffff), vand(a, 0x80000000));
    vf near = vfma(vset(-5.96761703e-4f), s, vset(4.99119423e-3f));
    near = vfma(near, s, vset(-2.67681349e-2f));
    near = vfma(near, s, vset(1.12819925e-1f));
    near = vfma(near, s, vset(-3.76125336e-1f));
    near = vfma(vfma(near, s, vset(1.28379166e-1f)), a, a);
    return vmul(vmul(vset(0.5f), x), vadd(vset(1.f), vbelow(t, vset(0.927734375f), near, far)));
}

inline vf gated_act(const Gated& a, vf x) {
    if (a.act == TANH) return gelu_tanh(x);
    if (a.act == ERF) return gelu_erf(x);
    if (a.act == RECTIFIED) return relu(x);
    if (a.act == SQUARED) return vmul(relu(x), relu(x));
    const vf y = vmul(vset(a.alpha), x), e = vexp(vor(vand(y, 0x7fffffff), vset(-0.f)));  // as silu
    const vf under = vdiv(x, vadd(vset(1.f), e));
    return vbelow(y, vset(0.f), vmul(under, e), under);
}

inline vf gated_pair(const Gated& a, vf gate, vf up) {
    auto most = [](vf x, float limit) { return vbelow(vset(limit), x, vset(limit), x); };  // NaN stays NaN
    const vf y = most(gated_act(a, gate), a.act_most), bounded = most(up, a.up_most);
    return vmul(y, vadd(vbelow(bounded, vset(-a.up_most), vset(-a.up_most), bounded), vset(a.shift)));
}

void Gated::run(int64_t low, int64_t high) const {
    for (int64_t m = low; m < high; m++) {
        const float* from = x + m * x_row;
        for (int64_t i = 0; i < n; i += W) {
            const int64_t count = n - i < W ? n - i : W;
            float gate[W] = {}, up[W] = {}, part[W];
            if (mixed) {
                for (int64_t e = 0; e < count; e++) gate[e] = from[2 * (i + e)], up[e] = from[2 * (i + e) + 1];
            } else if (count < W) {
                memcpy(gate, from + i, size_t(count) * 4);
                if (gated) memcpy(up, from + n + i, size_t(count) * 4);
            }
            const bool apart = mixed || count < W;
            const vf g = vload(apart ? gate : from + i);
            const vf y = gated ? gated_pair(*this, g, vload(apart ? up : from + n + i)) : gated_act(*this, g);
            if (count == W) vstore(out + m * n + i, y);
            else vstore(part, y), memcpy(out + m * n + i, part, size_t(count) * 4);
        }
    }
}

// ---------------------------------------------------------------- the call

// A step of one expert, as Step, with its struct in Experts.calls. It is the step of the first row, of expert 0. Steps
// whose rows are independent of experts and of each other are `whole`: one call has the rows of all experts. rows_at,
// threads_at: where the struct has its number of rows and, unless it is -1, of threads, in bytes.
struct ExpertStep {
    int64_t call, bytes, addresses, rows_at, threads_at;  // addresses: of the struct, which follow those of earlier steps
    int32_t kind, whole;
};
constexpr int32_t GATED = 1 << 10;  // the kind of a Gated, beside those of steps.h

// The struct has at byte `at` the address bases[base] + offset + row * (first row) + place * (index of the expert's
// weights) + expert * (its number). If Experts.tables has an address for the base and the index, that replaces bases[base]
// + place * (index).
struct ExpertAddress {
    int64_t at, base, offset, row, place, expert;
};

// out [tokens, n] = (`fresh`: 0, else out) + the sum over the chosen experts of shares * their result, in the order of
// the experts. chosen, shares: [tokens, top]. places: [experts], the index of an expert's weights, or -1 for experts that
// are left out; null if it is the expert's number. tables: [bases, experts], addresses of matrices that do not follow each
// other, by index; 0 for others; may be null. inputs, outputs: [capacity, k] and [capacity, n], memory of the
// experts' rows. capacity: most rows that the steps compute at once. rounded: whether the first step multiplies codes of
// int8, which the call makes once per token; `inputs` is not used then. memory: of `flex_experts_bytes`.
struct Experts {
    const float* x; const int64_t* chosen; const float* shares; const int64_t* places; float* out;
    const char* calls; const ExpertStep* steps; const ExpertAddress* addresses; const int64_t *bases, *tables;
    float *inputs, *outputs; char* memory;
    int64_t tokens, top, experts, k, n, x_row, capacity, count;
    int32_t threads, fresh, rounded;

    const Product& first() const { return *(const Product*)(calls + steps[0].call); }
};

struct Run { int64_t expert, first, rows; };  // first: among the rows that are computed at once

// What the call keeps in its memory.
struct ExpertMemory {
    int64_t rows, runs, width;  // maximum numbers; bytes of the structs of all steps
    int64_t *starts, *tokens, *places, *ends;
    float *shares, *worths;  // worths: [tokens, groups, 2], scale and sum of codes
    Run* run;
    char* calls;
    int8_t* codes;  // [tokens, groups, group]
    int64_t bytes;

    explicit ExpertMemory(const Experts& a) : rows(a.tokens * a.top), runs(a.experts), width(0) {
        if (rows < runs) runs = rows;
        for (int64_t s = 0; s < a.count; s++) width += a.steps[s].bytes;
        char* at = a.memory;
        auto take = [&](auto*& to, int64_t count) { to = decltype(+to)(at), at += (count * int64_t(sizeof *to) + 63) / 64 * 64; };
        const int64_t groups = a.rounded ? a.tokens * a.first().groups : 0, each = groups ? Rounded(a.first()).each : 0;
        take(starts, a.experts + 1), take(tokens, rows), take(places, rows), take(ends, runs * (a.count + 1));
        take(shares, rows), take(run, runs), take(calls, runs * width);
        take(worths, each * groups), take(codes, groups ? groups * a.first().group : 0);
        bytes = at - a.memory;
    }
};

// Sorts rows by expert: starts[e], the first row of expert e; of each row, its token and share; of each token, its rows,
// rising, and then -1. Returns 0, or i + 1 if chosen[i] is no expert.
int64_t sort_rows(const Experts& a, const ExpertMemory& to) {
    for (int64_t e = 0; e <= a.experts; e++) to.starts[e] = 0;
    auto left_out = [&](int64_t e) { return a.places && a.places[e] < 0; };
    for (int64_t i = 0; i < a.tokens * a.top; i++) {
        const int64_t e = a.chosen[i];
        if (e < 0 || e >= a.experts) return i + 1;
        if (!left_out(e)) to.starts[e + 1]++;
    }
    for (int64_t e = 0; e < a.experts; e++) to.starts[e + 1] += to.starts[e];
    for (int64_t t = 0; t < a.tokens; t++) {
        int64_t *place = to.places + t * a.top, count = 0;
        for (int64_t i = t * a.top; i < (t + 1) * a.top; i++) {
            if (left_out(a.chosen[i])) continue;
            const int64_t row = to.starts[a.chosen[i]]++;
            to.tokens[row] = t, to.shares[row] = a.shares[i];
            int64_t at = count++;
            for (; at && place[at - 1] > row; at--) place[at] = place[at - 1];
            place[at] = row;
        }
        for (; count < a.top; count++) place[count] = -1;
    }
    for (int64_t e = a.experts; e > 0; e--) to.starts[e] = to.starts[e - 1];
    to.starts[0] = 0;
    return 0;
}

// Some rows that are computed at once: rows `low` to `high` of all, of `runs` experts.
struct ExpertRows {
    const Experts& a;
    const ExpertMemory& m;
    int64_t low, high, runs;
    bool first;
};

template <class F> INLINE void with_expert_tasks(const Step& step, F f) {
    if (step.kind == GATED) return f(RowTasks<Gated>(*(const Gated*)step.call));
    with_tasks(step, f);
}

// Copies rows of tokens.
struct GatherTasks {
    const ExpertRows& r;
    const int64_t count;

    explicit GatherTasks(const ExpertRows& r) : r(r), count(r.high - r.low) {}
    int64_t numbers() const { return count * r.a.k; }
    void run(int64_t i) const {
        memcpy(r.a.inputs + i * r.a.k, r.a.x + r.m.tokens[r.low + i] * r.a.x_row, size_t(r.a.k) * 4);
    }
};

// Rounds the tokens to int8, as RoundTasks do.
void round_tokens(const Experts& a, const ExpertMemory& to) {
    Product p = a.first();
    p.x = a.x, p.x_row = a.x_row, p.rows = a.tokens;
    Rounded tiles(p);  // of one token each
    tiles.worths = to.worths, tiles.quads = to.codes;
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1 && a.tokens * a.k > ALONE)
    for (int64_t t = 0; t < a.tokens; t++)
        for (int64_t g = 0; g < p.groups; g++) round_tile(p, tiles, t, 1, g);
}

// Copies the codes of tokens to the tiles that products read. A task is a tile of an expert.
struct CodeTasks {
    const ExpertRows& r;
    const int64_t* const ends;
    const int64_t count;

    explicit CodeTasks(const ExpertRows& r) : r(r), ends(r.m.ends + r.a.count * r.m.runs), count(ends[r.runs - 1]) {}
    int64_t numbers() const { return (r.high - r.low) * r.a.k / 4; }
    void run(int64_t i) const {
        const int64_t e = std::upper_bound(ends, ends + r.runs, i) - ends, t = i - (e ? ends[e - 1] : 0);
        const Product& p = *(const Product*)(r.m.calls + e * r.a.steps[0].bytes);
        const Rounded to(p);
        const Tiles tiles(p);
        const int64_t m = tiles.first(t), M = tiles.height(t), *tokens = r.m.tokens + r.low + r.m.run[e].first + m;
        for (int64_t g = 0; g < p.groups; g++) {
            float* worth = to.worth(m, M, g);
            int8_t* codes = to.codes(m, M, g);
            for (int64_t j = 0; j < M; j++)
                for (int64_t k = 0; k < to.each; k++)
                    worth[k * M + j] = r.m.worths[to.each * (tokens[j] * p.groups + g) + k];
            for (int64_t q = 0; q < p.group; q += 4)
                for (int64_t j = 0; j < M; j++, codes += 4)
                    memcpy(codes, r.m.codes + (tokens[j] * p.groups + g) * p.group + q, 4);
        }
    }
};

// Adds the weighted results of a token's experts.
struct WeighTasks {
    const ExpertRows& r;
    const int64_t count;

    explicit WeighTasks(const ExpertRows& r) : r(r), count(r.a.tokens) {}
    int64_t numbers() const { return (r.high - r.low) * r.a.n; }
    void run(int64_t t) const {
        const int64_t *places = r.m.places + t * r.a.top, n = r.a.n;
        const bool fresh = r.first && r.a.fresh;
        int64_t begin = 0, end;
        while (begin < r.a.top && places[begin] >= 0 && places[begin] < r.low) begin++;
        for (end = begin; end < r.a.top && places[end] >= 0 && places[end] < r.high;) end++;
        if (begin == end && !fresh) return;
        float* out = r.a.out + t * n;
        int64_t d = 0;
        for (; d + W <= n; d += W) {
            vf sum = fresh ? vset(0.f) : vload(out + d);
            for (int64_t i = begin; i < end; i++)
                sum = vadd(sum, vmul(vload(r.a.outputs + (places[i] - r.low) * n + d), vset(r.m.shares[places[i]])));
            vstore(out + d, sum);
        }
        for (; d < n; d++) {
            float sum = fresh ? 0.f : out[d];
            for (int64_t i = begin; i < end; i++) sum += r.a.outputs[(places[i] - r.low) * n + d] * r.m.shares[places[i]];
            out[d] = sum;
        }
    }
};

// The tasks of a step, of all experts one after the other.
struct ExpertTasks {
    const char* calls;
    const int64_t *ends, runs, bytes;
    const int32_t kind;
    const int64_t count;

    Step step(int64_t r) const { return {calls + r * bytes, kind, 0}; }
    int64_t numbers() const {
        int64_t sum = 0;
        for (int64_t r = 0; r < runs; r++) with_expert_tasks(step(r), [&](const auto& tasks) { sum += tasks.numbers(); });
        return sum;
    }
    void run(int64_t i) const {
        const int64_t r = std::upper_bound(ends, ends + runs, i) - ends;
        with_expert_tasks(step(r), [&](const auto& tasks) { tasks.run(i - (r ? ends[r - 1] : 0)); });
    }
};

// Writes the structs of all steps for some rows, and numbers their tasks.
void plan_steps(const ExpertRows& r) {
    const Experts& a = r.a;
    const ExpertAddress* addresses = a.addresses;
    char* calls = r.m.calls;
    for (int64_t i = 0, tiles = 0, *ends = r.m.ends + a.count * r.m.runs; a.rounded && i < r.runs; i++) {
        Product p = a.first();
        p.rows = r.m.run[i].rows;
        ends[i] = tiles += Tiles(p).count;
    }
    for (int64_t s = 0; s < a.count; addresses += a.steps[s++].addresses) {
        const ExpertStep& step = a.steps[s];
        const int64_t runs = step.whole ? 1 : r.runs;
        int64_t* ends = r.m.ends + s * r.m.runs;
        for (int64_t i = 0; i < runs; i++, calls += step.bytes) {
            const Run run = step.whole ? Run{0, 0, r.high - r.low} : r.m.run[i];
            memcpy(calls, a.calls + step.call, size_t(step.bytes));
            memcpy(calls + step.rows_at, &run.rows, 8);
            const int32_t threads = int32_t((a.threads + runs - 1) / runs);
            if (step.threads_at >= 0) memcpy(calls + step.threads_at, &threads, 4);
            for (const ExpertAddress* to = addresses; to < addresses + step.addresses; to++) {
                const int64_t place = a.places && !step.whole ? a.places[run.expert] : run.expert;
                const int64_t own = a.tables && place >= 0 ? a.tables[to->base * a.experts + place] : 0;
                const int64_t start = own ? own : a.bases[to->base] + to->place * place;
                const int64_t value = start + to->offset + to->row * run.first + to->expert * run.expert;
                memcpy(calls + to->at, &value, 8);
            }
            with_expert_tasks({calls, step.kind, 0}, [&](const auto& tasks) { ends[i] = (i ? ends[i - 1] : 0) + tasks.count; });
        }
    }
}

// Calls f with the tasks of stage s: first the rows are gathered, then come the steps, and the sums.
template <class F> INLINE void with_stage(const ExpertRows& r, int64_t s, F f) {
    if (s == 0 && r.a.rounded) return f(CodeTasks(r));
    if (s == 0) return f(GatherTasks(r));
    if (s > r.a.count) return f(WeighTasks(r));
    const char* calls = r.m.calls;
    for (int64_t i = 0; i < s - 1; i++) calls += r.a.steps[i].bytes * (r.a.steps[i].whole ? 1 : r.runs);
    const ExpertStep& step = r.a.steps[s - 1];
    const int64_t *ends = r.m.ends + (s - 1) * r.m.runs, runs = step.whole ? 1 : r.runs;
    f(ExpertTasks{calls, ends, runs, step.bytes, step.kind, ends[runs - 1]});
}

void run_stages(const ExpertRows& r) {
    const int64_t stages = r.a.count + 2;
    Progress progress[STEPS];
    bool small = true;
    for (int64_t s = 0; s < stages; s++) with_stage(r, s, [&](const auto& tasks) { small &= tasks.numbers() <= ALONE; });
    const int64_t threads = small ? 1 : r.a.threads;
#pragma omp parallel num_threads(int32_t(threads)) if (threads > 1)
    {
        const int64_t thread = omp_get_thread_num();
        int64_t before = 0;
        for (int64_t s = 0; s < stages; s++) {
            if (s) wait_for(progress[s - 1], before);
            with_stage(r, s, [&](const auto& tasks) {
                before = tasks.count;
                progress[s].taken.take(tasks.count, threads, thread, [&](int64_t i) {
                    tasks.run(i);
                    progress[s].done.value.fetch_add(1, std::memory_order_release);
                });
            });
        }
    }
}

int64_t run_experts(const Experts& a) {
    const ExpertMemory memory(a);
    if (const int64_t bad = sort_rows(a, memory)) return bad;
    if (a.rounded) round_tokens(a, memory);
    ExpertRows rows{a, memory, 0, 0, 0, true};
    auto compute = [&] {
        plan_steps(rows);
        run_stages(rows);
        rows.low = rows.high, rows.runs = 0, rows.first = false;
    };
    for (int64_t e = 0; e < a.experts; e++)
        for (int64_t next = memory.starts[e], end = memory.starts[e + 1]; next < end;) {
            const int64_t count = end - next < a.capacity ? end - next : a.capacity;
            if (next + count - rows.low > a.capacity) compute();
            memory.run[rows.runs++] = {e, next - rows.low, count};
            rows.high = next += count;
        }
    if (rows.runs) compute();
    else if (a.fresh && rows.first) memset(a.out, 0, size_t(a.tokens * a.n) * 4);
    return 0;
}

}  // namespace

FLEX_SIZE(gated, Gated)
FLEX_SIZE(expertstep, ExpertStep)
FLEX_SIZE(expertaddress, ExpertAddress)
FLEX_SIZE(experts, Experts)

extern "C" {

// Returns the bytes of Experts.memory.
int64_t flex_experts_bytes(const Experts* args) { return ExpertMemory(*args).bytes; }

// Returns 0, or i + 1 if chosen[i] is no expert; then nothing is written.
int64_t flex_experts(const Experts* args) { return run_experts(*args); }

// Computes a Gated alone, in this thread.
void flex_gated(const Gated* args) { args->run(0, args->rows); }

}  // extern "C"
