// A thread that reads beside one that calls verb after verb comes to its turn: it waits for the verb that is
// under way, and not for a gap between two that is long enough.
#include <kvpool.hpp>

#include <atomic>
#include <thread>

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
    const uint64_t begun = verbs;
    uint64_t reads = 0;
    for (; verbs < begun + 300; ++reads) CHECK(cache.stats().ok());
    over = true;
    engine.join();
    std::printf("%llu reads beside %llu verbs\n", static_cast<unsigned long long>(reads),
                static_cast<unsigned long long>(verbs - begun));
    // One behind every verb, but for those in which this thread was not awake to ask.
    CHECK(reads >= 30);
    std::printf("ok\n");
}
