// The driver's stand-in: what it refuses, what it counts, and that work is done late.
#include <string.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "csrc/emulator/launch.hpp"
#include "csrc/kernels/device.cuh"
#include "driver_session.hpp"

using namespace kvpool::dev;

namespace {

// out = in + add
KV_KERNEL(emu_test_add, AddParams, 128) {
    const uint32_t i = block_x() * block_dim_x() + thread_index();
    if (i >= p.count) return;
    store_global(at_address<uint32_t>(p.out) + i,
                 load_global(at_address<const uint32_t>(p.in) + i) + p.add);
}

}  // namespace

TEST(driver_a_says_nothing_before_init) {
    int count = 0;
    CHECK_EQ(cuDeviceGetCount(&count), emu::NOT_INITIALIZED);
    int version = 0;
    CHECK_EQ(cuDriverGetVersion(&version), 0);
    CHECK_EQ(version, 13000);
    CHECK_EQ(cuInit(1), emu::INVALID_VALUE);
    CHECK_EQ(cuInit(0), 0);
    CHECK_EQ(cuDeviceGetCount(&count), 0);
    CHECK_EQ(count, 1);
    CUdeviceptr address = 0;
    CHECK_EQ(cuMemAlloc_v2(&address, 4), emu::INVALID_CONTEXT);
}

TEST(driver_describes_its_device) {
    Session session;
    CUdevice device = 7;
    CHECK_EQ(cuDeviceGet(&device, 1), emu::INVALID_DEVICE);
    CHECK_EQ(cuDeviceGet(&device, 0), 0);
    char name[64];
    CHECK_EQ(cuDeviceGetName(name, sizeof name, device), 0);
    CHECK_HAS(name, "EMULATED");
    CHECK_EQ(cuDeviceGetName(name, 4, device), 0);
    CHECK_TEXT(name, "kvp");
    const int attributes[][2] = {{75, 9}, {76, 0},  {16, 8},  {97, 227 << 10},
                                 {41, 1}, {10, 32}, {1, 1024}};
    for (const auto& one : attributes) {
        int value = -1;
        CHECK_EQ(cuDeviceGetAttribute(&value, one[0], device), 0);
        CHECK_EQ(value, one[1]);
    }
    const char* text = nullptr;
    CHECK_EQ(cuGetErrorName(700, &text), 0);
    CHECK_TEXT(text, "CUDA_ERROR_ILLEGAL_ADDRESS");
    CHECK_EQ(cuGetErrorString(2, &text), 0);
    CHECK_TEXT(text, "out of memory");
    CHECK_EQ(cuGetErrorName(12345, &text), emu::INVALID_VALUE);
    CHECK(text == nullptr);
    CHECK_EQ(kvpool_emu_version(), 1u);
}

TEST(driver_memory) {
    Session session;
    size_t free_before = 0;
    size_t total = 0;
    size_t whole = 0;
    CHECK_EQ(cuMemGetInfo_v2(&free_before, &total), 0);
    CHECK_EQ(cuDeviceTotalMem_v2(&whole, 0), 0);
    CHECK_EQ(total, whole);
    CHECK_EQ(free_before, total);
    CUdeviceptr a = 0;
    CHECK_EQ(cuMemAlloc_v2(&a, 0), emu::INVALID_VALUE);
    CHECK_EQ(cuMemAlloc_v2(&a, total + 1), emu::OUT_OF_MEMORY);
    CHECK_EQ(cuMemAlloc_v2(&a, 1001), 0);
    size_t free_after = 0;
    CHECK_EQ(cuMemGetInfo_v2(&free_after, nullptr), 0);
    CHECK_EQ(free_before - free_after, 1001u);
    CHECK_EQ(kvpool_emu_counter("live_bytes"), 1001u);
    CHECK_EQ(kvpool_emu_counter("live_allocations"), 1u);
    CHECK_EQ(cuMemFree_v2(a + 512), emu::INVALID_VALUE);
    CHECK_EQ(cuMemFree_v2(a), 0);
    CHECK_EQ(cuMemFree_v2(a), emu::INVALID_VALUE);
    CHECK_EQ(kvpool_emu_counter("allocations"), 1u);
    CHECK_EQ(kvpool_emu_counter("frees"), 1u);
    char bytes[16] = {};
    CHECK_EQ(cuMemcpyHtoD_v2(a, bytes, 16), emu::INVALID_VALUE);
    a = session.words(4);
    CHECK_EQ(cuMemcpyHtoD_v2(a, bytes, 17), emu::INVALID_VALUE);
    CHECK_EQ(cuMemcpyDtoDAsync_v2(a, a + 8, 16, nullptr), emu::INVALID_VALUE);
    CHECK_EQ(cuMemFreeHost(bytes), emu::INVALID_VALUE);
    CHECK_EQ(kvpool_emu_counter("nonsense"), UINT64_MAX);
}

TEST(driver_fills_and_copies) {
    Session session;
    const CUdeviceptr a = session.words(8);
    const CUdeviceptr b = session.words(8);
    CHECK_EQ(session.read(a, 8)[3], 0xFFFFFFFFu);
    CHECK_EQ(cuMemsetD8Async(a, 0x5A, 32, nullptr), 0);
    CHECK_EQ(cuMemsetD8Async(a + 4, 1, 1, nullptr), 0);
    CHECK_EQ(cuMemcpyDtoDAsync_v2(b + 8, a, 24, nullptr), 0);
    const std::vector<uint32_t> words = session.read(b, 8);
    CHECK_EQ(words[1], 0xFFFFFFFFu);
    CHECK_EQ(words[2], 0x5A5A5A5Au);
    CHECK_EQ(words[3], 0x5A5A5A01u);
    CHECK_EQ(words[7], 0x5A5A5A5Au);
    CHECK_EQ(kvpool_emu_counter("fills"), 2u);
    CHECK_EQ(kvpool_emu_counter("copies_on_device"), 1u);
    CHECK_EQ(kvpool_emu_counter("bytes_to_host"), 64u);
}

TEST(driver_reads_pinned_memory_late) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
        Session session;
        kvpool_emu_set_seed(seed);
        const CUdeviceptr a = session.words(1);
        CUstream stream = session.stream();
        uint32_t* pinned = session.pinned(1);
        uint32_t pageable = 5;
        *pinned = 1;
        CHECK_EQ(cuMemcpyHtoDAsync_v2(a, pinned, 4, stream), 0);
        // Overwritten too early, as a staging buffer without an event would be.
        *pinned = 2;
        CHECK_EQ(cuStreamSynchronize(stream), 0);
        CHECK_EQ(session.read(a, 1)[0], 2u);
        CHECK_EQ(cuMemcpyHtoDAsync_v2(a, &pageable, 4, stream), 0);
        pageable = 6;
        CHECK_EQ(cuStreamSynchronize(stream), 0);
        CHECK_EQ(session.read(a, 1)[0], 5u);
        // To the host: pinned memory has the old bytes until somebody waits, other memory has the
        // new at once.
        *pinned = 7;
        CHECK_EQ(cuMemcpyDtoHAsync_v2(pinned, a, 4, stream), 0);
        CHECK_EQ(*pinned, 7u);
        CHECK_EQ(cuStreamSynchronize(stream), 0);
        CHECK_EQ(*pinned, 5u);
        CHECK_EQ(cuMemcpyDtoHAsync_v2(&pageable, a, 4, stream), 0);
        CHECK_EQ(pageable, 5u);
    }
}

// A producer and a consumer on two streams. Without the event the consumer reads old data, with
// seed 0 always; with it never.
TEST(driver_shows_a_missing_wait_between_streams) {
    int wrong_without = 0;
    for (uint64_t seed = 0; seed < 12; ++seed) {
        for (const bool wait : {false, true}) {
            Session session;
            kvpool_emu_set_seed(seed);
            const CUdeviceptr a = session.words(300);
            const CUdeviceptr b = session.words(300);
            const CUdeviceptr c = session.words(300);
            CUstream producer = session.stream();
            CUstream consumer = session.stream();
            CUevent event = session.event();
            CHECK_EQ(cuMemsetD8Async(a, 0, 1200, producer), 0);
            CHECK_EQ(cuMemsetD8Async(b, 0, 1200, producer), 0);
            CHECK_EQ(cuStreamSynchronize(producer), 0);
            CHECK_EQ(session.launch(producer, a, b, 300, 7), 0);
            CHECK_EQ(cuEventRecord(event, producer), 0);
            if (wait) CHECK_EQ(cuStreamWaitEvent(consumer, event, 0), 0);
            CHECK_EQ(session.launch(consumer, b, c, 300, 1), 0);
            CHECK_EQ(cuStreamSynchronize(consumer), 0);
            const uint32_t got = session.read(c, 300)[299];
            if (wait) CHECK_EQ(got, 8u);
            if (!wait && got != 8) ++wrong_without;
            if (!wait && seed == 0) CHECK_EQ(got, 1u);
        }
    }
    CHECK(wrong_without >= 3);
}

TEST(driver_events) {
    Session session;
    const CUdeviceptr a = session.words(1);
    CUstream stream = session.stream();
    CUevent start = session.event();
    CUevent end = session.event();
    // Never recorded: nothing to wait for.
    CHECK_EQ(cuEventQuery(start), 0);
    CHECK_EQ(cuEventSynchronize(start), 0);
    CHECK_EQ(cuStreamWaitEvent(stream, start, 0), 0);
    float ms = -1.0f;
    CHECK_EQ(cuEventElapsedTime(&ms, start, end), emu::INVALID_HANDLE);
    CHECK_EQ(cuEventRecord(start, stream), 0);
    for (int i = 0; i < 3; ++i)
        CHECK_EQ(cuMemsetD8Async(a, static_cast<unsigned char>(i), 4, stream), 0);
    CHECK_EQ(cuEventRecord(end, stream), 0);
    CHECK_EQ(cuEventElapsedTime(&ms, start, end), emu::NOT_READY);
    // Whoever asks again and again gets there, one operation an ask.
    int asks = 0;
    while (cuEventQuery(end) == emu::NOT_READY) ++asks;
    CHECK_EQ(asks, 5);
    CHECK_EQ(cuEventElapsedTime(&ms, start, end), 0);
    CHECK(ms >= 0.0f && ms < 10000.0f);
    // Recorded again, it stands for the new place.
    CHECK_EQ(cuMemsetD8Async(a, 9, 4, stream), 0);
    CHECK_EQ(cuEventRecord(end, stream), 0);
    CHECK_EQ(cuEventQuery(end), emu::NOT_READY);
    CHECK_EQ(cuEventSynchronize(end), 0);
    CHECK_EQ(cuEventDestroy_v2(end), 0);
    CHECK_EQ(cuEventDestroy_v2(end), emu::INVALID_HANDLE);
    CHECK_EQ(cuEventRecord(end, stream), emu::INVALID_HANDLE);
    CHECK_EQ(kvpool_emu_counter("synchronisations"), 2u);
    CHECK_EQ(kvpool_emu_counter("events"), 2u);
    CHECK_EQ(kvpool_emu_counter("live_events"), 1u);
    CHECK_EQ(kvpool_emu_counter("live_streams"), 1u);
    CHECK_EQ(kvpool_emu_counter("live_modules"), 1u);
}

TEST(driver_default_stream_waits_for_the_blocking_ones) {
    for (const unsigned flags : {0u, emu::STREAM_NON_BLOCKING}) {
        Session session;
        const CUdeviceptr a = session.words(1);
        CUstream stream = session.stream(flags);
        CHECK_EQ(cuMemsetD8Async(a, 0, 4, stream), 0);
        CHECK_EQ(session.launch(stream, a, a, 1, 3), 0);
        // The copy is made on the default stream.
        CHECK_EQ(session.read(a, 1)[0], flags == 0 ? 3u : 0xFFFFFFFFu);
        CHECK_EQ(kvpool_emu_counter("pending"), flags == 0 ? 0u : 2u);
        CHECK_EQ(cuStreamQuery(stream), flags == 0 ? 0 : emu::NOT_READY);
        CHECK_EQ(cuCtxSynchronize(), 0);
        CHECK_EQ(session.read(a, 1)[0], 3u);
    }
}

TEST(driver_stream_lives_on_until_its_work_is_done) {
    Session session;
    const CUdeviceptr a = session.words(1);
    CUstream stream = session.stream();
    CHECK_EQ(cuMemsetD8Async(a, 3, 4, stream), 0);
    CHECK_EQ(cuStreamDestroy_v2(stream), 0);
    CHECK_EQ(cuStreamDestroy_v2(stream), emu::INVALID_HANDLE);
    CHECK_EQ(kvpool_emu_counter("pending"), 1u);
    CHECK_EQ(cuCtxSynchronize(), 0);
    CHECK_EQ(session.read(a, 1)[0], 0x03030303u);
}

TEST(driver_queues_are_bounded) {
    Session session;
    const CUdeviceptr a = session.words(1);
    CUstream stream = session.stream();
    for (int i = 0; i < 3000; ++i)
        CHECK_EQ(cuMemsetD8Async(a, static_cast<unsigned char>(i), 4, stream), 0);
    CHECK_EQ(kvpool_emu_counter("pending"), 1024u);
    CHECK_EQ(cuStreamSynchronize(stream), 0);
    CHECK_EQ(session.read(a, 1)[0] & 0xFF, 2999u & 0xFF);
}

TEST(driver_host_calls_keep_their_turn) {
    Session session;
    CUstream stream = session.stream();
    const CUdeviceptr a = session.words(1);
    uint32_t* pinned = session.pinned(1);
    *pinned = 1;
    auto set = [](void* data) { *static_cast<uint32_t*>(data) += 10; };
    CHECK_EQ(cuLaunchHostFunc(stream, set, pinned), 0);
    CHECK_EQ(cuMemcpyHtoDAsync_v2(a, pinned, 4, stream), 0);
    CHECK_EQ(cuLaunchHostFunc(stream, set, pinned), 0);
    CHECK_EQ(*pinned, 1u);
    CHECK_EQ(cuStreamSynchronize(stream), 0);
    CHECK_EQ(session.read(a, 1)[0], 11u);
    CHECK_EQ(*pinned, 21u);
}

TEST(driver_launches_are_checked) {
    Session session;
    CUfunction none = nullptr;
    CHECK_EQ(cuModuleGetFunction(&none, session.module, "no_such_kernel"), emu::NOT_FOUND);
    AddParams params{0, 0, 0, 0};
    void* pointers[] = {&params};
    auto launch = [&](unsigned grid, unsigned block, unsigned shared) {
        return cuLaunchKernel(session.add, grid, 1, 1, block, 1, 1, shared, nullptr, pointers,
                              nullptr);
    };
    CHECK_EQ(launch(1, 128, 0), 0);
    CHECK_EQ(launch(0, 128, 0), emu::INVALID_VALUE);
    CHECK_EQ(launch(1, 2048, 0), emu::INVALID_VALUE);
    CHECK_EQ(launch(1, 129, 0), emu::LAUNCH_OUT_OF_RESOURCES);
    CHECK_EQ(launch(1, 128, (48 << 10) + 1), emu::INVALID_VALUE);
    CHECK_EQ(cuFuncSetAttribute(session.add, emu::FUNCTION_MAX_DYNAMIC_SHARED, (227 << 10) + 1),
             emu::INVALID_VALUE);
    CHECK_EQ(cuFuncSetAttribute(session.add, emu::FUNCTION_MAX_DYNAMIC_SHARED, 100 << 10), 0);
    CHECK_EQ(launch(1, 128, 100 << 10), 0);
    CHECK_EQ(cuLaunchKernel(none, 1, 1, 1, 1, 1, 1, 0, nullptr, pointers, nullptr),
             emu::INVALID_HANDLE);
    CHECK_EQ(kvpool_emu_counter("launches"), 2u);
    CHECK_EQ(cuModuleUnload(session.module), 0);
    CHECK_EQ(launch(1, 128, 0), emu::INVALID_HANDLE);
    CHECK_EQ(cuModuleLoadData(&session.module, nullptr), emu::INVALID_VALUE);
}

TEST(driver_takes_parameters_at_the_launch) {
    Session session;
    const CUdeviceptr a = session.words(1);
    CUstream stream = session.stream();
    CHECK_EQ(cuMemsetD8Async(a, 0, 4, stream), 0);
    AddParams params{a, a, 1, 5};
    void* pointers[] = {&params};
    CHECK_EQ(cuLaunchKernel(session.add, 1, 1, 1, 1, 1, 1, 0, stream, pointers, nullptr), 0);
    params.add = 100;
    CHECK_EQ(cuStreamSynchronize(stream), 0);
    CHECK_EQ(session.read(a, 1)[0], 5u);
}

TEST(driver_counts_the_traffic_of_kernels) {
    Session session;
    const CUdeviceptr a = session.words(256);
    CUstream stream = session.stream();
    CHECK_EQ(session.launch(stream, a, a, 256, 0), 0);
    CHECK_EQ(session.launch(stream, a, a, 256, 0), 0);
    uint64_t traffic[4];
    CHECK_EQ(kvpool_emu_traffic("emu_test_add", traffic), 2u);
    CHECK_EQ(traffic[0], 2048u);
    CHECK_EQ(traffic[1], 2048u);
    CHECK_EQ(traffic[2], 64u);
    CHECK_EQ(traffic[3], 64u);
    std::string names;
    kvpool_emu_each_kernel(
        [](const char* name, void* data) { *static_cast<std::string*>(data) += name; }, &names);
    CHECK_TEXT(names, "emu_test_add");
    kvpool_emu_reset_counters();
    CHECK_EQ(kvpool_emu_traffic("emu_test_add", traffic), 0u);
    CHECK_EQ(traffic[0], 0u);
}

TEST(driver_ends_the_context_after_a_bad_access) {
    {
        Session session;
        const CUdeviceptr a = session.words(4);
        CUstream stream = session.stream();
        // The launch is fine; the error comes to whoever waits.
        CHECK_EQ(session.launch(stream, a, a, 5, 1), 0);
        CHECK_EQ(cuStreamSynchronize(stream), emu::ILLEGAL_ADDRESS);
        CHECK_HAS(kvpool_emu_last_fault(), "emu_test_add, block (0, 0, 0), thread (4, 0, 0)");
        CHECK_EQ(session.launch(stream, a, a, 1, 1), emu::ILLEGAL_ADDRESS);
        CUdeviceptr b = 0;
        CHECK_EQ(cuMemAlloc_v2(&b, 4), emu::ILLEGAL_ADDRESS);
    }
    Session session;
    const CUdeviceptr a = session.words(1);
    CHECK_EQ(cuMemsetD8Async(a, 0, 4, nullptr), 0);
    CHECK_EQ(session.launch(nullptr, a, a, 1, 1), 0);
    CHECK_EQ(session.read(a, 1)[0], 1u);
}

TEST(driver_fails_as_planned) {
    {
        Session session;
        CHECK_EQ(kvpool_emu_fail("cuMemAlloc:2:2,emu_test_add:2:719"), 1);
        CHECK_EQ(kvpool_emu_fail("cuMemAlloc:x"), 0);
        CHECK_EQ(kvpool_emu_fail("cuMemAlloc:0:2"), 0);
        const CUdeviceptr a = session.words(1);
        CUdeviceptr b = 0;
        CHECK_EQ(cuMemAlloc_v2(&b, 4), emu::OUT_OF_MEMORY);
        CHECK_EQ(cuMemAlloc_v2(&b, 4), 0);
        CHECK_EQ(session.launch(nullptr, a, a, 1, 1), 0);
        CHECK_EQ(session.launch(nullptr, a, a, 1, 1), 0);
        CHECK_EQ(cuCtxSynchronize(), emu::LAUNCH_FAILED);
    }
    Session session;
    CHECK_EQ(cuCtxSynchronize(), 0);
}

TEST(driver_fails_at_any_call_but_those_that_give_back) {
    Session session;
    kvpool_emu_reset_counters();
    CHECK_EQ(kvpool_emu_fail("*:2:701"), 1);
    const CUdeviceptr a = session.words(1);
    CHECK_EQ(cuMemFree_v2(a), 0);
    CHECK_EQ(kvpool_emu_counter("failures"), 0u);
    CHECK_EQ(cuCtxSynchronize(), emu::LAUNCH_OUT_OF_RESOURCES);
    CHECK_EQ(kvpool_emu_counter("failures"), 1u);
    CHECK_TEXT(kvpool_emu_last_failure(), "cuCtxSynchronize");
    CHECK_EQ(cuCtxSynchronize(), 0);
    kvpool_emu_fail(nullptr);
    std::map<std::string, uint64_t> calls;
    kvpool_emu_each_call(
        [](const char* call, uint64_t count, void* data) {
            (*static_cast<std::map<std::string, uint64_t>*>(data))[call] = count;
        },
        &calls);
    CHECK_EQ(calls["cuMemAlloc_v2"], 1u);
    CHECK_EQ(calls["cuMemFree_v2"], 1u);
    CHECK_EQ(calls["cuCtxSynchronize"], 2u);
}

TEST(driver_gives_everything_back_with_the_context) {
    Session* first = new Session();
    const CUdeviceptr a = first->words(100);
    first->pinned(10);
    CHECK_EQ(kvpool_emu_counter("live_bytes"), 400u);
    CHECK_EQ(kvpool_emu_counter("live_host_bytes"), 40u);
    delete first;
    Session second;
    CHECK_EQ(cuMemFree_v2(a), emu::INVALID_VALUE);
}

TEST(driver_is_used_by_several_host_threads) {
    Session session;
    std::vector<std::thread> threads;
    std::vector<int> errors(4, 0);
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&session, &errors, t] {
            auto good = [&errors, t](CUresult code) { errors[t] += code != 0 ? 1 : 0; };
            // A context is current in the thread that made it so.
            CUdeviceptr a = 0;
            errors[t] += cuMemAlloc_v2(&a, 4) == emu::INVALID_CONTEXT ? 0 : 1;
            good(cuCtxPushCurrent_v2(session.context));
            CUstream stream = nullptr;
            good(cuStreamCreate(&stream, emu::STREAM_NON_BLOCKING));
            good(cuMemAlloc_v2(&a, 4000));
            good(cuMemsetD8Async(a, 0, 4000, stream));
            for (uint32_t i = 0; i < 20; ++i)
                good(session.launch(stream, a, a, 1000, i + static_cast<uint32_t>(t)));
            std::vector<uint32_t> words(1000);
            good(cuMemcpyDtoHAsync_v2(words.data(), a, 4000, stream));
            for (const uint32_t word : words)
                errors[t] += word == 190 + 20 * static_cast<uint32_t>(t) ? 0 : 1;
            good(cuMemFree_v2(a));
            good(cuStreamDestroy_v2(stream));
            good(cuCtxPopCurrent_v2(nullptr));
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const int count : errors) CHECK_EQ(count, 0);
}
