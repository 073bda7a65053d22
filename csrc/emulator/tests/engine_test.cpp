// Threads, barriers, collectives, shared memory, asynchronous copies, and the order of it all.
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

struct Params {
    // What each kernel says.
    uint64_t in, out;
    uint32_t choice;
};

constexpr uint32_t THREADS = 128;

// out: [blocks][threads], each thread's place as it sees it
KV_KERNEL(emu_test_places, Params, 64) {
    const uint32_t block = block_x() + grid_dim_x() * (block_y() + grid_dim_y() * block_z());
    const uint32_t thread = thread_x() + block_dim_x() * (thread_y() + block_dim_y() * thread_z());
    const uint32_t threads = block_dim_x() * block_dim_y() * block_dim_z();
    const bool agree =
        thread == thread_index() && lane_index() == thread % 32 && warp_index() == thread / 32;
    store_global(at_address<uint32_t>(p.out) + block * threads + thread,
                 agree ? block * 1000 + thread : 0u);
}

// out: [4][threads]
KV_KERNEL(emu_test_shuffles, Params, THREADS) {
    uint32_t* out = at_address<uint32_t>(p.out);
    const uint32_t t = thread_index();
    const uint32_t n = block_dim_x();
    store_global(out + t, shuffle(t, 5));
    store_global(out + n + t, shuffle_xor(t, 3));
    store_global(out + 2 * n + t, static_cast<uint32_t>(shuffle_down(1e-3 * t, 4) * 1e3 + 0.5));
    store_global(out + 3 * n + t,
                 shuffle_up(static_cast<uint64_t>(t) << 40, 1) >> 40 == 0 ? 0u : 1u);
}

// out: [3][threads]
KV_KERNEL(emu_test_votes, Params, THREADS) {
    uint32_t* out = at_address<uint32_t>(p.out);
    const uint32_t t = thread_index();
    const uint32_t n = block_dim_x();
    store_global(out + t, ballot_lanes(lane_index() % 3 == 0));
    store_global(out + n + t, any_lane(t == 40) ? 1u : 0u);
    store_global(out + 2 * n + t, all_lanes(t < 32) ? 1u : 0u);
}

// Each thread hands its number to the next one, through shared memory; choice 0 forgets the
// barrier.
KV_KERNEL(emu_test_neighbour, Params, THREADS) {
    KV_SHARED(uint32_t, mail, [THREADS]);
    const uint32_t t = thread_index();
    mail[(t + 1) % THREADS] = t;
    if (p.choice != 0) sync_threads();
    store_global(at_address<uint32_t>(p.out) + t, mail[t]);
}

// Two rounds of it through one array; choice 0 forgets the barrier between reading and writing
// again.
KV_KERNEL(emu_test_rounds, Params, THREADS) {
    KV_SHARED(uint32_t, mail, [THREADS]);
    const uint32_t t = thread_index();
    mail[(t + 1) % THREADS] = t;
    sync_threads();
    const uint32_t first = mail[t];
    if (p.choice != 0) sync_threads();
    mail[(t + 1) % THREADS] = 1000;
    store_global(at_address<uint32_t>(p.out) + t, first);
}

// out: [blocks * threads], the turn in which each thread came
KV_KERNEL(emu_test_turns, Params, THREADS) {
    const uint32_t turn = atomic_add(at_address<uint32_t>(p.in), 1u);
    store_global(at_address<uint32_t>(p.out) + block_x() * THREADS + thread_index(), turn);
}

// in: [2 * threads] floats; out: [threads]. 0: no wait; 1: as it should be; 2: waits for the first
// group of two and reads the second; 3: waits for the first and reads it
KV_KERNEL(emu_test_async, Params, THREADS) {
    float* tile = reinterpret_cast<float*>(dynamic_shared());
    const uint32_t t = thread_index();
    const float* in = at_address<const float>(p.in);
    cp_async_4(tile + t, in + t);
    cp_async_commit();
    if (p.choice >= 2) {
        cp_async_4(tile + THREADS + t, in + THREADS + t);
        cp_async_commit();
        cp_async_wait<1>();
    }
    if (p.choice == 1) cp_async_wait<0>();
    sync_threads();
    const uint32_t other = THREADS - 1 - t;
    store_global(at_address<float>(p.out) + t, tile[(p.choice == 2 ? THREADS : 0) + other]);
}

// in: [32][4]; out: [32][4]. Lane l fetches l % 17 of 16 bytes.
KV_KERNEL(emu_test_async_zeros, Params, 32) {
    KV_SHARED(Bytes16, rows, [32]);
    const uint32_t lane = lane_index();
    cp_async_16_or_zero(&rows[lane], at_address<const Bytes16>(p.in) + lane, lane % 17);
    cp_async_commit();
    cp_async_wait<0>();
    store_global(at_address<Bytes16>(p.out) + lane, load_shared(&rows[lane]));
}

// Warps 0 and 1 meet at barrier 1, warps 2 and 3 at barrier 2, each twice, and all at the end.
KV_KERNEL(emu_test_named, Params, THREADS) {
    KV_SHARED(uint32_t, sums, [2]);
    const uint32_t half = warp_index() / 2;
    if (thread_index() % 64 == 0) sums[half] = 0;
    sync_named(1 + half, 64);
    atomic_add(&sums[half], thread_index());
    sync_named(1 + half, 64);
    const uint32_t mine = sums[half];
    sync_threads();
    store_global(at_address<uint32_t>(p.out) + thread_index(), mine + (half != 0 ? 0u : sums[1]));
}

// What shared memory holds before anything is written: never what the last block left.
KV_KERNEL(emu_test_fresh, Params, 32) {
    KV_SHARED(float, kept, [32]);
    float* dynamic = reinterpret_cast<float*>(dynamic_shared());
    const bool fresh = isnan(kept[lane_index()]) && isnan(dynamic[lane_index()]);
    kept[lane_index()] = 1.0f;
    dynamic[lane_index()] = 1.0f;
    store_global(at_address<uint32_t>(p.out) + block_x() * 32 + lane_index(), fresh ? 1u : 0u);
}

template <class T>
KV_DEVICE T* one_each() {
    KV_SHARED(T, variable, [32]);
    return variable;
}
// Instances of a template have variables of their own; two calls of one instance share.
KV_KERNEL(emu_test_templates, Params, 32) {
    uint32_t* words = one_each<uint32_t>();
    float* floats = one_each<float>();
    words[lane_index()] = lane_index();
    floats[lane_index()] = 0.5f;
    sync_warp();
    store_global(at_address<uint32_t>(p.out) + lane_index(),
                 one_each<uint32_t>()[lane_index() ^ 1]);
}

Fault launch(Device& device, const char* kernel, uint32_t blocks, uint32_t threads, Params params,
             uint32_t shared_bytes = 0) {
    return device.launch(kernel, {blocks, 1, 1}, {threads, 1, 1}, shared_bytes, params);
}

}  // namespace

TEST(threads_know_their_places) {
    Device device(1 << 20);
    Array<uint32_t> out = device.array<uint32_t>(24 * 60);
    const Fault fault =
        device.launch("emu_test_places", {2, 3, 4}, {5, 4, 3}, 0, Params{0, out.address(), 0});
    CHECK_TEXT(fault.text, "");
    for (uint32_t i = 0; i < 24 * 60; ++i) CHECK_EQ(out[i], i / 60 * 1000 + i % 60);
}

TEST(shuffles_in_whole_and_partial_warps) {
    for (const uint32_t threads : {32u, 48u, 128u}) {
        for (uint64_t seed = 0; seed < 6; ++seed) {
            Device device(1 << 20);
            device.seed = seed;
            Array<uint32_t> out = device.array<uint32_t>(4 * threads);
            CHECK_TEXT(
                launch(device, "emu_test_shuffles", 1, threads, Params{0, out.address(), 0}).text,
                "");
            for (uint32_t t = 0; t < threads; ++t) {
                const uint32_t first = t / 32 * 32;
                const bool down = t % 32 + 4 < 32 && t + 4 < threads;
                CHECK_EQ(out[t], first + 5);
                CHECK_EQ(out[threads + t], t ^ 3u);
                CHECK_EQ(out[2 * threads + t], down ? t + 4 : t);
                CHECK_EQ(out[3 * threads + t], (t % 32 == 0 ? t : t - 1) == 0 ? 0u : 1u);
            }
        }
    }
}

TEST(votes) {
    Device device(1 << 20);
    Array<uint32_t> out = device.array<uint32_t>(3 * 48);
    CHECK_TEXT(launch(device, "emu_test_votes", 1, 48, Params{0, out.address(), 0}).text, "");
    for (uint32_t t = 0; t < 48; ++t) {
        CHECK_EQ(out[t], t < 32 ? 0x49249249u : 0x9249u);
        CHECK_EQ(out[48 + t], t < 32 ? 0u : 1u);
        CHECK_EQ(out[96 + t], t < 32 ? 1u : 0u);
    }
}

TEST(a_missing_barrier_shows_with_every_seed) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
        for (const uint32_t with_barrier : {0u, 1u}) {
            Device device(1 << 20);
            device.seed = seed;
            Array<uint32_t> out = device.array<uint32_t>(THREADS);
            launch(device, "emu_test_neighbour", 1, THREADS,
                   Params{0, out.address(), with_barrier});
            uint32_t wrong = 0;
            for (uint32_t t = 0; t < THREADS; ++t)
                wrong += out[t] != (t + THREADS - 1) % THREADS ? 1u : 0u;
            CHECK_EQ(wrong != 0, with_barrier == 0);
            launch(device, "emu_test_rounds", 1, THREADS, Params{0, out.address(), with_barrier});
            wrong = 0;
            for (uint32_t t = 0; t < THREADS; ++t)
                wrong += out[t] != (t + THREADS - 1) % THREADS ? 1u : 0u;
            CHECK_EQ(wrong != 0, with_barrier == 0);
        }
    }
}

TEST(a_seed_shuffles_threads_warps_and_blocks_and_repeats) {
    const uint32_t blocks = 6;
    std::vector<std::vector<uint32_t>> orders;
    for (const uint64_t seed : {0u, 1u, 2u, 3u, 1u}) {
        Device device(1 << 20);
        device.seed = seed;
        Array<uint32_t> turn = device.array<uint32_t>(std::vector<uint32_t>{0});
        Array<uint32_t> out = device.array<uint32_t>(blocks * THREADS);
        launch(device, "emu_test_turns", blocks, THREADS, Params{turn.address(), out.address(), 0});
        CHECK_EQ(turn[0], blocks * THREADS);
        orders.emplace_back(out.host(), out.host() + out.size());
    }
    for (uint32_t i = 0; i < blocks * THREADS; ++i) CHECK_EQ(orders[0][i], i);
    CHECK(orders[1] == orders[4]);
    CHECK(orders[1] != orders[2] && orders[2] != orders[3] && orders[1] != orders[0]);
    // Lanes, warps and blocks each: seeds 1 to 3 all differ from the natural order in all three.
    bool lanes = false;
    bool warps = false;
    bool groups = false;
    for (size_t i = 1; i < 4; ++i) {
        lanes = lanes || orders[i][0] > orders[i][1];
        warps = warps || orders[i][0] > orders[i][32];
        groups = groups || orders[i][0] > orders[i][THREADS];
    }
    CHECK(lanes && warps && groups);
}

TEST(asynchronous_data_comes_at_the_wait_and_not_before) {
    for (uint64_t seed = 0; seed < 6; ++seed) {
        for (uint32_t choice = 0; choice < 4; ++choice) {
            Device device(1 << 20);
            device.seed = seed;
            Array<float> in = device.array<float>(2 * THREADS);
            Array<float> out = device.array<float>(THREADS);
            for (uint32_t i = 0; i < 2 * THREADS; ++i) in[i] = static_cast<float>(i);
            const Params params{in.address(), out.address(), choice};
            CHECK_TEXT(launch(device, "emu_test_async", 1, THREADS, params, 8 * THREADS).text, "");
            for (uint32_t t = 0; t < THREADS; ++t) {
                if (choice == 1 || choice == 3) {
                    CHECK_EQ(out[t], static_cast<float>(THREADS - 1 - t));
                } else {
                    CHECK(isnan(out[t]));
                }
            }
        }
    }
}

TEST(asynchronous_copies_fill_with_zeros) {
    Device device(1 << 20);
    std::vector<uint8_t> bytes(32 * 16);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(1 + i % 255);
    Array<uint8_t> in = device.array<uint8_t>(bytes);
    Array<uint8_t> out = device.array<uint8_t>(32 * 16);
    CHECK_TEXT(
        launch(device, "emu_test_async_zeros", 1, 32, Params{in.address(), out.address(), 0}).text,
        "");
    for (uint32_t i = 0; i < 32 * 16; ++i) CHECK_EQ(out[i], i % 16 < i / 16 % 17 ? bytes[i] : 0);
    // Bytes not wanted are not fetched: 0 + … + 16, then 0 + … + 14.
    CHECK_EQ(device.traffic("emu_test_async_zeros").read_bytes, 136u + 105u);
}

TEST(named_barriers) {
    for (uint64_t seed = 0; seed < 6; ++seed) {
        Device device(1 << 20);
        device.seed = seed;
        Array<uint32_t> out = device.array<uint32_t>(THREADS);
        CHECK_TEXT(launch(device, "emu_test_named", 1, THREADS, Params{0, out.address(), 0}).text,
                   "");
        const uint32_t low = 63 * 64 / 2;
        const uint32_t high = 127 * 128 / 2 - low;
        for (uint32_t t = 0; t < THREADS; ++t) CHECK_EQ(out[t], t < 64 ? low + high : high);
    }
}

TEST(shared_memory_is_fresh_in_each_block) {
    Device device(1 << 20);
    Array<uint32_t> out = device.array<uint32_t>(4 * 32);
    for (int launches = 0; launches < 2; ++launches) {
        CHECK_TEXT(launch(device, "emu_test_fresh", 4, 32, Params{0, out.address(), 0}, 128).text,
                   "");
        for (uint32_t i = 0; i < 4 * 32; ++i) CHECK_EQ(out[i], 1u);
    }
}

TEST(shared_variables_of_templates) {
    Device device(1 << 20);
    Array<uint32_t> out = device.array<uint32_t>(32);
    CHECK_TEXT(launch(device, "emu_test_templates", 1, 32, Params{0, out.address(), 0}).text, "");
    for (uint32_t i = 0; i < 32; ++i) CHECK_EQ(out[i], i ^ 1u);
}
