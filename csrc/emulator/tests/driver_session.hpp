// A program's use of the driver, from beginning to end.
#pragma once

#include <stdint.h>

#include <vector>

#include "check.hpp"
#include "driver_calls.hpp"

namespace emu = kvpool::emu;

// Of the kernel emu_test_add, in driver_test.cpp.
struct AddParams {
    // in, out: [count]
    uint64_t in, out;
    uint32_t count, add;
};

// The device with a context, a module and its kernel; everything is given back at the end.
class Session {
public:
    Session() {
        CHECK_EQ(cuInit(0), 0);
        CHECK_EQ(cuDevicePrimaryCtxRetain(&context, 0), 0);
        CHECK_EQ(cuCtxPushCurrent_v2(context), 0);
        CHECK_EQ(cuModuleLoadData(&module, "kvpool-emulated"), 0);
        CHECK_EQ(cuModuleGetFunction(&add, module, "emu_test_add"), 0);
        kvpool_emu_reset_counters();
    }
    ~Session() {
        kvpool_emu_fail(nullptr);
        kvpool_emu_set_seed(0);
        CHECK_EQ(cuCtxPopCurrent_v2(nullptr), 0);
        CHECK_EQ(cuDevicePrimaryCtxRelease_v2(0), 0);
        CHECK_EQ(kvpool_emu_counter("live_bytes"), 0u);
        CHECK_EQ(kvpool_emu_counter("live_host_bytes"), 0u);
    }
    // New device memory of `words` words.
    CUdeviceptr words(size_t words) {
        CUdeviceptr address = 0;
        CHECK_EQ(cuMemAlloc_v2(&address, 4 * words), 0);
        return address;
    }
    uint32_t* pinned(size_t words) {
        void* p = nullptr;
        CHECK_EQ(cuMemHostAlloc(&p, 4 * words, 0), 0);
        return static_cast<uint32_t*>(p);
    }
    CUstream stream(unsigned flags = emu::STREAM_NON_BLOCKING) {
        CUstream stream = nullptr;
        CHECK_EQ(cuStreamCreate(&stream, flags), 0);
        return stream;
    }
    CUevent event() {
        CUevent event = nullptr;
        CHECK_EQ(cuEventCreate(&event, 0), 0);
        return event;
    }
    CUresult launch(CUstream stream, CUdeviceptr in, CUdeviceptr out, uint32_t count,
                    uint32_t plus) {
        AddParams params{in, out, count, plus};
        void* pointers[] = {&params};
        return cuLaunchKernel(add, (count + 127) / 128, 1, 1, 128, 1, 1, 0, stream, pointers,
                              nullptr);
    }
    std::vector<uint32_t> read(CUdeviceptr from, size_t words) {
        std::vector<uint32_t> result(words);
        CHECK_EQ(cuMemcpyDtoH_v2(result.data(), from, 4 * words), 0);
        return result;
    }
    CUcontext context = nullptr;
    CUmodule module = nullptr;
    CUfunction add = nullptr;
};
