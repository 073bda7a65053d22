// Hours of random traffic of many threads through the C++ layer, in a pool that is always full: what must
// stay the same stays the same. Every vector in the cache is a function of all tokens before it, of the
// tenant and of its place, and is read back again and again.
//
//     soak SECONDS [THREADS] [key=value...]     settings over those of CONFIG below
//
// Prints a line for each sixtieth of the time, and fails where content is wrong, an invariant does not hold,
// something is lost, or memory grows. Latencies are printed, and not judged.
#include <unistd.h>

#include <kvpool.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <thread>
#include <vector>

#include "../capi/check.h"

namespace {

using kvpool::Status;
using Clock = std::chrono::steady_clock;

const char CONFIG[] = R"(
[model]
num_layers = 3
num_q_heads = 4
num_kv_heads = 2
head_dim = 32
attention_window = [0, 48, 0]
sink_tokens = 0
[limits]
max_seqs = 32
max_seq_len = 256
max_batch_tokens = 64
max_step_tokens = 32
max_rewind_tokens = 8
[cache]
mode = "paged"
tokens_per_block = 16
format = "int8"
[pool]
capacity = "blocks:160"
[device]
threads = 1
)";

uint64_t mix(uint64_t x) {
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
float element(uint64_t history, uint32_t layer, bool is_v, uint32_t head, uint32_t i) {
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
    uint64_t tokens_checked = 0, forks = 0, rewinds = 0, cancels = 0, refusals = 0, pins = 0;
};

class Worker {
public:
    Worker(Engine& engine, uint32_t number) : engine_(engine), random_(number), number_(number) {
        live_.reserve(MOST);
    }

    void run() {
        while (!engine_.over) {
            {
                const std::lock_guard<std::mutex> turn(engine_.turn);
                one();
            }
            // Without a turn: what any thread may call at any time.
            if (random_.one_in(64)) look();
        }
        const std::lock_guard<std::mutex> turn(engine_.turn);
        pins_.clear();
        live_.clear();
    }

private:
    static constexpr size_t MOST = 6;
    static constexpr uint32_t TENANTS = 3, SYSTEM_PROMPTS = 4;
    // Operations between two saves: a file that is on the disk takes as long as thousands of them.
    static constexpr uint32_t SAVES = 20000;

    template <class Call>
    auto timed(Latencies& latencies, Call call) {
        const auto start = Clock::now();
        auto result = call();
        latencies.add(Clock::now() - start);
        return result;
    }

    void one() {
        const uint32_t what = random_.below(100);
        if (random_.one_in(SAVES)) return save();
        if (live_.empty() || (what < 12 && live_.size() < MOST)) return begin();
        if (what < 70) return step();
        Live& any = live_[random_.below(static_cast<uint32_t>(live_.size()))];
        if (what < 78) return fork(any);
        if (what < 84) return rewind(any);
        if (what < 88) return release(any);
        if (what < 90) return pin(any);
        if (what < 92) return retain(any);
        if (what < 93) return time();
        check(any);
    }

    // A prompt that begins as one of a few, for one of a few tenants.
    void begin() {
        const uint32_t tenant = random_.below(TENANTS);
        prompt_.clear();
        const uint32_t system = random_.below(SYSTEM_PROMPTS);
        const uint32_t shared = random_.below(96);
        for (uint32_t i = 0; i < shared; ++i) prompt_.push_back(system * 1000 + i);
        const uint32_t own = 1 + random_.below(64);
        for (uint32_t i = 0; i < own; ++i) prompt_.push_back(random_.below(50));
        kvpool::BeginOptions options;
        options.name_space.salt = tenant;
        options.max_len = std::min(engine_.shape.max_len - 16,
                                   static_cast<uint32_t>(prompt_.size()) + 1 + random_.below(80));
        // Where nothing is kept in blocks a retention is refused.
        if (random_.one_in(4) && engine_.blocks) {
            options.retentions = {
                kvpool::Retention(20 + random_.below(80)).tokens(0, 64).for_ms(random_.below(300))};
        }
        auto begun = timed(engine_.begins, [&] { return engine_.cache.begin(prompt_, options); });
        if (!begun) {
            const Status status = begun.status();
            CHECK(status == Status::not_admitted || status == Status::no_seq_slot);
            ++engine_.refusals;
            if (!live_.empty()) release(live_.front());
            return;
        }
        Live live;
        live.tokens.reserve(engine_.shape.max_len);
        live.history.reserve(engine_.shape.max_len);
        live.tenant = tenant;
        for (const uint32_t token : prompt_) live.push(token);
        live.len = live.high_water = begun->cached_len;
        live.limit = begun->limit;
        live.sequence = std::move(begun->sequence);
        CHECK(live.len < prompt_.size());
        check(live);
        live_.push_back(std::move(live));
    }

    // Some of its sequences, each with some of its prompt or the next token.
    void step() {
        items_.clear();
        ids_.clear();
        rows_.clear();
        uint32_t left = 64;
        for (size_t i = 0; i < live_.size(); ++i) {
            Live& live = live_[i];
            if (random_.one_in(4) || left == 0) continue;
            if (live.len == live.limit) {
                release(live);
                return;
            }
            const auto known = static_cast<uint32_t>(live.tokens.size());
            if (live.len == known) live.push(random_.below(50));
            const uint32_t most = std::min({static_cast<uint32_t>(live.tokens.size()) - live.len,
                                            engine_.shape.max_step, left, live.limit - live.len});
            const uint32_t n = 1 + random_.below(most);
            left -= n;
            items_.emplace_back(live.sequence, n);
            for (uint32_t t = 0; t < n; ++t) {
                ids_.push_back(live.tokens[live.len + t]);
                rows_.push_back({i, live.history[live.len + t], live.len + t});
            }
        }
        const bool cancelled = random_.one_in(10);
        const auto start = Clock::now();
        auto step = engine_.cache.reserve(items_, ids_);
        if (!step) kvpool_say(step.error());
        const auto view = step->view();
        CHECK(view->num_tokens() == ids_.size());
        for (size_t row = 0; row < rows_.size(); ++row) CHECK(view->positions[row] == rows_[row].position);
        Clock::duration ours{};
        const Shape& shape = engine_.shape;
        const uint32_t layers = cancelled ? random_.below(shape.layers + 1) : shape.layers;
        for (uint32_t layer = 0; layer < layers; ++layer) {
            const auto filling = Clock::now();
            fill(layer);
            ours += Clock::now() - filling;
            CHECK(step->append(layer, k_, v_).ok());
            if (layer == 1 && !ids_.empty()) attend(*step, layer);
        }
        if (cancelled) {
            CHECK(step->cancel().ok());
            ++engine_.cancels;
            return;
        }
        CHECK(step->commit().ok());
        engine_.steps.add(Clock::now() - start - ours);
        for (const Row& row : rows_) {
            Live& live = live_[row.live];
            live.len = row.position + 1;
            live.high_water = std::max(live.high_water, live.len);
        }
    }

    struct Row {
        size_t live;
        uint64_t history;
        uint32_t position;
    };

    void fill(uint32_t layer) {
        const Shape& shape = engine_.shape;
        k_.clear();
        v_.clear();
        for (const Row& row : rows_) {
            for (uint32_t head = 0; head < shape.heads; ++head) {
                for (uint32_t i = 0; i < shape.dim; ++i) {
                    k_.push_back(element(row.history, layer, false, head, i));
                    v_.push_back(element(row.history, layer, true, head, i));
                }
            }
        }
    }

    // A mean of values lies between the least and the greatest that there can be.
    void attend(kvpool::Step& step, uint32_t layer) {
        q_.assign(rows_.size() * engine_.shape.q_heads * engine_.shape.dim, 0.01f);
        out_.assign(q_.size(), NAN);
        CHECK(step.attend(layer, q_, out_).ok());
        for (size_t i = 0; i < out_.size(); ++i) {
            CHECK(i % engine_.shape.dim == 0 ? std::abs(out_[i] - 127.0f) < 0.01f
                                             : std::abs(out_[i]) < 127.01f);
        }
    }

    // Some of what it holds, read back: never another's, never an older one's.
    void check(Live& live) {
        const Shape& shape = engine_.shape;
        const uint32_t layer = random_.below(shape.layers);
        const uint32_t window = shape.windows[layer];
        const uint32_t first = window == 0 || live.high_water <= window ? 0 : live.high_water - window;
        if (first >= live.len) return;
        const uint32_t from = first + random_.below(live.len - first);
        const uint32_t to = from + 1 + random_.below(std::min(live.len - from, 32u));
        const bool is_v = random_.one_in(2);
        read_.resize(size_t{to - from} * shape.heads * shape.dim);
        CHECK(engine_.cache
                  .export_tokens(live.sequence, layer, is_v ? kvpool::Part::v : kvpool::Part::k, from, to,
                                 read_)
                  .ok());
        const float* read = read_.data();
        for (uint32_t at = from; at < to; ++at) {
            for (uint32_t head = 0; head < shape.heads; ++head) {
                for (uint32_t i = 0; i < shape.dim; ++i) {
                    CHECK(*read++ == element(live.history[at], layer, is_v, head, i));
                }
            }
        }
        engine_.tokens_checked += to - from;
    }

    void fork(Live& live) {
        if (live_.size() == MOST) return;
        auto forked = timed(engine_.others, [&] { return live.sequence.fork(); });
        if (!forked) {
            CHECK(forked.status() == Status::not_admitted || forked.status() == Status::no_seq_slot);
            ++engine_.refusals;
            return;
        }
        Live other = copy_of(live);
        other.sequence = std::move(*forked);
        check(other);
        live_.push_back(std::move(other));
        ++engine_.forks;
    }

    void rewind(Live& live) {
        const uint32_t back = std::min(random_.below(engine_.shape.max_rewind + 1), live.len);
        if (back == 0) return;
        const uint32_t to = live.len - back;
        const auto rewound = timed(engine_.others, [&] { return live.sequence.truncate(to); });
        if (!rewound) {
            CHECK(rewound.status() == Status::not_held || rewound.status() == Status::not_admitted);
            return;
        }
        live.len = to;
        live.cut(to);
        check(live);
        ++engine_.rewinds;
    }

    void release(Live& live) {
        check(live);
        CHECK(timed(engine_.others, [&] { return live.sequence.release(); }).ok());
        std::swap(live, live_.back());
        live_.pop_back();
    }

    void pin(Live& live) {
        if (!pins_.empty()) {
            CHECK(pins_.back().unpin().ok());
            pins_.pop_back();
            return;
        }
        auto pin = live.sequence.pin();
        if (pin) {
            pins_.push_back(std::move(*pin));
            ++engine_.pins;
        } else {
            CHECK(pin.status() == Status::nothing_to_pin || pin.status() == Status::no_pin ||
                  pin.status() == Status::not_admitted || pin.status() == Status::reuse_off);
        }
    }

    // All prefixes, or one of its sequences, to a file and back into the cache that still has them.
    void save() {
        const std::string path =
            engine_.folder + (number_ % 2 == 0 ? "/prefixes" : "/sequence") + std::to_string(number_);
        if (number_ % 2 == 0) {
            if (!engine_.blocks) return;
            CHECK(engine_.cache.save_prefixes(path.c_str()).ok());
            if (random_.one_in(2)) CHECK(engine_.cache.clear_cached().ok());
            CHECK(engine_.cache.restore_prefixes(path.c_str()).ok());
        } else {
            if (live_.empty() || live_.size() == MOST) return;
            const Live& live = live_.front();
            if (live.len == 0) return;
            CHECK(engine_.cache.save_sequence(live.sequence, path.c_str()).ok());
            auto begun = engine_.cache.restore_sequence(path.c_str());
            if (!begun) {
                CHECK(begun.status() == Status::not_admitted || begun.status() == Status::no_seq_slot);
                ++engine_.refusals;
                return;
            }
            Live other = copy_of(live);
            other.limit = begun->limit;
            other.sequence = std::move(begun->sequence);
            check(other);
            live_.push_back(std::move(other));
        }
        ++engine_.saves;
    }

    Live copy_of(const Live& live) const {
        Live other;
        other.tokens.reserve(engine_.shape.max_len);
        other.history.reserve(engine_.shape.max_len);
        other.tokens.assign(live.tokens.begin(), live.tokens.end());
        other.history.assign(live.history.begin(), live.history.end());
        other.len = live.len;
        other.high_water = live.high_water;
        other.limit = live.limit;
        other.tenant = live.tenant;
        return other;
    }

    void retain(Live& live) {
        const kvpool::Retention retention =
            kvpool::Retention(random_.below(101)).tokens(0, 32).for_ms(random_.below(200));
        const Status status = live.sequence.set_retention({&retention, 1}).status();
        CHECK(status == (engine_.blocks ? Status::ok : Status::reuse_off));
    }

    void time() {
        const auto since = Clock::now() - engine_.began;
        const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(since).count();
        CHECK(engine_.cache.set_time_ms(static_cast<uint64_t>(ms)).ok());
        const auto polled = engine_.cache.poll_events([](const kvpool::Event&) {});
        CHECK(polled.ok());
    }

    void look() {
        if (random_.one_in(2)) {
            const auto stats = engine_.cache.stats();
            CHECK(stats.ok() && stats->seqs <= 32);
        }
        std::array<uint32_t, 64> prompt;
        for (uint32_t i = 0; i < prompt.size(); ++i) prompt[i] = number_ % SYSTEM_PROMPTS * 1000 + i;
        kvpool::Namespace name_space;
        name_space.salt = 0;
        const auto probe = engine_.cache.probe(prompt, name_space);
        CHECK(probe.ok() && probe->cached_len < prompt.size());
    }

    [[noreturn]] static void kvpool_say(const kvpool::Error& error) {
        std::fprintf(stderr, "%s\n", error.message());
        std::exit(1);
    }

    Engine& engine_;
    Random random_;
    uint32_t number_;
    std::vector<Live> live_;
    std::vector<kvpool::Pin> pins_;
    std::vector<uint32_t> prompt_, ids_;
    std::vector<kvpool::StepItem> items_;
    std::vector<Row> rows_;
    std::vector<float> k_, v_, q_, out_, read_;
};

uint64_t resident_kib() {
    std::ifstream file("/proc/self/statm");
    uint64_t total = 0, resident = 0;
    file >> total >> resident;
    return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) / 1024;
}

Shape shape_of(const kvpool::Cache& cache) {
    const auto info = cache.plan_info().value();
    Shape shape{info.num_layers,      info.num_kv_heads,      info.head_dim,    info.num_q_heads,
                info.max_step_tokens, info.max_rewind_tokens, info.max_seq_len, {}};
    for (uint32_t layer = 0; layer < info.num_layers; ++layer) {
        const uint32_t group = cache.layer(layer)->group;
        shape.windows.push_back(cache.group(group)->window);
    }
    return shape;
}

// One line: what happened since the last, and how things are.
void report(Engine& engine, double seconds) {
    const std::lock_guard<std::mutex> turn(engine.turn);
    const auto stats = engine.cache.stats().value();
    const uint32_t groups = engine.cache.plan_info()->num_groups;
    uint32_t unused = 0, active = 0, cached = 0, promised = 0;
    for (uint32_t group = 0; group < groups; ++group) {
        const auto blocks = engine.cache.group_stats(group).value();
        unused += blocks.blocks_free;
        active += blocks.blocks_active;
        cached += blocks.blocks_cached;
        promised += blocks.blocks_promised;
    }
    std::printf(
        "%7.0f s  %6llu KiB  seqs %2llu  blocks free %u active %u cached %u promised %u  "
        "begin %llu: %.1f %.1f %.1f us  step %llu: %.1f %.1f %.1f us  other %llu: %.1f %.1f %.1f us\n",
        seconds, static_cast<unsigned long long>(resident_kib()), static_cast<unsigned long long>(stats.seqs),
        unused, active, cached, promised, static_cast<unsigned long long>(engine.begins.all()),
        engine.begins.quantile_us(500), engine.begins.quantile_us(990), engine.begins.quantile_us(999),
        static_cast<unsigned long long>(engine.steps.all()), engine.steps.quantile_us(500),
        engine.steps.quantile_us(990), engine.steps.quantile_us(999),
        static_cast<unsigned long long>(engine.others.all()), engine.others.quantile_us(500),
        engine.others.quantile_us(990), engine.others.quantile_us(999));
    std::fflush(stdout);
    engine.begins.clear();
    engine.steps.clear();
    engine.others.clear();
    OK(kvpool_cache_check(engine.cache.c()));
}

}  // namespace

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 20;
    const int threads = argc > 2 ? std::atoi(argv[2]) : 8;
    std::vector<std::string_view> overrides(argv + std::min(argc, 3), argv + argc);
    const auto config = kvpool::Config::parse(CONFIG, "soak.toml", overrides).value();
    Engine engine;
    engine.cache = kvpool::Cache::open(kvpool::Plan::create(config).value()).value();
    engine.shape = shape_of(engine.cache);
    for (uint32_t group = 0; group < engine.cache.plan_info()->num_groups; ++group) {
        engine.blocks |= engine.cache.group(group)->reuse() == kvpool::Reuse::index;
    }
    char folder[] = "/tmp/kvpool-soak-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    engine.folder = folder;
    std::printf("%d threads for %.0f s; latencies are p50, p99 and p99.9 of the line's time\n", threads,
                seconds);
    std::vector<std::thread> workers;
    for (int i = 0; i < threads; ++i) {
        workers.emplace_back([&engine, i] { Worker(engine, static_cast<uint32_t>(i)).run(); });
    }
    uint64_t warm = 0, last = 0;
    for (int line = 1; line <= 60; ++line) {
        std::this_thread::sleep_until(engine.began + std::chrono::duration_cast<Clock::duration>(
                                                         std::chrono::duration<double>(seconds * line / 60)));
        report(engine, seconds * line / 60);
        last = resident_kib();
        if (line == 6) warm = last;
    }
    engine.over = true;
    for (std::thread& worker : workers) worker.join();

    const auto stats = engine.cache.stats().value();
    std::printf(
        "begun %llu, refused %llu, steps %llu, cancelled %llu, forks %llu, rewinds %llu, pins %llu, saves "
        "%llu, "
        "hits %llu of %llu tokens, copies on write %llu, evictions %llu, tokens read back %llu\n",
        static_cast<unsigned long long>(stats.seqs_begun), static_cast<unsigned long long>(engine.refusals),
        static_cast<unsigned long long>(stats.steps_committed),
        static_cast<unsigned long long>(stats.steps_cancelled), static_cast<unsigned long long>(engine.forks),
        static_cast<unsigned long long>(engine.rewinds), static_cast<unsigned long long>(engine.pins),
        static_cast<unsigned long long>(engine.saves),
        static_cast<unsigned long long>(stats.prefix_hit_tokens),
        static_cast<unsigned long long>(stats.prefix_query_tokens),
        static_cast<unsigned long long>(stats.cow_copies), static_cast<unsigned long long>(stats.evictions),
        static_cast<unsigned long long>(engine.tokens_checked));
    CHECK(engine.forks > 0 && engine.rewinds > 0 && engine.cancels > 0 && engine.refusals > 0);
    CHECK(stats.prefix_hit_tokens > 0 && engine.tokens_checked > 0);
    std::filesystem::remove_all(engine.folder);
    if (engine.blocks) {
        CHECK(stats.evictions > 0 && stats.cow_copies > 0 && engine.pins > 0);
    }
    // Nothing is held any more, and what is left is whole.
    CHECK(stats.seqs == 0 && stats.held_bytes == 0 && stats.promised_bytes == 0 && stats.used_bytes == 0);
    OK(kvpool_cache_check(engine.cache.c()));
    CHECK(engine.cache.clear_cached().ok() && engine.cache.stats()->cached_bytes == 0);
    CHECK(engine.cache.close().ok());
    std::printf("resident after a tenth of the time %llu KiB, at the end %llu KiB\n",
                static_cast<unsigned long long>(warm), static_cast<unsigned long long>(last));
#ifndef __SANITIZE_ADDRESS__
    // A megabyte is the C library's business. (A sanitizer keeps back what was freed.)
    CHECK(last < warm + 1024);
#endif
    std::printf("ok\n");
}
