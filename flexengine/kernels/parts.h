// Parts of appending to a KV cache and of attention, for steps.h: each file of these kernels compiles its own.
#pragma once
#include <cstdint>

extern "C" {

// append: an Append of cache.h. Appends some tokens, in any order of the blocks.
int64_t flex_append_blocks(const void* append);
void flex_append_block(const void* append, int64_t w);

// decode: a Decode of rows.h with memory. `plan` once; then the blocks, in any order; then the merges, in any order.
void flex_decode_plan(const void* decode);
int64_t flex_decode_blocks(const void* decode);
void flex_decode_block(const void* decode, int64_t w);
int64_t flex_decode_merges(const void* decode);
void flex_decode_merge(const void* decode, int64_t w);

// prompts: a Prompts of prompt.h. `plan` once; then the blocks, in any order.
void flex_prompts_plan(const void* prompts);
int64_t flex_prompts_blocks(const void* prompts);
void flex_prompts_block(const void* prompts, int64_t w);

}  // extern "C"
