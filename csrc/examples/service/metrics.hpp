// Metrics as Prometheus reads them, from a thread of their own: the cache's statistics may be asked for by
// any thread, beside the scheduler's verbs.
#pragma once

#include "server.hpp"

namespace service {

class Metrics {
public:
    Metrics(Socket listener, const kvpool::Cache& cache, const Counters& counters)
        : listener_(std::move(listener)), cache_(cache), counters_(counters) {}

    void stop() { stopping_ = true; }

    void run() {
        while (!stopping_) {
            pollfd waiting = {listener_.fd(), POLLIN, 0};
            if (::poll(&waiting, 1, 50) <= 0) continue;
            const Socket client(::accept(listener_.fd(), nullptr, nullptr));
            if (client.fd() >= 0) answer(client);
        }
    }

private:
    // Whatever is asked for.
    void answer(const Socket& client) const {
        pollfd waiting = {client.fd(), POLLIN, 0};
        char request[2048];
        if (::poll(&waiting, 1, 1000) <= 0 || ::recv(client.fd(), request, sizeof(request), 0) <= 0) return;
        const std::string body = text();
        const std::string answer =
            "HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: " +
            std::to_string(body.size()) + "\r\n\r\n" + body;
        for (size_t sent = 0; sent < answer.size();) {
            const ssize_t n = ::send(client.fd(), answer.data() + sent, answer.size() - sent, MSG_NOSIGNAL);
            if (n <= 0) return;
            sent += static_cast<size_t>(n);
        }
    }

    std::string text() const {
        std::string out;
        const auto put = [&](const char* name, const char* type, uint64_t value) {
            out.append("# TYPE ").append(name).append(" ").append(type).append("\n");
            out.append(name).append(" ").append(std::to_string(value)).append("\n");
        };
        put("service_connections_total", "counter", counters_.connections);
        put("service_requests_total", "counter", counters_.requests);
        put("service_finished_total", "counter", counters_.finished);
        put("service_cancelled_total", "counter", counters_.cancelled);
        put("service_refused_total", "counter", counters_.refused);
        put("service_malformed_total", "counter", counters_.malformed);
        put("service_preempted_total", "counter", counters_.preempted);
        put("service_tokens_generated_total", "counter", counters_.tokens_generated);
        put("service_waiting", "gauge", counters_.waiting);
        put("service_running", "gauge", counters_.running);
        // Only what can be had is written: a poisoned cache has no statistics, and that shows.
        if (const auto stats = cache_.stats()) {
            put("kvpool_sequences", "gauge", stats->seqs);
            put("kvpool_used_bytes", "gauge", stats->used_bytes);
            put("kvpool_held_bytes", "gauge", stats->held_bytes);
            put("kvpool_promised_bytes", "gauge", stats->promised_bytes);
            put("kvpool_cached_bytes", "gauge", stats->cached_bytes);
            put("kvpool_steps_total", "counter", stats->steps_committed);
            put("kvpool_tokens_appended_total", "counter", stats->tokens_appended);
            put("kvpool_prefix_query_tokens_total", "counter", stats->prefix_query_tokens);
            put("kvpool_prefix_hit_tokens_total", "counter", stats->prefix_hit_tokens);
            put("kvpool_evictions_total", "counter", stats->evictions);
            put("kvpool_preemptions_total", "counter", stats->preemptions);
        }
        return out;
    }

    Socket listener_;
    const kvpool::Cache& cache_;
    const Counters& counters_;
    std::atomic<bool> stopping_{false};
};

}  // namespace service
