// Fragments of the matrix instruction m16n8k16 out of tiles in shared memory, for each format.
//
// In all that follows g = lane / 4 and t = lane % 4: the row and the pair of columns of a lane in a
// fragment. Tiles lie row by row, in chunks of 16 bytes whose order within a row is permuted
// (`swizzle`), so that the eight rows that one matrix is read from lie in different banks.
//
// INT8 is widened in registers, exactly, K to f16 and V to bf16 (weights times scales need the
// range of f32). What a lane reads in one piece then belongs to other columns than with 16-bit
// elements:
//   K: columns of a product may be permuted if those of Q are too: see `query_column`.
//   V: of 16 dims, one n-tile has the even ones and the other the odd ones: see `value_dim`.
#pragma once

#include "numbers.cuh"

namespace kvpool {

// The place of chunk `chunk` of row `row`, for rows of ROW_BYTES bytes, read with ldmatrix.
template <int ROW_BYTES>
KV_DEVICE uint32_t swizzle(uint32_t row, uint32_t chunk) {
    static_assert(ROW_BYTES == 64 || ROW_BYTES % 128 == 0, "whole rows of banks");
    return ROW_BYTES == 64 ? chunk ^ ((row >> 1) & 3u) : chunk ^ (row & 7u);
}
// The same for rows of which a lane reads 8 bytes, four neighbouring lanes 32.
template <int ROW_BYTES>
KV_DEVICE uint32_t swizzle_pairs(uint32_t row, uint32_t chunk) {
    static_assert(ROW_BYTES == 64 || ROW_BYTES % 128 == 0, "whole rows of banks");
    return ROW_BYTES == 64 ? chunk ^ (row & 2u) : chunk ^ ((row & 3u) << 1);
}

// Four signed bytes as f16: the halves of the first two, and of the last two. A byte with its sign
// bit flipped, as the low bits of 1024, is 1024 + 128 + x.
KV_DEVICE void bytes_to_f16(uint32_t bytes, uint32_t (&halves)[2]) {
    const uint32_t shifted = bytes ^ 0x80808080u;
    halves[0] = dev::sub_f16x2(dev::permute_bytes(shifted, 0x64646464u, 0x4140), 0x64806480u);
    halves[1] = dev::sub_f16x2(dev::permute_bytes(shifted, 0x64646464u, 0x4342), 0x64806480u);
}
// The signed bytes 0 and 2 of a word as bf16: 128 + its low seven bits, less 128 or, for a negative
// one, 256.
KV_DEVICE uint32_t even_bytes_to_bf16(uint32_t bytes) {
    const uint32_t magnitude = (bytes & 0x007F007Fu) | 0x43004300u;
    const uint32_t negated_base = (bytes & 0x00800080u) | 0xC300C300u;
    return dev::fma_bf16x2(magnitude, 0x3F803F80u, negated_base);
}

// Whether one of two halves is infinite or NaN.
template <class Fmt>
KV_DEVICE bool any_nonfinite(uint32_t halves) {
    constexpr uint32_t EXPONENT = SAME<Fmt, Bf16> ? 0x7F80u : 0x7C00u;
    return (halves & EXPONENT) == EXPONENT || ((halves >> 16) & EXPONENT) == EXPONENT;
}

// The product of scores: K as it is (Q likewise), INT8 as f16.
template <class Fmt>
KV_DEVICE void multiply_scores(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (SAME<Fmt, Bf16>) {
        dev::mma_m16n8k16_bf16(c, a, b0, b1);
    } else {
        dev::mma_m16n8k16_f16(c, a, b0, b1);
    }
}
// The product with values: V as it is (weights likewise), INT8 as bf16.
template <class Fmt>
KV_DEVICE void multiply_values(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (SAME<Fmt, F16>) {
        dev::mma_m16n8k16_f16(c, a, b0, b1);
    } else {
        dev::mma_m16n8k16_bf16(c, a, b0, b1);
    }
}

// Two numbers as halves, and what that leaves out of them as halves once more: together 21 bits
// (f16) or 16 bits (bf16) of each.
template <bool BF16>
KV_DEVICE void split_halves(float x, float y, uint32_t& high, uint32_t& low) {
    high = BF16 ? dev::pack_bf16(x, y) : dev::pack_f16(x, y);
    const dev::Float2 rounded = BF16 ? dev::unpack_bf16(high) : dev::unpack_f16(high);
    const float rest_x = x - rounded.x, rest_y = y - rounded.y;
    low = BF16 ? dev::pack_bf16(rest_x, rest_y) : dev::pack_f16(rest_x, rest_y);
}
// The low halves, without those beside a high half that is not finite: these would make a NaN of an
// infinity.
template <bool BF16>
KV_DEVICE uint32_t low_of_finite(uint32_t high, uint32_t low) {
    constexpr uint32_t EXPONENT = BF16 ? 0x7F80u : 0x7C00u;
    low &= (high & EXPONENT) == EXPONENT ? 0xFFFF0000u : 0xFFFFFFFFu;
    return low & (((high >> 16) & EXPONENT) == EXPONENT ? 0x0000FFFFu : 0xFFFFFFFFu);
}

// The column of the score product that element `dim` of Q and K goes to.
template <class Fmt>
KV_DEVICE uint32_t query_column(uint32_t dim) {
    if constexpr (Fmt::FORMAT == KVPOOL_FORMAT_INT8) {
        // Lane t has bytes 8t to 8t + 7 of 32: four for each of two products.
        const uint32_t lane = dim % 32 / 8, product = dim % 8 / 4, byte = dim % 4;
        return dim / 32 * 32 + 16 * product + 2 * lane + byte % 2 + 8 * (byte / 2);
    } else {
        return dim;
    }
}

}  // namespace kvpool
