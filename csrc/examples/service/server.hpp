// The sockets: one thread that talks to the clients, one that answers for metrics. POSIX.
//
// clang-format off
// The protocol, a line each, at most 64 KiB. From the client:
//
//     generate ID MAX_TOKENS TOKEN TOKEN ...   ID: a number of the client's choice, free again at its end
//     cancel ID                                nothing, if it is over already
//
// To the client, for each ID; one of the last three is its end:
//
//     token ID TOKEN                           as it is said
//     done ID TOKENS
//     cancelled ID TOKENS
//     refused ID STATUS WHY                    KVPOOL_TOO_LONG, QUEUE_FULL, ...
//
// and, for a line that means nothing and has no effect:
//
//     error WHY
//
// A client that closes its side cancels what it has asked for, and hears no more of it.
// clang-format on
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <map>
#include <set>
#include <string_view>
#include <system_error>
#include <thread>

#include "channel.hpp"
#include "model.hpp"

namespace service {

class Socket {
public:
    explicit Socket(int fd = -1) : fd_(fd) {}
    Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Socket() {
        if (fd_ >= 0) ::close(fd_);
    }
    int fd() const { return fd_; }

    // Listens on this machine only. Port 0: one that is free.
    static Socket listen(uint16_t port) {
        Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
        const int on = 1;
        ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
        sockaddr_in address = {};
        address.sin_family = AF_INET;
        address.sin_port = htons(port);
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if (::bind(socket.fd(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
            ::listen(socket.fd(), 128) != 0) {
            throw std::system_error(errno, std::generic_category(), "cannot listen");
        }
        ::fcntl(socket.fd(), F_SETFL, O_NONBLOCK);
        return socket;
    }
    uint16_t port() const {
        sockaddr_in address = {};
        socklen_t size = sizeof(address);
        ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size);
        return ntohs(address.sin_port);
    }

private:
    int fd_;
};

// The words of a line, one after the other.
class Words {
public:
    explicit Words(std::string_view line) : rest_(line) {}
    std::string_view next() {
        const size_t from = std::min(rest_.find_first_not_of(" \t\r"), rest_.size());
        const size_t to = std::min(rest_.find_first_of(" \t\r", from), rest_.size());
        const std::string_view word = rest_.substr(from, to - from);
        rest_.remove_prefix(to);
        return word;
    }
    bool at_end() const { return rest_.find_first_not_of(" \t\r") == std::string_view::npos; }
    template <class N>
    bool number(N& out) {
        const std::string_view word = next();
        const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), out);
        return error == std::errc() && end == word.data() + word.size();
    }

private:
    std::string_view rest_;
};

class Server {
public:
    // `bell` rings for `replies`.
    Server(Socket listener, const Bell& bell, Channel<Command>& commands, Channel<Reply>& replies,
           Counters& counters)
        : listener_(std::move(listener)),
          bell_(bell),
          commands_(commands),
          replies_(replies),
          counters_(counters) {}

    // From any thread: nobody new is let in.
    void stop_listening() { listening_ = false; }
    // From any thread: ends when what was said has been sent, or after two seconds.
    void stop() {
        stopping_ = true;
        bell_.ring();
    }

    void run() {
        std::chrono::steady_clock::time_point ends_at = {};
        for (;;) {
            // Before the replies are taken: what was said before stop() is among them then.
            const bool stopping = stopping_;
            send_replies();
            if (stopping) {
                const auto now = std::chrono::steady_clock::now();
                if (ends_at == decltype(ends_at)()) ends_at = now + std::chrono::seconds(2);
                if (now >= ends_at || all_sent()) return;
            }
            wait();
            if (listening_ && (polled_[0].revents & POLLIN) != 0) accept();
            size_t i = 2;
            for (auto& [id, connection] : connections_) {
                // Those that came in this round were not asked for.
                if (i == polled_.size()) break;
                serve(id, connection, polled_[i++].revents);
            }
            for (auto it = connections_.begin(); it != connections_.end();) {
                it = it->second.gone ? forget(it) : std::next(it);
            }
        }
    }

private:
    static constexpr size_t MAX_LINE = 64 << 10, MAX_UNSENT = 1 << 20, MAX_CONNECTIONS = 1024;

    struct Connection {
        Socket socket;
        std::string in, out;
        std::set<uint64_t> requests;  // that are not over
        bool gone = false;
    };
    using Connections = std::map<uint64_t, Connection>;

    void wait() {
        polled_.clear();
        polled_.push_back({listening_ ? listener_.fd() : -1, POLLIN, 0});
        polled_.push_back({bell_.fd(), POLLIN, 0});
        for (const auto& [id, connection] : connections_) {
            const short events = connection.out.empty() ? POLLIN : POLLIN | POLLOUT;
            polled_.push_back({connection.socket.fd(), events, 0});
        }
        ::poll(polled_.data(), polled_.size(), stopping_ ? 10 : 1000);
        bell_.silence();
    }

    void accept() {
        for (;;) {
            Socket socket(::accept(listener_.fd(), nullptr, nullptr));
            // Beyond the limit it is closed again.
            if (socket.fd() < 0) return;
            if (connections_.size() >= MAX_CONNECTIONS) continue;
            ::fcntl(socket.fd(), F_SETFL, O_NONBLOCK);
            connections_[++last_connection_].socket = std::move(socket);
            ++counters_.connections;
        }
    }

    Connections::iterator forget(Connections::iterator it) {
        commands_.put(Command{Command::closed, it->first});
        return connections_.erase(it);
    }

    void serve(uint64_t id, Connection& connection, short events) {
        if ((events & (POLLIN | POLLHUP | POLLERR)) != 0) receive(id, connection);
        if (!connection.out.empty()) flush(connection);
    }

    void receive(uint64_t id, Connection& connection) {
        char buffer[16 << 10];
        const ssize_t got = ::recv(connection.socket.fd(), buffer, sizeof(buffer), 0);
        if (got <= 0) {
            connection.gone = got == 0 || (errno != EAGAIN && errno != EINTR);
            return;
        }
        std::string& in = connection.in;
        in.append(buffer, static_cast<size_t>(got));
        size_t from = 0, end;
        while ((end = in.find('\n', from)) != std::string::npos) {
            hear(id, connection, std::string_view(in).substr(from, end - from));
            from = end + 1;
        }
        in.erase(0, from);
        if (in.size() > MAX_LINE) {
            complain(connection, "a line of more than 65536 bytes");
            flush(connection);
            connection.gone = true;
        }
    }

    void complain(Connection& connection, std::string_view why) {
        ++counters_.malformed;
        connection.out.append("error ").append(why).append("\n");
    }

    void hear(uint64_t id, Connection& connection, std::string_view line) {
        Words words(line);
        const std::string_view verb = words.next();
        if (verb == "generate") return hear_generate(id, connection, words);
        if (verb != "cancel") return complain(connection, "expected: generate or cancel");
        Command command{Command::cancel, id};
        if (!words.number(command.id) || !words.at_end()) return complain(connection, "expected: cancel ID");
        // What is over, or never was, needs no cancelling.
        if (connection.requests.count(command.id) != 0) commands_.put(std::move(command));
    }

    void hear_generate(uint64_t id, Connection& connection, Words& words) {
        Command command{Command::generate, id};
        if (!words.number(command.id) || !words.number(command.max_tokens) || command.max_tokens == 0) {
            return complain(connection, "expected: generate ID MAX_TOKENS TOKEN ...");
        }
        while (!words.at_end()) {
            uint32_t token = 0;
            if (!words.number(token) || token >= VOCABULARY) {
                return complain(connection, "a token is a number below 512");
            }
            command.prompt.push_back(token);
        }
        if (command.prompt.empty()) return complain(connection, "a prompt has at least one token");
        if (command.max_tokens > UINT32_MAX - command.prompt.size()) {
            return complain(connection, "more tokens than can be counted");
        }
        if (!connection.requests.insert(command.id).second) {
            return complain(connection, "a request with this ID is under way");
        }
        commands_.put(std::move(command));
    }

    void send_replies() {
        heard_.clear();
        replies_.take(heard_);
        for (Reply& reply : heard_) {
            const auto it = connections_.find(reply.connection);
            if (it == connections_.end()) continue;
            Connection& connection = it->second;
            if (reply.last) connection.requests.erase(reply.id);
            connection.out.append(reply.line).append("\n");
            // Who does not read what was asked for is let go.
            if (connection.out.size() > MAX_UNSENT) connection.gone = true;
        }
        for (auto& [id, connection] : connections_) {
            if (!connection.out.empty()) flush(connection);
        }
    }

    void flush(Connection& connection) {
        const std::string& out = connection.out;
        const ssize_t sent = ::send(connection.socket.fd(), out.data(), out.size(), MSG_NOSIGNAL);
        if (sent > 0) connection.out.erase(0, static_cast<size_t>(sent));
        if (sent < 0 && errno != EAGAIN && errno != EINTR) connection.gone = true;
    }

    bool all_sent() const {
        for (const auto& [id, connection] : connections_) {
            if (!connection.gone && !connection.out.empty()) return false;
        }
        return true;
    }

    Socket listener_;
    const Bell& bell_;
    Channel<Command>& commands_;
    Channel<Reply>& replies_;
    Counters& counters_;
    std::atomic<bool> listening_{true}, stopping_{false};
    Connections connections_;
    uint64_t last_connection_ = 0;
    std::vector<pollfd> polled_;
    std::vector<Reply> heard_;
};

}  // namespace service
