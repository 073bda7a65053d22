// Whole blocks and parts of blocks: copy, gather and fill, many in one launch.
#pragma once

#include "kv_view.cuh"
#include "numbers.cuh"

namespace kvpool {

// Copies words of T, spread over `threads` threads of which this one is number `thread`.
template <class T>
KV_DEVICE void copy_words(uint64_t dst, uint64_t src, uint64_t bytes, uint64_t thread,
                          uint64_t threads) {
    const uint64_t words = bytes / sizeof(T);
    constexpr int AT_ONCE = 4;  // loads under way
    uint64_t i = thread;
    for (; i + (AT_ONCE - 1) * threads < words; i += AT_ONCE * threads) {
        T word[AT_ONCE];
        KV_UNROLL
        for (int j = 0; j < AT_ONCE; ++j) {
            word[j] = dev::load_global(dev::at_address<const T>(src) + i + j * threads);
        }
        KV_UNROLL
        for (int j = 0; j < AT_ONCE; ++j) {
            dev::store_global(dev::at_address<T>(dst) + i + j * threads, word[j]);
        }
    }
    for (; i < words; i += threads) {
        dev::store_global(dev::at_address<T>(dst) + i,
                          dev::load_global(dev::at_address<const T>(src) + i));
    }
}

// Copies a run of bytes in the widest words that both ends and the length allow.
KV_DEVICE void copy_run(uint64_t dst, uint64_t src, uint64_t bytes, uint64_t thread,
                        uint64_t threads) {
    const uint64_t both = dst | src | bytes;
    if (both % 16 == 0) {
        copy_words<dev::Bytes16>(dst, src, bytes, thread, threads);
    } else if (both % 8 == 0) {
        copy_words<dev::Bytes8>(dst, src, bytes, thread, threads);
    } else {
        copy_words<uint16_t>(dst, src, bytes, thread, threads);
    }
}

// Copies tokens of units. Grid: x any, y over the pairs.
KV_DEVICE void copy_pairs(const KvpoolCopyParams& p) {
    const KvpoolKvGroup& group = p.group;
    const uint64_t first_unit = p.pool + group.base;
    const uint64_t thread =
        static_cast<uint64_t>(dev::block_x()) * dev::block_dim_x() + dev::thread_x();
    const uint64_t threads = static_cast<uint64_t>(dev::grid_dim_x()) * dev::block_dim_x();
    const uint32_t scale_bytes = group.scales_per_row * KVPOOL_SCALE_BYTES;
    const uint32_t runs = 2 * group.num_layers * group.num_kv_heads;
    for (uint32_t index = dev::block_y(); index < p.num_pairs; index += dev::grid_dim_y()) {
        const auto pair = dev::load_readonly(dev::at_address<const dev::Bytes16>(p.pairs) + index);
        const uint64_t src = first_unit + pair.word[0] * group.unit_bytes;
        const uint64_t dst = first_unit + pair.word[1] * group.unit_bytes;
        const uint64_t token = pair.word[2], tokens = pair.word[3];
        if (tokens == group.unit_tokens) {
            // The whole unit lies in a row.
            copy_run(dst, src, group.used_bytes, thread, threads);
            continue;
        }
        // A run of tokens for each layer, K or V, and head: a warp each, so that short ones do not
        // leave most of a block without work.
        const uint64_t warps = threads / dev::WARP, lane = dev::lane_index();
        for (uint64_t run = thread / dev::WARP; run < runs; run += warps) {
            const uint64_t at = run * group.head_stride + token * group.row_bytes;
            copy_run(dst + at, src + at, tokens * group.row_bytes, lane, dev::WARP);
            if (scale_bytes > 0) {
                const uint64_t scale =
                    group.scales_at + (run * group.unit_tokens + token) * scale_bytes;
                copy_run(dst + scale, src + scale, tokens * scale_bytes, lane, dev::WARP);
            }
        }
    }
}

// Widens K or V of one sequence to f32, a warp for each position and head. Any grid.
template <class Fmt, class View>
KV_DEVICE void gather_through(const KvpoolGatherParams& p, View view) {
    const KvpoolKvGroup& group = p.group;
    const uint32_t heads = group.num_kv_heads;
    const uint64_t warps =
        static_cast<uint64_t>(dev::grid_dim_x()) * (dev::block_dim_x() / dev::WARP);
    uint64_t work = static_cast<uint64_t>(dev::block_x()) * (dev::block_dim_x() / dev::WARP) +
                    dev::warp_index();
    for (; work < static_cast<uint64_t>(p.num_tokens) * heads; work += warps) {
        const uint32_t token = static_cast<uint32_t>(work / heads),
                       head = static_cast<uint32_t>(work % heads);
        const HeadRows rows(group, p.pool, p.layer, head);
        view.begin_at(p.first_position + token);
        const Place place = view.place(p.first_position + token);
        const uint64_t row = rows.row(place) + (p.is_v ? rows.to_v : 0);
        const uint64_t scales = rows.scale(place) + (p.is_v ? rows.scales_to_v : 0);
        for (uint32_t quad = dev::lane_index(); quad < group.head_dim / 4; quad += dev::WARP) {
            float x[4];
            using Raw = typename Quad<Fmt>::Raw;
            widen(dev::load_global(dev::at_address<const Raw>(row) + quad), x, Fmt{});
            if constexpr (Fmt::FORMAT == KVPOOL_FORMAT_INT8) {
                float scale = p.static_scale;
                if (group.scales_per_row > 0) {
                    const uint32_t which =
                        group.scales_per_row > 1 ? quad * 4 / KVPOOL_SCALE_GROUP : 0;
                    scale = scale_to_f32(
                        dev::load_global(dev::at_address<const uint16_t>(scales) + which));
                }
                KV_UNROLL
                for (int i = 0; i < 4; ++i) {
                    x[i] = dequantize(x[i], scale);
                }
            }
            store_tensor_quad(p.out, work * group.head_dim + quad * 4, KVPOOL_DTYPE_F32, x);
        }
    }
}

template <class Fmt>
KV_DEVICE void gather(const KvpoolGatherParams& p) {
    if (p.group.addressing == KVPOOL_ADDRESSING_BLOCKS) {
        const GlobalTable table = {dev::at_address<const uint32_t>(p.table)};
        gather_through<Fmt>(p, PagedView<GlobalTable>(p.group, table));
    } else {
        gather_through<Fmt>(p, ContiguousView(p.group, p.unit));
    }
}

// Sets ranges of the pool to a byte. Grid: x any, y over the ranges.
KV_DEVICE void fill(const KvpoolFillParams& p) {
    const uint64_t thread =
        static_cast<uint64_t>(dev::block_x()) * dev::block_dim_x() + dev::thread_x();
    const uint64_t threads = static_cast<uint64_t>(dev::grid_dim_x()) * dev::block_dim_x();
    const uint32_t word = (p.value & 0xFFu) * 0x01010101u;
    const dev::Bytes16 words = {{word, word, word, word}};
    for (uint32_t index = dev::block_y(); index < p.num_ranges; index += dev::grid_dim_y()) {
        const uint64_t at = p.ranges + static_cast<uint64_t>(index) * sizeof(KvpoolRange);
        const uint64_t begin = p.pool + dev::load_readonly(dev::at_address<const uint64_t>(at));
        const uint64_t end = begin + dev::load_readonly(dev::at_address<const uint64_t>(at + 8));
        // Bytes up to the first whole word, whole words, and the bytes behind them.
        const uint64_t aligned = (begin + 15) / 16 * 16;
        const uint64_t middle = aligned < end ? aligned : end;
        const uint64_t last = middle + (end - middle) / 16 * 16;
        for (uint64_t i = middle + thread * 16; i < last; i += threads * 16) {
            dev::store_global(dev::at_address<dev::Bytes16>(i), words);
        }
        for (uint64_t i = begin + thread; i < middle; i += threads) {
            dev::store_global(dev::at_address<uint8_t>(i), static_cast<uint8_t>(word));
        }
        for (uint64_t i = last + thread; i < end; i += threads) {
            dev::store_global(dev::at_address<uint8_t>(i), static_cast<uint8_t>(word));
        }
    }
}

}  // namespace kvpool
