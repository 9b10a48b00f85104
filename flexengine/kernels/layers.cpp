// What models do beside attention: products, norms, gates.
#include "elementwise.h"
#include "encoded.h"

FLEX_SIZE(linear, Linear)
FLEX_SIZE(product, Product)
FLEX_SIZE(prompt, Prompt)
FLEX_SIZE(norm, Norm)
FLEX_SIZE(rotate, Rotate)
FLEX_SIZE(gate, Gate)

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

}  // extern "C"
