// Matrix products with weights encoded in 2, 3, 4 or 8 bits as packed.py lays them out.
#pragma once
#include "linear.h"

namespace {

// W rows of an encoded matrix are read at a time; a quad of them, four neighbouring columns of a row in 32 bits, fills
// one register whatever W is, although a block holds LANES rows. A quad of codes meets four columns of x in `dot`: u8
// times s8, summed to 32 bits. WIDE: codes of more than 4 bits, of which two products together may leave 16 bits; NARROW
// is what WIDE is for fewer bits, true where they need no way of their own. The instruction made for this is written by
// hand: through its intrinsic GCC 12 copies each sum before and after, and half of the speed is gone.
constexpr int LANES = 16, OCTET = 32;  // OCTET: columns in 8 quads, of which planes of any width take whole registers

#if (defined(FLEX_AVX512) && defined(__AVX512VNNI__)) || (defined(FLEX_AVX2) && defined(__AVXVNNI__))
#define FLEX_VNNI 1
#endif
#if defined(FLEX_VNNI) || !(defined(FLEX_AVX512) || defined(FLEX_AVX2))
constexpr bool NARROW = true;
#else
constexpr bool NARROW = false;
#endif

#if defined(FLEX_AVX512)
inline vp qload(const void* p) { return _mm512_loadu_si512(p); }
inline vp qset(int32_t x) { return _mm512_set1_epi32(x); }
inline void qstore(void* p, vp a) { _mm512_storeu_si512(p, a); }
inline vp qleft(vp a, int by) { return _mm512_slli_epi32(a, unsigned(by)); }
inline vp qright(vp a, int by) { return _mm512_srli_epi32(a, unsigned(by)); }
inline vp qand(vp a, uint32_t m) { return _mm512_and_si512(a, _mm512_set1_epi32(int(m))); }
inline vp qor(vp a, vp b) { return _mm512_or_si512(a, b); }
inline vf qfloat(vp a) { return _mm512_cvtepi32_ps(a); }
inline void qbytes(int8_t* p, vf a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a))); }
template <bool WIDE> inline vp dot(vp sum, vp u, vp x) {
#if defined(FLEX_VNNI)
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(x));
    return sum;
#else
    const vp ones = _mm512_set1_epi16(1);
    if (!WIDE) return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(u, x), ones));
    vp even = _mm512_madd_epi16(qand(u, 0x00ff00ff), _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
    vp odd = _mm512_madd_epi16(_mm512_srli_epi16(u, 8), _mm512_srai_epi16(x, 8));
    return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
#endif
}
#elif defined(FLEX_AVX2)
inline vp qload(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline vp qset(int32_t x) { return _mm256_set1_epi32(x); }
inline void qstore(void* p, vp a) { _mm256_storeu_si256((__m256i*)p, a); }
inline vp qleft(vp a, int by) { return _mm256_slli_epi32(a, by); }
inline vp qright(vp a, int by) { return _mm256_srli_epi32(a, by); }
inline vp qand(vp a, uint32_t m) { return _mm256_and_si256(a, _mm256_set1_epi32(int(m))); }
inline vp qor(vp a, vp b) { return _mm256_or_si256(a, b); }
inline vf qfloat(vp a) { return _mm256_cvtepi32_ps(a); }
inline void qbytes(int8_t* p, vf a) {
    const __m256i whole = _mm256_cvtps_epi32(a);
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(half, half));
}
template <bool WIDE> inline vp dot(vp sum, vp u, vp x) {
#if defined(FLEX_VNNI)
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(u), "x"(x));
    return sum;
#else
    const vp ones = _mm256_set1_epi16(1);
    if (!WIDE) return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u, x), ones));
    vp even = _mm256_madd_epi16(qand(u, 0x00ff00ff), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    vp odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
#endif
}
#else
inline vp qload(const void* p) { vp a; memcpy(&a, p, sizeof a); return a; }
inline vp qset(int32_t x) { const uint32_t u = uint32_t(x); return vp{u, u, u, u}; }
inline void qstore(void* p, vp a) { memcpy(p, &a, sizeof a); }
inline vp qleft(vp a, int by) { return a << by; }
inline vp qright(vp a, int by) { return a >> by; }
inline vp qand(vp a, uint32_t m) { return a & m; }
inline vp qor(vp a, vp b) { return a | b; }
inline vf qfloat(vp a) { return __builtin_convertvector((vi)a, vf); }
inline void qbytes(int8_t* p, vf a) { for (int e = 0; e < W; e++) p[e] = int8_t(a[e]); }
template <bool WIDE> inline vp dot(vp sum, vp u, vp x) {
    for (int e = 0; e < 4; e++) sum += (u >> (8 * e) & 255) * (vp)((vi)(x << (24 - 8 * e)) >> 24);
    return sum;
}
#endif

// x: [rows, k]; w: [n, k], encoded; scratch: for int8, see `Rounded`.
struct Product {
    const float* x; const uint8_t* w; const float* bias; float *out, *scratch;
    int64_t rows, n, k, x_row, out_row, groups;
    int32_t bits, group, int8, threads;
};

// W rows of w from row c on, as a thread reads them that takes N * W of them, and later the next N * W that are left.
template <int BITS> struct Strip {
    static constexpr int LOW = BITS == 3 ? 2 : BITS;  // bits of the first plane
    static constexpr uint32_t MASK = 0x01010101u * ((1u << LOW) - 1);
    static constexpr int64_t AHEAD = 4096;  // bytes
    const uint8_t *at, *end;
    int64_t lane, group, bytes, next;  // lane: the first row's place in its block; bytes: of a block
    int shift;  // group is 2^shift

    Strip(const Product& a, int64_t c, int N)
        : lane(c % LANES), group(a.group), bytes(4 * LANES + LANES * a.group * BITS / 8) {
        const int64_t length = a.groups * bytes;
        at = a.w + c / LANES * length, end = at + length;
        next = (N * W * a.threads / LANES - 1) * length;
        shift = __builtin_ctz(unsigned(a.group));
    }
    // Asks for what is to be read after the octet from column d of group g on.
    INLINE void ask(int64_t g, int64_t d) const {
        uintptr_t ahead = uintptr_t(at) + g * bytes + d * LANES * BITS / 8 + AHEAD;
        if (ahead >= uintptr_t(end)) ahead += next;
        UNROLL for (int i = 0; i <= BITS; i++) __builtin_prefetch((const void*)(ahead + 64 * i), 0, 3);
    }
    vf scale(int64_t g) const { return vload((const fp16*)(at + g * bytes) + lane); }
    vf minimum(int64_t g) const { return vload((const fp16*)(at + g * bytes) + LANES + lane); }

    // Quad i (a constant) of the octet from column d of group g on.
    INLINE vp quad(int64_t g, int64_t d, int i) const {
        const uint8_t* low = at + g * bytes + 4 * LANES + d * LANES * LOW / 8 + lane * 4;
        vp codes = qright(qload(low + i * LOW / 8 * 4 * LANES), i * LOW % 8);
        if (BITS == 8) return codes;
        codes = qand(codes, MASK);
        if (BITS != 3) return codes;
        vp third = qload(low + (group - d) * LANES * LOW / 8 + d * LANES / 8);
        third = i < 2 ? qleft(third, 2 - i) : qright(third, i - 2);
        return qor(codes, qand(third, 0x04040404));
    }
};

// What becomes of W rows of w from row c on, by the number of bits; N: as in Strip.
struct Decoder {
    // Columns d to d + span, decoded: tile [span, W], `width` floats from one column to the next. d: a multiple of
    // OCTET; the tile is written up to one.
    void (*decode)(const Product& a, int64_t c, int N, int64_t d, int64_t span, int64_t width, float* tile);
    // Group g's scales and minimums in fp32, and its codes: quads [group / 4, W], `width` bytes from one to the next.
    void (*unpack)(const Product& a, int64_t c, int N, int64_t g, int64_t width, uint8_t* quads, float* scale,
                   float* minimum);
};

template <int BITS>
void decode_strip(const Product& a, int64_t c, int N, int64_t d, int64_t span, int64_t width, float* tile) {
    const Strip<BITS> w(a, c, N);
    for (const int64_t end = d + span; d < end; d += OCTET) {
        const int64_t g = d >> w.shift, inside = d - (g << w.shift);
        const vf scale = w.scale(g), minimum = w.minimum(g);
        w.ask(g, inside);
        UNROLL for (int i = 0; i < 8; i++) {
            const vp codes = w.quad(g, inside, i);
            UNROLL for (int e = 0; e < 4; e++, tile += width)
                vstore(tile, vfma(qfloat(qand(qright(codes, 8 * e), 255)), scale, minimum));
        }
    }
}

template <int BITS>
void unpack_strip(const Product& a, int64_t c, int N, int64_t g, int64_t width, uint8_t* quads, float* scale,
                  float* minimum) {
    const Strip<BITS> w(a, c, N);
    vstore(scale, w.scale(g));
    vstore(minimum, w.minimum(g));
    for (int64_t d = 0; d < a.group; d += OCTET) {
        w.ask(g, d);
        UNROLL for (int i = 0; i < 8; i++, quads += width) qstore(quads, w.quad(g, d, i));
    }
}

Decoder decoder(int32_t bits) {
    if (bits == 2) return {decode_strip<2>, unpack_strip<2>};
    if (bits == 3) return {decode_strip<3>, unpack_strip<3>};
    if (bits == 4) return {decode_strip<4>, unpack_strip<4>};
    return {decode_strip<8>, unpack_strip<8>};
}

// ---------------------------------------------------------------- fp32

constexpr int FEW_SPAN = 64;

// M <= ROWS rows of out from m on, at N * W columns from c on: FEW_SPAN columns at a time are decoded into L1.
template <int M, int N>
void product_few(const Product& p, const Linear& a, const Decoder& w, int64_t m, int64_t rows, int64_t c) {
    if constexpr (M > 1)
        if (rows < M) return product_few<M - 1, N>(p, a, w, m, rows, c);
    for (int64_t low = 0; low < a.k; low += SPAN) {
        const int64_t high = a.k - low < SPAN ? a.k : low + SPAN;
        vf sum[M][N];
        clear(sum);
        for (int64_t d = low; d < high; d += FEW_SPAN) {
            alignas(64) float tile[FEW_SPAN * N * W];
            const int64_t span = high - d < FEW_SPAN ? high - d : FEW_SPAN;
            for (int n = 0; n < N; n++) w.decode(p, c + n * W, N, d, span, N * W, tile + n * W);
            multiply(a.x + m * a.x_row + d, a.x_row, tile, span, sum);
        }
        add(a, sum, m, c, low == 0);
    }
}

// Rows m to end of out at N * W columns from c on, as `linear` computes them.
template <int N> void product_fp32(const Product& p, const Decoder& w, int64_t m, int64_t end, int64_t c) {
    const Linear a{p.x, nullptr, p.bias, p.out, p.rows, p.n, p.k, p.x_row, p.out_row, 0, p.threads};
    if (end - m <= ROWS) return product_few<ROWS, N>(p, a, w, m, end - m, c);
    alignas(64) float tile[SPAN * N * W];
    for (int64_t d = 0; d < a.k; d += SPAN) {
        const int64_t span = a.k - d < SPAN ? a.k - d : SPAN;
        for (int n = 0; n < N; n++) w.decode(p, c + n * W, N, d, span, N * W, tile + n * W);
        multiply_group<N>(a, tile, m, end, c, d, span);
    }
}

// ---------------------------------------------------------------- int8

// x rounded to int8 per group, the groups of all rows side by side: codes [groups, rows, group]; what a code of that
// group is worth and the sum of its codes, [groups, rows].
struct Rounded {
    int64_t rows, group;
    float *scale, *sum;
    int8_t* codes;

    explicit Rounded(const Product& a)
        : rows(a.rows), group(a.group), scale(a.scratch), sum(scale + a.groups * rows),
          codes((int8_t*)(sum + a.groups * rows)) {}
};

// Rounds group g of row m. Where a number is not finite the scale is NaN, and so is the whole row of out.
void round_group(const Product& a, const Rounded& to, int64_t m, int64_t g) {
    const int64_t first = g * a.group, there = a.k - first < a.group ? a.k - first : a.group;
    const float* x = a.x + m * a.x_row + first;
    float part[4 * OCTET] = {};
    if (there < a.group) x = (const float*)memcpy(part, x, size_t(there) * 4);
    vf top = vset(0.f), bad = vset(0.f);
    for (int i = 0; i < a.group; i += W) {
        top = vmax(vand(vload(x + i), 0x7fffffff), top);
        bad = vfma(vload(x + i), vset(0.f), bad);
    }
    const int64_t at = g * a.rows + m;
    int8_t* codes = to.codes + at * a.group;
    const float scale = vtop(top) / 127.f;
    const bool finite = vsum(bad) == 0.f;
    const vf magic = vset(12582912.f), most = vset(127.f), least = vset(-127.f), step = vset(scale);  // magic: see vexp
    vf total = vset(0.f);
    for (int i = 0; i < a.group; i += W) {
        vf code = vset(0.f);
        if (finite && scale > 0.f) {
            code = vsub(vadd(vdiv(vload(x + i), step), magic), magic);
            code = vbelow(code, least, least, vbelow(most, code, most, code));  // where a tiny scale is not exact
        }
        qbytes(codes + i, code);
        total = vadd(total, code);
    }
    to.scale[at] = finite ? scale : NAN;
    to.sum[at] = vsum(total);
}

// One group of N * W rows: codes as quads [group / 4, N * W], scales and minimums.
template <int N> struct Unpacked {
    alignas(64) uint8_t quads[4 * OCTET * N * W];
    alignas(64) float scale[N * W], minimum[N * W];
};

// Adds one group of M rows of x from row m on to sums [M, N * W]. Not inlined: else the compiler would keep sums in
// registers from group to group, and spill them.
template <bool WIDE, int M, int N>
__attribute__((noinline)) void dot_tile(const Unpacked<N>& w, const Rounded& x, int64_t g, int64_t m, float* sums) {
    const int64_t group = x.group, at = g * x.rows + m;
    const float *scale = x.scale + at, *total = x.sum + at;
    const uint8_t* quad = w.quads;
    vp whole[M][N];
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int n = 0; n < N; n++) whole[i][n] = qset(0);
    const int8_t* codes = x.codes + at * group;
    for (const int8_t* end = codes + group; codes < end; codes += 4, quad += N * W * 4) {
        vp u[N];
        UNROLL for (int n = 0; n < N; n++) u[n] = qload(quad + n * W * 4);
        UNROLL for (int i = 0; i < M; i++) {
            int32_t four;
            memcpy(&four, codes + i * group, 4);
            const vp v = qset(four);
            UNROLL for (int n = 0; n < N; n++) whole[i][n] = dot<WIDE>(whole[i][n], u[n], v);
        }
    }
    UNROLL for (int n = 0; n < N; n++) {
        const vf step = vload(w.scale + n * W), minimum = vload(w.minimum + n * W);
        UNROLL for (int i = 0; i < M; i++) {
            float* to = sums + (i * N + n) * W;
            const vf value = vfma(step, qfloat(whole[i][n]), vmul(minimum, vset(total[i])));
            vstore(to, vfma(vset(scale[i]), value, vload(to)));
        }
    }
}

template <bool WIDE, int M, int N>
void dot_rows(const Unpacked<N>& w, const Rounded& x, int64_t g, int64_t m, int64_t rows, float* sums) {
    if constexpr (M > 1)
        if (rows < M) return dot_rows<WIDE, M - 1, N>(w, x, g, m, rows, sums);
    dot_tile<WIDE, M, N>(w, x, g, m, sums);
}

// Rows m to end, in tiles of nearly equal height.
template <bool WIDE, int N>
void dot_group(const Unpacked<N>& w, const Rounded& x, int64_t g, int64_t m, int64_t end, float* sums) {
    for (int64_t tiles = (end - m + ROWS - 1) / ROWS; tiles; tiles--) {
        const int64_t rows = (end - m + tiles - 1) / tiles;
        dot_rows<WIDE, ROWS, N>(w, x, g, m, rows, sums);
        m += rows, sums += rows * N * W;
    }
}

// Rows m to end of out at N * W columns from c on. An output is the bias and one group after the other, whatever the
// tiles are.
template <int N> void product_int8(const Product& a, const Decoder& decoder, int64_t m, int64_t end, int64_t c) {
    const Rounded x(a);
    Unpacked<N> w;
    alignas(64) float sums[GROUP * N * W], first[N * W] = {};
    const int64_t columns = a.n - c < N * W ? a.n - c : N * W;
    if (a.bias) memcpy(first, a.bias + c, size_t(columns) * 4);
    for (int64_t i = 0; i < end - m; i++) memcpy(sums + i * N * W, first, sizeof first);
    for (int64_t g = 0; g < a.groups; g++) {
        for (int n = 0; n < N; n++)
            decoder.unpack(a, c + n * W, N, g, N * W * 4, w.quads + n * W * 4, w.scale + n * W, w.minimum + n * W);
        if (a.bits > 4) dot_group<true>(w, x, g, m, end, sums);
        else dot_group<NARROW>(w, x, g, m, end, sums);
    }
    for (int64_t i = m; i < end; i++)
        memcpy(a.out + i * a.out_row + c, sums + (i - m) * N * W, size_t(columns) * 4);
}

// ---------------------------------------------------------------- both

template <int N> void product_tile(const Product& a, const Decoder& w, int64_t m, int64_t end, int64_t c) {
    if (a.int8) product_int8<N>(a, w, m, end, c);
    else product_fp32<N>(a, w, m, end, c);
}

// Tiles and their order are those of `linear`.
void product(const Product& a) {
    const Decoder w = decoder(a.bits);
    const int64_t groups = (a.rows + GROUP - 1) / GROUP, height = (a.rows + groups - 1) / groups;
    int64_t width = VECS * W;
    while (width > W && (a.n + width - 1) / width * groups < 3 * a.threads) width /= 2;
    const int64_t blocks = (a.n + width - 1) / width;
#pragma omp parallel num_threads(a.threads)
    {
        if (a.int8) {
            const Rounded to(a);
#pragma omp for
            for (int64_t i = 0; i < a.rows * a.groups; i++) round_group(a, to, i / a.groups, i % a.groups);
        }
#pragma omp for schedule(dynamic)
        for (int64_t b = 0; b < blocks * groups; b++) {
            const int64_t c = b % blocks * width, columns = a.n - c < width ? a.n - c : width;
            const int64_t m = b / blocks * height, end = a.rows - m < height ? a.rows : m + height;
            const int64_t vecs = (columns + W - 1) / W;
            if (vecs == 1) product_tile<1>(a, w, m, end, c);
            if (vecs == 2) product_tile<2>(a, w, m, end, c);
            if (VECS > 2 && vecs == 3) product_tile<VECS - 1>(a, w, m, end, c);
            if (VECS > 2 && vecs == 4) product_tile<VECS>(a, w, m, end, c);
        }
    }
}

}  // namespace

extern "C" {

// out[m, :] = x[m, :] @ w.T + bias; k at least 1. scratch, for int8: as many bytes as `Rounded` takes, 64-aligned.
void flex_product(const Product* args) {
    if (args->rows) product(*args);
}

}  // extern "C"
