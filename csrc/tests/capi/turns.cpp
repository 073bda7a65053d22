// A thread that reads beside one that calls verb after verb comes to its turn: it waits for the verb that is
// under way, and not for a gap between two that is long enough.
#include <kvpool.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"

int main() {
    const auto config = kvpool::Config::parse(CHECK_CONFIG, "check.toml",
                                              {"limits.max_batch_tokens=256", "limits.max_seq_len=256",
                                               "limits.max_step_tokens=256", "model.attention_window="
                                               , "model.sink_tokens=0", "cache.mode=paged", "cache.hybrid=",
                                               "limits.max_rewind_tokens=0", "model.num_q_heads=32"})
                            .value();
    auto cache = kvpool::Cache::open(kvpool::Plan::create(config).value()).value();
    std::vector<uint32_t> prompt(200, 7);
    auto sequence = cache.begin(prompt).value().sequence;
    auto step = cache.reserve({{sequence, 200}}).value();
    const std::vector<float> kv(200 * KV_HEADS * HEAD_DIM, 1.0f), q(200 * 32 * HEAD_DIM, 1.0f);
    std::vector<float> out(q.size());
    for (uint32_t layer = 0; layer < LAYERS; ++layer) step.append(layer, kv, kv).value();

    // Verbs of about a millisecond, one behind the other.
    std::atomic<uint64_t> verbs{0};
    std::atomic<bool> over{false};
    std::thread engine([&] {
        while (!over) {
            step.attend(0, q, out).value();
            ++verbs;
        }
    });
    while (verbs == 0) std::this_thread::yield();
    // As a thread that collects metrics: it asks, and sleeps. How many verbs ended while it waited.
    std::vector<uint64_t> waited;
    while (waited.size() < 25) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const uint64_t before = verbs;
        CHECK(cache.stats().ok());
        waited.push_back(verbs - before);
    }
    over = true;
    engine.join();
    std::sort(waited.begin(), waited.end());
    std::printf("a reader waited for %llu verbs, at most for %llu\n",
                static_cast<unsigned long long>(waited[waited.size() / 2]),
                static_cast<unsigned long long>(waited.back()));
    // For the one that is under way; for more only where this thread was not awake.
    CHECK(waited[22] <= 2);
    std::printf("ok\n");
}
