// What the attention kernels share: which keys an item sees, and how results are combined.
//
// One answer (P5): scores of a query and a key depend on those two rows alone; sums over keys run
// in an order that follows from positions, format and head_dim; the keys are cut into splits at
// multiples of KVPOOL_SPLIT_TOKENS, and each split is computed from a fresh state; splits are
// combined in ascending order by `merge_factors`, wherever that is done. Which rows are computed
// side by side, and where the keys lie, changes none of it.
// On tensor cores this takes one thing for granted that no manual says: a product with a weight of
// zero does not change what the others add up to, however large the other factor is (the sums of an
// instruction are aligned to its largest product). A key that a row does not see has such a weight
// where another row of its item sees it, and is zero itself where none does. `benches/gpu.sh` looks
// at it on the GPU before it measures.
//
// Scores are kept times log2(e), so that the exponential is one instruction.
#pragma once

#include "kv_view.cuh"
#include "numbers.cuh"

namespace kvpool {

// Some packed rows of one sequence and one KV head.
struct Rows {
    KvpoolSeq seq;
    KvpoolItem item;
    uint32_t q_per_kv;
    uint32_t window;
    uint32_t sink_tokens;
    // Positions of the first and the last row, and what any row sees up to `late`: the first one
    // sees farthest back, and each begins where those before it see something.
    uint32_t early;
    uint32_t late;
    Visible all;

    // The row of the step's tensors and the position of packed row i of the item.
    KV_DEVICE uint32_t row(uint32_t i) const { return (item.first + i) / q_per_kv; }
    KV_DEVICE uint32_t position(uint32_t i) const { return seq.first_position + row(i); }
    // Index of a packed row's query head in a tensor of [rows, num_q_heads].
    KV_DEVICE uint64_t tensor_head(uint32_t i, uint32_t kv_head, uint32_t num_kv_heads) const {
        const uint32_t q_head = kv_head * q_per_kv + (item.first + i) % q_per_kv;
        return static_cast<uint64_t>(seq.row_start + row(i)) * num_kv_heads * q_per_kv + q_head;
    }
    KV_DEVICE Visible seen_by(uint32_t position) const {
        return visible(position, window, sink_tokens);
    }
    // Whether any row sees a key.
    KV_DEVICE bool any_sees(uint32_t key) const { return sees(all, late, key); }
    // Whether any row sees a key of `from..to`.
    KV_DEVICE bool any_sees_any(uint32_t from, uint32_t to) const {
        const uint32_t until = to <= late ? to : late + 1;
        const uint32_t begin = from > all.from ? from : all.from;
        return begin < until || (from < all.sinks && from < to);
    }
};

KV_DEVICE Rows load_rows(uint64_t seqs, uint64_t items, uint32_t index, uint32_t q_per_kv,
                         uint32_t window, uint32_t sink_tokens) {
    Rows rows;
    const uint64_t item = items + static_cast<uint64_t>(index) * sizeof(KvpoolItem);
    const auto word = [](uint64_t at, int i) {
        return dev::load_readonly(dev::at_address<const uint32_t>(at + 4 * i));
    };
    rows.item = {word(item, 0), word(item, 1), word(item, 2),
                 word(item, 3), word(item, 4), word(item, 5)};
    const uint64_t seq = seqs + static_cast<uint64_t>(rows.item.seq) * sizeof(KvpoolSeq);
    rows.seq = {word(seq, 0), word(seq, 1), word(seq, 2), word(seq, 3), word(seq, 4), 0};
    rows.q_per_kv = q_per_kv;
    rows.window = window;
    rows.sink_tokens = sink_tokens;
    rows.early = rows.position(0);
    rows.late = rows.position(rows.item.count - 1);
    rows.all = rows.seen_by(rows.early);
    return rows;
}

// The state of some keys for one row: the largest score and the sum of the weights.
struct MaxSum {
    float max;
    float sum;
    // No key was seen, or none had a score above -infinity.
    KV_DEVICE bool nothing() const { return max == NEG_INFINITY && sum == 0.0f; }
};

// What accumulated values are multiplied with when `added`, of later keys, joins `total`.
struct Factors {
    float keep;
    float add;
};
// Joins maxima and sums. Where `added` is nothing the caller leaves everything as it is.
KV_DEVICE Factors merge_factors(MaxSum& total, MaxSum added) {
    const float max = dev::max_f32(total.max, added.max);
    const float base = finite_base(max);
    const Factors factors = {dev::exp2_fast(total.max - base), dev::exp2_fast(added.max - base)};
    total.max = max;
    total.sum = dev::fma_f32(total.sum, factors.keep, added.sum * factors.add);
    return factors;
}
KV_DEVICE float merge_value(float total, float added, Factors factors) {
    return dev::fma_f32(total, factors.keep, added * factors.add);
}

// What a row's values are multiplied with in the end; and its result, 0 where no key has a score
// above -infinity. Zeros have no sign: whether a key with weight 0 was beside a row's own in a tile
// must not show.
KV_DEVICE float finish_factor(float sum) { return 1.0f / sum; }
KV_DEVICE float finish_value(float acc, float sum, float factor) {
    return sum == 0.0f ? 0.0f : acc * factor + 0.0f;
}
KV_DEVICE float finish_lse(MaxSum total) {
    return total.sum == 0.0f ? NEG_INFINITY : (total.max + dev::log2_fast(total.sum)) * LN_2;
}

// Where a split's result of packed row `place` of the workspace lies.
KV_DEVICE uint64_t partial_acc_at(uint64_t acc, uint32_t kv_head, uint32_t max_partials,
                                  uint32_t place, uint32_t head_dim) {
    const uint64_t index = static_cast<uint64_t>(kv_head) * max_partials + place;
    return acc + index * head_dim * 4;
}
KV_DEVICE uint64_t partial_ml_at(uint64_t ml, uint32_t kv_head, uint32_t max_partials,
                                 uint32_t place) {
    return ml + (static_cast<uint64_t>(kv_head) * max_partials + place) * 8;
}

// Fills in the blocks of the positions from..to that the item sees. units: [split's blocks] in
// shared memory
KV_DEVICE void load_units(const KvpoolAttendParams& p, const Rows& rows, uint32_t from, uint32_t to,
                          uint32_t* units) {
    const uint32_t shift = p.group.unit_shift;
    const uint32_t first = from >> shift, last = (to - 1) >> shift;
    for (uint32_t i = first + dev::thread_x(); i <= last; i += dev::block_dim_x()) {
        const uint32_t begin = i << shift;
        // A block that nobody sees may have been given back: its entry means nothing.
        uint32_t unit = 0;
        if (rows.any_sees_any(begin > from ? begin : from, begin + (1u << shift))) {
            unit = dev::load_readonly(dev::at_address<const uint32_t>(p.tables) +
                                      (rows.seq.table_at + i));
        }
        units[i - first] = unit;
    }
}

// Joins the splits of each row, a warp for each. Grid: x any, y = KV heads.
KV_DEVICE void combine(const KvpoolCombineParams& p) {
    const uint32_t num_items = count_at(p.num_items_at, p.num_items);
    const uint32_t kv_head = dev::block_y();
    const uint32_t warps = dev::block_dim_x() / dev::WARP;
    for (uint32_t index = dev::block_x(); index < num_items; index += dev::grid_dim_x()) {
        const Rows rows = load_rows(p.seqs, p.items, index, p.q_per_kv, 0, 0);
        for (uint32_t i = dev::warp_index(); i < rows.item.count; i += warps) {
            const uint64_t head = rows.tensor_head(i, kv_head, p.num_kv_heads);
            MaxSum total = {NEG_INFINITY, 0.0f};
            for (uint32_t quad = dev::lane_index(); quad < p.head_dim / 4; quad += dev::WARP) {
                total = {NEG_INFINITY, 0.0f};
                float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                for (uint32_t split = 0; split < rows.item.splits; ++split) {
                    const uint32_t place = rows.item.partial + split * rows.item.count + i;
                    const uint64_t ml = partial_ml_at(p.partial_ml, kv_head, p.max_partials, place);
                    const uint64_t at =
                        partial_acc_at(p.partial_acc, kv_head, p.max_partials, place, p.head_dim);
                    const auto pair = dev::load_global(dev::at_address<const dev::Bytes8>(ml));
                    float added[4];
                    widen(dev::load_global(dev::at_address<const dev::Bytes16>(at) + quad), added,
                          F32{});
                    const MaxSum part = {dev::bits_to_f32(pair.word[0]),
                                         dev::bits_to_f32(pair.word[1])};
                    if (part.nothing()) {
                        continue;
                    }
                    const Factors factors = merge_factors(total, part);
                    KV_UNROLL
                    for (int j = 0; j < 4; ++j) {
                        acc[j] = merge_value(acc[j], added[j], factors);
                    }
                }
                const float factor = finish_factor(total.sum);
                KV_UNROLL
                for (int j = 0; j < 4; ++j) {
                    acc[j] = finish_value(acc[j], total.sum, factor);
                }
                store_tensor_quad(p.out, head * p.head_dim + quad * 4, p.out_dtype, acc);
            }
            // Lane 0 always has a quad.
            if (p.lse != 0 && dev::lane_index() == 0) {
                dev::store_global(dev::at_address<float>(p.lse + head * 4), finish_lse(total));
            }
        }
    }
}

}  // namespace kvpool
