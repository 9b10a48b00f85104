// Decoders of the block types of GGUF files, for products (quantized_gemm.h) and for rows of embeddings.
#include "unpacked.h"

namespace {

// Calls put with part `number` of a block.
template <class F, class P, int J = 0> INLINE void with_part(int number, const Side& at, P put) {
    if constexpr ((J + 1) * F::PART < F::COLUMNS)
        if (number != J) return with_part<F, P, J + 1>(number, at, put);
    F::template part<J>(at, put);
}

// Decodes columns begin to end of W rows of w from row c on, see BlockDecode.
template <class F, class U>
void decode_blocks(const Matrix& w, int64_t c, int N, int64_t begin, int64_t end, int64_t width, float* tile) {
    const int64_t row = w.columns / F::COLUMNS * F::BYTES, last = w.rows - 1 - c;
    const uint8_t* const first = w.data + c * row;
    for (int64_t column = begin; column < end; column += F::PART, tile += F::PART / COLUMNS<U> * width) {
        const uint8_t* at = first + column / F::COLUMNS * F::BYTES;
        const int number = int(column % F::COLUMNS / F::PART);
        if (last >= W - 1) {
            ask(at + number * (F::BYTES * F::PART / F::COLUMNS), first + row, row, N * W * row);
            with_part<F>(number, Side(at, row), Tile<U>{tile, width});
        } else {  // the last rows: copies of their blocks, and the last one again
            uint8_t copies[W * LARGEST];
            for (int i = 0; i < W; i++) memcpy(copies + i * F::BYTES, at + (i < last ? i : last) * row, F::BYTES);
            with_part<F>(number, Side(copies, F::BYTES), Tile<U>{tile, width});
        }
    }
}

// Decodes rows ids[0] to ids[n - 1] of w, at most W, to out [n, columns].
template <class F> void decode_rows(const Matrix& w, const int64_t* ids, int n, float* out) {
    const int64_t row = w.columns / F::COLUMNS * F::BYTES;
    uint8_t copies[W * LARGEST];
    alignas(64) float tile[F::PART * W];
    for (int64_t block = 0; block < w.columns / F::COLUMNS; block++) {
        for (int i = 0; i < W; i++)
            memcpy(copies + i * F::BYTES, w.data + ids[i < n ? i : 0] * row + block * F::BYTES, F::BYTES);
        for (int number = 0; number < F::COLUMNS / F::PART; number++) {
            with_part<F>(number, Side(copies, F::BYTES), Tile<float>{tile, W});
            float* to = out + block * F::COLUMNS + number * F::PART;
            for (int i = 0; i < n; i++, to += w.columns)
                for (int e = 0; e < F::PART; e++) to[e] = tile[e * W + i];
        }
    }
}

// Unpacks columns begin to end of rows c to c + 2 W of w.
template <class F> void unpack(const Matrix& w, int64_t c, int64_t begin, int64_t end, Chunk& to) {
    const int64_t row = w.columns / F::COLUMNS * F::BYTES;
    for (int half = 0; half < TWO; half += W) {
        const int64_t last = w.rows - 1 - c - half;  // negative if only the first half is there
        for (int64_t column = begin; column < end; column += F::PART) {
            const uint8_t* at = w.data + (last < 0 ? w.rows - 1 : c + half) * row + column / F::COLUMNS * F::BYTES;
            const int number = int(column % F::COLUMNS / F::PART);
            const Unpacked<F::GROUP> put(to, column - begin, half);
            if (last >= W - 1) {
                ask(at + number * (F::BYTES * F::PART / F::COLUMNS), w.data + (c + half + 1) * row, row, TWO * row);
                with_part<F>(number, Side(at, row), put);
            } else {
                uint8_t copies[W * LARGEST];
                for (int i = 0; i < W; i++)
                    memcpy(copies + i * F::BYTES, at + (i < last ? i : last < 0 ? 0 : last) * row, F::BYTES);
                with_part<F>(number, Side(copies, F::BYTES), put);
            }
        }
    }
    finish<F::GROUP>(int(end - begin), to);
}

typedef void (*RowsDecode)(const Matrix&, const int64_t*, int, float*);
struct Type {
    BlockDecode units, pairs;
    RowsDecode rows;
    void (*dots)(const BlockProduct&, int64_t, int64_t, int64_t);
};
template <class F> constexpr Type type() {
#if defined(FLEX_BF16)
    return {decode_blocks<F, float>, decode_blocks<F, pair>, decode_rows<F>, dot_strip<F>};
#else
    return {decode_blocks<F, float>, nullptr, decode_rows<F>, dot_strip<F>};
#endif
}

// In the order of NATIVE in codec/gguf_blocks.py.
constexpr Type TYPES[] = {type<Q4_0>(), type<Q4_1>(), type<Q5_0>(), type<Q5_1>(), type<Q8_0>(),
                          type<Q2_K>(), type<Q3_K>(), type<Q4_K>(), type<Q5_K>(), type<Q6_K>(),
                          type<IQ4_NL>(), type<IQ4_XS>(), type<MXFP4>()};

}  // namespace

extern "C" {

BlockDecode flex_block_decoder(int32_t kind, int32_t pairs) {
    if (kind >= PARTED) return flex_parted_decoder(kind - PARTED, pairs);
    return pairs ? TYPES[kind].pairs : TYPES[kind].units;
}

void flex_block_dots(int32_t kind, const BlockProduct& a, int64_t t, int64_t end, int64_t c, int64_t stop) {
    if (kind >= PARTED) return flex_parted_dots(kind - PARTED, a, t, end, c, stop);
    for (; c < stop; c += TWO) TYPES[kind].dots(a, t, end, c);
}

void flex_block_rows(int32_t kind, const Matrix& w, const int64_t* ids, int64_t n, float* out, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n * w.columns > 32768)
    for (int64_t i = 0; i < n; i += W)
        TYPES[kind].rows(w, ids + i, int(n - i < W ? n - i : W), out + i * w.columns);
}

}  // extern "C"
