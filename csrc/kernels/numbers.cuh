// Element types, scales and quantisation: the twin of src/device/quant.rs and convert.rs.
#pragma once

#include "device.cuh"
#include "params.h"

// Before a loop: unroll it `n` times; 1 leaves it as it is.
#if defined(KVPOOL_EMULATED)
#define KV_UNROLL_BY(n)
#else
#define KV_PRAGMA(text) _Pragma(#text)
#define KV_UNROLL_BY(n) KV_PRAGMA(unroll n)
#endif

namespace kvpool {

constexpr float NEG_INFINITY = -__builtin_huge_valf();
constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float LN_2 = 0.69314718055994530942f;
// The largest q.
constexpr float Q_MAX = 127.0f;
// 1.5 * 2^23: added to a number of small magnitude, it leaves the number, rounded half to even, in
// the low bits.
constexpr float ROUND = 12582912.0f;
constexpr uint32_t INFINITY_BITS = 0x7F800000u;
constexpr float F32_MAX = 3.40282346638528859812e38f;
constexpr float F32_MIN_NORMAL = 1.17549435082228750797e-38f;

// Element types, with the bytes of one and how four or eight in a row are read and written.
struct F32 {
    static constexpr uint32_t BYTES = 4;
    static constexpr uint32_t FORMAT = KVPOOL_FORMAT_F32;
};
struct F16 {
    static constexpr uint32_t BYTES = 2;
    static constexpr uint32_t FORMAT = KVPOOL_FORMAT_F16;
};
struct Bf16 {
    static constexpr uint32_t BYTES = 2;
    static constexpr uint32_t FORMAT = KVPOOL_FORMAT_BF16;
};
// A scale for a whole vector, stored or static.
struct Int8 {
    static constexpr uint32_t BYTES = 1;
    static constexpr uint32_t FORMAT = KVPOOL_FORMAT_INT8;
};
// A scale for every 32 elements.
struct Int8Groups : Int8 {};

template <class A, class B>
constexpr bool SAME = false;
template <class A>
constexpr bool SAME<A, A> = true;

// Four elements as they lie in memory.
template <class E>
struct Quad {
    using Raw = dev::Bytes16;
};
template <>
struct Quad<F16> {
    using Raw = dev::Bytes8;
};
template <>
struct Quad<Bf16> {
    using Raw = dev::Bytes8;
};
template <>
struct Quad<Int8> {
    using Raw = uint32_t;
};
template <>
struct Quad<Int8Groups> {
    using Raw = uint32_t;
};

KV_DEVICE float signed_byte(uint32_t word, int index) {
    return dev::i32_to_f32(static_cast<int32_t>(word << (24 - 8 * index)) >> 24);
}

// Widens four elements, exactly.
KV_DEVICE void widen(dev::Bytes16 raw, float (&x)[4], F32) {
    KV_UNROLL
    for (int i = 0; i < 4; ++i) {
        x[i] = dev::bits_to_f32(raw.word[i]);
    }
}
KV_DEVICE void widen(dev::Bytes8 raw, float (&x)[4], F16) {
    const dev::Float2 a = dev::unpack_f16(raw.word[0]), b = dev::unpack_f16(raw.word[1]);
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
}
KV_DEVICE void widen(dev::Bytes8 raw, float (&x)[4], Bf16) {
    const dev::Float2 a = dev::unpack_bf16(raw.word[0]), b = dev::unpack_bf16(raw.word[1]);
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
}
KV_DEVICE void widen(uint32_t raw, float (&x)[4], Int8) {
    KV_UNROLL
    for (int i = 0; i < 4; ++i) {
        x[i] = signed_byte(raw, i);
    }
}

// Four elements of a tensor whose type is known when the kernel runs.
KV_DEVICE void load_tensor_quad(uint64_t tensor, uint64_t element, uint32_t dtype, float (&x)[4]) {
    if (dtype == KVPOOL_DTYPE_F32) {
        widen(dev::load_readonly(dev::at_address<const dev::Bytes16>(tensor + element * 4)), x,
              F32{});
        return;
    }
    const auto raw = dev::load_readonly(dev::at_address<const dev::Bytes8>(tensor + element * 2));
    if (dtype == KVPOOL_DTYPE_F16) {
        widen(raw, x, F16{});
    } else {
        widen(raw, x, Bf16{});
    }
}
KV_DEVICE void store_tensor_quad(uint64_t tensor, uint64_t element, uint32_t dtype,
                                 const float (&x)[4]) {
    if (dtype == KVPOOL_DTYPE_F32) {
        dev::Bytes16 raw;
        KV_UNROLL
        for (int i = 0; i < 4; ++i) {
            raw.word[i] = dev::f32_to_bits(x[i]);
        }
        dev::store_global(dev::at_address<dev::Bytes16>(tensor + element * 4), raw);
        return;
    }
    dev::Bytes8 raw;
    if (dtype == KVPOOL_DTYPE_F16) {
        raw.word[0] = dev::pack_f16(x[0], x[1]);
        raw.word[1] = dev::pack_f16(x[2], x[3]);
    } else {
        raw.word[0] = dev::pack_bf16(x[0], x[1]);
        raw.word[1] = dev::pack_bf16(x[2], x[3]);
    }
    dev::store_global(dev::at_address<dev::Bytes8>(tensor + element * 2), raw);
}

// An E8M8 scale (bits 30..15 of a non-negative f32) as f32, exactly.
KV_DEVICE float scale_to_f32(uint16_t scale) {
    return dev::bits_to_f32(static_cast<uint32_t>(scale) << 15);
}
// The smallest E8M8 number that is not below `value`; 0 below the smallest normal f32.
KV_DEVICE uint16_t scale_round_up(float value) {
    if (value < F32_MIN_NORMAL) {
        return 0;
    }
    return static_cast<uint16_t>((dev::f32_to_bits(value) + 0x7FFFu) >> 15);
}

// q = round(x / scale), clamped, NaN to 0; the scale is not 0.
KV_DEVICE uint32_t quantize(float x, float scale) {
    // A division, not a product with the reciprocal: only it rounds every tie as promised.
    float y = x / scale;
    y = y > Q_MAX ? Q_MAX : y;
    y = y < -Q_MAX ? -Q_MAX : y;
    y = x != x ? 0.0f : y;
    return dev::f32_to_bits(y + ROUND) & 0xFFu;
}

// scale * q, and the largest finite number where that is beyond it.
KV_DEVICE float dequantize(float q, float scale) {
    const float x = q * scale;
    return dev::min_f32(dev::max_f32(x, -F32_MAX), F32_MAX);
}

// What is subtracted from scores: their maximum, and 0 where that is -infinity, so that the
// exponential of a score of -infinity is 0 and not NaN.
KV_DEVICE float finite_base(float max) { return max == NEG_INFINITY ? 0.0f : max; }

}  // namespace kvpool
