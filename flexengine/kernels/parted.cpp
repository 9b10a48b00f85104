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

typedef void (*Dot)(const BlockProduct&, int64_t, int64_t, int64_t);
struct Type {
    BlockDecode units, pairs;
    Dot dots[3];  // with scales of 16, 32 and 64 columns
};
template <class F> constexpr Type type(Dot sixteen = nullptr, Dot two = nullptr, Dot four = nullptr) {
#if defined(FLEX_BF16)
    return {decode_parted<F, float>, decode_parted<F, pair>, {sixteen, two, four}};
#else
    return {decode_parted<F, float>, nullptr, {sixteen, two, four}};
#endif
}
template <class F, int GROUP, int TOP, bool MINIMA> constexpr Dot DOTS = dot_strip<Dots<F, GROUP, TOP, MINIMA>, true>;
template <class F, int TOP, bool MINIMA> constexpr Type whole() {
    return type<F>(nullptr, DOTS<F, 32, TOP, MINIMA>, DOTS<F, 64, TOP, MINIMA>);
}

// In the order of NATIVE in codec/layouts.py.
constexpr Type TYPES[] = {
    type<ByRows<Fp8>>(),
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
    const Dot dots = TYPES[kind].dots[right % 64 == 0 ? 2 : right % 32 == 0];
    for (; c < stop; c += TWO) dots(a, t, end, c);
}

}  // extern "C"
