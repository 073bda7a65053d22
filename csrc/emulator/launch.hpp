// Launches kernels from a C++ program, without the driver's stand-in: for tests of kernels.
//
//   kvpool::emu::Device device;             // optionally: bytes of memory
//   auto x = device.array<float>(1024);     // x.address() goes into the parameters
//   x[i] = …                                // the host's view of the same bytes
//   Fault fault = device.launch("kvpool_…", {grid}, {block}, shared_bytes, params);
//   device.traffic("kvpool_…").read_sectors
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <string>
#include <vector>

#include "engine.hpp"

namespace kvpool::emu {

// `size` elements of device memory, for the life of the device.
template <class T>
class Array {
public:
    Array(uint64_t address, T* host, size_t size) : address_(address), host_(host), size_(size) {}
    uint64_t address() const { return address_; }
    size_t size() const { return size_; }
    // [size]
    T* host() const { return host_; }
    T& operator[](size_t i) const { return host_[i]; }

private:
    uint64_t address_;
    T* host_;
    size_t size_;
};

class Device {
public:
    explicit Device(uint64_t memory_bytes = DeviceMemory::DEFAULT_BYTES)
        : memory_(memory_bytes), engine_(memory_) {
        const char* seed = getenv("KVPOOL_EMU_SEED");
        if (seed != nullptr) this->seed = strtoull(seed, nullptr, 10);
    }

    // New memory, of bytes 0xFF.
    template <class T>
    Array<T> array(size_t size) {
        const uint64_t address = memory_.allocate(size * sizeof(T));
        if (address == 0) {
            fprintf(stderr, "kvpool emulator: no room for %zu bytes\n", size * sizeof(T));
            abort();
        }
        return Array<T>(address, reinterpret_cast<T*>(memory_.find(address, size * sizeof(T))),
                        size);
    }
    template <class T>
    Array<T> array(const std::vector<T>& values) {
        Array<T> result = array<T>(values.size());
        memcpy(static_cast<void*>(result.host()), values.data(), values.size() * sizeof(T));
        return result;
    }

    template <class Params>
    Fault launch(const char* kernel, Dim3 grid, Dim3 block, uint32_t shared_bytes,
                 const Params& params) {
        Launch launch;
        launch.kernel = find_kernel(kernel);
        if (launch.kernel == nullptr)
            return Fault{FaultCode::InvalidValue, text_of("no kernel %s", kernel)};
        if (launch.kernel->params_bytes != sizeof(Params)) {
            return Fault{FaultCode::InvalidValue,
                         text_of("%s takes %zu bytes of parameters, not %zu", kernel,
                                 launch.kernel->params_bytes, sizeof(Params))};
        }
        if (block.count() == 0 || block.count() > launch.kernel->max_threads || grid.count() == 0 ||
            shared_bytes > DYNAMIC_SHARED_BYTES) {
            return Fault{FaultCode::InvalidValue, text_of("%s: no such launch", kernel)};
        }
        launch.grid = grid;
        launch.block = block;
        launch.shared_bytes = shared_bytes;
        launch.params = &params;
        launch.seed = seed;
        launch.count_banks = count_banks;
        return engine_.run(launch, traffic_[kernel]);
    }

    // All that a kernel has moved since the last clear_traffic().
    const Traffic& traffic(const char* kernel) { return traffic_[kernel]; }
    void clear_traffic() { traffic_.clear(); }
    DeviceMemory& memory() { return memory_; }

    // 0: natural order of threads, warps and blocks. From KVPOOL_EMU_SEED at first.
    uint64_t seed = 0;
    // Whether Traffic::bank_conflicts is counted.
    bool count_banks = false;

private:
    DeviceMemory memory_;
    Engine engine_;
    std::map<std::string, Traffic> traffic_;
};

}  // namespace kvpool::emu
