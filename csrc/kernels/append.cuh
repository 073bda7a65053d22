// Storing K and V of a step, quantised on the way where the format asks for it.
//
// A warp takes the K or the V of one token, and goes through its heads. A vector is spread over a
// power of two of lanes, eight elements each at a time, so that short vectors share a warp and
// every access of a vector is of neighbouring bytes. The largest magnitude is found in registers
// with shuffles: each element is read once and stored once. INT8 bytes and scales are those of the
// CPU, bit for bit.
#pragma once

#include "kv_view.cuh"
#include "numbers.cuh"

namespace kvpool {

// Eight f32 are two pieces of 16 bytes, and a sector is both. So that each access of the warp is of
// whole sectors, two neighbouring lanes first access the even one's eight together, then the odd
// one's. Every lane of the warp comes here; `has`: whether it has something to load or store at
// all.
struct PairedOctet {
    bool odd;
    bool has[2];  // of the first access, of the second
    uint64_t at[2];
    KV_DEVICE PairedOctet(bool own, uint64_t address) {
        odd = dev::lane_index() % 2 != 0;
        const bool other = dev::shuffle_xor(own ? 1u : 0u, 1) != 0;
        const uint64_t other_address = dev::shuffle_xor(address, 1);
        has[0] = odd ? other : own;
        has[1] = odd ? own : other;
        at[0] = odd ? other_address + 16 : address;
        at[1] = odd ? address + 16 : other_address;
    }
};
struct Pieces {
    uint32_t word[2][4];
    // The lane keeps piece `odd` of its own eight, and swaps the other one with its neighbour.
    KV_DEVICE void swap(bool odd) {
        KV_UNROLL
        for (int i = 0; i < 4; ++i) {
            const uint32_t other = dev::shuffle_xor(odd ? word[0][i] : word[1][i], 1);
            word[0][i] = odd ? other : word[0][i];
            word[1][i] = odd ? word[1][i] : other;
        }
    }
};

// Eight elements of f32, f16 or bf16 as f32, where the lane has them.
template <class Src>
KV_DEVICE void load_octet(bool has, uint64_t at, float (&x)[8]) {
    if constexpr (SAME<Src, F32>) {
        const PairedOctet pair(has, at);
        Pieces pieces = {};
        KV_UNROLL
        for (int access = 0; access < 2; ++access) {
            if (pair.has[access]) {
                const auto raw =
                    dev::load_once(dev::at_address<const dev::Bytes16>(pair.at[access]));
                KV_UNROLL
                for (int i = 0; i < 4; ++i) {
                    pieces.word[access][i] = raw.word[i];
                }
            }
        }
        pieces.swap(pair.odd);
        KV_UNROLL
        for (int i = 0; i < 8; ++i) {
            x[i] = dev::bits_to_f32(pieces.word[i / 4][i % 4]);
        }
    } else if (has) {
        const auto raw = dev::load_once(dev::at_address<const dev::Bytes16>(at));
        KV_UNROLL
        for (int i = 0; i < 4; ++i) {
            const dev::Float2 pair =
                SAME<Src, F16> ? dev::unpack_f16(raw.word[i]) : dev::unpack_bf16(raw.word[i]);
            x[2 * i] = pair.x;
            x[2 * i + 1] = pair.y;
        }
    }
}

template <class Fmt>
KV_DEVICE void store_octet(bool has, uint64_t at, const float (&x)[8]) {
    if constexpr (SAME<Fmt, F32>) {
        const PairedOctet pair(has, at);
        Pieces pieces;
        KV_UNROLL
        for (int i = 0; i < 8; ++i) {
            pieces.word[i / 4][i % 4] = dev::f32_to_bits(x[i]);
        }
        pieces.swap(pair.odd);
        KV_UNROLL
        for (int access = 0; access < 2; ++access) {
            if (pair.has[access]) {
                const uint32_t (&word)[4] = pieces.word[access];
                const dev::Bytes16 raw = {{word[0], word[1], word[2], word[3]}};
                dev::store_global(dev::at_address<dev::Bytes16>(pair.at[access]), raw);
            }
        }
    } else if (has) {
        dev::Bytes16 raw;
        KV_UNROLL
        for (int i = 0; i < 4; ++i) {
            raw.word[i] = SAME<Fmt, F16> ? dev::pack_f16(x[2 * i], x[2 * i + 1])
                                         : dev::pack_bf16(x[2 * i], x[2 * i + 1]);
        }
        dev::store_global(dev::at_address<dev::Bytes16>(at), raw);
    }
}

// How a vector lies on the lanes: lane `lane` of `lanes` has the octets lane, lane + lanes, ….
struct Spread {
    uint32_t octets;  // of a vector
    uint32_t lanes;   // a power of two
    uint32_t steps;   // octets of a lane, at most
    uint32_t lane;
    KV_DEVICE explicit Spread(uint32_t head_dim) : octets(head_dim / 8), lanes(1) {
        while (lanes < octets && lanes < dev::WARP) {
            lanes *= 2;
        }
        steps = (octets + lanes - 1) / lanes;
        lane = dev::lane_index() % lanes;
    }
};

// Rotates one octet of a K vector. row: the vector's first byte; cos, sin: this position's.
// [rope_dims / 2] Every lane of the warp comes here.
template <class Src>
KV_DEVICE void rotate(const KvpoolAppendParams& p, bool has, uint64_t row, uint32_t octet,
                      uint64_t position, float (&x)[8]) {
    const uint32_t half = p.rope_dims / 2;
    const uint32_t first = octet * 8;
    const bool turned = has && first < p.rope_dims;
    const uint64_t cos = p.rope_cos + position * half * 4, sin = p.rope_sin + position * half * 4;
    if (p.rope == KVPOOL_ROPE_PAIRS) {
        KV_UNROLL
        for (int i = 0; i < 4 && turned; ++i) {
            const uint64_t pair = first / 2 + i;
            const float c = dev::load_readonly(dev::at_address<const float>(cos + pair * 4));
            const float s = dev::load_readonly(dev::at_address<const float>(sin + pair * 4));
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = dev::fma_f32(a, c, -(b * s));
            x[2 * i + 1] = dev::fma_f32(a, s, b * c);
        }
        return;
    }
    // The other halves lie in another lane; they are read again, and lie in the nearest cache.
    const bool upper = first >= half;
    const uint32_t pair = upper ? first - half : first;
    float other[8] = {};
    load_octet<Src>(turned, row + (upper ? pair : first + half) * (SAME<Src, F32> ? 4 : 2), other);
    KV_UNROLL
    for (int i = 0; i < 8 && turned; ++i) {
        const float c = dev::load_readonly(dev::at_address<const float>(cos + (pair + i) * 4));
        const float s = dev::load_readonly(dev::at_address<const float>(sin + (pair + i) * 4));
        const float a = upper ? other[i] : x[i], b = upper ? x[i] : other[i];
        x[i] = upper ? dev::fma_f32(a, s, b * c) : dev::fma_f32(a, c, -(b * s));
    }
}

// Copies a vector as it is, 16 bytes at a time.
KV_DEVICE void copy_vector(uint64_t to, uint64_t from, uint32_t bytes, const Spread& spread) {
    for (uint32_t at = spread.lane * 16; at < bytes; at += spread.lanes * 16) {
        const auto raw = dev::load_once(dev::at_address<const dev::Bytes16>(from + at));
        dev::store_global(dev::at_address<dev::Bytes16>(to + at), raw);
    }
}

// The largest over `lanes` neighbouring lanes, a power of two.
KV_DEVICE uint32_t max_over(uint32_t value, uint32_t lanes) {
    KV_UNROLL
    for (uint32_t mask = 16; mask > 0; mask /= 2) {
        const uint32_t other = dev::shuffle_xor(value, mask);
        value = mask < lanes && other > value ? other : value;
    }
    return value;
}

// One vector on its way: where it comes from and where it goes.
struct Vector {
    bool live;     // whether this lane has one at all; it takes part in shuffles anyway
    bool rotated;  // K, with RoPE
    float static_scale;
    uint32_t position;
    uint64_t from;  // [head_dim] of Src
    uint64_t row;
    uint64_t scales;
};

// Whether K is rotated is the same for the whole warp.
template <class Src>
KV_DEVICE void load_rotated(const KvpoolAppendParams& p, const Vector& vector, bool has,
                            uint32_t octet, float (&x)[8]) {
    load_octet<Src>(has, vector.from + octet * (SAME<Src, F32> ? 32 : 16), x);
    if (vector.rotated) {
        rotate<Src>(p, has, vector.from, octet, vector.position, x);
    }
}

// The largest finite magnitude, as bits: magnitudes are ordered as their bits are.
KV_DEVICE uint32_t largest_bits(const float (&x)[8]) {
    uint32_t amax = 0;
    KV_UNROLL
    for (int i = 0; i < 8; ++i) {
        const uint32_t bits = dev::f32_to_bits(x[i]) & 0x7FFFFFFFu;
        amax = bits < INFINITY_BITS && bits > amax ? bits : amax;
    }
    return amax;
}

// Elements that are not finite, and finite ones beyond a static scale's range.
struct Counts {
    uint32_t nonfinite = 0;
    uint32_t saturated = 0;
    KV_DEVICE void add(const float (&x)[8], float limit) {
        KV_UNROLL
        for (int i = 0; i < 8; ++i) {
            const uint32_t bits = dev::f32_to_bits(x[i]) & 0x7FFFFFFFu;
            const bool finite = bits < INFINITY_BITS;
            nonfinite += finite ? 0 : 1;
            saturated += finite && dev::bits_to_f32(bits) > limit ? 1 : 0;
        }
    }
};

// Quantises a vector and stores bytes and scales. Which scales there are is the same for the whole
// launch, so all lanes of the warp come to the same shuffles.
template <class Src>
KV_DEVICE void append_int8(const KvpoolAppendParams& p, const Spread& spread, const Vector& vector,
                           Counts& counts) {
    const uint32_t kind = p.group.scale;
    float x[8] = {};
    uint32_t amax = 0;
    if (kind == KVPOOL_SCALE_PER_TOKEN_HEAD) {
        KV_UNROLL_BY(1)
        for (uint32_t step = 0; step < spread.steps; ++step) {
            const uint32_t octet = spread.lane + step * spread.lanes;
            const bool has = vector.live && octet < spread.octets;
            load_rotated<Src>(p, vector, has, octet, x);
            const uint32_t bits = largest_bits(x);
            amax = has && bits > amax ? bits : amax;
        }
        amax = max_over(amax, spread.lanes);
    }
    // What one lane holds in one piece is not read again.
    const bool held = kind == KVPOOL_SCALE_PER_TOKEN_HEAD && spread.steps == 1;
    KV_UNROLL_BY(1)
    for (uint32_t step = 0; step < spread.steps; ++step) {
        const uint32_t octet = spread.lane + step * spread.lanes;
        const bool has = vector.live && octet < spread.octets;
        if (!held) {
            load_rotated<Src>(p, vector, has, octet, x);
        }
        if (kind == KVPOOL_SCALE_PER_GROUP_32) {
            amax = max_over(has ? largest_bits(x) : 0, KVPOOL_SCALE_GROUP / 8);
        }
        if (!has) {
            continue;
        }
        float scale = vector.static_scale;
        float limit = F32_MAX;
        if (kind == KVPOOL_SCALE_PER_TENSOR) {
            limit = Q_MAX * scale;
        } else {
            const uint16_t stored = scale_round_up(dev::bits_to_f32(amax) / Q_MAX);
            scale = scale_to_f32(stored);
            const bool groups = kind == KVPOOL_SCALE_PER_GROUP_32;
            if (groups ? octet % 4 == 0 : octet == 0) {
                const uint64_t which = groups ? octet / 4 : 0;
                dev::store_global(dev::at_address<uint16_t>(vector.scales) + which, stored);
            }
        }
        counts.add(x, limit);
        dev::Bytes8 raw = {{0, 0}};
        if (scale != 0.0f) {
            KV_UNROLL
            for (int i = 0; i < 8; ++i) {
                raw.word[i / 4] |= quantize(x[i], scale) << (8 * (i % 4));
            }
        }
        dev::store_global(dev::at_address<dev::Bytes8>(vector.row) + octet, raw);
    }
}

// Stores a vector of another format than INT8.
template <class Src, class Fmt>
KV_DEVICE void append_float(const KvpoolAppendParams& p, const Spread& spread,
                            const Vector& vector) {
    if (SAME<Src, Fmt> && !vector.rotated) {
        // Nothing to convert: NaN keep their bits.
        if (vector.live) {
            copy_vector(vector.row, vector.from, p.group.row_bytes, spread);
        }
        return;
    }
    KV_UNROLL_BY(1)
    for (uint32_t step = 0; step < spread.steps; ++step) {
        const uint32_t octet = spread.lane + step * spread.lanes;
        const bool has = vector.live && octet < spread.octets;
        float x[8] = {};
        load_rotated<Src>(p, vector, has, octet, x);
        store_octet<Fmt>(has, vector.row + octet * 8 * Fmt::BYTES, x);
    }
}

// The sums over the warp, added to the launch's.
KV_DEVICE void add_counts(const KvpoolAppendParams& p, Counts counts) {
    KV_UNROLL
    for (uint32_t mask = 16; mask > 0; mask /= 2) {
        counts.nonfinite += dev::shuffle_xor(counts.nonfinite, mask);
        counts.saturated += dev::shuffle_xor(counts.saturated, mask);
    }
    if (dev::lane_index() == 0 && counts.nonfinite != 0) {
        dev::atomic_add(dev::at_address<uint64_t>(p.counts),
                        static_cast<uint64_t>(counts.nonfinite));
    }
    if (dev::lane_index() == 0 && counts.saturated != 0) {
        dev::atomic_add(dev::at_address<uint64_t>(p.counts + 8),
                        static_cast<uint64_t>(counts.saturated));
    }
}

// Stores K and V of a step in one layer. Any grid; blocks of whole warps.
template <class Src, class Fmt>
KV_DEVICE void append(const KvpoolAppendParams& p) {
    const KvpoolKvGroup& group = p.group;
    const uint32_t heads = group.num_kv_heads;
    const uint32_t num_tokens = count_at(p.num_tokens_at, p.num_tokens);
    const uint32_t warps = dev::block_dim_x() / dev::WARP * dev::grid_dim_x();
    const uint32_t warp = dev::block_x() * (dev::block_dim_x() / dev::WARP) + dev::warp_index();
    const Spread spread(group.head_dim);
    const uint32_t at_once = dev::WARP / spread.lanes;  // vectors of a warp
    const uint64_t vector_bytes = static_cast<uint64_t>(group.head_dim) * (SAME<Src, F32> ? 4 : 2);
    Counts counts;

    KV_UNROLL_BY(1)
    for (uint64_t work = warp; work < 2ull * num_tokens; work += warps) {
        const bool is_v = work >= num_tokens;
        const uint64_t token = is_v ? work - num_tokens : work;
        Vector vector;
        vector.rotated = p.rope != KVPOOL_ROPE_NONE && !is_v;
        vector.static_scale = is_v ? p.v_scale : p.k_scale;
        // One lane reads for all: this counts beside short vectors.
        uint64_t slot = 0;
        vector.position = 0;
        if (dev::lane_index() == 0) {
            slot = dev::load_readonly(dev::at_address<const uint64_t>(p.token_slots) + token);
            if (vector.rotated) {
                vector.position =
                    dev::load_readonly(dev::at_address<const uint32_t>(p.positions) + token);
            }
        }
        slot = dev::shuffle(slot, 0);
        vector.position = dev::shuffle(vector.position, 0);
        const Place place = {static_cast<uint32_t>(slot / group.unit_tokens),
                             static_cast<uint32_t>(slot % group.unit_tokens)};
        KV_UNROLL_BY(1)
        for (uint32_t first = 0; first < heads; first += at_once) {
            const uint32_t head = first + dev::lane_index() / spread.lanes;
            vector.live = head < heads;
            const HeadRows rows(group, p.pool, p.layer, vector.live ? head : 0);
            vector.from = (is_v ? p.v : p.k) + (token * heads + head) * vector_bytes;
            vector.row = rows.row(place) + (is_v ? rows.to_v : 0);
            vector.scales = rows.scale(place) + (is_v ? rows.scales_to_v : 0);
            if constexpr (SAME<Fmt, Int8>) {
                append_int8<Src>(p, spread, vector, counts);
            } else {
                append_float<Src, Fmt>(p, spread, vector);
            }
        }
    }
    if constexpr (SAME<Fmt, Int8>) {
        add_counts(p, counts);
    }
}

}  // namespace kvpool
