// What a kernel may not do, and how the message says so.
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "csrc/emulator/launch.hpp"
#include "csrc/kernels/device.cuh"

using namespace kvpool::dev;
using kvpool::emu::Array;
using kvpool::emu::Device;
using kvpool::emu::Fault;
using kvpool::emu::FaultCode;

namespace {

struct Params {
    uint64_t in, out;
    uint32_t choice;
};

// Thread 5 of block 1 does what `choice` says.
KV_KERNEL(emu_test_bad, Params, 64) {
    KV_SHARED(uint32_t, words, [16]);
    const uint32_t t = thread_index();
    if (t == 0) words[0] = 0;
    const bool bad = block_x() == 1 && t == 5;
    const uint32_t* in = at_address<const uint32_t>(p.in);
    uint32_t* out = at_address<uint32_t>(p.out);
    switch (p.choice) {
        case 0:
            store_global(out, load_global(in + (bad ? 64 : t % 32)));
            break;
        case 1:
            store_global(bad ? out - 1 : out, 1u);
            break;
        case 2:
            if (bad) load_global(reinterpret_cast<const uint64_t*>(in + 1));
            break;
        case 3:
            if (bad) load_global(at_address<const uint8_t>(0));
            break;
        case 4:
            if (bad) atomic_add(out + 64, 1u);
            break;
        case 5:
            if (bad) cp_async_16(dynamic_shared(), in + 62);
            break;
        case 6:
            if (bad) cp_async_16(dynamic_shared(), in + 60 + 64);
            break;
        case 7:
            if (bad) cp_async_4(dynamic_shared() + 256, in);
            break;
        case 8:
            if (bad) load_shared(reinterpret_cast<const uint32_t*>(dynamic_shared()) + 64);
            break;
        case 9:
            if (bad) store_shared(reinterpret_cast<uint64_t*>(dynamic_shared() + 4), uint64_t{1});
            break;
        case 10:
            if (bad) store_shared(words + 16, 1u);
            break;
        case 11:
            // An access across the end of an allocation of 252 bytes.
            if (bad) load_global(reinterpret_cast<const uint64_t*>(in) + 31);
            break;
    }
}

KV_KERNEL(emu_test_divergent, Params, 64) {
    const uint32_t t = thread_index();
    switch (p.choice) {
        case 0:
            if (t < 32) sync_threads();
            break;
        case 1:
            if (t < 32) {
                sync_threads();
            } else {
                sync_threads();
            }
            break;
        case 2:
            if (t != 7) shuffle_xor(t, 1);
            break;
        case 3:
            if (t < 16) {
                ballot_lanes(true);
            } else {
                shuffle(t, 0);
            }
            break;
        case 4:
            if (t == 40) return;
            sync_threads();
            break;
        case 5:
            if (t % 2 == 0) sync_warp();
            sync_threads();
            break;
        case 6:
            sync_named(1, t < 32 ? 64 : 32);
            break;
    }
}

// Without the functions that check: choice 0 dereferences a device address, 1 writes past the
// dynamic shared memory, 2 a little past a static variable.
KV_KERNEL(emu_test_unchecked, Params, 32) {
    KV_SHARED(uint32_t, words, [16]);
    KV_SHARED(uint32_t, others, [16]);
    others[0] = 0;
    volatile uint32_t* place = words;
    if (p.choice == 0) place = at_address<uint32_t>(p.out);
    if (p.choice == 1) place = reinterpret_cast<uint32_t*>(dynamic_shared() + 256);
    if (p.choice == 2) place = words + 17;
    if (lane_index() == 3) *place = 1;
}

KV_KERNEL(emu_test_deep, Params, 32) {
    volatile char big[100 << 10];
    for (size_t i = sizeof big; i > 0; i -= 64) big[i - 1] = 1;
    if (lane_index() == 3) sync_warp();
}

struct Big {
    uint32_t words[12 << 10];
};
KV_KERNEL(emu_test_big, Params, 32) {
    KV_SHARED(Big, first, );
    KV_SHARED(uint32_t, second, [1]);
    if (lane_index() == 0) first.words[0] = 0;
    if (lane_index() == 0) second[0] = 0;
}

class Bench {
public:
    Bench() : device(1 << 20), in(device.array<uint32_t>(63)), out(device.array<uint32_t>(64)) {}
    Fault launch(const char* kernel, uint32_t choice, uint32_t threads = 64) {
        return device.launch(kernel, {3, 1, 1}, {threads, 1, 1}, 256,
                             Params{in.address(), out.address(), choice});
    }
    Device device;
    Array<uint32_t> in;
    Array<uint32_t> out;
};

void check(uint32_t choice, FaultCode code, const char* part) {
    for (uint64_t seed = 0; seed < 3; ++seed) {
        Bench bench;
        bench.device.seed = seed;
        const Fault fault = bench.launch("emu_test_bad", choice);
        CHECK_EQ(static_cast<int>(fault.code), static_cast<int>(code));
        CHECK_HAS(fault.text,
                  "emu_test_bad, block (1, 0, 0), thread (5, 0, 0), at faults_test.cpp:");
        CHECK_HAS(fault.text, part);
    }
}

}  // namespace

TEST(bad_accesses_are_found_and_named) {
    check(0, FaultCode::IllegalAddress, "reads 4 bytes at 0x");
    check(0, FaultCode::IllegalAddress, ": 4 bytes past the end of the allocation of 252 bytes");
    check(1, FaultCode::IllegalAddress, ": 4 bytes before the allocation of 256 bytes");
    check(2, FaultCode::MisalignedAddress, "reads 8 bytes");
    check(3, FaultCode::IllegalAddress, "reads 1 bytes at 0x0: ");
    check(4, FaultCode::IllegalAddress, "changes 4 bytes");
    check(5, FaultCode::MisalignedAddress, "reads 16 bytes");
    check(6, FaultCode::IllegalAddress, "past the end of the allocation of 252 bytes");
    check(7, FaultCode::IllegalAddress,
          "4 bytes outside the block's shared memory: byte 256 of 256 dynamic ones");
    check(8, FaultCode::IllegalAddress, "outside the block's shared memory");
    check(9, FaultCode::MisalignedAddress, "at offset 4");
    check(10, FaultCode::IllegalAddress, "outside the block's shared memory");
    check(11, FaultCode::IllegalAddress, ": byte 248 of the allocation of 252 bytes");
}

TEST(freed_memory_is_gone) {
    Bench bench;
    CHECK(!bench.launch("emu_test_bad", 99));
    const uint64_t address = bench.in.address();
    CHECK(bench.device.memory().free(address));
    CHECK(!bench.device.memory().free(address));
    const Fault fault = bench.launch("emu_test_bad", 0);
    CHECK_EQ(static_cast<int>(fault.code), 700);
    CHECK_HAS(fault.text, "block (0, 0, 0), thread (0, 0, 0)");
}

TEST(divergence_is_found_and_named) {
    const struct {
        uint32_t choice;
        const char* part;
    } cases[] = {
        {0, "barrier 0 waits for threads that never come: arrived 32 of 64, 32 have ended"},
        {1, "a divergent barrier: this thread waits at faults_test.cpp:"},
        {2, "shuffle waits for lanes that never come: arrived 0xffffff7f of 0xffffffff"},
        {3, "lanes of one warp at different collectives: this one at "},
        {4, "barrier 0 waits for threads that never come: arrived 63 of 64, 1 have ended"},
        {5, "sync_warp waits for lanes that never come"},
        {6, "a divergent barrier"},
    };
    for (const auto& one : cases) {
        for (uint64_t seed = 0; seed < 4; ++seed) {
            Bench bench;
            bench.device.seed = seed;
            const Fault fault = bench.launch("emu_test_divergent", one.choice);
            CHECK(fault.code != FaultCode::None);
            CHECK_HAS(fault.text, one.part);
            // The device is as good as new.
            CHECK(!bench.launch("emu_test_bad", 99));
        }
    }
}

TEST(wild_addresses_are_found_too) {
    const struct {
        uint32_t choice;
        const char* part;
    } cases[] = {
        {0, "dereferences the device address 0x"},
        {1, "outside the block's shared memory"},
#if !defined(KVPOOL_EMU_ASAN)
        {2, "byte 4 past the end of a shared variable of 64 bytes was written"},
#endif
    };
    for (const auto& one : cases) {
        Bench bench;
        const Fault fault = bench.launch("emu_test_unchecked", one.choice, 32);
        CHECK(fault.code != FaultCode::None);
        CHECK_HAS(fault.text, "emu_test_unchecked, block (0, 0, 0)");
        CHECK_HAS(fault.text, one.part);
        CHECK(!bench.launch("emu_test_bad", 99));
    }
}

#if defined(KVPOOL_EMU_ASAN)
TEST(address_sanitizer_finds_writes_beside_shared_variables) {
    const pid_t child = fork();
    if (child == 0) {
        if (freopen("/dev/null", "w", stderr) == nullptr) _exit(2);
        Bench bench;
        bench.launch("emu_test_unchecked", 2, 32);
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1);
}
#else
TEST(too_many_local_variables_are_found) {
    Bench bench;
    const Fault fault = bench.launch("emu_test_deep", 0, 32);
    CHECK_EQ(static_cast<int>(fault.code), static_cast<int>(FaultCode::LaunchFailed));
    CHECK_HAS(fault.text, "KiB of local variables");
    CHECK(!bench.launch("emu_test_bad", 99));
}
#endif

TEST(a_launch_is_checked) {
    Bench bench;
    CHECK_EQ(static_cast<int>(bench.launch("emu_test_bad", 99, 96).code), 1);
    CHECK_EQ(static_cast<int>(bench.launch("no_such_kernel", 99).code), 1);
    CHECK_EQ(
        static_cast<int>(bench.device.launch("emu_test_bad", {1, 1, 1}, {32, 1, 1}, 0, 1).code), 1);
    CHECK_EQ(static_cast<int>(bench.launch("emu_test_big", 0, 32).code), 701);
}

TEST(device_memory_is_bounded_and_separate) {
    kvpool::emu::DeviceMemory memory(4096);
    const uint64_t a = memory.allocate(1000);
    const uint64_t b = memory.allocate(3000);
    CHECK(a != 0 && b != 0 && a % 512 == 0 && b % 512 == 0);
    CHECK(b >= a + 1000 + 512 || a >= b + 3000 + 512);
    CHECK_EQ(memory.allocated(), 4000u);
    CHECK_EQ(memory.allocate(97), 0u);
    CHECK_EQ(memory.allocate(0), 0u);
    CHECK(memory.find(a, 1000) != nullptr);
    CHECK(memory.find(a + 999, 1) != nullptr);
    CHECK(memory.find(a + 999, 2) == nullptr);
    CHECK(memory.find(b - 1, 1) == nullptr);
    CHECK(memory.free(a));
    CHECK(memory.find(a, 1) == nullptr);
    // New memory is not where the last was.
    const uint64_t c = memory.allocate(1000);
    CHECK(c != 0 && c != a);
    for (int i = 0; i < 1000; ++i) CHECK_EQ(static_cast<int>(memory.find(c, 1000)[i]), -1);
    CHECK_EQ(kvpool::emu::parse_bytes("12"), 12u);
    CHECK_EQ(kvpool::emu::parse_bytes("3 GiB"), 3ull << 30);
    CHECK_EQ(kvpool::emu::parse_bytes("3GB"), 0u);
}

TEST(addresses_run_out_and_come_round) {
    kvpool::emu::DeviceMemory memory(1ull << 30);
    for (int i = 0; i < 40; ++i) {
        const uint64_t a = memory.allocate(300ull << 20);
        const uint64_t b = memory.allocate(700ull << 20);
        CHECK(a != 0 && b != 0);
        CHECK(memory.free(i % 2 == 0 ? a : b));
        CHECK(memory.free(i % 2 == 0 ? b : a));
    }
    CHECK_EQ(memory.allocated(), 0u);
}
