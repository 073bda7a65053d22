// The state of the emulated driver: one device, its memory, streams, events, modules, and what is
// counted.
//
// Work is put into queues and done as late as it may be: when somebody waits for it. With seed 0
// only what must be done is done; any other seed lets the streams go on in a random order. So a
// program that does not wait for what it needs gets old data. One lock guards all of it, kernels
// included.
#pragma once

#include <stdint.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda_abi.hpp"
#include "engine.hpp"

namespace kvpool::emu {

// What the environment says; see README.md.
struct Settings {
    uint64_t memory_bytes = DeviceMemory::DEFAULT_BYTES;
    uint64_t seed = 0;
    int devices = 1;
    int driver_version = 13000;
    int capability_major = 9;
    int capability_minor = 0;
    int multiprocessors = 8;
    // Device memory that a loaded module takes.
    uint64_t module_bytes = 0;

    static Settings from_environment();
    uint32_t max_dynamic_shared() const;
};

// The first `done` of a stream's operations are done.
struct Progress {
    uint64_t put = 0;
    uint64_t done = 0;
};

// A point in a stream's queue: reached when `index` operations are done.
struct Ticket {
    std::shared_ptr<Stream> stream;
    uint64_t index = 0;
};

enum class OperationKind : uint8_t {
    Launch,
    ToDevice,
    ToHost,
    OnDevice,
    Fill,
    Record,
    Wait,
    HostCall
};

struct Operation {
    OperationKind kind = OperationKind::Wait;
    // What must be done before, besides what is ahead in the queue.
    std::vector<Ticket> after;
    // Launch
    Launch launch;
    std::vector<unsigned char> params;
    // Copies and fills. `staged`: the bytes themselves, of pageable memory.
    uint64_t device_to = 0;
    uint64_t device_from = 0;
    char* host_to = nullptr;
    const char* host_from = nullptr;
    std::vector<char> staged;
    uint64_t bytes = 0;
    uint8_t fill = 0;
    // Record
    std::shared_ptr<Event> event;
    // HostCall
    CUhostFn host_call = nullptr;
    void* host_data = nullptr;
};

struct Graph {
    std::vector<Operation> operations;
    // Something was done meanwhile that a capture does not allow.
    bool invalid = false;
};

struct Stream {
    unsigned flags = 0;
    bool is_null = false;
    Progress progress;
    std::deque<Operation> queue;
    // Set while the stream's operations are captured instead of queued.
    std::unique_ptr<Graph> capture;
};

struct Event {
    unsigned flags = 0;
    bool recorded = false;
    // Last recorded in a stream that was captured: it can be neither asked nor waited for.
    bool captured = false;
    Ticket ticket;
    // When it was last reached, in milliseconds.
    double time_ms = 0.0;
};

struct Module {
    uint64_t memory = 0;  // its address, where modules take any
    std::vector<std::unique_ptr<Function>> functions;
};
struct Function {
    const KernelEntry* kernel = nullptr;
    uint32_t max_dynamic_shared = 48 << 10;
};
struct Context {};

// The `turn`-th call from now of entry point `call`, or the `turn`-th run of kernel `call`, gives
// `code`. `*` stands for every entry point but those that give something back.
struct PlannedFailure {
    std::string call;
    uint64_t turn = 0;
    CUresult code = 0;
};

// Calls of the driver.
struct Counters {
    uint64_t launches = 0;
    uint64_t allocations = 0;
    uint64_t host_allocations = 0;
    uint64_t frees = 0;
    uint64_t synchronisations = 0;
    uint64_t copies_to_device = 0;
    uint64_t copies_to_host = 0;
    uint64_t copies_on_device = 0;
    uint64_t fills = 0;
    uint64_t bytes_to_device = 0;
    uint64_t bytes_to_host = 0;
    uint64_t modules = 0;
    uint64_t events = 0;
    uint64_t streams = 0;
    uint64_t graph_launches = 0;
    // Planned failures that were given.
    uint64_t failures = 0;
};

class Driver {
public:
    // The one of the process; it reads the environment when it is first asked for.
    static Driver& get();

    std::recursive_mutex lock;
    Settings settings;
    bool initialised = false;
    // The error that ended the context; every later call gives it.
    CUresult sticky = SUCCESS;
    std::string last_fault;

    std::unique_ptr<DeviceMemory> memory;
    std::unique_ptr<Engine> engine;
    Context context;
    uint32_t context_users = 0;
    std::shared_ptr<Stream> null_stream;
    std::map<Stream*, std::shared_ptr<Stream>> streams;
    // Destroyed by the caller, with work still to do.
    std::vector<std::shared_ptr<Stream>> leaving_streams;
    std::map<Event*, std::shared_ptr<Event>> events;
    std::map<Module*, std::unique_ptr<Module>> modules;
    std::map<Graph*, std::unique_ptr<Graph>> graphs;
    // Sizes of live allocations, by address.
    std::map<uint64_t, uint64_t> allocations;
    std::map<void*, uint64_t> host_allocations;

    Counters counters;
    std::map<std::string, Traffic> traffic;
    std::vector<PlannedFailure> failures;
    // The call or kernel to which the last planned failure was given.
    std::string last_failure;
    // How often each entry point was called, whether it failed or not.
    std::map<std::string, uint64_t> calls;

    CUresult initialise();
    // The code planned for this call, or this run of a kernel, or SUCCESS.
    CUresult planned_failure(const char* call, bool is_kernel);
    // "call:n:code", several with commas; false when it is not that.
    bool plan_failures(const char* text);

    std::shared_ptr<Stream> stream_of(CUstream handle);
    Function* function_of(CUfunction handle);
    bool is_pinned(const void* p, uint64_t bytes) const;

    // Whether a stream is captured: then its capture is spoilt by what the caller is about to do.
    bool spoils_capture();
    // Puts an operation at the end of a stream's queue, after what the legacy default stream
    // demands.
    CUresult put(const std::shared_ptr<Stream>& stream, Operation operation);
    // Does what must be done until the ticket's point is reached.
    void finish(const Ticket& ticket);
    void finish_all();
    // Does one operation, if there is one that can be done; for those who ask again and again.
    void make_progress(const std::shared_ptr<Stream>& preferred);
    static bool reached(const Ticket& ticket) {
        return ticket.stream == nullptr || ticket.stream->progress.done >= ticket.index;
    }
    static Ticket end_of(const std::shared_ptr<Stream>& stream) {
        return Ticket{stream, stream->progress.put};
    }
    // Everything of the context is gone.
    void destroy_context();
    void reset_counters();
    void set_seed(uint64_t seed) {
        settings.seed = seed;
        random_ = seed;
        launch_number_ = 0;
    }

private:
    Driver();
    std::vector<std::shared_ptr<Stream>> all_streams();
    static bool can_run(const Stream& stream);
    void run_head(Stream& stream);
    void run(Operation& operation);
    void run_launch(Operation& operation);
    void run_copy(Operation& operation);
    void break_context(CUresult code, const std::string& text);
    uint64_t next_random();

    uint64_t random_ = 0;
    uint64_t launch_number_ = 0;
};

}  // namespace kvpool::emu
