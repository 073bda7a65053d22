// What is told of owners that end and cannot give back what they hold. A part of kvpool.hpp.
#ifndef KVPOOL_ENDING_HPP
#define KVPOOL_ENDING_HPP

#include <atomic>
#include <cstdio>

#include "../kvpool.h"

// One of the program, also where shared libraries are built with -fvisibility=hidden. (A library that is loaded
// with RTLD_LOCAL has its own all the same, unless the program's symbols are exported.)
#if defined(__GNUC__)
#define KVPOOL_HPP_SHARED __attribute__((visibility("default")))
#else
#define KVPOOL_HPP_SHARED
#endif

// The same in units with and without exceptions.
namespace kvpool {

// What an owner held that ended and could not give it back, now or later.
struct Leak {
    const char* what;      // the owner's class
    kvpool_cache_t cache;  // of what is in a cache; zeros otherwise
    uint64_t handle[2];    // its words, as of a kvpool_seq_t
    kvpool_status_t status;
    const char* message;
};
using LeakHandler = void (*)(const Leak& leak);

namespace ending {

inline void print_leak(const Leak& leak) {
    std::fprintf(stderr, "kvpool: a %s ended and what it held is still there: %s: %s\n", leak.what,
                 kvpool_status_name(leak.status), leak.message);
}
KVPOOL_HPP_SHARED inline std::atomic<LeakHandler> leak_handler{print_leak};

inline kvpool_error_t last_error() noexcept {
    kvpool_error_t error = {};
    kvpool_last_error(KVPOOL_OUT(error));
    return error;
}
// `error`: why it could not be given back.
inline void leaked(const char* what, kvpool_cache_t cache, const uint64_t (&handle)[2],
                   const kvpool_error_t& error) noexcept {
    leak_handler.load()({what, cache, {handle[0], handle[1]}, error.status, error.message});
}

// Whether it is gone, so that it need not be given back.
inline bool is_gone(kvpool_status_t status) noexcept {
    return status == KVPOOL_OK || status == KVPOOL_BAD_HANDLE || status == KVPOOL_STALE_HANDLE ||
           status == KVPOOL_POISONED;
}

}  // namespace ending

// Sets the handler; null stands for the line on stderr.
inline void set_leak_handler(LeakHandler handler) noexcept {
    ending::leak_handler = handler != nullptr ? handler : ending::print_leak;
}

}  // namespace kvpool

#endif  // KVPOOL_ENDING_HPP
