// Attention of prompts: the queries of many tokens at once.
#include "prompt.h"

FLEX_SIZE(prompt, Prompt)
