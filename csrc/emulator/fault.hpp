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

// A message, without memory of its own to give back: the stack of a thread that erred is never
// unwound.
struct Text {
    char chars[1024];
    operator std::string() const { return chars; }
};

// printf to a text.
__attribute__((format(printf, 1, 2))) inline Text text_of(const char* format, ...) {
    Text text;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text.chars, sizeof text.chars, format, arguments);
    va_end(arguments);
    return text;
}
inline Text operator+(const Text& left, const Text& right) {
    Text text = left;
    const size_t length = strlen(left.chars);
    snprintf(text.chars + length, sizeof text.chars - length, "%s", right.chars);
    return text;
}

}  // namespace kvpool::emu
