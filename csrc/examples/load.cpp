// Load for service.cpp: many clients at once, with prompts that begin alike, that change their mind, hang up,
// ask for too much and write nonsense. Checks that every request is answered, and that equal prompts are
// answered alike, whatever ran beside them, was reused, or was preempted.
//
//     c++ -std=c++17 -O2 -pthread load.cpp -o load
//     ./load --port N [--requests N] [--clients N] [--seed N] [--may-refuse 1]
//
// --may-refuse 1 allows refusals for a pool or a queue that is too small: KVPOOL_NEVER_FITS,
// KVPOOL_POOL_EXHAUSTED, QUEUE_FULL. The exit status is 0 if all was as it must be.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr uint32_t SYSTEM_PROMPTS = 6, QUESTIONS = 40, SYSTEM_LEN = 48, VOCABULARY = 512;

struct Arguments {
    uint16_t port = 0;
    uint32_t requests = 1000, clients = 16, may_refuse = 0;
    uint64_t seed = 1;
};

// splitmix64
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        return z ^ z >> 31;
    }
    uint32_t below(uint32_t n) { return static_cast<uint32_t>(next() % n); }

private:
    uint64_t state_;
};

// A connection that sends and receives lines. A failure ends the client with a complaint.
class Lines {
public:
    explicit Lines(uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
        sockaddr_in address = {};
        address.sin_family = AF_INET;
        address.sin_port = htons(port);
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        const timeval patience = {120, 0};
        ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
        good_ = ::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    }
    Lines(const Lines&) = delete;
    ~Lines() { ::close(fd_); }

    bool send(const std::string& text) {
        size_t sent = 0;
        while (good_ && sent < text.size()) {
            const ssize_t n = ::send(fd_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
            good_ = n > 0;
            if (good_) sent += static_cast<size_t>(n);
        }
        return good_;
    }
    bool receive(std::string& line) {
        size_t end;
        while ((end = in_.find('\n')) == std::string::npos) {
            char buffer[4096];
            const ssize_t n = ::recv(fd_, buffer, sizeof(buffer), 0);
            if (n <= 0) return good_ = false;
            in_.append(buffer, static_cast<size_t>(n));
        }
        line = in_.substr(0, end);
        in_.erase(0, end + 1);
        return true;
    }
    // Whether the other side has closed; what it said before is dropped.
    bool closed() {
        std::string line;
        while (receive(line)) continue;
        return true;
    }

private:
    int fd_;
    bool good_;
    std::string in_;
};

// A prompt and how much is asked for, by its number.
struct Prompt {
    std::vector<uint32_t> tokens;
    uint32_t max_tokens;
};

Prompt prompt(uint32_t number) {
    Prompt prompt;
    Random system(1000 + number / QUESTIONS), question(2000 + number);
    for (uint32_t i = 0; i < SYSTEM_LEN; ++i) prompt.tokens.push_back(system.below(VOCABULARY));
    const uint32_t len = 1 + question.below(40);
    for (uint32_t i = 0; i < len; ++i) prompt.tokens.push_back(question.below(VOCABULARY));
    prompt.max_tokens = 2 + question.below(24);
    return prompt;
}

// What all clients have in common.
class Load {
public:
    explicit Load(const Arguments& arguments) : arguments_(arguments) {}

    bool run() {
        const auto start = std::chrono::steady_clock::now();
        std::vector<std::thread> clients;
        for (uint32_t i = 0; i < arguments_.clients; ++i) clients.emplace_back([this, i] { client(i); });
        for (std::thread& client : clients) client.join();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        const uint64_t answered = done_ + cancelled_ + refused_ + hung_up_ + nonsense_ + too_long_;
        std::printf(
            "%u requests from %u clients in %.1f s: done %llu, cancelled %llu, hung up %llu, "
            "refused %llu, too long %llu, nonsense %llu; %zu different prompts, failures %llu\n",
            arguments_.requests, arguments_.clients, took.count(), number(done_), number(cancelled_),
            number(hung_up_), number(refused_), number(too_long_), number(nonsense_), completions_.size(),
            number(failures_));
        return failures_ == 0 && answered == arguments_.requests;
    }

private:
    using Counter = std::atomic<uint64_t>;
    static unsigned long long number(const Counter& counter) { return counter; }

    void fail(const std::string& what) {
        if (++failures_ <= 20) std::fprintf(stderr, "load: %s\n", what.c_str());
    }

    void client(uint32_t number) {
        Random random(arguments_.seed * 1000 + number);
        auto lines = std::make_unique<Lines>(arguments_.port);
        for (uint32_t request; (request = next_++) < arguments_.requests;) {
            const uint32_t kind = random.below(100);
            bool keep = true;
            if (kind < 4) {
                keep = nonsense(*lines, random);
            } else if (kind < 6) {
                keep = too_long(*lines, request);
            } else {
                keep = generate(*lines, request, random, kind);
            }
            if (!keep) lines = std::make_unique<Lines>(arguments_.port);
        }
    }

    // One request; of `kind` < 16 it is cancelled, < 21 hung up, after some tokens. Whether the connection
    // lives on.
    bool generate(Lines& lines, uint32_t id, Random& random, uint32_t kind) {
        const uint32_t which = random.below(SYSTEM_PROMPTS * QUESTIONS);
        const Prompt asked = prompt(which);
        const bool cancels = kind < 16, hangs_up = !cancels && kind < 21;
        const uint32_t after = random.below(asked.max_tokens);
        lines.send(line("generate", id, asked.max_tokens, asked.tokens));
        std::vector<uint32_t> said;
        for (;;) {
            if (said.size() == after && cancels) lines.send("cancel " + std::to_string(id) + "\n");
            if (said.size() == after && hangs_up) {
                ++hung_up_;
                compare(which, said);
                return false;
            }
            std::string text, word;
            uint64_t its_id = 0, value = 0;
            if (!lines.receive(text)) {
                fail("no answer to request " + std::to_string(id));
                return false;
            }
            std::istringstream words(text);
            words >> word >> its_id;
            if (its_id != id) fail("an answer for another request: " + text);
            if (word == "token" && words >> value) {
                said.push_back(static_cast<uint32_t>(value));
                continue;
            }
            if (word == "refused") return refused(text);
            if (!(words >> value) || value != said.size()) fail("not as many tokens as said: " + text);
            if (word == "done") {
                ++done_;
                if (said.size() != asked.max_tokens) fail("done too early: " + text);
            } else if (word == "cancelled" && cancels) {
                ++cancelled_;
            } else {
                fail("an unexpected answer: " + text);
            }
            compare(which, said);
            return true;
        }
    }

    bool refused(const std::string& text) {
        ++refused_;
        const char* fits[] = {" KVPOOL_NEVER_FITS ", " KVPOOL_POOL_EXHAUSTED ", " QUEUE_FULL "};
        const bool right = std::any_of(std::begin(fits), std::end(fits), [&](const char* status) {
            return text.find(status) != std::string::npos;
        });
        if (arguments_.may_refuse == 0 || !right) fail("an unexpected refusal: " + text);
        return true;
    }

    // Equal prompts are answered alike, as far as they were heard.
    void compare(uint32_t which, const std::vector<uint32_t>& said) {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::vector<uint32_t>& known = completions_[which];
        const size_t both = std::min(known.size(), said.size());
        if (!std::equal(said.begin(), said.begin() + static_cast<std::ptrdiff_t>(both), known.begin())) {
            fail("prompt " + std::to_string(which) + " was answered differently");
        }
        if (said.size() > known.size()) known = said;
    }

    // More than any sequence may have: refused at once.
    bool too_long(Lines& lines, uint32_t id) {
        ++too_long_;
        lines.send(line("generate", id, 1u << 20, {1, 2, 3}));
        std::string text;
        if (!lines.receive(text)) {
            fail("no answer to a request that is too long");
            return false;
        }
        const std::string refused = "refused " + std::to_string(id) + " ";
        const bool queue_full = text.rfind(refused + "QUEUE_FULL ", 0) == 0 && arguments_.may_refuse != 0;
        if (text.rfind(refused + "KVPOOL_TOO_LONG ", 0) != 0 && !queue_full) {
            fail("too long, and answered: " + text);
        }
        return true;
    }

    // Lines without meaning: each is answered by an error and does no harm.
    bool nonsense(Lines& lines, Random& random) {
        ++nonsense_;
        if (random.below(8) == 0) {
            // Too long a line ends the connection.
            lines.send(std::string(100'000, 'x'));
            if (!lines.closed()) fail("a line without end was borne");
            return false;
        }
        static const char* const texts[] = {"",
                                            "hello",
                                            "generate",
                                            "generate 1",
                                            "generate 1 0 5",
                                            "generate 1 1 512",
                                            "generate 1 1 -3",
                                            "generate x 1 1",
                                            "generate 1 1",
                                            "generate 1 99999999999 1",
                                            "cancel",
                                            "cancel x",
                                            "cancel 1 2",
                                            "GENERATE 1 1 1",
                                            "generate 1 4294967295 1 2"};
        std::string text = texts[random.below(std::size(texts))];
        if (random.below(4) == 0) {
            text.clear();
            for (int i = 0; i < 200; ++i) text.push_back(static_cast<char>(random.below(256)));
            std::replace(text.begin(), text.end(), '\n', '\0');
        }
        lines.send(text + "\n");
        std::string answer;
        if (!lines.receive(answer)) {
            fail("no answer to nonsense");
            return false;
        }
        if (answer.rfind("error ", 0) != 0) fail("nonsense was answered: " + answer);
        return true;
    }

    static std::string line(const char* verb, uint64_t id, uint32_t max_tokens,
                            const std::vector<uint32_t>& tokens) {
        std::string text = verb;
        text += " " + std::to_string(id) + " " + std::to_string(max_tokens);
        for (const uint32_t token : tokens) text += " " + std::to_string(token);
        return text + "\n";
    }

    const Arguments arguments_;
    std::atomic<uint32_t> next_{0};
    Counter done_{0}, cancelled_{0}, hung_up_{0}, refused_{0}, too_long_{0}, nonsense_{0}, failures_{0};
    std::mutex mutex_;
    std::map<uint32_t, std::vector<uint32_t>> completions_;
};

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string option = argv[i];
        const unsigned long value = std::strtoul(argv[i + 1], nullptr, 10);
        if (option == "--port") arguments.port = static_cast<uint16_t>(value);
        if (option == "--requests") arguments.requests = static_cast<uint32_t>(value);
        if (option == "--clients") arguments.clients = static_cast<uint32_t>(value);
        if (option == "--seed") arguments.seed = value;
        if (option == "--may-refuse") arguments.may_refuse = static_cast<uint32_t>(value);
    }
    if (arguments.port == 0) {
        std::fprintf(stderr,
                     "usage: load --port N [--requests N] [--clients N] [--seed N] [--may-refuse 1]\n");
        return 2;
    }
    return Load(arguments).run() ? 0 : 1;
}
