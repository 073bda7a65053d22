// The shared memory of the block that runs.
//
// Static variables lie in one region, with gaps between them that the device does not have; the
// dynamic memory is the end of another. Around both lie pages that fault, what is not in use is
// forbidden under AddressSanitizer, and a gap that has changed is found at the end of the block.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <vector>

#include "fault.hpp"
#include "fiber.hpp"

namespace kvpool::emu {

// Of a kernel's variables together, and of a launch.
constexpr size_t STATIC_SHARED_BYTES = 48 << 10;
constexpr size_t DYNAMIC_SHARED_BYTES = 227 << 10;

class SharedMemory {
public:
    // As a kernel may expect of dynamic_shared().
    static constexpr size_t ALIGNMENT = 128;

    SharedMemory() {
        void* p = mmap(nullptr, ALL_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) {
            fprintf(stderr, "kvpool emulator: no memory for shared memory\n");
            abort();
        }
        base_ = static_cast<char*>(p);
        static_ = base_ + GUARD_BYTES;
        dynamic_ = static_ + REGION_BYTES + GUARD_BYTES;
        mprotect(static_, REGION_BYTES, PROT_READ | PROT_WRITE);
        mprotect(dynamic_, DYNAMIC_REGION_BYTES, PROT_READ | PROT_WRITE);
    }
    ~SharedMemory() {
        allow(static_, REGION_BYTES);
        allow(dynamic_, DYNAMIC_REGION_BYTES);
        munmap(base_, ALL_BYTES);
    }
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;

    void begin_launch(uint32_t dynamic_bytes) {
        variables_.clear();
        variable_bytes_ = 0;
        static_used_ = 0;
        dynamic_bytes_ = dynamic_bytes;
        dynamic_room_ = (dynamic_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        allow(static_, REGION_BYTES);
        allow(dynamic_, DYNAMIC_REGION_BYTES);
        memset(static_, POISON, REGION_BYTES);
        forbid(static_, REGION_BYTES);
        forbid(dynamic_, DYNAMIC_REGION_BYTES);
        allow(dynamic(), dynamic_bytes);
    }

    // Whatever the last block left is gone.
    void begin_block() {
        for (const Variable& variable : variables_)
            memset(static_ + variable.offset, POISON, variable.bytes);
        if (dynamic_bytes_ != 0) memset(dynamic(), POISON, dynamic_bytes_);
    }

    char* dynamic() const { return dynamic_ + DYNAMIC_REGION_BYTES - dynamic_room_; }
    uint32_t dynamic_bytes() const { return static_cast<uint32_t>(dynamic_bytes_); }

    // The variable that `key` stands for, the same for all threads of the block; null when there is
    // no room.
    char* variable(const void* key, size_t bytes, size_t alignment) {
        for (const Variable& variable : variables_) {
            if (variable.key == key) return static_ + variable.offset;
        }
        if (alignment < 16) alignment = 16;
        const size_t offset = (static_used_ + alignment - 1) / alignment * alignment;
        variable_bytes_ += bytes;
        if (variable_bytes_ > STATIC_SHARED_BYTES || offset + bytes + GAP_BYTES > REGION_BYTES)
            return nullptr;
        variables_.push_back(Variable{key, offset, bytes});
        static_used_ = offset + bytes + GAP_BYTES;
        allow(static_ + offset, bytes);
        return static_ + offset;
    }

    // Whether an address is of shared memory, in use or not.
    bool contains(const void* p) const {
        return static_cast<size_t>(static_cast<const char*>(p) - base_) < ALL_BYTES;
    }

    // Where in its variable, or in the dynamic memory, `p` lies; false when the bytes are not
    // inside one.
    bool find(const void* p, size_t bytes, size_t& offset) const {
        const char* c = static_cast<const char*>(p);
        offset = static_cast<size_t>(c - dynamic());
        if (offset < dynamic_bytes_) return bytes <= dynamic_bytes_ - offset;
        for (const Variable& variable : variables_) {
            offset = static_cast<size_t>(c - static_ - variable.offset);
            if (offset < variable.bytes) return bytes <= variable.bytes - offset;
        }
        return false;
    }

    // What a write beside a variable or beside the dynamic memory has changed; "" when nothing.
    Text damage() const {
#if !defined(KVPOOL_EMU_ASAN)
        for (const Variable& variable : variables_) {
            const size_t at = first_change(static_ + variable.offset + variable.bytes, GAP_BYTES);
            if (at == GAP_BYTES) continue;
            return text_of("byte %zu past the end of a shared variable of %zu bytes was written",
                           at, variable.bytes);
        }
#endif
        return text_of("%s", "");
    }

private:
    static constexpr int POISON = 0xFF;
    // Whole pages, so that the dynamic memory ends where a page that faults begins.
    static constexpr size_t REGION_BYTES = 64 << 10;
    static constexpr size_t DYNAMIC_REGION_BYTES =
        (DYNAMIC_SHARED_BYTES + GUARD_BYTES - 1) / GUARD_BYTES * GUARD_BYTES;
    static constexpr size_t GAP_BYTES = 32;
    static constexpr size_t ALL_BYTES = REGION_BYTES + DYNAMIC_REGION_BYTES + 3 * GUARD_BYTES;

    struct Variable {
        const void* key;
        size_t offset;
        size_t bytes;
    };

    static size_t first_change(const char* p, size_t bytes) {
        size_t i = 0;
        while (i < bytes && static_cast<unsigned char>(p[i]) == POISON) ++i;
        return i;
    }
    static void allow([[maybe_unused]] char* p, [[maybe_unused]] size_t bytes) {
#if defined(KVPOOL_EMU_ASAN)
        __asan_unpoison_memory_region(p, bytes);
#endif
    }
    static void forbid([[maybe_unused]] char* p, [[maybe_unused]] size_t bytes) {
#if defined(KVPOOL_EMU_ASAN)
        __asan_poison_memory_region(p, bytes);
#endif
    }

    char* base_ = nullptr;
    char* static_ = nullptr;
    char* dynamic_ = nullptr;
    std::vector<Variable> variables_;
    size_t variable_bytes_ = 0;
    size_t static_used_ = 0;
    size_t dynamic_bytes_ = 0;
    size_t dynamic_room_ = 0;
};

}  // namespace kvpool::emu
