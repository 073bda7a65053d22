// What the entry points of the emulated driver have in common.
#pragma once

#include <mutex>
#include <vector>

#include "driver.hpp"

// A function that the library exports.
#define KV_API extern "C" __attribute__((visibility("default")))

namespace kvpool::emu {
enum class Needs { Nothing, Driver, Context };

// The contexts that a host thread has made current, the last one on top. There is only one context,
// or none.
inline thread_local std::vector<Context*> current_contexts;

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
        driver.calls[name] += 1;
        const CUresult planned = driver.planned_failure(name, false);
        if (planned != SUCCESS) return planned;
        if (needs == Needs::Nothing) return SUCCESS;
        if (!driver.initialised) return NOT_INITIALIZED;
        if (needs == Needs::Driver) return SUCCESS;
        if (driver.context_users == 0 || current_contexts.empty() ||
            current_contexts.back() == nullptr) {
            return INVALID_CONTEXT;
        }
        return driver.sticky;
    }
    std::lock_guard<std::recursive_mutex> guard_;
};

#define KV_ENTER(name, needs)                       \
    Call call(name, needs);                         \
    if (call.status != SUCCESS) return call.status; \
    [[maybe_unused]] Driver& driver = call.driver

// The state after waiting: an error of the work that was waited for shows here.
inline CUresult finish(Driver& driver, const Ticket& ticket) {
    if (driver.spoils_capture()) return CAPTURE_UNSUPPORTED;
    driver.counters.synchronisations += 1;
    driver.finish(ticket);
    return driver.sticky;
}

}  // namespace kvpool::emu
