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

// Converts with stores that bypass the cache: the target is not read first, and compute threads keep their cache lines.
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
