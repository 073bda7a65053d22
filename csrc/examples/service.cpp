// A small but whole serving loop over kvpool: clients on a local socket, continuous batching, an engine's own
// attention kernels on the cache's memory, metrics, and a clean end on SIGTERM or SIGINT.
//
//     c++ -std=c++17 -O2 -pthread service.cpp -lkvpool -o service
//     ./service CONFIG.toml [--port N] [--metrics-port N] [--threads N] [--max-waiting N] [--grace-ms N]
//               [--save FILE] [--verify] [--set KEY=VALUE]...
//
// Its parts are in service/: the protocol (server.hpp), who runs when (scheduler.hpp), what is computed
// (model.hpp, attention.hpp). --save restores the prefixes of a file when the service starts, if it is there,
// and saves them there when it ends: a service that starts again finds what it had. A file that it could not
// restore (another model's, a damaged one, none that it may read) it leaves as it is, and after an error of the
// scheduler nothing is saved. --verify compares every attention with kvpool's own. The exit status is 0 if
// nothing leaked and the cache's invariants hold at the end.
#include <cerrno>
#include <csignal>

#include "service/metrics.hpp"
#include "service/scheduler.hpp"

namespace {

struct Arguments {
    std::string config;
    std::vector<std::string_view> settings;
    uint16_t port = 0, metrics_port = 0;
    std::string save;
    service::Scheduler::Options scheduler;
};

[[noreturn]] void usage(const char* problem) {
    std::fprintf(stderr,
                 "service: %s\nusage: service CONFIG.toml [--port N] [--metrics-port N] [--threads N] "
                 "[--max-waiting N] [--grace-ms N] [--save FILE] [--verify] [--set KEY=VALUE]...\n",
                 problem);
    std::exit(2);
}

Arguments parse(int argc, char** argv) {
    Arguments arguments;
    for (int i = 1; i < argc; ++i) {
        const std::string_view option = argv[i];
        if (option.substr(0, 2) != "--") {
            arguments.config = option;
            continue;
        }
        if (option == "--verify") {
            arguments.scheduler.verify = true;
            continue;
        }
        if (++i == argc) usage("an option without its value");
        uint32_t number = 0;
        if (option == "--set") {
            arguments.settings.push_back(argv[i]);
        } else if (option == "--save") {
            arguments.save = argv[i];
        } else if (!service::Words(argv[i]).number(number)) {
            usage("a value that is no number");
        } else if (option == "--port") {
            arguments.port = static_cast<uint16_t>(number);
        } else if (option == "--metrics-port") {
            arguments.metrics_port = static_cast<uint16_t>(number);
        } else if (option == "--threads") {
            arguments.scheduler.threads = std::max(number, 1u);
        } else if (option == "--max-waiting") {
            arguments.scheduler.max_waiting = number;
        } else if (option == "--grace-ms") {
            arguments.scheduler.grace = std::chrono::milliseconds(number);
        } else {
            usage("an unknown option");
        }
    }
    if (arguments.config.empty()) usage("a configuration is needed");
    return arguments;
}

// What must hold when no request is left. Says what does not.
bool nothing_leaked(const kvpool::Cache& cache) {
    bool good = true;
    const auto complain = [&](const char* what, unsigned long long number) {
        std::fprintf(stderr, "service: leaked: %llu %s\n", number, what);
        good = false;
    };
    const kvpool::Stats stats = cache.stats().value();
    if (stats.seqs != 0) complain("sequences", stats.seqs);
    if (stats.held_bytes != 0) complain("bytes held", stats.held_bytes);
    if (stats.promised_bytes != 0) complain("bytes promised", stats.promised_bytes);
    if (const uint32_t places = cache.reservations().value()) complain("reservations", places);
    for (uint32_t group = 0; group < cache.plan_info()->num_groups; ++group) {
        const kvpool::GroupStats now = cache.group_stats(group).value();
        if (now.blocks_active != 0) complain("blocks held", now.blocks_active);
        if (now.blocks_promised != 0) complain("blocks promised", now.blocks_promised);
    }
    if (const auto checked = cache.check(); !checked) {
        std::fprintf(stderr, "service: %s\n", checked.error().message());
        good = false;
    }
    return good;
}

void summary(const service::Counters& counters, const service::Scheduler& scheduler, bool verified) {
    const auto number = [](const std::atomic<uint64_t>& counter) {
        return static_cast<unsigned long long>(counter.load());
    };
    std::printf("requests %llu: finished %llu, cancelled %llu, refused %llu; malformed lines %llu\n",
                number(counters.requests), number(counters.finished), number(counters.cancelled),
                number(counters.refused), number(counters.malformed));
    std::printf(
        "steps %llu, tokens generated %llu, prompt tokens %llu of which reused %llu, preempted %llu\n",
        number(counters.steps), number(counters.tokens_generated), number(counters.prompt_tokens),
        number(counters.reused_tokens), number(counters.preempted));
    if (verified) {
        std::printf("largest difference to kvpool's attention %.2g\n",
                    static_cast<double>(scheduler.largest_difference()));
    }
}

// The weights of the example's model: another model's prefixes are not for this one.
constexpr const char* MODEL = "kvpool example service, 1";

// Takes the prefixes of an earlier run. Without them the service starts all the same, only colder. Whether the
// file may be overwritten: what could not be restored is somebody's, and may be needed.
bool warm_up(kvpool::Cache& cache, const std::string& path) {
    if (std::FILE* file = std::fopen(path.c_str(), "rb")) {
        std::fclose(file);
    } else if (errno == ENOENT) {
        return true;
    }
    kvpool::RestoreOptions options;
    options.model = MODEL;
    const auto restored = cache.restore_prefixes(path.c_str(), options);
    if (!restored) {
        std::fprintf(stderr, "service: starting without %s, which stays as it is: %s\n", path.c_str(),
                     restored.error().message());
        return false;
    }
    const unsigned long long all = restored->file_tokens, dropped = restored->dropped_tokens;
    std::printf("restored %llu of %llu tokens\n", all - dropped, all);
    return true;
}

bool save(const kvpool::Cache& cache, const std::string& path) {
    kvpool::SaveOptions options;
    options.model = MODEL;
    const auto saved = cache.save_prefixes(path.c_str(), options);
    if (saved) {
        std::printf("saved %llu tokens\n", static_cast<unsigned long long>(saved->tokens));
    } else {
        std::fprintf(stderr, "service: %s: %s\n", path.c_str(), saved.error().message());
    }
    return saved.ok();
}

int serve(const Arguments& arguments) {
    // All threads that come after leave the signals to this one.
    sigset_t signals;
    sigemptyset(&signals);
    for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&signals, signal);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    const auto config = kvpool::Config::load(arguments.config, arguments.settings);
    if (!config) usage(config.error().message());
    const auto plan = kvpool::Plan::create(*config);
    if (!plan) usage(plan.error().message());
    auto opened = kvpool::Cache::open(*plan);
    if (!opened) usage(opened.error().message());
    kvpool::Cache cache = std::move(opened).value();
    if (plan->info()->format() == kvpool::Format::int8) usage("the kernels here know no int8");

    const bool may_save = !arguments.save.empty() && warm_up(cache, arguments.save);

    service::Channel<service::Command> commands;
    const service::Bell bell;
    service::Channel<service::Reply> replies(bell);
    service::Counters counters;
    service::Scheduler scheduler(cache, arguments.scheduler, commands, replies, counters);
    auto clients = service::Socket::listen(arguments.port);
    auto scrapes = service::Socket::listen(arguments.metrics_port);
    std::printf("serving on 127.0.0.1:%u, metrics on http://127.0.0.1:%u/metrics\n", clients.port(),
                scrapes.port());
    std::fflush(stdout);
    service::Server server(std::move(clients), bell, commands, replies, counters);
    service::Metrics metrics(std::move(scrapes), cache, counters);

    const pthread_t self = pthread_self();
    kvpool::Result<void> ran;
    std::thread scheduling([&] {
        ran = scheduler.run();
        // It ended by itself: something is wrong.
        if (!ran) pthread_kill(self, SIGUSR1);
    });
    std::thread serving([&] { server.run(); });
    std::thread measuring([&] { metrics.run(); });
    int signal = 0;
    sigwait(&signals, &signal);
    server.stop_listening();
    scheduler.stop();
    scheduling.join();
    server.stop();
    serving.join();
    metrics.stop();
    measuring.join();

    summary(counters, scheduler, arguments.scheduler.verify);
    if (!ran) std::fprintf(stderr, "service: %s\n", ran.error().message());
    const bool saved = !may_save || !ran || save(cache, arguments.save);
    const bool clean = nothing_leaked(cache) && ran && saved && cache.close();
    std::printf("%s\n", clean ? "nothing leaked" : "NOT CLEAN");
    return clean ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return serve(parse(argc, argv));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "service: %s\n", error.what());
        return 1;
    }
}
