// What the tensor-core kernel works on: queries, tiles of K and V and their scales on their way to
// shared memory, and the fragments that are read out of it. See attend_tensor.cuh.
#pragma once

#include "attend.cuh"
#include "fragments.cuh"

namespace kvpool {

// An item's queries and tiles, and their fragments.
// D: the largest head_dim, 64, 128 or 256. M: 16 packed rows each.
template <class Fmt, int D, int M>
struct TensorTiles {
    static constexpr int ROWS = 16 * M;
    static constexpr int TILE = KVPOOL_TENSOR_TILE(D);
    static constexpr int WARPS = 4;
    static constexpr int THREADS = WARPS * dev::WARP;
    static constexpr int KEYS = TILE / WARPS;  // of a warp, for the scores
    static constexpr int KEY_TILES = KEYS / 8;
    static constexpr int DIMS = D / WARPS;    // of a warp, for the values
    static constexpr int CHUNKS = DIMS / 16;  // 16 dims, two n-tiles
    static constexpr bool INT8 = Fmt::FORMAT == KVPOOL_FORMAT_INT8;
    static constexpr bool GROUPS = SAME<Fmt, Int8Groups>;
    static constexpr bool Q_BF16 = SAME<Fmt, Bf16>;
    static constexpr bool V_BF16 = !SAME<Fmt, F16>;
    static constexpr int ROW_BYTES = D * Fmt::BYTES;
    static constexpr int ROW_CHUNKS = ROW_BYTES / 16;
    static constexpr int COPIES = TILE * ROW_CHUNKS / THREADS;  // of a thread, for K or V
    static constexpr int SCALES = GROUPS ? D / 32 : 1;          // of a vector
    static constexpr int SCALE_LOADS = (2 * TILE * SCALES + THREADS - 1) / THREADS;
    static constexpr int STAGE_BYTES = TILE * ROW_BYTES;
    static constexpr int Q_ROW = D * 2;  // bytes
    // Weights lie as two halves, ready to be multiplied; with a scale for every 32 elements as
    // floats, since each group of dims multiplies them with others. Of floats, four rows lie in
    // different banks.
    static constexpr int WEIGHT_ROW = GROUPS ? (TILE + 8) * 4 : TILE * 2;  // bytes

    const KvpoolAttendParams& p;
    Rows rows;
    uint32_t kv_head;
    uint32_t head_dim;
    uint32_t dims;  // head_dim in whole products of scores
    bool q_has_low;
    uint32_t warp, lane, g, t;
    // Shared memory.
    unsigned char* k_tiles;  // [2][TILE][ROW_BYTES]
    unsigned char* v_tiles;  // [2][TILE][ROW_BYTES]
    unsigned char* q_high;   // [ROWS][Q_ROW]
    unsigned char* q_low;    // [ROWS][Q_ROW]
    unsigned char* weights;  // [ROWS][WEIGHT_ROW], twice if halves
    float* stage_scales;     // [2][K, V][SCALES][TILE]; INT8
    float* maxima;           // [WARPS][ROWS]
    float* sums;             // [WARPS][ROWS]
    float* q_factor;         // [ROWS]
    uint32_t* units;         // [SPLIT_TOKENS]

    const float* scales;  // of the tile that is computed: [K, V][SCALES][TILE]

    // Rows g and g + 8 of each 16 of a lane, for the masks.
    uint32_t row_position[M][2];
    KV_DEVICE TensorTiles(const KvpoolAttendParams& params) : p(params) {
        kv_head = dev::block_y();
        head_dim = p.group.head_dim;
        constexpr uint32_t STEP = INT8 ? 32 : 16;
        dims = (head_dim + STEP - 1) / STEP * STEP;
        q_has_low = p.q_dtype != (Q_BF16 ? KVPOOL_DTYPE_BF16 : KVPOOL_DTYPE_F16);
        warp = dev::warp_index();
        lane = dev::lane_index();
        g = lane / 4;
        t = lane % 4;
        unsigned char* memory = dev::dynamic_shared();
        k_tiles = memory;
        v_tiles = k_tiles + 2 * STAGE_BYTES;
        q_high = v_tiles + 2 * STAGE_BYTES;
        q_low = q_high + ROWS * Q_ROW;
        weights = q_low + ROWS * Q_ROW;
        stage_scales = reinterpret_cast<float*>(weights + (GROUPS ? 1 : 2) * ROWS * WEIGHT_ROW);
        scales = stage_scales;
        maxima = stage_scales + 2 * 2 * SCALES * TILE;
        sums = maxima + WARPS * ROWS;
        q_factor = sums + WARPS * ROWS;
        units = reinterpret_cast<uint32_t*>(q_factor + ROWS);
    }

    // ---- Queries ----

    // Places four elements of Q, as halves and what these leave out.
    KV_DEVICE void place_queries(uint32_t row, uint32_t dim, const float (&x)[4]) {
        dev::Bytes8 high, low;
        KV_UNROLL
        for (int pair = 0; pair < 2; ++pair) {
            split_halves<Q_BF16>(x[2 * pair], x[2 * pair + 1], high.word[pair], low.word[pair]);
            low.word[pair] = low_of_finite<Q_BF16>(high.word[pair], low.word[pair]);
        }
        const auto at = [row](uint32_t column) {
            return row * Q_ROW + swizzle<Q_ROW>(row, column / 8) * 16 + column % 8 * 2;
        };
        if constexpr (INT8) {
            KV_UNROLL
            for (int pair = 0; pair < 2; ++pair) {
                const uint32_t to = at(query_column<Fmt>(dim + 2 * pair));
                dev::store_shared(reinterpret_cast<uint32_t*>(q_high + to), high.word[pair]);
                dev::store_shared(reinterpret_cast<uint32_t*>(q_low + to), low.word[pair]);
            }
        } else {
            dev::store_shared(reinterpret_cast<dev::Bytes8*>(q_high + at(dim)), high);
            dev::store_shared(reinterpret_cast<dev::Bytes8*>(q_low + at(dim)), low);
        }
    }

    // Fills in Q, a warp for each row in turn. For f16 a row is scaled by a power of two, so that
    // no element overflows and small ones keep their bits.
    KV_DEVICE void load_queries() {
        constexpr int QUADS = D > 128 ? D / 128 : 1;
        for (uint32_t row = warp; row < ROWS; row += WARPS) {
            const bool live = row < rows.item.count;
            float x[QUADS][4];
            uint32_t amax = 0;
            KV_UNROLL
            for (int quad = 0; quad < QUADS; ++quad) {
                const uint32_t dim = 4 * (lane + 32 * quad);
                KV_UNROLL
                for (int j = 0; j < 4; ++j) {
                    x[quad][j] = 0.0f;
                }
                if (live && dim < head_dim) {
                    const uint64_t head = rows.tensor_head(row, kv_head, p.group.num_kv_heads);
                    load_tensor_quad(p.q, head * head_dim + dim, p.q_dtype, x[quad]);
                }
                KV_UNROLL
                for (int j = 0; j < 4; ++j) {
                    const uint32_t bits = dev::f32_to_bits(x[quad][j]) & 0x7FFFFFFFu;
                    amax = bits < INFINITY_BITS && bits > amax ? bits : amax;
                }
            }
            KV_UNROLL
            for (uint32_t mask = 16; mask > 0; mask /= 2) {
                const uint32_t other = dev::shuffle_xor(amax, mask);
                amax = other > amax ? other : amax;
            }
            // The largest element becomes 2^13 and more: far from overflow, and what is 2^-24 of it
            // still a half. (The shift is -114 at least, so that it and its opposite are exponents
            // of floats.)
            int32_t shift = 0;
            if (!Q_BF16 && q_has_low && amax != 0) {
                shift = 140 - static_cast<int32_t>(amax >> 23);
                shift = shift > 100 ? 100 : shift;
            }
            const float factor = dev::bits_to_f32(static_cast<uint32_t>(127 + shift) << 23);
            const float back = dev::bits_to_f32(static_cast<uint32_t>(127 - shift) << 23);
            KV_UNROLL
            for (int quad = 0; quad < QUADS; ++quad) {
                const uint32_t dim = 4 * (lane + 32 * quad);
                KV_UNROLL
                for (int j = 0; j < 4; ++j) {
                    x[quad][j] *= factor;
                }
                if (dim < D) {
                    place_queries(row, dim, x[quad]);
                }
            }
            if (lane == 0) {
                q_factor[row] = p.softmax_scale * LOG2_E * back;
            }
        }
        KV_UNROLL
        for (int m = 0; m < M; ++m) {
            KV_UNROLL
            for (int half = 0; half < 2; ++half) {
                // Rows beyond the item's see what its last one sees, and go nowhere.
                const uint32_t row = 16 * m + 8 * half + g;
                const uint32_t last = rows.item.count - 1;
                row_position[m][half] = rows.position(row < last ? row : last);
            }
        }
    }

    // ---- Tiles ----

    // Asks for a tile that begins at `first`: K, then V, then (INT8) scales. The keys from `stop`
    // on are of the next split. Scales come through registers, since runs of them are short.
    KV_DEVICE void fetch(const HeadRows& at, uint32_t first, uint32_t stop, uint32_t stage,
                         float (&fetched)[SCALE_LOADS]) {
        if (p.group.addressing == KVPOOL_ADDRESSING_BLOCKS) {
            const SharedTable table = {
                units, first / KVPOOL_SPLIT_TOKENS * KVPOOL_SPLIT_TOKENS >> p.group.unit_shift};
            fetch_through(PagedView<SharedTable>(p.group, table), at, first, stop, stage, fetched);
        } else {
            ContiguousView view(p.group, rows.seq.unit);
            view.begin_at(first);
            fetch_through(view, at, first, stop, stage, fetched);
        }
    }
    template <class View>
    KV_DEVICE void fetch_through(const View& view, const HeadRows& at, uint32_t first,
                                 uint32_t stop, uint32_t stage, float (&fetched)[SCALE_LOADS]) {
        KV_UNROLL_BY(1)
        for (int kind = 0; kind < 2; ++kind) {
            fetch_vectors(view, at, first, stop, stage, kind != 0);
            dev::cp_async_commit();
        }
        fetch_scales(view, at, first, stop, fetched);
    }
    template <class View>
    KV_DEVICE void fetch_vectors(const View& view, const HeadRows& at, uint32_t first,
                                 uint32_t stop, uint32_t stage, bool is_v) {
        unsigned char* tile = (is_v ? v_tiles : k_tiles) + stage * STAGE_BYTES;
        const uint32_t chunk = dev::thread_x() % ROW_CHUNKS;
        const uint64_t within = (is_v ? at.to_v : 0) + chunk * 16;
        KV_UNROLL
        for (int i = 0; i < COPIES; ++i) {
            const uint32_t key = dev::thread_x() / ROW_CHUNKS + i * (THREADS / ROW_CHUNKS);
            const uint32_t position = first + key;
            uint64_t from = p.pool;
            uint32_t bytes = 0;
            if (position < stop && rows.any_sees(position) && chunk * 16 < at.row_bytes) {
                from = at.row(view.place(position)) + within;
                bytes = 16;
            }
            const uint32_t place = INT8 && !is_v ? swizzle_pairs<ROW_BYTES>(key, chunk)
                                                 : swizzle<ROW_BYTES>(key, chunk);
            dev::cp_async_16_or_zero(tile + key * ROW_BYTES + place * 16,
                                     dev::at_address<const void>(from), bytes);
        }
    }
    template <class View>
    KV_DEVICE void fetch_scales(const View& view, const HeadRows& at, uint32_t first, uint32_t stop,
                                float (&fetched)[SCALE_LOADS]) const {
        if constexpr (INT8) {
            const uint32_t per_row = p.group.scales_per_row;
            const uint32_t per_kind = TILE * (GROUPS ? per_row : 1);
            KV_UNROLL
            for (int i = 0; i < SCALE_LOADS; ++i) {
                const uint32_t index = i * THREADS + dev::thread_x();
                const bool is_v = index >= per_kind;
                const uint32_t rest = is_v ? index - per_kind : index;
                const uint32_t position = first + (GROUPS ? rest / per_row : rest);
                fetched[i] = is_v ? p.v_scale : p.k_scale;
                if (per_row > 0 && index < 2 * per_kind) {
                    fetched[i] = 0.0f;
                    if (position < stop && rows.any_sees(position)) {
                        const uint64_t from = at.scale(view.place(position)) +
                                              (is_v ? at.scales_to_v : 0) +
                                              (GROUPS ? rest % per_row * KVPOOL_SCALE_BYTES : 0);
                        fetched[i] =
                            scale_to_f32(dev::load_once(dev::at_address<const uint16_t>(from)));
                    }
                }
            }
        }
    }
    KV_DEVICE void place_scales(const float (&fetched)[SCALE_LOADS], uint32_t stage) {
        if constexpr (INT8) {
            float* to = stage_scales + stage * 2 * SCALES * TILE;
            scales = to;
            const uint32_t per_row = GROUPS ? p.group.scales_per_row : 1;
            const uint32_t per_kind = TILE * per_row;
            KV_UNROLL
            for (int i = 0; i < SCALE_LOADS; ++i) {
                const uint32_t index = i * THREADS + dev::thread_x();
                const bool is_v = index >= per_kind;
                const uint32_t rest = is_v ? index - per_kind : index;
                if (index < 2 * per_kind) {
                    const uint32_t key = rest / per_row, which = rest % per_row;
                    to[((is_v ? SCALES : 0) + which) * TILE + key] = fetched[i];
                }
            }
        }
    }

    // ---- Fragments ----

    // Rows 16 m to 16 m + 15 of Q, columns 16 step to 16 step + 15.
    KV_DEVICE void query_fragment(const unsigned char* q, int m, uint32_t step,
                                  uint32_t (&a)[4]) const {
        const uint32_t row = 16 * m + lane % 16, chunk = 2 * step + lane / 16;
        dev::ldmatrix_x4(a, q + row * Q_ROW + swizzle<Q_ROW>(row, chunk) * 16);
    }
    // K of this warp's keys for the two products of 32 columns from 32 * block on.
    KV_DEVICE void key_fragments(const unsigned char* tile, uint32_t block,
                                 uint32_t (&b)[2][KEY_TILES][2]) const {
        KV_UNROLL
        for (int n = 0; n < KEY_TILES; ++n) {
            if constexpr (INT8) {
                const uint32_t key = warp * KEYS + 8 * n + g;
                const uint32_t chunk = swizzle_pairs<ROW_BYTES>(key, 2 * block + t / 2);
                const auto raw = dev::load_shared(reinterpret_cast<const dev::Bytes8*>(
                    tile + key * ROW_BYTES + chunk * 16 + t % 2 * 8));
                bytes_to_f16(raw.word[0], b[0][n]);
                bytes_to_f16(raw.word[1], b[1][n]);
            } else {
                const uint32_t key = warp * KEYS + 8 * n + lane % 8;
                uint32_t r[4];
                dev::ldmatrix_x4(
                    r, tile + key * ROW_BYTES + swizzle<ROW_BYTES>(key, 4 * block + lane / 8) * 16);
                b[0][n][0] = r[0], b[0][n][1] = r[1], b[1][n][0] = r[2], b[1][n][1] = r[3];
            }
        }
    }

    // Where 16 bytes of a row's weights in halves lie.
    KV_DEVICE uint32_t weight_chunk(uint32_t row, uint32_t chunk) const {
        return row * WEIGHT_ROW + swizzle<WEIGHT_ROW>(row, chunk) * 16;
    }
    // Places the weights of two neighbouring keys.
    KV_DEVICE void place_weights(uint32_t row, uint32_t key, float x, float y) {
        if constexpr (GROUPS) {
            const dev::Bytes8 pair = {{dev::f32_to_bits(x), dev::f32_to_bits(y)}};
            dev::store_shared(reinterpret_cast<dev::Bytes8*>(weights + row * WEIGHT_ROW + key * 4),
                              pair);
        } else {
            uint32_t high, low;
            split_halves<V_BF16>(x, y, high, low);
            unsigned char* to = weights + weight_chunk(row, key / 8) + key % 8 * 2;
            dev::store_shared(reinterpret_cast<uint32_t*>(to), high);
            dev::store_shared(reinterpret_cast<uint32_t*>(to + ROWS * WEIGHT_ROW), low);
        }
    }
    // Weights of 16 keys as two halves each, times the values' scales of the chunk's group of dims.
    KV_DEVICE void weight_fragments(int m, int step, int chunk, uint32_t (&high)[4],
                                    uint32_t (&low)[4]) const {
        if constexpr (GROUPS) {
            KV_UNROLL
            for (int i = 0; i < 4; ++i) {
                const uint32_t row = 16 * m + g + 8 * (i % 2),
                               key = 16 * step + 2 * t + 8 * (i / 2);
                const auto raw = dev::load_shared(
                    reinterpret_cast<const dev::Bytes8*>(weights + row * WEIGHT_ROW + key * 4));
                const float* scale =
                    scales + (SCALES + (warp * DIMS + 16 * chunk) / 32) * TILE + key;
                split_halves<V_BF16>(dev::bits_to_f32(raw.word[0]) * scale[0],
                                     dev::bits_to_f32(raw.word[1]) * scale[1], high[i], low[i]);
            }
        } else {
            const unsigned char* from =
                weights + weight_chunk(16 * m + lane % 16, 2 * step + lane / 16);
            dev::ldmatrix_x4(high, from);
            dev::ldmatrix_x4(low, from + ROWS * WEIGHT_ROW);
        }
    }
    // V of 16 keys and 16 dims of this warp: the two n-tiles' b0 and b1.
    KV_DEVICE void value_fragments(const unsigned char* tile, int step, int chunk,
                                   uint32_t (&b)[2][2]) const {
        const uint32_t key = 16 * step + lane % 16;
        if constexpr (INT8) {
            const uint32_t column = warp * CHUNKS + chunk;
            uint32_t r[2];
            dev::ldmatrix_x2_trans(r,
                                   tile + key * ROW_BYTES + swizzle<ROW_BYTES>(key, column) * 16);
            b[0][0] = even_bytes_to_bf16(r[0]), b[0][1] = even_bytes_to_bf16(r[1]);
            b[1][0] = even_bytes_to_bf16(r[0] >> 8), b[1][1] = even_bytes_to_bf16(r[1] >> 8);
        } else {
            const uint32_t column = 2 * (warp * CHUNKS + chunk) + lane / 16;
            uint32_t r[4];
            dev::ldmatrix_x4_trans(r,
                                   tile + key * ROW_BYTES + swizzle<ROW_BYTES>(key, column) * 16);
            b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
        }
    }
    KV_DEVICE bool has_chunk(int chunk) const { return warp * DIMS + 16u * chunk < head_dim; }

    // Scores of this warp's keys: q·k times the scale of k; neither masked nor scaled.
    KV_DEVICE void products(const unsigned char* tile, float (&score)[M][KEY_TILES][4]) const {
        // Of the low halves of Q, apart: where K is infinite they must not make a NaN of an
        // infinity.
        float low[M][KEY_TILES][4];
        KV_UNROLL
        for (int m = 0; m < M; ++m) {
            KV_UNROLL
            for (int n = 0; n < KEY_TILES; ++n) {
                KV_UNROLL
                for (int i = 0; i < 4; ++i) {
                    score[m][n][i] = low[m][n][i] = 0.0f;
                }
            }
        }
        // (Unrolled further, the loop asks for more registers than there are.)
        KV_UNROLL_BY(2)
        for (int block = 0; block < D / 32; ++block) {
            if (32u * block >= dims) {
                break;
            }
            uint32_t b[2][KEY_TILES][2];
            key_fragments(tile, block, b);
            KV_UNROLL
            for (int m = 0; m < M; ++m) {
                float part[KEY_TILES][4];
                KV_UNROLL
                for (int n = 0; n < KEY_TILES; ++n) {
                    KV_UNROLL
                    for (int i = 0; i < 4; ++i) {
                        part[n][i] = GROUPS ? 0.0f : score[m][n][i];
                    }
                }
                KV_UNROLL
                for (int step = 0; step < 2; ++step) {
                    // What lies beyond head_dim in a block of 16-bit columns is zero in both.
                    uint32_t a[4];
                    query_fragment(q_high, m, 2 * block + step, a);
                    KV_UNROLL
                    for (int n = 0; n < KEY_TILES; ++n) {
                        multiply_scores<Fmt>(part[n], a, b[step][n][0], b[step][n][1]);
                    }
                    if (q_has_low) {
                        query_fragment(q_low, m, 2 * block + step, a);
                        KV_UNROLL
                        for (int n = 0; n < KEY_TILES; ++n) {
                            multiply_scores<Fmt>(INT8 ? part[n] : low[m][n], a, b[step][n][0],
                                                 b[step][n][1]);
                        }
                    }
                }
                KV_UNROLL
                for (int n = 0; n < KEY_TILES; ++n) {
                    KV_UNROLL
                    for (int i = 0; i < 4; ++i) {
                        const uint32_t key = warp * KEYS + 8 * n + 2 * t + i % 2;
                        score[m][n][i] = GROUPS
                                             ? dev::fma_f32(part[n][i], scales[block * TILE + key],
                                                            score[m][n][i])
                                             : part[n][i];
                    }
                }
            }
        }
        if (!INT8 && q_has_low) {
            KV_UNROLL
            for (int m = 0; m < M; ++m) {
                KV_UNROLL
                for (int n = 0; n < KEY_TILES; ++n) {
                    KV_UNROLL
                    for (int i = 0; i < 4; ++i) {
                        const float high = score[m][n][i];
                        const bool infinite =
                            (dev::f32_to_bits(high) & 0x7FFFFFFFu) == INFINITY_BITS;
                        score[m][n][i] = infinite ? high : high + low[m][n][i];
                    }
                }
            }
        }
    }

    // Gives four neighbouring dims of a row of this lane to `store(row, dim, x)`, for all its rows.
    template <class Store>
    KV_DEVICE void each_quad(const float (&values)[M][2 * CHUNKS][4], const Store& store) const {
        KV_UNROLL
        for (int m = 0; m < M; ++m) {
            KV_UNROLL
            for (int half = 0; half < 2; ++half) {
                const uint32_t row = 16 * m + 8 * half + g;
                KV_UNROLL
                for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                    const float a0 = values[m][2 * chunk][2 * half],
                                a1 = values[m][2 * chunk][2 * half + 1];
                    const float b0 = values[m][2 * chunk + 1][2 * half],
                                b1 = values[m][2 * chunk + 1][2 * half + 1];
                    float x[4];
                    uint32_t dim = warp * DIMS + 16 * chunk;
                    if constexpr (INT8) {
                        // One n-tile has the even dims, the other the odd ones.
                        x[0] = a0, x[1] = b0, x[2] = a1, x[3] = b1;
                        dim += 4 * t;
                    } else {
                        // An even lane takes the first n-tile's of both, an odd one the second's.
                        const bool odd = t % 2 != 0;
                        const float c0 = dev::shuffle_xor(odd ? a0 : b0, 1),
                                    c1 = dev::shuffle_xor(odd ? a1 : b1, 1);
                        x[0] = odd ? c0 : a0, x[1] = odd ? c1 : a1;
                        x[2] = odd ? b0 : c0, x[3] = odd ? b1 : c1;
                        dim += (odd ? 8 : 0) + t / 2 * 4;
                    }
                    if (row < rows.item.count && dim < head_dim) {
                        store(row, dim, x);
                    }
                }
            }
        }
    }
};

}  // namespace kvpool
