// Fibers: the threads of an emulated block. Each has a stack of its own and gives the processor
// away only by itself, so that nothing here is concurrent.
//
// On x86-64 a switch saves the registers that a function must keep, and changes the stack pointer;
// elsewhere it is swapcontext. Under AddressSanitizer every switch is announced to it.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

// KVPOOL_EMU_UCONTEXT asks for swapcontext where it is not needed.
#if !defined(__x86_64__) && !defined(KVPOOL_EMU_UCONTEXT)
#define KVPOOL_EMU_UCONTEXT 1
#endif
#if defined(KVPOOL_EMU_UCONTEXT)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define KVPOOL_EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVPOOL_EMU_ASAN 1
#endif
#endif
#if defined(KVPOOL_EMU_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace kvpool::emu {

// Bytes of a fiber's stack; AddressSanitizer makes frames larger.
#if defined(KVPOOL_EMU_ASAN)
constexpr size_t STACK_BYTES = 256 << 10;
#else
constexpr size_t STACK_BYTES = 80 << 10;
#endif
// Stacks begin at different places of their pages, so that what many threads use at once does not
// lie in the same few sets of the processor's caches.
constexpr size_t STACK_COLOURS = 64;
constexpr size_t STACK_COLOUR_BYTES = 3 * 64;
// Of the pages that fault around memory, and below a stack: more than a function's frame.
constexpr size_t GUARD_BYTES = 4096;
constexpr size_t STACK_GUARD_BYTES = 1 << 20;

// One line of execution: a thread of the block, or the scheduler on the caller's own stack.
struct Fiber {
#if !defined(KVPOOL_EMU_UCONTEXT)
    void* stack_pointer = nullptr;
#else
    ucontext_t context;
#endif
    // The lowest address of its stack, which is STACK_BYTES long. For the scheduler: as
    // AddressSanitizer tells it.
    const void* stack = nullptr;
    size_t stack_bytes = 0;
    void* fake_stack = nullptr;
};

// The stacks of as many fibers as a block has had so far; kept from launch to launch. Below each
// lie pages that fault.
class Stacks {
public:
    Stacks() = default;
    ~Stacks() {
        for (size_t i = 0; i < count_; ++i) {
#if defined(KVPOOL_EMU_ASAN)
            // Whoever gets these addresses next shall not find our frames' red zones there.
            __asan_unpoison_memory_region(stacks_[i], STACK_BYTES);
#endif
            munmap(stacks_[i] - STACK_GUARD_BYTES, STACK_GUARD_BYTES + STACK_BYTES);
        }
    }
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;

    // The stack of fiber `index`, and those before it.
    char* at(size_t index) {
        while (count_ <= index) grow();
        return stacks_[index];
    }

private:
    static constexpr size_t MAX_FIBERS = 1024;

    void grow() {
        if (count_ == MAX_FIBERS) {
            fprintf(stderr, "kvpool emulator: a block has at most %zu threads\n", MAX_FIBERS);
            abort();
        }
        void* p = mmap(nullptr, STACK_GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED || mprotect(p, STACK_GUARD_BYTES, PROT_NONE) != 0) {
            fprintf(stderr, "kvpool emulator: no memory for the stack of a thread\n");
            abort();
        }
        stacks_[count_++] = static_cast<char*>(p) + STACK_GUARD_BYTES;
    }

    char* stacks_[MAX_FIBERS] = {};
    size_t count_ = 0;
};

using FiberEntry = void (*)();

#if !defined(KVPOOL_EMU_UCONTEXT)
// Saves the caller's registers on its stack and its stack pointer to *save; goes on where `to` was
// saved.
__attribute__((naked, noinline)) inline void switch_stacks(void** /*save*/, void* /*to*/) {
    asm("pushq %rbp\n\t"
        "pushq %rbx\n\t"
        "pushq %r12\n\t"
        "pushq %r13\n\t"
        "pushq %r14\n\t"
        "pushq %r15\n\t"
        "movq %rsp, (%rdi)\n\t"
        "movq %rsi, %rsp\n\t"
        "popq %r15\n\t"
        "popq %r14\n\t"
        "popq %r13\n\t"
        "popq %r12\n\t"
        "popq %rbx\n\t"
        "popq %rbp\n\t"
        "retq");
}
#endif

// Makes `fiber`, the `index`-th, start in `entry`, which never returns, on `stack`. [STACK_BYTES]
inline void prepare_fiber(Fiber& fiber, size_t index, char* stack, FiberEntry entry) {
    const size_t bytes = STACK_BYTES - index % STACK_COLOURS * STACK_COLOUR_BYTES;
    fiber.stack = stack;
    fiber.stack_bytes = bytes;
    fiber.fake_stack = nullptr;
#if defined(KVPOOL_EMU_ASAN)
    // A fiber that was given up in the middle has left its frames' red zones behind.
    __asan_unpoison_memory_region(stack, STACK_BYTES);
#endif
#if !defined(KVPOOL_EMU_UCONTEXT)
    // As after a call: the address of `entry` on top of six saved registers; in `entry` the stack
    // pointer is 8 below a multiple of 16.
    uintptr_t* top = reinterpret_cast<uintptr_t*>(stack + bytes);
    *--top = 0;
    *--top = reinterpret_cast<uintptr_t>(entry);
    for (int i = 0; i < 6; ++i) *--top = 0;
    fiber.stack_pointer = top;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
#endif
}

// To be called first in a fiber's entry. `from` came here.
inline void fiber_started([[maybe_unused]] Fiber* from) {
#if defined(KVPOOL_EMU_ASAN)
    const void* stack = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
    if (from != nullptr && from->stack == nullptr) {
        from->stack = stack;
        from->stack_bytes = bytes;
    }
#endif
}

// Goes on in `to`; returns when somebody goes on in `from`. `last`: nobody ever will.
inline void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool last = false) {
#if defined(KVPOOL_EMU_ASAN)
    __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#endif
#if !defined(KVPOOL_EMU_UCONTEXT)
    switch_stacks(&from.stack_pointer, to.stack_pointer);
#else
    swapcontext(&from.context, &to.context);
#endif
#if defined(KVPOOL_EMU_ASAN)
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

}  // namespace kvpool::emu
