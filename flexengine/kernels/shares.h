// Distribution of tasks among threads.
#pragma once
#include <atomic>

#include "tile.h"

namespace {

struct alignas(64) Counter { std::atomic<int64_t> value{0}; };

// Tasks are divided into shares of neighbours, one per thread, but at most MOST. A thread begins with its share, and then
// takes what is left of the others. If threads took neighbouring tasks, which write neighbouring columns, the CPU would
// move cache lines that it prefetches for one thread out of the other's cache: with two threads, products by int8 took
// 1.5 times as long.
struct Shares {
    static constexpr int64_t MOST = 16;
    Counter taken[MOST];

    // Calls f with tasks until all are taken.
    template <class F> INLINE void take(int64_t count, int64_t threads, int64_t thread, F f) {
        const int64_t shares = threads < MOST ? threads : MOST;
        for (int64_t k = 0; k < shares; k++) {
            const int64_t share = (thread + k) % shares, begin = share * count / shares, end = (share + 1) * count / shares;
            for (int64_t i; (i = begin + taken[share].value.fetch_add(1, std::memory_order_relaxed)) < end;) f(i);
        }
    }
};

}  // namespace
