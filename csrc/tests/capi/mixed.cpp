#include "mixed.hpp"

#include "check.h"

int poll_with_exceptions(kvpool::Cache& cache) {
    Counter counter;
    const auto polled = cache.resync_events(counter);
    CHECK(polled.ok() && *polled == static_cast<uint64_t>(counter.calls));
    return counter.calls;
}

int main() {
    const auto config = kvpool::Config::parse(CHECK_CONFIG, "check.toml").value();
    auto cache = kvpool::Cache::open(kvpool::Plan::create(config).value()).value();
    const uint32_t prompt[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    auto sequence = cache.begin(prompt).value().sequence;
    check_step(cache.c(), sequence.c(), prompt, 8);
    const int events = poll_with_exceptions(cache);
    CHECK(events > 0 && poll_without_exceptions(cache) == events);
    // What is thrown comes out of the unit that can throw.
    struct Thrown {};
    Counter counter;
    counter.then = [] { throw Thrown(); };
    bool caught = false;
    try {
        (void)cache.resync_events(counter);
    } catch (const Thrown&) {
        caught = true;
    }
    CHECK(caught);
    std::printf("ok\n");
}
