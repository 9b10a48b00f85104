// Writes to a paged KV cache, and conversion between float types.
#include "cache.h"
#include "convert.h"

FLEX_SIZE(append, Append)

extern "C" {

// Converts n numbers. stream: stores to targets of this many bytes or more bypass the CPU's cache.
void flex_convert(const void* source, void* target, int64_t n, int32_t from_dtype, int32_t to_dtype, int64_t stream,
                  int32_t threads) {
    if (n == 0) return;
    const int64_t step = ((n + threads - 1) / threads + 63) / 64 * 64;
    with_dtypes(from_dtype, to_dtype, [&](auto from, auto to) {
        typedef decltype(from) From;
        typedef decltype(to) To;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t at = 0; at < n; at += step) {
            const int64_t count = n - at < step ? n - at : step;
            if (from_dtype != to_dtype && n * int64_t(sizeof(To)) >= stream)
                convert_streaming((const From*)source + at, (To*)target + at, count);
            else
                convert_row((const From*)source + at, (To*)target + at, count);
        }
    });
}

}  // extern "C"
