// Counts what a kernel moves between the multiprocessors and memory.
//
// The unit of the device is the warp instruction: the lanes that execute one load together fetch
// each 32-byte sector they touch once. Lanes run here one after another, so each keeps a log, and
// what they logged at the same place of the source, for the same time since they last met, is one
// instruction. Caches are not modelled.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <vector>

#include "fault.hpp"

namespace kvpool::emu {

constexpr uint32_t LANES = 32;
constexpr uint64_t SECTOR_BYTES = 32;

enum class Access : uint8_t { Read = 0, Write = 1, Atomic = 2, Shared = 3 };

// Of one kernel, or of one launch. Bytes that several lanes of an instruction touch count once.
struct Traffic {
    uint64_t launches = 0;
    uint64_t blocks = 0;
    uint64_t read_bytes = 0;
    uint64_t read_sectors = 0;
    uint64_t read_instructions = 0;
    uint64_t write_bytes = 0;
    uint64_t write_sectors = 0;
    uint64_t write_instructions = 0;
    uint64_t atomics = 0;
    // Passes of the shared memory's 32 banks beyond the fewest possible, of checked accesses and
    // ldmatrix.
    uint64_t bank_conflicts = 0;

    void add(const Traffic& other) {
        launches += other.launches;
        blocks += other.blocks;
        read_bytes += other.read_bytes;
        read_sectors += other.read_sectors;
        read_instructions += other.read_instructions;
        write_bytes += other.write_bytes;
        write_sectors += other.write_sectors;
        write_instructions += other.write_instructions;
        atomics += other.atomics;
        bank_conflicts += other.bank_conflicts;
    }
};

// Passes beyond one of a shared memory access, in each of the parts that the device splits it into:
// as many lanes as 128 bytes hold. A bank holds every 32nd word of 4 bytes; lanes that want the
// same word share a pass. starts: [LANES], of those lanes whose bit is set
inline uint64_t bank_conflicts(const uint64_t* starts, uint32_t lanes, uint64_t bytes) {
    constexpr uint32_t BANKS = 32;
    const auto part = static_cast<uint32_t>(std::min<uint64_t>(LANES, 128 / bytes));
    const uint64_t words = (bytes + 3) / 4;
    uint64_t extra = 0;
    for (uint32_t first = 0; first < LANES; first += part) {
        // The distinct words of each bank.
        uint64_t seen[BANKS][LANES];
        uint32_t depth[BANKS] = {};
        uint32_t deepest = 0;
        for (uint32_t lane = first; lane < first + part; ++lane) {
            if ((lanes >> lane & 1u) == 0) continue;
            for (uint64_t w = 0; w < words; ++w) {
                const uint64_t word = starts[lane] / 4 + w;
                const auto bank = static_cast<uint32_t>(word % BANKS);
                uint64_t* const known = seen[bank];
                if (std::find(known, known + depth[bank], word) != known + depth[bank]) continue;
                known[depth[bank]++] = word;
                deepest = std::max(deepest, depth[bank]);
            }
        }
        if (deepest > 1) extra += deepest - 1;
    }
    return extra;
}

// The logs of the lanes of one warp.
class WarpLog {
public:
    void add(uint32_t lane, Site site, Access access, uint64_t address, uint32_t bytes) {
        const uint64_t place = reinterpret_cast<uint64_t>(site.file) & FILE_BITS;
        const uint64_t line = static_cast<uint64_t>(site.line) & 0x3FFFu;
        const uint64_t key = place | line << 48 | static_cast<uint64_t>(access) << 62;
        lanes_[lane].push_back(Entry{key, address, bytes});
        used_ |= 1u << lane;
    }

    // Counts what was logged, and forgets it.
    void flush(Traffic& traffic) {
        if (used_ == 0) return;
        if (in_step()) {
            flush_columns(traffic);
        } else {
            flush_sorted(traffic);
        }
        for (uint32_t lane = 0; lane < LANES; ++lane) lanes_[lane].clear();
        used_ = 0;
    }

private:
    static constexpr uint64_t FILE_BITS = (1ull << 48) - 1;

    struct Entry {
        uint64_t key;
        uint64_t address;
        uint32_t bytes;
    };
    // An entry of the log of `lane`, the `turn`-th with its key.
    struct Turn {
        uint64_t key;
        uint32_t turn;
        uint32_t lane;
        uint64_t address;
        uint32_t bytes;
    };
    struct Run {
        uint64_t start, end;
        uint32_t lane;
    };

    // Whether every lane that logged anything logged the same places in the same order.
    bool in_step() const {
        const std::vector<Entry>& first = lanes_[static_cast<uint32_t>(__builtin_ctz(used_))];
        for (uint32_t rest = used_ & (used_ - 1); rest != 0; rest &= rest - 1) {
            const std::vector<Entry>& lane = lanes_[static_cast<uint32_t>(__builtin_ctz(rest))];
            if (lane.size() != first.size()) return false;
            for (size_t i = 0; i < lane.size(); ++i) {
                if (lane[i].key != first[i].key) return false;
            }
        }
        return true;
    }

    void flush_columns(Traffic& traffic) {
        const std::vector<Entry>& first = lanes_[static_cast<uint32_t>(__builtin_ctz(used_))];
        for (size_t i = 0; i < first.size(); ++i) {
            Run runs[LANES];
            uint32_t count = 0;
            for (uint32_t rest = used_; rest != 0; rest &= rest - 1) {
                const auto lane = static_cast<uint32_t>(__builtin_ctz(rest));
                const Entry& entry = lanes_[lane][i];
                runs[count++] = Run{entry.address, entry.address + entry.bytes, lane};
            }
            count_instruction(traffic, first[i].key, runs, count);
        }
    }

    void flush_sorted(Traffic& traffic) {
        turns_.clear();
        for (uint32_t lane = 0; lane < LANES; ++lane) {
            const size_t start = turns_.size();
            for (const Entry& e : lanes_[lane]) {
                turns_.push_back(Turn{e.key, 0, lane, e.address, e.bytes});
            }
            std::stable_sort(turns_.begin() + static_cast<ptrdiff_t>(start), turns_.end(),
                             [](const Turn& a, const Turn& b) { return a.key < b.key; });
            for (size_t i = start + 1; i < turns_.size(); ++i) {
                if (turns_[i].key == turns_[i - 1].key) turns_[i].turn = turns_[i - 1].turn + 1;
            }
        }
        std::sort(turns_.begin(), turns_.end(), [](const Turn& a, const Turn& b) {
            if (a.key != b.key) return a.key < b.key;
            if (a.turn != b.turn) return a.turn < b.turn;
            return a.lane < b.lane;
        });
        for (size_t i = 0; i < turns_.size();) {
            Run runs[LANES];
            uint32_t count = 0;
            const Turn& first = turns_[i];
            for (; i < turns_.size() && turns_[i].key == first.key && turns_[i].turn == first.turn;
                 ++i) {
                const Turn& turn = turns_[i];
                runs[count++] = Run{turn.address, turn.address + turn.bytes, turn.lane};
            }
            count_instruction(traffic, first.key, runs, count);
        }
    }

    static void count_instruction(Traffic& traffic, uint64_t key, Run* runs, uint32_t count) {
        if (static_cast<Access>(key >> 62) == Access::Shared) {
            uint64_t starts[LANES] = {};
            uint32_t lanes = 0;
            for (uint32_t i = 0; i < count; ++i) {
                starts[runs[i].lane] = runs[i].start;
                lanes |= 1u << runs[i].lane;
            }
            traffic.bank_conflicts += bank_conflicts(starts, lanes, runs[0].end - runs[0].start);
            return;
        }
        // Mostly in order already.
        for (uint32_t i = 1; i < count; ++i) {
            const Run run = runs[i];
            uint32_t j = i;
            for (; j > 0 && runs[j - 1].start > run.start; --j) runs[j] = runs[j - 1];
            runs[j] = run;
        }
        uint64_t bytes = 0;
        uint64_t sectors = 0;
        uint64_t bytes_until = 0;
        uint64_t sectors_until = 0;
        for (uint32_t i = 0; i < count; ++i) {
            const uint64_t start = std::max(runs[i].start, bytes_until);
            if (runs[i].end > start) {
                bytes += runs[i].end - start;
                bytes_until = runs[i].end;
            }
            const uint64_t sector = std::max(runs[i].start / SECTOR_BYTES, sectors_until);
            const uint64_t end = (runs[i].end + SECTOR_BYTES - 1) / SECTOR_BYTES;
            if (end > sector) {
                sectors += end - sector;
                sectors_until = end;
            }
        }
        switch (static_cast<Access>(key >> 62)) {
            case Access::Read:
                traffic.read_bytes += bytes;
                traffic.read_sectors += sectors;
                traffic.read_instructions += 1;
                break;
            case Access::Write:
                traffic.write_bytes += bytes;
                traffic.write_sectors += sectors;
                traffic.write_instructions += 1;
                break;
            case Access::Atomic:
                traffic.atomics += count;
                break;
            case Access::Shared:
                break;
        }
    }

    std::vector<Entry> lanes_[LANES];
    uint32_t used_ = 0;
    std::vector<Turn> turns_;
};

}  // namespace kvpool::emu
