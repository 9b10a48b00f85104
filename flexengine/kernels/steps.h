// Kernels of a layer as steps, which run one after the other in one parallel region.
#pragma once
#include <sched.h>

#include <chrono>

#include "elementwise.h"
#include "quantized_gemm.h"
#include "parts.h"
#include "shares.h"

namespace {

// beside: the step may run at the same time as the step before it, since neither reads what the other writes.
enum class Kind : int32_t { LINEAR, DECODED, ROUND, DOTS, NARROW, NORM, ROTATE, GATE, APPEND, ATTEND, MERGE, PROMPTS, ADD };
constexpr int KINDS = 13;
struct Step {
    const void* call;
    int32_t kind, beside;
};

// Tasks of parts.h. EACH: numbers of a task, more or less.
template <int64_t EACH> struct PartTasks {
    const void* call;
    void (*part)(const void*, int64_t);
    int64_t count;

    int64_t numbers() const { return count * EACH; }
    void run(int64_t i) const { part(call, i); }
};

// Calls f with the tasks of a step: `count` tasks, which run(i) computes in any order, and a number of elements or
// products that tells how long they take.
template <class F> INLINE void with_tasks(const Step& step, F f) {
    switch (Kind(step.kind)) {
        case Kind::LINEAR: return f(LinearTasks(*(const Linear*)step.call));
        case Kind::DECODED: return f(DecodedTasks(*(const Product*)step.call));
        case Kind::ROUND: return f(RoundTasks(*(const Product*)step.call));
        case Kind::DOTS: return f(DotTasks(*(const Product*)step.call));
        case Kind::NARROW: return f(RowTasks<Narrow>(*(const Narrow*)step.call));
        case Kind::NORM: return f(RowTasks<Norm>(*(const Norm*)step.call));
        case Kind::ROTATE: return f(RowTasks<Rotate>(*(const Rotate*)step.call));
        case Kind::GATE: return f(RowTasks<Gate>(*(const Gate*)step.call));
        case Kind::APPEND: return f(PartTasks<2048>{step.call, flex_append_block, flex_append_blocks(step.call)});
        case Kind::ATTEND: return f(PartTasks<8192>{step.call, flex_decode_block, flex_decode_blocks(step.call)});
        case Kind::MERGE: return f(PartTasks<64>{step.call, flex_decode_merge, flex_decode_merges(step.call)});
        case Kind::PROMPTS: return f(PartTasks<8192>{step.call, flex_batch_block, flex_batch_blocks(step.call)});
        case Kind::ADD: return f(RowTasks<Add>(*(const Add*)step.call));
    }
}

constexpr int64_t ALONE = 1 << 15;  // elements; for at most this many, one thread is faster than several
constexpr int64_t STEPS = 32;       // most steps of a parallel region
constexpr int SPINS = 1 << 12;      // looks at another thread's progress, until this thread yields its processor

// Nanoseconds of all steps so far, by kind. Steps beside each other count as the first of them. The first step of a call
// includes the start of its threads.
std::atomic<int64_t> spent[KINDS];

inline int64_t now() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Progress of a step: tasks that threads have taken, tasks that are done, and the time at which the last one was.
struct Progress {
    Shares taken;
    Counter done;
    int64_t ended = 0;
};

// Adds the nanoseconds of steps that began at `since`. ended(s): when step s ended; 0 for a step without tasks.
template <class F> void spend(const Step* steps, int64_t count, int64_t since, F ended) {
    for (int64_t s = 0, first = 0; s < count; s++) {
        if (!steps[s].beside) first = s;
        if (ended(s) <= since) continue;
        spent[steps[first].kind].fetch_add(ended(s) - since, std::memory_order_relaxed);
        since = ended(s);
    }
}

inline void wait_for(const Progress& progress, int64_t count) {
    for (int i = 0; progress.done.value.load(std::memory_order_acquire) < count; i++) {
#if defined(__x86_64__)
        if (i < SPINS) { __builtin_ia32_pause(); continue; }
#endif
        sched_yield();
    }
}

void run_alone(const Step* steps, int64_t count) {
    const int64_t since = now();
    int64_t ended[STEPS];
    for (int64_t s = 0; s < count; s++) {
        with_tasks(steps[s], [](const auto& tasks) { for (int64_t i = 0; i < tasks.count; i++) tasks.run(i); });
        ended[s] = now();
    }
    spend(steps, count, since, [&](int64_t s) { return ended[s]; });
}

void run_together(const Step* steps, int64_t count, int32_t threads) {
    Progress progress[STEPS];
    const int64_t since = now();
#pragma omp parallel num_threads(threads)
    {
        const int64_t thread = omp_get_thread_num();
        int64_t counts[STEPS], finished = 0;  // finished: steps that were waited for
        for (int64_t s = 0; s < count; s++) {
            for (; !steps[s].beside && finished < s; finished++) wait_for(progress[finished], counts[finished]);
            with_tasks(steps[s], [&](const auto& tasks) {
                counts[s] = tasks.count;
                progress[s].taken.take(tasks.count, threads, thread, [&](int64_t i) {
                    tasks.run(i);
                    // The last task's thread notes the time: no other writes it, and it is read when all threads ended.
                    if (progress[s].done.value.fetch_add(1, std::memory_order_release) + 1 == tasks.count)
                        progress[s].ended = now();
                });
            });
        }
    }
    spend(steps, count, since, [&](int64_t s) { return progress[s].ended; });
}

// Runs at most STEPS steps.
void run_part(const Step* steps, int64_t count, int32_t threads) {
    bool small = true;
    for (int64_t s = 0; s < count; s++) {
        if (Kind(steps[s].kind) == Kind::ATTEND) flex_decode_plan(steps[s].call);
        if (Kind(steps[s].kind) == Kind::PROMPTS) flex_batch_plan(steps[s].call);
    }
    for (int64_t s = 0; s < count; s++)
        with_tasks(steps[s], [&](const auto& tasks) { small &= tasks.numbers() <= ALONE; });
    if (small || threads == 1) return run_alone(steps, count);
    run_together(steps, count, threads);
}

}  // namespace

extern "C" {

// Writes the nanoseconds of all steps so far, by kind.
void flex_spent(int64_t* to) {
    for (int kind = 0; kind < KINDS; kind++) to[kind] = spent[kind].load(std::memory_order_relaxed);
}

// Runs steps in order. Steps beside each other stay in one region, if they are fewer than STEPS.
void flex_run(const Step* steps, int64_t count, int32_t threads) {
    while (count > 0) {
        int64_t part = std::min(count, STEPS);
        while (part < count && part > 1 && steps[part].beside) part--;
        run_part(steps, part, threads);
        steps += part, count -= part;
    }
}

}  // extern "C"
