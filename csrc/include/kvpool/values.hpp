// Enumerations, options, and the structs that come out of the library. A part of kvpool.hpp.
//
// What comes out is the struct of kvpool.h with the fields described there; where one is an enumeration, a
// handle or absent by a flag, a function of the same name gives it as such.
#ifndef KVPOOL_VALUES_HPP
#define KVPOOL_VALUES_HPP

#include <cstring>
#include <functional>
#include <string>
#include <string_view>

#include "result.hpp"

namespace kvpool {
inline namespace KVPOOL_HPP_KIND {

enum class TextForm : int32_t { text = KVPOOL_TEXT, json = KVPOOL_JSON };
enum class Format : int32_t {
    f32 = KVPOOL_FORMAT_F32,
    f16 = KVPOOL_FORMAT_F16,
    bf16 = KVPOOL_FORMAT_BF16,
    int8 = KVPOOL_FORMAT_INT8
};
enum class Scale : int32_t {
    none = KVPOOL_SCALE_NONE,
    per_token_head = KVPOOL_SCALE_PER_TOKEN_HEAD,
    per_tensor = KVPOOL_SCALE_PER_TENSOR,
    per_group = KVPOOL_SCALE_PER_GROUP
};
enum class Mode : int32_t {
    contiguous = KVPOOL_MODE_CONTIGUOUS,
    paged = KVPOOL_MODE_PAGED,
    hybrid = KVPOOL_MODE_HYBRID
};
enum class Admission : int32_t {
    guaranteed = KVPOOL_GUARANTEED,
    max_utilization = KVPOOL_MAX_UTILIZATION,
    static_batch = KVPOOL_STATIC_BATCH
};
enum class Scrub : int32_t {
    off = KVPOOL_SCRUB_OFF,
    on_release = KVPOOL_SCRUB_ON_RELEASE,
    on_reuse = KVPOOL_SCRUB_ON_REUSE
};
enum class GroupKind : int32_t { contiguous = KVPOOL_CONTIGUOUS, paged = KVPOOL_PAGED };
enum class Addressing : int32_t { blocks = KVPOOL_BLOCKS, slot = KVPOOL_SLOT, ring = KVPOOL_RING };
enum class Reuse : int32_t {
    none = KVPOOL_REUSE_NONE,
    index = KVPOOL_REUSE_INDEX,
    attached = KVPOOL_REUSE_ATTACHED,
    donor = KVPOOL_REUSE_DONOR
};
enum class DeviceKind : int32_t { cpu = KVPOOL_CPU, cuda = KVPOOL_CUDA };
// Which tables of a step are wanted in device memory: Tables::csr | Tables::dense.
enum class Tables : uint32_t { csr = KVPOOL_TABLES_CSR, dense = KVPOOL_TABLES_DENSE };
constexpr Tables operator|(Tables a, Tables b) noexcept {
    return static_cast<Tables>(static_cast<uint32_t>(a) | static_cast<uint32_t>(b));
}
enum class Part : int32_t {
    k = KVPOOL_K,
    v = KVPOOL_V,
    k_scales = KVPOOL_K_SCALES,
    v_scales = KVPOOL_V_SCALES
};
enum class EventKind : int32_t {
    stored = KVPOOL_STORED,
    attached = KVPOOL_ATTACHED,
    removed = KVPOOL_REMOVED,
    cleared = KVPOOL_CLEARED
};

// Block `no_block` of a block table names no block.
inline constexpr uint32_t no_block = KVPOOL_NO_BLOCK;
inline constexpr uint32_t to_end = KVPOOL_TO_END;
inline constexpr uint64_t forever = KVPOOL_FOREVER;

// A stored INT8 scale as a number.
inline float scale_to_f32(uint16_t scale) noexcept { return kvpool_scale_to_f32(scale); }

// A handle of its own type: a value to copy, compare and keep in tables. It owns nothing, and is refused
// for ever once what it names is gone.
template <class C>
class Id {
public:
    constexpr Id() noexcept = default;
    constexpr explicit Id(C handle) noexcept : c_(handle) {}
    constexpr const C& c() const noexcept { return c_; }
    // Whether it was ever given out; not whether it is still good.
    constexpr explicit operator bool() const noexcept { return c_.word[0] != 0 || c_.word[1] != 0; }
    friend constexpr bool operator==(Id a, Id b) noexcept {
        return a.c_.word[0] == b.c_.word[0] && a.c_.word[1] == b.c_.word[1];
    }
    friend constexpr bool operator!=(Id a, Id b) noexcept { return !(a == b); }
    friend constexpr bool operator<(Id a, Id b) noexcept {
        return a.c_.word[0] != b.c_.word[0] ? a.c_.word[0] < b.c_.word[0] : a.c_.word[1] < b.c_.word[1];
    }

private:
    C c_ = {};
};
using SeqId = Id<kvpool_seq_t>;
using BlockId = Id<kvpool_block_t>;
using PinId = Id<kvpool_pin_t>;
using ReservationId = Id<kvpool_reservation_t>;

struct PlanInfo : kvpool_plan_info_t {
    Mode mode() const noexcept { return static_cast<Mode>(kvpool_plan_info_t::mode); }
    Format format() const noexcept { return static_cast<Format>(kvpool_plan_info_t::format); }
    Scale scale() const noexcept { return static_cast<Scale>(kvpool_plan_info_t::scale); }
    Admission admission() const noexcept { return static_cast<Admission>(kvpool_plan_info_t::admission); }
    bool prefix_reuse() const noexcept { return kvpool_plan_info_t::prefix_reuse != 0; }
    bool rope() const noexcept { return kvpool_plan_info_t::rope != 0; }
    Scrub scrub() const noexcept { return static_cast<Scrub>(kvpool_plan_info_t::scrub); }
};

struct GroupInfo : kvpool_group_info_t {
    GroupKind kind() const noexcept { return static_cast<GroupKind>(kvpool_group_info_t::kind); }
    Addressing addressing() const noexcept {
        return static_cast<Addressing>(kvpool_group_info_t::addressing);
    }
    Reuse reuse() const noexcept { return static_cast<Reuse>(kvpool_group_info_t::reuse); }
};

struct Layer : kvpool_layer_t {
    Format format() const noexcept { return static_cast<Format>(kvpool_layer_t::format); }
    Scale scale() const noexcept { return static_cast<Scale>(kvpool_layer_t::scale); }
    // Where the vector of a head at a token slot begins, in bytes behind `k` or `v`.
    uint64_t vector_offset(uint64_t token_slot, uint32_t head) const noexcept {
        return token_slot / unit_tokens * unit_stride + head * head_stride +
               token_slot % unit_tokens * token_stride;
    }
    // The same of its scales, behind `k_scales` or `v_scales`.
    uint64_t scale_offset(uint64_t token_slot, uint32_t head) const noexcept {
        return token_slot / unit_tokens * unit_stride + head * scale_head_stride +
               token_slot % unit_tokens * scale_token_stride;
    }
};

struct DeviceInfo : kvpool_device_info_t {
    DeviceKind kind() const noexcept { return static_cast<DeviceKind>(kvpool_device_info_t::kind); }
    bool huge_pages() const noexcept { return kvpool_device_info_t::huge_pages != 0; }
    bool emulated() const noexcept { return kvpool_device_info_t::emulated != 0; }
};

using SeqInfo = kvpool_seq_info_t;
using Probe = kvpool_probe_t;
using Estimate = kvpool_estimate_t;
using Stats = kvpool_stats_t;
using Saved = kvpool_saved_t;
using Restored = kvpool_restored_t;
using BatchSeq = kvpool_batch_seq_t;

struct GroupStats : kvpool_group_stats_t {
    Reuse reuse() const noexcept { return static_cast<Reuse>(kvpool_group_stats_t::reuse); }
};

struct Preempted : kvpool_preempted_t {
    // Stale now; of a reservation, none.
    SeqId sequence() const noexcept { return SeqId(kvpool_preempted_t::sequence); }
    std::optional<uint64_t> key() const noexcept {
        if (has_key == 0) return std::nullopt;
        return kvpool_preempted_t::key;
    }
    bool was_reservation() const noexcept { return kvpool_preempted_t::was_reservation != 0; }
};

// A salt, an adapter's or a model's id: absent, bytes (copied), or a number.
class KeyPart {
public:
    constexpr KeyPart() noexcept = default;
    // At most KVPOOL_KEY_BYTES; "" is not the same as absent.
    KeyPart(std::string_view bytes) noexcept
        : KeyPart(span<const uint8_t>(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size())) {}
    KeyPart(const std::string& bytes) noexcept : KeyPart(std::string_view(bytes)) {}
    KeyPart(const char* bytes) noexcept : KeyPart(std::string_view(bytes)) {}
    KeyPart(std::nullptr_t) = delete;
    KeyPart(span<const uint8_t> bytes) noexcept : kind_(KVPOOL_KEY_IS_BYTES) {
        // What is too long stays too long for the library, which refuses it by its length.
        num_bytes_ = static_cast<uint32_t>(bytes.size() < UINT32_MAX ? bytes.size() : UINT32_MAX);
        const size_t kept = bytes.size() < sizeof(bytes_) ? bytes.size() : sizeof(bytes_);
        if (kept > 0) std::memcpy(bytes_, bytes.data(), kept);
    }
    template <class N, std::enable_if_t<std::is_integral_v<N>, int> = 0>
    constexpr KeyPart(N number) noexcept
        : kind_(KVPOOL_KEY_IS_NUMBER), number_(static_cast<uint64_t>(number)) {}
    // As C takes it, with a pointer into this.
    kvpool_key_part_t c() const noexcept { return {kind_, num_bytes_, bytes_, number_}; }

private:
    kvpool_key_kind_t kind_ = KVPOOL_KEY_ABSENT;
    uint32_t num_bytes_ = 0;
    uint64_t number_ = 0;
    uint8_t bytes_[KVPOOL_KEY_BYTES] = {};
};

// Sequences share blocks only with those of the same namespace.
struct Namespace {
    KeyPart salt = {};
    KeyPart adapter = {};
    KeyPart model = {};
    uint32_t salt_from = 0;  // position of the first salted token, rounded down to a block

    kvpool_namespace_t c() const noexcept { return {salt.c(), adapter.c(), model.c(), salt_from, 0}; }
};

// How long a range of tokens is kept for others: Retention(90).tokens(0, 128).for_ms(60000).
struct Retention : kvpool_retention_t {
    explicit Retention(uint32_t its_priority) noexcept
        : kvpool_retention_t{0, KVPOOL_TO_END, its_priority, 0, KVPOOL_FOREVER} {}
    Retention& tokens(uint32_t first, uint32_t end) noexcept {
        from = first;
        to = end;
        return *this;
    }
    Retention& for_ms(uint64_t duration) noexcept {
        duration_ms = duration;
        return *this;
    }
};

// The engine's name of a sequence, or none.
class Key {
public:
    constexpr Key() noexcept = default;
    constexpr Key(uint64_t number) noexcept : number_(number), is_some_(true) {}
    constexpr bool is_some() const noexcept { return is_some_; }
    constexpr uint64_t number() const noexcept { return number_; }

private:
    uint64_t number_ = 0;
    bool is_some_ = false;
};

// How a save is made.
struct SaveOptions {
    KeyPart model = {};          // what computes K and V: a restore must give the same
    bool unsalted_only = false;  // leaves out what has a salt

    kvpool_save_options_t c() const noexcept {
        return {sizeof(kvpool_save_options_t), unsalted_only ? 1u : 0u, 0, model.c()};
    }
};

// How it is restored. Of a sequence: its key, and the tokens that it may come to; 0 = its old limit.
struct RestoreOptions {
    KeyPart model = {};
    Key key = {};
    uint32_t max_len = 0;

    kvpool_restore_options_t c() const noexcept {
        return {sizeof(kvpool_restore_options_t), key.number(), key.is_some() ? 1u : 0u, max_len, model.c()};
    }
};

// The ranges of a sequence, at most KVPOOL_MAX_RETENTIONS: copied, so that the braces they come in may go.
class Retentions {
public:
    Retentions() noexcept = default;
    Retentions(std::initializer_list<Retention> ranges) noexcept
        : Retentions(span<const Retention>(ranges.begin(), ranges.size())) {}
    // Of an array, a vector, a span.
    template <class C, std::enable_if_t<std::is_convertible_v<const C&, span<const Retention>>, int> = 0>
    Retentions(const C& ranges) noexcept : Retentions(Copied{}, ranges) {}

    uint32_t size() const noexcept { return size_; }
    const kvpool_retention_t* data() const noexcept { return ranges_; }

private:
    struct Copied {};
    Retentions(Copied, span<const Retention> ranges) noexcept {
        // One too many is enough for the library to refuse them.
        for (size_t i = 0; i < ranges.size() && size_ <= KVPOOL_MAX_RETENTIONS; ++i) {
            ranges_[size_++] = ranges[i];
        }
    }

    kvpool_retention_t ranges_[KVPOOL_MAX_RETENTIONS + 1] = {};
    uint32_t size_ = 0;
};

struct BeginOptions {
    Key key = {};                   // the engine's name; no two live sequences have the same
    uint32_t max_len = 0;           // prompt and output together; 0 = limits.max_seq_len
    uint32_t lookahead_tokens = 0;  // beyond max_len, that may be appended and rewound
    Retentions retentions = {};     // how long they are kept for others
    Namespace name_space = {};

    // As C takes it, with pointers into this.
    kvpool_begin_options_t c() const noexcept {
        kvpool_begin_options_t c = KVPOOL_BEGIN_OPTIONS_INIT;
        c.key = key.number();
        c.has_key = key.is_some() ? 1 : 0;
        c.max_len = max_len;
        c.lookahead_tokens = lookahead_tokens;
        c.num_retentions = retentions.size();
        c.retentions = retentions.data();
        c.name_space = name_space.c();
        return c;
    }
};

// One of begin_batch. The prompt is not copied: it is of something that stays, and not in braces.
struct BeginItem {
    BeginItem() noexcept = default;
    BeginItem(span<const uint32_t> its_prompt, const BeginOptions& its_options = {}) noexcept
        : prompt(its_prompt), options(its_options) {}
    BeginItem(std::initializer_list<uint32_t> prompt, const BeginOptions& options = {}) = delete;
    // A vector, or what else owns its values, that is gone when this is used.
    template <class C, std::enable_if_t<!std::is_lvalue_reference_v<C> && !std::is_trivially_copyable_v<C> &&
                                            std::is_convertible_v<C, span<const uint32_t>>,
                                        int> = 0>
    BeginItem(C&& prompt, const BeginOptions& options = {}) = delete;

    span<const uint32_t> prompt = {};
    BeginOptions options = {};
};

// A sequence and how many tokens it gets in a step.
struct StepItem : kvpool_step_item_t {
    StepItem(SeqId id, uint32_t tokens) noexcept : kvpool_step_item_t{id.c(), tokens, 0} {}
};

// The arrays of these are handed over as arrays of the C structs.
static_assert(sizeof(StepItem) == sizeof(kvpool_step_item_t));
static_assert(sizeof(Retention) == sizeof(kvpool_retention_t));

// What a step is made of: spans that are right until the step ends.
struct StepView {
    span<const uint32_t> positions;  // [num_tokens], what a position encoding must use
    span<const uint32_t> seq_lens;   // [num_seqs], the step's tokens included
    span<const BatchSeq> seqs;       // [num_seqs]
    uint32_t num_tokens() const noexcept { return static_cast<uint32_t>(positions.size()); }
    uint32_t num_seqs() const noexcept { return static_cast<uint32_t>(seqs.size()); }
};

// A layer group in a step.
struct StepGroup {
    span<const uint64_t> token_slots;  // [num_tokens]
    const uint32_t* block_table;       // [seq_slots, block_table_row], by slot; null in a contiguous group
    uint32_t block_table_row;

    // The blocks of a slot's sequence, by position / tokens_per_block.
    span<const uint32_t> row(uint32_t slot) const noexcept {
        return {block_table + size_t{slot} * block_table_row, block_table_row};
    }
};

// The blocks of a step's sequences in compressed sparse row form, as FlashInfer takes it.
struct StepCsr {
    span<const uint32_t> kv_indptr;          // [num_seqs + 1]
    span<const uint32_t> kv_indices;         // [kv_indptr[num_seqs]]
    span<const uint32_t> kv_last_block_len;  // [num_seqs]
    span<const uint32_t> kv_first_position;  // [num_seqs]
};

using StepDevice = kvpool_step_device_t;

// What happened to a block. Right during the call that hands it over.
struct Event {
    uint64_t number;  // counts from 0; a gap is what was lost
    EventKind kind;
    uint32_t group;
    uint32_t block;
    std::optional<uint32_t> parent;  // none at the start of a prompt
    uint32_t name_space;             // the number of the namespace that begins here; 0 = the parent's
    span<const uint32_t> tokens;
};

struct EventCount {
    uint64_t delivered;
    uint64_t lost;  // overwritten before they were polled: resync_events
};

// The numbers under which a namespace stands in events; 0 = nothing of it is cached.
struct NamespaceNumbers {
    uint32_t first;
    uint32_t first_salted;
};

}  // namespace KVPOOL_HPP_KIND
}  // namespace kvpool

template <class C>
struct std::hash<kvpool::Id<C>> {
    size_t operator()(const kvpool::Id<C>& id) const noexcept {
        const uint64_t mixed = (id.c().word[0] ^ (id.c().word[1] << 32 | id.c().word[1] >> 32));
        return static_cast<size_t>(mixed * 0x9E3779B97F4A7C15u >> 16);
    }
};

#endif  // KVPOOL_VALUES_HPP
