// Stream capture, and graphs launched again.
#include "driver_session.hpp"

TEST(driver_captures_a_graph_and_runs_it_again) {
    Session session;
    const CUdeviceptr a = session.words(4);
    const CUdeviceptr b = session.words(4);
    CUstream stream = session.stream();
    CUstream other = session.stream();
    uint32_t* pinned = session.pinned(4);
    CHECK_EQ(cuStreamEndCapture(stream, nullptr), emu::ILLEGAL_STATE);
    CHECK_EQ(cuStreamBeginCapture_v2(stream, 0), 0);
    CHECK_EQ(cuStreamBeginCapture_v2(stream, 0), emu::ILLEGAL_STATE);
    CHECK_EQ(cuMemcpyHtoDAsync_v2(a, pinned, 16, stream), 0);
    CHECK_EQ(session.launch(stream, a, b, 4, 10), 0);
    int capturing = 0;
    CHECK_EQ(cuStreamIsCapturing(stream, &capturing), 0);
    CHECK_EQ(capturing, 1);
    CUgraph graph = nullptr;
    CUgraphExec executable = nullptr;
    CHECK_EQ(cuStreamEndCapture(stream, &graph), 0);
    // Nothing was done yet.
    CHECK_EQ(kvpool_emu_counter("pending"), 0u);
    CHECK_EQ(session.read(b, 4)[0], 0xFFFFFFFFu);
    CHECK_EQ(cuGraphInstantiateWithFlags(&executable, graph, 0), 0);
    CHECK_EQ(cuGraphDestroy(graph), 0);
    for (uint32_t round = 0; round < 3; ++round) {
        // The same addresses, whatever they hold by now.
        for (uint32_t i = 0; i < 4; ++i) pinned[i] = 100 * round + i;
        CHECK_EQ(cuGraphLaunch(executable, round == 1 ? other : stream), 0);
        CHECK_EQ(cuStreamSynchronize(round == 1 ? other : stream), 0);
        for (uint32_t i = 0; i < 4; ++i) CHECK_EQ(session.read(b, 4)[i], 100 * round + i + 10);
    }
    CHECK_EQ(kvpool_emu_counter("graph_launches"), 3u);
    CHECK_EQ(cuGraphExecDestroy(executable), 0);
    CHECK_EQ(cuGraphLaunch(executable, stream), emu::INVALID_HANDLE);
}

TEST(driver_capture_allows_no_allocation_and_no_wait) {
    Session session;
    CUstream stream = session.stream();
    CUevent event = session.event();
    CHECK_EQ(cuEventRecord(event, stream), 0);
    CUdeviceptr address = 0;
    void* host = nullptr;
    for (int what = 0; what < 7; ++what) {
        CHECK_EQ(cuStreamBeginCapture_v2(stream, 0), 0);
        const CUresult code = what == 0   ? cuMemAlloc_v2(&address, 4)
                              : what == 1 ? cuMemHostAlloc(&host, 4, 0)
                              : what == 2 ? cuStreamSynchronize(stream)
                              : what == 3 ? cuCtxSynchronize()
                              : what == 4 ? cuEventSynchronize(event)
                              : what == 5 ? cuStreamWaitEvent(stream, event, 0)
                                          : 0;
        CHECK_EQ(code, what < 6 ? emu::CAPTURE_UNSUPPORTED : 0);
        CUgraph graph = nullptr;
        CHECK_EQ(cuStreamEndCapture(stream, &graph), what < 6 ? emu::CAPTURE_INVALIDATED : 0);
        CHECK_EQ(graph != nullptr, what == 6);
    }
}

TEST(driver_an_event_of_a_capture_cannot_be_asked) {
    Session session;
    CUstream stream = session.stream();
    CUevent event = session.event();
    CHECK_EQ(cuStreamBeginCapture_v2(stream, 0), 0);
    CHECK_EQ(cuEventRecord(event, stream), 0);
    CUgraph graph = nullptr;
    CHECK_EQ(cuStreamEndCapture(stream, &graph), 0);
    // Neither now nor ever, until it is recorded outside.
    CHECK_EQ(cuEventQuery(event), emu::CAPTURED_EVENT);
    CHECK_EQ(cuEventSynchronize(event), emu::CAPTURED_EVENT);
    CHECK_EQ(cuStreamWaitEvent(stream, event, 0), emu::NOT_SUPPORTED);
    CHECK_EQ(cuEventRecord(event, stream), 0);
    CHECK_EQ(cuEventSynchronize(event), 0);
    CHECK_EQ(cuEventQuery(event), 0);
}
