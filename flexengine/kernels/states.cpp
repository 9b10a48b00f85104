// States of sequences, in a file of its own, which is compiled beside the others.
#include "states.h"

FLEX_SIZE(delta, Delta)
FLEX_SIZE(scan, Scan)
FLEX_SIZE(conv, Conv)
FLEX_SIZE(select, Select)

extern "C" {

// Bytes of scratch memory.
int64_t flex_delta_bytes(const Delta* args) { return args->threads * args->floats() * int64_t(sizeof(float)); }
int64_t flex_scan_bytes(const Scan* args) { return args->threads * args->floats() * int64_t(sizeof(float)); }
int64_t flex_select_bytes(const Select* args) { return args->threads * args->floats() * int64_t(sizeof(float)); }

void flex_delta(const Delta* args) {
    const int64_t heads = args->heads, floats = args->floats();
#pragma omp parallel for num_threads(args->threads) schedule(dynamic) if (args->threads > 1)
    for (int64_t i = 0; i < args->pieces * heads; i++)
        delta_head(*args, i / heads, i % heads, args->scratch + omp_get_thread_num() * floats);
}

void flex_scan(const Scan* args) {
    const int64_t heads = args->heads, floats = args->floats();
#pragma omp parallel for num_threads(args->threads) schedule(dynamic) if (args->threads > 1)
    for (int64_t i = 0; i < args->pieces * heads; i++)
        scan_head(*args, i / heads, i % heads, args->scratch + omp_get_thread_num() * floats);
}

void flex_select(const Select* args) {
    const int64_t blocks = (args->channels + CHANNELS - 1) / CHANNELS, floats = args->floats();
#pragma omp parallel for num_threads(args->threads) schedule(dynamic) if (args->threads > 1)
    for (int64_t i = 0; i < args->pieces * blocks; i++) {
        const int64_t first = i % blocks * CHANNELS, rest = args->channels - first;
        float* const memory = args->scratch + omp_get_thread_num() * floats;
        for (int64_t c = 0; c < (rest < CHANNELS ? rest : CHANNELS); c += W)
            select_channels(*args, i / blocks, first + c, int(rest - c < W ? rest - c : W), memory);
    }
}

void flex_conv(const Conv* args) {
    const int64_t blocks = (args->channels + CHANNELS - 1) / CHANNELS;
#pragma omp parallel for num_threads(args->threads) schedule(dynamic) if (args->threads > 1)
    for (int64_t i = 0; i < args->pieces * blocks; i++) {
        const int64_t first = i % blocks * CHANNELS, rest = args->channels - first;
        convolve(*args, i / blocks, first, rest < CHANNELS ? rest : CHANNELS);
    }
}

}  // extern "C"
