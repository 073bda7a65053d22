// Conversions and 16-bit arithmetic, against slow and obvious ones in exact arithmetic.
#include <math.h>

#include "check.hpp"
#include "csrc/kernels/device.cuh"

namespace {

using namespace kvpool;

// The value of a float format with `exponent_bits` and `fraction_bits`, from its definition.
double value_of(uint32_t bits, int exponent_bits, int fraction_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = static_cast<int>(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
    const double fraction = bits & ((1u << fraction_bits) - 1);
    const double sign = (bits >> (exponent_bits + fraction_bits) & 1u) != 0 ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexp(fraction, 1 - bias - fraction_bits);
    return sign * ldexp(fraction + ldexp(1.0, fraction_bits), exponent - bias - fraction_bits);
}
double f16_value(uint16_t x) { return value_of(x, 5, 10); }
double bf16_value(uint16_t x) { return value_of(x, 8, 7); }

// The nearest 16-bit float to an exact value, by looking: the largest magnitude not above, or the
// next one. Halfway goes to the even one. `Value` gives the value of a pattern; patterns up to
// `infinity` are in order.
template <class Value>
uint16_t nearest(double x, Value value, uint16_t infinity) {
    if (isnan(x)) return 0x7FFF;
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    const double magnitude = fabs(x);
    uint16_t low = 0;
    uint16_t high = infinity;
    while (low < high) {
        const auto middle = static_cast<uint16_t>((low + high + 1) / 2);
        if (value(middle) <= magnitude) {
            low = middle;
        } else {
            high = static_cast<uint16_t>(middle - 1);
        }
    }
    if (low == infinity) return sign | infinity;
    const auto next = static_cast<uint16_t>(low + 1);
    // What would follow the largest number if there were no infinity is what rounding compares
    // with.
    const double above =
        next == infinity ? 2.0 * value(low) - value(static_cast<uint16_t>(low - 1)) : value(next);
    const double down = magnitude - value(low);
    const double up = above - magnitude;
    if (up < down || (up == down && low % 2 == 1)) return sign | next;
    return sign | low;
}
uint16_t nearest_f16(double x) { return nearest(x, f16_value, 0x7C00); }
uint16_t nearest_bf16(double x) { return nearest(x, bf16_value, 0x7F80); }

bool same_f32(float a, double b) {
    return isnan(b) ? isnan(a) : static_cast<double>(a) == b && signbit(a) == signbit(b);
}

}  // namespace

TEST(every_f16_and_bf16_has_its_value) {
    for (uint32_t i = 0; i < 65536; ++i) {
        const auto x = static_cast<uint16_t>(i);
        if (!same_f32(dev::f16_to_f32(x), f16_value(x))) CHECK_EQ(i, 65536u);
        if (!same_f32(dev::bf16_to_f32(x), bf16_value(x))) CHECK_EQ(i, 65536u);
        const dev::Float2 halves = dev::unpack_f16(i << 16 | 0x3C00u);
        if (halves.x != 1.0f || !same_f32(halves.y, f16_value(x))) CHECK_EQ(i, 65536u);
        const dev::Float2 brains = dev::unpack_bf16(i | 0x3F800000u);
        if (brains.y != 1.0f || !same_f32(brains.x, bf16_value(x))) CHECK_EQ(i, 65536u);
    }
}

TEST(every_16_bit_float_comes_back) {
    for (uint32_t i = 0; i < 65536; ++i) {
        const auto x = static_cast<uint16_t>(i);
        const uint16_t f16 = dev::f32_to_f16(dev::f16_to_f32(x));
        const uint16_t bf16 = dev::f32_to_bf16(dev::bf16_to_f32(x));
        CHECK(isnan(f16_value(x)) ? f16 == 0x7FFF : f16 == x);
        CHECK(isnan(bf16_value(x)) ? bf16 == 0x7FFF : bf16 == x);
    }
}

// Every number exactly halfway between two neighbours, its own neighbours in f32, and so for both
// formats.
TEST(rounding_to_16_bits_is_half_to_even) {
    for (uint32_t i = 0; i < 0x7F80; ++i) {
        const auto x = static_cast<uint16_t>(i);
        const auto next = static_cast<uint16_t>(i + 1);
        float halfway[2] = {0.0f, 0.0f};
        if (i < 0x7C00) {
            const double above = next == 0x7C00 ? 65536.0 : f16_value(next);
            halfway[0] = static_cast<float>((f16_value(x) + above) / 2);
        }
        if (next < 0x7F80) halfway[1] = static_cast<float>((bf16_value(x) + bf16_value(next)) / 2);
        for (const float middle : halfway) {
            for (const float y :
                 {middle, nextafterf(middle, INFINITY), nextafterf(middle, 0.0f), -middle}) {
                if (dev::f32_to_f16(y) != nearest_f16(static_cast<double>(y)))
                    CHECK_EQ(dev::f32_to_f16(y), nearest_f16(y));
                if (dev::f32_to_bf16(y) != nearest_bf16(static_cast<double>(y)))
                    CHECK_EQ(dev::f32_to_bf16(y), nearest_bf16(y));
            }
        }
    }
}

TEST(hard_f32_to_16_bits) {
    const float hard[] = {
        0.0f,          -0.0f,       65504.0f,  65519.99f,     65520.0f,     65535.0f,  1e38f,
        3.4028235e38f, INFINITY,    -INFINITY, NAN,           -NAN,         0x1p-24f,  0x1p-25f,
        0x1.8p-25f,    0x1p-26f,    0x1p-14f,  0x1.ffcp-15f,  0x1p-126f,    0x1p-149f, 0x1p-133f,
        0x1p-134f,     0x1.8p-134f, 1e4f,      3.3895314e38f, 3.3961775e38f};
    for (const float x : hard) {
        CHECK_EQ(dev::f32_to_f16(x), nearest_f16(static_cast<double>(x)));
        CHECK_EQ(dev::f32_to_bf16(x), nearest_bf16(static_cast<double>(x)));
        CHECK_EQ(dev::pack_f16(x, 2.0f), 0x40000000u | nearest_f16(static_cast<double>(x)));
        CHECK_EQ(dev::pack_bf16(2.0f, x),
                 0x4000u | static_cast<uint32_t>(nearest_bf16(static_cast<double>(x))) << 16);
    }
    Random random(1);
    for (int i = 0; i < 200000; ++i) {
        const float x = kvpool::emu::bits_as<float>(random.next());
        if (dev::f32_to_f16(x) != nearest_f16(static_cast<double>(x)))
            CHECK_EQ(dev::f32_to_f16(x), nearest_f16(x));
        if (dev::f32_to_bf16(x) != nearest_bf16(static_cast<double>(x)))
            CHECK_EQ(dev::f32_to_bf16(x), nearest_bf16(x));
    }
}

// The expected sum must itself be exact in double precision: where it is not, the next test has its
// cases.
TEST(arithmetic_of_halves_rounds_once) {
    Random random(2);
    for (int i = 0; i < 200000; ++i) {
        uint16_t a = static_cast<uint16_t>(random.next());
        uint16_t b = static_cast<uint16_t>(random.next());
        uint16_t c = static_cast<uint16_t>(random.next());
        if (i % 2 == 0) {
            // Of like size, so that the sum cancels.
            a = static_cast<uint16_t>((a & 0x83FFu) | 0x3C00u);
            b = static_cast<uint16_t>((b & 0x83FFu) | 0x3C00u);
            c = static_cast<uint16_t>((c & 0x83FFu) | 0x3C00u);
        }
        const double x = f16_value(a);
        const double y = f16_value(b);
        const double z = f16_value(c);
        CHECK_EQ(dev::add_f16x2(a, b) & 0xFFFFu, static_cast<uint32_t>(nearest_f16(x + y)));
        CHECK_EQ(dev::sub_f16x2(a, b) & 0xFFFFu, static_cast<uint32_t>(nearest_f16(x - y)));
        CHECK_EQ(dev::mul_f16x2(a, b) & 0xFFFFu, static_cast<uint32_t>(nearest_f16(x * y)));
        const double product = x * y;
        const double sum = product + z;
        // Exact when nothing is left over, either way round.
        if (isnan(sum) || (sum - product == z && sum - z == product)) {
            CHECK_EQ(dev::fma_f16x2(a, b, c) & 0xFFFFu, static_cast<uint32_t>(nearest_f16(sum)));
        }
        const double bx = bf16_value(a);
        const double by = bf16_value(b);
        const double bz = bf16_value(c);
        const double bsum = bx * by + bz;
        if (isnan(bsum) || (bsum - bx * by == bz && bsum - bz == bx * by)) {
            CHECK_EQ(dev::fma_bf16x2(a, b, c) & 0xFFFFu, static_cast<uint32_t>(nearest_bf16(bsum)));
        }
    }
}

TEST(fma_of_halves_sees_what_is_far_below) {
    // 32768 + 16 is halfway between two halves; a product far below decides.
    const uint16_t big = nearest_f16(32768.0);
    const uint16_t step = nearest_f16(16.0);
    const uint16_t one = nearest_f16(1.0);
    const uint16_t tiny = 0x0001;
    CHECK_EQ(dev::fma_f16x2(step, one, big) & 0xFFFFu, static_cast<uint32_t>(big));
    // (16 + 2^-6) + 32768, where 16 * (1 + 2^-10) is exact.
    const uint16_t above = nearest_f16(1.0 + 0x1p-10);
    CHECK_EQ(dev::fma_f16x2(step, above, big) & 0xFFFFu, static_cast<uint32_t>(big) + 1);
    // 2^-48 beside 65504 changes nothing, and does not turn a tie the wrong way.
    CHECK_EQ(dev::fma_f16x2(tiny, tiny, big) & 0xFFFFu, static_cast<uint32_t>(big));
    // bf16: 1 + 2^-8 is a tie, which goes to 1; a hair more goes up, whatever the distance.
    const uint16_t bf_one = nearest_bf16(1.0);
    const uint16_t bf_half_step = nearest_bf16(0x1p-8);
    CHECK_EQ(dev::fma_bf16x2(bf_half_step, bf_one, bf_one) & 0xFFFFu,
             static_cast<uint32_t>(bf_one));
    const uint16_t bf_hair = nearest_bf16(0x1p-8 + 0x1p-15);
    CHECK_EQ(dev::fma_bf16x2(bf_hair, bf_one, bf_one) & 0xFFFFu, static_cast<uint32_t>(bf_one) + 1);
    // A tie of the sum in double precision that a product 2^-200 below must break: rounded to odd,
    // not to even.
    CHECK(kvpool::emu::add_to_odd(1.0 + 0x1p-52, 0x1p-200) == 1.0 + 0x1p-52);
    CHECK(kvpool::emu::add_to_odd(1.0, 0x1p-200) == 1.0 + 0x1p-52);
    CHECK(kvpool::emu::add_to_odd(1.0, -0x1p-200) == 1.0 - 0x1p-53);
    CHECK(kvpool::emu::to_f32_odd(1.0 + 0x1p-40) == 1.0f + 0x1p-23f);
    CHECK(kvpool::emu::to_f32_odd(-1.0 + 0x1p-40) == -1.0f + 0x1p-24f);
    CHECK(kvpool::emu::to_f32_odd(1e300) == 3.4028234663852886e38f);
}

TEST(high_and_low_halves_do_not_mix) {
    const uint32_t a = dev::pack_f16(1.5f, -2.0f);
    const uint32_t b = dev::pack_f16(3.0f, 0.25f);
    CHECK_EQ(dev::add_f16x2(a, b), dev::pack_f16(4.5f, -1.75f));
    CHECK_EQ(dev::sub_f16x2(a, b), dev::pack_f16(-1.5f, -2.25f));
    CHECK_EQ(dev::mul_f16x2(a, b), dev::pack_f16(4.5f, -0.5f));
    CHECK_EQ(dev::fma_f16x2(a, b, b), dev::pack_f16(7.5f, -0.25f));
    CHECK_EQ(dev::fma_bf16x2(dev::pack_bf16(1.5f, 2.0f), dev::pack_bf16(2.0f, 4.0f),
                             dev::pack_bf16(1.0f, -1.0f)),
             dev::pack_bf16(4.0f, 7.0f));
}

TEST(bytes_and_integers) {
    CHECK_EQ(dev::permute_bytes(0x03020100u, 0x07060504u, 0x7531u), 0x07050301u);
    CHECK_EQ(dev::permute_bytes(0x80FF7F00u, 0x00000000u, 0xBA98u), 0xFFFF0000u);
    // The trick that makes halves of bytes: 0x6400 | b is 1024 + b.
    CHECK_EQ(dev::permute_bytes(0x000000AAu, 0x64646464u, 0x4040u), 0x64AA64AAu);
    CHECK_EQ(dev::dp4a(0x80FF7F01u, 0x7F027F80u, 10), 10 - 128 + 127 * 127 - 2 - 128 * 127);
    CHECK_EQ(dev::f32_to_i32(2.5f), 2);
    CHECK_EQ(dev::f32_to_i32(3.5f), 4);
    CHECK_EQ(dev::f32_to_i32(-2.5f), -2);
    CHECK_EQ(dev::f32_to_i32(3e9f), INT32_MAX);
    CHECK_EQ(dev::f32_to_i32(-INFINITY), INT32_MIN);
    CHECK_EQ(dev::f32_to_i32(NAN), 0);
}

TEST(powers_and_logarithms) {
    CHECK(dev::exp2_fast(0.0f) == 1.0f);
    CHECK(dev::exp2_fast(-INFINITY) == 0.0f);
    CHECK(dev::exp2_fast(INFINITY) == INFINITY);
    CHECK(isnan(dev::exp2_fast(NAN)));
    CHECK(dev::exp2_fast(-126.0f) == 0x1p-126f);
    // Subnormals are zeros.
    CHECK(dev::exp2_fast(-127.0f) == 0.0f);
    CHECK(dev::log2_fast(8.0f) == 3.0f);
    CHECK(dev::log2_fast(0.0f) == -INFINITY);
    CHECK(isnan(dev::log2_fast(-1.0f)));
    // Rounded once: the product alone would lose the 1.
    CHECK(dev::fma_f32(1.0f + 0x1p-23f, 1.0f - 0x1p-23f, -1.0f) == -0x1p-46f);
    CHECK(dev::max_f32(NAN, 1.0f) == 1.0f);
    CHECK(dev::min_f32(2.0f, NAN) == 2.0f);
}
