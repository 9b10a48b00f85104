// Conversion between floating-point types.
#pragma once
#include "simd.h"

namespace {

template <class From, class To> inline void convert_row(const From* from, To* to, int64_t n) {
    int64_t d = 0;
    for (; d + W <= n; d += W) vstore(to + d, vload(from + d));
    for (; d < n; d++) to[d] = narrow<To>(widen(from[d]));
}
template <> inline void convert_row<float, float>(const float* from, float* to, int64_t n) {
    memcpy(to, from, size_t(n) * 4);
}
template <> inline void convert_row<bf16, bf16>(const bf16* from, bf16* to, int64_t n) {
    memcpy(to, from, size_t(n) * 2);
}
template <> inline void convert_row<fp16, fp16>(const fp16* from, fp16* to, int64_t n) {
    memcpy(to, from, size_t(n) * 2);
}

// Stores that bypass the cache: the target is not read first, and the compute threads keep their cache lines.
template <class From, class To> void convert_streaming(const From* from, To* to, int64_t n) {
    int64_t d = 0;
    for (; d < n && uintptr_t(to + d) % 64; d++) to[d] = narrow<To>(widen(from[d]));
    for (; d + W <= n; d += W) vstream(to + d, vload(from + d));
    for (; d < n; d++) to[d] = narrow<To>(widen(from[d]));
#if defined(FLEX_AVX512) || defined(FLEX_AVX2)
    _mm_sfence();
#endif
}

}  // namespace

extern "C" {

// stream: targets of at least this many bytes bypass the cache.
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
