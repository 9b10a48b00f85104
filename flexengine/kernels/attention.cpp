// Attention over a paged KV cache, in a file of its own, as it takes longest to compile.
#include "attention.h"

FLEX_SIZE(decode, Decode)
