// The matrix instructions, from the fragment layouts in the PTX manual ("Matrix Fragments for
// mma.m16n8k…").
//
// A lane's words are gathered into plain matrices, multiplied, and spread again. Products of halves
// are exact; their sum with the accumulator is taken in double precision, in ascending k, and
// rounded to a float once: the device adds in an order and with a rounding of its own, which differ
// from this in the last bits.
#pragma once

#include <stdint.h>
#include <string.h>

#include "engine.hpp"
#include "numbers.hpp"

namespace kvpool::emu {

// Where the operands of an mma lie in a lane's words.
constexpr uint32_t MMA_A = 0;
constexpr uint32_t MMA_B = 4;
constexpr uint32_t MMA_C = 6;
constexpr uint32_t MMA_RESULT = 10;

using Exchange = uint32_t[LANES][EXCHANGE_WORDS];

// Row and column of c[i] of a lane.
inline uint32_t c_row(uint32_t lane, uint32_t i) { return lane / 4 + 8 * (i / 2); }
inline uint32_t c_column(uint32_t lane, uint32_t i) { return 2 * (lane % 4) + i % 2; }

// The two kinds of halves.
struct HalfF16 {
    static float value(uint32_t bits) { return f16_to_f32(static_cast<uint16_t>(bits)); }
};
struct HalfBf16 {
    static float value(uint32_t bits) { return bf16_to_f32(static_cast<uint16_t>(bits)); }
};

// The bytes of the target's vectors.
#if defined(__AVX2__)
constexpr size_t VECTOR_BYTES = 32;
#else
constexpr size_t VECTOR_BYTES = 16;
#endif

// c [16][8] += a [16][K] b [K][8], in ascending k, vector by vector: compilers make little of the
// plain loops.
template <uint32_t K, class T>
inline void multiply(const T (&a)[16][K], const T (&b)[K][8], T (&c)[16][8]) {
    // An alias would lose the attribute.
    typedef T Vector __attribute__((vector_size(VECTOR_BYTES)));
    constexpr uint32_t WIDTH = VECTOR_BYTES / sizeof(T);
    for (uint32_t row = 0; row < 16; ++row) {
        Vector sums[8 / WIDTH];
        memcpy(sums, c[row], sizeof sums);
        for (uint32_t k = 0; k < K; ++k) {
            Vector parts[8 / WIDTH];
            memcpy(parts, b[k], sizeof parts);
            for (uint32_t i = 0; i < 8 / WIDTH; ++i) sums[i] += a[row][k] * parts[i];
        }
        memcpy(c[row], sums, sizeof sums);
    }
}

// c += a b over K halves.
template <uint32_t K, class Half>
inline void multiply_halves(Exchange& lanes) {
    double a[16][K];
    double b[K][8];
    double c[16][8];
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        const uint32_t* words = lanes[lane];
        const uint32_t group = lane / 4;
        const uint32_t pair = 2 * (lane % 4);
        for (uint32_t r = 0; r < K / 4; ++r) {
            const uint32_t row = group + 8 * (r % 2);
            const uint32_t k = pair + 8 * (r / 2);
            a[row][k] = static_cast<double>(Half::value(words[MMA_A + r]));
            a[row][k + 1] = static_cast<double>(Half::value(words[MMA_A + r] >> 16));
        }
        for (uint32_t r = 0; r < K / 8; ++r) {
            const uint32_t k = pair + 8 * r;
            b[k][group] = static_cast<double>(Half::value(words[MMA_B + r]));
            b[k + 1][group] = static_cast<double>(Half::value(words[MMA_B + r] >> 16));
        }
        for (uint32_t i = 0; i < 4; ++i) {
            c[c_row(lane, i)][c_column(lane, i)] =
                static_cast<double>(bits_as<float>(words[MMA_C + i]));
        }
    }
    multiply(a, b, c);
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        for (uint32_t i = 0; i < 4; ++i) {
            const float sum = static_cast<float>(c[c_row(lane, i)][c_column(lane, i)]);
            lanes[lane][MMA_RESULT + i] = bits_as<uint32_t>(sum);
        }
    }
}

// The low byte with its sign, as a word.
inline uint32_t signed_byte(uint32_t bits) {
    return static_cast<uint32_t>(static_cast<int32_t>(static_cast<int8_t>(bits)));
}

// c += a b over 32 signed bytes; sums wrap.
inline void multiply_bytes(Exchange& lanes) {
    // Signed numbers as words: their products and sums are the same, modulo 2^32.
    uint32_t a[16][32];
    uint32_t b[32][8];
    uint32_t c[16][8];
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        const uint32_t* words = lanes[lane];
        const uint32_t group = lane / 4;
        const uint32_t four = 4 * (lane % 4);
        for (uint32_t byte = 0; byte < 4; ++byte) {
            for (uint32_t r = 0; r < 4; ++r) {
                a[group + 8 * (r % 2)][four + 16 * (r / 2) + byte] =
                    signed_byte(words[MMA_A + r] >> (8 * byte));
            }
            for (uint32_t r = 0; r < 2; ++r) {
                b[four + 16 * r + byte][group] = signed_byte(words[MMA_B + r] >> (8 * byte));
            }
        }
        for (uint32_t i = 0; i < 4; ++i) c[c_row(lane, i)][c_column(lane, i)] = words[MMA_C + i];
    }
    multiply(a, b, c);
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        for (uint32_t i = 0; i < 4; ++i)
            lanes[lane][MMA_RESULT + i] = c[c_row(lane, i)][c_column(lane, i)];
    }
}

// Loads COUNT matrices of 8 x 8 halves; a lane's words hold its row's address before and its
// elements after.
template <uint32_t COUNT, bool TRANSPOSED>
inline void load_matrices(Exchange& lanes) {
    // rows: [COUNT][8][8]
    uint16_t rows[COUNT][8][8];
    for (uint32_t i = 0; i < COUNT; ++i) {
        for (uint32_t row = 0; row < 8; ++row) {
            const void* address;
            memcpy(&address, lanes[8 * i + row], sizeof address);
            memcpy(rows[i][row], address, 16);
        }
    }
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        const uint32_t row = lane / 4;
        const uint32_t column = 2 * (lane % 4);
        for (uint32_t i = 0; i < COUNT; ++i) {
            const uint32_t low = TRANSPOSED ? rows[i][column][row] : rows[i][row][column];
            const uint32_t high = TRANSPOSED ? rows[i][column + 1][row] : rows[i][row][column + 1];
            lanes[lane][i] = low | high << 16;
        }
    }
}

}  // namespace kvpool::emu
