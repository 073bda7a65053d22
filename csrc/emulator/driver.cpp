// The queues of the emulated driver: see driver.hpp.
#include "driver.hpp"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <algorithm>

namespace kvpool::emu {

namespace {

// As many operations as a real driver lets wait before a call waits itself.
constexpr size_t QUEUE_MAX = 1024;

double now_ms() {
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

// Entry points whose callers can do nothing about a failure. Names without "_v2".
bool gives_back(const std::string& call) {
    for (const char* name : {"cuCtxPopCurrent", "cuDevicePrimaryCtxRelease", "cuEventDestroy",
                             "cuMemFree", "cuMemFreeHost", "cuModuleUnload", "cuStreamDestroy"}) {
        if (call == name) return true;
    }
    return false;
}

uint64_t number_of(const char* name, uint64_t otherwise) {
    const char* text = getenv(name);
    return text != nullptr && *text != '\0' ? strtoull(text, nullptr, 10) : otherwise;
}

}  // namespace

Settings Settings::from_environment() {
    Settings settings;
    const char* memory = getenv("KVPOOL_EMU_DEVICE_MEMORY");
    if (memory != nullptr && *memory != '\0') {
        settings.memory_bytes = parse_bytes(memory);
        if (settings.memory_bytes == 0) {
            fprintf(stderr, "kvpool emulated driver: KVPOOL_EMU_DEVICE_MEMORY=%s is no size\n",
                    memory);
            abort();
        }
    }
    settings.module_bytes = number_of("KVPOOL_EMU_MODULE_BYTES", 0);
    settings.seed = number_of("KVPOOL_EMU_SEED", 0);
    settings.devices = static_cast<int>(std::min<uint64_t>(number_of("KVPOOL_EMU_DEVICES", 1), 1));
    settings.driver_version = static_cast<int>(number_of("KVPOOL_EMU_DRIVER_VERSION", 13000));
    settings.multiprocessors = static_cast<int>(number_of("KVPOOL_EMU_MULTIPROCESSORS", 8));
    const char* capability = getenv("KVPOOL_EMU_CAPABILITY");
    if (capability != nullptr &&
        sscanf(capability, "%d.%d", &settings.capability_major, &settings.capability_minor) != 2) {
        fprintf(stderr, "kvpool emulated driver: KVPOOL_EMU_CAPABILITY=%s, expected such as 8.0\n",
                capability);
        abort();
    }
    return settings;
}

// Dynamic shared memory of a block, at most, as the real devices of that capability have it.
uint32_t Settings::max_dynamic_shared() const {
    const int capability = 10 * capability_major + capability_minor;
    if (capability < 80) return 64 << 10;
    if (capability == 80 || capability == 87) return 163 << 10;
    if (capability < 90 || capability >= 120) return 99 << 10;
    return 227 << 10;
}

Driver& Driver::get() {
    // Never destroyed: calls may come while the process ends.
    static Driver* const driver = new Driver();
    return *driver;
}

Driver::Driver() : settings(Settings::from_environment()), random_(settings.seed) {
    const char* plan = getenv("KVPOOL_EMU_FAIL");
    if (plan != nullptr && *plan != '\0' && !plan_failures(plan)) {
        fprintf(stderr, "kvpool emulated driver: KVPOOL_EMU_FAIL=%s, expected call:n:code\n", plan);
        abort();
    }
}

CUresult Driver::initialise() {
    if (initialised) return SUCCESS;
    if (settings.devices == 0) return NO_DEVICE;
    memory = std::make_unique<DeviceMemory>(settings.memory_bytes);
    engine = std::make_unique<Engine>(*memory);
    null_stream = std::make_shared<Stream>();
    null_stream->is_null = true;
    initialised = true;
    return SUCCESS;
}

CUresult Driver::planned_failure(const char* call, bool is_kernel) {
    // "cuMemAlloc" means cuMemAlloc_v2 as well.
    std::string plain = call;
    if (plain.size() > 3 && plain.compare(plain.size() - 3, 3, "_v2") == 0)
        plain.resize(plain.size() - 3);
    const bool of_any = !is_kernel && !gives_back(plain);
    CUresult code = SUCCESS;
    for (PlannedFailure& failure : failures) {
        const bool meant =
            failure.call == call || failure.call == plain || (of_any && failure.call == "*");
        if (failure.turn == 0 || !meant) continue;
        failure.turn -= 1;
        if (failure.turn == 0 && code == SUCCESS) code = failure.code;
    }
    if (code != SUCCESS) {
        counters.failures += 1;
        last_failure = call;
    }
    return code;
}

bool Driver::plan_failures(const char* text) {
    std::string rest = text;
    std::vector<PlannedFailure> planned;
    while (!rest.empty()) {
        const size_t comma = rest.find(',');
        const std::string one = rest.substr(0, comma);
        rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
        char call[128];
        unsigned long long turn = 0;
        int code = 0;
        if (sscanf(one.c_str(), "%127[^:]:%llu:%d", call, &turn, &code) != 3 || turn == 0)
            return false;
        planned.push_back(PlannedFailure{call, turn, code});
    }
    failures.insert(failures.end(), planned.begin(), planned.end());
    return true;
}

std::shared_ptr<Stream> Driver::stream_of(CUstream handle) {
    // 0, CU_STREAM_LEGACY (1): the legacy default stream. CU_STREAM_PER_THREAD (2) is not offered.
    if (reinterpret_cast<uintptr_t>(handle) <= 1) return null_stream;
    auto found = streams.find(handle);
    return found == streams.end() ? nullptr : found->second;
}

Function* Driver::function_of(CUfunction handle) {
    for (auto& module : modules) {
        for (auto& function : module.second->functions) {
            if (function.get() == handle) return handle;
        }
    }
    return nullptr;
}

bool Driver::is_pinned(const void* p, uint64_t bytes) const {
    void* const host = const_cast<void*>(p);
    auto after = host_allocations.upper_bound(host);
    if (after == host_allocations.begin()) return false;
    --after;
    const uint64_t offset =
        static_cast<uint64_t>(static_cast<char*>(host) - static_cast<char*>(after->first));
    return offset < after->second && bytes <= after->second - offset;
}

std::vector<std::shared_ptr<Stream>> Driver::all_streams() {
    std::vector<std::shared_ptr<Stream>> all;
    all.push_back(null_stream);
    for (auto& stream : streams) all.push_back(stream.second);
    for (auto& stream : leaving_streams) all.push_back(stream);
    return all;
}

bool Driver::spoils_capture() {
    bool spoilt = false;
    for (auto& stream : streams) {
        if (stream.second->capture == nullptr) continue;
        stream.second->capture->invalid = true;
        spoilt = true;
    }
    return spoilt;
}

CUresult Driver::put(const std::shared_ptr<Stream>& stream, Operation operation) {
    if (stream->capture != nullptr) {
        stream->capture->operations.push_back(std::move(operation));
        return SUCCESS;
    }
    // The legacy default stream and the streams that block wait for each other.
    if (stream->is_null) {
        for (auto& other : streams) {
            if ((other.second->flags & STREAM_NON_BLOCKING) == 0)
                operation.after.push_back(end_of(other.second));
        }
    } else if ((stream->flags & STREAM_NON_BLOCKING) == 0) {
        operation.after.push_back(end_of(null_stream));
    }
    stream->queue.push_back(std::move(operation));
    stream->progress.put += 1;
    if (stream->queue.size() > QUEUE_MAX) finish(Ticket{stream, stream->progress.done + 1});
    return SUCCESS;
}

bool Driver::can_run(const Stream& stream) {
    if (stream.queue.empty()) return false;
    const std::vector<Ticket>& after = stream.queue.front().after;
    return std::all_of(after.begin(), after.end(),
                       [](const Ticket& ticket) { return reached(ticket); });
}

void Driver::run_head(Stream& stream) {
    Operation operation = std::move(stream.queue.front());
    stream.queue.pop_front();
    run(operation);
    stream.progress.done += 1;
}

void Driver::finish(const Ticket& ticket) {
    while (!reached(ticket)) {
        if (settings.seed == 0) {
            // Only what is needed, in order.
            if (!can_run(*ticket.stream)) {
                const std::vector<Ticket> after = ticket.stream->queue.front().after;
                for (const Ticket& needed : after) finish(needed);
            }
            run_head(*ticket.stream);
            continue;
        }
        std::vector<std::shared_ptr<Stream>> ready;
        for (auto& stream : all_streams()) {
            if (can_run(*stream)) ready.push_back(stream);
        }
        run_head(*ready[next_random() % ready.size()]);
    }
}

void Driver::finish_all() {
    for (auto& stream : all_streams()) finish(end_of(stream));
    leaving_streams.clear();
}

void Driver::make_progress(const std::shared_ptr<Stream>& preferred) {
    if (can_run(*preferred)) {
        run_head(*preferred);
        return;
    }
    for (auto& stream : all_streams()) {
        if (can_run(*stream)) {
            run_head(*stream);
            return;
        }
    }
}

void Driver::run(Operation& operation) {
    if (operation.kind == OperationKind::Record) {
        operation.event->time_ms = now_ms();
        return;
    }
    // After an error nothing is done any more, but everything ends.
    if (sticky != SUCCESS) return;
    switch (operation.kind) {
        case OperationKind::Launch:
            run_launch(operation);
            break;
        case OperationKind::HostCall:
            operation.host_call(operation.host_data);
            break;
        case OperationKind::Wait:
        case OperationKind::Record:
            break;
        default:
            run_copy(operation);
    }
}

void Driver::run_launch(Operation& operation) {
    Launch launch = operation.launch;
    launch.params = operation.params.data();
    launch_number_ += 1;
    launch.seed = settings.seed == 0 ? 0 : settings.seed * 0x9E3779B97F4A7C15ull + launch_number_;
    const CUresult planned = planned_failure(launch.kernel->name, true);
    if (planned != SUCCESS) {
        break_context(planned, text_of("%s: fails as planned", launch.kernel->name));
        return;
    }
    const Fault fault = engine->run(launch, traffic[launch.kernel->name]);
    if (fault) break_context(static_cast<CUresult>(fault.code), fault.text);
}

void Driver::run_copy(Operation& operation) {
    const uint64_t bytes = operation.bytes;
    char* to = operation.host_to;
    const char* from = operation.staged.empty() ? operation.host_from : operation.staged.data();
    if (operation.device_to != 0) to = memory->find(operation.device_to, bytes);
    if (operation.device_from != 0) from = memory->find(operation.device_from, bytes);
    const bool fill = operation.kind == OperationKind::Fill;
    if (to == nullptr || (from == nullptr && !fill)) {
        // It was allocated when the copy was asked for.
        const uint64_t address = to == nullptr ? operation.device_to : operation.device_from;
        break_context(ILLEGAL_ADDRESS, text_of("a copy of %llu bytes at 0x%llx, freed meanwhile: ",
                                               static_cast<unsigned long long>(bytes),
                                               static_cast<unsigned long long>(address)) +
                                           memory->nearest(address));
        return;
    }
    if (fill && operation.fill == 0) {
        memory->clear(operation.device_to, bytes);
    } else if (fill) {
        memset(to, operation.fill, bytes);
    } else {
        memmove(to, from, bytes);
    }
}

void Driver::break_context(CUresult code, const std::string& text) {
    sticky = code;
    last_fault = text;
    fprintf(stderr, "kvpool emulated driver: error %d: %s\n", code, text.c_str());
}

uint64_t Driver::next_random() {
    random_ = random_ * 6364136223846793005ull + 1442695040888963407ull;
    return random_ >> 33;
}

void Driver::destroy_context() {
    finish_all();
    for (auto& allocation : allocations) memory->free(allocation.first);
    for (auto& allocation : host_allocations) {
        memory->remove_host(allocation.first);
        ::free(allocation.first);
    }
    allocations.clear();
    host_allocations.clear();
    streams.clear();
    events.clear();
    modules.clear();
    graphs.clear();
    null_stream = std::make_shared<Stream>();
    null_stream->is_null = true;
    sticky = SUCCESS;
}

void Driver::reset_counters() {
    counters = Counters{};
    traffic.clear();
    calls.clear();
}

}  // namespace kvpool::emu
