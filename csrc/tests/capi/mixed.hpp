// A program of two units, one with the compiler's exceptions and one without: what they share is the same.
#ifndef KVPOOL_TESTS_MIXED_HPP
#define KVPOOL_TESTS_MIXED_HPP

#include <kvpool.hpp>

// A callable that both units hand to the layer.
struct Counter {
    int calls = 0;
    void (*then)() = nullptr;
    void operator()(const kvpool::Event&) {
        ++calls;
        if (then != nullptr) then();
    }
};

// Polls through each unit's own poll_events and resync_events; how many events came.
int poll_without_exceptions(kvpool::Cache& cache);
int poll_with_exceptions(kvpool::Cache& cache);

#endif  // KVPOOL_TESTS_MIXED_HPP
