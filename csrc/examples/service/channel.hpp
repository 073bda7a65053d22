// What the threads of the service say to each other.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <system_error>
#include <vector>

namespace service {

// From the server to the scheduler. `connection` and `id` name a request; ids are the client's.
struct Command {
    enum Kind { generate, cancel, closed } kind;
    uint64_t connection;
    uint64_t id = 0;
    uint32_t max_tokens = 0;
    std::vector<uint32_t> prompt = {};
};

// From the scheduler to the server: a line for a client; the last one of its request says so.
struct Reply {
    uint64_t connection;
    uint64_t id;
    bool last;
    std::string line;
};

// Wakes a thread that waits in poll().
class Bell {
public:
    Bell() {
        if (::pipe(ends_) != 0) throw std::system_error(errno, std::generic_category(), "no pipe");
        for (const int end : ends_) ::fcntl(end, F_SETFL, O_NONBLOCK);
    }
    Bell(const Bell&) = delete;
    ~Bell() {
        for (const int end : ends_) ::close(end);
    }
    int fd() const { return ends_[0]; }
    // A full pipe wakes as well as one byte more would.
    void ring() const { (void)!::write(ends_[1], "!", 1); }
    void silence() const {
        char bytes[256];
        while (::read(ends_[0], bytes, sizeof(bytes)) > 0) continue;
    }

private:
    int ends_[2];
};

// A queue with one reader, who takes all there is.
template <class T>
class Channel {
public:
    Channel() = default;
    // For a reader that waits in poll().
    explicit Channel(const Bell& bell) : bell_(&bell) {}

    void put(T value) {
        bool first;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            first = values_.empty();
            values_.push_back(std::move(value));
        }
        wake_.notify_one();
        if (first && bell_ != nullptr) bell_->ring();
    }
    // Swaps what there is into `values`, which must be empty.
    void take(std::vector<T>& values) {
        const std::lock_guard<std::mutex> lock(mutex_);
        values_.swap(values);
    }
    void wait(std::chrono::milliseconds at_most) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait_for(lock, at_most, [this] { return !values_.empty(); });
    }

private:
    const Bell* bell_ = nullptr;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<T> values_;
};

// Written by the scheduler and the server, read by the metrics' thread.
struct Counters {
    std::atomic<uint64_t> connections{0}, requests{0}, finished{0}, cancelled{0}, refused{0}, malformed{0};
    std::atomic<uint64_t> preempted{0}, steps{0}, tokens_generated{0}, prompt_tokens{0}, reused_tokens{0};
    std::atomic<uint64_t> waiting{0}, running{0};
};

}  // namespace service
