// The entry points of the emulated driver: what a program finds in libcuda.so.
//
// Each checks its arguments as the real one does, counts, and puts work into the queues of driver.hpp.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.hpp"

#define KV_API extern "C" __attribute__((visibility("default")))

namespace kvpool::emu {
namespace {

enum class Needs { Nothing, Driver, Context };

// The contexts that a host thread has made current, the last one on top. There is only one context, or none.
thread_local std::vector<Context*> current_contexts;

// One call: holds the lock, and says whether to go on.
class Call {
public:
    Call(const char* name, Needs needs) : driver(Driver::get()), guard_(driver.lock) {
        status = check(name, needs);
    }
    Driver& driver;
    CUresult status;

private:
    CUresult check(const char* name, Needs needs) {
        const CUresult planned = driver.planned_failure(name);
        if (planned != SUCCESS) return planned;
        if (needs == Needs::Nothing) return SUCCESS;
        if (!driver.initialised) return NOT_INITIALIZED;
        if (needs == Needs::Driver) return SUCCESS;
        if (driver.context_users == 0 || current_contexts.empty() || current_contexts.back() == nullptr) {
            return INVALID_CONTEXT;
        }
        return driver.sticky;
    }
    std::lock_guard<std::recursive_mutex> guard_;
};

#define KV_ENTER(name, needs)                                                                      \
    Call call(name, needs);                                                                        \
    if (call.status != SUCCESS) return call.status;                                                \
    [[maybe_unused]] Driver& driver = call.driver

// The state after waiting: an error of the work that was waited for shows here.
CUresult finish(Driver& driver, const Ticket& ticket) {
    driver.counters.synchronisations += 1;
    driver.finish(ticket);
    return driver.sticky;
}

CUresult put_copy(Driver& driver, CUstream stream_handle, Operation operation, bool wait) {
    auto stream = driver.stream_of(stream_handle);
    if (stream == nullptr) return INVALID_HANDLE;
    if (operation.bytes == 0) return wait ? finish(driver, Driver::end_of(stream)) : SUCCESS;
    for (const uint64_t address : {operation.device_to, operation.device_from}) {
        if (address != 0 && driver.memory->find(address, operation.bytes) == nullptr) return INVALID_VALUE;
    }
    if (wait && stream->capture != nullptr) return CAPTURE_UNSUPPORTED;
    const CUresult put = driver.put(stream, std::move(operation));
    if (put != SUCCESS || !wait) return put;
    return finish(driver, Driver::end_of(stream));
}

// From memory that is not pinned the driver takes the bytes at once; pinned memory is read when the copy is done.
CUresult copy_to_device(Driver& driver, CUdeviceptr to, const void* from, size_t bytes, CUstream stream, bool wait) {
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
    if (driver.is_pinned(from, bytes)) {
        operation.host_from = source;
    } else {
        operation.staged.assign(source, source + bytes);
    }
    return put_copy(driver, stream, std::move(operation), wait);
}

// To memory that is not pinned the copy has been made when the call returns.
CUresult copy_to_host(Driver& driver, void* to, CUdeviceptr from, size_t bytes, CUstream stream, bool wait) {
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

CUresult copy_on_device(Driver& driver, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
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

// ---- The driver and its device -------------------------------------------------------------------

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
    snprintf(name, static_cast<size_t>(length), "kvpool EMULATED device (no GPU: kernels run on the host)");
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

// ---- Contexts ------------------------------------------------------------------------------------

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
    if (context != nullptr && (context != &driver.context || driver.context_users == 0)) return INVALID_CONTEXT;
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
    driver.counters.synchronisations += 1;
    driver.finish_all();
    return driver.sticky;
}

// ---- Memory --------------------------------------------------------------------------------------

KV_API CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
    KV_ENTER("cuMemGetInfo_v2", Needs::Context);
    if (free_bytes != nullptr) *free_bytes = driver.memory->capacity() - driver.memory->allocated();
    if (total_bytes != nullptr) *total_bytes = driver.memory->capacity();
    return SUCCESS;
}

KV_API CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
    KV_ENTER("cuMemAlloc_v2", Needs::Context);
    if (address == nullptr || bytes == 0) return INVALID_VALUE;
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
    void* p = nullptr;
    if (posix_memalign(&p, 4096, bytes) != 0) return OUT_OF_MEMORY;
    memset(p, 0xFF, bytes);
    driver.memory->add_host(p, bytes);
    driver.host_allocations[p] = bytes;
    driver.counters.host_allocations += 1;
    *address = p;
    return SUCCESS;
}

KV_API CUresult cuMemAllocHost_v2(void** address, size_t bytes) { return cuMemHostAlloc(address, bytes, 0); }

KV_API CUresult cuMemFreeHost(void* address) {
    KV_ENTER("cuMemFreeHost", Needs::Context);
    if (driver.host_allocations.count(address) == 0) return INVALID_VALUE;
    driver.finish_all();
    driver.host_allocations.erase(address);
    driver.memory->remove_host(address);
    free(address);
    return SUCCESS;
}

KV_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
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

KV_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    KV_ENTER("cuMemcpyDtoDAsync_v2", Needs::Context);
    return copy_on_device(driver, to, from, bytes, stream);
}

KV_API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    KV_ENTER("cuMemcpyDtoD_v2", Needs::Context);
    return copy_on_device(driver, to, from, bytes, nullptr);
}

KV_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    KV_ENTER("cuMemsetD8Async", Needs::Context);
    return fill(driver, to, value, bytes, stream);
}

KV_API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes) {
    KV_ENTER("cuMemsetD8_v2", Needs::Context);
    return fill(driver, to, value, bytes, nullptr);
}

// ---- Modules and launches ------------------------------------------------------------------------

KV_API CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    KV_ENTER("cuModuleLoadData", Needs::Context);
    if (module == nullptr || image == nullptr) return INVALID_VALUE;
    // Whatever the image holds, the kernels are those that were compiled in.
    auto loaded = std::make_unique<Module>();
    *module = loaded.get();
    driver.modules[loaded.get()] = std::move(loaded);
    driver.counters.modules += 1;
    return SUCCESS;
}

KV_API CUresult cuModuleUnload(CUmodule module) {
    KV_ENTER("cuModuleUnload", Needs::Context);
    if (driver.modules.count(module) == 0) return INVALID_HANDLE;
    driver.finish_all();
    driver.modules.erase(module);
    return SUCCESS;
}

KV_API CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    KV_ENTER("cuModuleGetFunction", Needs::Context);
    if (function == nullptr || name == nullptr) return INVALID_VALUE;
    auto found = driver.modules.find(module);
    if (found == driver.modules.end()) return INVALID_HANDLE;
    const KernelEntry* kernel = find_kernel(name);
    if (kernel == nullptr) return NOT_FOUND;
    for (auto& known : found->second->functions) {
        if (known->kernel == kernel) {
            *function = known.get();
            return SUCCESS;
        }
    }
    auto added = std::make_unique<Function>();
    added->kernel = kernel;
    *function = added.get();
    found->second->functions.push_back(std::move(added));
    return SUCCESS;
}

KV_API CUresult cuFuncSetAttribute(CUfunction handle, int attribute, int value) {
    KV_ENTER("cuFuncSetAttribute", Needs::Context);
    Function* function = driver.function_of(handle);
    if (function == nullptr) return INVALID_HANDLE;
    if (attribute == FUNCTION_SHARED_CARVEOUT) return SUCCESS;
    if (attribute != FUNCTION_MAX_DYNAMIC_SHARED || value < 0 ||
        static_cast<uint32_t>(value) > driver.settings.max_dynamic_shared()) {
        return INVALID_VALUE;
    }
    function->max_dynamic_shared = static_cast<uint32_t>(value);
    return SUCCESS;
}

KV_API CUresult cuFuncGetAttribute(int* value, int attribute, CUfunction handle) {
    KV_ENTER("cuFuncGetAttribute", Needs::Context);
    const Function* function = driver.function_of(handle);
    if (function == nullptr) return INVALID_HANDLE;
    if (value == nullptr) return INVALID_VALUE;
    switch (attribute) {
        case FUNCTION_MAX_THREADS:
            *value = static_cast<int>(function->kernel->max_threads);
            break;
        case FUNCTION_MAX_DYNAMIC_SHARED:
            *value = static_cast<int>(function->max_dynamic_shared);
            break;
        default:
            *value = 0;
    }
    return SUCCESS;
}

KV_API CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                               CUstream stream_handle, void** params, void** extra) {
    KV_ENTER("cuLaunchKernel", Needs::Context);
    const Function* function = driver.function_of(handle);
    auto stream = driver.stream_of(stream_handle);
    if (function == nullptr || stream == nullptr) return INVALID_HANDLE;
    if (extra != nullptr) return NOT_SUPPORTED;
    const Dim3 grid{grid_x, grid_y, grid_z};
    const Dim3 block{block_x, block_y, block_z};
    if (params == nullptr || params[0] == nullptr || grid.count() == 0 || block.count() == 0 ||
        grid_x > INT32_MAX || grid_y > 65535 || grid_z > 65535 || block.count() > MAX_THREADS || block_z > 64 ||
        shared_bytes > function->max_dynamic_shared) {
        return INVALID_VALUE;
    }
    // More threads than __launch_bounds__ left registers for.
    if (block.count() > function->kernel->max_threads) return LAUNCH_OUT_OF_RESOURCES;
    driver.counters.launches += 1;
    Operation operation;
    operation.kind = OperationKind::Launch;
    operation.launch.kernel = function->kernel;
    operation.launch.grid = grid;
    operation.launch.block = block;
    operation.launch.shared_bytes = shared_bytes;
    const auto* bytes = static_cast<const unsigned char*>(params[0]);
    operation.params.assign(bytes, bytes + function->kernel->params_bytes);
    return driver.put(stream, std::move(operation));
}

KV_API CUresult cuLaunchHostFunc(CUstream stream_handle, CUhostFn host_call, void* data) {
    KV_ENTER("cuLaunchHostFunc", Needs::Context);
    auto stream = driver.stream_of(stream_handle);
    if (stream == nullptr) return INVALID_HANDLE;
    if (host_call == nullptr) return INVALID_VALUE;
    Operation operation;
    operation.kind = OperationKind::HostCall;
    operation.host_call = host_call;
    operation.host_data = data;
    return driver.put(stream, std::move(operation));
}

// ---- Streams and events --------------------------------------------------------------------------

KV_API CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
    KV_ENTER("cuStreamCreate", Needs::Context);
    if (stream == nullptr || flags > STREAM_NON_BLOCKING) return INVALID_VALUE;
    auto created = std::make_shared<Stream>();
    created->flags = flags;
    *stream = created.get();
    driver.streams[created.get()] = created;
    driver.counters.streams += 1;
    return SUCCESS;
}

KV_API CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int /*priority*/) {
    return cuStreamCreate(stream, flags);
}

KV_API CUresult cuStreamDestroy_v2(CUstream handle) {
    KV_ENTER("cuStreamDestroy_v2", Needs::Context);
    auto found = driver.streams.find(handle);
    if (found == driver.streams.end()) return INVALID_HANDLE;
    // Its work is still done, sometime.
    if (!found->second->queue.empty()) driver.leaving_streams.push_back(found->second);
    driver.streams.erase(found);
    return SUCCESS;
}

KV_API CUresult cuStreamSynchronize(CUstream handle) {
    KV_ENTER("cuStreamSynchronize", Needs::Context);
    auto stream = driver.stream_of(handle);
    if (stream == nullptr) return INVALID_HANDLE;
    if (stream->capture != nullptr) return CAPTURE_UNSUPPORTED;
    Ticket end = Driver::end_of(stream);
    if (stream->is_null) {
        // The legacy default stream stands for all that block.
        for (auto& other : driver.streams) {
            if ((other.second->flags & STREAM_NON_BLOCKING) == 0) driver.finish(Driver::end_of(other.second));
        }
    }
    return finish(driver, end);
}

KV_API CUresult cuStreamQuery(CUstream handle) {
    KV_ENTER("cuStreamQuery", Needs::Context);
    auto stream = driver.stream_of(handle);
    if (stream == nullptr) return INVALID_HANDLE;
    if (Driver::reached(Driver::end_of(stream))) return SUCCESS;
    driver.make_progress(stream);
    return driver.sticky != SUCCESS ? driver.sticky : NOT_READY;
}

KV_API CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned /*flags*/) {
    KV_ENTER("cuStreamWaitEvent", Needs::Context);
    auto stream = driver.stream_of(handle);
    auto event = driver.events.find(event_handle);
    if (stream == nullptr || event == driver.events.end()) return INVALID_HANDLE;
    // An event that was never recorded is no reason to wait.
    if (!event->second->recorded) return SUCCESS;
    Operation operation;
    operation.kind = OperationKind::Wait;
    operation.after.push_back(event->second->ticket);
    return driver.put(stream, std::move(operation));
}

KV_API CUresult cuEventCreate(CUevent* event, unsigned flags) {
    KV_ENTER("cuEventCreate", Needs::Context);
    if (event == nullptr) return INVALID_VALUE;
    auto created = std::make_shared<Event>();
    created->flags = flags;
    *event = created.get();
    driver.events[created.get()] = created;
    driver.counters.events += 1;
    return SUCCESS;
}

KV_API CUresult cuEventDestroy_v2(CUevent handle) {
    KV_ENTER("cuEventDestroy_v2", Needs::Context);
    return driver.events.erase(handle) != 0 ? SUCCESS : INVALID_HANDLE;
}

KV_API CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    KV_ENTER("cuEventRecord", Needs::Context);
    auto event = driver.events.find(handle);
    auto stream = driver.stream_of(stream_handle);
    if (event == driver.events.end() || stream == nullptr) return INVALID_HANDLE;
    Operation operation;
    operation.kind = OperationKind::Record;
    operation.event = event->second;
    const bool captured = stream->capture != nullptr;
    const CUresult put = driver.put(stream, std::move(operation));
    if (put == SUCCESS && !captured) {
        event->second->recorded = true;
        event->second->ticket = Driver::end_of(stream);
    }
    return put;
}

KV_API CUresult cuEventQuery(CUevent handle) {
    KV_ENTER("cuEventQuery", Needs::Context);
    auto event = driver.events.find(handle);
    if (event == driver.events.end()) return INVALID_HANDLE;
    const Ticket ticket = event->second->ticket;
    if (!event->second->recorded || Driver::reached(ticket)) return SUCCESS;
    driver.make_progress(ticket.stream);
    return driver.sticky != SUCCESS ? driver.sticky : NOT_READY;
}

KV_API CUresult cuEventSynchronize(CUevent handle) {
    KV_ENTER("cuEventSynchronize", Needs::Context);
    auto event = driver.events.find(handle);
    if (event == driver.events.end()) return INVALID_HANDLE;
    return finish(driver, event->second->recorded ? event->second->ticket : Ticket{});
}

KV_API CUresult cuEventElapsedTime(float* milliseconds, CUevent start_handle, CUevent end_handle) {
    KV_ENTER("cuEventElapsedTime", Needs::Context);
    auto start = driver.events.find(start_handle);
    auto end = driver.events.find(end_handle);
    if (start == driver.events.end() || end == driver.events.end()) return INVALID_HANDLE;
    if (milliseconds == nullptr) return INVALID_VALUE;
    if (!start->second->recorded || !end->second->recorded ||
        ((start->second->flags | end->second->flags) & EVENT_DISABLE_TIMING) != 0) {
        return INVALID_HANDLE;
    }
    if (!Driver::reached(start->second->ticket) || !Driver::reached(end->second->ticket)) return NOT_READY;
    *milliseconds = static_cast<float>(end->second->time_ms - start->second->time_ms);
    return SUCCESS;
}

KV_API CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime(milliseconds, start, end);
}

// ---- Errors --------------------------------------------------------------------------------------

namespace {
const ErrorText* error_text(CUresult code) {
    for (const ErrorText& error : ERRORS) {
        if (error.code == code) return &error;
    }
    return nullptr;
}
}  // namespace

KV_API CUresult cuGetErrorName(CUresult code, const char** name) {
    const ErrorText* error = error_text(code);
    if (name == nullptr) return INVALID_VALUE;
    *name = error != nullptr ? error->name : nullptr;
    return error != nullptr ? SUCCESS : INVALID_VALUE;
}

KV_API CUresult cuGetErrorString(CUresult code, const char** text) {
    const ErrorText* error = error_text(code);
    if (text == nullptr) return INVALID_VALUE;
    *text = error != nullptr ? error->text : nullptr;
    return error != nullptr ? SUCCESS : INVALID_VALUE;
}
