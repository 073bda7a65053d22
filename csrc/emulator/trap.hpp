// Memory that a thread of a block touches and must not: found by the page fault.
//
// While a kernel runs, faults at a device address that was dereferenced directly, beyond the end of
// shared memory, or below a thread's stack end the launch with an error that says so. All other
// faults go where they would have gone.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <memory>

#include "fiber.hpp"

namespace kvpool::emu {

// Answers a fault at an address: returns if it is none of ours, does not return otherwise.
using TrapAnswer = void (*)(uint64_t address);

class Trap {
public:
    // From here on, on this host thread.
    explicit Trap(TrapAnswer answer) {
        answer_ = answer;
        thread_ = pthread_self();
        give_own_stack();
        struct sigaction action{};
        action.sa_sigaction = handle;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigemptyset(&action.sa_mask);
        sigaction(SIGSEGV, &action, &before_);
    }
    ~Trap() { sigaction(SIGSEGV, &before_, nullptr); }
    // To be called by an answer that does not return: its frames stay on the handler's stack.
    static void abandon_handler() {
#if defined(KVPOOL_EMU_ASAN)
        stack_t now{};
        sigaltstack(nullptr, &now);
        if ((now.ss_flags & SS_DISABLE) == 0) __asan_unpoison_memory_region(now.ss_sp, now.ss_size);
#endif
    }
    Trap(const Trap&) = delete;
    Trap& operator=(const Trap&) = delete;

private:
    static constexpr size_t STACK = 64 << 10;

    // A stack for the handler, of each host thread that has none: the fault may be that its own is
    // full.
    struct SignalStack {
        SignalStack() {
            stack_t now{};
            sigaltstack(nullptr, &now);
            if ((now.ss_flags & SS_DISABLE) == 0) return;
            bytes = std::make_unique<char[]>(STACK);
            stack_t own{};
            own.ss_sp = bytes.get();
            own.ss_size = STACK;
            sigaltstack(&own, nullptr);
        }
        ~SignalStack() {
            if (bytes == nullptr) return;
            stack_t none{};
            none.ss_flags = SS_DISABLE;
            sigaltstack(&none, nullptr);
        }
        std::unique_ptr<char[]> bytes;
    };

    static void give_own_stack() { [[maybe_unused]] static thread_local SignalStack stack; }

    static void handle(int, siginfo_t* info, void*) {
        if (pthread_equal(pthread_self(), thread_) != 0)
            answer_(reinterpret_cast<uint64_t>(info->si_addr));
        // Not ours: it happens again, to whoever was responsible before.
        sigaction(SIGSEGV, &before_, nullptr);
    }

    static inline TrapAnswer answer_ = nullptr;
    static inline pthread_t thread_{};
    static inline struct sigaction before_{};
};

}  // namespace kvpool::emu
