// Continuous batching: one thread that owns the cache's verbs.
//
// A request waits, runs, and is finished, cancelled or refused. In each round the scheduler hears what the
// clients want, admits from the head of the queue what the cache takes, and computes one step: a token of
// every sequence that decodes, and a chunk of every prompt that is not in yet. When a step finds no blocks
// (admission "max-utilization"), the youngest sequence is preempted and waits at the head of the queue; what
// it had said already belongs to its prompt from then on, and much of it is found cached.
#pragma once

#include <kvpool.hpp>

#include <algorithm>
#include <deque>
#include <memory>
#include <string>

#include "channel.hpp"
#include "model.hpp"

namespace service {

class Scheduler {
public:
    struct Options {
        size_t max_waiting = 1024;
        unsigned threads = 1;
        bool verify = false;
        // How long running requests may go on after stop().
        std::chrono::milliseconds grace{5000};
    };

    Scheduler(kvpool::Cache& cache, const Options& options, Channel<Command>& commands,
              Channel<Reply>& replies, Counters& counters)
        : cache_(cache),
          options_(options),
          commands_(commands),
          replies_(replies),
          counters_(counters),
          info_(cache.plan_info().value()),
          model_(cache, options.threads, options.verify) {}

    // From any thread: what waits is refused, what runs may finish.
    void stop() { stopping_ = true; }

    // The thread. Returns when all is over; an error is one that no request is to blame for.
    kvpool::Result<void> run() {
        while (true) {
            hear();
            if (stopping_) {
                if (ends_at_ == Clock::time_point()) ends_at_ = Clock::now() + options_.grace;
                if (Clock::now() >= ends_at_) give_up();
                refuse_waiting();
                if (running_.empty()) return {};
            }
            admit();
            counters_.waiting = waiting_.size();
            counters_.running = running_.size();
            if (running_.empty()) {
                commands_.wait(std::chrono::milliseconds(50));
                continue;
            }
            if (auto stepped = step(); !stepped) return stepped;
        }
    }

    float largest_difference() const { return model_.largest_difference(); }

private:
    using Clock = std::chrono::steady_clock;

    struct Request {
        uint64_t connection, id;
        uint64_t key;  // by which the cache knows it
        uint32_t max_tokens;
        std::vector<uint32_t> tokens;  // the prompt, and all that was generated
        uint32_t prompt_len;
        uint32_t committed = 0;  // of `tokens`, in the cache
        uint32_t now = 0;        // of `tokens`, in this step
        bool counted = false;    // that it began; again after a preemption is not counted
        kvpool::Sequence sequence = {};

        uint32_t generated() const { return static_cast<uint32_t>(tokens.size()) - prompt_len; }
        bool is(uint64_t its_connection, uint64_t its_id) const {
            return connection == its_connection && id == its_id;
        }
    };
    using Requests = std::deque<std::unique_ptr<Request>>;

    // ------------------------------------------------------------ Clients

    void hear() {
        heard_.clear();
        commands_.take(heard_);
        for (Command& command : heard_) {
            switch (command.kind) {
                case Command::generate:
                    enqueue(command);
                    break;
                case Command::cancel:
                    end_where([&](const Request& r) { return r.is(command.connection, command.id); });
                    break;
                case Command::closed:
                    end_where([&](const Request& r) { return r.connection == command.connection; });
                    break;
            }
        }
    }

    void enqueue(Command& command) {
        ++counters_.requests;
        auto request = std::make_unique<Request>();
        request->connection = command.connection;
        request->id = command.id;
        request->key = ++last_key_;
        request->max_tokens = command.max_tokens;
        request->prompt_len = static_cast<uint32_t>(command.prompt.size());
        request->tokens = std::move(command.prompt);
        if (stopping_) return refuse(*request, "SHUTTING_DOWN", "the service is ending");
        if (waiting_.size() >= options_.max_waiting) {
            return refuse(*request, "QUEUE_FULL", "too many requests wait: try again later");
        }
        waiting_.push_back(std::move(request));
    }

    // Ends the requests that a client does not want any more. It is between steps: sequences can go.
    template <class F>
    void end_where(F wanted) {
        for (Requests* requests : {&waiting_, &running_}) {
            for (auto& request : *requests) {
                if (!wanted(*request)) continue;
                end(*request, "cancelled");
                ++counters_.cancelled;
                request.reset();
            }
            drop_ended(*requests);
        }
    }
    static void drop_ended(Requests& requests) {
        requests.erase(std::remove(requests.begin(), requests.end(), nullptr), requests.end());
    }

    void give_back(Request& request) {
        if (!request.sequence) return;
        request.sequence.release().value();
        // There is room again.
        hold_back_ = false;
    }
    // Gives the sequence back and tells the client `word`.
    void end(Request& request, const std::string& word) {
        give_back(request);
        reply(request, true,
              word + " " + std::to_string(request.id) + " " + std::to_string(request.generated()));
    }
    void refuse(Request& request, const char* status, const char* why) {
        give_back(request);
        ++counters_.refused;
        reply(request, true, "refused " + std::to_string(request.id) + " " + status + " " + why);
    }
    void refuse(Request& request, const kvpool::Error& error) {
        refuse(request, kvpool::name(error.status()), error.message());
    }
    void reply(const Request& request, bool last, std::string line) {
        for (char& c : line) c = c == '\n' ? ' ' : c;
        replies_.put(Reply{request.connection, request.id, last, std::move(line)});
    }

    void refuse_waiting() {
        for (auto& request : waiting_) refuse(*request, "SHUTTING_DOWN", "the service is ending");
        waiting_.clear();
    }
    // The grace is over.
    void give_up() {
        for (auto& request : running_) refuse(*request, "SHUTTING_DOWN", "the service is ending");
        running_.clear();
    }

    // ------------------------------------------------------------ Admission

    void admit() {
        while (!waiting_.empty() && !hold_back_) {
            Request& request = *waiting_.front();
            kvpool::BeginOptions options;
            options.key = request.key;
            options.max_len = request.prompt_len + request.max_tokens;
            auto begun = cache_.begin(request.tokens, options);
            if (begun) {
                request.sequence = std::move(begun->sequence);
                request.committed = begun->cached_len;
                if (!request.counted) {
                    request.counted = true;
                    counters_.prompt_tokens += request.prompt_len;
                    counters_.reused_tokens += begun->cached_len;
                }
                running_.push_back(std::move(waiting_.front()));
                waiting_.pop_front();
                continue;
            }
            switch (begun.status()) {
                case kvpool::Status::no_seq_slot:
                case kvpool::Status::not_admitted:
                case kvpool::Status::batch_under_way:
                    // The others come before it to an end, and then it is its turn.
                    if (!running_.empty()) return;
                    [[fallthrough]];
                default:
                    refuse(request, begun.error());
                    waiting_.pop_front();
            }
        }
    }

    // ------------------------------------------------------------ Steps

    kvpool::Result<void> step() {
        auto reserved = reserve();
        if (!reserved) return reserved.error();
        if (running_.empty()) return {};
        kvpool::Step step = std::move(reserved).value();
        last_rows_.clear();
        uint32_t row = 0;
        for (const auto& request : running_) {
            row += request->now;
            if (request->now > 0 && speaks(*request)) last_rows_.push_back(row - 1);
        }
        if (auto computed = model_.step(step, tokens_, last_rows_, next_); !computed) return computed;
        if (auto committed = step.commit(); !committed) return committed;
        ++counters_.steps;
        size_t spoken = 0;
        for (auto& request : running_) {
            const bool spoke = request->now > 0 && speaks(*request);
            request->committed += request->now;
            if (spoke && hear_token(*request, next_[spoken++])) request.reset();
        }
        drop_ended(running_);
        return {};
    }

    // Whether a step with `now` tokens reaches the end of what is known, so that the next one is said.
    static bool speaks(const Request& request) {
        return request.committed + request.now == request.tokens.size();
    }

    // Whether that was the last one.
    bool hear_token(Request& request, uint32_t token) {
        request.tokens.push_back(token);
        ++counters_.tokens_generated;
        reply(request, false, "token " + std::to_string(request.id) + " " + std::to_string(token));
        if (request.generated() < request.max_tokens) return false;
        end(request, "done");
        ++counters_.finished;
        return true;
    }

    // Opens a step with as many sequences as the cache can feed. An empty one if none is left running.
    kvpool::Result<kvpool::Step> reserve() {
        while (!running_.empty()) {
            choose();
            auto step = cache_.reserve(items_, tokens_);
            if (step || step.status() != kvpool::Status::pool_exhausted) return step;
            const auto preempted = cache_.preempt_youngest();
            if (preempted) {
                to_the_queue(*preempted);
            } else if (preempted.status() == kvpool::Status::nobody) {
                // It is alone and does not fit: more blocks will never come.
                refuse(*running_.front(), step.error());
                running_.clear();
            } else {
                return preempted.error();
            }
        }
        return kvpool::Step();
    }

    // A token of each sequence that decodes, first; then chunks of prompts while the step has room.
    void choose() {
        uint32_t room = info_.max_batch_tokens;
        for (const bool decodes : {true, false}) {
            for (auto& request : running_) {
                const uint32_t left = static_cast<uint32_t>(request->tokens.size()) - request->committed;
                if ((left == 1) != decodes) continue;
                request->now = std::min({left, info_.max_step_tokens, room});
                room -= request->now;
            }
        }
        items_.clear();
        tokens_.clear();
        for (const auto& request : running_) {
            if (request->now == 0) continue;
            items_.emplace_back(request->sequence, request->now);
            const auto from = request->tokens.begin() + request->committed;
            tokens_.insert(tokens_.end(), from, from + request->now);
        }
    }

    // The cache has released its sequence already.
    void to_the_queue(const kvpool::Preempted& preempted) {
        for (auto it = running_.begin(); it != running_.end(); ++it) {
            if ((*it)->key != preempted.key()) continue;
            (*it)->sequence.detach();
            waiting_.push_front(std::move(*it));
            running_.erase(it);
            break;
        }
        ++counters_.preempted;
        // Nobody joins until one has ended: else it would be preempted again at once.
        hold_back_ = true;
    }

    kvpool::Cache& cache_;
    const Options options_;
    Channel<Command>& commands_;
    Channel<Reply>& replies_;
    Counters& counters_;
    const kvpool::PlanInfo info_;
    Model model_;
    std::atomic<bool> stopping_{false};
    Clock::time_point ends_at_ = {};
    Requests waiting_, running_;
    bool hold_back_ = false;
    uint64_t last_key_ = 0;
    std::vector<Command> heard_;
    std::vector<kvpool::StepItem> items_;
    std::vector<uint32_t> tokens_, last_rows_, next_;
};

}  // namespace service
