// Hours of random traffic of many threads through the C++ layer, in a pool that is always full: what must
// stay the same stays the same. Every vector in the cache is a function of all tokens before it, of the
// tenant and of its place, and is read back again and again.
//
//     soak SECONDS [THREADS] [key=value...]     settings over those of CONFIG below
//
// Prints a line for each sixtieth of the time, and fails where content is wrong, an invariant does not hold,
// something is lost, or memory grows. Latencies are printed, and not judged.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <thread>

#include "worker.hpp"

namespace {

using namespace soak;

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

uint64_t resident_kib() {
    std::ifstream file("/proc/self/statm");
    uint64_t total = 0, resident = 0;
    file >> total >> resident;
    return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) / 1024;
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
        "begun %llu, refused %llu, steps %llu, cancelled %llu, forks %llu, rewinds %llu, pins %llu, "
        "owners that ended beside verbs %llu, saves %llu, "
        "hits %llu of %llu tokens, copies on write %llu, evictions %llu, tokens read back %llu\n",
        static_cast<unsigned long long>(stats.seqs_begun), static_cast<unsigned long long>(engine.refusals),
        static_cast<unsigned long long>(stats.steps_committed),
        static_cast<unsigned long long>(stats.steps_cancelled), static_cast<unsigned long long>(engine.forks),
        static_cast<unsigned long long>(engine.rewinds), static_cast<unsigned long long>(engine.pins),
        static_cast<unsigned long long>(engine.ends), static_cast<unsigned long long>(engine.saves),
        static_cast<unsigned long long>(stats.prefix_hit_tokens),
        static_cast<unsigned long long>(stats.prefix_query_tokens),
        static_cast<unsigned long long>(stats.cow_copies), static_cast<unsigned long long>(stats.evictions),
        static_cast<unsigned long long>(engine.tokens_checked));
    CHECK(engine.forks > 0 && engine.rewinds > 0 && engine.cancels > 0 && engine.refusals > 0 && engine.ends > 0);
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
