// What a machine can do at most: independent products in registers, and memory read once.
#include "../../flexengine/kernels/int8_dot.h"
#include "../../flexengine/kernels/tile.h"

namespace {
constexpr int CHAINS = 12;  // sums that wait for none of the others: more than a core works on at once
}

extern "C" {

// CHAINS * W fused products and additions per round, of fp32 or, four times as many, of integers. Returns a sum of them.
double peak_fp32(int64_t rounds, float x) {
    vf sum[CHAINS];
    const vf u = vset(x), v = vset(x * .5f);
    UNROLL for (int j = 0; j < CHAINS; j++) sum[j] = vset(x * float(j));  // all different, or some are left out
    for (int64_t i = 0; i < rounds; i++)
        UNROLL for (int j = 0; j < CHAINS; j++) sum[j] = vfma(u, v, sum[j]);
    UNROLL for (int j = 1; j < CHAINS; j++) sum[0] = vadd(sum[0], sum[j]);
    return vsum(sum[0]);
}

// The same of pairs of bf16, where they are multiplied at once. Returns how many times as many there are.
int64_t peak_bf16(int64_t rounds, float x) {
#if defined(FLEX_BF16)
    typedef pair U;
#else
    typedef float U;
#endif
    vf sum[CHAINS];
    const vf u = vset(x), v = vset(x * .5f);
    UNROLL for (int j = 0; j < CHAINS; j++) sum[j] = vset(x * float(j));
    for (int64_t i = 0; i < rounds; i++)
        UNROLL for (int j = 0; j < CHAINS; j++) sum[j] = vmadd(u, v, sum[j], U());
    UNROLL for (int j = 1; j < CHAINS; j++) sum[0] = vadd(sum[0], sum[j]);
    return vsum(sum[0]) == 1.f ? 0 : COLUMNS<U>;
}

double peak_int8(int64_t rounds, int32_t x) {
    vp sum[CHAINS], u = qset(x), v = qset(x);
    UNROLL for (int j = 0; j < CHAINS; j++) sum[j] = qset(x + j);
    for (int64_t i = 0; i < rounds; i++)
        UNROLL for (int j = 0; j < CHAINS; j++) {
#if defined(FLEX_PAIRS)
            v = vp(vheld<2>(vf(v)));  // else the compiler multiplies once
            sum[j] = pairs(sum[j], u, v);
#else
            sum[j] = dot(sum[j], u, v);
#endif
        }
    vf total = vset(0.f);
    UNROLL for (int j = 0; j < CHAINS; j++) total = vadd(total, qfloat(sum[j]));
    return vsum(total);
}

// Reads n bytes, a multiple of 4096, by that many threads.
double peak_read(const uint8_t* x, int64_t n, int32_t threads) {
    double found = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : found)
    for (int64_t page = 0; page < n; page += 4096) {
        vp part = qset(0);
        for (int i = 0; i < 4096; i += int(sizeof part)) part = qor(part, qload(x + page + i));
        found += vsum(qfloat(part));
    }
    return found;
}

int64_t peak_products() { return CHAINS * W; }

}  // extern "C"
