// What the threads of the soak share: the cache, what must be in it, and what took how long.
#pragma once

#include <kvpool.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>
#include <string>
#include <vector>

namespace soak {

using Clock = std::chrono::steady_clock;

inline uint64_t mix(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdULL;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ULL;
    return x ^ (x >> 33);
}

class Random {
public:
    explicit Random(uint64_t seed) : state_(mix(seed + 1)) {}
    uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15ULL); }
    uint32_t below(uint32_t n) { return static_cast<uint32_t>(next() % n); }
    bool one_in(uint32_t n) { return below(n) == 0; }

private:
    uint64_t state_;
};

// What took how long: buckets of a sixteenth of a power of two of nanoseconds.
class Latencies {
public:
    void add(Clock::duration took) {
        const auto ns = static_cast<double>(
            std::max<int64_t>(1, std::chrono::duration_cast<std::chrono::nanoseconds>(took).count()));
        ++counts_[std::min<size_t>(counts_.size() - 1, static_cast<size_t>(16 * std::log2(ns)))];
        ++all_;
    }
    // Microseconds that so many of a thousand do not pass.
    double quantile_us(uint64_t of_a_thousand) const {
        uint64_t seen = 0;
        for (size_t i = 0; i < counts_.size(); ++i) {
            seen += counts_[i];
            if (seen * 1000 >= all_ * of_a_thousand && seen > 0) {
                return std::exp2(static_cast<double>(i + 1) / 16) / 1000;
            }
        }
        return 0;
    }
    uint64_t all() const { return all_; }
    void clear() {
        counts_.fill(0);
        all_ = 0;
    }

private:
    std::array<uint64_t, 640> counts_{};
    uint64_t all_ = 0;
};

struct Shape {
    uint32_t layers, heads, dim, q_heads, max_step, max_rewind, max_len;
    std::vector<uint32_t> windows;  // [layers], 0 = none
};

// A sequence as its owner knows it.
struct Live {
    kvpool::Sequence sequence;
    std::vector<uint32_t> tokens;   // those committed, then those of the prompt that are left
    std::vector<uint64_t> history;  // of all tokens up to each, [tokens]
    uint32_t len = 0;               // committed
    uint32_t high_water = 0;        // the most that were ever committed
    uint32_t limit = 0;
    uint32_t tenant = 0;

    void push(uint32_t token) {
        const uint64_t before = history.empty() ? mix(tenant) : history.back();
        tokens.push_back(token);
        history.push_back(mix(before ^ (token + 1)));
    }
    void cut(uint32_t to) {
        tokens.resize(to);
        history.resize(to);
    }
};

// One element of K or V. The first of each vector has the largest magnitude, which makes the INT8 scale 1,
// and all are whole: so every format keeps them exactly.
inline float element(uint64_t history, uint32_t layer, bool is_v, uint32_t head, uint32_t i) {
    if (i == 0) return 127.0f;
    const uint64_t place = (layer * 2 + (is_v ? 1 : 0)) * 64 + head;
    return static_cast<float>(mix(history ^ (place << 8) ^ i) % 255) - 127.0f;
}

// What all threads share. One of them at a time is in a verb.
struct Engine {
    kvpool::Cache cache;
    Shape shape;
    Clock::time_point began = Clock::now();
    std::mutex turn;
    std::atomic<bool> over{false};
    // Under `turn`:
    Latencies begins, steps, others;
    std::string folder;   // of saves
    bool blocks = false;  // whether there is a prefix index
    uint64_t saves = 0;
    uint64_t tokens_checked = 0, forks = 0, rewinds = 0, cancels = 0, refusals = 0, pins = 0, ends = 0;
};

inline Shape shape_of(const kvpool::Cache& cache) {
    const auto info = cache.plan_info().value();
    Shape shape{info.num_layers,      info.num_kv_heads,      info.head_dim,    info.num_q_heads,
                info.max_step_tokens, info.max_rewind_tokens, info.max_seq_len, {}};
    for (uint32_t layer = 0; layer < info.num_layers; ++layer) {
        const uint32_t group = cache.layer(layer)->group;
        shape.windows.push_back(cache.group(group)->window);
    }
    return shape;
}

}  // namespace soak
