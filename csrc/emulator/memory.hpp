// The device's memory, and which of it is allocated.
//
// A device address is an address of a range that the process has reserved and may not touch; the
// bytes lie `delta` further. So whoever takes a device pointer for one of the host, in a kernel or
// outside, faults at once. Between two allocations there is always a gap, and what was freed is
// reused as late as possible.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <map>

#include "fault.hpp"

namespace kvpool::emu {

class DeviceMemory {
public:
    // As cuMemAlloc aligns.
    static constexpr uint64_t ALIGNMENT = 512;
    // New memory up to this size is filled with bytes of 0xFF, which are NaNs of every float
    // format.
    static constexpr uint64_t POISON_BYTES_MAX = 64ull << 20;
    static constexpr uint64_t DEFAULT_BYTES = 4ull << 30;

    // `capacity`: bytes of device memory, all allocations together.
    explicit DeviceMemory(uint64_t capacity) : capacity_(capacity) {
        reserved_ = 2 * capacity + (1ull << 30);
        void* addresses =
            mmap(nullptr, reserved_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        void* data = mmap(nullptr, reserved_, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (addresses == MAP_FAILED || data == MAP_FAILED) {
            fprintf(stderr, "kvpool emulator: cannot reserve %llu bytes of addresses, twice\n",
                    static_cast<unsigned long long>(reserved_));
            abort();
        }
        base_ = reinterpret_cast<uint64_t>(addresses);
        delta_ = reinterpret_cast<uint64_t>(data) - base_;
        cursor_ = base_ + ALIGNMENT;
    }
    ~DeviceMemory() {
        munmap(reinterpret_cast<void*>(base_), reserved_);
        munmap(reinterpret_cast<void*>(base_ + delta_), reserved_);
    }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    // The device address of `bytes` new bytes, or 0 when there is no room.
    uint64_t allocate(uint64_t bytes) {
        if (bytes == 0 || bytes > capacity_ - allocated_) return 0;
        uint64_t address = find_gap(cursor_, base_ + reserved_, bytes);
        if (address == 0) address = find_gap(base_ + ALIGNMENT, cursor_, bytes);
        if (address == 0) return 0;
        ranges_[address] = bytes;
        allocated_ += bytes;
        cursor_ = round_up(address + bytes) + ALIGNMENT;
        forget_hit();
        if (bytes <= POISON_BYTES_MAX) memset(data_at(address), 0xFF, bytes);
        return address;
    }

    // False when no allocation starts there.
    bool free(uint64_t address) {
        auto found = ranges_.find(address);
        if (found == ranges_.end() || !is_device(address)) return false;
        const uint64_t start = (address + 4095) & ~4095ull;
        const uint64_t end = (address + found->second) & ~4095ull;
        if (end > start) madvise(data_at(start), end - start, MADV_DONTNEED);
        allocated_ -= found->second;
        ranges_.erase(found);
        forget_hit();
        return true;
    }

    // Zeroes bytes of a live allocation. Whole pages of many are given back instead: they read as
    // zero, and take no room until they are touched.
    void clear(uint64_t address, uint64_t bytes) {
        const uint64_t start = (address + 4095) & ~4095ull;
        const uint64_t end = (address + bytes) & ~4095ull;
        if (bytes <= POISON_BYTES_MAX || !is_device(address)) {
            memset(find(address, bytes), 0, bytes);
            return;
        }
        memset(data_at(address), 0, start - address);
        madvise(data_at(start), end - start, MADV_DONTNEED);
        memset(data_at(end), 0, address + bytes - end);
    }

    // Host memory that kernels may reach at its own address: pinned memory. [bytes]
    void add_host(void* p, uint64_t bytes) {
        ranges_[reinterpret_cast<uint64_t>(p)] = bytes;
        forget_hit();
    }
    bool remove_host(void* p) {
        const uint64_t address = reinterpret_cast<uint64_t>(p);
        if (is_device(address)) return false;
        forget_hit();
        return ranges_.erase(address) != 0;
    }

    // Where the bytes [address, address + bytes) are, or null when they are not inside one live
    // allocation.
    char* find(uint64_t address, uint64_t bytes) {
        if (address - hit_start_ < hit_bytes_ && bytes <= hit_bytes_ - (address - hit_start_)) {
            return reinterpret_cast<char*>(address + hit_delta_);
        }
        auto after = ranges_.upper_bound(address);
        if (after == ranges_.begin()) return nullptr;
        --after;
        const uint64_t offset = address - after->first;
        if (offset >= after->second || bytes > after->second - offset) return nullptr;
        hit_start_ = after->first;
        hit_bytes_ = after->second;
        hit_delta_ = is_device(address) ? delta_ : 0;
        return reinterpret_cast<char*>(address + hit_delta_);
    }

    // The start and the size of the allocation that `address` lies in; false when in none.
    bool range_of(uint64_t address, uint64_t& start, uint64_t& bytes) const {
        auto after = ranges_.upper_bound(address);
        if (after == ranges_.begin()) return false;
        --after;
        if (address - after->first >= after->second) return false;
        start = after->first;
        bytes = after->second;
        return true;
    }

    // "16 bytes past the end of the allocation of 4096 bytes at 0x…", for messages.
    Text nearest(uint64_t address) const {
        if (ranges_.empty()) return text_of("nothing is allocated");
        auto after = ranges_.upper_bound(address);
        auto best = after;
        if (after == ranges_.end()) {
            --best;
        } else if (after != ranges_.begin()) {
            auto before = std::prev(after);
            const uint64_t end = before->first + before->second;
            if (address < end || address - end <= after->first - address) best = before;
        }
        const auto start = static_cast<unsigned long long>(best->first);
        const auto bytes = static_cast<unsigned long long>(best->second);
        const uint64_t end = best->first + best->second;
        if (address < best->first) {
            return text_of("%llu bytes before the allocation of %llu bytes at 0x%llx",
                           static_cast<unsigned long long>(best->first - address), bytes, start);
        }
        if (address >= end) {
            return text_of("%llu bytes past the end of the allocation of %llu bytes at 0x%llx",
                           static_cast<unsigned long long>(address - end), bytes, start);
        }
        return text_of("byte %llu of the allocation of %llu bytes at 0x%llx",
                       static_cast<unsigned long long>(address - best->first), bytes, start);
    }

    bool is_device(uint64_t address) const { return address - base_ < reserved_; }
    uint64_t capacity() const { return capacity_; }
    uint64_t allocated() const { return allocated_; }

private:
    static uint64_t round_up(uint64_t x) { return (x + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }
    char* data_at(uint64_t address) const { return reinterpret_cast<char*>(address + delta_); }
    void forget_hit() { hit_bytes_ = 0; }

    // The lowest address in [from, to) with `bytes` free bytes and a gap on either side, or 0.
    uint64_t find_gap(uint64_t from, uint64_t to, uint64_t bytes) const {
        uint64_t start = from;
        auto next = ranges_.upper_bound(from);
        if (next != ranges_.begin()) {
            auto before = std::prev(next);
            if (is_device(before->first)) {
                const uint64_t end = round_up(before->first + before->second) + ALIGNMENT;
                if (end > start) start = end;
            }
        }
        for (;; ++next) {
            const bool last = next == ranges_.end() || next->first >= to;
            const uint64_t limit = last ? to : next->first;
            if (limit >= start && limit - start >= bytes + ALIGNMENT) return start;
            if (last) return 0;
            start = round_up(next->first + next->second) + ALIGNMENT;
        }
    }

    uint64_t capacity_;
    uint64_t reserved_ = 0;
    uint64_t base_ = 0;
    uint64_t delta_ = 0;
    uint64_t cursor_ = 0;
    uint64_t allocated_ = 0;
    // Start to size, of device allocations and of pinned host memory.
    std::map<uint64_t, uint64_t> ranges_;
    // The range found last.
    uint64_t hit_start_ = 0;
    uint64_t hit_bytes_ = 0;
    uint64_t hit_delta_ = 0;
};

// Bytes from text: a number, alone or with KiB, MiB or GiB; 0 when it is neither.
inline uint64_t parse_bytes(const char* text) {
    char* end = nullptr;
    const uint64_t number = strtoull(text, &end, 10);
    if (end == text) return 0;
    while (*end == ' ') ++end;
    if (*end == '\0') return number;
    if (strcmp(end, "KiB") == 0) return number << 10;
    if (strcmp(end, "MiB") == 0) return number << 20;
    if (strcmp(end, "GiB") == 0) return number << 30;
    return 0;
}

}  // namespace kvpool::emu
