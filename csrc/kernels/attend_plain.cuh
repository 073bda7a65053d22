// Attention in f32 without tensor cores: every format, every head_dim.
//
// A block takes an item and a KV head. Its four warps share out the keys of each split, a few
// neighbouring ones to each warp in turn; the lanes of a warp share out the elements of a vector.
// So a vector is read once, in one piece, whatever number of query heads it serves, and only if
// some row sees it. Each warp keeps its own state; when the split is done the warps' states are
// joined in order.
#pragma once

#include "attend.cuh"

namespace kvpool {

// WIDTH: the largest head_dim; 128, 256 or 1024.
template <class Fmt, int WIDTH>
struct PlainAttend {
    static constexpr int ROWS = KVPOOL_WIDE_ROWS(WIDTH);
    static constexpr int QUADS = WIDTH / 128;                         // of a lane
    static constexpr int KEYS = QUADS == 1 ? 4 : QUADS == 2 ? 2 : 1;  // of a warp at a time
    static constexpr int WARPS = 4;
    static constexpr int TILE = WARPS * KEYS;
    static constexpr bool INT8 = Fmt::FORMAT == KVPOOL_FORMAT_INT8;
    static constexpr bool GROUPS = SAME<Fmt, Int8Groups>;
    using Raw = typename Quad<Fmt>::Raw;

    const KvpoolAttendParams& p;
    Rows rows;
    uint32_t kv_head;
    uint32_t head_dim;
    // Shared memory.
    float* q;          // [ROWS][head_dim]
    float* part_acc;   // [ROWS][head_dim], of the split
    float* total_acc;  // [ROWS][head_dim], of the splits before
    MaxSum* part;      // [ROWS]
    MaxSum* total;     // [ROWS]
    uint32_t* units;   // [SPLIT_TOKENS]

    // This warp's state of the split. Element j of quad k of a lane: 4 * (lane + 32 * k) + j
    float acc[ROWS][QUADS][4];
    MaxSum own[ROWS];
    uint32_t row_position[ROWS];

    KV_DEVICE PlainAttend(const KvpoolAttendParams& params) : p(params) {
        kv_head = dev::block_y();
        head_dim = p.group.head_dim;
        float* memory = reinterpret_cast<float*>(dev::dynamic_shared());
        q = memory;
        part_acc = q + ROWS * head_dim;
        total_acc = part_acc + ROWS * head_dim;
        part = reinterpret_cast<MaxSum*>(total_acc + ROWS * head_dim);
        total = part + ROWS;
        units = reinterpret_cast<uint32_t*>(total + ROWS);
    }

    KV_DEVICE bool has(int quad) const { return 4 * (dev::lane_index() + 32 * quad) < head_dim; }
    KV_DEVICE uint32_t element(int quad) const { return 4 * (dev::lane_index() + 32 * quad); }

    KV_DEVICE void load_queries() {
        const uint32_t quads = head_dim / 4;
        for (uint32_t i = dev::thread_x(); i < rows.item.count * quads; i += dev::block_dim_x()) {
            const uint64_t head = rows.tensor_head(i / quads, kv_head, p.group.num_kv_heads);
            float x[4];
            load_tensor_quad(p.q, head * head_dim + i % quads * 4, p.q_dtype, x);
            KV_UNROLL
            for (int j = 0; j < 4; ++j) {
                q[i * 4 + j] = x[j];
            }
        }
    }

    // A lane's part of the vectors of KEYS keys, and scales.
    struct Keys {
        Raw k[KEYS][QUADS];
        Raw v[KEYS][QUADS];
        float k_scale[KEYS][GROUPS ? QUADS : 1];
        float v_scale[KEYS][GROUPS ? QUADS : 1];
        bool seen[KEYS];  // by any row
    };

    template <class View>
    KV_DEVICE void load_keys(const View& view, const HeadRows& at, uint32_t first, uint32_t end,
                             Keys& keys) const {
        KV_UNROLL
        for (int key = 0; key < KEYS; ++key) {
            const uint32_t position = first + key;
            keys.seen[key] = position < end && rows.any_sees(position);
            KV_UNROLL
            for (int quad = 0; quad < QUADS; ++quad) {
                keys.k[key][quad] = Raw{};
                keys.v[key][quad] = Raw{};
                if (keys.seen[key] && has(quad)) {
                    const uint64_t row = at.row(view.place(position)) + element(quad) * Fmt::BYTES;
                    keys.k[key][quad] = dev::load_once(dev::at_address<const Raw>(row));
                    keys.v[key][quad] = dev::load_once(dev::at_address<const Raw>(row + at.to_v));
                }
            }
        }
        if constexpr (GROUPS) {
            KV_UNROLL
            for (int key = 0; key < KEYS; ++key) {
                KV_UNROLL
                for (int quad = 0; quad < QUADS; ++quad) {
                    keys.k_scale[key][quad] = keys.v_scale[key][quad] = 0.0f;
                    if (keys.seen[key] && has(quad)) {
                        const uint64_t scale =
                            at.scale(view.place(first + key)) +
                            element(quad) / KVPOOL_SCALE_GROUP * KVPOOL_SCALE_BYTES;
                        keys.k_scale[key][quad] = load_scale(scale);
                        keys.v_scale[key][quad] = load_scale(scale + at.scales_to_v);
                    }
                }
            }
        } else if constexpr (INT8) {
            load_row_scales(view, at, first, keys);
        }
    }

    static KV_DEVICE float load_scale(uint64_t at) {
        return scale_to_f32(dev::load_once(dev::at_address<const uint16_t>(at)));
    }

    // One lane a key and kind, and the others have it from there.
    template <class View>
    KV_DEVICE void load_row_scales(const View& view, const HeadRows& at, uint32_t first,
                                   Keys& keys) const {
        const uint32_t lane = dev::lane_index();
        const uint32_t own_key = lane % KEYS;
        bool seen = false;
        KV_UNROLL
        for (int key = 0; key < KEYS; ++key) {
            seen = own_key == static_cast<uint32_t>(key) ? keys.seen[key] : seen;
        }
        const bool stored = p.group.scales_per_row > 0;
        float scale = lane < KEYS ? p.k_scale : p.v_scale;
        if (stored && seen && lane < 2 * KEYS) {
            const uint64_t place = at.scale(view.place(first + own_key));
            scale = load_scale(place + (lane < KEYS ? 0 : at.scales_to_v));
        }
        KV_UNROLL
        for (int key = 0; key < KEYS; ++key) {
            keys.k_scale[key][0] = dev::shuffle(scale, key);
            keys.v_scale[key][0] = dev::shuffle(scale, KEYS + key);
        }
    }

    // Sums over the lanes of the warp, of KEYS numbers at once: at each of the first steps half of
    // the numbers go to the other half of the lanes.
    static KV_DEVICE void sum_over_lanes(float (&x)[KEYS]) {
        const uint32_t lane = dev::lane_index();
        uint32_t mask = 16;
        int left = KEYS;
        KV_UNROLL
        for (int step = 0; step < (KEYS == 4 ? 2 : KEYS == 2 ? 1 : 0); ++step) {
            left /= 2;
            const bool upper = (lane & mask) != 0;
            KV_UNROLL
            for (int i = 0; i < KEYS / 2; ++i) {
                if (i < left) {
                    const float keep = upper ? x[left + i] : x[i];
                    const float send = upper ? x[i] : x[left + i];
                    x[i] = keep + dev::shuffle_xor(send, mask);
                }
            }
            mask /= 2;
        }
        float sum = x[0];
        for (; mask > 0; mask /= 2) {
            sum += dev::shuffle_xor(sum, mask);
        }
        KV_UNROLL
        for (int key = 0; key < KEYS; ++key) {
            x[key] = dev::shuffle(sum, key * (dev::WARP / KEYS));
        }
    }

    // Adds KEYS keys to the state of one row.
    KV_DEVICE void add_keys(int row, uint32_t first, const Keys& keys) {
        const uint32_t position = row_position[row];
        const Visible visible_keys = rows.seen_by(position);
        bool seen[KEYS];
        bool any_seen = false;
        KV_UNROLL
        for (int key = 0; key < KEYS; ++key) {
            seen[key] = keys.seen[key] && sees(visible_keys, position, first + key);
            any_seen = any_seen || seen[key];
        }
        if (!any_seen) {
            return;
        }
        float score[KEYS];
        dot(row, keys, score);
        sum_over_lanes(score);
        const float factor = p.softmax_scale * LOG2_E;
        float max = own[row].max;
        KV_UNROLL
        for (int key = 0; key < KEYS; ++key) {
            if constexpr (INT8 && !GROUPS) {
                score[key] *= keys.k_scale[key][0];
            }
            score[key] = seen[key] ? score[key] * factor : NEG_INFINITY;
            max = dev::max_f32(max, score[key]);
        }
        const float base = finite_base(max);
        const float keep = dev::exp2_fast(own[row].max - base);
        own[row].max = max;
        float sum = own[row].sum * keep;
        KV_UNROLL
        for (int quad = 0; quad < QUADS; ++quad) {
            KV_UNROLL
            for (int j = 0; j < 4; ++j) {
                acc[row][quad][j] *= keep;
            }
        }
        KV_UNROLL
        for (int key = 0; key < KEYS; ++key) {
            if (!seen[key]) {
                continue;
            }
            const float weight = dev::exp2_fast(score[key] - base);
            sum += weight;
            KV_UNROLL
            for (int quad = 0; quad < QUADS; ++quad) {
                float v[4];
                widen(keys.v[key][quad], v, Fmt{});
                const float factor_v =
                    INT8 ? weight * keys.v_scale[key][GROUPS ? quad : 0] : weight;
                KV_UNROLL
                for (int j = 0; j < 4; ++j) {
                    acc[row][quad][j] = dev::fma_f32(factor_v, v[j], acc[row][quad][j]);
                }
            }
        }
        own[row].sum = sum;
    }

    // This lane's part of q·k of one row.
    KV_DEVICE void dot(int row, const Keys& keys, float (&sum)[KEYS]) const {
        KV_UNROLL
        for (int key = 0; key < KEYS; ++key) {
            sum[key] = 0.0f;
        }
        KV_UNROLL
        for (int quad = 0; quad < QUADS; ++quad) {
            dev::Bytes16 raw = {{0, 0, 0, 0}};
            if (has(quad)) {
                raw = dev::load_shared(
                    reinterpret_cast<const dev::Bytes16*>(q + row * head_dim + element(quad)));
            }
            float x[4];
            widen(raw, x, F32{});
            KV_UNROLL
            for (int key = 0; key < KEYS; ++key) {
                float k[4];
                widen(keys.k[key][quad], k, Fmt{});
                float product = x[0] * k[0];
                KV_UNROLL
                for (int j = 1; j < 4; ++j) {
                    product = dev::fma_f32(x[j], k[j], product);
                }
                sum[key] =
                    GROUPS ? dev::fma_f32(product, keys.k_scale[key][GROUPS ? quad : 0], sum[key])
                           : sum[key] + product;
            }
        }
    }

    // All keys of a split that this warp has.
    template <class View>
    KV_DEVICE void split_keys(View view, uint32_t start, uint32_t end) {
        const HeadRows at(p.group, p.pool, p.layer, kv_head);
        for (uint32_t tile = start; tile < end; tile += TILE) {
            const uint32_t first = tile + dev::warp_index() * KEYS;
            if (!rows.any_sees_any(first, first + KEYS < end ? first + KEYS : end)) {
                continue;
            }
            view.begin_at(first);
            Keys keys;
            load_keys(view, at, first, end, keys);
            KV_UNROLL
            for (int row = 0; row < ROWS; ++row) {
                if (static_cast<uint32_t>(row) < rows.item.count) {
                    add_keys(row, first, keys);
                }
            }
        }
    }

    // Joins this warp's state to the split's, in shared memory.
    KV_DEVICE void join(bool first) {
        KV_UNROLL
        for (int row = 0; row < ROWS; ++row) {
            if (static_cast<uint32_t>(row) >= rows.item.count) {
                continue;
            }
            MaxSum joined = {NEG_INFINITY, 0.0f};
            Factors factors = {0.0f, 1.0f};
            if (!first) {
                joined = part[row];
                if (own[row].nothing()) {
                    continue;
                }
                factors = merge_factors(joined, own[row]);
            } else {
                joined = own[row];
            }
            dev::sync_warp();
            if (dev::lane_index() == 0) {
                part[row] = joined;
            }
            KV_UNROLL
            for (int quad = 0; quad < QUADS; ++quad) {
                if (!has(quad)) {
                    continue;
                }
                float* to = part_acc + row * head_dim + element(quad);
                KV_UNROLL
                for (int j = 0; j < 4; ++j) {
                    to[j] =
                        first ? acc[row][quad][j] : merge_value(to[j], acc[row][quad][j], factors);
                }
            }
        }
    }

    // One split, into `part` and `part_acc`.
    KV_DEVICE void split(uint32_t start, uint32_t end) {
        KV_UNROLL
        for (int row = 0; row < ROWS; ++row) {
            own[row] = {NEG_INFINITY, 0.0f};
            KV_UNROLL
            for (int quad = 0; quad < QUADS; ++quad) {
                KV_UNROLL
                for (int j = 0; j < 4; ++j) {
                    acc[row][quad][j] = 0.0f;
                }
            }
        }
        if (p.group.addressing == KVPOOL_ADDRESSING_BLOCKS) {
            load_units(p, rows, start, end, units);
            dev::sync_threads();
            const SharedTable table = {units, start >> p.group.unit_shift};
            split_keys(PagedView<SharedTable>(p.group, table), start, end);
        } else {
            dev::sync_threads();
            split_keys(ContiguousView(p.group, rows.seq.unit), start, end);
        }
        for (uint32_t warp = 0; warp < WARPS; ++warp) {
            if (dev::warp_index() == warp) {
                join(warp == 0);
            }
            dev::sync_threads();
        }
    }

    KV_DEVICE void store_partial() const {
        for (uint32_t i = dev::thread_x(); i < rows.item.count * head_dim;
             i += dev::block_dim_x()) {
            const uint32_t place = rows.item.partial + i / head_dim;
            const uint64_t at =
                partial_acc_at(p.partial_acc, kv_head, p.max_partials, place, head_dim);
            dev::store_global(dev::at_address<float>(at) + i % head_dim, part_acc[i]);
        }
        for (uint32_t i = dev::thread_x(); i < rows.item.count; i += dev::block_dim_x()) {
            const uint64_t at =
                partial_ml_at(p.partial_ml, kv_head, p.max_partials, rows.item.partial + i);
            const dev::Bytes8 pair = {
                {dev::f32_to_bits(part[i].max), dev::f32_to_bits(part[i].sum)}};
            dev::store_global(dev::at_address<dev::Bytes8>(at), pair);
        }
    }

    // Adds the split to the splits before it.
    KV_DEVICE void join_total() {
        for (uint32_t i = dev::thread_x(); i < rows.item.count * head_dim;
             i += dev::block_dim_x()) {
            MaxSum joined = total[i / head_dim];
            const MaxSum added = part[i / head_dim];
            if (!added.nothing()) {
                const Factors factors = merge_factors(joined, added);
                total_acc[i] = merge_value(total_acc[i], part_acc[i], factors);
            }
        }
        dev::sync_threads();
        for (uint32_t i = dev::thread_x(); i < rows.item.count; i += dev::block_dim_x()) {
            if (!part[i].nothing()) {
                merge_factors(total[i], part[i]);
            }
        }
        dev::sync_threads();
    }

    KV_DEVICE void finish() const {
        const uint32_t quads = head_dim / 4;
        for (uint32_t i = dev::thread_x(); i < rows.item.count * quads; i += dev::block_dim_x()) {
            const uint64_t head = rows.tensor_head(i / quads, kv_head, p.group.num_kv_heads);
            const MaxSum state = total[i / quads];
            const float factor = finish_factor(state.sum);
            float x[4];
            KV_UNROLL
            for (int j = 0; j < 4; ++j) {
                x[j] = finish_value(total_acc[i * 4 + j], state.sum, factor);
            }
            store_tensor_quad(p.out, head * head_dim + i % quads * 4, p.out_dtype, x);
            if (p.lse != 0 && i % quads == 0) {
                dev::store_global(dev::at_address<float>(p.lse + head * 4), finish_lse(state));
            }
        }
    }

    KV_DEVICE void item(uint32_t index) {
        rows = load_rows(p.seqs, p.items, index, p.q_per_kv, p.window, p.group.sink_tokens);
        load_queries();
        KV_UNROLL
        for (int row = 0; row < ROWS; ++row) {
            row_position[row] = rows.position(row);
        }
        const uint32_t end = rows.late + 1;
        if (rows.item.split != KVPOOL_ALL_SPLITS) {
            const uint32_t start = rows.item.split * KVPOOL_SPLIT_TOKENS;
            const uint32_t stop =
                end - start < KVPOOL_SPLIT_TOKENS ? end : start + KVPOOL_SPLIT_TOKENS;
            split(start, stop);
            store_partial();
            return;
        }
        for (uint32_t i = dev::thread_x(); i < rows.item.count * head_dim;
             i += dev::block_dim_x()) {
            total_acc[i] = 0.0f;
        }
        for (uint32_t i = dev::thread_x(); i < rows.item.count; i += dev::block_dim_x()) {
            total[i] = {NEG_INFINITY, 0.0f};
        }
        for (uint32_t start = 0; start < end; start += KVPOOL_SPLIT_TOKENS) {
            const uint32_t stop =
                end - start < KVPOOL_SPLIT_TOKENS ? end : start + KVPOOL_SPLIT_TOKENS;
            if (rows.any_sees_any(start, stop)) {
                split(start, stop);
                join_total();
            }
        }
        finish();
    }

    // Goes through the items. Grid: x any, y = KV heads; blocks of 128 threads.
    KV_DEVICE void run() {
        const uint32_t num_items = count_at(p.num_items_at, p.num_items);
        for (uint32_t index = dev::block_x(); index < num_items; index += dev::grid_dim_x()) {
            item(index);
            // Nobody overwrites what others still read.
            dev::sync_threads();
        }
    }
};

}  // namespace kvpool
