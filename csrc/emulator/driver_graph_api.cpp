// Stream capture: what is put into a stream while it is captured becomes a graph, which can be
// launched again and again with the same parameters, addresses and host buffers.
//
// Of one stream; what several streams do with events among them is refused.
#include <memory>

#include "driver_call.hpp"

using namespace kvpool::emu;

KV_API CUresult cuStreamBeginCapture_v2(CUstream handle, int /*mode*/) {
    KV_ENTER("cuStreamBeginCapture_v2", Needs::Context);
    auto stream = driver.stream_of(handle);
    if (stream == nullptr) return INVALID_HANDLE;
    if (stream->is_null) return CAPTURE_UNSUPPORTED;
    if (stream->capture != nullptr) return ILLEGAL_STATE;
    stream->capture = std::make_unique<Graph>();
    return SUCCESS;
}

// status: 0 no, 1 it is captured
KV_API CUresult cuStreamIsCapturing(CUstream handle, int* status) {
    KV_ENTER("cuStreamIsCapturing", Needs::Context);
    auto stream = driver.stream_of(handle);
    if (stream == nullptr) return INVALID_HANDLE;
    if (status == nullptr) return INVALID_VALUE;
    *status = stream->capture != nullptr ? 1 : 0;
    return SUCCESS;
}

KV_API CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
    KV_ENTER("cuStreamEndCapture", Needs::Context);
    auto stream = driver.stream_of(handle);
    if (stream == nullptr) return INVALID_HANDLE;
    if (stream->capture == nullptr) return ILLEGAL_STATE;
    auto captured = std::move(stream->capture);
    if (captured->invalid) {
        if (graph != nullptr) *graph = nullptr;
        return CAPTURE_INVALIDATED;
    }
    if (graph == nullptr) return INVALID_VALUE;
    *graph = captured.get();
    driver.graphs[captured.get()] = std::move(captured);
    return SUCCESS;
}

KV_API CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph,
                                            unsigned long long /*flags*/) {
    KV_ENTER("cuGraphInstantiateWithFlags", Needs::Context);
    auto found = driver.graphs.find(graph);
    if (executable == nullptr || found == driver.graphs.end()) return INVALID_VALUE;
    auto copy = std::make_unique<Graph>(*found->second);
    *executable = copy.get();
    driver.graphs[copy.get()] = std::move(copy);
    return SUCCESS;
}

KV_API CUresult cuGraphLaunch(CUgraphExec executable, CUstream handle) {
    KV_ENTER("cuGraphLaunch", Needs::Context);
    auto found = driver.graphs.find(executable);
    auto stream = driver.stream_of(handle);
    if (found == driver.graphs.end() || stream == nullptr) return INVALID_HANDLE;
    driver.counters.graph_launches += 1;
    for (const Operation& operation : found->second->operations) {
        const CUresult put = driver.put(stream, operation);
        if (put != SUCCESS) return put;
    }
    return SUCCESS;
}

KV_API CUresult cuGraphDestroy(CUgraph graph) {
    KV_ENTER("cuGraphDestroy", Needs::Context);
    return driver.graphs.erase(graph) != 0 ? SUCCESS : INVALID_VALUE;
}

KV_API CUresult cuGraphExecDestroy(CUgraphExec executable) {
    KV_ENTER("cuGraphExecDestroy", Needs::Context);
    return driver.graphs.erase(executable) != 0 ? SUCCESS : INVALID_VALUE;
}
