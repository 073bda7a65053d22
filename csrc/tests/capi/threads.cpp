// Edge case 59: threads on one cache. What kvpool.h allows works, and what it does not allow gives a status.
//
//     threads [STEPS]     how many steps the writer makes beside the others
#include <kvpool.hpp>

#if defined(__linux__)
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "check.h"

namespace {

using kvpool::Status;

std::vector<uint32_t> prompt(uint32_t from, uint32_t n) {
    std::vector<uint32_t> tokens(n);
    for (uint32_t i = 0; i < n; ++i) tokens[i] = from + i;
    return tokens;
}

kvpool::Cache open(std::initializer_list<std::string_view> overrides = {}) {
    const auto config = kvpool::Config::parse(CHECK_CONFIG, "check.toml", overrides).value();
    return kvpool::Cache::open(kvpool::Plan::create(config).value()).value();
}

// Opened by one thread, waited for by others.
class Gate {
public:
    void open() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            open_ = true;
        }
        opened_.notify_all();
    }
    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        opened_.wait(lock, [this] { return open_; });
    }

private:
    std::mutex mutex_;
    std::condition_variable opened_;
    bool open_ = false;
};

// A verb that is certainly under way, because its callback waits: verbs of others are refused at once, what
// any thread may call goes through, and readers come after it.
void while_a_verb_is_under_way() {
    auto cache = open();
    auto sequence = cache.begin(prompt(1, 9)).value().sequence;
    check_step(cache.c(), sequence.c(), prompt(1, 8).data(), 8);
    Gate inside, leave;
    std::atomic<bool> left{false};
    std::thread verb([&] {
        bool first = true;
        const auto polled = cache.poll_events([&](const kvpool::Event&) {
            if (!first) return;
            first = false;
            // Its own verbs and readers are refused: they would wait for themselves.
            CHECK(cache.clear_cached().status() == Status::busy);
            CHECK(cache.stats().status() == Status::busy);
            CHECK(cache.plan_info().ok());
            inside.open();
            leave.wait();
            left = true;
        });
        CHECK(polled.ok() && !first);
    });
    inside.wait();
    CHECK(cache.begin(prompt(1, 3)).status() == Status::busy);
    CHECK(cache.reserve({{sequence, 1}}).status() == Status::busy);
    CHECK(sequence.release().status() == Status::busy && sequence);
    CHECK(sequence.fork().status() == Status::busy && sequence.truncate(1).status() == Status::busy);
    CHECK(cache.reset().status() == Status::busy && cache.set_epoch(3).status() == Status::busy);
    CHECK(cache.set_time_ms(3).status() == Status::busy && cache.synchronize().status() == Status::busy);
    CHECK(cache.poll_events([](const kvpool::Event&) {}).status() == Status::busy);
    CHECK(cache.close().status() == Status::busy && cache);
    CHECK(cache.plan_info().ok() && cache.layer(0).ok() && cache.group(0).ok() && cache.device().ok());
    CHECK(cache.pool().ok() && cache.text().ok());
    std::thread reader([&] {
        // Waits for the verb.
        CHECK(cache.stats()->seqs == 1 && left);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    leave.open();
    verb.join();
    reader.join();
    CHECK(sequence.release().ok() && cache.close().ok());
}

// A probe needs no waiting where nothing is contiguous.
void probes_do_not_wait() {
    auto cache = open({"cache.mode=paged", "cache.hybrid=", "model.attention_window=", "model.sink_tokens=0",
                       "limits.max_rewind_tokens=0"});
    {
        auto sequence = cache.begin(prompt(1, 9)).value().sequence;
        check_step(cache.c(), sequence.c(), prompt(1, 8).data(), 8);
    }
    Gate inside, leave;
    std::thread verb([&] {
        const auto polled = cache.poll_events([&](const kvpool::Event&) {
            inside.open();
            leave.wait();
        });
        CHECK(polled.ok());
    });
    inside.wait();
    CHECK(cache.probe(prompt(1, 9))->full_blocks == 1);
    leave.open();
    verb.join();
}

// After a call that was refused because another was under way. Who asks again at once may, where threads run
// in turns (one processor, valgrind), be the only one that runs, and be refused for ever.
void let_others_run() {
    static thread_local uint32_t calls = 0;
    if (++calls % 16 != 0) {
        std::this_thread::yield();
    } else {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
}

// Readers and probers beside a writer, and another that would write too.
void a_crowd(long steps) {
    auto cache = open();
    std::atomic<bool> over{false};
    std::atomic<uint64_t> reads{0}, refused{0}, joined{0};
    const auto reader = [&] {
        uint64_t committed = 0;
        while (!over) {
            const auto stats = cache.stats().value();
            // Counters only grow, whoever looks.
            CHECK(stats.steps_committed >= committed && stats.seqs <= 4);
            committed = stats.steps_committed;
            CHECK(cache.check().ok() && cache.digest().ok() && cache.evictions().ok());
            CHECK(cache.group_stats(1).ok() && cache.check_admission(prompt(1, 5)).status() != Status::busy);
            CHECK(cache.probe(prompt(1, 20)).ok() && cache.layer(1).ok());
            ++reads;
            let_others_run();
        }
    };
    std::thread readers[2] = {std::thread(reader), std::thread(reader)};
    std::thread intruder([&] {
        while (!over) {
            auto begun = cache.begin(prompt(7, 4));
            if (!begun) {
                CHECK(begun.status() == Status::busy || begun.status() == Status::step_open);
                // The message is this thread's own.
                CHECK(kvpool::Error::last().status() == begun.status());
                ++refused;
                let_others_run();
                continue;
            }
            ++joined;
            for (;;) {
                const auto released = begun->sequence.release();
                if (released) break;
                CHECK(released.status() == Status::busy || released.status() == Status::step_open);
                let_others_run();
            }
        }
    });
    const auto retried = [](auto verb) {
        for (;;) {
            auto result = verb();
            if (result || result.status() != Status::busy) return result;
            let_others_run();
        }
    };
    long i = 0;
    // At least so many, and until the others have met it, if they do.
    for (; i < steps || ((reads < 10 || refused == 0) && i < 20 * steps); ++i) {
        auto begun = retried([&] { return cache.begin(prompt(static_cast<uint32_t>(i % 5), 8)); }).value();
        const uint32_t n = 8 - begun.cached_len;
        auto step = retried([&] {
                        return cache.reserve({{begun.sequence, n}},
                                             prompt(static_cast<uint32_t>(i % 5) + begun.cached_len, n));
                    }).value();
        std::vector<float> kv(n * KV_HEADS * HEAD_DIM, 1.0f);
        for (uint32_t layer = 0; layer < LAYERS; ++layer) {
            retried([&] { return step.append(layer, kv, kv); }).value();
        }
        retried([&] { return step.commit(); }).value();
        retried([&] { return begun.sequence.release(); }).value();
    }
    over = true;
    intruder.join();
    for (std::thread& thread : readers) thread.join();
    std::printf("%ld steps beside %llu rounds of readers, %llu calls refused, %llu let in\n", i,
                static_cast<unsigned long long>(reads.load()),
                static_cast<unsigned long long>(refused.load()),
                static_cast<unsigned long long>(joined.load()));
    CHECK(cache.stats()->steps_committed == static_cast<uint64_t>(i));
    check_empty(cache.c());
}

// Two callbacks that would each wait for the other's cache are told so.
void callbacks_wait_for_nobody() {
    kvpool::Cache caches[2] = {open(), open()};
    kvpool::Sequence sequences[2];
    for (int i = 0; i < 2; ++i) {
        sequences[i] = caches[i].begin(prompt(1, 9)).value().sequence;
        check_step(caches[i].c(), sequences[i].c(), prompt(1, 8).data(), 8);
    }
    Gate inside[2];
    const auto poll = [&](int own) {
        const auto polled = caches[own].poll_events([&](const kvpool::Event&) {
            inside[own].open();
            inside[1 - own].wait();
            CHECK(caches[1 - own].stats().status() == Status::busy);
            CHECK(caches[1 - own].plan_info().ok());
        });
        CHECK(polled.ok() && polled->delivered > 0);
    };
    std::thread first(poll, 0), second(poll, 1);
    first.join();
    second.join();
}

#if defined(__linux__) && !defined(__SANITIZE_THREAD__)
// A child that ends with a cache open says nothing, and waits for nobody: not for a reader either, who was
// in the cache when it was forked.
void a_forked_child_ends() {
    static kvpool::Cache cache = open({"device.threads=3"});
    auto sequence = cache.begin(prompt(1, 9)).value().sequence;
    std::atomic<bool> over{false};
    std::thread reader([&] {
        while (!over) CHECK(cache.stats().ok() && cache.check().ok());
    });
    // And one whose owners end while they cannot give back what they hold.
    std::thread owner([&] {
        kvpool::Cache own = open({"device.threads=1"});
        while (!over) {
            auto held = own.begin(prompt(1, 9)).value().sequence;
            auto step = own.reserve({{held, 1}}).value();
            const kvpool::SeqId id = held.detach();
            for (int i = 0; i < 60; ++i) kvpool::Sequence(own.c(), id);
        }
        CHECK(own.close().ok());
    });
    for (int round = 0; round < 20; ++round) {
        int pipe_of[2];
        CHECK(pipe(pipe_of) == 0);
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(30);
            CHECK(kvpool_cache_release(cache.c(), sequence.c()) == KVPOOL_STALE_HANDLE);
            CHECK(cache.stats().status() == Status::stale_handle);
            sequence = kvpool::Sequence();
            CHECK(cache.close().ok() && write(pipe_of[1], "k", 1) == 1);
            // What it has of its parent's threads is lost, and nobody is to look for it.
            kill(getpid(), SIGKILL);
        }
        char said = 0;
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        CHECK(read(pipe_of[0], &said, 1) == 1 && said == 'k');
        close(pipe_of[0]);
        close(pipe_of[1]);
    }
    over = true;
    reader.join();
    owner.join();
    CHECK(sequence.release().ok() && cache.stats().ok() && cache.close().ok());
}
#else
void a_forked_child_ends() {}
#endif

// Caches of different threads have nothing to do with each other, and a cache may move to another thread.
void each_its_own() {
    uint64_t digests[4] = {};
    std::vector<std::thread> threads;
    for (uint64_t& digest : digests) {
        threads.emplace_back([&digest] {
            for (int round = 0; round < 20; ++round) {
                auto cache = open();
                auto sequence = cache.begin(prompt(1, 9)).value().sequence;
                std::thread other([&] { check_step(cache.c(), sequence.c(), prompt(1, 8).data(), 8); });
                other.join();
                digest = cache.digest().value();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const uint64_t digest : digests) CHECK(digest == digests[0]);
}

// Owners that end on any thread, at any time, make no verb busy, and all that they held goes.
void ends_are_in_nobodys_way(long steps) {
    auto cache = open();
    std::atomic<bool> over{false};
    std::mutex lock;
    std::vector<kvpool::Sequence> dropped;
    std::vector<std::thread> others;
    for (int i = 0; i < 3; ++i) {
        others.emplace_back([&] {
            while (!over) {
                std::vector<kvpool::Sequence> own;
                {
                    const std::lock_guard<std::mutex> guard(lock);
                    own.swap(dropped);
                }
                // Ends here, and again and again what has ended: a handle of nothing.
                for (const kvpool::Sequence& one : own) kvpool::Sequence(cache.c(), one.id());
                own.clear();
                let_others_run();
            }
        });
    }
    for (long i = 0; i < steps; ++i) {
        // Of four places, those that were let go may not have come back yet.
        auto begun = cache.begin(prompt(1, 9));
        while (!begun) {
            CHECK(begun.status() == Status::no_seq_slot || begun.status() == Status::not_admitted);
            let_others_run();
            begun = cache.begin(prompt(1, 9));
        }
        auto let_go = cache.begin(prompt(2, 9));
        if (let_go) {
            const std::lock_guard<std::mutex> guard(lock);
            dropped.push_back(std::move(let_go->sequence));
        } else {
            CHECK(let_go.status() == Status::no_seq_slot || let_go.status() == Status::not_admitted);
        }
        auto step = cache.reserve({{begun->sequence, 1}}).value();
        step.mark_all_appended().value();
        if (i % 3 == 0) {
            CHECK(step.commit().ok());
        }
        if (i % 3 == 1) {
            CHECK(step.cancel().ok());
        }
        CHECK(cache.check().ok());
    }
    over = true;
    for (std::thread& other : others) other.join();
    dropped.clear();
    CHECK(cache.stats()->seqs == 0 && cache.check().ok() && cache.close().ok());
}

// Two threads close the same cache: one does, the other is told.
void closed_twice() {
    for (int round = 0; round < 50; ++round) {
        const kvpool_cache_t cache = open().detach();
        std::atomic<int> closed{0};
        const auto close = [&] {
            const kvpool_status_t status = kvpool_cache_close(cache);
            CHECK(status == KVPOOL_OK || status == KVPOOL_STALE_HANDLE || status == KVPOOL_BUSY);
            closed += status == KVPOOL_OK ? 1 : 0;
        };
        std::thread a(close), b(close);
        a.join();
        b.join();
        CHECK(closed == 1);
    }
}

}  // namespace

int main(int argc, char** argv) {
    while_a_verb_is_under_way();
    probes_do_not_wait();
    a_crowd(argc > 1 ? std::atol(argv[1]) : 2000);
    callbacks_wait_for_nobody();
    a_forked_child_ends();
    each_its_own();
    ends_are_in_nobodys_way(argc > 1 ? std::atol(argv[1]) : 2000);
    closed_twice();
    std::printf("ok\n");
}
