// From positions to places and from places to addresses: the twin of src/plan/layout.rs.
//
// A *unit* is a block (paged) or a sequence's whole slot (contiguous), and both have the same
// inside:
// `[layer in group][K, V][kv head][token][head_dim]`, then the scales. So there is one address
// formula (HeadRows), and two views with the same methods that find a position's unit and token:
// PagedView through the block table, ContiguousView by arithmetic alone.
#pragma once

#include "device.cuh"
#include "params.h"

namespace kvpool {

// A token's place: the unit, and the token within it.
struct Place {
    uint32_t unit;
    uint32_t token;
};

// A block table in global memory. block(i): entry i
struct GlobalTable {
    const uint32_t* entries;  // [blocks of the sequence]
    KV_DEVICE uint32_t block(uint32_t index) const { return dev::load_readonly(entries + index); }
};

// A piece of a block table in shared memory, that begins with entry `first`.
struct SharedTable {
    const uint32_t* entries;  // [blocks of the piece]
    uint32_t first;
    KV_DEVICE uint32_t block(uint32_t index) const { return entries[index - first]; }
};

// A sequence whose tokens lie in blocks.
template <class Table>
struct PagedView {
    Table table;
    uint32_t shift;  // log2 of a block's tokens
    KV_DEVICE PagedView(const KvpoolKvGroup& group, Table table)
        : table(table), shift(group.unit_shift) {}
    KV_DEVICE void begin_at(uint32_t) {}
    KV_DEVICE Place place(uint32_t position) const {
        return {table.block(position >> shift), position & ((1u << shift) - 1u)};
    }
};

// A sequence whose tokens lie in its slot: all of them, or sinks and then a ring of the latest.
struct ContiguousView {
    uint32_t unit;
    uint32_t sink_tokens;
    uint32_t ring_tokens;  // 0: the slot holds every position
    // A position behind the sinks, and its place in the ring: those near to it need no division.
    uint32_t anchor = 0;
    uint32_t anchor_behind = 0;

    KV_DEVICE ContiguousView(const KvpoolKvGroup& group, uint32_t unit)
        : unit(unit), sink_tokens(group.sink_tokens), ring_tokens(group.ring_tokens) {}
    // Makes place() cheap for positions shortly behind `position`, and allows none before it.
    KV_DEVICE void begin_at(uint32_t position) {
        if (ring_tokens != 0) {
            anchor = position > sink_tokens ? position : sink_tokens;
            anchor_behind = (anchor - sink_tokens) % ring_tokens;
        }
    }
    KV_DEVICE Place place(uint32_t position) const {
        if (ring_tokens == 0 || position < sink_tokens) {
            return {unit, position};
        }
        uint32_t behind = anchor_behind + (position - anchor);
        while (behind >= ring_tokens) {
            behind -= ring_tokens;
        }
        return {unit, sink_tokens + behind};
    }
};

// Addresses of one layer's and KV head's vectors and scales.
struct HeadRows {
    uint64_t rows;    // the K vector of unit 0, token 0
    uint64_t scales;  // its first scale
    uint64_t unit_bytes;
    uint64_t to_v;         // from a K vector to its V vector
    uint64_t scales_to_v;  // from a K vector's scales to its V vector's
    uint32_t row_bytes;    // from a token to the next
    uint32_t scale_bytes;  // from a token's scales to the next one's

    KV_DEVICE HeadRows(const KvpoolKvGroup& group, uint64_t pool, uint32_t layer, uint32_t head) {
        const uint64_t first = pool + group.base;
        rows = first + layer * group.layer_stride + head * group.head_stride;
        unit_bytes = group.unit_bytes;
        to_v = group.kv_stride;
        row_bytes = group.row_bytes;
        scale_bytes = group.scales_per_row * KVPOOL_SCALE_BYTES;
        const uint64_t head_scales = static_cast<uint64_t>(group.unit_tokens) * scale_bytes;
        const uint64_t index = static_cast<uint64_t>(layer) * 2u * group.num_kv_heads + head;
        scales = first + group.scales_at + index * head_scales;
        scales_to_v = head_scales * group.num_kv_heads;
    }
    // The K vector of a place.
    KV_DEVICE uint64_t row(Place place) const {
        return rows + place.unit * unit_bytes + static_cast<uint64_t>(place.token) * row_bytes;
    }
    // The first scale of the K vector of a place.
    KV_DEVICE uint64_t scale(Place place) const {
        return scales + place.unit * unit_bytes + static_cast<uint64_t>(place.token) * scale_bytes;
    }
};

// The positions that a query sees: `0..sinks` and `from..=its own`.
struct Visible {
    uint32_t sinks;
    uint32_t from;
};

// `window` counts the keys a query may see, itself included; 0 = all.
KV_HOST_DEVICE Visible visible(uint32_t position, uint32_t window, uint32_t sink_tokens) {
    if (window == 0 || position < window) {
        return {0, 0};
    }
    const uint32_t from = position + 1 - window;
    if (from <= sink_tokens) {
        return {0, 0};
    }
    return {sink_tokens, from};
}

// Whether a query at `position` sees a key.
KV_HOST_DEVICE bool sees(Visible seen, uint32_t position, uint32_t key) {
    return key <= position && (key >= seen.from || key < seen.sinks);
}

// A count that may lie in device memory, so that a captured graph can be launched again with
// another.
KV_DEVICE uint32_t count_at(uint64_t address, uint32_t otherwise) {
    return address == 0 ? otherwise : dev::load_readonly(dev::at_address<const uint32_t>(address));
}

}  // namespace kvpool
