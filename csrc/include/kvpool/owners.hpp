// The owners: Config, Plan, Sequence, Pin, Reservation and Step. A part of kvpool.hpp.
#ifndef KVPOOL_OWNERS_HPP
#define KVPOOL_OWNERS_HPP

#include <string>
#include <string_view>
#include <vector>

#include "ending.hpp"
#include "tensor.hpp"

namespace kvpool {
inline namespace KVPOOL_HPP_KIND {

namespace detail {

// What an object of a cache is known by.
template <class C>
struct InCache {
    kvpool_cache_t cache = {};
    C c = {};
};

template <class C>
bool is_some(const C& c) noexcept {
    return c.word[0] != 0 || c.word[1] != 0;
}
template <class C>
bool is_some(const InCache<C>& held) noexcept {
    return is_some(held.c);
}

// An owner ended: gives back what it held; of what is in a cache as soon as that can be.
template <class Kind, class C>
void end_of(const C& c) noexcept {
    if (!ending::is_gone(Kind::give_back_at_end(c))) {
        ending::leaked(Kind::NAME, {}, c.word, ending::last_error());
    }
}
template <class Kind, class C>
void end_of(const InCache<C>& held) noexcept {
    if (!ending::is_gone(Kind::give_back_later(held))) {
        ending::leaked(Kind::NAME, held.cache, held.c.word, ending::last_error());
    }
}

// Holds one object, moves, and gives it back at its end. `Kind` has NAME and give_back.
template <class Kind, class Held>
class Owner {
public:
    Owner() noexcept = default;
    Owner(Owner&& other) noexcept : held_(std::exchange(other.held_, Held{})) {}
    Owner& operator=(Owner&& other) noexcept {
        if (this != &other) {
            end();
            held_ = std::exchange(other.held_, Held{});
        }
        return *this;
    }
    ~Owner() { end(); }

    // Whether it holds one; not whether that is still good.
    explicit operator bool() const noexcept { return is_some(held_); }

protected:
    explicit Owner(Held held) noexcept : held_(held) {}

    // Gives back now. What could not be given back is kept, to try again.
    Result<void> give_back() noexcept {
        const kvpool_status_t status = Kind::give_back(held_);
        if (status == KVPOOL_OK) held_ = Held{};
        return result(status);
    }
    Held let_go() noexcept { return std::exchange(held_, Held{}); }

    Held held_ = {};

private:
    void end() noexcept {
        if (is_some(held_)) end_of<Kind>(held_);
        held_ = Held{};
    }
};

// A text of unknown length from `write(buffer, capacity, needed)`.
template <class F>
Result<std::string> text(F write) {
    size_t needed = 0;
    kvpool_status_t status = write(nullptr, size_t{0}, &needed);
    if (status != KVPOOL_OK) return Error::last();
    std::string text(needed, '\0');
    status = write(&text[0], text.size(), &needed);
    // Without the NUL.
    text.resize(needed == 0 ? 0 : needed - 1);
    return result(status, text);
}

// Settings as C wants them, for the length of a call.
struct Overrides {
    explicit Overrides(span<const std::string_view> settings) {
        for (const std::string_view setting : settings) texts.emplace_back(setting);
        for (const std::string& text : texts) pointers.push_back(text.c_str());
    }
    std::vector<std::string> texts;
    std::vector<const char*> pointers;
};

struct ConfigKind {
    static constexpr const char* NAME = "Config";
    static kvpool_status_t give_back(kvpool_config_t c) noexcept { return kvpool_config_destroy(c); }
    static kvpool_status_t give_back_at_end(kvpool_config_t c) noexcept { return give_back(c); }
};
struct PlanKind {
    static constexpr const char* NAME = "Plan";
    static kvpool_status_t give_back(kvpool_plan_t c) noexcept { return kvpool_plan_destroy(c); }
    static kvpool_status_t give_back_at_end(kvpool_plan_t c) noexcept { return give_back(c); }
};
struct SequenceKind {
    static constexpr const char* NAME = "Sequence";
    static kvpool_status_t give_back(const InCache<kvpool_seq_t>& held) noexcept {
        return kvpool_cache_release(held.cache, held.c);
    }
    static kvpool_status_t give_back_later(const InCache<kvpool_seq_t>& held) noexcept {
        return kvpool_cache_release_later(held.cache, held.c);
    }
};
struct PinKind {
    static constexpr const char* NAME = "Pin";
    static kvpool_status_t give_back(const InCache<kvpool_pin_t>& held) noexcept {
        return kvpool_cache_unpin(held.cache, held.c);
    }
    static kvpool_status_t give_back_later(const InCache<kvpool_pin_t>& held) noexcept {
        return kvpool_cache_unpin_later(held.cache, held.c);
    }
};
struct ReservationKind {
    static constexpr const char* NAME = "Reservation";
    static kvpool_status_t give_back(const InCache<kvpool_reservation_t>& held) noexcept {
        return kvpool_cache_cancel_reservation(held.cache, held.c);
    }
    static kvpool_status_t give_back_later(const InCache<kvpool_reservation_t>& held) noexcept {
        return kvpool_cache_cancel_reservation_later(held.cache, held.c);
    }
};
struct StepKind {
    static constexpr const char* NAME = "Step";
    static kvpool_status_t give_back(const InCache<kvpool_step_t>& held) noexcept {
        return kvpool_step_cancel(held.cache, held.c);
    }
    static kvpool_status_t give_back_later(const InCache<kvpool_step_t>& held) noexcept {
        return kvpool_step_cancel_later(held.cache, held.c);
    }
};

}  // namespace detail

// A configuration.
class Config : public detail::Owner<detail::ConfigKind, kvpool_config_t> {
public:
    Config() noexcept = default;
    // A TOML file; `overrides` are settings as "limits.max_seqs=8", which win over it.
    static Result<Config> load(std::string_view path, span<const std::string_view> overrides = {}) {
        if (auto right = check_library(); !right) return right.error();
        const std::string file(path);
        const detail::Overrides settings(overrides);
        kvpool_config_t c = {};
        const kvpool_status_t status =
            kvpool_config_load(file.c_str(), settings.pointers.data(), settings.pointers.size(), &c);
        return made(status, c);
    }
    // The text itself; `name` stands for the file in messages.
    static Result<Config> parse(std::string_view text, std::string_view name = "config.toml",
                                span<const std::string_view> overrides = {}) {
        if (auto right = check_library(); !right) return right.error();
        const std::string file(name);
        const detail::Overrides settings(overrides);
        kvpool_config_t c = {};
        const kvpool_status_t status = kvpool_config_parse(
            text.data(), text.size(), file.c_str(), settings.pointers.data(), settings.pointers.size(), &c);
        return made(status, c);
    }

    // The effective configuration, every default filled in: TOML, or JSON.
    Result<std::string> text(TextForm form = TextForm::text) const {
        return detail::text([&](char* buffer, size_t capacity, size_t* needed) {
            return kvpool_config_text(held_, static_cast<kvpool_text_form_t>(form), buffer, capacity, needed);
        });
    }
    Result<void> destroy() noexcept { return give_back(); }
    // Takes a plain handle into ownership.
    static Config own(kvpool_config_t c) noexcept { return Config(c); }
    kvpool_config_t detach() noexcept { return let_go(); }
    kvpool_config_t c() const noexcept { return held_; }

private:
    explicit Config(kvpool_config_t c) noexcept : Owner(c) {}
    static Result<Config> made(kvpool_status_t status, kvpool_config_t c) noexcept {
        if (status != KVPOOL_OK) return Error::last();
        return Config(c);
    }
};

// Every size and offset that a configuration leads to; nothing is allocated.
class Plan : public detail::Owner<detail::PlanKind, kvpool_plan_t> {
public:
    Plan() noexcept = default;
    static Result<Plan> create(const Config& config) noexcept {
        kvpool_plan_t c = {};
        if (kvpool_plan_new(config.c(), &c) != KVPOOL_OK) return Error::last();
        return Plan(c);
    }

    Result<PlanInfo> info() const noexcept {
        PlanInfo out = {};
        return detail::result(kvpool_plan_get_info(held_, KVPOOL_OUT(out)), out);
    }
    Result<GroupInfo> group(uint32_t group) const noexcept {
        GroupInfo out = {};
        return detail::result(kvpool_plan_get_group(held_, group, KVPOOL_OUT(out)), out);
    }
    // Without addresses.
    Result<Layer> layer(uint32_t layer) const noexcept {
        Layer out = {};
        return detail::result(kvpool_plan_get_layer(held_, layer, KVPOOL_OUT(out)), out);
    }
    // Blocks of a group that a sequence of `len` tokens may come to hold at most.
    Result<uint32_t> blocks_for(uint32_t group, uint32_t len) const noexcept {
        uint32_t out = 0;
        return detail::result(kvpool_plan_blocks_for(held_, group, len, &out), out);
    }
    // Rotates queries in host memory by their tokens' positions as K is rotated, bit for bit. `x` and `out`:
    // [tokens, heads, head_dim]; `out` may be `x`.
    Result<void> rotate(uint32_t layer, span<const uint32_t> positions, uint32_t heads, span<const float> x,
                        span<float> out) const noexcept {
        if (x.size() != out.size()) return Error(Status::wrong_shape, "rotate: `x` and `out` differ in size");
        return detail::result(kvpool_plan_rotate(held_, layer, positions.data(), positions.size(), heads,
                                                 x.data(), out.data(), x.size()));
    }
    // As people read it, or all its numbers as JSON.
    Result<std::string> text(TextForm form = TextForm::text) const {
        return detail::text([&](char* buffer, size_t capacity, size_t* needed) {
            return kvpool_plan_text(held_, static_cast<kvpool_text_form_t>(form), buffer, capacity, needed);
        });
    }
    Result<void> destroy() noexcept { return give_back(); }
    // Takes a plain handle into ownership.
    static Plan own(kvpool_plan_t c) noexcept { return Plan(c); }
    kvpool_plan_t detach() noexcept { return let_go(); }
    kvpool_plan_t c() const noexcept { return held_; }

private:
    explicit Plan(kvpool_plan_t c) noexcept : Owner(c) {}
};

// Keeps what is shareable of a sequence, whatever happens to the sequence.
class Pin : public detail::Owner<detail::PinKind, detail::InCache<kvpool_pin_t>> {
public:
    Pin() noexcept = default;
    Pin(kvpool_cache_t cache, PinId id) noexcept : Owner({cache, id.c()}) {}
    PinId id() const noexcept { return PinId(held_.c); }
    Result<void> unpin() noexcept {
        return give_back();
    }
    PinId detach() noexcept { return PinId(let_go().c); }
    kvpool_pin_t c() const noexcept { return held_.c; }
};

// A live sequence: released at its end.
class Sequence : public detail::Owner<detail::SequenceKind, detail::InCache<kvpool_seq_t>> {
public:
    Sequence() noexcept = default;
    Sequence(kvpool_cache_t cache, SeqId id) noexcept : Owner({cache, id.c()}) {}

    SeqId id() const noexcept { return SeqId(held_.c); }
    operator SeqId() const noexcept { return id(); }
    Result<SeqInfo> info() const noexcept {
        SeqInfo out = {};
        return detail::result(kvpool_seq_get_info(held_.cache, held_.c, KVPOOL_OUT(out)), out);
    }

    // A second sequence with the same tokens: blocks are shared until one of them writes.
    Result<Sequence> fork() noexcept {
        kvpool_seq_t c = {};
        if (kvpool_cache_fork(held_.cache, held_.c, &c) != KVPOOL_OK) return Error::last();
        return Sequence(held_.cache, SeqId(c));
    }
    // Rewinds to `len` tokens.
    Result<void> truncate(uint32_t len) noexcept {
        return detail::result(kvpool_cache_truncate(held_.cache, held_.c, len));
    }
    Result<Pin> pin() noexcept {
        kvpool_pin_t c = {};
        if (kvpool_cache_pin(held_.cache, held_.c, &c) != KVPOOL_OK) return Error::last();
        return Pin(held_.cache, PinId(c));
    }
    Result<void> set_retention(span<const Retention> retentions) noexcept {
        return detail::result(
            kvpool_cache_set_retention(held_.cache, held_.c, retentions.data(), retentions.size()));
    }
    Result<void> release() noexcept {
        return give_back();
    }
    SeqId detach() noexcept { return SeqId(let_go().c); }
    kvpool_seq_t c() const noexcept { return held_.c; }
};

// A sequence that has begun.
struct Begun {
    Sequence sequence;
    uint32_t cached_len = 0;  // tokens of the prompt that are in the cache: the first step appends from here
    uint32_t limit = 0;       // tokens that the sequence may have, look-ahead included
};

// A place that is kept for a sequence: cancelled at its end, unless begun.
class Reservation : public detail::Owner<detail::ReservationKind, detail::InCache<kvpool_reservation_t>> {
public:
    Reservation() noexcept = default;
    Reservation(kvpool_cache_t cache, ReservationId id) noexcept : Owner({cache, id.c()}) {}
    ReservationId id() const noexcept { return ReservationId(held_.c); }
    // Makes it a sequence. What fails leaves the reservation as it was.
    Result<Begun> begin() noexcept {
        kvpool_begun_t c = {};
        if (kvpool_cache_begin_reserved(held_.cache, held_.c, KVPOOL_OUT(c)) != KVPOOL_OK) {
            return Error::last();
        }
        return Begun{Sequence(let_go().cache, SeqId(c.sequence)), c.cached_len, c.limit};
    }
    Result<void> cancel() noexcept {
        return give_back();
    }
    ReservationId detach() noexcept { return ReservationId(let_go().c); }
    kvpool_reservation_t c() const noexcept { return held_.c; }
};

// A place, and what beginning there gives.
struct Admitted {
    Reservation reservation;
    Estimate estimate = {};
};

// The transaction in which tokens enter the cache: cancelled at its end, unless committed.
class Step : public detail::Owner<detail::StepKind, detail::InCache<kvpool_step_t>> {
public:
    Step() noexcept = default;

    Result<StepView> view() const noexcept {
        kvpool_step_view_t c = {};
        if (kvpool_step_get_view(held_.cache, held_.c, KVPOOL_OUT(c)) != KVPOOL_OK) return Error::last();
        return StepView{{c.positions, c.num_tokens}, {c.seq_lens, c.num_seqs}, {c.seqs, c.num_seqs}};
    }
    Result<StepGroup> group(uint32_t group) const noexcept {
        kvpool_step_group_t c = {};
        if (kvpool_step_get_group(held_.cache, held_.c, group, KVPOOL_OUT(c)) != KVPOOL_OK) {
            return Error::last();
        }
        return StepGroup{{c.token_slots, num_tokens_}, c.block_table, c.block_table_row};
    }
    Result<StepCsr> csr(uint32_t group) const noexcept {
        kvpool_step_csr_t c = {};
        if (kvpool_step_get_csr(held_.cache, held_.c, group, KVPOOL_OUT(c)) != KVPOOL_OK) {
            return Error::last();
        }
        return StepCsr{{c.kv_indptr, num_seqs_ + 1},
                       {c.kv_indices, c.num_indices},
                       {c.kv_last_block_len, num_seqs_},
                       {c.kv_first_position, num_seqs_}};
    }
    // CUDA: the tables in device memory, of a paged group's blocks in the forms that `wanted` names.
    Result<StepDevice> device(uint32_t group, Tables wanted = Tables::csr) const noexcept {
        StepDevice out = {};
        return detail::result(kvpool_step_get_device(held_.cache, held_.c, group,
                                                     static_cast<kvpool_tables_t>(wanted), KVPOOL_OUT(out)),
                              out);
    }

    // Stores K and V of the step's tokens, [num_tokens, num_kv_heads, head_dim] each. Once for each layer.
    Result<void> append(uint32_t layer, const TensorRef& k, const TensorRef& v) noexcept {
        return detail::result(kvpool_step_append(held_.cache, held_.c, layer, &k.c(), &v.c()));
    }
    // Declares that the caller's own kernels write them.
    Result<void> mark_appended(uint32_t layer) noexcept {
        return detail::result(kvpool_step_mark_appended(held_.cache, held_.c, layer));
    }
    Result<void> mark_all_appended() noexcept {
        return detail::result(kvpool_step_mark_all_appended(held_.cache, held_.c));
    }
    // Causal attention of the step's queries, [num_tokens, num_q_heads, head_dim], over all that their
    // sequences hold.
    Result<void> attend(uint32_t layer, const TensorRef& q, const TensorMut& out) noexcept {
        return detail::result(kvpool_step_attend(held_.cache, held_.c, layer, &q.c(), &out.c(), nullptr));
    }
    Result<void> attend(uint32_t layer, const TensorRef& q, const TensorMut& out,
                        const AttendOptions& options) noexcept {
        const kvpool_attend_options_t c = options.c();
        return detail::result(kvpool_step_attend(held_.cache, held_.c, layer, &q.c(), &out.c(), &c));
    }
    // CUDA: uploads what the kernels read, so that a graph can capture the rest.
    Result<void> prepare() noexcept { return detail::result(kvpool_step_prepare(held_.cache, held_.c)); }

    // Makes the tokens part of their sequences. The step is over, also when this fails, but for Status::busy.
    Result<void> commit() noexcept {
        const kvpool_status_t status = kvpool_step_commit(held_.cache, held_.c);
        if (status != KVPOOL_BUSY) let_go();
        return detail::result(status);
    }
    Result<void> cancel() noexcept { return give_back(); }

    uint32_t num_tokens() const noexcept { return num_tokens_; }
    uint32_t num_seqs() const noexcept { return num_seqs_; }
    kvpool_step_t detach() noexcept { return let_go().c; }
    kvpool_step_t c() const noexcept { return held_.c; }

private:
    friend class Cache;
    Step(kvpool_cache_t cache, kvpool_step_t c, uint32_t num_tokens, uint32_t num_seqs) noexcept
        : Owner({cache, c}), num_tokens_(num_tokens), num_seqs_(num_seqs) {}

    uint32_t num_tokens_ = 0;
    uint32_t num_seqs_ = 0;
};

}  // namespace KVPOOL_HPP_KIND
}  // namespace kvpool

#endif  // KVPOOL_OWNERS_HPP
