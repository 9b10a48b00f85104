// Attention of prompts: queries of many tokens in one call.
#include "prompt.h"

FLEX_SIZE(prompt, Prompt)
FLEX_SIZE(batch, Batch)
