// The entry points of the emulated driver that make work and wait for it: modules, launches,
// streams, events, and the names of errors.
#include <memory>

#include "driver_call.hpp"

using namespace kvpool::emu;

// ---- Modules and launches ---------------------------------------------------------------------

KV_API CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    KV_ENTER("cuModuleLoadData", Needs::Context);
    if (module == nullptr || image == nullptr) return INVALID_VALUE;
    // Whatever the image holds, the kernels are those that were compiled in.
    auto loaded = std::make_unique<Module>();
    if (driver.settings.module_bytes > 0) {
        loaded->memory = driver.memory->allocate(driver.settings.module_bytes);
        if (loaded->memory == 0) return OUT_OF_MEMORY;
    }
    *module = loaded.get();
    driver.modules[loaded.get()] = std::move(loaded);
    driver.counters.modules += 1;
    return SUCCESS;
}

KV_API CUresult cuModuleUnload(CUmodule module) {
    KV_ENTER("cuModuleUnload", Needs::Context);
    if (driver.modules.count(module) == 0) return INVALID_HANDLE;
    driver.finish_all();
    if (driver.modules[module]->memory != 0) driver.memory->free(driver.modules[module]->memory);
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
                               unsigned block_x, unsigned block_y, unsigned block_z,
                               unsigned shared_bytes, CUstream stream_handle, void** params,
                               void** extra) {
    KV_ENTER("cuLaunchKernel", Needs::Context);
    const Function* function = driver.function_of(handle);
    auto stream = driver.stream_of(stream_handle);
    if (function == nullptr || stream == nullptr) return INVALID_HANDLE;
    if (extra != nullptr) return NOT_SUPPORTED;
    const Dim3 grid{grid_x, grid_y, grid_z};
    const Dim3 block{block_x, block_y, block_z};
    if (params == nullptr || params[0] == nullptr || grid.count() == 0 || block.count() == 0 ||
        grid_x > INT32_MAX || grid_y > 65535 || grid_z > 65535 || block.count() > MAX_THREADS ||
        block_z > 64 || shared_bytes > function->max_dynamic_shared) {
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

// ---- Streams and events -----------------------------------------------------------------------

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
    if (driver.spoils_capture()) return CAPTURE_UNSUPPORTED;
    Ticket end = Driver::end_of(stream);
    if (stream->is_null) {
        // The legacy default stream stands for all that block.
        for (auto& other : driver.streams) {
            if ((other.second->flags & STREAM_NON_BLOCKING) == 0)
                driver.finish(Driver::end_of(other.second));
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
    // Another stream would join the capture.
    if (event->second->captured && stream->capture == nullptr) return NOT_SUPPORTED;
    // An event that was never recorded is no reason to wait.
    if (!event->second->recorded) return SUCCESS;
    // Work outside the graph is nothing that it can wait for.
    if (stream->capture != nullptr && driver.spoils_capture()) return CAPTURE_UNSUPPORTED;
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
    if (put == SUCCESS) event->second->captured = captured;
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
    if (event->second->captured) return CAPTURED_EVENT;
    const Ticket ticket = event->second->ticket;
    if (!event->second->recorded || Driver::reached(ticket)) return SUCCESS;
    driver.make_progress(ticket.stream);
    return driver.sticky != SUCCESS ? driver.sticky : NOT_READY;
}

KV_API CUresult cuEventSynchronize(CUevent handle) {
    KV_ENTER("cuEventSynchronize", Needs::Context);
    auto event = driver.events.find(handle);
    if (event == driver.events.end()) return INVALID_HANDLE;
    if (event->second->captured) return CAPTURED_EVENT;
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
    if (!Driver::reached(start->second->ticket) || !Driver::reached(end->second->ticket))
        return NOT_READY;
    *milliseconds = static_cast<float>(end->second->time_ms - start->second->time_ms);
    return SUCCESS;
}

KV_API CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime(milliseconds, start, end);
}

// ---- Errors -----------------------------------------------------------------------------------

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
