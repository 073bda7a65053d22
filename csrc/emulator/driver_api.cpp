// The entry points of the emulated driver that describe it and move bytes: what a program finds in
// libcuda.so. Each checks its arguments as the real one does, counts, and puts work into the queues
// of driver.hpp.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver_call.hpp"

namespace kvpool::emu {
namespace {

CUresult put_copy(Driver& driver, CUstream stream_handle, Operation operation, bool wait) {
    auto stream = driver.stream_of(stream_handle);
    if (stream == nullptr) return INVALID_HANDLE;
    if (operation.bytes == 0) return wait ? finish(driver, Driver::end_of(stream)) : SUCCESS;
    for (const uint64_t address : {operation.device_to, operation.device_from}) {
        if (address != 0 && driver.memory->find(address, operation.bytes) == nullptr)
            return INVALID_VALUE;
    }
    if (wait && driver.spoils_capture()) return CAPTURE_UNSUPPORTED;
    const CUresult put = driver.put(stream, std::move(operation));
    if (put != SUCCESS || !wait) return put;
    return finish(driver, Driver::end_of(stream));
}

// From memory that is not pinned the driver takes the bytes at once; pinned memory is read when the
// copy is done, and any memory when a graph's copy is.
CUresult copy_to_device(Driver& driver, CUdeviceptr to, const void* from, size_t bytes,
                        CUstream stream, bool wait) {
    if (to == 0 || (from == nullptr && bytes != 0)) return INVALID_VALUE;
    // Before the bytes are taken from the caller.
    if (bytes != 0 && driver.memory->find(to, bytes) == nullptr) return INVALID_VALUE;
    driver.counters.copies_to_device += 1;
    driver.counters.bytes_to_device += bytes;
    Operation operation;
    operation.kind = OperationKind::ToDevice;
    operation.device_to = to;
    operation.bytes = bytes;
    const char* source = static_cast<const char*>(from);
    auto stream_captured = driver.stream_of(stream);
    const bool captured = stream_captured != nullptr && stream_captured->capture != nullptr;
    if (captured || driver.is_pinned(from, bytes)) {
        operation.host_from = source;
    } else {
        operation.staged.assign(source, source + bytes);
    }
    return put_copy(driver, stream, std::move(operation), wait);
}

// To memory that is not pinned the copy has been made when the call returns.
CUresult copy_to_host(Driver& driver, void* to, CUdeviceptr from, size_t bytes, CUstream stream,
                      bool wait) {
    if (from == 0 || (to == nullptr && bytes != 0)) return INVALID_VALUE;
    driver.counters.copies_to_host += 1;
    driver.counters.bytes_to_host += bytes;
    Operation operation;
    operation.kind = OperationKind::ToHost;
    operation.device_from = from;
    operation.host_to = static_cast<char*>(to);
    operation.bytes = bytes;
    return put_copy(driver, stream, std::move(operation), wait || !driver.is_pinned(to, bytes));
}

CUresult copy_on_device(Driver& driver, CUdeviceptr to, CUdeviceptr from, size_t bytes,
                        CUstream stream) {
    if (to == 0 || from == 0) return INVALID_VALUE;
    driver.counters.copies_on_device += 1;
    Operation operation;
    operation.kind = OperationKind::OnDevice;
    operation.device_to = to;
    operation.device_from = from;
    operation.bytes = bytes;
    return put_copy(driver, stream, std::move(operation), false);
}

CUresult fill(Driver& driver, CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    if (to == 0) return INVALID_VALUE;
    driver.counters.fills += 1;
    Operation operation;
    operation.kind = OperationKind::Fill;
    operation.device_to = to;
    operation.bytes = bytes;
    operation.fill = value;
    return put_copy(driver, stream, std::move(operation), false);
}

int attribute_of(const Settings& settings, int attribute) {
    switch (static_cast<Attribute>(attribute)) {
        case Attribute::MaxThreadsPerBlock:
        case Attribute::MaxBlockDimX:
        case Attribute::MaxBlockDimY:
            return 1024;
        case Attribute::MaxBlockDimZ:
            return 64;
        case Attribute::MaxGridDimX:
            return INT32_MAX;
        case Attribute::MaxGridDimY:
        case Attribute::MaxGridDimZ:
            return 65535;
        case Attribute::MaxSharedMemoryPerBlock:
            return 48 << 10;
        case Attribute::WarpSize:
            return 32;
        case Attribute::MultiprocessorCount:
            return settings.multiprocessors;
        case Attribute::CanMapHostMemory:
        case Attribute::ConcurrentKernels:
        case Attribute::AsyncEngineCount:
        case Attribute::UnifiedAddressing:
            return 1;
        case Attribute::L2CacheSize:
            return 32 << 20;
        case Attribute::MaxThreadsPerMultiprocessor:
            return 2048;
        case Attribute::ComputeCapabilityMajor:
            return settings.capability_major;
        case Attribute::ComputeCapabilityMinor:
            return settings.capability_minor;
        case Attribute::MaxSharedMemoryPerMultiprocessor:
            return static_cast<int>(settings.max_dynamic_shared() + 1024);
        case Attribute::MaxSharedMemoryPerBlockOptin:
            return static_cast<int>(settings.max_dynamic_shared());
    }
    return 0;
}

}  // namespace
}  // namespace kvpool::emu

using namespace kvpool::emu;

// ---- The driver and its device ----------------------------------------------------------------

KV_API CUresult cuInit(unsigned flags) {
    Call call("cuInit", Needs::Nothing);
    if (call.status != SUCCESS) return call.status;
    if (flags != 0) return INVALID_VALUE;
    return call.driver.initialise();
}

KV_API CUresult cuDriverGetVersion(int* version) {
    KV_ENTER("cuDriverGetVersion", Needs::Nothing);
    if (version == nullptr) return INVALID_VALUE;
    *version = driver.settings.driver_version;
    return SUCCESS;
}

KV_API CUresult cuDeviceGetCount(int* count) {
    KV_ENTER("cuDeviceGetCount", Needs::Driver);
    if (count == nullptr) return INVALID_VALUE;
    *count = driver.settings.devices;
    return SUCCESS;
}

KV_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    KV_ENTER("cuDeviceGet", Needs::Driver);
    if (device == nullptr) return INVALID_VALUE;
    if (ordinal < 0 || ordinal >= driver.settings.devices) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

KV_API CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
    KV_ENTER("cuDeviceGetName", Needs::Driver);
    if (name == nullptr || length <= 0) return INVALID_VALUE;
    if (device != 0) return INVALID_DEVICE;
    snprintf(name, static_cast<size_t>(length),
             "kvpool EMULATED device (no GPU: kernels run on the host)");
    return SUCCESS;
}

KV_API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
    KV_ENTER("cuDeviceGetAttribute", Needs::Driver);
    if (value == nullptr) return INVALID_VALUE;
    if (device != 0) return INVALID_DEVICE;
    *value = attribute_of(driver.settings, attribute);
    return SUCCESS;
}

KV_API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
    KV_ENTER("cuDeviceTotalMem_v2", Needs::Driver);
    if (bytes == nullptr) return INVALID_VALUE;
    if (device != 0) return INVALID_DEVICE;
    *bytes = driver.memory->capacity();
    return SUCCESS;
}

// ---- Contexts ---------------------------------------------------------------------------------

KV_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    KV_ENTER("cuDevicePrimaryCtxRetain", Needs::Driver);
    if (context == nullptr) return INVALID_VALUE;
    if (device != 0) return INVALID_DEVICE;
    driver.context_users += 1;
    *context = &driver.context;
    return SUCCESS;
}

KV_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    KV_ENTER("cuDevicePrimaryCtxRelease_v2", Needs::Driver);
    if (device != 0) return INVALID_DEVICE;
    if (driver.context_users == 0) return INVALID_CONTEXT;
    driver.context_users -= 1;
    if (driver.context_users == 0) driver.destroy_context();
    return SUCCESS;
}

KV_API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    KV_ENTER("cuDevicePrimaryCtxReset_v2", Needs::Driver);
    if (device != 0) return INVALID_DEVICE;
    driver.destroy_context();
    return SUCCESS;
}

KV_API CUresult cuCtxPushCurrent_v2(CUcontext context) {
    KV_ENTER("cuCtxPushCurrent_v2", Needs::Driver);
    if (context != &driver.context || driver.context_users == 0) return INVALID_CONTEXT;
    current_contexts.push_back(context);
    return SUCCESS;
}

KV_API CUresult cuCtxPopCurrent_v2(CUcontext* context) {
    KV_ENTER("cuCtxPopCurrent_v2", Needs::Driver);
    if (current_contexts.empty()) return INVALID_CONTEXT;
    if (context != nullptr) *context = current_contexts.back();
    current_contexts.pop_back();
    return SUCCESS;
}

KV_API CUresult cuCtxSetCurrent(CUcontext context) {
    KV_ENTER("cuCtxSetCurrent", Needs::Driver);
    if (context != nullptr && (context != &driver.context || driver.context_users == 0))
        return INVALID_CONTEXT;
    if (!current_contexts.empty()) current_contexts.pop_back();
    if (context != nullptr) current_contexts.push_back(context);
    return SUCCESS;
}

KV_API CUresult cuCtxGetCurrent(CUcontext* context) {
    KV_ENTER("cuCtxGetCurrent", Needs::Driver);
    if (context == nullptr) return INVALID_VALUE;
    *context = current_contexts.empty() ? nullptr : current_contexts.back();
    return SUCCESS;
}

KV_API CUresult cuCtxSynchronize() {
    KV_ENTER("cuCtxSynchronize", Needs::Context);
    if (driver.spoils_capture()) return CAPTURE_UNSUPPORTED;
    driver.counters.synchronisations += 1;
    driver.finish_all();
    return driver.sticky;
}

// ---- Memory -----------------------------------------------------------------------------------

KV_API CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
    KV_ENTER("cuMemGetInfo_v2", Needs::Context);
    if (free_bytes != nullptr) *free_bytes = driver.memory->capacity() - driver.memory->allocated();
    if (total_bytes != nullptr) *total_bytes = driver.memory->capacity();
    return SUCCESS;
}

KV_API CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
    KV_ENTER("cuMemAlloc_v2", Needs::Context);
    if (address == nullptr || bytes == 0) return INVALID_VALUE;
    if (driver.spoils_capture()) return CAPTURE_UNSUPPORTED;
    const uint64_t allocated = driver.memory->allocate(bytes);
    if (allocated == 0) return OUT_OF_MEMORY;
    driver.allocations[allocated] = bytes;
    driver.counters.allocations += 1;
    *address = allocated;
    return SUCCESS;
}

KV_API CUresult cuMemFree_v2(CUdeviceptr address) {
    KV_ENTER("cuMemFree_v2", Needs::Context);
    if (address == 0) return SUCCESS;
    if (driver.allocations.count(address) == 0) return INVALID_VALUE;
    if (driver.spoils_capture()) return CAPTURE_UNSUPPORTED;
    // It waits for the device, as the real one does.
    driver.finish_all();
    driver.allocations.erase(address);
    driver.memory->free(address);
    driver.counters.frees += 1;
    return SUCCESS;
}

KV_API CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned /*flags*/) {
    KV_ENTER("cuMemHostAlloc", Needs::Context);
    if (address == nullptr || bytes == 0) return INVALID_VALUE;
    if (driver.spoils_capture()) return CAPTURE_UNSUPPORTED;
    void* p = nullptr;
    if (posix_memalign(&p, 4096, bytes) != 0) return OUT_OF_MEMORY;
    memset(p, 0xFF, bytes);
    driver.memory->add_host(p, bytes);
    driver.host_allocations[p] = bytes;
    driver.counters.host_allocations += 1;
    *address = p;
    return SUCCESS;
}

KV_API CUresult cuMemAllocHost_v2(void** address, size_t bytes) {
    return cuMemHostAlloc(address, bytes, 0);
}

KV_API CUresult cuMemFreeHost(void* address) {
    KV_ENTER("cuMemFreeHost", Needs::Context);
    if (driver.host_allocations.count(address) == 0) return INVALID_VALUE;
    driver.finish_all();
    driver.host_allocations.erase(address);
    driver.memory->remove_host(address);
    free(address);
    return SUCCESS;
}

KV_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes,
                                     CUstream stream) {
    KV_ENTER("cuMemcpyHtoDAsync_v2", Needs::Context);
    return copy_to_device(driver, to, from, bytes, stream, false);
}

KV_API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
    KV_ENTER("cuMemcpyHtoD_v2", Needs::Context);
    return copy_to_device(driver, to, from, bytes, nullptr, true);
}

KV_API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    KV_ENTER("cuMemcpyDtoHAsync_v2", Needs::Context);
    return copy_to_host(driver, to, from, bytes, stream, false);
}

KV_API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
    KV_ENTER("cuMemcpyDtoH_v2", Needs::Context);
    return copy_to_host(driver, to, from, bytes, nullptr, true);
}

KV_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                                     CUstream stream) {
    KV_ENTER("cuMemcpyDtoDAsync_v2", Needs::Context);
    return copy_on_device(driver, to, from, bytes, stream);
}

KV_API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    KV_ENTER("cuMemcpyDtoD_v2", Needs::Context);
    return copy_on_device(driver, to, from, bytes, nullptr);
}

KV_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes,
                                CUstream stream) {
    KV_ENTER("cuMemsetD8Async", Needs::Context);
    return fill(driver, to, value, bytes, stream);
}

KV_API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes) {
    KV_ENTER("cuMemsetD8_v2", Needs::Context);
    return fill(driver, to, value, bytes, nullptr);
}
