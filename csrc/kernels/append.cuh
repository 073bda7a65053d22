// Storing K and V of a step, quantised on the way where the format asks for it.
//
// A warp takes the K or the V of one token, and goes through its heads. A vector is spread over a power
// of two of lanes, eight elements each at a time, so that short vectors share a warp and every access
// of a vector is of neighbouring bytes. The largest magnitude is found in registers with shuffles: each
// element is read once and stored once. INT8 bytes and scales are those of the CPU, bit for bit.
#pragma once

#include "kv_view.cuh"
#include "numbers.cuh"

namespace kvpool {

// Eight elements of f32, f16 or bf16 as f32. The address is aligned to their size, 16 at most.
template <class Src>
KV_DEVICE void load_octet(uint64_t at, float (&x)[8]) {
    if constexpr (SAME<Src, F32>) {
        KV_UNROLL
        for (int half = 0; half < 2; ++half) {
            const auto raw = dev::load_once(dev::at_address<const dev::Bytes16>(at + 16 * half));
            KV_UNROLL
            for (int i = 0; i < 4; ++i) {
                x[4 * half + i] = dev::bits_to_f32(raw.word[i]);
            }
        }
    } else {
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
KV_DEVICE void store_octet(uint64_t at, const float (&x)[8]) {
    if constexpr (SAME<Fmt, F32>) {
        KV_UNROLL
        for (int half = 0; half < 2; ++half) {
            dev::Bytes16 raw;
            KV_UNROLL
            for (int i = 0; i < 4; ++i) {
                raw.word[i] = dev::f32_to_bits(x[4 * half + i]);
            }
            dev::store_global(dev::at_address<dev::Bytes16>(at + 16 * half), raw);
        }
    } else {
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
    uint32_t lane;
    KV_DEVICE bool has(int step) const { return lane + step * lanes < octets; }
    KV_DEVICE uint32_t octet(int step) const { return lane + step * lanes; }
};

// Rotates one octet of a K vector. row: the vector's first byte; cos, sin: this position's. [rope_dims / 2]
template <class Src>
KV_DEVICE void rotate(const KvpoolAppendParams& p, uint64_t row, uint32_t octet, uint64_t position,
                      float (&x)[8]) {
    const uint32_t half = p.rope_dims / 2;
    const uint32_t first = octet * 8;
    if (first >= p.rope_dims) {
        return;
    }
    const uint64_t cos = p.rope_cos + position * half * 4, sin = p.rope_sin + position * half * 4;
    if (p.rope == KVPOOL_ROPE_PAIRS) {
        KV_UNROLL
        for (int i = 0; i < 4; ++i) {
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
    float other[8];
    load_octet<Src>(row + (upper ? pair : first + half) * (SAME<Src, F32> ? 4 : 2), other);
    KV_UNROLL
    for (int i = 0; i < 8; ++i) {
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

// Quantises a vector and stores bytes and scales. row, scales: where they go.
template <int STEPS>
KV_DEVICE void store_int8(const KvpoolAppendParams& p, const Spread& spread, bool live, uint64_t row,
                          uint64_t scales, float static_scale, const float (&x)[STEPS][8],
                          uint32_t& nonfinite, uint32_t& saturated) {
    const uint32_t kind = p.group.scale;
    const float limit = Q_MAX * static_scale;
    uint32_t amax[STEPS];
    uint32_t amax_all = 0;
    KV_UNROLL
    for (int step = 0; step < STEPS; ++step) {
        amax[step] = 0;
        if (live && spread.has(step)) {
            KV_UNROLL
            for (int i = 0; i < 8; ++i) {
                // Magnitudes are ordered as their bits are.
                const uint32_t bits = dev::f32_to_bits(x[step][i]) & 0x7FFFFFFFu;
                const bool finite = bits < INFINITY_BITS;
                nonfinite += finite ? 0 : 1;
                amax[step] = finite && bits > amax[step] ? bits : amax[step];
                const bool beyond = finite && dev::bits_to_f32(bits) > limit;
                saturated += kind == KVPOOL_SCALE_PER_TENSOR && beyond ? 1 : 0;
            }
        }
        amax_all = amax[step] > amax_all ? amax[step] : amax_all;
    }
    // Shuffles are for all lanes of the warp, so the branch is of the whole launch.
    if (kind == KVPOOL_SCALE_PER_TOKEN_HEAD) {
        amax_all = max_over(amax_all, spread.lanes);
    } else if (kind == KVPOOL_SCALE_PER_GROUP_32) {
        KV_UNROLL
        for (int step = 0; step < STEPS; ++step) {
            amax[step] = max_over(amax[step], KVPOOL_SCALE_GROUP / 8);
        }
    }
    KV_UNROLL
    for (int step = 0; step < STEPS; ++step) {
        if (!live || !spread.has(step)) {
            continue;
        }
        const uint32_t octet = spread.octet(step);
        float scale = static_scale;
        if (kind != KVPOOL_SCALE_PER_TENSOR) {
            const bool groups = kind == KVPOOL_SCALE_PER_GROUP_32;
            const float largest = dev::bits_to_f32(groups ? amax[step] : amax_all);
            const uint16_t stored = scale_round_up(largest / Q_MAX);
            scale = scale_to_f32(stored);
            const uint32_t which = groups ? octet / 4 : 0;
            if (groups ? octet % 4 == 0 : octet == 0) {
                dev::store_global(dev::at_address<uint16_t>(scales + which * KVPOOL_SCALE_BYTES), stored);
            }
        }
        dev::Bytes8 raw = {{0, 0}};
        if (scale != 0.0f) {
            KV_UNROLL
            for (int i = 0; i < 8; ++i) {
                raw.word[i / 4] |= quantize(x[step][i], scale) << (8 * (i % 4));
            }
        }
        dev::store_global(dev::at_address<dev::Bytes8>(row + octet * 8), raw);
    }
}

// STEPS: octets of a lane, at most.
template <class Src, class Fmt, int STEPS>
KV_DEVICE void append_rows(const KvpoolAppendParams& p) {
    constexpr uint32_t SRC_BYTES = SAME<Src, F32> ? 4 : 2;
    const KvpoolKvGroup& group = p.group;
    const uint32_t heads = group.num_kv_heads;
    const uint32_t num_tokens =
        p.num_tokens_at == 0 ? p.num_tokens
                             : dev::load_readonly(dev::at_address<const uint32_t>(p.num_tokens_at));
    const uint32_t warps = dev::block_dim_x() / dev::WARP * dev::grid_dim_x();
    const uint32_t warp = dev::block_x() * (dev::block_dim_x() / dev::WARP) + dev::warp_index();

    Spread spread;
    spread.octets = group.head_dim / 8;
    spread.lanes = 1;
    while (spread.lanes < spread.octets && spread.lanes < dev::WARP) {
        spread.lanes *= 2;
    }
    spread.lane = dev::lane_index() % spread.lanes;
    const uint32_t at_once = dev::WARP / spread.lanes;  // vectors of a warp
    const uint32_t own = dev::lane_index() / spread.lanes;
    const uint32_t octet_bytes = 8 * group.element_bytes;
    uint32_t nonfinite = 0, saturated = 0;

    KV_UNROLL_BY(1)
    for (uint64_t work = warp; work < 2ull * num_tokens; work += warps) {
        const bool is_v = work >= num_tokens;
        const uint64_t token = is_v ? work - num_tokens : work;
        // One lane reads it for all: it counts beside short vectors.
        uint64_t slot = 0;
        uint32_t position = 0;
        if (dev::lane_index() == 0) {
            slot = dev::load_readonly(dev::at_address<const uint64_t>(p.token_slots + token * 8));
            if (p.rope != KVPOOL_ROPE_NONE && !is_v) {
                position = dev::load_readonly(dev::at_address<const uint32_t>(p.positions + token * 4));
            }
        }
        slot = dev::shuffle(slot, 0);
        position = dev::shuffle(position, 0);
        const Place place = {static_cast<uint32_t>(slot / group.unit_tokens),
                             static_cast<uint32_t>(slot % group.unit_tokens)};
        const uint64_t tensor = is_v ? p.v : p.k;
        const uint64_t token_bytes = static_cast<uint64_t>(heads) * group.head_dim * SRC_BYTES;
        const uint64_t from = tensor + token * token_bytes;

        // Loads of two vectors are under way at once, where there are registers for it.
        KV_UNROLL_BY((STEPS == 1 ? 2 : 1))
        for (uint32_t first = 0; first < heads; first += at_once) {
            const uint32_t head = first + own;
            const bool live = head < heads;
            const HeadRows rows(group, p.pool, p.layer, live ? head : 0);
            const uint64_t row_from = from + static_cast<uint64_t>(head) * group.head_dim * SRC_BYTES;
            const uint64_t row = rows.row(place) + (is_v ? rows.to_v : 0);
            if constexpr (SAME<Src, Fmt>) {
                if (p.rope == KVPOOL_ROPE_NONE || is_v) {
                    // Nothing to convert: NaN keep their bits.
                    if (live) {
                        copy_vector(row, row_from, group.row_bytes, spread);
                    }
                    continue;
                }
            }
            float x[STEPS][8];
            KV_UNROLL
            for (int step = 0; step < STEPS; ++step) {
                if (live && spread.has(step)) {
                    const uint32_t octet = spread.octet(step);
                    load_octet<Src>(row_from + octet * 8 * SRC_BYTES, x[step]);
                    if (p.rope != KVPOOL_ROPE_NONE && !is_v) {
                        rotate<Src>(p, row_from, octet, position, x[step]);
                    }
                }
            }
            if constexpr (SAME<Fmt, Int8>) {
                const uint64_t scales = rows.scale(place) + (is_v ? rows.scales_to_v : 0);
                const float static_scale = is_v ? p.v_scale : p.k_scale;
                store_int8(p, spread, live, row, scales, static_scale, x, nonfinite, saturated);
            } else {
                KV_UNROLL
                for (int step = 0; step < STEPS; ++step) {
                    if (live && spread.has(step)) {
                        store_octet<Fmt>(row + spread.octet(step) * octet_bytes, x[step]);
                    }
                }
            }
        }
    }

    if constexpr (SAME<Fmt, Int8>) {
        KV_UNROLL
        for (uint32_t mask = 16; mask > 0; mask /= 2) {
            nonfinite += dev::shuffle_xor(nonfinite, mask);
            saturated += dev::shuffle_xor(saturated, mask);
        }
        if (dev::lane_index() == 0 && nonfinite != 0) {
            dev::atomic_add(dev::at_address<uint64_t>(p.counts), static_cast<uint64_t>(nonfinite));
        }
        if (dev::lane_index() == 0 && saturated != 0) {
            dev::atomic_add(dev::at_address<uint64_t>(p.counts + 8), static_cast<uint64_t>(saturated));
        }
    }
}

// Stores K and V of a step in one layer. Any grid; blocks of whole warps.
template <class Src, class Fmt>
KV_DEVICE void append(const KvpoolAppendParams& p) {
    if (p.group.head_dim <= 8 * dev::WARP) {
        append_rows<Src, Fmt, 1>(p);
    } else {
        append_rows<Src, Fmt, 4>(p);
    }
}

}  // namespace kvpool
