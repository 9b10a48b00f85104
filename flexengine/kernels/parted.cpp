// Decoders of formats of several tensors, for products (quantized_gemm.h).
#include "parted.h"

namespace {

template <class F, class U>
void decode_parted(const Matrix& w, int64_t c, int N, int64_t begin, int64_t end, int64_t width, float* tile) {
    F::decode(w, c, N * W, begin, end, [=](int64_t column) FORCED {
        return Tile<U>{tile + (column - begin) / COLUMNS<U> * width, width};
    });
}

// A family for products by int8: with scales of GROUP columns.
template <class F, int GROUP_, int TOP_, bool MINIMA_> struct Dots : F {
    static constexpr int GROUP = GROUP_, TOP = TOP_;
    static constexpr bool MINIMA = MINIMA_;
};

template <class F> void unpack(const Matrix& w, int64_t c, int64_t begin, int64_t end, Chunk& to) {
    for (int half = 0; half < TWO; half += W)  // the first half again if only that is there
        F::decode(w, c + half < w.rows ? c + half : c, TWO, begin, end, [&to, begin, half](int64_t column) FORCED {
            return Unpacked<F::GROUP>(to, column - begin, half);
        });
    finish<F::GROUP>(int((end - begin + PART - 1) / PART * PART), to);
}

#if defined(FLEX_BF16)
// Magnitudes of E4M3 codes as bf16, which holds them exactly.
struct Magnitudes {
    alignas(64) uint16_t at[128];
    constexpr Magnitudes() : at() {
        for (int code = 8; code < 127; code++) at[code] = uint16_t((120 << 7) + (code << 4));
        for (int code = 1, power = 118; code < 8; code++) {  // code * 2^-9
            while (code >> (power - 117)) power++;
            at[code] = uint16_t((power << 7) + ((code << (125 - power)) & 127));
        }
        at[127] = 0x7fc0;
    }
};
constexpr Magnitudes MAGNITUDES;

// Writes numbers of E4M3 codes without their scales as pairs of bf16, which hold them exactly, into a tile as Tile<pair>
// does, and scales apart.
struct Bare {
    static constexpr bool CODES = true;
    float* at;
    int64_t width;
    float* scales;

    INLINE void quad(int column, vp x, vf scale) const {
        const uint16_t* table = MAGNITUDES.at;
        const vp twice[2] = {_mm512_set1_epi32(0x01010000), _mm512_set1_epi32(0x03030202)};
        const vp lanes = _mm512_broadcast_i32x4(_mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
        UNROLL for (int h = 0; h < 2; h++) {
            const vp words = _mm512_shuffle_epi8(x, _mm512_or_si512(twice[h], lanes));  // each byte twice
            const vp low = _mm512_permutex2var_epi16(qload(table), words, qload(table + 32));
            const vp high = _mm512_permutex2var_epi16(qload(table + 64), words, qload(table + 96));
            const vp size = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(words, qset(0x00400040)), low, high);
            qstore(at + (column / 2 + h) * width, qor(size, qand(words, 0x80008000)));
        }
        if (column % 32 == 0) vstore(scales, scale);
    }
};

constexpr int PAIR_COLUMNS = 128;  // of w, decoded at a time: they, x, and the sums of 64 rows stay in L1

// Adds the products of a group of 64 columns to sums [M, N * W]. tile: pairs [32, N * W]. codes, worth: as in add_dots.
template <int M, int N>
INLINE void add_pairs(const float* tile, const float* scales, const uint8_t* codes, const float* worth, float* sums) {
    alignas(64) float x[2][GROUP64 / 4 * M];  // the first and the second pairs of quads
    for (int i = 0; i < GROUP64 / 4 * M; i += W) {
        const vp four = qxor(qload(codes + 4 * i), qset(int32_t(FLIP)));
        UNROLL for (int h = 0; h < 2; h++) {
            const vp low = (vp)qfloat(qextend(four, 24 - 16 * h)), high = (vp)qfloat(qextend(four, 16 - 16 * h));
            qstore(x[h] + i, qor(qright(low, 16), qand(high, 0xffff0000)));
        }
    }
    vf sum[M][N];
    clear(sum);
    for (int q = 0; q < GROUP64 / 4; q++)
        UNROLL for (int h = 0; h < 2; h++, tile += N * W) {
            vf u[N];
            UNROLL for (int n = 0; n < N; n++) u[n] = vload(tile + n * W);
            UNROLL for (int i = 0; i < M; i++) {
                const vf v = vset(x[h][q * M + i]);
                UNROLL for (int n = 0; n < N; n++) sum[i][n] = vmadd(v, u[n], sum[i][n], pair());
            }
        }
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int n = 0; n < N; n++) {
            float* to = sums + (i * N + n) * W;
            vstore(to, vfma(vset(worth[i]), vmul(vload(scales + n * W), sum[i][n]), vload(to)));
        }
}

// Adds the products of some groups of `rows` rows, at most M.
template <int N, int M>
void add_pair_groups(int64_t rows, int64_t groups, const float* tile, const float* scales, const uint8_t* codes,
                     const float* worth, float* sums) {
    if constexpr (M > 1)
        if (rows < M) return add_pair_groups<N, M - 1>(rows, groups, tile, scales, codes, worth, sums);
    for (int64_t g = 0; g < groups; g++)
        add_pairs<M, N>(tile + g * GROUP64 / 2 * N * W, scales + g * N * W, codes + g * GROUP64 * M, worth + g * 7 * M,
                        sums);
}

// As dot_strip, for N * W rows of w whose scales are of a multiple of 64 columns.
template <class F, int N> void pair_strip(const BlockProduct& a, int64_t t, int64_t end, int64_t c) {
    constexpr int64_t WIDTH = N * W;
    alignas(64) float tile[PAIR_COLUMNS / 2 * WIDTH], scales[PAIR_COLUMNS / GROUP64 * WIDTH];
    with_sums<WIDTH>(a, t, end, c, [&](int64_t first, float* sums) FORCED {
        for (int64_t begin = 0; begin < a.w.columns; begin += PAIR_COLUMNS) {
            const int64_t stop = a.w.columns - begin < PAIR_COLUMNS ? a.w.columns : begin + PAIR_COLUMNS;
            const int64_t groups = (stop - begin + GROUP64 - 1) / GROUP64;
            const int64_t decoded = (stop - begin + PART - 1) / PART * PART;
            for (int64_t n = 0; n < WIDTH; n += W)  // the first rows again if there are no others
                F::decode(a.w, c + n < a.w.rows ? c + n : c, WIDTH, begin, stop, [&](int64_t column) FORCED {
                    const int64_t d = column - begin;
                    return Bare{tile + d / 2 * WIDTH + n, WIDTH, scales + d / GROUP64 * WIDTH + n};
                });
            memset(tile + decoded / 2 * WIDTH, 0, size_t((groups * GROUP64 - decoded) / 2 * WIDTH) * 4);
            for (int64_t i = t; i < end; i++) {
                const int64_t m = i * a.rows / a.tiles, M = (i + 1) * a.rows / a.tiles - m;
                const int64_t at = m * a.groups + begin / GROUP64 * M;
                add_pair_groups<N, BLOCK_ROWS>(M, groups, tile, scales, a.codes + at * GROUP64, a.worths + at * 7,
                                               sums + (m - first) * WIDTH);
            }
        }
    });
}
#endif

typedef void (*Dot)(const BlockProduct&, int64_t, int64_t, int64_t);
struct Type {
    BlockDecode units, pairs;
    Dot dots[3];  // with scales of 16, 32 and 64 columns
    Dot wide;     // as the last one, for 4 W rows of w
};
template <class F> constexpr Type type(Dot sixteen = nullptr, Dot two = nullptr, Dot four = nullptr) {
#if defined(FLEX_BF16)
    return {decode_parted<F, float>, decode_parted<F, pair>, {sixteen, two, four}, nullptr};
#else
    return {decode_parted<F, float>, nullptr, {sixteen, two, four}, nullptr};
#endif
}
template <class F, int GROUP, int TOP, bool MINIMA> constexpr Dot DOTS = dot_strip<Dots<F, GROUP, TOP, MINIMA>, true>;
template <class F, int TOP, bool MINIMA> constexpr Type whole() {
    return type<F>(nullptr, DOTS<F, 32, TOP, MINIMA>, DOTS<F, 64, TOP, MINIMA>);
}

// In the order of NATIVE in codec/layouts.py.
constexpr Type TYPES[] = {
#if defined(FLEX_BF16)
    {decode_parted<ByRows<Fp8>, float>, decode_parted<ByRows<Fp8>, pair>,
     {nullptr, nullptr, pair_strip<ByRows<Fp8>, 2>}, pair_strip<ByRows<Fp8>, 4>},
#else
    type<ByRows<Fp8>>(),
#endif
    type<ByRows<Fp4Codes>>(DOTS<ByRows<Fp4Codes>, 16, 12, false>, DOTS<ByRows<Fp4Codes>, 32, 12, false>,
                           DOTS<ByRows<Fp4Codes>, 32, 12, false>),
    type<ByRows<TableCodes>>(),
    whole<ByRows<Whole4<false>>, 8, false>(),
    whole<ByRows<Whole4<true>>, 8, true>(),
    whole<ByRows<Whole8<false>>, 128, false>(),
    whole<ByRows<Whole8<true>>, 128, true>(),
    whole<ByRows<Per127>, 128, false>(),
    whole<ByInputs<Gptq<2>>, 8, true>(),
    whole<ByInputs<Gptq<3>>, 8, true>(),
    whole<ByInputs<Gptq<4>>, 8, true>(),
    whole<ByInputs<Gptq<8>>, 128, true>(),
    whole<ByInputs<Awq>, 8, true>(),
};

}  // namespace

extern "C" {

BlockDecode flex_parted_decoder(int32_t kind, int32_t pairs) { return pairs ? TYPES[kind].pairs : TYPES[kind].units; }

void flex_parted_dots(int32_t kind, const BlockProduct& a, int64_t t, int64_t end, int64_t c, int64_t stop) {
    const int64_t right = a.w.layout->right;
    const Dot dots = TYPES[kind].dots[right % 64 == 0 ? 2 : right % 32 == 0], wide = TYPES[kind].wide;
    for (; wide && stop - c > TWO; c += 2 * TWO) wide(a, t, end, c);
    for (; c < stop; c += TWO) dots(a, t, end, c);
}

}  // extern "C"
