// Attention on tensor cores: f16, bf16 and INT8, head_dim a multiple of 16 up to 256, any group.
//
// A block takes an item (at most 16 or 32 packed rows of one sequence: the query heads of a group,
// of one or several rows of the step, side by side) and a KV head, and goes through the keys tile
// by tile. Tiles of K and V come through a pipeline of two stages with asynchronous copies of 16
// bytes, once for all rows; bytes that no row sees are not read, but zeros take their place, so
// that nothing an earlier owner left can be multiplied with a weight of 0.
//
// The four warps share out a tile's keys for the scores, and head_dim for the values; in between
// they exchange maxima and weights through shared memory. So the state of a row is one maximum, one
// sum and one vector, and it is updated tile by tile in order of position, whatever the number of
// rows.
//
// Precision: products of halves are exact and summed in f32. Weights are multiplied in two halves
// (see `split_halves`), and so is Q unless it has the halves' own type, so that what remains are
// errors of f32. An infinite element of V, which f16 and bf16 may hold, makes that element of the
// result infinite or NaN in the rows that see it, and no other.
#pragma once

#include "tensor_tiles.cuh"

namespace kvpool {

// D: the largest head_dim, 64, 128 or 256. M: 16 packed rows each.
template <class Fmt, int D, int M>
struct TensorAttend : TensorTiles<Fmt, D, M> {
    using Base = TensorTiles<Fmt, D, M>;
    using Base::CHUNKS;
    using Base::DIMS;
    using Base::each_quad;
    using Base::fetch;
    using Base::g;
    using Base::GROUPS;
    using Base::has_chunk;
    using Base::head_dim;
    using Base::INT8;
    using Base::k_tiles;
    using Base::KEY_TILES;
    using Base::KEYS;
    using Base::kv_head;
    using Base::lane;
    using Base::load_queries;
    using Base::maxima;
    using Base::p;
    using Base::place_scales;
    using Base::place_weights;
    using Base::products;
    using Base::q_factor;
    using Base::row_position;
    using Base::ROWS;
    using Base::rows;
    using Base::SCALE_LOADS;
    using Base::SCALES;
    using Base::scales;
    using Base::STAGE_BYTES;
    using Base::sums;
    using Base::t;
    using Base::TILE;
    using Base::units;
    using Base::v_tiles;
    using Base::value_fragments;
    using Base::warp;
    using Base::WARPS;
    using Base::weight_fragments;

    // The state of the split. Two n-tiles of a chunk: acc[m][2 * chunk] and the next.
    float acc[M][2 * CHUNKS][4];
    float max[M][2];
    float sum[M][2];   // of this lane's columns
    bool has_queries;  // of the item

    KV_DEVICE TensorAttend(const KvpoolAttendParams& params) : Base(params) {}

    // ---- Scores ----

    // Scales and masks scores, and leaves each row's largest of this warp's keys in `maxima`.
    KV_DEVICE void mask_scores(uint32_t first, uint32_t stop, float (&score)[M][KEY_TILES][4]) {
        KV_UNROLL
        for (int m = 0; m < M; ++m) {
            KV_UNROLL
            for (int half = 0; half < 2; ++half) {
                const uint32_t row = 16 * m + 8 * half + g;
                const float factor = q_factor[row];
                const uint32_t position = row_position[m][half];
                const Visible seen = rows.seen_by(position);
                float largest = NEG_INFINITY;
                KV_UNROLL
                for (int n = 0; n < KEY_TILES; ++n) {
                    KV_UNROLL
                    for (int i = 0; i < 2; ++i) {
                        const uint32_t key = warp * KEYS + 8 * n + 2 * t + i;
                        float& x = score[m][n][2 * half + i];
                        x *= factor;
                        if constexpr (INT8 && !GROUPS) {
                            x *= scales[key];
                        }
                        const bool visible_key =
                            first + key < stop && sees(seen, position, first + key);
                        x = visible_key ? x : NEG_INFINITY;
                        largest = dev::max_f32(largest, x);
                    }
                }
                largest = dev::max_f32(largest, dev::shuffle_xor(largest, 1));
                largest = dev::max_f32(largest, dev::shuffle_xor(largest, 2));
                if (t == 0) {
                    maxima[warp * ROWS + row] = largest;
                }
            }
        }
    }

    // Turns scores into weights, and rescales what there is to the new maximum.
    KV_DEVICE void weigh(const float (&score)[M][KEY_TILES][4]) {
        KV_UNROLL
        for (int m = 0; m < M; ++m) {
            KV_UNROLL
            for (int half = 0; half < 2; ++half) {
                const uint32_t row = 16 * m + 8 * half + g;
                float largest = max[m][half];
                KV_UNROLL
                for (int other = 0; other < WARPS; ++other) {
                    largest = dev::max_f32(largest, maxima[other * ROWS + row]);
                }
                const float base = finite_base(largest);
                const float keep = dev::exp2_fast(max[m][half] - base);
                max[m][half] = largest;
                float added = sum[m][half] * keep;
                KV_UNROLL
                for (int n = 0; n < KEY_TILES; ++n) {
                    const uint32_t key = warp * KEYS + 8 * n + 2 * t;
                    float x = dev::exp2_fast(score[m][n][2 * half] - base);
                    float y = dev::exp2_fast(score[m][n][2 * half + 1] - base);
                    added += x;
                    added += y;
                    if constexpr (INT8 && !GROUPS) {
                        x *= scales[TILE + key];
                        y *= scales[TILE + key + 1];
                    }
                    place_weights(row, key, x, y);
                }
                sum[m][half] = added;
                KV_UNROLL
                for (int n = 0; n < 2 * CHUNKS; ++n) {
                    acc[m][n][2 * half] *= keep;
                    acc[m][n][2 * half + 1] *= keep;
                }
            }
        }
    }

    // ---- Values ----

    // Adds the tile's values to `acc`.
    KV_DEVICE void add_values(const unsigned char* tile) {
        KV_UNROLL_BY(2)
        for (int step = 0; step < TILE / 16; ++step) {
            uint32_t high[M][4], low[M][4];
            KV_UNROLL
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                if (!has_chunk(chunk)) {
                    continue;
                }
                if (chunk == 0 || (GROUPS && chunk % 2 == 0)) {
                    KV_UNROLL
                    for (int m = 0; m < M; ++m) {
                        weight_fragments(m, step, chunk, high[m], low[m]);
                    }
                }
                uint32_t b[2][2];
                value_fragments(tile, step, chunk, b);
                KV_UNROLL
                for (int m = 0; m < M; ++m) {
                    KV_UNROLL
                    for (int n = 0; n < 2; ++n) {
                        multiply_values<Fmt>(acc[m][2 * chunk + n], high[m], b[n][0], b[n][1]);
                        multiply_values<Fmt>(acc[m][2 * chunk + n], low[m], b[n][0], b[n][1]);
                    }
                }
            }
        }
    }

    // Whether a key of the tile is seen by some rows and not by others.
    KV_DEVICE bool is_mixed(uint32_t first, uint32_t stop) const {
        const uint32_t end = stop - first < TILE ? stop : first + TILE;
        const Visible of_late = rows.seen_by(rows.late);
        return rows.early != rows.late &&
               (end > rows.early + 1 || (first < of_late.from && end > rows.all.from));
    }
    // Whether this warp's values have an infinity or a NaN.
    KV_DEVICE bool values_nonfinite(const unsigned char* tile) const {
        bool found = false;
        for (int step = 0; step < TILE / 16; ++step) {
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                if (has_chunk(chunk)) {
                    uint32_t b[2][2];
                    value_fragments(tile, step, chunk, b);
                    found = found || any_nonfinite<Fmt>(b[0][0]) || any_nonfinite<Fmt>(b[0][1]) ||
                            any_nonfinite<Fmt>(b[1][0]) || any_nonfinite<Fmt>(b[1][1]);
                }
            }
        }
        return dev::any_lane(found);
    }
    // As add_values, row by row with the keys that the row does not see set to 0: a NaN of a later
    // token must not reach an earlier row, and 0 times NaN is NaN.
    KV_DEVICE void add_values_by_row(const unsigned char* tile, uint32_t first, uint32_t stop) {
        KV_UNROLL
        for (int m = 0; m < M; ++m) {
            KV_UNROLL_BY(1)
            for (uint32_t row = 0; row < 16; ++row) {
                const uint32_t last = rows.item.count - 1;
                const uint32_t position = rows.position(16 * m + row < last ? 16 * m + row : last);
                const Visible seen = rows.seen_by(position);
                const auto mask = [&](uint32_t halves, uint32_t key) {
                    const bool low_seen = first + key < stop && sees(seen, position, first + key);
                    const bool high_seen =
                        first + key + 1 < stop && sees(seen, position, first + key + 1);
                    return halves & ((low_seen ? 0xFFFFu : 0u) | (high_seen ? 0xFFFF0000u : 0u));
                };
                KV_UNROLL
                for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                    if (!has_chunk(chunk)) {
                        continue;
                    }
                    float own[2][4];
                    KV_UNROLL
                    for (int i = 0; i < 4; ++i) {
                        own[0][i] = acc[m][2 * chunk][i], own[1][i] = acc[m][2 * chunk + 1][i];
                    }
                    KV_UNROLL_BY(1)
                    for (int step = 0; step < TILE / 16; ++step) {
                        uint32_t high[4], low[4], b[2][2];
                        weight_fragments(m, step, chunk, high, low);
                        value_fragments(tile, step, chunk, b);
                        const uint32_t key = 16 * step + 2 * t;
                        KV_UNROLL
                        for (int n = 0; n < 2; ++n) {
                            const uint32_t b0 = mask(b[n][0], key), b1 = mask(b[n][1], key + 8);
                            multiply_values<Fmt>(own[n], high, b0, b1);
                            multiply_values<Fmt>(own[n], low, b0, b1);
                        }
                    }
                    KV_UNROLL
                    for (int i = 0; i < 4; ++i) {
                        const bool mine = row == g + 8 * (i / 2);
                        acc[m][2 * chunk][i] = mine ? own[0][i] : acc[m][2 * chunk][i];
                        acc[m][2 * chunk + 1][i] = mine ? own[1][i] : acc[m][2 * chunk + 1][i];
                    }
                }
            }
        }
    }

    // ---- A split ----

    KV_DEVICE uint32_t next_tile(uint32_t tile, uint32_t stop) const {
        while (tile < stop && !rows.any_sees_any(tile, tile + TILE < stop ? tile + TILE : stop)) {
            tile += TILE;
        }
        return tile;
    }

    // The keys of a split, tile by tile; the next one is always under way.
    KV_DEVICE void split_keys(uint32_t start, uint32_t stop) {
        const HeadRows at(p.group, p.pool, p.layer, kv_head);
        float fetched[SCALE_LOADS];
        uint32_t tile = stop, next = next_tile(start, stop), stage = 1;
        KV_UNROLL_BY(1)
        while (tile < stop || next < stop) {
            const bool begun = tile < stop;
            const unsigned char* k_tile = k_tiles + stage * STAGE_BYTES;
            const unsigned char* v_tile = v_tiles + stage * STAGE_BYTES;
            if (begun) {
                place_scales(fetched, stage);
                dev::cp_async_wait<1>();
                // K is here, and nobody reads the tile before any more.
                dev::sync_threads();
            }
            stage ^= 1;
            if (next < stop) {
                fetch(at, next, stop, stage, fetched);
            } else {
                dev::cp_async_commit();
                dev::cp_async_commit();
            }
            if (begun) {
                add_tile(k_tile, v_tile, tile, stop);
            } else if (!has_queries) {
                // Only now, so that the keys are under way.
                load_queries();
                has_queries = true;
            }
            tile = next;
            next = next_tile(next < stop ? next + TILE : stop, stop);
        }
        dev::cp_async_wait<0>();
    }
    // K has come; V and the next tile's two groups are under way.
    KV_DEVICE void add_tile(const unsigned char* k_tile, const unsigned char* v_tile, uint32_t tile,
                            uint32_t stop) {
        float score[M][KEY_TILES][4];
        products(k_tile, score);
        mask_scores(tile, stop, score);
        dev::sync_threads();
        weigh(score);
        dev::cp_async_wait<2>();
        dev::sync_threads();
        bool by_row = false;
        if constexpr (!INT8) {
            by_row = is_mixed(tile, stop) && values_nonfinite(v_tile);
        }
        if (by_row) {
            add_values_by_row(v_tile, tile, stop);
        } else {
            add_values(v_tile);
        }
    }

    // Sums of the columns of all lanes and warps, in `sum`.
    KV_DEVICE void sum_columns() {
        KV_UNROLL
        for (int m = 0; m < M; ++m) {
            KV_UNROLL
            for (int half = 0; half < 2; ++half) {
                float x = sum[m][half];
                x += dev::shuffle_xor(x, 1);
                x += dev::shuffle_xor(x, 2);
                if (t == 0) {
                    sums[warp * ROWS + 16 * m + 8 * half + g] = x;
                }
            }
        }
        dev::sync_threads();
        KV_UNROLL
        for (int m = 0; m < M; ++m) {
            KV_UNROLL
            for (int half = 0; half < 2; ++half) {
                const uint32_t row = 16 * m + 8 * half + g;
                float x = sums[row];
                KV_UNROLL
                for (int other = 1; other < WARPS; ++other) {
                    x += sums[other * ROWS + row];
                }
                sum[m][half] = x;
            }
        }
    }

    // One split, from a fresh state, into `max`, `sum` and `acc`.
    KV_DEVICE void split(uint32_t start, uint32_t stop) {
        KV_UNROLL
        for (int m = 0; m < M; ++m) {
            KV_UNROLL
            for (int half = 0; half < 2; ++half) {
                max[m][half] = NEG_INFINITY;
                sum[m][half] = 0.0f;
            }
            KV_UNROLL
            for (int n = 0; n < 2 * CHUNKS; ++n) {
                KV_UNROLL
                for (int i = 0; i < 4; ++i) {
                    acc[m][n][i] = 0.0f;
                }
            }
        }
        // Nobody overwrites what others still read for the split or the item before.
        dev::sync_threads();
        if (p.group.addressing == KVPOOL_ADDRESSING_BLOCKS) {
            load_units(p, rows, start, stop, units);
            dev::sync_threads();
        }
        split_keys(start, stop);
        sum_columns();
    }

    // ---- Results ----

    KV_DEVICE void store_partial() const {
        each_quad(acc, [&](uint32_t row, uint32_t dim, const float (&x)[4]) {
            const uint32_t place = rows.item.partial + row;
            const uint64_t at =
                partial_acc_at(p.partial_acc, kv_head, p.max_partials, place, head_dim);
            store_tensor_quad(at, dim, KVPOOL_DTYPE_F32, x);
        });
        KV_UNROLL
        for (int m = 0; m < M; ++m) {
            KV_UNROLL
            for (int half = 0; half < 2; ++half) {
                const uint32_t row = 16 * m + 8 * half + g;
                if (warp == 0 && t == 0 && row < rows.item.count) {
                    const uint64_t at = partial_ml_at(p.partial_ml, kv_head, p.max_partials,
                                                      rows.item.partial + row);
                    const dev::Bytes8 pair = {
                        {dev::f32_to_bits(max[m][half]), dev::f32_to_bits(sum[m][half])}};
                    dev::store_global(dev::at_address<dev::Bytes8>(at), pair);
                }
            }
        }
    }

    // All splits, one after the other, and the result.
    KV_DEVICE void all_splits(uint32_t end) {
        float joined[M][2 * CHUNKS][4];
        MaxSum total[M][2];
        KV_UNROLL
        for (int m = 0; m < M; ++m) {
            total[m][0] = total[m][1] = {NEG_INFINITY, 0.0f};
            KV_UNROLL
            for (int n = 0; n < 2 * CHUNKS; ++n) {
                KV_UNROLL
                for (int i = 0; i < 4; ++i) {
                    joined[m][n][i] = 0.0f;
                }
            }
        }
        KV_UNROLL_BY(1)
        for (uint32_t start = 0; start < end; start += KVPOOL_SPLIT_TOKENS) {
            const uint32_t stop =
                end - start < KVPOOL_SPLIT_TOKENS ? end : start + KVPOOL_SPLIT_TOKENS;
            if (!rows.any_sees_any(start, stop)) {
                continue;
            }
            split(start, stop);
            KV_UNROLL
            for (int m = 0; m < M; ++m) {
                KV_UNROLL
                for (int half = 0; half < 2; ++half) {
                    const MaxSum part = {max[m][half], sum[m][half]};
                    if (part.nothing()) {
                        continue;
                    }
                    const Factors factors = merge_factors(total[m][half], part);
                    KV_UNROLL
                    for (int n = 0; n < 2 * CHUNKS; ++n) {
                        KV_UNROLL
                        for (int i = 2 * half; i < 2 * half + 2; ++i) {
                            joined[m][n][i] = merge_value(joined[m][n][i], acc[m][n][i], factors);
                        }
                    }
                }
            }
        }
        finish(joined, total);
    }

    KV_DEVICE void finish(float (&joined)[M][2 * CHUNKS][4], const MaxSum (&total)[M][2]) const {
        KV_UNROLL
        for (int m = 0; m < M; ++m) {
            KV_UNROLL
            for (int half = 0; half < 2; ++half) {
                const float factor = finish_factor(total[m][half].sum);
                KV_UNROLL
                for (int n = 0; n < 2 * CHUNKS; ++n) {
                    KV_UNROLL
                    for (int i = 2 * half; i < 2 * half + 2; ++i) {
                        joined[m][n][i] = finish_value(joined[m][n][i], total[m][half].sum, factor);
                    }
                }
                const uint32_t row = 16 * m + 8 * half + g;
                if (p.lse != 0 && warp == 0 && t == 0 && row < rows.item.count) {
                    const uint64_t head = rows.tensor_head(row, kv_head, p.group.num_kv_heads);
                    dev::store_global(dev::at_address<float>(p.lse + head * 4),
                                      finish_lse(total[m][half]));
                }
            }
        }
        each_quad(joined, [&](uint32_t row, uint32_t dim, const float (&x)[4]) {
            const uint64_t head = rows.tensor_head(row, kv_head, p.group.num_kv_heads);
            store_tensor_quad(p.out, head * head_dim + dim, p.out_dtype, x);
        });
    }

    // Goes through the items. Grid: x any, y = KV heads; blocks of 128 threads.
    KV_DEVICE void run() {
        const uint32_t num_items = count_at(p.num_items_at, p.num_items);
        for (uint32_t index = dev::block_x(); index < num_items; index += dev::grid_dim_x()) {
            rows = load_rows(p.seqs, p.items, index, p.q_per_kv, p.window, p.group.sink_tokens);
            has_queries = false;
            const uint32_t end = rows.late + 1;
            if (rows.item.split == KVPOOL_ALL_SPLITS) {
                all_splits(end);
            } else {
                const uint32_t start = rows.item.split * KVPOOL_SPLIT_TOKENS;
                split(start, end - start < KVPOOL_SPLIT_TOKENS ? end : start + KVPOOL_SPLIT_TOKENS);
                store_partial();
            }
        }
    }
};

}  // namespace kvpool
