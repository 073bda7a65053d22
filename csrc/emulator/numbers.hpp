// Arithmetic of 16-bit floats as the device does it: every operation rounded once, half to even.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace kvpool::emu {

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

inline float f16_to_f32(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
    const uint32_t magnitude = x & 0x7FFFu;
    // The exponents of the two formats are 112 apart; a subnormal half is a subnormal float until
    // it is multiplied.
    uint32_t bits = bits_as<uint32_t>(bits_as<float>(magnitude << 13) * 0x1p112f);
    // Infinity, or NaN with its payload.
    if (magnitude >= 0x7C00u) bits |= 0x7F800000u;
    return bits_as<float>(sign | bits);
}

inline uint16_t f32_to_f16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return 0x7FFFu;
    // 65520 and more, halfway from the largest half to the next power of two, goes to infinity.
    if (magnitude >= 0x477FF000u) return sign | 0x7C00u;
    if (magnitude < 0x38800000u) {
        // Below 2^-14: beside 0.5 a float counts in units of 2^-24, as the subnormal halves do.
        const float beside = bits_as<float>(magnitude) + 0.5f;
        return sign | static_cast<uint16_t>(bits_as<uint32_t>(beside) - 0x3F000000u);
    }
    magnitude += 0xFFFu + (magnitude >> 13 & 1u);
    return sign | static_cast<uint16_t>((magnitude - (112u << 23)) >> 13);
}

inline float bf16_to_f32(uint16_t x) { return bits_as<float>(static_cast<uint32_t>(x) << 16); }

inline uint16_t f32_to_bf16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFFu;
    return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// a + b; when that is not a double, the one of its two neighbours whose last bit is 1. Rounding
// that once more, to at least two bits less, gives what rounding the exact sum would.
inline double add_to_odd(double a, double b) {
    const double sum = a + b;
    if (!isfinite(sum)) return sum;
    const double b_part = sum - a;
    const double error = (a - (sum - b_part)) + (b - b_part);
    uint64_t bits = bits_as<uint64_t>(sum);
    if (error == 0.0 || (bits & 1u) != 0) return sum;
    // The neighbour towards the exact sum.
    const bool away = (error > 0.0) == (sum > 0.0);
    bits = away ? bits + 1 : bits - 1;
    return bits_as<double>(bits);
}

// The same for a float from a double.
inline float to_f32_odd(double x) {
    const float y = static_cast<float>(x);
    if (!isfinite(y) || static_cast<double>(y) == x) {
        if (isinf(y) && isfinite(x)) return copysignf(bits_as<float>(0x7F7FFFFFu), y);
        return y;
    }
    uint32_t bits = bits_as<uint32_t>(y);
    if (fabs(static_cast<double>(y)) > fabs(x)) bits -= 1;
    return bits_as<float>(bits | 1u);
}

inline uint16_t fma_f16(uint16_t a, uint16_t b, uint16_t c) {
    const double product = static_cast<double>(f16_to_f32(a)) * static_cast<double>(f16_to_f32(b));
    return f32_to_f16(to_f32_odd(add_to_odd(product, static_cast<double>(f16_to_f32(c)))));
}

inline uint16_t fma_bf16(uint16_t a, uint16_t b, uint16_t c) {
    const double product =
        static_cast<double>(bf16_to_f32(a)) * static_cast<double>(bf16_to_f32(b));
    return f32_to_bf16(to_f32_odd(add_to_odd(product, static_cast<double>(bf16_to_f32(c)))));
}

// The sum and the product of two halves are exact as doubles, and then as floats rounded to odd.
inline uint16_t add_f16(uint16_t a, uint16_t b) {
    return f32_to_f16(
        to_f32_odd(static_cast<double>(f16_to_f32(a)) + static_cast<double>(f16_to_f32(b))));
}
inline uint16_t mul_f16(uint16_t a, uint16_t b) {
    return f32_to_f16(
        to_f32_odd(static_cast<double>(f16_to_f32(a)) * static_cast<double>(f16_to_f32(b))));
}

// Applies `op` to the low and to the high halves.
template <class Op, class... Words>
inline uint32_t halves(Op op, Words... words) {
    const uint32_t low = op(static_cast<uint16_t>(words)...);
    const uint32_t high = op(static_cast<uint16_t>(words >> 16)...);
    return low | high << 16;
}

inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    uint32_t result = 0;
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t digit = selector >> (4 * i) & 0xFu;
        uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (digit & 7u))) & 0xFFu;
        if ((digit & 8u) != 0) byte = (byte & 0x80u) != 0 ? 0xFFu : 0;
        result |= byte << (8 * i);
    }
    return result;
}

inline int32_t dp4a(uint32_t a, uint32_t b, int32_t c) {
    uint32_t sum = static_cast<uint32_t>(c);
    for (int i = 0; i < 4; ++i) {
        const int32_t x = static_cast<int8_t>(a >> (8 * i));
        const int32_t y = static_cast<int8_t>(b >> (8 * i));
        sum += static_cast<uint32_t>(x * y);
    }
    return static_cast<int32_t>(sum);
}

// Subnormals in and out are zeros, as in the .ftz forms of the device.
inline float flush_subnormal(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
inline float exp2_fast(float x) {
    return flush_subnormal(static_cast<float>(::exp2(static_cast<double>(flush_subnormal(x)))));
}
inline float log2_fast(float x) {
    return flush_subnormal(static_cast<float>(::log2(static_cast<double>(flush_subnormal(x)))));
}

// Rounds half to even; saturates; NaN gives 0.
inline int32_t f32_to_i32(float x) {
    if (isnan(x)) return 0;
    if (x >= 0x1p31f) return INT32_MAX;
    if (x < -0x1p31f) return INT32_MIN;
    return static_cast<int32_t>(lrintf(x));
}

}  // namespace kvpool::emu
