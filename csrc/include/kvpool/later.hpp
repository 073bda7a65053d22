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

// What ended while a step was open or another thread in a verb: given back before the next verb of its cache
// that comes through these headers.
class Later {
public:
    using GiveBack = kvpool_status_t (*)(kvpool_cache_t, const uint64_t (&)[2]);

    // Says whether there was room.
    bool add(kvpool_cache_t cache, const uint64_t (&handle)[2], GiveBack give_back) noexcept {
        return put({cache, {handle[0], handle[1]}, give_back});
    }
    void settle(kvpool_cache_t cache) noexcept {
        if (size_.load(std::memory_order_acquire) > 0) settle_some(cache);
    }
    // How many wait.
    size_t size() const noexcept { return size_.load(std::memory_order_acquire); }
    // Drops what waits for a cache that is closed. It waits for nobody, since the child of a fork may be without
    // the thread that has the lock; what stays is dropped by `put`.
    void forget(kvpool_cache_t cache) noexcept {
        if (size_.load(std::memory_order_acquire) == 0) return;
        const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        if (lock.owns_lock()) {
            keep([&](const Entry& entry) { return !same(entry.cache, cache); });
        }
    }
    // Of all caches of the process together. (Memory that no entry has touched costs nothing.)
    static constexpr size_t ROOM = size_t{1} << 16;

private:
    // Given back at a time, from the stack.
    static constexpr size_t RUN = 256;
    // Verbs that look through a long list before it is looked at whose cache is closed.
    static constexpr size_t LOOKS = 64;
    struct Entry {
        kvpool_cache_t cache;
        uint64_t handle[2];
        GiveBack give_back;
    };

    bool put(const Entry& entry) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        size_t size = size_.load(std::memory_order_relaxed);
        if (size >= look_at_) size = drop_closed();
        if (size == ROOM) return false;
        entries_[size] = entry;
        size_.store(size + 1, std::memory_order_release);
        return true;
    }
    // What waits for a closed cache waits for nothing, and is in everybody's way. How many are left. The caller
    // has the lock.
    size_t drop_closed() noexcept {
        const size_t size = keep([](const Entry& entry) { return !is_over(entry.cache); });
        look_at_ = 2 * size < RUN ? RUN : 2 * size < ROOM ? 2 * size : ROOM;
        looks_ = 0;
        return size;
    }
    // Keeps some entries and their order; how many. The caller has the lock.
    template <class F>
    size_t keep(F wanted) noexcept {
        size_t kept = 0;
        const size_t size = size_.load(std::memory_order_relaxed);
        for (size_t i = 0; i < size; ++i) {
            if (wanted(entries_[i])) entries_[kept++] = entries_[i];
        }
        size_.store(kept, std::memory_order_release);
        return kept;
    }
    // Giving back waits for the cache's readers, so it is done without the lock: another cache's owners do
    // not wait for them.
    void settle_some(kvpool_cache_t cache) noexcept {
        const Counts counts = count(cache);
        // A step that ended is in the way of all others.
        for (const bool steps : {true, false}) {
            // What is refused comes back to the end of the list: each is tried once.
            size_t left = steps ? counts.steps : counts.others;
            while (left > 0) {
                Entry own[RUN];
                const size_t wanted = left < RUN ? left : RUN;
                const size_t taken = take(cache, steps, own, wanted);
                for (size_t i = 0; i < taken; ++i) give_or_keep(own[i]);
                left = taken < wanted ? 0 : left - taken;
            }
        }
    }
    struct Counts {
        size_t steps = 0;
        size_t others = 0;
    };
    // A cache's entries.
    Counts count(kvpool_cache_t cache) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        // A list that stays long is looked through now and then.
        if (size_.load(std::memory_order_relaxed) > RUN && ++looks_ > LOOKS) drop_closed();
        Counts counts;
        for (size_t i = 0; i < size_.load(std::memory_order_relaxed); ++i) {
            if (same(entries_[i].cache, cache)) ++(is_step(entries_[i]) ? counts.steps : counts.others);
        }
        return counts;
    }
    // Takes the first of a cache's entries, steps or others, out of the list; how many.
    size_t take(kvpool_cache_t cache, bool steps, Entry (&own)[RUN], size_t limit) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        size_t count = 0;
        keep([&](const Entry& entry) {
            if (count == limit || is_step(entry) != steps || !same(entry.cache, cache)) return true;
            own[count++] = entry;
            return false;
        });
        return count;
    }
    void give_or_keep(const Entry& entry) noexcept {
        if (is_gone(entry.give_back(entry.cache, entry.handle))) return;
        const kvpool_error_t error = last_error();
        if (!put(entry)) leaked("owner that ended earlier", entry.cache, entry.handle, error);
    }
    static bool same(kvpool_cache_t a, kvpool_cache_t b) noexcept {
        return a.word[0] == b.word[0] && a.word[1] == b.word[1];
    }
    // Whether a cache is closed, and all that was in it gone. Never waits.
    static bool is_over(kvpool_cache_t cache) noexcept {
        kvpool_plan_info_t info;
        const kvpool_status_t status = kvpool_cache_get_plan_info(cache, KVPOOL_OUT(info));
        return status != KVPOOL_OK && is_gone(status);
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
    // How many entries there are when it is looked next at whose cache is closed.
    size_t look_at_ = RUN;
    size_t looks_ = 0;
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
