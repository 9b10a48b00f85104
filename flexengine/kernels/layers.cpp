// All kernels of a layer except attention: products, norms, rotary positions, gates, experts.
#include "experts.h"

FLEX_SIZE(linear, Linear)
FLEX_SIZE(product, Product)
FLEX_SIZE(norm, Norm)
FLEX_SIZE(rotate, Rotate)
FLEX_SIZE(gate, Gate)
FLEX_SIZE(add, Add)
FLEX_SIZE(narrow, Narrow)
FLEX_SIZE(step, Step)

extern "C" {

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
