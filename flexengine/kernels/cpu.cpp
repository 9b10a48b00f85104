// Attention over a paged KV cache, products with narrow weights and dtype conversion for CPUs: a plain C interface;
// base.py says what it means.
//
// Index legend: i sequence, h query head, j key/value head, g query head inside the group of one j, s token of the
// cache, d element of a head, c vector column (d = c * W). Pool: [page, 2 (K, V), j, offset, d], contiguous.
//
// Everything below "kernels" is written once against a few vector wrappers (`vf` is W floats), which exist for AVX-512,
// AVX2 and, with the compiler's own vector type, for anything else. -DFLEX_PORTABLE chooses the last.
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if !defined(FLEX_PORTABLE) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define FLEX_AVX512 1
#elif !defined(FLEX_PORTABLE) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FLEX_AVX2 1
#endif
#if defined(FLEX_AVX512) || defined(FLEX_AVX2)
#include <immintrin.h>
#endif

namespace {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };
enum Dtype : int32_t { FP32 = 0, BF16 = 1, FP16 = 2 };

// ---------------------------------------------------------------- one number

inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return float_of(uint32_t(x.bits) << 16); }
inline float widen(fp16 x) {
    uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff, quiet = rest > 0x7c00 ? 0x400000 : 0;
    if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | ((rest & 0x3ff) << 13) | quiet);
    return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));  // moves the exponent bias, subnormals included
}

template <class T> inline T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline bf16 narrow<bf16>(float x) {
    uint32_t u = bits_of(x);
    if ((u & 0x7fffffff) > 0x7f800000) return {uint16_t((u >> 16) | 0x40)};
    return {uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
template <> inline fp16 narrow<fp16>(float x) {
    uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return {uint16_t(sign | 0x7e00 | ((rest >> 13) & 0x3ff))};
    if (rest >= 0x477ff000) return {uint16_t(sign | 0x7c00)};              // rounds to infinity
    if (rest < 0x38800000) {                                               // subnormal: adding 0.5 rounds at bit 2^-24
        return {uint16_t(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000))};
    }
    rest += 0xfff + ((rest >> 13) & 1);
    return {uint16_t(sign | ((rest - 0x38000000) >> 13))};
}

// ---------------------------------------------------------------- W numbers

#if defined(FLEX_AVX512)
constexpr int W = 16, HEADS = 4;  // HEADS: query heads that share a loaded K/V vector; bounded by the registers
typedef __m512 vf;
inline vf vset(float x) { return _mm512_set1_ps(x); }
inline vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline vf vshift23(vf a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23)); }
inline vf vand(vf a, uint32_t m) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(int(m))));
}
inline vf vor(vf a, vf b) {
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
inline vf vbelow(vf a, vf b, vf yes, vf no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
inline float vsum(vf a) { return _mm512_reduce_add_ps(a); }
inline float vtop(vf a) { return _mm512_reduce_max_ps(a); }
inline vf vload(const float* p) { return _mm512_loadu_ps(p); }
inline vf vload(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline vf vload(const fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline __m256i vnarrow(vf a, bf16) {
    __m512i u = _mm512_castps_si512(a), top = _mm512_srli_epi32(u, 16);
    __m512i bias = _mm512_add_epi32(_mm512_and_si512(top, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
    __m512i near = _mm512_srli_epi32(_mm512_add_epi32(u, bias), 16);
    near = _mm512_mask_or_epi32(near, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), top, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(near);
}
inline __m256i vnarrow(vf a, fp16) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void vstore(float* p, vf a) { _mm512_storeu_ps(p, a); }
template <class T> inline void vstore(T* p, vf a) { _mm256_storeu_si256((__m256i*)p, vnarrow(a, T())); }
inline void vstream(float* p, vf a) { _mm512_stream_ps(p, a); }
template <class T> inline void vstream(T* p, vf a) { _mm256_stream_si256((__m256i*)p, vnarrow(a, T())); }
inline __m256 vfold(vf a) {
    return _mm256_add_ps(_mm512_castps512_ps256(a), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)));
}
#elif defined(FLEX_AVX2)
constexpr int W = 8, HEADS = 2;
typedef __m256 vf;
inline vf vset(float x) { return _mm256_set1_ps(x); }
inline vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf vshift23(vf a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23)); }
inline vf vand(vf a, uint32_t m) { return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(int(m)))); }
inline vf vor(vf a, vf b) { return _mm256_or_ps(a, b); }
inline vf vbelow(vf a, vf b, vf yes, vf no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline float vsum(vf a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline float vtop(vf a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline vf vload(const float* p) { return _mm256_loadu_ps(p); }
inline vf vload(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline vf vload(const fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline __m128i vnarrow(vf a, bf16) {
    __m256i u = _mm256_castps_si256(a), top = _mm256_srli_epi32(u, 16);
    __m256i bias = _mm256_add_epi32(_mm256_and_si256(top, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
    __m256i near = _mm256_srli_epi32(_mm256_add_epi32(u, bias), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    near = _mm256_blendv_epi8(near, _mm256_or_si256(top, _mm256_set1_epi32(0x40)), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(near), _mm256_extracti128_si256(near, 1));
}
inline __m128i vnarrow(vf a, fp16) { return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void vstore(float* p, vf a) { _mm256_storeu_ps(p, a); }
template <class T> inline void vstore(T* p, vf a) { _mm_storeu_si128((__m128i*)p, vnarrow(a, T())); }
inline void vstream(float* p, vf a) { _mm256_stream_ps(p, a); }
template <class T> inline void vstream(T* p, vf a) { _mm_stream_si128((__m128i*)p, vnarrow(a, T())); }
inline __m256 vfold(vf a) { return a; }
#else
constexpr int W = 4, HEADS = 2;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
inline vf vset(float x) { return vf{x, x, x, x}; }
inline vf vadd(vf a, vf b) { return a + b; }
inline vf vsub(vf a, vf b) { return a - b; }
inline vf vmul(vf a, vf b) { return a * b; }
inline vf vdiv(vf a, vf b) { return a / b; }
inline vf vfma(vf a, vf b, vf c) { return a * b + c; }
inline vf vpick(vi m, vf yes, vf no) { return (vf)(((vi)yes & m) | ((vi)no & ~m)); }
inline vf vmax(vf a, vf b) { return vpick((vi)(a > b), a, b); }
inline vf vshift23(vf a) { return (vf)((vi)a << 23); }
inline vf vand(vf a, uint32_t m) { int32_t x = int32_t(m); return (vf)((vi)a & vi{x, x, x, x}); }
inline vf vor(vf a, vf b) { return (vf)((vi)a | (vi)b); }
inline vf vbelow(vf a, vf b, vf yes, vf no) { return vpick((vi)(a < b), yes, no); }
inline float vsum(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline float vtop(vf a) { return fmaxf(fmaxf(a[0], a[2]), fmaxf(a[1], a[3])); }
template <class T> inline vf vload(const T* p) { return vf{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
template <class T> inline void vstore(T* p, vf a) { for (int e = 0; e < W; e++) p[e] = narrow<T>(a[e]); }
template <class T> inline void vstream(T* p, vf a) { vstore(p, a); }
#endif

// Four horizontal sums at once, to p[0..3].
inline void vsum4(float* p, const vf* a) {
#if defined(FLEX_AVX512) || defined(FLEX_AVX2)
    __m256 ab = _mm256_hadd_ps(vfold(a[0]), vfold(a[1])), cd = _mm256_hadd_ps(vfold(a[2]), vfold(a[3]));
    __m256 all = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
    for (int e = 0; e < 4; e++) p[e] = vsum(a[e]);
#endif
}

// The first n < W numbers; the rest are zero.
template <class T> inline vf vload_part(const T* p, int n) {
    float x[W] = {};
    for (int e = 0; e < n; e++) x[e] = widen(p[e]);
    return vload(x);
}
#if defined(FLEX_AVX512)
inline vf vload_part(const float* p, int n) { return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p); }
inline vf vload_part(const bf16* p, int n) {
    __m256i x = _mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
#endif

// exp(x) for x <= 0, relative error below 1.2e-7 (Cephes' expf polynomial); below -87.3 it stays at 1.2e-38. NaN stays.
inline vf vexp(vf x) {
    x = vmax(vset(-87.3f), x);
    const vf magic = vset(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number, kept in the low mantissa bits
    vf shifted = vfma(x, vset(1.44269504f), magic), n = vsub(shifted, magic);
    vf r = vfma(n, vset(-0.693359375f), x);
    r = vfma(n, vset(2.12194440e-4f), r);
    vf y = vfma(vset(1.9875691500e-4f), r, vset(1.3981999507e-3f));
    y = vfma(y, r, vset(8.3334519073e-3f));
    y = vfma(y, r, vset(4.1665795894e-2f));
    y = vfma(y, r, vset(1.6666665459e-1f));
    y = vfma(y, r, vset(5.0000001201e-1f));
    y = vadd(vfma(vmul(y, r), r, r), vset(1.f));
    return vmul(y, vshift23(vadd(n, vset(12582912.f + 127.f))));
}

inline vf vtanh(vf x) {
    vf a = vand(x, 0x7fffffff), z = vmul(x, x);
    vf e = vexp(vmul(a, vset(-2.f)));
    vf far = vor(vdiv(vsub(vset(1.f), e), vadd(vset(1.f), e)), vand(x, 0x80000000));
    vf y = vfma(vset(-5.70498872745e-3f), z, vset(2.06390887954e-2f));
    y = vfma(y, z, vset(-5.37397155531e-2f));
    y = vfma(y, z, vset(1.33314422036e-1f));
    y = vfma(y, z, vset(-3.33332819422e-1f));
    vf close = vfma(vmul(y, z), x, x);  // without it small scores would lose digits to 1 - e
    return vbelow(a, vset(0.625f), close, far);
}

// ---------------------------------------------------------------- kernels: decode

constexpr int TILE = 4;      // tokens scored together
constexpr int CHUNK = 64;    // most tokens between two updates of the running softmax
constexpr int PART = 1024;   // tokens of one work item; fixed, so results depend neither on threads nor on the batch

// Tokens of one chunk. Its K and V rows, 16 KB each at head size 128, fit the first-level cache: while K is scored V is
// prefetched, while V is weighed the next chunk's K. Without the prefetches bf16 runs at half the speed.
template <class T> constexpr int chunk = CHUNK * 2 / int(sizeof(T));

struct Decode {
    const void* q;
    void* out;
    const void* pool;
    const int32_t *tables, *lengths;
    const float* sinks;
    int64_t n, heads, kv_heads, dim, pages, page_tokens, max_pages, q_row, q_head;
    int64_t window;              // 0: none
    float scale, softcap;        // softcap 0: none
    int32_t q_dtype, pool_dtype, threads;
};

// slot: of the sequence's first partial result; -1 when it has one part only.
struct Item { int32_t i, part, parts, slot; };

inline int64_t first_token(const Decode& a, int64_t i) {
    int64_t length = a.lengths[i];
    return a.window > 0 && length > a.window ? length - a.window : 0;
}

template <class T> inline void prefetch(const T* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + d, 0, 3);
}

// scores[g][0..3] = q[g] . rows[0..3] for H query heads. NV > 0: dim == NV * W, known when compiling.
template <class T, int NV, int H>
inline void score_tile(const float* q, int64_t width, const T* const* rows, int64_t dim, float* scores) {
    vf sum[H][TILE];
    for (int g = 0; g < H; g++) for (int t = 0; t < TILE; t++) sum[g][t] = vset(0.f);
    const int64_t whole = NV > 0 ? NV : dim / W;
    auto add = [&](int64_t c, const vf* k) {
        for (int g = 0; g < H; g++) {
            vf x = vload(q + g * width + c * W);
            for (int t = 0; t < TILE; t++) sum[g][t] = vfma(x, k[t], sum[g][t]);
        }
    };
    vf k[TILE];
    for (int64_t c = 0; c < whole; c++) {
        for (int t = 0; t < TILE; t++) k[t] = vload(rows[t] + c * W);
        add(c, k);
    }
    if (NV == 0 && dim % W) {
        for (int t = 0; t < TILE; t++) k[t] = vload_part(rows[t] + whole * W, int(dim % W));
        add(whole, k);
    }
    for (int g = 0; g < H; g++) vsum4(scores + g * CHUNK, sum[g]);
}

template <class T, int NV>
inline void score_heads(int64_t group, const float* q, int64_t width, const T* const* rows, int64_t dim,
                        float* scores) {
    int64_t g = 0;
    for (; g + HEADS <= group; g += HEADS)
        score_tile<T, NV, HEADS>(q + g * width, width, rows, dim, scores + g * CHUNK);
    q += g * width, scores += g * CHUNK;
    if (group - g == 1) score_tile<T, NV, 1>(q, width, rows, dim, scores);
    if (HEADS > 2 && group - g == 2) score_tile<T, NV, 2>(q, width, rows, dim, scores);
    if (HEADS > 3 && group - g == 3) score_tile<T, NV, 3>(q, width, rows, dim, scores);
}

// acc[g][C columns] = acc * keep[g] + sum over s of p[g][s] * (V of token s), for H query heads.
// shift: elements from a K row to the V columns wanted; ahead: elements to prefetch of each K row one chunk on, or 0;
// tail: how much of a last, partial column there is.
template <class T, int H, int C>
inline void weigh_columns(const float* p, const float* keep, const T* const* rows, int64_t shift, int n, float* acc,
                          int64_t width, int64_t ahead, int tail) {
    vf sum[H][C];
    for (int g = 0; g < H; g++)
        for (int c = 0; c < C; c++) sum[g][c] = vmul(vload(acc + g * width + c * W), vset(keep[g]));
    for (int s = 0; s < n; s++) {
        const T* row = rows[s] + shift;
        vf x[C];
        for (int c = 0; c < C; c++) x[c] = C == 1 && tail ? vload_part(row, tail) : vload(row + c * W);
        if (ahead) prefetch(rows[s + chunk<T>], ahead);
        for (int g = 0; g < H; g++) {
            vf weight = vset(p[g * CHUNK + s]);
            for (int c = 0; c < C; c++) sum[g][c] = vfma(weight, x[c], sum[g][c]);
        }
    }
    for (int g = 0; g < H; g++) for (int c = 0; c < C; c++) vstore(acc + g * width + c * W, sum[g][c]);
}

template <class T, int H>
inline void weigh(const float* p, const float* keep, const T* const* rows, int64_t value, int n, float* acc,
                  int64_t width, int64_t dim, bool first) {
    constexpr int C = H <= HEADS / 2 ? 8 : 4;
    int64_t d = 0, ahead = first ? dim : 0;
    for (; d + C * W <= dim; d += C * W, ahead = 0)
        weigh_columns<T, H, C>(p, keep, rows, value + d, n, acc + d, width, ahead, 0);
    if (C > 4 && d + 4 * W <= dim) {
        weigh_columns<T, H, 4>(p, keep, rows, value + d, n, acc + d, width, ahead, 0);
        d += 4 * W, ahead = 0;
    }
    for (; d < dim; d += W, ahead = 0)
        weigh_columns<T, H, 1>(p, keep, rows, value + d, n, acc + d, width, ahead, dim - d < W ? int(dim - d) : 0);
}

// Scores of one head in place to exp(score - top); updates the running maximum and sum; returns the factor for what was
// summed before.
inline float soften(float* scores, int n, float softcap, float& top, float& sum) {
    int whole = (n + W - 1) / W * W;
    for (int s = 0; softcap > 0 && s < whole; s += W)
        vstore(scores + s, vmul(vtanh(vmul(vload(scores + s), vset(1 / softcap))), vset(softcap)));
    for (int s = n; s < whole; s++) scores[s] = -FLT_MAX;
    vf most = vset(top);
    for (int s = 0; s < whole; s += W) most = vmax(vload(scores + s), most);
    float above = vtop(most), keep = above > top ? expf(top - above) : 1.f;
    vf total = vset(0.f);
    for (int s = 0; s < whole; s += W) {
        vf e = vexp(vsub(vload(scores + s), vset(above)));
        vstore(scores + s, e);
        total = vadd(total, e);
    }
    top = above, sum = sum * keep + vsum(total);
    return keep;
}

struct Scratch {  // of one thread
    float *q, *acc, *scores, *top, *sum, *keep;
    const void** rows;
    void* memory;
    Scratch(int64_t group, int64_t width) {
        int64_t floats = group * (2 * width + CHUNK) + 3 * ((group + W) / W * W);
        memory = nullptr;
        if (posix_memalign(&memory, 64, size_t(floats) * 4 + (PART + CHUNK + TILE) * sizeof(void*))) abort();
        rows = (const void**)memory;
        q = (float*)(rows + PART + CHUNK + TILE), acc = q + group * width, scores = acc + group * width;
        top = scores + group * CHUNK, sum = top + (group + W) / W * W, keep = sum + (group + W) / W * W;
    }
    ~Scratch() { free(memory); }
};

template <class Q> void read_query(const Decode& a, int64_t i, int64_t j, int64_t width, float* to) {
    int64_t group = a.heads / a.kv_heads;
    for (int64_t g = 0; g < group; g++) {
        const Q* from = (const Q*)a.q + i * a.q_row + (j * group + g) * a.q_head;
        for (int64_t d = 0; d < a.dim; d++) to[g * width + d] = widen(from[d]) * a.scale;
        for (int64_t d = a.dim; d < width; d++) to[g * width + d] = 0.f;
    }
}

// Leaves sum over s of exp(score - top) * V in acc, and top and sum, for the query heads of kv head j over one part of
// sequence i.
template <class T, int NV> void attend_part(const Decode& a, const Item& item, int64_t j, int64_t width, Scratch& my) {
    const int64_t group = a.heads / a.kv_heads, P = a.page_tokens, dim = NV > 0 ? NV * W : a.dim;
    const int64_t begin = first_token(a, item.i) + int64_t(item.part) * PART;
    const int64_t left = a.lengths[item.i] - begin, count = left < PART ? left : PART;
    const int64_t value = a.kv_heads * P * dim;  // from a token's K to its V
    const T** rows = (const T**)my.rows;
    const int32_t* table = a.tables + item.i * a.max_pages;
    for (int64_t s = 0, t = begin; s < count;) {
        const T* row = (const T*)a.pool + (int64_t(table[t / P]) * 2 * a.kv_heads + j) * P * dim;
        for (int64_t o = t % P; o < P && s < count; o++, s++, t++) rows[s] = row + o * dim;
    }
    for (int64_t s = count; s < count + CHUNK + TILE; s++) rows[s] = rows[count - 1];
    if (a.q_dtype == FP32) read_query<float>(a, item.i, j, width, my.q);
    if (a.q_dtype == BF16) read_query<bf16>(a, item.i, j, width, my.q);
    if (a.q_dtype == FP16) read_query<fp16>(a, item.i, j, width, my.q);
    memset(my.acc, 0, size_t(group * width) * 4);
    for (int64_t g = 0; g < group; g++) my.top[g] = -FLT_MAX, my.sum[g] = 0;
    for (int64_t s = 0; s < count; s += chunk<T>, rows += chunk<T>) {
        const int n = int(count - s < chunk<T> ? count - s : chunk<T>);
        for (int t = 0; t < n; t += TILE) {
            for (int u = 0; u < TILE; u++) prefetch(rows[t + u] + value, dim);
            score_heads<T, NV>(group, my.q, width, rows + t, dim, my.scores + t);
        }
        for (int64_t g = 0; g < group; g++)
            my.keep[g] = soften(my.scores + g * CHUNK, n, a.softcap, my.top[g], my.sum[g]);
        int64_t g = 0;
        for (; g + HEADS <= group; g += HEADS)
            weigh<T, HEADS>(my.scores + g * CHUNK, my.keep + g, rows, value, n, my.acc + g * width, width, dim, !g);
        const float *p = my.scores + g * CHUNK, *keep = my.keep + g;
        float* acc = my.acc + g * width;
        if (group - g == 1) weigh<T, 1>(p, keep, rows, value, n, acc, width, dim, g == 0);
        if (HEADS > 2 && group - g == 2) weigh<T, 2>(p, keep, rows, value, n, acc, width, dim, g == 0);
        if (HEADS > 3 && group - g == 3) weigh<T, 3>(p, keep, rows, value, n, acc, width, dim, g == 0);
    }
}

template <class T> void attend_part_of(const Decode& a, const Item& item, int64_t j, int64_t width, Scratch& my) {
    if (a.dim == 64) return attend_part<T, 64 / W>(a, item, j, width, my);
    if (a.dim == 128) return attend_part<T, 128 / W>(a, item, j, width, my);
    return attend_part<T, 0>(a, item, j, width, my);
}

// One head's output from `parts` partial results, `step` floats apart; the sink joins the denominator only.
template <class Q>
void finish(const Decode& a, int64_t i, int64_t h, int parts, const float* acc, const float* top, const float* sum,
            int64_t step) {
    float most = a.sinks ? a.sinks[h] : -FLT_MAX;
    for (int p = 0; p < parts; p++) if (!(top[p * step] <= most)) most = top[p * step];
    float total = a.sinks ? expf(a.sinks[h] - most) : 0.f;
    for (int p = 0; p < parts; p++) total += sum[p * step] * expf(top[p * step] - most);
    Q* to = (Q*)a.out + (i * a.heads + h) * a.dim;
    for (int64_t d = 0; d < a.dim; d++) {
        float x = 0;
        if (parts == 1) x = acc[d] * expf(top[0] - most);
        else for (int p = 0; p < parts; p++) x += acc[p * step + d] * expf(top[p * step] - most);
        to[d] = narrow<Q>(x / total);
    }
}

void finish_head(const Decode& a, int64_t i, int64_t h, int parts, const float* acc, const float* top,
                 const float* sum, int64_t step) {
    if (a.q_dtype == FP32) finish<float>(a, i, h, parts, acc, top, sum, step);
    if (a.q_dtype == BF16) finish<bf16>(a, i, h, parts, acc, top, sum, step);
    if (a.q_dtype == FP16) finish<fp16>(a, i, h, parts, acc, top, sum, step);
}

int64_t size_of(int32_t dtype) { return dtype == FP32 ? 4 : 2; }

// ---------------------------------------------------------------- kernels: append, convert

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

// ---------------------------------------------------------------- kernels: matrix product with narrow weights

// out = x w^T as a sum of outer products: a register holds one row of out at W columns (rows of w), and the products of
// one k after the other are added to it; no sum crosses lanes. SPAN columns of w are summed from zero, then added to
// out. So an output's sum takes the same steps in the same order whatever M, N and the threads are, and in both ways
// there are: up to FEW rows of x read w once, transposed and widened in registers; more rows share a tile of SPAN
// columns, transposed and widened once into L1 or L2, of which ROWS x VECS registers of sums are computed at once.
//
// GFLOP/s of one Zen 5 core, weights of 2048 x 8192, at 1, 8, 32, 128 and 512 rows: 29, 140, 150, 205, 218; oneDNN on
// weights widened before: 15, 62, 136, 197, 213. Dot products, with W-lane partial sums in 5 x 5 registers, came to 23,
// 77, 140, 169, 177; they move W times as many sums.
#define UNROLL _Pragma("GCC unroll 32")  // without these two GCC keeps arrays of registers in memory
#define INLINE inline __attribute__((always_inline))

// W rows of w at 2 W columns take W registers: first one per row, then, `transpose`d as 32-bit units, one per pair of
// columns with a row in each lane. `even` and `odd` widen the two columns of a pair. `lo32` to `hi64` mix two registers
// as the x86 instructions unpack do, within each 128 bits.
#if defined(FLEX_AVX512)
constexpr int ROWS = 6, VECS = 4;
typedef __m512i vp;
inline vp vload_pairs(const void* p, int n) {
    if (n == 2 * W) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi16((__mmask32(1) << n) - 1, p);
}
inline vp lo32(vp a, vp b) { return _mm512_unpacklo_epi32(a, b); }
inline vp hi32(vp a, vp b) { return _mm512_unpackhi_epi32(a, b); }
inline vp lo64(vp a, vp b) { return _mm512_unpacklo_epi64(a, b); }
inline vp hi64(vp a, vp b) { return _mm512_unpackhi_epi64(a, b); }
inline vf even(vp a, bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
inline vf odd(vp a, bf16) { return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(int(0xffff0000)))); }
inline vf even(vp a, fp16) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }
inline vf odd(vp a, fp16) { return even(_mm512_srli_epi32(a, 16), fp16()); }
INLINE void spread(const vp* b, vp* a) {
    UNROLL for (int j = 0; j < 4; j++) {
        vp p = _mm512_shuffle_i32x4(b[j], b[j + 4], 0x88), q = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0x88);
        vp r = _mm512_shuffle_i32x4(b[j], b[j + 4], 0xdd), s = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0xdd);
        a[j] = _mm512_shuffle_i32x4(p, q, 0x88), a[j + 8] = _mm512_shuffle_i32x4(p, q, 0xdd);
        a[j + 4] = _mm512_shuffle_i32x4(r, s, 0x88), a[j + 12] = _mm512_shuffle_i32x4(r, s, 0xdd);
    }
}
#elif defined(FLEX_AVX2)
constexpr int ROWS = 6, VECS = 2;
typedef __m256i vp;
inline vp vload_pairs(const void* p, int n) {
    uint16_t part[2 * W] = {};
    if (n < 2 * W) p = memcpy(part, p, size_t(n) * 2);
    return _mm256_loadu_si256((const __m256i*)p);
}
inline vp lo32(vp a, vp b) { return _mm256_unpacklo_epi32(a, b); }
inline vp hi32(vp a, vp b) { return _mm256_unpackhi_epi32(a, b); }
inline vp lo64(vp a, vp b) { return _mm256_unpacklo_epi64(a, b); }
inline vp hi64(vp a, vp b) { return _mm256_unpackhi_epi64(a, b); }
inline vf even(vp a, bf16) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
inline vf odd(vp a, bf16) { return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(int(0xffff0000)))); }
inline vf odd(vp a, fp16) {
    vp top = _mm256_srli_epi32(a, 16);
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1)));
}
inline vf even(vp a, fp16) { return odd(_mm256_slli_epi32(a, 16), fp16()); }
INLINE void spread(const vp* b, vp* a) {
    UNROLL for (int j = 0; j < 4; j++) {
        a[j] = _mm256_permute2x128_si256(b[j], b[j + 4], 0x20);
        a[j + 4] = _mm256_permute2x128_si256(b[j], b[j + 4], 0x31);
    }
}
#else
constexpr int ROWS = 4, VECS = 2;
typedef uint32_t vp __attribute__((vector_size(16)));
inline vp vload_pairs(const void* p, int n) {
    vp a = {};
    if (n == 2 * W) memcpy(&a, p, sizeof a);  // one load; a size unknown to the compiler is a call
    else memcpy(&a, p, size_t(n) * 2);
    return a;
}
#if defined(__clang__)
#define MIX(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(...) __builtin_shuffle(a, b, vp{__VA_ARGS__})
#endif
inline vp lo32(vp a, vp b) { return MIX(0, 4, 1, 5); }
inline vp hi32(vp a, vp b) { return MIX(2, 6, 3, 7); }
inline vp lo64(vp a, vp b) { return MIX(0, 1, 4, 5); }
inline vp hi64(vp a, vp b) { return MIX(2, 3, 6, 7); }
inline vf even(vp a, bf16) { return (vf)(a << 16); }
inline vf odd(vp a, bf16) { return (vf)(a & 0xffff0000); }
inline vf odd(vp a, fp16) {  // as `widen` does
    vp rest = (a & 0x7fff0000) >> 3;
    vf number = (vf)rest * 0x1p112f, special = (vf)(rest | 0x7f800000);  // infinities and NaN
    return vor(vpick((vi)(rest >= 0x7c00u << 13), special, number), (vf)(a & 0x80000000));
}
inline vf even(vp a, fp16) { return odd(a << 16, fp16()); }
INLINE void spread(const vp* b, vp* a) { memcpy(a, b, sizeof(vp) * W); }
#endif
INLINE void transpose(vp* a) {
    vp b[W];
    UNROLL for (int i = 0; i < W; i += 4) {  // b[i + j]: rows i to i + 3 at pairs j, j + 4, ...
        vp p = lo32(a[i], a[i + 1]), q = lo32(a[i + 2], a[i + 3]);
        vp r = hi32(a[i], a[i + 1]), s = hi32(a[i + 2], a[i + 3]);
        b[i] = lo64(p, q), b[i + 1] = hi64(p, q), b[i + 2] = lo64(r, s), b[i + 3] = hi64(r, s);
    }
    spread(b, a);
}
constexpr int FEW = 8, SPAN = 512;
constexpr int GROUP = 512;  // rows of x that pass every tile before the next do: they are to stay in L3

struct Linear {
    const float *x; const void* w; const float* bias; float* out;
    int64_t rows, n, k, x_row, out_row;
    int32_t w_dtype, threads;
};

// Adds one span's sums, [M, N * W], to out at row m and column c; the first span's to the bias.
template <int M, int N> inline void add(const Linear& a, const vf (&sum)[M][N], int64_t m, int64_t c, bool first) {
    alignas(64) float sums[M * N * W];
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int n = 0; n < N; n++) vstore(sums + (i * N + n) * W, sum[i][n]);
    for (int i = 0; i < M * N; i++) {
        const int64_t at = c + i % N * W, count = a.n - at;
        if (count <= 0) continue;
        float *to = a.out + (m + i / N) * a.out_row + at, part[W];
        const float* from = !first ? to : a.bias ? a.bias + at : nullptr;
        vf total = vload(sums + i * W);
        if (from) total = vadd(count < W ? vload_part(from, int(count)) : vload(from), total);
        vstore(count < W ? part : to, total);
        if (count < W) memcpy(to, part, size_t(count) * 4);
    }
}

// W rows of w from one on; the last one again where there are fewer.
template <class T> struct Rows {
    const T* w;
    int64_t k, last, next;

    // next: which row is read after the end of row c
    Rows(const Linear& a, int64_t c, int64_t next)
        : w((const T*)a.w + c * a.k), k(a.k), last(a.n - 1 - c), next((next - c - 1) * a.k) {}

    // `count` columns from d on, transposed; meanwhile asks for what is to be read SPAN columns later.
    INLINE void load(int64_t d, int count, vp* block) const {
        uintptr_t ahead = uintptr_t(w) + (d + SPAN < k ? d + SPAN : d + SPAN + next) * sizeof(T);
        UNROLL for (int i = 0; i < W; i++, ahead += k * sizeof(T)) __builtin_prefetch((const void*)ahead, 0, 2);
        const T* row = w + d;
        UNROLL for (int i = 0; i < W; i++, row += i <= last ? k : 0) block[i] = vload_pairs(row, count);
        transpose(block);
    }
};

// Columns d to d + span of W rows of w, widened: tile [span, W], `width` floats from one column to the next. It is
// written up to a multiple of 2 W columns.
template <class T> void widen_rows(const Rows<T>& w, int64_t d, int64_t span, int64_t width, float* tile) {
    for (const int64_t end = d + span; d < end; d += 2 * W) {
        vp block[W];
        w.load(d, end - d < 2 * W ? int(end - d) : 2 * W, block);
        UNROLL for (int j = 0; j < W; j++, tile += 2 * width) {
            vstore(tile, even(block[j], T()));
            vstore(tile + width, odd(block[j], T()));
        }
    }
}

// sum += x [M, span] times tile [span, N * W]
template <int M, int N>
INLINE void multiply(const float* x, int64_t x_row, const float* tile, int64_t span, vf (&sum)[M][N]) {
    for (int64_t d = 0; d < span; d++, tile += N * W) {
        vf u[N];
        UNROLL for (int n = 0; n < N; n++) u[n] = vload(tile + n * W);
        UNROLL for (int i = 0; i < M; i++) {
            const vf v = vset(x[i * x_row + d]);
            UNROLL for (int n = 0; n < N; n++) sum[i][n] = vfma(v, u[n], sum[i][n]);
        }
    }
}

template <int M, int N> INLINE void clear(vf (&sum)[M][N]) {
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int n = 0; n < N; n++) sum[i][n] = vset(0.f);
}

// M rows of out from m on, at N * W columns from c on; w is widened in registers.
template <class T, int M, int N> void multiply_few(const Linear& a, int64_t m, int64_t c) {
    const Rows<T> w(a, c, c + N * W), more(a, c + (N - 1) * W, c + (2 * N - 1) * W);
    for (int64_t low = 0; low < a.k; low += SPAN) {
        const int64_t high = a.k - low < SPAN ? a.k : low + SPAN;
        const float* x = a.x + m * a.x_row + low;
        vf sum[M][N];
        clear(sum);
        int64_t d = low;
        for (; d + 2 * W <= high; d += 2 * W, x += 2 * W) {
            vp block[N][W];
            w.load(d, 2 * W, block[0]);
            if (N > 1) more.load(d, 2 * W, block[N - 1]);
            _Pragma("GCC unroll 4") for (int j = 0; j < W; j++) {  // unrolled further, AVX-512 spills sums
                UNROLL for (int n = 0; n < N; n++) {
                    const vf u = even(block[n][j], T()), v = odd(block[n][j], T());
                    UNROLL for (int i = 0; i < M; i++) {
                        sum[i][n] = vfma(vset(x[i * a.x_row + 2 * j]), u, sum[i][n]);
                        sum[i][n] = vfma(vset(x[i * a.x_row + 2 * j + 1]), v, sum[i][n]);
                    }
                }
            }
        }
        if (d < high) {
            float tail[2 * W * N * W];
            widen_rows(w, d, high - d, N * W, tail);
            if (N > 1) widen_rows(more, d, high - d, N * W, tail + (N - 1) * W);
            multiply(x, a.x_row, tail, high - d, sum);
        }
        add(a, sum, m, c, low == 0);
    }
}

// The same for `rows` <= M rows and the columns c to end.
template <class T, int M> void multiply_columns(const Linear& a, int64_t m, int64_t rows, int64_t c, int64_t end) {
    if constexpr (M > 1)
        if (rows < M) return multiply_columns<T, M - 1>(a, m, rows, c, end);
    constexpr int N = M < 3 ? 2 : 1;  // with fewer sums every addition would wait for the one before it
    for (; c + W < end; c += N * W) multiply_few<T, M, N>(a, m, c);
    for (; c < end; c += W) multiply_few<T, M, 1>(a, m, c);
}

// Adds M rows of x times a tile [span, N * W] to out.
template <int M, int N>
void multiply_tile(const Linear& a, const float* tile, int64_t m, int64_t c, int64_t d, int64_t span) {
    vf sum[M][N];
    clear(sum);
    multiply(a.x + m * a.x_row + d, a.x_row, tile, span, sum);
    add(a, sum, m, c, d == 0);
}

template <int M, int N>
void multiply_rows(const Linear& a, const float* tile, int64_t m, int64_t rows, int64_t c, int64_t d, int64_t span) {
    if constexpr (M > 1)
        if (rows < M) return multiply_rows<M - 1, N>(a, tile, m, rows, c, d, span);
    multiply_tile<M, N>(a, tile, m, c, d, span);
}

// Rows m to end in tiles of nearly equal height.
template <int N>
void multiply_group(const Linear& a, const float* tile, int64_t m, int64_t end, int64_t c, int64_t d, int64_t span) {
    for (int64_t tiles = (end - m + ROWS - 1) / ROWS; tiles; tiles--) {
        const int64_t rows = (end - m + tiles - 1) / tiles;
        multiply_rows<ROWS, N>(a, tile, m, rows, c, d, span);
        m += rows;
    }
}

template <class T> void linear(const Linear& a) {
    const int64_t groups = (a.rows + GROUP - 1) / GROUP, height = (a.rows + groups - 1) / groups;
    int64_t width = VECS * W;  // columns of out per task: fewer where threads would wait
    while (width > W && (a.n + width - 1) / width * groups < 3 * a.threads) width /= 2;
    const int64_t blocks = (a.n + width - 1) / width;
#pragma omp parallel for num_threads(a.threads) schedule(dynamic)
    for (int64_t b = 0; b < blocks * groups; b++) {
        const int64_t c = b % blocks * width, columns = a.n - c < width ? a.n - c : width, vecs = (columns + W - 1) / W;
        const int64_t m = b / blocks * height, end = a.rows - m < height ? a.rows : m + height;
        if (end - m <= FEW) {
            multiply_columns<T, FEW>(a, m, end - m, c, c + columns);
            continue;
        }
        alignas(64) float tile[SPAN * VECS * W];
        for (int64_t d = 0; d < a.k; d += SPAN) {
            const int64_t span = a.k - d < SPAN ? a.k - d : SPAN;
            for (int64_t n = 0; n < vecs * W; n += W)
                widen_rows(Rows<T>(a, c + n, c + n + width * a.threads), d, span, vecs * W, tile + n);
            if (vecs == 1) multiply_group<1>(a, tile, m, end, c, d, span);
            if (vecs == 2) multiply_group<2>(a, tile, m, end, c, d, span);
            if (VECS > 2 && vecs == 3) multiply_group<VECS - 1>(a, tile, m, end, c, d, span);
            if (VECS > 2 && vecs == 4) multiply_group<VECS>(a, tile, m, end, c, d, span);
        }
    }
}

// Calls f(From(), To()) for a pair of dtype codes.
template <class F> inline void with_dtypes(int32_t from, int32_t to, F f) {
    auto second = [&](auto x) {
        if (to == FP32) f(x, float());
        if (to == BF16) f(x, bf16());
        if (to == FP16) f(x, fp16());
    };
    if (from == FP32) second(float());
    if (from == BF16) second(bf16());
    if (from == FP16) second(fp16());
}

}  // namespace

extern "C" {

// What the wrappers above were compiled to: 512, 256 or 0 (portable).
int32_t flex_simd() {
#if defined(FLEX_AVX512)
    return 512;
#elif defined(FLEX_AVX2)
    return 256;
#else
    return 0;
#endif
}

// 0, or i + 1 when sequence i has a length or page that the table or pool does not have; then nothing is computed.
int64_t flex_decode(const Decode* args) {
    const Decode& a = *args;
    int64_t items = 0, slots = 0;
    for (int64_t i = 0; i < a.n; i++) {
        if (a.lengths[i] < 1 || a.lengths[i] > a.max_pages * a.page_tokens) return i + 1;
        for (int64_t t = first_token(a, i) / a.page_tokens; t * a.page_tokens < a.lengths[i]; t++)
            if (uint32_t(a.tables[i * a.max_pages + t]) >= uint64_t(a.pages)) return i + 1;
        int64_t parts = (a.lengths[i] - first_token(a, i) + PART - 1) / PART;
        items += parts, slots += parts > 1 ? parts : 0;
    }
    const int64_t group = a.heads / a.kv_heads, width = (a.dim + W - 1) / W * W, step = group * (width + 2);
    Item* list = (Item*)malloc(size_t(items + 1) * sizeof(Item));
    // partial: [slot, j] of acc [group, width], top [group], sum [group]
    float* partial = (float*)malloc(size_t(slots * a.kv_heads * step + 1) * 4);
    if (!list || !partial) abort();
    items = slots = 0;
    for (int64_t i = 0; i < a.n; i++) {
        int32_t parts = int32_t((a.lengths[i] - first_token(a, i) + PART - 1) / PART);
        for (int32_t p = 0; p < parts; p++) list[items++] = {int32_t(i), p, parts, parts > 1 ? int32_t(slots) : -1};
        slots += parts > 1 ? parts : 0;
    }
#pragma omp parallel num_threads(a.threads)
    {
        Scratch my(group, width);
#pragma omp for schedule(dynamic)
        for (int64_t w = 0; w < items * a.kv_heads; w++) {
            const Item& item = list[w / a.kv_heads];
            const int64_t j = w % a.kv_heads;
            if (a.pool_dtype == FP32) attend_part_of<float>(a, item, j, width, my);
            if (a.pool_dtype == BF16) attend_part_of<bf16>(a, item, j, width, my);
            if (a.pool_dtype == FP16) attend_part_of<fp16>(a, item, j, width, my);
            if (item.parts == 1) {
                for (int64_t g = 0; g < group; g++)
                    finish_head(a, item.i, j * group + g, 1, my.acc + g * width, my.top + g, my.sum + g, 0);
            } else {
                float* to = partial + ((item.slot + item.part) * a.kv_heads + j) * step;
                memcpy(to, my.acc, size_t(group * width) * 4);
                memcpy(to + group * width, my.top, size_t(group) * 4);
                memcpy(to + group * width + group, my.sum, size_t(group) * 4);
            }
        }
        if (slots) {
#pragma omp for schedule(dynamic)
            for (int64_t w = 0; w < items * a.kv_heads; w++) {
                const Item& item = list[w / a.kv_heads];
                if (item.parts == 1 || item.part > 0) continue;
                const int64_t j = w % a.kv_heads;
                const float* from = partial + (item.slot * a.kv_heads + j) * step;
                for (int64_t g = 0; g < group; g++)
                    finish_head(a, item.i, j * group + g, item.parts, from + g * width, from + group * width + g,
                                from + group * width + group + g, a.kv_heads * step);
            }
        }
    }
    free(list);
    free(partial);
    return 0;
}

struct Append {
    const void *k, *v; void* pool; const int32_t *pages, *offsets;
    int64_t tokens, kv_heads, dim, pool_pages, page_tokens, k_row, k_head, v_row, v_head;
    int32_t from_dtype, pool_dtype, threads;
};

// 0, or t + 1 when token t has a page or offset that the pool does not have; then nothing is written.
int64_t flex_append(const Append* args) {
    const Append& a = *args;
    for (int64_t t = 0; t < a.tokens; t++)
        if (uint32_t(a.pages[t]) >= uint64_t(a.pool_pages) || uint32_t(a.offsets[t]) >= uint64_t(a.page_tokens))
            return t + 1;
    with_dtypes(a.from_dtype, a.pool_dtype, [&](auto from, auto to) {
        typedef decltype(from) From;
        typedef decltype(to) To;
#pragma omp parallel for num_threads(a.threads) schedule(static) if (a.tokens * a.kv_heads * a.dim > 65536)
        for (int64_t t = 0; t < a.tokens; t++) {
            for (int64_t j = 0; j < a.kv_heads; j++) {
                const int64_t head = int64_t(a.pages[t]) * 2 * a.kv_heads + j;
                const int64_t value = a.kv_heads * a.page_tokens * a.dim;
                To* k = (To*)a.pool + (head * a.page_tokens + a.offsets[t]) * a.dim;
                convert_row((const From*)a.k + t * a.k_row + j * a.k_head, k, a.dim);
                convert_row((const From*)a.v + t * a.v_row + j * a.v_head, k + value, a.dim);
            }
        }
    });
    return 0;
}

// 0, or page index + 1 of the first table entry outside the pool.
int64_t flex_gather(const void* pool, const int32_t* table, void* k, void* v, int64_t length, int64_t kv_heads,
                    int64_t dim, int64_t pool_pages, int64_t page_tokens, int32_t dtype, int32_t threads) {
    const int64_t row = dim * size_of(dtype), used = (length + page_tokens - 1) / page_tokens;
    for (int64_t p = 0; p < used; p++) if (uint32_t(table[p]) >= uint64_t(pool_pages)) return p + 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (length * kv_heads * row > 262144)
    for (int64_t s = 0; s < length; s++) {
        for (int64_t j = 0; j < kv_heads; j++) {
            const int64_t page = (int64_t(table[s / page_tokens]) * 2 * kv_heads + j) * page_tokens;
            const char* from = (const char*)pool + (page + s % page_tokens) * row;
            memcpy((char*)k + (s * kv_heads + j) * row, from, size_t(row));
            memcpy((char*)v + (s * kv_heads + j) * row, from + kv_heads * page_tokens * row, size_t(row));
        }
    }
    return 0;
}

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

// out[m, :] = x[m, :] @ w.T + bias. w: [n, k], bf16 or fp16, contiguous; k at least 1.
void flex_linear(const Linear* args) {
    if (args->rows == 0) return;
    if (args->w_dtype == BF16) linear<bf16>(*args);
    if (args->w_dtype == FP16) linear<fp16>(*args);
}

}  // extern "C"
