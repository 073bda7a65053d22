// What kvpool_emu.h declares.
#include "kvpool_emu.h"

#include <string.h>

#include "driver.hpp"

#define KV_EXTRA extern "C" __attribute__((visibility("default")))

using namespace kvpool::emu;

namespace {

uint64_t sum_of_sizes(const std::map<uint64_t, uint64_t>& sizes) {
    uint64_t sum = 0;
    for (auto& one : sizes) sum += one.second;
    return sum;
}

uint64_t pending(Driver& driver) {
    uint64_t count = driver.null_stream != nullptr ? driver.null_stream->queue.size() : 0;
    for (auto& stream : driver.streams) count += stream.second->queue.size();
    for (auto& stream : driver.leaving_streams) count += stream->queue.size();
    return count;
}

}  // namespace

KV_EXTRA uint32_t kvpool_emu_version(void) { return 1; }

KV_EXTRA uint64_t kvpool_emu_counter(const char* name) {
    Driver& driver = Driver::get();
    std::lock_guard<std::recursive_mutex> guard(driver.lock);
    const Counters& c = driver.counters;
    uint64_t live_host_bytes = 0;
    for (auto& one : driver.host_allocations) live_host_bytes += one.second;
    const struct {
        const char* name;
        uint64_t value;
    } values[] = {
        {"launches", c.launches},
        {"allocations", c.allocations},
        {"host_allocations", c.host_allocations},
        {"frees", c.frees},
        {"synchronisations", c.synchronisations},
        {"copies_to_device", c.copies_to_device},
        {"copies_to_host", c.copies_to_host},
        {"copies_on_device", c.copies_on_device},
        {"fills", c.fills},
        {"bytes_to_device", c.bytes_to_device},
        {"bytes_to_host", c.bytes_to_host},
        {"modules", c.modules},
        {"events", c.events},
        {"streams", c.streams},
        {"graph_launches", c.graph_launches},
        {"failures", c.failures},
        {"live_bytes", sum_of_sizes(driver.allocations)},
        {"live_allocations", driver.allocations.size()},
        {"live_modules", driver.modules.size()},
        {"live_events", driver.events.size()},
        {"live_streams", driver.streams.size()},
        {"live_contexts", driver.context_users},
        {"live_host_bytes", live_host_bytes},
        {"live_host_allocations", driver.host_allocations.size()},
        {"pending", pending(driver)},
    };
    for (auto& value : values) {
        if (name != nullptr && strcmp(value.name, name) == 0) return value.value;
    }
    return UINT64_MAX;
}

KV_EXTRA uint64_t kvpool_emu_traffic(const char* kernel, uint64_t out[4]) {
    uint64_t full[10];
    kvpool_emu_traffic_full(kernel, full);
    out[0] = full[2];
    out[1] = full[5];
    out[2] = full[3];
    out[3] = full[6];
    return full[0];
}

KV_EXTRA void kvpool_emu_traffic_full(const char* kernel, uint64_t out[10]) {
    Driver& driver = Driver::get();
    std::lock_guard<std::recursive_mutex> guard(driver.lock);
    if (driver.initialised) driver.finish_all();
    auto found = driver.traffic.find(kernel);
    const Traffic t = found != driver.traffic.end() ? found->second : Traffic{};
    const uint64_t all[10] = {
        t.launches,    t.blocks,        t.read_bytes,         t.read_sectors, t.read_instructions,
        t.write_bytes, t.write_sectors, t.write_instructions, t.atomics,      t.bank_conflicts};
    memcpy(out, all, sizeof all);
}

KV_EXTRA void kvpool_emu_each_kernel(void (*fn)(const char* kernel, void* data), void* data) {
    Driver& driver = Driver::get();
    std::lock_guard<std::recursive_mutex> guard(driver.lock);
    if (driver.initialised) driver.finish_all();
    for (auto& one : driver.traffic) fn(one.first.c_str(), data);
}

KV_EXTRA void kvpool_emu_each_call(void (*fn)(const char* call, uint64_t count, void* data),
                                   void* data) {
    Driver& driver = Driver::get();
    std::lock_guard<std::recursive_mutex> guard(driver.lock);
    for (auto& one : driver.calls) fn(one.first.c_str(), one.second, data);
}

KV_EXTRA void kvpool_emu_reset_counters(void) {
    Driver& driver = Driver::get();
    std::lock_guard<std::recursive_mutex> guard(driver.lock);
    if (driver.initialised) driver.finish_all();
    driver.reset_counters();
}

KV_EXTRA int kvpool_emu_fail(const char* plan) {
    Driver& driver = Driver::get();
    std::lock_guard<std::recursive_mutex> guard(driver.lock);
    if (plan == nullptr) {
        driver.failures.clear();
        return 1;
    }
    return driver.plan_failures(plan) ? 1 : 0;
}

KV_EXTRA const char* kvpool_emu_last_failure(void) {
    Driver& driver = Driver::get();
    std::lock_guard<std::recursive_mutex> guard(driver.lock);
    return driver.last_failure.c_str();
}

KV_EXTRA void kvpool_emu_set_seed(uint64_t seed) {
    Driver& driver = Driver::get();
    std::lock_guard<std::recursive_mutex> guard(driver.lock);
    driver.set_seed(seed);
}

KV_EXTRA const char* kvpool_emu_last_fault(void) {
    Driver& driver = Driver::get();
    std::lock_guard<std::recursive_mutex> guard(driver.lock);
    return driver.last_fault.c_str();
}
