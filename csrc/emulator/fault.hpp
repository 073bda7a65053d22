// What goes wrong in a kernel, and where in the source.
#pragma once

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <string>

namespace kvpool::emu {

struct Dim3 {
    uint32_t x = 1, y = 1, z = 1;
    uint64_t count() const { return static_cast<uint64_t>(x) * y * z; }
};

// Numbers of the driver's CUresult.
enum class FaultCode : int {
    None = 0,
    InvalidValue = 1,
    IllegalAddress = 700,
    LaunchOutOfResources = 701,
    MisalignedAddress = 716,
    LaunchFailed = 719,
};

struct Fault {
    FaultCode code = FaultCode::None;
    std::string text;
    explicit operator bool() const { return code != FaultCode::None; }
};

// The place of a call in the kernel's source, as a default argument: `Site site = Site::here()`.
struct Site {
    const char* file;
    int line;

    static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return Site{file, line};
    }
    bool operator==(const Site& other) const { return line == other.line && file == other.file; }
    const char* name() const {
        const char* slash = strrchr(file, '/');
        return slash != nullptr ? slash + 1 : file;
    }
};

// printf to a string.
__attribute__((format(printf, 1, 2))) inline std::string text_of(const char* format, ...) {
    char buffer[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    return buffer;
}

}  // namespace kvpool::emu
