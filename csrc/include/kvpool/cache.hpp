// The cache. A part of kvpool.hpp.
#ifndef KVPOOL_CACHE_HPP
#define KVPOOL_CACHE_HPP

#include <array>
#include <chrono>
#include <memory>
#include <thread>

#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
#include <exception>
#define KVPOOL_HPP_CATCHES 1
#define KVPOOL_HPP_EVENTS catching
#else
#define KVPOOL_HPP_CATCHES 0
#define KVPOOL_HPP_EVENTS not_catching
#endif

#include "owners.hpp"

namespace kvpool {
inline namespace KVPOOL_HPP_KIND {

namespace detail {

struct CacheKind {
    static constexpr const char* NAME = "Cache";
    static kvpool_status_t give_back(kvpool_cache_t c) noexcept {
        return kvpool_cache_close(c);
    }
    // There is no later for a pool: beside another thread's verb it is tried for a second. (Not for ever: it may
    // be this thread's own, in a callback.)
    static kvpool_status_t give_back_at_end(kvpool_cache_t c) noexcept {
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
        kvpool_status_t status = give_back(c);
        while (status == KVPOOL_BUSY && std::chrono::steady_clock::now() < until) {
            std::this_thread::yield();
            status = give_back(c);
        }
        return status;
    }
};

// Units with and without the compiler's exceptions may be of one program, and share the other types.
inline namespace KVPOOL_HPP_EVENTS {

// Carries a callable through the C callback. What it throws waits here until the call is over.
template <class F>
struct EventCall {
    F& each;
#if KVPOOL_HPP_CATCHES
    std::exception_ptr thrown = nullptr;
#endif

    void hand_over(const kvpool_event_t& c) {
        std::optional<uint32_t> parent;
        if (c.parent != KVPOOL_NO_BLOCK) parent = c.parent;
        each(Event{c.number, static_cast<EventKind>(c.kind), c.group, c.block, parent, c.name_space,
                   span<const uint32_t>(c.tokens, c.num_tokens)});
    }
    static void from_c(void* context, const kvpool_event_t* c) noexcept {
        EventCall& call = *static_cast<EventCall*>(context);
#if KVPOOL_HPP_CATCHES
        if (call.thrown != nullptr) return;
        try {
            call.hand_over(*c);
        } catch (...) {
            call.thrown = std::current_exception();
        }
#else
        call.hand_over(*c);
#endif
    }
    void rethrow() {
#if KVPOOL_HPP_CATCHES
        if (thrown != nullptr) std::rethrow_exception(thrown);
#endif
    }
};

}  // namespace KVPOOL_HPP_EVENTS

// A template, so that DLManagedTensor need not be complete here.
struct DlpackDeleter {
    template <class Tensor>
    void operator()(Tensor* tensor) const noexcept {
        if (tensor->deleter != nullptr) tensor->deleter(tensor);
    }
};

}  // namespace detail

// A view of a part of a layer that others read through DLPack. Include dlpack.h where it is used.
template <class Tensor = ::DLManagedTensor>
using DlpackView = std::unique_ptr<Tensor, detail::DlpackDeleter>;

// A cache: const functions may be called by any thread beside one of the others, which are verbs.
class Cache : public detail::Owner<detail::CacheKind, kvpool_cache_t> {
public:
    Cache() noexcept = default;
    static Result<Cache> open(const Plan& plan) noexcept {
        kvpool_cache_t c = {};
        if (kvpool_cache_open(plan.c(), &c) != KVPOOL_OK) return Error::last();
        return Cache(c);
    }
    // Takes a plain handle into ownership.
    static Cache own(kvpool_cache_t c) noexcept { return Cache(c); }
    // Ends the cache with all that is in it.
    Result<void> close() noexcept { return give_back(); }
    kvpool_cache_t detach() noexcept { return let_go(); }
    kvpool_cache_t c() const noexcept { return held_; }

    // ------------------------------------------------------------ What it is

    Result<PlanInfo> plan_info() const noexcept {
        PlanInfo out = {};
        return detail::result(kvpool_cache_get_plan_info(held_, KVPOOL_OUT(out)), out);
    }
    Result<GroupInfo> group(uint32_t group) const noexcept {
        GroupInfo out = {};
        return detail::result(kvpool_cache_get_group(held_, group, KVPOOL_OUT(out)), out);
    }
    Result<Layer> layer(uint32_t layer) const noexcept {
        Layer out = {};
        return detail::result(kvpool_cache_get_layer(held_, layer, KVPOOL_OUT(out)), out);
    }
    Result<DeviceInfo> device() const noexcept {
        DeviceInfo out = {};
        return detail::result(kvpool_cache_get_device(held_, KVPOOL_OUT(out)), out);
    }
    // The pool's bytes, in the device's memory.
    Result<span<unsigned char>> pool() const noexcept {
        void* base = nullptr;
        uint64_t bytes = 0;
        if (kvpool_cache_get_pool(held_, &base, &bytes) != KVPOOL_OK) return Error::last();
        return span<unsigned char>(static_cast<unsigned char*>(base), static_cast<size_t>(bytes));
    }
    // The effective configuration, the plan and the device.
    Result<std::string> text(TextForm form = TextForm::text) const {
        return detail::text([&](char* buffer, size_t capacity, size_t* needed) {
            return kvpool_cache_text(held_, static_cast<kvpool_text_form_t>(form), buffer, capacity, needed);
        });
    }
    // [units, num_kv_heads, unit_tokens, head_dim or scales_per_row], without copying.
    template <class Tensor = ::DLManagedTensor>
    Result<DlpackView<Tensor>> dlpack(uint32_t layer, Part part) const noexcept {
        Tensor* view = nullptr;
        const auto c_part = static_cast<kvpool_part_t>(part);
        if (kvpool_cache_dlpack(held_, layer, c_part, &view) != KVPOOL_OK) return Error::last();
        return DlpackView<Tensor>(view);
    }

    // ------------------------------------------------------------ The device

    // CUDA: the caller's stream, for all work from here on.
    Result<void> set_stream(void* stream) noexcept {
        return detail::result(kvpool_cache_set_stream(held_, stream));
    }
    Result<void> synchronize() noexcept {
        return detail::result(kvpool_cache_synchronize(held_));
    }

    // ------------------------------------------------------------ Sequences

    Result<Begun> begin(span<const uint32_t> prompt, const BeginOptions& options = {}) noexcept {
        const kvpool_begin_options_t c_options = options.c();
        kvpool_begun_t c = {};
        if (kvpool_cache_begin(held_, prompt.data(), prompt.size(), &c_options, KVPOOL_OUT(c)) != KVPOOL_OK) {
            return Error::last();
        }
        return begun(c);
    }
    // All or none; Error::index() is the first that was refused. `out` has the size of `items`.
    Result<void> begin_batch(span<const BeginItem> items, span<Begun> out) {
        if (items.size() != out.size()) {
            return Error(Status::wrong_shape, "begin_batch: `items` and `out` differ in size");
        }
        if (items.size() <= FEW) {
            kvpool_begin_options_t options[FEW];
            kvpool_begin_item_t c_items[FEW] = {};
            kvpool_begun_t begun[FEW];
            return begin_all(items, options, c_items, begun, out);
        }
        std::vector<kvpool_begin_options_t> options(items.size());
        std::vector<kvpool_begin_item_t> c_items(items.size());
        std::vector<kvpool_begun_t> begun(items.size());
        return begin_all(items, options.data(), c_items.data(), begun.data(), out);
    }
    // Takes a plain handle into ownership.
    Sequence own(SeqId id) const noexcept { return Sequence(held_, id); }
    Pin own(PinId id) const noexcept { return Pin(held_, id); }
    Reservation own(ReservationId id) const noexcept { return Reservation(held_, id); }
    // The step that is open under this handle.
    Result<Step> own(kvpool_step_t c) noexcept {
        kvpool_step_view_t view = {};
        if (kvpool_step_get_view(held_, c, KVPOOL_OUT(view)) != KVPOOL_OK) return Error::last();
        return Step(held_, c, view.num_tokens, view.num_seqs);
    }

    Result<SeqInfo> info(SeqId id) const noexcept {
        SeqInfo out = {};
        return detail::result(kvpool_seq_get_info(held_, id.c(), KVPOOL_OUT(out)), out);
    }
    // For sequences that are kept by their plain handle.
    Result<void> release(SeqId id) noexcept {
        return detail::result(kvpool_cache_release(held_, id.c()));
    }

    // After Status::pool_exhausted: releases the youngest sequence, whose owner then does nothing.
    Result<Preempted> preempt_youngest() noexcept {
        Preempted out = {};
        return detail::result(kvpool_cache_preempt_youngest(held_, KVPOOL_OUT(out)), out);
    }
    // As after open. No sequence and no pin may be alive.
    Result<void> reset() noexcept {
        return detail::result(kvpool_cache_reset(held_));
    }

    // ------------------------------------------------------------ Admission

    // What begin would give now.
    Result<Estimate> check_admission(span<const uint32_t> prompt,
                                     const BeginOptions& options = {}) const noexcept {
        const kvpool_begin_options_t c_options = options.c();
        Estimate out = {};
        return detail::result(
            kvpool_cache_check_admission(held_, prompt.data(), prompt.size(), &c_options, KVPOOL_OUT(out)),
            out);
    }
    // Keeps a place, if begin would succeed now.
    Result<Admitted> can_admit(span<const uint32_t> prompt, const BeginOptions& options = {}) noexcept {
        const kvpool_begin_options_t c_options = options.c();
        kvpool_reservation_t c = {};
        Estimate estimate = {};
        if (kvpool_cache_can_admit(held_, prompt.data(), prompt.size(), &c_options, &c,
                                   KVPOOL_OUT(estimate)) != KVPOOL_OK) {
            return Error::last();
        }
        return Admitted{Reservation(held_, ReservationId(c)), estimate};
    }
    Result<uint32_t> reservations() const noexcept {
        uint32_t out = 0;
        return detail::result(kvpool_cache_reservations(held_, &out), out);
    }
    // All of them; how many there were.
    Result<uint32_t> cancel_reservations() noexcept {
        uint32_t out = 0;
        return detail::result(kvpool_cache_cancel_reservations(held_, &out), out);
    }

    // ------------------------------------------------------------ Steps

    // Room for all the items' tokens, or for none. `tokens` are their ids, by rows: blocks behind the prompt
    // can then be shared. Without them these stay private.
    Result<Step> reserve(span<const StepItem> items, span<const uint32_t> tokens = {}) noexcept {
        kvpool_step_t c = {};
        // An empty list has an address too.
        const uint32_t* ids = tokens.empty() ? nullptr : tokens.data();
        if (kvpool_cache_reserve(held_, items.data(), items.size(), ids, tokens.size(), &c) != KVPOOL_OK) {
            return Error::last();
        }
        uint32_t num_tokens = 0;
        for (const StepItem& item : items) num_tokens += item.num_tokens;
        return Step(held_, c, num_tokens, static_cast<uint32_t>(items.size()));
    }

    // Cancels the step that is open, whoever has it; whether there was one.
    Result<bool> cancel_step() noexcept {
        uint32_t cancelled = 0;
        if (kvpool_cache_cancel_step(held_, &cancelled) != KVPOOL_OK) return Error::last();
        return cancelled != 0;
    }

    // ------------------------------------------------------------ Prefixes

    // How much of a prompt is cached. Changes nothing.
    Result<Probe> probe(span<const uint32_t> prompt, const Namespace& name_space = {}) const noexcept {
        const kvpool_namespace_t c = name_space.c();
        Probe out = {};
        return detail::result(kvpool_cache_probe(held_, prompt.data(), prompt.size(), &c, KVPOOL_OUT(out)),
                              out);
    }
    // What time it is, for retention with a duration. Never goes back.
    Result<void> set_time_ms(uint64_t now_ms) noexcept {
        return detail::result(kvpool_cache_set_time_ms(held_, now_ms));
    }
    // Nothing that was cached before is found any more.
    Result<void> set_epoch(uint64_t epoch) noexcept {
        return detail::result(kvpool_cache_set_epoch(held_, epoch));
    }
    // Evicts every block that nobody holds.
    Result<void> clear_cached() noexcept {
        return detail::result(kvpool_cache_clear_cached(held_));
    }

    // ------------------------------------------------------------ Save and restore

    // Everything that is cached for reuse, into a file that replaces the one of that name when it is whole.
    Result<Saved> save_prefixes(const char* path, const SaveOptions& options = {}) const noexcept {
        const kvpool_save_options_t c = options.c();
        Saved out = {};
        return detail::result(kvpool_cache_save_prefixes(held_, path, &c, KVPOOL_OUT(out)), out);
    }
    // Evicts nothing; what has no room is dropped.
    Result<Restored> restore_prefixes(const char* path, const RestoreOptions& options = {}) noexcept {
        const kvpool_restore_options_t c = options.c();
        Restored out = {};
        return detail::result(kvpool_cache_restore_prefixes(held_, path, &c, KVPOOL_OUT(out)), out);
    }
    Result<Saved> save_sequence(SeqId id, const char* path, const SaveOptions& options = {}) const noexcept {
        const kvpool_save_options_t c = options.c();
        Saved out = {};
        return detail::result(kvpool_cache_save_sequence(held_, id.c(), path, &c, KVPOOL_OUT(out)), out);
    }
    // With all its tokens in the cache: cached_len of them.
    Result<Begun> restore_sequence(const char* path, const RestoreOptions& options = {}) noexcept {
        const kvpool_restore_options_t c_options = options.c();
        kvpool_begun_t c = {};
        if (kvpool_cache_restore_sequence(held_, path, &c_options, KVPOOL_OUT(c)) != KVPOOL_OK) {
            return Error::last();
        }
        return begun(c);
    }

    // ------------------------------------------------------------ Events

    // each(const Event&) for the events since the last call. What it throws is thrown on when the call is
    // over; the events behind that one are lost.
    template <class F, class Call = detail::EventCall<std::remove_reference_t<F>>>
    Result<EventCount> poll_events(F&& each) {
        Call call{each};
        EventCount count = {};
        const kvpool_status_t status =
            kvpool_cache_poll_events(held_, call.from_c, &call, &count.delivered, &count.lost);
        call.rethrow();
        return detail::result(status, count);
    }
    // The whole index as events, for a reader that begins late or has lost some; how many.
    template <class F, class Call = detail::EventCall<std::remove_reference_t<F>>>
    Result<uint64_t> resync_events(F&& each) {
        Call call{each};
        uint64_t delivered = 0;
        const kvpool_status_t status = kvpool_cache_resync_events(held_, call.from_c, &call, &delivered);
        call.rethrow();
        return detail::result(status, delivered);
    }
    Result<NamespaceNumbers> namespace_numbers(const Namespace& name_space) const noexcept {
        const kvpool_namespace_t c = name_space.c();
        uint32_t out[2] = {};
        if (kvpool_cache_namespace_numbers(held_, &c, out) != KVPOOL_OK) return Error::last();
        return NamespaceNumbers{out[0], out[1]};
    }

    // ------------------------------------------------------------ Statistics and checks

    Result<Stats> stats() const noexcept {
        Stats out = {};
        return detail::result(kvpool_cache_stats(held_, KVPOOL_OUT(out)), out);
    }
    Result<GroupStats> group_stats(uint32_t group) const noexcept {
        GroupStats out = {};
        return detail::result(kvpool_cache_group_stats(held_, group, KVPOOL_OUT(out)), out);
    }
    // Blocks evicted so far, by the priority that they had.
    Result<std::array<uint64_t, KVPOOL_PRIORITIES>> evictions() const noexcept {
        std::array<uint64_t, KVPOOL_PRIORITIES> out = {};
        return detail::result(kvpool_cache_evictions(held_, out.data()), out);
    }
    // Every invariant: takes time in proportion to the blocks.
    Result<void> check() const noexcept { return detail::result(kvpool_cache_check(held_)); }
    // Equal for equal states.
    Result<uint64_t> digest() const noexcept {
        uint64_t out = 0;
        return detail::result(kvpool_cache_digest(held_, &out), out);
    }
    // K or V of tokens from..to as f32, [to - from, num_kv_heads, head_dim].
    Result<void> export_tokens(SeqId id, uint32_t layer, Part part, uint32_t from, uint32_t to,
                               span<float> out) const noexcept {
        return detail::result(kvpool_cache_export(held_, id.c(), layer, static_cast<kvpool_part_t>(part),
                                                  from, to, out.data(), out.size()));
    }
    // Bytes of the pool, in host memory.
    Result<void> read(uint64_t offset, span<unsigned char> out) const noexcept {
        return detail::result(kvpool_cache_read(held_, offset, out.data(), out.size()));
    }
    Result<BlockId> block_of(SeqId id, uint32_t group, uint32_t position) const noexcept {
        kvpool_block_t c = {};
        if (kvpool_cache_block_of(held_, id.c(), group, position, &c) != KVPOOL_OK) return Error::last();
        return BlockId(c);
    }
    // How many hold a block.
    Result<uint32_t> block_refs(BlockId block) const noexcept {
        uint32_t out = 0;
        return detail::result(kvpool_cache_block_refs(held_, block.c(), &out), out);
    }

private:
    static constexpr size_t FEW = 64;

    explicit Cache(kvpool_cache_t c) noexcept : Owner(c) {}
    Begun begun(const kvpool_begun_t& c) const noexcept {
        return Begun{Sequence(held_, SeqId(c.sequence)), c.cached_len, c.limit};
    }
    // With room for what C takes and gives: [items.size()] each.
    Result<void> begin_all(span<const BeginItem> items, kvpool_begin_options_t* options,
                           kvpool_begin_item_t* c_items, kvpool_begun_t* c_begun, span<Begun> out) noexcept {
        for (size_t i = 0; i < items.size(); ++i) {
            options[i] = items[i].options.c();
            c_items[i] = {items[i].prompt.data(), items[i].prompt.size(), &options[i]};
        }
        const kvpool_status_t status =
            kvpool_cache_begin_batch(held_, c_items, items.size(), c_begun, sizeof(kvpool_begun_t));
        if (status != KVPOOL_OK) return Error::last();
        for (size_t i = 0; i < items.size(); ++i) out[i] = begun(c_begun[i]);
        return {};
    }
};

}  // namespace KVPOOL_HPP_KIND
}  // namespace kvpool

#endif  // KVPOOL_CACHE_HPP
