// The part of the driver's binary interface that is emulated: types, numbers, signatures.
//
// Written down here so that no toolkit is needed; the numbers are those of cuda.h.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvpool::emu {
struct Context;
struct Module;
struct Function;
struct Stream;
struct Event;
struct Graph;
}  // namespace kvpool::emu

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = kvpool::emu::Context*;
using CUmodule = kvpool::emu::Module*;
using CUfunction = kvpool::emu::Function*;
using CUstream = kvpool::emu::Stream*;
using CUevent = kvpool::emu::Event*;
using CUgraph = kvpool::emu::Graph*;
using CUgraphExec = kvpool::emu::Graph*;
using CUhostFn = void (*)(void*);

namespace kvpool::emu {

// CUresult
constexpr CUresult SUCCESS = 0;
constexpr CUresult INVALID_VALUE = 1;
constexpr CUresult OUT_OF_MEMORY = 2;
constexpr CUresult NOT_INITIALIZED = 3;
constexpr CUresult NO_DEVICE = 100;
constexpr CUresult INVALID_DEVICE = 101;
constexpr CUresult INVALID_IMAGE = 200;
constexpr CUresult INVALID_CONTEXT = 201;
constexpr CUresult NO_BINARY_FOR_GPU = 209;
constexpr CUresult INVALID_HANDLE = 400;
constexpr CUresult NOT_FOUND = 500;
constexpr CUresult NOT_READY = 600;
constexpr CUresult ILLEGAL_ADDRESS = 700;
constexpr CUresult LAUNCH_OUT_OF_RESOURCES = 701;
constexpr CUresult MISALIGNED_ADDRESS = 716;
constexpr CUresult LAUNCH_FAILED = 719;
constexpr CUresult NOT_SUPPORTED = 801;
constexpr CUresult CAPTURE_UNSUPPORTED = 900;
constexpr CUresult CAPTURE_INVALIDATED = 901;
constexpr CUresult CAPTURED_EVENT = 907;
constexpr CUresult ILLEGAL_STATE = 401;

struct ErrorText {
    CUresult code;
    const char* name;
    const char* text;
};

inline constexpr ErrorText ERRORS[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE",
     "the operation cannot be performed in the present state"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
};

// CUdevice_attribute
enum class Attribute : int {
    MaxThreadsPerBlock = 1,
    MaxBlockDimX = 2,
    MaxBlockDimY = 3,
    MaxBlockDimZ = 4,
    MaxGridDimX = 5,
    MaxGridDimY = 6,
    MaxGridDimZ = 7,
    MaxSharedMemoryPerBlock = 8,
    WarpSize = 10,
    MultiprocessorCount = 16,
    CanMapHostMemory = 19,
    ConcurrentKernels = 31,
    L2CacheSize = 38,
    MaxThreadsPerMultiprocessor = 39,
    AsyncEngineCount = 40,
    UnifiedAddressing = 41,
    ComputeCapabilityMajor = 75,
    ComputeCapabilityMinor = 76,
    MaxSharedMemoryPerMultiprocessor = 81,
    MaxSharedMemoryPerBlockOptin = 97,
};

// CUfunction_attribute
constexpr int FUNCTION_MAX_THREADS = 0;
constexpr int FUNCTION_SHARED_BYTES = 1;
constexpr int FUNCTION_MAX_DYNAMIC_SHARED = 8;
constexpr int FUNCTION_SHARED_CARVEOUT = 9;

// CUstream_flags, CUevent_flags
constexpr unsigned STREAM_NON_BLOCKING = 1;
constexpr unsigned EVENT_DISABLE_TIMING = 2;

}  // namespace kvpool::emu
