// What a thread may not do: the checks, and the messages. Part of engine.hpp.
#pragma once

#include "engine.hpp"

namespace kvpool::emu {

inline void Engine::check_shared(const void* p, uint32_t bytes, Site site, bool counted) {
    size_t offset = 0;
    if (!shared_.find(p, bytes, offset)) fail_shared(p, bytes, site);
    if (offset % bytes != 0) {
        fail(FaultCode::MisalignedAddress,
             text_of("%u bytes of shared memory at offset %zu, which is not a multiple", bytes,
                     offset),
             site);
    }
    if (counted && launch_.count_banks) {
        current_->warp->log.add(current_->lane, site, Access::Shared, reinterpret_cast<uint64_t>(p),
                                bytes);
    }
}

inline void* Engine::static_shared(const void* key, size_t bytes, size_t alignment) {
    void* p = shared_.variable(key, bytes, alignment);
    if (p == nullptr) {
        fail(FaultCode::LaunchOutOfResources, text_of("more than 48 KiB of static shared memory"),
             Site::here());
    }
    return p;
}

// A page fault of the running thread; see trap.hpp.
inline void Engine::answer_trap(uint64_t address) {
    Engine& self = *engine;
    if (self.current_ == nullptr) return;
    const void* p = reinterpret_cast<const void*>(address);
    const auto stack = reinterpret_cast<uint64_t>(self.current_->fiber.stack);
    if (self.memory_.is_device(address)) {
        self.fail(FaultCode::IllegalAddress,
                  text_of("dereferences the device address 0x%llx itself, not by load_*, store_* "
                          "or their like: ",
                          static_cast<unsigned long long>(address)) +
                      self.memory_.nearest(address),
                  Site{"somewhere", 0});
    }
    if (self.shared_.contains(p)) self.fail_shared(p, 1, Site{"somewhere", 0});
    if (stack - address <= STACK_GUARD_BYTES) {
        self.fail(
            FaultCode::LaunchFailed,
            text_of("more than %zu KiB of local variables", self.current_->fiber.stack_bytes >> 10),
            Site{"somewhere", 0});
    }
}

inline Text Engine::where() const {
    const Dim3& b = block_index_;
    const Dim3& t = current_->index;
    return text_of("%s, block (%u, %u, %u), thread (%u, %u, %u)", launch_.kernel->name, b.x, b.y,
                   b.z, t.x, t.y, t.z);
}

inline void Engine::fail(FaultCode code, const Text& what, Site site) {
    fault_.code = code;
    fault_.text = where() + text_of(", at %s:%d: ", site.name(), site.line) + what;
    leave();
}

// Back to the scheduler, for good: the end of the block, or of the launch.
inline void Engine::leave() {
    Fiber& fiber = current_->fiber;
    current_ = nullptr;
    Trap::abandon_handler();
    switch_fiber(fiber, scheduler_, true);
    __builtin_unreachable();
}

inline void Engine::fail_access(FaultCode code, Access access, uint64_t address, uint32_t bytes,
                                Site site) {
    static constexpr const char* VERBS[] = {"reads", "writes", "changes"};
    const char* verb = VERBS[static_cast<int>(access)];
    const char* kind =
        code == FaultCode::MisalignedAddress ? ", which is not a multiple of that" : "";
    fail(code,
         text_of("%s %u bytes at 0x%llx%s: ", verb, bytes, static_cast<unsigned long long>(address),
                 kind) +
             memory_.nearest(address),
         site);
}

inline void Engine::fail_shared(const void* p, uint32_t bytes, Site site) {
    Text what = text_of("%u bytes outside the block's shared memory", bytes);
    if (shared_.contains(p)) {
        const auto offset = static_cast<long long>(static_cast<const char*>(p) - shared_.dynamic());
        what = what + text_of(": byte %lld of %u dynamic ones", offset, shared_.dynamic_bytes());
    }
    fail(FaultCode::IllegalAddress, what, site);
}

inline void Engine::fail_divergent(Collective collective, Site site) {
    const Warp& warp = *current_->warp;
    fail(FaultCode::LaunchFailed,
         text_of("lanes of one warp at different collectives: this one at %s, others at %s (%s:%d)",
                 name_of(collective), name_of(warp.collective), warp.site.name(), warp.site.line),
         site);
}

// Nobody can run, and not all have ended: some wait for threads that will not come.
inline void Engine::fail_stuck() {
    for (uint32_t w = 0; w < num_warps_; ++w) {
        const Warp& warp = warps_[w];
        if (warp.arrived == 0) continue;
        current_ = &threads_[w * LANES + static_cast<uint32_t>(__builtin_ctz(warp.arrived))];
        fail(FaultCode::LaunchFailed,
             text_of("%s waits for lanes that never come: arrived 0x%08x of 0x%08x",
                     name_of(warp.collective), warp.arrived, warp.lanes),
             warp.site);
    }
    for (uint32_t i = 0; i < MAX_BARRIERS; ++i) {
        const Barrier& barrier = barriers_[i];
        if (barrier.arrived == 0) continue;
        for (uint32_t w = 0; w < num_warps_; ++w) {
            if (barrier.waiting[w] == 0) continue;
            current_ =
                &threads_[w * LANES + static_cast<uint32_t>(__builtin_ctz(barrier.waiting[w]))];
            break;
        }
        fail(
            FaultCode::LaunchFailed,
            text_of("barrier %u waits for threads that never come: arrived %u of %u, %u have ended",
                    i, barrier.arrived, barrier.expected, num_ended_),
            barrier.site);
    }
    fail(FaultCode::LaunchFailed, text_of("no thread can go on"), Site::here());
}

}  // namespace kvpool::emu
