// The counters, on kernels whose traffic is known.
#include "check.hpp"
#include "csrc/emulator/launch.hpp"
#include "csrc/kernels/device.cuh"

using namespace kvpool::dev;
using kvpool::emu::Array;
using kvpool::emu::Device;
using kvpool::emu::Traffic;

namespace {

struct Params {
    uint64_t in, out;
    uint32_t choice;
};

KV_KERNEL(emu_test_traffic, Params, 64) {
    KV_SHARED(Bytes16, rows, [64]);
    const uint32_t t = thread_index();
    const auto* words = at_address<const uint32_t>(p.in);
    const auto* sixteens = at_address<const Bytes16>(p.in);
    auto* out = at_address<uint32_t>(p.out);
    uint32_t sum = 0;
    switch (p.choice) {
        case 0:
            // A copy of 16 bytes a thread.
            store_global(at_address<Bytes16>(p.out) + t, load_readonly(sixteens + t));
            break;
        case 1:
            // Every second word.
            sum = load_global(words + 2 * t);
            break;
        case 2:
            // All the same word.
            sum = load_global(words);
            break;
        case 3:
            // Off by half a sector.
            sum = load_global(words + 4 + t);
            break;
        case 4:
            // Three rows a warp, without meeting between them.
            for (uint32_t i = 0; i < 3; ++i) sum += load_global(words + 32 * i + t % 32);
            break;
        case 5:
            // Lanes that go round as often as their number says.
            for (uint32_t i = 0; i < t % 4; ++i) sum += load_global(words + 8 * (t % 32));
            break;
        case 6:
            cp_async_16(&rows[t], sixteens + t);
            cp_async_commit();
            cp_async_wait<0>();
            break;
        case 7:
            if (t % 2 == 0) atomic_add(out, 1u);
            break;
        case 8:
            // One byte in each sector.
            store_once(at_address<uint8_t>(p.out) + 32 * t, uint8_t{1});
            break;
        case 9:
            // The same line, once as one instruction and once after meeting.
            for (uint32_t i = 0; i < 2; ++i) {
                sum += load_global(words + t);
                sync_warp();
            }
            break;
        case 10:
            // Words that overlap in pairs of lanes.
            sum = load_global(words + t / 2);
            break;
    }
    if (sum == 1) store_global(out, sum);
}

Traffic traffic_of(uint32_t choice, uint64_t seed) {
    Device device(1 << 20);
    device.seed = seed;
    Array<uint32_t> in = device.array<uint32_t>(1024);
    Array<uint32_t> out = device.array<uint32_t>(1024);
    for (uint32_t i = 0; i < 1024; ++i) in[i] = 4;
    const auto fault = device.launch("emu_test_traffic", {1, 1, 1}, {64, 1, 1}, 0,
                                     Params{in.address(), out.address(), choice});
    CHECK_TEXT(fault.text, "");
    return device.traffic("emu_test_traffic");
}

// Of two warps: what is expected of reads and of writes.
void check(uint32_t choice, uint64_t bytes, uint64_t sectors, uint64_t instructions,
           uint64_t written = 0, uint64_t sectors_written = 0, uint64_t writes = 0,
           uint64_t atomics = 0) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
        const Traffic t = traffic_of(choice, seed);
        CHECK_EQ(t.read_bytes, bytes);
        CHECK_EQ(t.read_sectors, sectors);
        CHECK_EQ(t.read_instructions, instructions);
        CHECK_EQ(t.write_bytes, written);
        CHECK_EQ(t.write_sectors, sectors_written);
        CHECK_EQ(t.write_instructions, writes);
        CHECK_EQ(t.atomics, atomics);
        CHECK_EQ(t.launches, 1u);
        CHECK_EQ(t.blocks, 1u);
    }
}

// choice 0: rows of 16 bytes side by side; 1: 256 bytes apart; 2: words 128 bytes apart; 3: one
// word for all; 4: 16 bytes a lane side by side; 5: 16 bytes a lane, 64 bytes apart
KV_KERNEL(emu_test_banks, Params, 32) {
    unsigned char* shared = dynamic_shared();
    const uint32_t lane = lane_index();
    uint32_t r[4];
    if (p.choice == 0) ldmatrix_x4(r, shared + 16 * lane);
    if (p.choice == 1) ldmatrix_x4(r, shared + 256 * lane);
    if (p.choice == 2) load_shared(reinterpret_cast<uint32_t*>(shared + 128 * lane));
    if (p.choice == 3) load_shared(reinterpret_cast<uint32_t*>(shared));
    if (p.choice == 4) load_shared(reinterpret_cast<Bytes16*>(shared + 16 * lane));
    if (p.choice == 5) load_shared(reinterpret_cast<Bytes16*>(shared + 64 * lane));
}

}  // namespace

TEST(traffic_of_known_kernels) {
    check(0, 1024, 32, 2, 1024, 32, 2);
    check(1, 256, 16, 2);
    check(2, 8, 2, 2);
    check(3, 256, 10, 2);
    check(4, 768, 24, 6);
    // Lanes with t % 4 = 1, 2, 3 take the first turn, 2 and 3 the second, 3 the third: 24, 16, 8
    // lanes a warp.
    check(5, 2 * 4 * 48, 2 * 48, 6);
    check(6, 1024, 32, 2);
    check(7, 0, 0, 0, 0, 0, 0, 32);
    check(8, 0, 0, 0, 64, 64, 2);
    check(9, 512, 16, 4);
    check(10, 128, 4, 2);
}

TEST(traffic_adds_up_over_launches) {
    Device device(1 << 20);
    Array<uint32_t> in = device.array<uint32_t>(1024);
    const Params params{in.address(), in.address(), 1};
    for (int i = 0; i < 3; ++i) device.launch("emu_test_traffic", {2, 1, 1}, {64, 1, 1}, 0, params);
    CHECK_EQ(device.traffic("emu_test_traffic").read_bytes, 6 * 256u);
    CHECK_EQ(device.traffic("emu_test_traffic").launches, 3u);
    CHECK_EQ(device.traffic("emu_test_traffic").blocks, 6u);
    device.clear_traffic();
    CHECK_EQ(device.traffic("emu_test_traffic").read_bytes, 0u);
}

TEST(bank_conflicts) {
    const uint64_t expected[] = {0, 4 * 7, 31, 0, 0, 4 * 3};
    for (uint32_t choice = 0; choice < 6; ++choice) {
        Device device(1 << 20);
        device.count_banks = true;
        const auto fault =
            device.launch("emu_test_banks", {1, 1, 1}, {32, 1, 1}, 8192, Params{0, 0, choice});
        CHECK_TEXT(fault.text, "");
        CHECK_EQ(device.traffic("emu_test_banks").bank_conflicts, expected[choice]);
    }
}
