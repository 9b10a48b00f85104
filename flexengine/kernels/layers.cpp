// All kernels of a layer except attention: products, norms, rotary positions, gates, experts and their choice.
#include "experts.h"
#include "route.h"

FLEX_SIZE(linear, Linear)
FLEX_SIZE(layout, Layout)
FLEX_SIZE(product, Product)
FLEX_SIZE(norm, Norm)
FLEX_SIZE(rotate, Rotate)
FLEX_SIZE(gate, Gate)
FLEX_SIZE(add, Add)
FLEX_SIZE(narrow, Narrow)
FLEX_SIZE(step, Step)

namespace {

// Part of a call of several layers: `count` steps, a choice of experts, or the experts.
enum Part : int64_t { STEPS_OF_LAYER = 0, CHOICE = 1, MIXTURE = 2 };
struct Item {
    const void* call;
    int64_t kind, count;
};
static_assert(sizeof(Item) == 3 * sizeof(int64_t), "rows of the array of NativeKernels.run_items");

}  // namespace

extern "C" {

// Runs items one after the other. Returns 0, or the number + 1 of an item that chose an expert which does not exist;
// those after it do not run.
int64_t flex_items(const Item* items, int64_t count, int32_t threads) {
    for (const Item* item = items; item < items + count; item++) {
        if (item->kind == STEPS_OF_LAYER) flex_run((const Step*)item->call, item->count, threads);
        if (item->kind == CHOICE) flex_route((const Route*)item->call);
        if (item->kind == MIXTURE && flex_experts((const Experts*)item->call)) return item - items + 1;
    }
    return 0;
}

// Returns the vector width in bits of the compiled code: 512, 256 or 0 (portable).
int32_t flex_simd() {
#if defined(FLEX_AVX512)
    return 512;
#elif defined(FLEX_AVX2)
    return 256;
#else
    return 0;
#endif
}

}  // extern "C"
