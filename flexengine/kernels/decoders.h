// Decoders of block types, which blocks.cpp compiles for quantized_gemm.h.
#pragma once
#include <cstdint>

constexpr int32_t PARTED = 32;  // numbers of types in parted.cpp are less by this
constexpr int64_t MOST_ROWS = 512;  // of x, in a call of flex_block_dots
#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
constexpr int BLOCK_ROWS = 6;  // of a tile: two registers of sums and two of products of scales for each
#else
constexpr int BLOCK_ROWS = 3;
#endif

// Where a matrix of several tensors (parted.cpp) has them, in bytes from its beginning; codes come first. row_bytes: of a
// row of codes. down, right: rows and columns of a cell, which share a scale and a zero point. cells: in a row of the
// grid. less: subtracted from stored zero points. flip: combined with codes of 8 bits by exclusive or. nested: blocks
// with a scale are 2^nested for each scale of scales. offset: of nested scales, bits of a float.
struct Layout {
    int64_t columns, row_bytes, down, right, cells, scales, zeros, more, order;
    int64_t scale_kind, zero_kind, whole_kind, less, flip, nested, offset;
};

// A matrix whose rows follow each other in blocks, or, with a layout, one of several tensors. columns is not read of these.
struct Matrix {
    const uint8_t* data;
    int64_t rows, columns;
    const Layout* layout;
};

extern "C" {

// Decodes columns begin to end of rows c to c + W of w into a tile of units [end - begin, W], `width` floats from one
// unit to the next; rows beyond the last one are copies of it. begin and end are multiples of 64, or end is the last
// column. N * W rows are read one after the other before the next columns are.
typedef void (*BlockDecode)(const Matrix& w, int64_t c, int N, int64_t begin, int64_t end, int64_t width, float* tile);

// Returns the decoder of a type, by its number in blocks.cpp, for units of numbers or of pairs of bf16.
BlockDecode flex_block_decoder(int32_t kind, int32_t pairs);
BlockDecode flex_parted_decoder(int32_t kind, int32_t pairs);  // kind: a number in parted.cpp

// Decodes rows `ids` of w to out [n, columns]. w.rows is not read.
void flex_block_rows(int32_t kind, const Matrix& w, const int64_t* ids, int64_t n, float* out, int32_t threads);

// A product by int8: out = residual + (bias + x w^T). x is rounded as `Rounded` of quantized_gemm.h says: in tiles of
// nearly equal height, at most BLOCK_ROWS rows.
struct BlockProduct {
    Matrix w;
    const float* worths;
    const uint8_t* codes;
    const float *bias, *residual;
    float* out;
    int64_t rows, out_row, groups, tiles;
};

// Computes tiles t to end of rows of out, at columns c to stop.
void flex_block_dots(int32_t kind, const BlockProduct& a, int64_t t, int64_t end, int64_t c, int64_t stop);
void flex_parted_dots(int32_t kind, const BlockProduct& a, int64_t t, int64_t end, int64_t c, int64_t stop);

}  // extern "C"
