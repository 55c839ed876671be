/* SPDX-License-Identifier: Apache-2.0 */

/*
 * zerod-engine-gloo moves bytes between nodes over gloo's TCP transport (proto/engine.proto).
 *
 * Threads. The reader (main) receives commands, posts orders to gloo and watches deadlines; it never waits for a peer.
 * The connector makes the connections and ends. For each posted order, a waiter waits for the order's moves, in turn,
 * and reports the order's end. For each other node, a watcher waits for the end of the connection. All other threads
 * are gloo's.
 *
 * gloo's own timeouts are not used. When one passes, gloo closes every connection; then each thread reports that, and
 * the thread that knows the reason is the last. In this engine a passed deadline causes a single report and the end of
 * the process.
 *
 * The process ends only in leave(), which destroys nothing, because threads of gloo may still run.
 *
 * The engine does not trust the daemon's addresses: it checks moves against the mapped segments. A mapping lives as
 * long as an order that uses it.
 */

#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/prefix_store.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

extern "C" {
#include "core/wire/engine-wire.h"
#include "core/wire/frame.h"
}
#include "engine/gloo-pages.h"
#include "proto/engine.pb-c.h"

namespace
{

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Bytes = std::vector<char>;

constexpr int socket_fd = 3;

/* Longer than the life of any engine. gloo adds it to the time of day in nanoseconds, which must not overflow. */
constexpr milliseconds forever = std::chrono::hours(24 * 365);

/* The delay before a lost connection is reported. Picked: within 10 ms the peer's daemon knows why its engine has
 * ended. */
constexpr milliseconds first_word(100);

/* The slot for messages of the connector and the watchers. No order has this tag. */
constexpr uint64_t private_slot = ENGINE_MAX_TAG + 1;

[[noreturn]] void leave(int status)
{
    _exit(status);
}

/* ---- texts ---------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 1, 2))) std::string text(const char *format, ...)
{
    char buffer[ENGINE_MAX_WHAT_BYTES];
    va_list args;

    va_start(args, format);
    vsnprintf(buffer, sizeof(buffer), format, args);
    va_end(args);
    return buffer;
}

/* Removes ports, because gloo prints them in the network's byte order: "[10.0.0.2]:26386" is port 4711. */
void drop_ports(std::string &what)
{
    for (size_t at = 0; (at = what.find("]:", at)) != std::string::npos; at++) {
        size_t end = what.find_first_not_of("0123456789", at + 2);

        what.erase(at + 1, std::min(end, what.size()) - at - 1);
    }
}

/* Return: gloo's text as one clean line without the leading "[./gloo/transport/tcp/pair.cc:598] ". For one of gloo's
 * own checks ("[enforce fail at pair.cc:488] ...") the source line stays, because it is the only information. */
std::string reason(const std::exception &e)
{
    std::string what = e.what();
    size_t end = what.find("] ");

    if (what.compare(0, 1, "[") == 0 && what.compare(0, 8, "[enforce") != 0 && end != std::string::npos &&
        what.find(".cc:") < end)
        what.erase(0, end + 2);
    while (!what.empty() && strchr("\n .", what.back()))
        what.pop_back();
    for (char &c : what)
        if (c < 0x20 || c > 0x7e)
            c = ' ';
    drop_ports(what);
    return what.substr(0, ENGINE_MAX_WHAT_BYTES);
}

/* ---- the socket ----------------------------------------------------------------------------------------- */

/* Reports to the daemon, from any thread. */
class Daemon
{
  public:
    void put(const std::string &key, const Bytes &value)
    {
        Zerod__V1__EngineValue v;

        zerod__v1__engine_value__init(&v);
        v.key = const_cast<char *>(key.c_str());
        v.value = {value.size(), reinterpret_cast<uint8_t *>(const_cast<char *>(value.data()))};
        report(ZEROD__V1__ENGINE_REPORT__KIND_VALUE, [&](Zerod__V1__EngineReport *r) { r->value = &v; });
    }

    void ready()
    {
        Zerod__V1__EngineReady v;

        zerod__v1__engine_ready__init(&v);
        report(ZEROD__V1__ENGINE_REPORT__KIND_READY, [&](Zerod__V1__EngineReport *r) { r->ready = &v; });
    }

    void done(const struct engine_done &done)
    {
        Zerod__V1__EngineDone v;

        zerod__v1__engine_done__init(&v);
        v.tag = done.tag;
        v.n_bytes_sent = done.n_bytes_sent;
        v.n_bytes_received = done.n_bytes_received;
        report(ZEROD__V1__ENGINE_REPORT__KIND_DONE, [&](Zerod__V1__EngineReport *r) { r->done = &v; });
    }

    /* Waits before it reports the end of a connection, because the peer's own daemon reports the reason of its engine's
     * end. */
    [[noreturn]] void fail_for_peer(const std::string &what, const uint64_t *tag = nullptr)
    {
        std::this_thread::sleep_for(first_word);
        fail(what, tag);
    }

    /* Reports the first failure and ends the process. A thread with a later failure waits until the process ends. */
    [[noreturn]] void fail(const std::string &what, const uint64_t *tag = nullptr)
    {
        Zerod__V1__EngineFailed v;

        failing_.lock();
        zerod__v1__engine_failed__init(&v);
        v.what = const_cast<char *>(what.c_str());
        v.has_tag = tag != nullptr;
        v.tag = tag ? *tag : 0;
        report(ZEROD__V1__ENGINE_REPORT__KIND_FAILED, [&](Zerod__V1__EngineReport *r) { r->failed = &v; });
        leave(EXIT_FAILURE);
    }

  private:
    template <typename Set> void report(Zerod__V1__EngineReport__KindCase kind, Set set)
    {
        Zerod__V1__EngineReport report;

        zerod__v1__engine_report__init(&report);
        report.kind_case = kind;
        set(&report);
        std::vector<uint8_t> packet(zerod__v1__engine_report__get_packed_size(&report));
        zerod__v1__engine_report__pack(&report, packet.data());
        if (packet.empty() || packet.size() > FRAME_MAX_BYTES)
            leave(EXIT_FAILURE); /* a value for more nodes than the maximum */
        send(packet);
    }

    void send(const std::vector<uint8_t> &packet)
    {
        std::lock_guard<std::mutex> lock(sending_);
        struct pollfd room = {socket_fd, POLLOUT, 0};
        int r;

        while ((r = frame_send(socket_fd, packet.data(), packet.size(), nullptr, 0)) == FRAME_AGAIN)
            (void)poll(&room, 1, -1);
        if (r != 0)
            leave(EXIT_FAILURE);
    }

    std::mutex sending_, failing_;
};

Daemon &the_daemon()
{
    static auto *daemon = new Daemon; /* outlives every thread */

    return *daemon;
}

/* Reports an exception of a gloo thread. gloo throws one if a peer's bytes are invalid. */
[[noreturn]] void on_terminate()
{
    std::string what = "ended by std::terminate";

    if (std::exception_ptr e = std::current_exception()) {
        try {
            std::rethrow_exception(e);
        } catch (const std::exception &known) {
            what = "gloo gives up: " + reason(known);
        } catch (...) {
        }
    }
    the_daemon().fail(what.substr(0, ENGINE_MAX_WHAT_BYTES));
}

/* ---- the store ------------------------------------------------------------------------------------------ */

/* The values that the engines of a generation send each other through their daemons. No thread waits for a value after
 * the connector has ended. */
class Store : public gloo::rendezvous::Store
{
  public:
    void set(const std::string &key, const Bytes &value) override
    {
        arrive(key, value);
        the_daemon().put(key, value);
    }

    Bytes get(const std::string &key) override
    {
        std::unique_lock<std::mutex> lock(mutex_);

        arrived_.wait(lock, [&] { return values_.count(key) > 0; });
        return values_[key];
    }

    void wait(const std::vector<std::string> &keys) override
    {
        for (const auto &key : keys)
            (void)get(key);
    }

    void wait(const std::vector<std::string> &keys, const milliseconds &) override
    {
        wait(keys);
    }

    void arrive(const std::string &key, const Bytes &value)
    {
        std::lock_guard<std::mutex> lock(mutex_);

        values_[key] = value;
        arrived_.notify_all();
    }

    bool has(const std::string &key)
    {
        std::lock_guard<std::mutex> lock(mutex_);

        return values_.count(key) > 0;
    }

  private:
    std::mutex mutex_;
    std::condition_variable arrived_;
    std::unordered_map<std::string, Bytes> values_;
};

/* ---- segments ------------------------------------------------------------------------------------------- */

/* A segment, mapped twice. For bytes at an address in `lasting_`, the page itself is sent; for bytes in `map_`, a
 * copy. */
class Mapping
{
  public:
    Mapping(int fd, uint64_t n_bytes) : n_bytes_(n_bytes)
    {
        struct stat status;

        if (fstat(fd, &status) < 0 || status.st_size < 0 || static_cast<uint64_t>(status.st_size) < n_bytes)
            throw std::runtime_error("a segment is smaller than it is said to be");
        fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        map_ = map(fd_, PROT_READ | PROT_WRITE);
        lasting_ = map(fd_, PROT_READ);
        pages_add(lasting_, n_bytes, fd_);
    }

    ~Mapping()
    {
        pages_remove(lasting_);
        munmap(lasting_, n_bytes_);
        munmap(map_, n_bytes_);
        close(fd_);
    }

    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;

    bool contains(uint64_t offset_bytes, uint64_t n_bytes) const
    {
        return offset_bytes <= n_bytes_ && n_bytes <= n_bytes_ - offset_bytes;
    }

    char *at(uint64_t offset_bytes) const
    {
        return map_ + offset_bytes;
    }

    /* Return: the address from which to send bytes that do not change until the other end has received them. */
    char *lasting_at(uint64_t offset_bytes) const
    {
        return lasting_ + offset_bytes;
    }

  private:
    /* Throws an exception that ends the process. */
    char *map(int fd, int protection) const
    {
        void *map = mmap(nullptr, n_bytes_, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);

        if (map == MAP_FAILED)
            throw std::runtime_error(text("a segment cannot be mapped: %s", strerror(errno)));
        /* A core dump must not contain the state. */
        (void)madvise(map, n_bytes_, MADV_DONTDUMP);
        return static_cast<char *>(map);
    }

    int fd_;
    char *map_, *lasting_;
    uint64_t n_bytes_;
};

using Segments = std::array<std::shared_ptr<Mapping>, ENGINE_MAX_SEGMENTS>;

/* ---- orders --------------------------------------------------------------------------------------------- */

struct Move {
    int node;
    bool send;
    char *bytes;
    size_t n_bytes;
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer; /* set when the move is posted */
};

struct Order {
    uint64_t tag;
    uint32_t timeout_ms;
    bool lasting; /* sent bytes do not change until the receivers have them */
    Clock::time_point deadline;
    std::vector<Move> moves;
    Segments held; /* the mappings that the moves use */
    size_t n_over; /* finished moves; protected by the orders' lock */
};

/* The unfinished orders, by tag and by deadline. Any thread may call the functions. */
class Orders
{
  public:
    /* Return: false if there is already an order with this tag. */
    bool add(const std::shared_ptr<Order> &order)
    {
        std::lock_guard<std::mutex> lock(mutex_);

        if (!by_tag_.emplace(order->tag, order).second)
            return false;
        by_deadline_.emplace(order->deadline, order->tag);
        return true;
    }

    void move_is_over(const std::shared_ptr<Order> &order)
    {
        std::lock_guard<std::mutex> lock(mutex_);

        order->n_over++;
    }

    void remove(const std::shared_ptr<Order> &order)
    {
        std::lock_guard<std::mutex> lock(mutex_);

        by_tag_.erase(order->tag);
        by_deadline_.erase({order->deadline, order->tag});
    }

    Clock::time_point next_deadline()
    {
        std::lock_guard<std::mutex> lock(mutex_);

        return by_deadline_.empty() ? Clock::time_point::max() : by_deadline_.begin()->first;
    }

    /* Fails the process if the first deadline has passed. */
    void check(Clock::time_point now)
    {
        std::lock_guard<std::mutex> lock(mutex_);

        if (by_deadline_.empty() || by_deadline_.begin()->first > now)
            return;
        const Order &order = *by_tag_.at(by_deadline_.begin()->second);
        const Move &move = order.moves.at(std::min(order.n_over, order.moves.size() - 1));
        the_daemon().fail(text("waited %u ms for node %d to %s %zu bytes (move %zu of %zu)", order.timeout_ms,
                               move.node, move.send ? "take" : "send", move.n_bytes, order.n_over + 1,
                               order.moves.size()),
                          &order.tag);
    }

  private:
    std::mutex mutex_;
    std::unordered_map<uint64_t, std::shared_ptr<Order>> by_tag_;
    std::set<std::pair<Clock::time_point, uint64_t>> by_deadline_;
};

/*
 * Threads that wait for orders, one per unfinished order. With gloo a thread can only wait for one move after another.
 * A finished order must be reported even if an earlier order is not finished, or two nodes could wait for each other.
 */
class Waiters
{
  public:
    explicit Waiters(Orders &orders) : orders_(orders)
    {
    }

    void wait_for(std::shared_ptr<Order> order)
    {
        std::lock_guard<std::mutex> lock(mutex_);

        queue_.push_back(std::move(order));
        if (n_idle_ >= queue_.size())
            posted_.notify_one();
        else
            std::thread([this] { run(); }).detach();
    }

  private:
    std::shared_ptr<Order> next()
    {
        std::unique_lock<std::mutex> lock(mutex_);

        n_idle_++;
        posted_.wait(lock, [this] { return !queue_.empty(); });
        n_idle_--;
        std::shared_ptr<Order> order = std::move(queue_.front());
        queue_.pop_front();
        return order;
    }

    void run()
    {
        for (;;) {
            std::shared_ptr<Order> order = next();

            try {
                see_through(order);
            } catch (const std::exception &e) {
                the_daemon().fail_for_peer(reason(e), &order->tag);
            }
        }
    }

    void see_through(const std::shared_ptr<Order> &order)
    {
        struct engine_done done = {};

        for (Move &move : order->moves) {
            if (move.send)
                move.buffer->waitSend(forever);
            else
                move.buffer->waitRecv(forever);
            (move.send ? done.n_bytes_sent : done.n_bytes_received) += move.n_bytes;
            orders_.move_is_over(order);
        }
        orders_.remove(order);
        order->moves.clear();
        order->held = {};
        done.tag = order->tag;
        the_daemon().done(done);
    }

    Orders &orders_;
    std::mutex mutex_;
    std::condition_variable posted_;
    std::deque<std::shared_ptr<Order>> queue_;
    size_t n_idle_ = 0;
};

/* ---- connections ---------------------------------------------------------------------------------------- */

struct Place {
    uint32_t generation;
    int node, n_nodes;
    std::string address;
    uint32_t timeout_ms;
};

std::string prefix_of(const Place &place)
{
    return "g" + std::to_string(place.generation);
}

/* Return: the address as a number. gloo could look a name up, but it does not handle an unknown name. */
std::string resolve(const std::string &address)
{
    struct addrinfo hints = {}, *found = nullptr;
    char number[NI_MAXHOST];
    int r;

    hints.ai_socktype = SOCK_STREAM;
    r = getaddrinfo(address.c_str(), nullptr, &hints, &found);
    if (r == 0) {
        r = getnameinfo(found->ai_addr, found->ai_addrlen, number, sizeof(number), nullptr, 0, NI_NUMERICHOST);
        freeaddrinfo(found);
    }
    if (r != 0)
        throw std::runtime_error(text("this node's address %s is not found: %s", address.c_str(), gai_strerror(r)));
    return number;
}

Bytes make_secret()
{
    Bytes secret(32);

    if (getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size()))
        throw std::runtime_error(text("no random bytes: %s", strerror(errno)));
    return secret;
}

/*
 * gloo accepts whichever process connects first as the expected node. So each engine puts a secret into the store, and
 * sends the secret as the first message over each connection. The store's values are sent encrypted, so a stranger does
 * not know the secret.
 */
class Proof
{
  public:
    Proof(gloo::Context &context, gloo::rendezvous::Store &store)
        : context_(context), store_(store), own_(make_secret())
    {
        store_.set(key(context_.rank), own_);
    }

    void exchange()
    {
        std::map<int, std::pair<Bytes, std::unique_ptr<gloo::transport::UnboundBuffer>>> received;
        auto sent = context_.createUnboundBuffer(own_.data(), own_.size());

        for (int node = 0; node < context_.size; node++) {
            if (node == context_.rank)
                continue;
            auto &[bytes, buffer] = received[node];
            bytes.resize(own_.size());
            buffer = context_.createUnboundBuffer(bytes.data(), bytes.size());
            buffer->recv(node, private_slot);
            sent->send(node, private_slot);
        }
        for (auto &[node, pair] : received) {
            sent->waitSend(forever);
            pair.second->waitRecv(forever);
            if (pair.first != store_.get(key(node)))
                throw std::runtime_error(text("the process that connected as node %d is not its engine", node));
        }
    }

    static std::string key(int node)
    {
        return "proof_" + std::to_string(node);
    }

  private:
    gloo::Context &context_;
    gloo::rendezvous::Store &store_;
    Bytes own_;
};

/* Converts a store to the type that gloo expects: a reference, or a shared pointer in versions since 2025. The caller
 * keeps the store alive. */
class GivenStore
{
  public:
    explicit GivenStore(gloo::rendezvous::Store &store) : store_(store)
    {
    }

    operator gloo::rendezvous::Store &() const
    {
        return store_;
    }

    operator std::shared_ptr<gloo::rendezvous::Store>() const
    {
        return {std::shared_ptr<void>(), &store_};
    }

  private:
    gloo::rendezvous::Store &store_;
};

class Mesh
{
  public:
    Mesh() : waiters_(orders_)
    {
    }

    void begin(Place place)
    {
        place_ = std::move(place);
        deadline_ = Clock::now() + milliseconds(place_.timeout_ms);
        begun_ = true;
        std::thread([this] { connect(); }).detach();
    }

    bool has_begun() const
    {
        return begun_;
    }

    const Place &place() const
    {
        return place_;
    }

    Store &store()
    {
        return store_;
    }

    /* Posts an order, or queues it until all connections exist. */
    void give(const std::shared_ptr<Order> &order)
    {
        std::lock_guard<std::mutex> lock(mutex_);

        if (!orders_.add(order))
            the_daemon().fail("an order of this tag is under way", &order->tag);
        if (stands_)
            post(order);
        else
            early_.push_back(order);
    }

    Clock::time_point next_deadline()
    {
        Clock::time_point next = orders_.next_deadline();
        std::lock_guard<std::mutex> lock(mutex_);

        return begun_ && !stands_ ? std::min(next, deadline_) : next;
    }

    void check_deadlines()
    {
        Clock::time_point now = Clock::now();

        orders_.check(now);
        std::lock_guard<std::mutex> lock(mutex_);
        if (begun_ && !stands_ && now >= deadline_)
            the_daemon().fail(
                text("not connected to all nodes within %u ms: %s", place_.timeout_ms, missing().c_str()));
    }

  private:
    std::string missing()
    {
        for (int node = 0; node < place_.n_nodes; node++)
            if (node != place_.node && !store_.has(prefix_of(place_) + "/" + std::to_string(node)))
                return text("nothing has been heard of the engine of node %d", node);
        return "the engines of all nodes have reported";
    }

    void connect()
    {
        try {
            auto device =
                gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(resolve(place_.address).c_str()));
            gloo::rendezvous::PrefixStore store(prefix_of(place_), GivenStore(store_));
            auto context = std::make_unique<gloo::rendezvous::Context>(place_.node, place_.n_nodes);
            Proof proof(*context, store);

            context->setTimeout(forever / 5); /* gloo allows a connection five times this timeout */
            context->connectFullMesh(GivenStore(store), device);
            proof.exchange();
            stand(std::move(context));
        } catch (const std::exception &e) {
            the_daemon().fail(reason(e));
        }
    }

    void stand(std::unique_ptr<gloo::rendezvous::Context> context)
    {
        std::lock_guard<std::mutex> lock(mutex_);

        context_ = std::move(context);
        for (int node = 0; node < context_->size; node++)
            if (node != context_->rank)
                std::thread([this, node] { watch(node); }).detach();
        the_daemon().ready();
        stands_ = true;
        for (const auto &order : early_)
            post(order);
        early_.clear();
    }

    /* Waits for the end of a connection with a receive that no send matches. When a connection ends, gloo wakes waiting
     * operations, except those that have moved a part of their bytes. */
    void watch(int node)
    {
        try {
            char byte;
            auto buffer = context_->createUnboundBuffer(&byte, sizeof(byte));

            buffer->recv(node, private_slot);
            buffer->waitRecv(forever);
            the_daemon().fail(text("node %d has sent unexpected data", node));
        } catch (const std::exception &e) {
            the_daemon().fail_for_peer(reason(e) + " (node " + std::to_string(node) + ")");
        }
    }

    /*
     * Posts an order's moves. All of them use the slot of the order's tag. Between two nodes, gloo keeps the order of
     * the sends and of the receives of a slot, so the n-th send matches the n-th receive. Receives are posted first, so
     * that the peers' sends can begin while this engine still posts its own sends.
     */
    void post(const std::shared_ptr<Order> &order)
    {
        try {
            for (bool send : {false, true})
                for (Move &move : order->moves)
                    if (move.send == send)
                        post_move(move, order->tag);
            waiters_.wait_for(order);
        } catch (const std::exception &e) {
            the_daemon().fail(reason(e), &order->tag);
        }
    }

    void post_move(Move &move, uint64_t slot)
    {
        move.buffer = context_->createUnboundBuffer(move.bytes, move.n_bytes);
        if (move.send)
            move.buffer->send(move.node, slot, 0, move.n_bytes);
        else
            move.buffer->recv(move.node, slot, 0, move.n_bytes);
    }

    Place place_;
    bool begun_ = false;
    Clock::time_point deadline_;
    Store store_;
    Orders orders_;
    Waiters waiters_;
    std::mutex mutex_; /* guards the fields below */
    bool stands_ = false;
    std::deque<std::shared_ptr<Order>> early_;
    std::unique_ptr<gloo::rendezvous::Context> context_;
};

/* ---- the reader ----------------------------------------------------------------------------------------- */

class Reader
{
  public:
    [[noreturn]] void run()
    {
        if (frame_buffer_init(&buffer_) < 0)
            the_daemon().fail("no memory");
        for (;;) {
            wait();
            mesh_.check_deadlines();
            take();
        }
    }

  private:
    void wait()
    {
        struct pollfd input = {socket_fd, POLLIN, 0};
        Clock::time_point next = mesh_.next_deadline();
        int timeout_ms = -1;

        if (next != Clock::time_point::max()) {
            auto left = std::chrono::duration_cast<milliseconds>(next - Clock::now()).count() + 1;
            timeout_ms = static_cast<int>(std::min<int64_t>(std::max<int64_t>(left, 0), 60 * 60 * 1000));
        }
        (void)poll(&input, 1, timeout_ms);
    }

    /* Receives and serves one command, if there is one. */
    void take()
    {
        int r = frame_receive_fds(socket_fd, &buffer_);

        if (r == FRAME_AGAIN)
            return;
        if (r == FRAME_EOF)
            leave(EXIT_SUCCESS);
        if (r != 0)
            the_daemon().fail("a command cannot be received");
        auto *command = zerod__v1__engine_command__unpack(nullptr, buffer_.n_bytes, buffer_.data);
        if (!command)
            the_daemon().fail("a command that is not understood");
        try {
            serve(*command);
        } catch (const std::exception &e) {
            the_daemon().fail(reason(e));
        }
        zerod__v1__engine_command__free_unpacked(command, nullptr);
    }

    void serve(const Zerod__V1__EngineCommand &command)
    {
        if (mesh_.has_begun() == (command.kind_case == ZEROD__V1__ENGINE_COMMAND__KIND_SETUP))
            throw std::runtime_error("a command out of place");
        switch (command.kind_case) {
        case ZEROD__V1__ENGINE_COMMAND__KIND_SETUP:
            set_up(*command.setup);
            return;
        case ZEROD__V1__ENGINE_COMMAND__KIND_SHARE:
            if (!command.share->segment || buffer_.n_fds != 1)
                throw std::runtime_error("a segment without its descriptor");
            map(*command.share->segment, buffer_.fds[0]);
            return;
        case ZEROD__V1__ENGINE_COMMAND__KIND_ORDER:
            give(*command.order);
            return;
        case ZEROD__V1__ENGINE_COMMAND__KIND_VALUE:
            mesh_.store().arrive(command.value->key, Bytes(command.value->value.data,
                                                           command.value->value.data + command.value->value.len));
            return;
        default:
            throw std::runtime_error("a command that is not known");
        }
    }

    void set_up(const Zerod__V1__EngineSetup &setup)
    {
        if (setup.version != ENGINE_WIRE_VERSION)
            throw std::runtime_error(text("this engine speaks version %d, the daemon %u: they are not of one build",
                                          ENGINE_WIRE_VERSION, setup.version));
        if (setup.n_nodes == 0 || setup.n_nodes > ENGINE_MAX_NODES || setup.node >= setup.n_nodes)
            throw std::runtime_error(text("node %u of %u", setup.node, setup.n_nodes));
        if (setup.n_segments != buffer_.n_fds)
            throw std::runtime_error(text("%zu segments with %zu descriptors", setup.n_segments, buffer_.n_fds));
        for (size_t i = 0; i < setup.n_segments; i++)
            map(*setup.segments[i], buffer_.fds[i]);
        mesh_.begin({setup.generation, static_cast<int>(setup.node), static_cast<int>(setup.n_nodes), setup.address,
                     setup.connect_timeout_ms});
    }

    /* The frame buffer owns the descriptor and closes it. */
    void map(const Zerod__V1__EngineSegment &segment, int fd)
    {
        if (segment.number >= segments_.size())
            throw std::runtime_error(text("segment %u", segment.number));
        segments_[segment.number] = std::make_shared<Mapping>(fd, segment.n_bytes);
    }

    void give(const Zerod__V1__EngineOrder &given)
    {
        auto order = std::make_shared<Order>();

        order->tag = given.tag;
        order->timeout_ms = given.timeout_ms;
        order->lasting = given.lasting;
        order->deadline = Clock::now() + milliseconds(given.timeout_ms);
        order->n_over = 0;
        if (given.tag > ENGINE_MAX_TAG || given.n_moves == 0 || given.n_moves > ENGINE_MAX_MOVES)
            the_daemon().fail(text("an order of %zu moves", given.n_moves), &given.tag);
        order->moves.reserve(given.n_moves);
        for (size_t i = 0; i < given.n_moves; i++)
            add_move(*order, *given.moves[i]);
        mesh_.give(order);
    }

    void add_move(Order &order, const Zerod__V1__EngineMove &move)
    {
        const Place &place = mesh_.place();

        if (move.node >= static_cast<uint32_t>(place.n_nodes) || move.node == static_cast<uint32_t>(place.node))
            the_daemon().fail(text("move %zu is for node %u; this is node %d of %d", order.moves.size(), move.node,
                                   place.node, place.n_nodes),
                              &order.tag);
        if (move.segment >= segments_.size() || !segments_[move.segment])
            the_daemon().fail(text("move %zu is for segment %u, which is not there", order.moves.size(), move.segment),
                              &order.tag);
        const auto &mapping = segments_[move.segment];
        if (move.n_bytes == 0 || !mapping->contains(move.offset_bytes, move.n_bytes))
            the_daemon().fail(text("move %zu is for %llu bytes at %llu of segment %u, which has no such place",
                                   order.moves.size(), static_cast<unsigned long long>(move.n_bytes),
                                   static_cast<unsigned long long>(move.offset_bytes), move.segment),
                              &order.tag);
        char *bytes =
            move.send && order.lasting ? mapping->lasting_at(move.offset_bytes) : mapping->at(move.offset_bytes);
        order.held[move.segment] = mapping;
        order.moves.push_back(
            {static_cast<int>(move.node), static_cast<bool>(move.send), bytes, move.n_bytes, nullptr});
    }

    Mesh mesh_;
    Segments segments_;
    struct frame_buffer buffer_ = {};
};

/* Makes the process end only with the daemon. If a user stops the daemon with a signal to all its processes, the daemon
 * must finish its step first. If a peer is gone, write() fails, without a signal. */
void prepare_process()
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int number : {SIGPIPE, SIGINT, SIGTERM, SIGHUP})
        std::signal(number, SIG_IGN);
    std::set_terminate(on_terminate);
}

bool has_daemon()
{
    int type = 0;
    socklen_t size = sizeof(type);

    return getsockopt(socket_fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_SEQPACKET;
}

} // namespace

int main()
{
    if (!has_daemon()) {
        fprintf(stderr, "zerod-engine-gloo is started by zerod, not by hand\n");
        return 2;
    }
    prepare_process();
    static auto *reader = new Reader; /* threads that still run at the process's end use it */
    reader->run();
}
