// One thread of the soak: its sequences, and what it does with them.
#pragma once

#include "../capi/check.h"
#include "engine.hpp"

namespace soak {

using kvpool::Status;

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
            // Without a turn, beside other threads' verbs and open steps: owners end.
            ended_.clear();
            ended_pins_.clear();
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
            // By its verb, or at the step's end.
            if (random_.one_in(2)) CHECK(step->cancel().ok());
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
        if (random_.one_in(2)) {
            CHECK(timed(engine_.others, [&] { return live.sequence.release(); }).ok());
        } else {
            ended_.push_back(std::move(live.sequence));
            ++engine_.ends;
        }
        std::swap(live, live_.back());
        live_.pop_back();
    }

    void pin(Live& live) {
        if (!pins_.empty()) {
            if (random_.one_in(2)) {
                CHECK(pins_.back().unpin().ok());
            } else {
                ended_pins_.push_back(std::move(pins_.back()));
            }
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
    // Owners that end when the turn is over.
    std::vector<kvpool::Sequence> ended_;
    std::vector<kvpool::Pin> ended_pins_;
    std::vector<uint32_t> prompt_, ids_;
    std::vector<kvpool::StepItem> items_;
    std::vector<Row> rows_;
    std::vector<float> k_, v_, q_, out_, read_;
};

}  // namespace soak
