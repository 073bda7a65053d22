// The matrix instructions against plain loops. Fragments are filled here element by element, from
// the formulas of the PTX manual for (row, column) of element i of a lane, and not as
// emulator/matrix.hpp has them.
#include <math.h>

#include <vector>

#include "check.hpp"
#include "csrc/emulator/launch.hpp"
#include "csrc/kernels/device.cuh"

using namespace kvpool::dev;
using kvpool::emu::Array;
using kvpool::emu::Device;
using kvpool::emu::Fault;

namespace {

enum class Form : uint32_t { F16K16, Bf16K16, F16K8, Bf16K8, S8K32 };

struct MmaParams {
    // a: [16][k], b: [k][8], c: [16][8], floats or int32
    uint64_t a, b, c;
    uint32_t k;
    Form form;
};

// Element i of A of a lane, halves: "row = groupID for (i % 4) < 2, else groupID + 8;
// col = threadID_in_group * 2 + (i & 1), and + 8 for i >= 4".
uint32_t a_row(uint32_t lane, uint32_t i) { return lane / 4 + (i % 4 < 2 ? 0 : 8); }
uint32_t a_column(uint32_t lane, uint32_t i) { return lane % 4 * 2 + (i & 1) + (i >= 4 ? 8 : 0); }
// Of B: "row = threadID_in_group * 2 + (i & 1), and + 8 for i >= 2; col = groupID".
uint32_t b_row(uint32_t lane, uint32_t i) { return lane % 4 * 2 + (i & 1) + (i >= 2 ? 8 : 0); }
// Signed bytes, A: "row = groupID for i < 4 or 8 <= i < 12, else groupID + 8;
// col = threadID_in_group * 4 + (i & 3), and + 16 for i >= 8".
uint32_t a8_row(uint32_t lane, uint32_t i) {
    return lane / 4 + (i < 4 || (i >= 8 && i < 12) ? 0 : 8);
}
uint32_t a8_column(uint32_t lane, uint32_t i) { return lane % 4 * 4 + (i & 3) + (i >= 8 ? 16 : 0); }
// B: "row = threadID_in_group * 4 + (i & 3), and + 16 for i >= 4; col = groupID".
uint32_t b8_row(uint32_t lane, uint32_t i) { return lane % 4 * 4 + (i & 3) + (i >= 4 ? 16 : 0); }
// C: "row = groupID for i < 2, else groupID + 8; col = threadID_in_group * 2 + (i & 1)".
uint32_t cc_row(uint32_t lane, uint32_t i) { return lane / 4 + (i < 2 ? 0 : 8); }
uint32_t cc_column(uint32_t lane, uint32_t i) { return lane % 4 * 2 + (i & 1); }

KV_KERNEL(emu_test_mma, MmaParams, 32) {
    const float* a = at_address<const float>(p.a);
    const float* b = at_address<const float>(p.b);
    const uint32_t lane = lane_index();
    uint32_t a4[4] = {};
    uint32_t b2[2] = {};
    if (p.form == Form::S8K32) {
        for (uint32_t i = 0; i < 16; ++i) {
            const float x = load_global(a + a8_row(lane, i) * 32 + a8_column(lane, i));
            a4[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(static_cast<int8_t>(x)))
                         << (8 * (i % 4));
        }
        for (uint32_t i = 0; i < 8; ++i) {
            const float x = load_global(b + b8_row(lane, i) * 8 + lane / 4);
            b2[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(static_cast<int8_t>(x)))
                         << (8 * (i % 4));
        }
        int32_t c[4];
        int32_t* c_at = at_address<int32_t>(p.c);
        for (uint32_t i = 0; i < 4; ++i)
            c[i] = load_global(c_at + cc_row(lane, i) * 8 + cc_column(lane, i));
        mma_m16n8k32_s8(c, a4, b2[0], b2[1]);
        for (uint32_t i = 0; i < 4; ++i)
            store_global(c_at + cc_row(lane, i) * 8 + cc_column(lane, i), c[i]);
        return;
    }
    const bool is_f16 = p.form == Form::F16K16 || p.form == Form::F16K8;
    for (uint32_t i = 0; i < p.k / 2; ++i) {
        const float x = load_global(a + a_row(lane, i) * p.k + a_column(lane, i));
        a4[i / 2] |= static_cast<uint32_t>(is_f16 ? f32_to_f16(x) : f32_to_bf16(x))
                     << (16 * (i % 2));
    }
    for (uint32_t i = 0; i < p.k / 4; ++i) {
        const float x = load_global(b + b_row(lane, i) * 8 + lane / 4);
        b2[i / 2] |= static_cast<uint32_t>(is_f16 ? f32_to_f16(x) : f32_to_bf16(x))
                     << (16 * (i % 2));
    }
    float c[4];
    float* c_at = at_address<float>(p.c);
    for (uint32_t i = 0; i < 4; ++i)
        c[i] = load_global(c_at + cc_row(lane, i) * 8 + cc_column(lane, i));
    const uint32_t a2[2] = {a4[0], a4[1]};
    if (p.form == Form::F16K16) mma_m16n8k16_f16(c, a4, b2[0], b2[1]);
    if (p.form == Form::Bf16K16) mma_m16n8k16_bf16(c, a4, b2[0], b2[1]);
    if (p.form == Form::F16K8) mma_m16n8k8_f16(c, a2, b2[0]);
    if (p.form == Form::Bf16K8) mma_m16n8k8_bf16(c, a2, b2[0]);
    for (uint32_t i = 0; i < 4; ++i)
        store_global(c_at + cc_row(lane, i) * 8 + cc_column(lane, i), c[i]);
}

uint32_t depth_of(Form form) {
    return form == Form::S8K32 ? 32 : form == Form::F16K8 || form == Form::Bf16K8 ? 8 : 16;
}

// Whole numbers: every order and rounding of the sum gives the same.
void check_whole_numbers(Form form) {
    const uint32_t k = depth_of(form);
    for (uint64_t seed = 0; seed < 4; ++seed) {
        Device device(1 << 20);
        device.seed = seed;
        Random random(seed + 7);
        Array<float> a = device.array<float>(16 * k);
        Array<float> b = device.array<float>(k * 8);
        Array<int32_t> whole = device.array<int32_t>(16 * 8);
        Array<float> c = device.array<float>(16 * 8);
        const int limit = form == Form::S8K32 ? 128 : 32;
        for (size_t i = 0; i < a.size(); ++i)
            a[i] = static_cast<float>(random.range(-limit, limit));
        for (size_t i = 0; i < b.size(); ++i)
            b[i] = static_cast<float>(random.range(-limit, limit));
        for (size_t i = 0; i < c.size(); ++i) {
            whole[i] = random.range(-1000, 1000);
            c[i] = static_cast<float>(whole[i]);
        }
        std::vector<int64_t> expected(16 * 8);
        for (uint32_t row = 0; row < 16; ++row) {
            for (uint32_t column = 0; column < 8; ++column) {
                int64_t sum = whole[row * 8 + column];
                for (uint32_t i = 0; i < k; ++i) {
                    sum += static_cast<int64_t>(a[row * k + i]) *
                           static_cast<int64_t>(b[i * 8 + column]);
                }
                expected[row * 8 + column] = sum;
            }
        }
        const bool bytes = form == Form::S8K32;
        MmaParams params{a.address(), b.address(), bytes ? whole.address() : c.address(), k, form};
        const Fault fault = device.launch("emu_test_mma", {1, 1, 1}, {32, 1, 1}, 0, params);
        CHECK_TEXT(fault.text, "");
        for (size_t i = 0; i < expected.size(); ++i) {
            CHECK_EQ(bytes ? static_cast<int64_t>(whole[i]) : static_cast<int64_t>(c[i]),
                     expected[i]);
        }
    }
}

}  // namespace

TEST(mma_m16n8k16_f16) { check_whole_numbers(Form::F16K16); }
TEST(mma_m16n8k16_bf16) { check_whole_numbers(Form::Bf16K16); }
TEST(mma_m16n8k8_f16) { check_whole_numbers(Form::F16K8); }
TEST(mma_m16n8k8_bf16) { check_whole_numbers(Form::Bf16K8); }
TEST(mma_m16n8k32_s8) { check_whole_numbers(Form::S8K32); }

TEST(mma_of_fractions_is_rounded_once) {
    Device device(1 << 20);
    Random random(3);
    Array<float> a = device.array<float>(16 * 16);
    Array<float> b = device.array<float>(16 * 8);
    Array<float> c = device.array<float>(16 * 8);
    for (size_t i = 0; i < a.size(); ++i) a[i] = random.unit();
    for (size_t i = 0; i < b.size(); ++i) b[i] = random.unit();
    for (size_t i = 0; i < c.size(); ++i) c[i] = random.unit() * 1e4f;
    std::vector<double> expected(16 * 8);
    for (uint32_t row = 0; row < 16; ++row) {
        for (uint32_t column = 0; column < 8; ++column) {
            double sum = static_cast<double>(c[row * 8 + column]);
            for (uint32_t i = 0; i < 16; ++i) {
                sum += static_cast<double>(f16_to_f32(f32_to_f16(a[row * 16 + i]))) *
                       static_cast<double>(f16_to_f32(f32_to_f16(b[i * 8 + column])));
            }
            expected[row * 8 + column] = sum;
        }
    }
    device.launch("emu_test_mma", {1, 1, 1}, {32, 1, 1}, 0,
                  MmaParams{a.address(), b.address(), c.address(), 16, Form::F16K16});
    for (size_t i = 0; i < expected.size(); ++i) CHECK_EQ(c[i], static_cast<float>(expected[i]));
}

TEST(mma_keeps_infinity_and_nan_to_their_rows_and_columns) {
    Device device(1 << 20);
    Array<float> a = device.array<float>(16 * 16);
    Array<float> b = device.array<float>(16 * 8);
    Array<float> c = device.array<float>(16 * 8);
    for (size_t i = 0; i < a.size(); ++i) a[i] = 1.0f;
    for (size_t i = 0; i < b.size(); ++i) b[i] = 1.0f;
    for (size_t i = 0; i < c.size(); ++i) c[i] = 0.0f;
    a[3 * 16 + 5] = NAN;
    b[7 * 8 + 2] = INFINITY;
    device.launch("emu_test_mma", {1, 1, 1}, {32, 1, 1}, 0,
                  MmaParams{a.address(), b.address(), c.address(), 16, Form::Bf16K16});
    for (uint32_t row = 0; row < 16; ++row) {
        for (uint32_t column = 0; column < 8; ++column) {
            const float x = c[row * 8 + column];
            CHECK(row == 3 ? isnan(x) : column == 2 ? x == INFINITY : x == 16.0f);
        }
    }
}

// ---- ldmatrix ----

namespace {

struct LoadParams {
    // out: [32 lanes][4]
    uint64_t out;
    uint32_t count;
    uint32_t transposed;
};

// Halves 0, 1, 2, … in shared memory: four matrices of 8 rows of 8, with room between the rows.
KV_KERNEL(emu_test_ldmatrix, LoadParams, 32) {
    KV_SHARED(uint16_t, rows, [32][16]);
    const uint32_t lane = lane_index();
    for (uint32_t i = 0; i < 8; ++i) rows[lane][i] = static_cast<uint16_t>(lane * 8 + i);
    sync_warp();
    uint32_t r1[1] = {};
    uint32_t r2[2] = {};
    uint32_t r4[4] = {};
    // Lanes beyond those that count give an address that would be refused.
    const void* row = lane < 8 * p.count ? static_cast<const void*>(rows[lane]) : nullptr;
    if (p.transposed != 0) {
        if (p.count == 1) ldmatrix_x1_trans(r1, row);
        if (p.count == 2) ldmatrix_x2_trans(r2, row);
        if (p.count == 4) ldmatrix_x4_trans(r4, row);
    } else {
        if (p.count == 1) ldmatrix_x1(r1, row);
        if (p.count == 2) ldmatrix_x2(r2, row);
        if (p.count == 4) ldmatrix_x4(r4, row);
    }
    const uint32_t* r = p.count == 1 ? r1 : p.count == 2 ? r2 : r4;
    for (uint32_t i = 0; i < p.count; ++i)
        store_global(at_address<uint32_t>(p.out) + lane * 4 + i, r[i]);
}

}  // namespace

TEST(ldmatrix_in_every_form) {
    for (const uint32_t count : {1u, 2u, 4u}) {
        for (const uint32_t transposed : {0u, 1u}) {
            Device device(1 << 20);
            Array<uint32_t> out = device.array<uint32_t>(32 * 4);
            const Fault fault = device.launch("emu_test_ldmatrix", {1, 1, 1}, {32, 1, 1}, 0,
                                              LoadParams{out.address(), count, transposed});
            CHECK_TEXT(fault.text, "");
            for (uint32_t lane = 0; lane < 32; ++lane) {
                for (uint32_t i = 0; i < count; ++i) {
                    // Element (row, column) of matrix i is 64 i + 8 row + column.
                    const uint32_t row = lane / 4;
                    const uint32_t column = lane % 4 * 2;
                    const uint32_t low =
                        64 * i + (transposed != 0 ? 8 * column + row : 8 * row + column);
                    const uint32_t high =
                        64 * i + (transposed != 0 ? 8 * (column + 1) + row : 8 * row + column + 1);
                    CHECK_EQ(out[lane * 4 + i], low | high << 16);
                }
            }
        }
    }
}

// A product as kernels make it: A by ldmatrix_x4 from rows, B [k][n] by ldmatrix_x2_trans.
namespace {

struct ProductParams {
    // a: [16][16], b: [16][8] halves, c: [16][8] floats
    uint64_t a, b, c;
};

KV_KERNEL(emu_test_product, ProductParams, 32) {
    KV_SHARED(uint16_t, a, [16][16]);
    KV_SHARED(uint16_t, b, [16][8]);
    const uint32_t lane = lane_index();
    cp_async_16(&a[lane / 2][lane % 2 * 8], at_address<const uint16_t>(p.a) + lane * 8);
    if (lane < 16) cp_async_16(&b[lane][0], at_address<const uint16_t>(p.b) + lane * 8);
    cp_async_commit();
    cp_async_wait<0>();
    sync_warp();
    uint32_t fa[4];
    uint32_t fb[2];
    ldmatrix_x4(fa, &a[lane % 16][lane / 16 * 8]);
    ldmatrix_x2_trans(fb, &b[lane % 16][0]);
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_m16n8k16_f16(c, fa, fb[0], fb[1]);
    for (uint32_t i = 0; i < 4; ++i) {
        store_global(at_address<float>(p.c) + cc_row(lane, i) * 8 + cc_column(lane, i), c[i]);
    }
}

}  // namespace

TEST(product_with_ldmatrix) {
    for (uint64_t seed = 0; seed < 8; ++seed) {
        Device device(1 << 20);
        device.seed = seed;
        Random random(seed);
        Array<uint16_t> a = device.array<uint16_t>(16 * 16);
        Array<uint16_t> b = device.array<uint16_t>(16 * 8);
        Array<float> c = device.array<float>(16 * 8);
        for (size_t i = 0; i < a.size(); ++i)
            a[i] = f32_to_f16(static_cast<float>(random.range(-9, 10)));
        for (size_t i = 0; i < b.size(); ++i)
            b[i] = f32_to_f16(static_cast<float>(random.range(-9, 10)));
        const Fault fault = device.launch("emu_test_product", {1, 1, 1}, {32, 1, 1}, 0,
                                          ProductParams{a.address(), b.address(), c.address()});
        CHECK_TEXT(fault.text, "");
        for (uint32_t row = 0; row < 16; ++row) {
            for (uint32_t column = 0; column < 8; ++column) {
                float sum = 0.0f;
                for (uint32_t i = 0; i < 16; ++i)
                    sum += f16_to_f32(a[row * 16 + i]) * f16_to_f32(b[i * 8 + column]);
                CHECK_EQ(c[row * 8 + column], sum);
            }
        }
    }
}
