// Attention over a paged KV cache: the part of the native kernels that takes longest to compile.
#include "attention.h"

FLEX_SIZE(decode, Decode)
