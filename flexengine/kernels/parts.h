// Parts of appending to a KV cache and of attention, for steps.h: each file of these kernels compiles its own.
#pragma once
#include <cstdint>

extern "C" {

// Steps with the same memory may all be planned before one of them runs, so a plan depends on sizes and page tables only.

// append: an Append of cache.h. A block has some tokens. The blocks, in any order.
int64_t flex_append_blocks(const void* append);
void flex_append_block(const void* append, int64_t w);

// decode: a Decode of rows.h with memory. `plan` once; then the blocks, in any order; then the merges, in any order.
void flex_decode_plan(const void* decode);
int64_t flex_decode_blocks(const void* decode);
void flex_decode_block(const void* decode, int64_t w);
int64_t flex_decode_merges(const void* decode);
void flex_decode_merge(const void* decode, int64_t w);

// batch: a Batch of prompt.h. `plan` once; then the blocks, in any order.
void flex_batch_plan(const void* batch);
int64_t flex_batch_blocks(const void* batch);
void flex_batch_block(const void* batch, int64_t w);

}  // extern "C"
