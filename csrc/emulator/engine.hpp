// Runs a kernel: blocks one after another, the threads of a block as fibers.
//
// A thread runs until it must wait for others: at a warp collective, at a barrier, at its end. With
// seed 0 lanes, warps and blocks go in their natural order; any other seed shuffles all three. A
// thread that errs ends the launch.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <vector>

#include "fault.hpp"
#include "fiber.hpp"
#include "memory.hpp"
#include "registry.hpp"
#include "shared_memory.hpp"
#include "traffic.hpp"
#include "trap.hpp"

namespace kvpool::emu {

constexpr uint32_t MAX_THREADS = 1024;
constexpr uint32_t MAX_WARPS = MAX_THREADS / LANES;
constexpr uint32_t MAX_BARRIERS = 16;
// What a collective exchanges: up to this many words a lane.
constexpr uint32_t EXCHANGE_WORDS = 16;

enum class Collective : uint8_t { Sync, Shuffle, Vote, LoadMatrix, Mma };

inline const char* name_of(Collective collective) {
    static constexpr const char* NAMES[] = {"sync_warp", "shuffle", "vote", "ldmatrix", "mma"};
    return NAMES[static_cast<int>(collective)];
}

// A copy that has been asked for: `bytes` from `global`, then zeros up to `size`.
struct AsyncCopy {
    char* shared;
    const char* global;
    uint32_t bytes;
    uint32_t size;
};

struct Warp {
    // One bit a lane: those of the block, those that can run, those waiting at the collective.
    uint32_t lanes = 0;
    uint32_t ready = 0;
    uint32_t arrived = 0;
    // The lane that runs next is the one whose number ^ order is the lowest.
    uint32_t order = 0;
    uint32_t parity = 0;
    Collective collective{};
    Site site{};
    WarpLog log;
    // Twice, in turn: a lane may come to the next collective before another has read the answer of
    // this one.
    alignas(64) uint32_t exchange[2][LANES][EXCHANGE_WORDS];
};

struct Thread {
    Fiber fiber;
    Dim3 index;
    uint32_t lane = 0;
    Warp* warp = nullptr;
    uint32_t warp_number = 0;
    std::vector<AsyncCopy> copies;
    // Copies in each committed group that has not been waited for, oldest first.
    std::vector<uint32_t> groups;
    uint32_t uncommitted = 0;
};

struct Barrier {
    uint32_t arrived = 0;
    uint32_t expected = 0;
    Site site{};
    uint32_t waiting[MAX_WARPS] = {};
};

struct Launch {
    const KernelEntry* kernel = nullptr;
    Dim3 grid;
    Dim3 block;
    uint32_t shared_bytes = 0;
    // The parameter struct. [kernel->params_bytes]
    const void* params = nullptr;
    uint64_t seed = 0;
    // Whether to count bank conflicts of load_shared, store_shared and ldmatrix, which takes time.
    bool count_banks = false;
};

class Engine {
public:
    explicit Engine(DeviceMemory& memory) : memory_(memory) {}
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Runs all of it, and adds what it moved to `traffic`.
    Fault run(const Launch& launch, Traffic& traffic);

    // ---- For the intrinsics: called on the fiber of a thread ----

    Thread& self() { return *current_; }
    const Launch& launch() const { return launch_; }
    const Dim3& block_index() const { return block_index_; }
    char* dynamic_shared() const { return shared_.dynamic(); }

    // Waits for the other lanes of the warp at the same collective; `complete` runs once, in the
    // last. What the lanes wrote to `exchange` before is in what this gives, until the lane's next
    // collective but one.
    template <class Complete>
    auto& meet(Collective collective, Site site, Complete complete) {
        Warp& warp = *current_->warp;
        auto& exchange = warp.exchange[warp.parity];
        if (warp.arrived == 0) {
            warp.collective = collective;
            warp.site = site;
        } else if (warp.collective != collective || !(warp.site == site)) {
            fail_divergent(collective, site);
        }
        warp.arrived |= 1u << current_->lane;
        warp.ready &= ~(1u << current_->lane);
        if (warp.arrived != warp.lanes) {
            go_on();
            return exchange;
        }
        complete(exchange);
        warp.log.flush(traffic_);
        warp.arrived = 0;
        warp.ready = warp.lanes;
        warp.parity ^= 1;
        warp.order = next_order(LANES);
        return exchange;
    }
    uint32_t (&exchange())
        [LANES][EXCHANGE_WORDS] { return current_->warp->exchange[current_->warp->parity]; }

    void wait_barrier(uint32_t number, uint32_t threads, Site site);

    // The host's address of device memory, once the access is found to be in order.
    char* global(Access access, uint64_t address, uint32_t bytes, Site site) {
        if (address % bytes != 0)
            fail_access(FaultCode::MisalignedAddress, access, address, bytes, site);
        char* p = memory_.find(address, bytes);
        if (p == nullptr) fail_access(FaultCode::IllegalAddress, access, address, bytes, site);
        current_->warp->log.add(current_->lane, site, access, address, bytes);
        return p;
    }
    bool is_shared(const void* p) const { return shared_.contains(p); }
    // Fails when the bytes are not inside shared memory, or not aligned. `counted`: for bank
    // conflicts.
    void check_shared(const void* p, uint32_t bytes, Site site, bool counted);

    // The variable that `key` stands for, the same for all threads of the block.
    void* static_shared(const void* key, size_t bytes, size_t alignment);

    void add_copy(void* shared, const void* global, uint32_t bytes, uint32_t size, Site site);
    void commit_copies();
    void wait_copies(uint32_t groups_left);

    [[noreturn]] void fail(FaultCode code, const Text& what, Site site);
    Traffic& traffic() { return traffic_; }

private:
    static void thread_main();
    void run_block(const Dim3& index);
    void prepare_block();
    void go_on();
    void fail_stuck();
    Thread* next_thread();
    [[noreturn]] void fail_divergent(Collective collective, Site site);
    [[noreturn]] void fail_access(FaultCode code, Access access, uint64_t address, uint32_t bytes,
                                  Site site);
    [[noreturn]] void fail_shared(const void* p, uint32_t bytes, Site site);
    static void answer_trap(uint64_t address);
    [[noreturn]] void leave();
    Text where() const;
    void release(Barrier& barrier);

    uint64_t next_random();
    // 0 with seed 0, else a number below `count`, a power of two.
    uint32_t next_order(uint32_t count) {
        return launch_.seed == 0 ? 0 : static_cast<uint32_t>(next_random() >> 33) & (count - 1);
    }
    // The lowest bit of `mask` after its numbers are combined with `order` (below 32) by exclusive
    // or.
    static uint32_t first_in_order(uint32_t mask, uint32_t order) {
        if ((order & 1) != 0) mask = (mask >> 1 & 0x55555555u) | (mask & 0x55555555u) << 1;
        if ((order & 2) != 0) mask = (mask >> 2 & 0x33333333u) | (mask & 0x33333333u) << 2;
        if ((order & 4) != 0) mask = (mask >> 4 & 0x0F0F0F0Fu) | (mask & 0x0F0F0F0Fu) << 4;
        if ((order & 8) != 0) mask = (mask >> 8 & 0x00FF00FFu) | (mask & 0x00FF00FFu) << 8;
        if ((order & 16) != 0) mask = mask >> 16 | mask << 16;
        return static_cast<uint32_t>(__builtin_ctz(mask)) ^ order;
    }

    DeviceMemory& memory_;
    Stacks stacks_;
    std::vector<Thread> threads_;
    std::vector<Warp> warps_;
    Barrier barriers_[MAX_BARRIERS];
    Fiber scheduler_;
    Thread* current_ = nullptr;

    Launch launch_;
    Dim3 block_index_;
    uint32_t num_threads_ = 0;
    uint32_t num_warps_ = 0;
    uint32_t num_ended_ = 0;
    uint32_t warp_order_ = 0;
    uint64_t random_ = 0;
    Fault fault_;
    Traffic traffic_;

    SharedMemory shared_;
};

// The engine whose thread is running.
inline Engine* engine = nullptr;

inline uint64_t Engine::next_random() {
    // splitmix64
    random_ += 0x9E3779B97F4A7C15ull;
    uint64_t z = random_;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

inline Fault Engine::run(const Launch& launch, Traffic& traffic) {
    launch_ = launch;
    fault_ = Fault{};
    traffic_ = Traffic{};
    random_ = launch.seed;
    num_threads_ = static_cast<uint32_t>(launch.block.count());
    num_warps_ = (num_threads_ + LANES - 1) / LANES;
    shared_.begin_launch(launch.shared_bytes);
    if (threads_.size() < num_threads_) threads_.resize(num_threads_);
    if (warps_.size() < num_warps_) warps_.resize(num_warps_);

    engine = this;
    const Trap trap(answer_trap);
    const uint64_t blocks = launch.grid.count();
    // Block (i * stride + first) mod blocks is the i-th; a stride without a common factor visits
    // each.
    uint64_t first = 0;
    uint64_t stride = 1;
    if (launch.seed != 0 && blocks > 1) {
        first = next_random() % blocks;
        stride = 1 + next_random() % (blocks - 1);
        auto common = [](uint64_t a, uint64_t b) {
            while (b != 0) {
                const uint64_t rest = a % b;
                a = b;
                b = rest;
            }
            return a;
        };
        while (common(stride, blocks) != 1) stride = stride % (blocks - 1) + 1;
    }
    uint64_t number = first;
    for (uint64_t i = 0; i < blocks && !fault_; ++i) {
        const auto x = static_cast<uint32_t>(number % launch.grid.x);
        const auto y = static_cast<uint32_t>(number / launch.grid.x % launch.grid.y);
        const auto z = static_cast<uint32_t>(number / launch.grid.x / launch.grid.y);
        run_block(Dim3{x, y, z});
        number = (number + stride) % blocks;
    }
    engine = nullptr;
    traffic_.launches = 1;
    traffic.add(traffic_);
    return fault_;
}

inline void Engine::prepare_block() {
    const Dim3& dim = launch_.block;
    for (uint32_t i = 0; i < num_threads_; ++i) {
        Thread& thread = threads_[i];
        thread.index = Dim3{i % dim.x, i / dim.x % dim.y, i / dim.x / dim.y};
        thread.lane = i % LANES;
        thread.warp_number = i / LANES;
        thread.warp = &warps_[thread.warp_number];
        thread.copies.clear();
        thread.groups.clear();
        thread.uncommitted = 0;
        prepare_fiber(thread.fiber, i, stacks_.at(i), thread_main);
    }
    for (uint32_t w = 0; w < num_warps_; ++w) {
        const uint32_t lanes = num_threads_ - w * LANES;
        Warp& warp = warps_[w];
        warp.lanes = lanes >= LANES ? 0xFFFFFFFFu : (1u << lanes) - 1;
        warp.ready = warp.lanes;
        warp.arrived = 0;
        warp.order = next_order(LANES);
    }
    for (Barrier& barrier : barriers_) barrier = Barrier{};
    shared_.begin_block();
    num_ended_ = 0;
    warp_order_ = next_order(LANES);
}

inline void Engine::run_block(const Dim3& index) {
    block_index_ = index;
    prepare_block();
    // Another host thread may run each launch: its stack is learnt anew.
    scheduler_.stack = nullptr;
    current_ = next_thread();
    switch_fiber(scheduler_, current_->fiber);
    for (uint32_t w = 0; w < num_warps_; ++w) warps_[w].log.flush(traffic_);
    traffic_.blocks += 1;
    if (fault_) return;
    const Text damage = shared_.damage();
    if (damage.chars[0] == '\0') return;
    fault_.code = FaultCode::IllegalAddress;
    fault_.text =
        text_of("%s, block (%u, %u, %u): ", launch_.kernel->name, index.x, index.y, index.z) +
        damage;
}

inline void Engine::thread_main() {
    fiber_started(&engine->scheduler_);
    Engine& self = *engine;
    self.launch_.kernel->run(self.launch_.params);
    Thread& thread = *self.current_;
    thread.warp->ready &= ~(1u << thread.lane);
    self.num_ended_ += 1;
    Thread* next = self.next_thread();
    if (next == nullptr) {
        if (self.num_ended_ < self.num_threads_) self.fail_stuck();
        self.leave();
    }
    self.current_ = next;
    switch_fiber(thread.fiber, next->fiber, true);
    __builtin_unreachable();
}

// The thread that may run next, of the same warp if there is one; null when all wait or have ended.
inline Thread* Engine::next_thread() {
    uint32_t number = current_ != nullptr ? current_->warp_number : 0;
    if (current_ == nullptr || warps_[number].ready == 0) {
        uint32_t ready = 0;
        for (uint32_t w = 0; w < num_warps_; ++w) {
            ready |= static_cast<uint32_t>(warps_[w].ready != 0) << w;
        }
        if (ready == 0) return nullptr;
        number = first_in_order(ready, warp_order_);
    }
    const Warp& warp = warps_[number];
    return &threads_[number * LANES + first_in_order(warp.ready, warp.order)];
}

// Lets others run until this thread can go on.
inline void Engine::go_on() {
    Thread& self = *current_;
    const Warp& warp = *self.warp;
    Thread* next = nullptr;
    if (warp.ready != 0) {
        next = &threads_[self.warp_number * LANES + first_in_order(warp.ready, warp.order)];
    } else {
        next = next_thread();
        if (next == nullptr) fail_stuck();
    }
    if (next == &self) return;
    current_ = next;
    switch_fiber(self.fiber, next->fiber);
}

inline void Engine::wait_barrier(uint32_t number, uint32_t threads, Site site) {
    if (number >= MAX_BARRIERS)
        fail(FaultCode::LaunchFailed, text_of("there are 16 barriers"), site);
    Barrier& barrier = barriers_[number];
    if (threads == 0) threads = num_threads_;
    if (barrier.arrived == 0) {
        barrier.expected = threads;
        barrier.site = site;
    } else if (barrier.expected != threads || !(barrier.site == site)) {
        fail(FaultCode::LaunchFailed,
             text_of("a divergent barrier: this thread waits at %s:%d, an earlier one at %s:%d",
                     site.name(), site.line, barrier.site.name(), barrier.site.line),
             site);
    }
    barrier.arrived += 1;
    if (barrier.arrived == barrier.expected) {
        release(barrier);
        return;
    }
    Thread& self = *current_;
    barrier.waiting[self.warp_number] |= 1u << self.lane;
    self.warp->ready &= ~(1u << self.lane);
    go_on();
}

inline void Engine::release(Barrier& barrier) {
    for (uint32_t w = 0; w < num_warps_; ++w) {
        if (barrier.waiting[w] == 0 && current_->warp_number != w) continue;
        warps_[w].ready |= barrier.waiting[w];
        warps_[w].log.flush(traffic_);
    }
    barrier = Barrier{};
    warp_order_ = next_order(LANES);
}

inline void Engine::add_copy(void* shared, const void* global, uint32_t bytes, uint32_t size,
                             Site site) {
    check_shared(shared, size, site, false);
    const uint64_t address = reinterpret_cast<uint64_t>(global);
    if (bytes > size)
        fail(FaultCode::LaunchFailed, text_of("copies more bytes than the copy is long"), site);
    if (address % size != 0)
        fail_access(FaultCode::MisalignedAddress, Access::Read, address, size, site);
    const char* from = nullptr;
    if (bytes != 0) {
        from = memory_.find(address, bytes);
        if (from == nullptr)
            fail_access(FaultCode::IllegalAddress, Access::Read, address, bytes, site);
        current_->warp->log.add(current_->lane, site, Access::Read, address, bytes);
    }
    // From now on the old bytes are lost, and the new ones are not there.
    memset(shared, 0xFF, size);
    current_->copies.push_back(AsyncCopy{static_cast<char*>(shared), from, bytes, size});
    current_->uncommitted += 1;
}

inline void Engine::commit_copies() {
    current_->groups.push_back(current_->uncommitted);
    current_->uncommitted = 0;
}

inline void Engine::wait_copies(uint32_t groups_left) {
    Thread& self = *current_;
    if (self.groups.size() <= groups_left) return;
    const size_t done = self.groups.size() - groups_left;
    size_t copies = 0;
    for (size_t i = 0; i < done; ++i) copies += self.groups[i];
    for (size_t i = 0; i < copies; ++i) {
        const AsyncCopy& copy = self.copies[i];
        if (copy.bytes != 0) memcpy(copy.shared, copy.global, copy.bytes);
        memset(copy.shared + copy.bytes, 0, copy.size - copy.bytes);
    }
    self.copies.erase(self.copies.begin(), self.copies.begin() + static_cast<ptrdiff_t>(copies));
    self.groups.erase(self.groups.begin(), self.groups.begin() + static_cast<ptrdiff_t>(done));
}

}  // namespace kvpool::emu

#include "engine_faults.hpp"
