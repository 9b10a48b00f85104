// Products with vectors of neurons that lie anywhere in memory, and weighted sums of such vectors: codec/records.py.
//
// Index legend: t row of x, s neuron in the order of `places`, b block of a vector, j vector of W elements in a block.
//
// One thread of a Zen 4 CPU, bf16 vectors of 4096 in its L2: 41, 32, 22, 10 GB/s of products with 1, 2, 4, 8 rows. The
// thread reads pieces of 8 kB, from anywhere in RAM, at 20 GB/s: that is the limit up to 4 rows.
#pragma once
#include "quantized_kv.h"
#include "rows.h"

namespace {

constexpr int64_t ITEM = 64;         // neurons of one work item of products
constexpr int64_t SLICE = 128;       // elements; a thread sums a multiple of these, which are whole blocks and tiles
constexpr int64_t LEAD = 1 << 14;    // bytes; products prefetch at least as far ahead
constexpr int64_t CACHED = 1 << 17;  // bytes of neurons that are summed together: they and the next stay in L2
constexpr int64_t SPAN = 64;         // blocks whose scales are widened together by products
constexpr int64_t LITTLE = 1 << 18;  // bytes; for at most these, one thread is faster than several

// elements: out[s] = vector of neuron s. products: out[t][s] = bias[s] + x[t] . (vector of neuron s). sum: out[t] =
// start[t] (0 without one), and then the sum over s of x[t][s] * (vector of neuron s). The vector is `shift` bytes from the start of record places[s], which has `nbytes` bytes.
struct Records {
    const float* x; const char* records; const int64_t* places; const float* bias; const float* start; float* out;
    char* scratch;
    int64_t rows, n, room, nbytes, shift, width, x_row, out_row;
    int32_t kind, threads;  // kind: enum Dtype of simd.h or enum Codes of quantized_kv.h

    const char* vector(int64_t s) const { return records + places[s] * nbytes + shift; }
};

// ---------------------------------------------------------------- formats of vectors

// A format has blocks of SIZE elements, in STRIDE bytes each, or BYTES with the SCALES numbers that the elements of a
// block share. column(j): first element of vector j in its block.
// widen(v, b, n, width, apart, to): writes the first of the shared numbers of blocks b .. b + n - 1 of the vector at v
// to `to`, the second ones to `to + apart`.
// seek(v, b, scale, apart): after it, get<j>() returns vector j of block b. scale: address of the block's first number.
template <class T> struct Numbers {
    static constexpr int SIZE = 64 / int(sizeof(T)), STRIDE = 64, BYTES = 64, SCALES = 0;
    static constexpr int column(int j) { return j * W; }
    static void widen(const char*, int64_t, int64_t, int64_t, int64_t, float*) {}
    const T* at;
    INLINE void seek(const char* v, int64_t b, const float*, int64_t) { at = (const T*)v + b * SIZE; }
    template <int j> INLINE vf get() const { return vload(at + j * W); }
};

// A block is a group of codes. Elements are those of RecordForm.decode: a code times its scale is exact in fp32.
template <int BITS> struct Coded {
    static constexpr int SIZE = BITS == 4 ? 32 : 64, STRIDE = SIZE * BITS / 8, BYTES = STRIDE + 4, EACH = 8 / BITS;
    static constexpr int SCALES = 2;
    static constexpr int column(int j) { return j % EACH * STRIDE + j / EACH * W; }
    static void widen(const char* v, int64_t b, int64_t n, int64_t width, int64_t apart, float* to) {
        const fp16* scale = (const fp16*)(v + width * BITS / 8) + b;
        convert_row(scale, to, n);
        convert_row(scale + width / SIZE, to + apart, n);
    }
    const uint8_t* at;
    vf step, low;
    INLINE void seek(const char* v, int64_t b, const float* scale, int64_t apart) {
        at = (const uint8_t*)v + b * STRIDE, step = vset(scale[0]), low = vset(scale[apart]);
#if defined(FLEX_AVX512)
        if (BITS == 4) step = vfma(multiples<BITS>(1.f), step, low);  // a table of the elements, by code
#endif
    }
    template <int j> INLINE vf get() const {
        const vcodes raw = load_codes(at + j / EACH * W);
#if defined(FLEX_AVX512)
        if (BITS == 4) return scaled<BITS, j % EACH>(raw, step);
#endif
        return vfma(code<BITS, j % EACH>(raw), step, low);
    }
};

template <class F> constexpr int VECTORS = F::SIZE / W;

// Calls f(std::integral_constant<int, j>) for j = first .. end - 1.
template <int first, int end, class F> INLINE void for_vectors(F f) {
    f(std::integral_constant<int, first>());
    if constexpr (first + 1 < end) for_vectors<first + 1, end>(f);
}

// Prefetches bytes `from` to `to` of one vector after the other.
struct Stream {
    Tokens row, end;
    int64_t from, to, at = from, owed = 0;

    INLINE void next(int bytes) {
        for (owed += bytes; owed > 0; owed -= 64) {
            if (row >= end) return;
            __builtin_prefetch(*row + at, 0, 2);
            if ((at += 64) >= to) at = from, row++;
        }
    }
};

// ---------------------------------------------------------------- products

// scores[t][s] = x[t] . (vector at rows[s]), for H rows of x and tokens_of(H) neurons.
template <class F, int H>
__attribute__((noinline)) void multiply_neurons(const Records& a, const float* x, Tokens rows, float* scores,
                                                Stream& ahead) {
    constexpr int tokens = tokens_of(H), N = tile_of(H);
    const int64_t blocks = a.width / F::SIZE;
    vf all[(H * tokens + W - 1) / W * W];
    Stream stream = ahead;  // in registers
    for (int first = 0; first < tokens; first += N) {
        vf sum[H][N];
        clear(sum);
        float scales[N][F::SCALES * SPAN + 1];
        for (int64_t b = 0; b < blocks; b++) {
            if (F::SCALES && b % SPAN == 0)
                for (int s = 0; s < N; s++)
                    F::widen(rows[first + s], b, blocks - b < SPAN ? blocks - b : SPAN, a.width, SPAN, scales[s]);
            F block[N];
            UNROLL for (int s = 0; s < N; s++) block[s].seek(rows[first + s], b, scales[s] + b % SPAN, SPAN);
            stream.next(N * F::BYTES);
            for_vectors<0, VECTORS<F>>([&](auto j) {
                vf v[N];
                UNROLL for (int s = 0; s < N; s++) v[s] = vheld<H>(block[s].template get<j>());
                add_products(x + b * F::SIZE + F::column(j), a.x_row, v, sum);
            });
        }
        UNROLL for (int t = 0; t < H; t++)
            UNROLL for (int s = 0; s < N; s++) all[t * tokens + first + s] = sum[t][s];
    }
    ahead = stream;
    put_sums<H>(all, scores);
}

// Computes out of up to ITEM neurons from `first` on. next: first of those that this thread probably multiplies next.
template <class F> void multiply_item(const Records& a, int64_t first, int64_t next) {
    const int64_t bytes = a.width / F::SIZE * F::BYTES, lead = (LEAD + bytes - 1) / bytes;
    const int64_t count = a.n - first < ITEM ? a.n - first : ITEM;
    const char* rows[2 * ITEM];
    int64_t end = count;
    for (int64_t s = 0; s < count; s++) rows[s] = a.vector(first + s);
    for (int64_t s = next; s < a.n && s < next + lead && end < 2 * ITEM; s++) rows[end++] = a.vector(s);
    for (int64_t s = end; s < (count + W - 1) / W * W; s++) rows[s] = rows[count - 1];  // tiles read past the last row
    Stream ahead{rows + (lead < end ? lead : end), rows + end, 0, bytes};
    for_heads<SCORED>(0, a.rows, [&](auto H, int64_t t) {
        float scores[H * CHUNK];
        for (int64_t s = 0; s < count; s += tokens_of(H))
            multiply_neurons<F, H>(a, a.x + t * a.x_row, rows + s, scores + s, ahead);
        for (int h = 0; h < H; h++)
            for (int64_t s = 0; s < count; s++)
                a.out[(t + h) * a.out_row + first + s] = scores[h * CHUNK + s] + (a.bias ? a.bias[first + s] : 0.f);
        ahead.row = ahead.end;
    });
}

template <class F> void multiply_all(const Records& a) {
    const int64_t items = (a.n + ITEM - 1) / ITEM;
    const bool several = a.n * a.width / F::SIZE * F::BYTES > LITTLE;
#pragma omp parallel for num_threads(a.threads) schedule(dynamic) if (several)
    for (int64_t i = 0; i < items; i++) multiply_item<F>(a, i * ITEM, (i + a.threads) * ITEM);
}

// ---------------------------------------------------------------- sums

// Weights of H rows, [t][n], and the vectors and scales of the same neurons, [s][scales of all blocks of a slice].
struct Weighted {
    const float* weights; Tokens rows; const float* scales;
    int64_t n, first, end;  // neurons; blocks of the slice

    int64_t blocks() const { return end - first; }
};

// Neurons with a weight that is not 0 in some row.
struct Used {
    const char** rows;  // their vectors
    float* weights;     // [t][n]
    int32_t* bad;       // [t], 1 if an element of the result is not finite
    char* end;          // of the scratch memory
    int64_t n = 0;

    explicit Used(const Records& a) : rows((const char**)a.scratch) {
        weights = (float*)(rows + a.n), bad = (int32_t*)(weights + a.rows * a.n);
        end = (char*)(bad + (a.rows + 1) / 2 * 2 + a.rows * a.n % 2);  // a multiple of 8 bytes
        memset(bad, 0, size_t(a.rows) * 4);
        for (int64_t s = 0; s < a.n; s++) {
            bool some = false;
            for (int64_t t = 0; t < a.rows; t++) {
                weights[t * a.n + n] = a.x[t * a.x_row + s];
                some |= a.x[t * a.x_row + s] != 0.f;
            }
            if (some) rows[n++] = a.vector(s);
        }
    }
};

// out[t] += weights[t][s] * (vector of neuron s), for H rows of out and one neuron after the other, in columns of C
// vectors of W: vectors E and following of block b and, if C is more, of the next blocks.
template <class F, int H, int C, int E>
__attribute__((noinline)) void add_neurons(const Records& a, const Weighted& my, int64_t b, float* out, Stream& ahead) {
    constexpr int J = VECTORS<F> < C ? VECTORS<F> : C, B = C / J;
    auto column = [&](int c) { return out + (b + c / J) * F::SIZE + F::column(E + c % J); };
    Stream stream = ahead;  // in registers
    vf sum[H][C];
    UNROLL for (int t = 0; t < H; t++)
        UNROLL for (int c = 0; c < C; c++) sum[t][c] = vload(column(c) + t * a.out_row);
    const float* scale = my.scales + b - my.first;
    for (int64_t s = 0; s < my.n; s++, scale += F::SCALES * my.blocks()) {
        vf v[C];
        UNROLL for (int z = 0; z < B; z++) {
            F block;
            block.seek(my.rows[s], b + z, scale + z, my.blocks());
            for_vectors<0, J>([&](auto j) { v[z * J + j] = vheld<H>(block.template get<E + j>()); });
        }
        stream.next(C * F::STRIDE / VECTORS<F>);
        weigh_token(my.weights + s, a.n, v, sum);
    }
    UNROLL for (int t = 0; t < H; t++)
        UNROLL for (int c = 0; c < C; c++) vstore(column(c) + t * a.out_row, sum[t][c]);
    ahead = stream;
}

// Adds neurons to all blocks of a slice, for H rows.
template <class F, int H> void add_blocks(const Records& a, const Weighted& my, float* out, Stream& ahead) {
    constexpr int C = H == 1 ? 8 : tile_of(H), J = VECTORS<F>, step = C > J ? C / J : 1;
    auto columns = [&](auto c, int64_t b) {
        for_vectors<0, J / (c < J ? c : J)>([&](auto e) {
            add_neurons<F, H, c, e * c>(a, my, b, out, ahead);
        });
    };
    int64_t b = my.first;
    for (; b + step <= my.end; b += step) columns(std::integral_constant<int, C>(), b);
    for (; b < my.end; b++) columns(std::integral_constant<int, (C < J ? C : J)>(), b);
}

// Adds all neurons to the blocks from `first` to `end` of all rows, and marks the rows that are not finite.
template <class F> void sum_slice(const Records& a, const Used& used, int64_t first, int64_t end) {
    const int64_t blocks = end - first, from = first * F::SIZE, columns = blocks * F::SIZE;
    const int64_t chunk = CACHED / F::BYTES / blocks;
    float scales[F::SCALES * CACHED / F::BYTES + 1];
    for (int64_t t = 0; t < a.rows; t++) {
        float* row = a.out + t * a.out_row + from;
        if (a.start) memcpy(row, a.start + t * a.out_row + from, size_t(columns) * 4);
        else memset(row, 0, size_t(columns) * 4);
    }
    for (int64_t s = 0; s < used.n; s += chunk) {
        const int64_t n = used.n - s < chunk ? used.n - s : chunk, left = used.n - s - n;
        Tokens next = used.rows + s + n;
        Stream ahead{next, next + (left < chunk ? left : chunk), first * F::STRIDE, end * F::STRIDE};
        for (int64_t i = 0; F::SCALES && i < n; i++)
            F::widen(used.rows[s + i], first, blocks, a.width, blocks, scales + F::SCALES * i * blocks);
        for_heads<WEIGHED>(0, a.rows, [&](auto H, int64_t t) {
            const Weighted my{used.weights + t * a.n + s, used.rows + s, scales, n, first, end};
            add_blocks<F, H>(a, my, a.out + t * a.out_row, ahead);
            ahead.row = ahead.end;
        });
    }
    for (int64_t t = 0; t < a.rows; t++) {
        vf off = vset(0.f);
        for (float *x = a.out + t * a.out_row + from, *stop = x + columns; x < stop; x += W) {
            const vf sum = vadd(vload(x), vset(0.f));  // -0 becomes 0
            vstore(x, sum);
            off = vadd(off, vsub(sum, sum));
        }
        if (vsum(off) == 0.f) continue;
#pragma omp atomic write
        used.bad[t] = 1;
    }
}

template <class F> void sum_all(const Records& a) {
    const Used used(a);
    const int64_t blocks = a.width / F::SIZE, unit = SLICE / F::SIZE, units = (blocks + unit - 1) / unit;
    const int64_t most = used.n * blocks * F::BYTES > LITTLE ? a.threads : 1, slices = units < most ? units : most;
    const int64_t even = (units + slices - 1) / slices * unit, limit = CACHED / 4 / F::BYTES / unit * unit;
    const int64_t step = even < limit ? even : limit;
#pragma omp parallel for num_threads(int(slices)) schedule(static, 1) if (slices > 1)
    for (int64_t b = 0; b < blocks; b += step) sum_slice<F>(a, used, b, b + step < blocks ? b + step : blocks);
    // A weight of 0 times a number that is not finite is NaN. Such rows are summed again, alone: without these weights.
    for (int64_t t = 0; a.rows > 1 && t < a.rows; t++) {
        if (!used.bad[t]) continue;
        Records one = a;
        one.x += t * a.x_row, one.out += t * a.out_row, one.rows = 1;
        if (a.start) one.start += t * a.out_row;
        one.scratch = used.end;
        sum_all<F>(one);
    }
}

// ---------------------------------------------------------------- elements

// Writes vectors s = first .. end - 1 to out.
template <class F> void write_vectors(const Records& a, int64_t first, int64_t end) {
    const int64_t blocks = a.width / F::SIZE;
    float scales[F::SCALES * SPAN + 1];
    for (int64_t s = first; s < end; s++) {
        float* out = a.out + s * a.out_row;
        for (int64_t b = 0; b < blocks; b++, out += F::SIZE) {
            if (F::SCALES && b % SPAN == 0)
                F::widen(a.vector(s), b, blocks - b < SPAN ? blocks - b : SPAN, a.width, SPAN, scales);
            F block;
            block.seek(a.vector(s), b, scales + b % SPAN, SPAN);
            for_vectors<0, VECTORS<F>>([&](auto j) { vstore(out + F::column(j), block.template get<j>()); });
        }
    }
}

template <class F> void write_all(const Records& a) {
#pragma omp parallel for num_threads(a.threads) schedule(dynamic)
    for (int64_t i = 0; i < a.n; i += ITEM) write_vectors<F>(a, i, a.n - i < ITEM ? a.n : i + ITEM);
}

// Calls f(format) with the format of the vectors. Returns 0, or s + 1 if places[s] is no record; f is not called then.
template <class Call> int64_t with_records(const Records& a, Call f) {
    for (int64_t s = 0; s < a.n; s++)
        if (uint64_t(a.places[s]) >= uint64_t(a.room)) return s + 1;
    if (a.kind == FP32) f(Numbers<float>());
    if (a.kind == BF16) f(Numbers<bf16>());
    if (a.kind == FP16) f(Numbers<fp16>());
    if (a.kind == CODES8) f(Coded<8>());
    if (a.kind == CODES4) f(Coded<4>());
    return 0;
}

}  // namespace
