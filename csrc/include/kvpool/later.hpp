// What owners do at their end when their cache cannot take back what they hold. A part of kvpool.hpp.
#ifndef KVPOOL_LATER_HPP
#define KVPOOL_LATER_HPP

#include <atomic>
#include <cstdio>
#include <mutex>

#include "../kvpool.h"

// The same in units with and without exceptions: one program has one list and one handler.
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
inline std::atomic<LeakHandler> leak_handler{print_leak};

inline void leaked(const char* what, kvpool_cache_t cache, const uint64_t (&handle)[2]) noexcept {
    kvpool_error_t error = {};
    kvpool_last_error(KVPOOL_OUT(error));
    leak_handler.load()({what, cache, {handle[0], handle[1]}, error.status, error.message});
}

// Whether it is gone, so that it need not be given back.
inline bool is_gone(kvpool_status_t status) noexcept {
    return status == KVPOOL_OK || status == KVPOOL_BAD_HANDLE || status == KVPOOL_STALE_HANDLE ||
           status == KVPOOL_POISONED;
}

// What ended while a step was open or another thread in a verb: given back before the next verb of its cache
// that comes through these headers.
class Later {
public:
    using GiveBack = kvpool_status_t (*)(kvpool_cache_t, const uint64_t (&)[2]);

    // Says whether there was room.
    bool add(kvpool_cache_t cache, const uint64_t (&handle)[2], GiveBack give_back) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        const size_t size = size_.load(std::memory_order_relaxed);
        if (size == ROOM) return false;
        entries_[size] = {cache, {handle[0], handle[1]}, give_back};
        size_.store(size + 1, std::memory_order_release);
        return true;
    }
    void settle(kvpool_cache_t cache) noexcept {
        if (size_.load(std::memory_order_acquire) > 0) settle_some(cache);
    }

private:
    static constexpr size_t ROOM = 256;
    struct Entry {
        kvpool_cache_t cache;
        uint64_t handle[2];
        GiveBack give_back;
    };

    void settle_some(kvpool_cache_t cache) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        size_t kept = 0;
        const size_t size = size_.load(std::memory_order_relaxed);
        // A step that ended is in the way of all others.
        for (size_t i = size; i-- > 0;) {
            if (is_step(entries_[i])) give(entries_[i], cache);
        }
        for (size_t i = 0; i < size; ++i) {
            if (!give(entries_[i], cache)) entries_[kept++] = entries_[i];
        }
        size_.store(kept, std::memory_order_release);
    }
    static bool give(Entry& entry, kvpool_cache_t cache) noexcept {
        const bool of_it = entry.cache.word[0] == cache.word[0] && entry.cache.word[1] == cache.word[1];
        return of_it && is_gone(entry.give_back(entry.cache, entry.handle));
    }
    static bool is_step(const Entry& entry) noexcept { return entry.give_back == &cancel_step; }

public:
    static kvpool_status_t cancel_step(kvpool_cache_t cache, const uint64_t (&handle)[2]) noexcept {
        kvpool_step_t step;
        step.word[0] = handle[0];
        step.word[1] = handle[1];
        return kvpool_step_cancel(cache, step);
    }

private:
    std::mutex mutex_;
    std::atomic<size_t> size_{0};
    Entry entries_[ROOM] = {};
};
inline Later later;

}  // namespace ending

// Sets the handler; null stands for the line on stderr.
inline void set_leak_handler(LeakHandler handler) noexcept {
    ending::leak_handler = handler != nullptr ? handler : ending::print_leak;
}

}  // namespace kvpool

#endif  // KVPOOL_LATER_HPP
