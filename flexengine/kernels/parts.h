// Parts of appending to a KV cache and of decode attention, for steps.h: each file of these kernels compiles its own.
#pragma once
#include <cstdint>

extern "C" {

// append: an Append of cache.h. Appends token t, of flex_append_tokens tokens.
int64_t flex_append_tokens(const void* append);
void flex_append_token(const void* append, int64_t t);

// decode: a Decode of rows.h with memory. `plan` once; then the blocks, in any order; then the merges, in any order.
void flex_decode_plan(const void* decode);
int64_t flex_decode_blocks(const void* decode);
void flex_decode_block(const void* decode, int64_t w);
int64_t flex_decode_merges(const void* decode);
void flex_decode_merge(const void* decode, int64_t w);

}  // extern "C"
