// Attention on tensor cores: f16, bf16 and INT8, head_dim a multiple of 16 up to 256, any group.
//
// A block takes an item (at most 16 or 32 packed rows of one sequence: the query heads of a group, of one or several
// rows of the step, side by side) and a KV head, and goes through the keys tile by tile. Tiles of K and V
// come through a pipeline of two stages with asynchronous copies of 16 bytes, once for all rows; bytes that
// no row sees are not read, but zeros take their place, so that nothing an earlier owner left can be
// multiplied with a weight of 0.
//
// The four warps share out a tile's keys for the scores, and head_dim for the values; in between they exchange maxima
// and weights through shared memory. So the state of a row is one maximum, one sum and one vector, and it is
// updated tile by tile in order of position, whatever the number of rows.
//
// Precision: products of halves are exact and summed in f32. Weights are multiplied in two halves (see `split_halves`),
// and so is Q unless it has the halves' own type, so that what remains are errors of f32.
#pragma once

#include "attend.cuh"
#include "fragments.cuh"

namespace kvpool {

// D: the largest head_dim, 64, 128 or 256. M: 16 packed rows each.
template <class Fmt, int D, int M>
struct TensorAttend {
    static constexpr int ROWS = 16 * M;
    static constexpr int TILE = KVPOOL_TENSOR_TILE(D);
    static constexpr int WARPS = 4;
    static constexpr int THREADS = WARPS * dev::WARP;
    static constexpr int KEYS = TILE / WARPS;      // of a warp, for the scores
    static constexpr int KEY_TILES = KEYS / 8;
    static constexpr int DIMS = D / WARPS;         // of a warp, for the values
    static constexpr int CHUNKS = DIMS / 16;       // 16 dims, two n-tiles
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
    static constexpr int Q_ROW = D * 2;            // bytes
    static constexpr int WEIGHT_ROW = TILE + 8;    // floats: four rows lie in different banks

    const KvpoolAttendParams& p;
    Rows rows;
    uint32_t kv_head;
    uint32_t head_dim;
    uint32_t dims;   // head_dim in whole products of scores
    bool q_has_low;
    uint32_t warp, lane, g, t;
    // Shared memory.
    unsigned char* k_tiles;  // [2][TILE][ROW_BYTES]
    unsigned char* v_tiles;  // [2][TILE][ROW_BYTES]
    unsigned char* q_high;   // [ROWS][Q_ROW]
    unsigned char* q_low;    // [ROWS][Q_ROW]
    float* weights;          // [ROWS][WEIGHT_ROW]
    float* stage_scales;     // [2][K, V][SCALES][TILE]; INT8
    float* maxima;           // [WARPS][ROWS]
    float* sums;             // [WARPS][ROWS]
    float* q_factor;         // [ROWS]
    uint32_t* units;         // [SPLIT_TOKENS]

    const float* scales;     // of the tile that is computed: [K, V][SCALES][TILE]

    // Rows g and g + 8 of each 16 of a lane, for the masks.
    uint32_t row_position[M][2];
    // The state of the split. Two n-tiles of a chunk: acc[m][2 * chunk] and the next.
    float acc[M][2 * CHUNKS][4];
    float max[M][2];
    float sum[M][2];  // of this lane's columns

    KV_DEVICE TensorAttend(const KvpoolAttendParams& params) : p(params) {
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
        weights = reinterpret_cast<float*>(q_low + ROWS * Q_ROW);
        stage_scales = weights + ROWS * WEIGHT_ROW;
        scales = stage_scales;
        maxima = stage_scales + 2 * 2 * SCALES * TILE;
        sums = maxima + WARPS * ROWS;
        q_factor = sums + WARPS * ROWS;
        units = reinterpret_cast<uint32_t*>(q_factor + ROWS);
    }

    // ---- Queries ----

    // Places four elements of Q, as halves and what these leave out.
    KV_DEVICE void place_queries(uint32_t row, uint32_t dim, const float (&x)[4]) {
        KV_UNROLL
        for (int pair = 0; pair < 2; ++pair) {
            uint32_t high, low;
            split_halves<Q_BF16>(x[2 * pair], x[2 * pair + 1], high, low);
            const uint32_t column = query_column<Fmt>(dim + 2 * pair);
            const uint32_t at = row * Q_ROW + swizzle<Q_ROW>(row, column / 8) * 16 + column % 8 * 2;
            dev::store_shared(reinterpret_cast<uint32_t*>(q_high + at), high);
            dev::store_shared(reinterpret_cast<uint32_t*>(q_low + at), low);
        }
    }

    // Fills in Q, a warp for each row in turn. For f16 a row is scaled by a power of two, so that no
    // element overflows and small ones keep their bits.
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
            // The largest element becomes 2^13 and more: far from overflow, and what is 2^-24 of it still a half.
            int32_t shift = 0;
            if (!Q_BF16 && q_has_low && amax != 0) {
                shift = 140 - static_cast<int32_t>(amax >> 23);
                shift = shift > 100 ? 100 : shift < -100 ? -100 : shift;
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

    // Asks for K or V of the tile that begins at `first`. The keys from `stop` on are of the next split.
    template <bool IS_V, class View>
    KV_DEVICE void fetch(const View& view, const HeadRows& at, uint32_t first, uint32_t stop, uint32_t stage) {
        const Visible all = rows.seen();
        unsigned char* tile = (IS_V ? v_tiles : k_tiles) + stage * STAGE_BYTES;
        const uint32_t chunk = dev::thread_x() % ROW_CHUNKS;
        KV_UNROLL
        for (int i = 0; i < COPIES; ++i) {
            const uint32_t key = dev::thread_x() / ROW_CHUNKS + i * (THREADS / ROW_CHUNKS);
            const uint32_t position = first + key;
            const bool seen = position < stop && (position >= all.from || position < all.sinks);
            uint64_t from = p.pool;
            uint32_t bytes = 0;
            if (seen && chunk * 16 < at.row_bytes) {
                from = at.row(view.place(position)) + (IS_V ? at.to_v : 0) + chunk * 16;
                bytes = 16;
            }
            const uint32_t place = INT8 && !IS_V ? swizzle_pairs<ROW_BYTES>(key, chunk)
                                                 : swizzle<ROW_BYTES>(key, chunk);
            dev::cp_async_16_or_zero(tile + key * ROW_BYTES + place * 16, dev::at_address<const void>(from), bytes);
        }
        dev::cp_async_commit();
    }

    // Asks for the scales of a tile. They come through registers, since runs of scales are short.
    template <class View>
    KV_DEVICE void fetch_scales(const View& view, const HeadRows& at, uint32_t first, uint32_t stop,
                                float (&fetched)[SCALE_LOADS]) const {
        if constexpr (INT8) {
            const Visible all = rows.seen();
            const uint32_t per_row = p.group.scales_per_row;
            const uint32_t per_kind = TILE * (GROUPS ? per_row : 1);
            KV_UNROLL
            for (int i = 0; i < SCALE_LOADS; ++i) {
                const uint32_t index = i * THREADS + dev::thread_x();
                const bool is_v = index >= per_kind;
                const uint32_t rest = is_v ? index - per_kind : index;
                const uint32_t position = first + (GROUPS ? rest / per_row : rest);
                const bool seen = position < stop && (position >= all.from || position < all.sinks);
                fetched[i] = is_v ? p.v_scale : p.k_scale;
                if (per_row > 0 && index < 2 * per_kind) {
                    fetched[i] = 0.0f;
                    if (seen) {
                        const uint64_t from = at.scale(view.place(position)) + (is_v ? at.scales_to_v : 0) +
                                              (GROUPS ? rest % per_row * KVPOOL_SCALE_BYTES : 0);
                        fetched[i] = scale_to_f32(dev::load_once(dev::at_address<const uint16_t>(from)));
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

    // ---- Scores ----

    // Rows 16 m to 16 m + 15 of Q, columns 16 step to 16 step + 15.
    KV_DEVICE void query_fragment(const unsigned char* q, int m, uint32_t step, uint32_t (&a)[4]) const {
        const uint32_t row = 16 * m + lane % 16, chunk = 2 * step + lane / 16;
        dev::ldmatrix_x4(a, q + row * Q_ROW + swizzle<Q_ROW>(row, chunk) * 16);
    }
    // K of this warp's keys for the two products of 32 columns from 32 * block on.
    KV_DEVICE void key_fragments(const unsigned char* tile, uint32_t block, uint32_t (&b)[2][KEY_TILES][2]) const {
        KV_UNROLL
        for (int n = 0; n < KEY_TILES; ++n) {
            if constexpr (INT8) {
                const uint32_t key = warp * KEYS + 8 * n + g;
                const uint32_t chunk = swizzle_pairs<ROW_BYTES>(key, 2 * block + t / 2);
                const auto raw = dev::load_shared(
                    reinterpret_cast<const dev::Bytes8*>(tile + key * ROW_BYTES + chunk * 16 + t % 2 * 8));
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

    // Scores of this warp's keys: q·k times the scale of k; neither masked nor scaled.
    KV_DEVICE void products(const unsigned char* tile, float (&score)[M][KEY_TILES][4]) const {
        // Of the low halves of Q, apart: where K is infinite they must not make a NaN of an infinity.
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
        KV_UNROLL
        for (int block = 0; block < D / 32; ++block) {
            if (32u * block >= dims) {
                continue;
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
                            multiply_scores<Fmt>(INT8 ? part[n] : low[m][n], a, b[step][n][0], b[step][n][1]);
                        }
                    }
                }
                KV_UNROLL
                for (int n = 0; n < KEY_TILES; ++n) {
                    KV_UNROLL
                    for (int i = 0; i < 4; ++i) {
                        const uint32_t key = warp * KEYS + 8 * n + 2 * t + i % 2;
                        score[m][n][i] =
                            GROUPS ? dev::fma_f32(part[n][i], scales[block * TILE + key], score[m][n][i])
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
                        const bool infinite = (dev::f32_to_bits(high) & 0x7FFFFFFFu) == INFINITY_BITS;
                        score[m][n][i] = infinite ? high : high + low[m][n][i];
                    }
                }
            }
        }
    }

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
                        const bool visible_key = first + key < stop && sees(seen, position, first + key);
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
                    const dev::Bytes8 pair = {{dev::f32_to_bits(x), dev::f32_to_bits(y)}};
                    dev::store_shared(reinterpret_cast<dev::Bytes8*>(weights + row * WEIGHT_ROW + key), pair);
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

    // Weights of 16 keys as two halves each, times the values' scales of this warp's group of dims.
    KV_DEVICE void weight_fragments(int m, int step, int chunk, uint32_t (&high)[4], uint32_t (&low)[4]) const {
        KV_UNROLL
        for (int i = 0; i < 4; ++i) {
            const uint32_t row = 16 * m + g + 8 * (i % 2), key = 16 * step + 2 * t + 8 * (i / 2);
            const auto raw =
                dev::load_shared(reinterpret_cast<const dev::Bytes8*>(weights + row * WEIGHT_ROW + key));
            float x = dev::bits_to_f32(raw.word[0]), y = dev::bits_to_f32(raw.word[1]);
            if constexpr (GROUPS) {
                const float* scale = scales + (SCALES + (warp * DIMS + 16 * chunk) / 32) * TILE + key;
                x *= scale[0];
                y *= scale[1];
            }
            split_halves<V_BF16>(x, y, high[i], low[i]);
        }
    }
    // V of 16 keys and 16 dims of this warp: the two n-tiles' b0 and b1.
    KV_DEVICE void value_fragments(const unsigned char* tile, int step, int chunk, uint32_t (&b)[2][2]) const {
        const uint32_t key = 16 * step + lane % 16;
        if constexpr (INT8) {
            const uint32_t column = warp * CHUNKS + chunk;
            uint32_t r[2];
            dev::ldmatrix_x2_trans(r, tile + key * ROW_BYTES + swizzle<ROW_BYTES>(key, column) * 16);
            b[0][0] = even_bytes_to_bf16(r[0]), b[0][1] = even_bytes_to_bf16(r[1]);
            b[1][0] = even_bytes_to_bf16(r[0] >> 8), b[1][1] = even_bytes_to_bf16(r[1] >> 8);
        } else {
            const uint32_t column = 2 * (warp * CHUNKS + chunk) + lane / 16;
            uint32_t r[4];
            dev::ldmatrix_x4_trans(r, tile + key * ROW_BYTES + swizzle<ROW_BYTES>(key, column) * 16);
            b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
        }
    }
    KV_DEVICE bool has_chunk(int chunk) const { return warp * DIMS + 16u * chunk < head_dim; }

    // Adds the tile's values to `acc`.
    KV_DEVICE void add_values(const unsigned char* tile) {
        KV_UNROLL
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
        const uint32_t early = rows.position(0), late = rows.end() - 1;
        const uint32_t end = stop - first < TILE ? stop : first + TILE;
        const Visible from_early = rows.seen_by(early), from_late = rows.seen_by(late);
        return early != late && (end > early + 1 || (first < from_late.from && end > from_early.from));
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
    // As add_values, row by row with the keys that the row does not see set to 0: a NaN of a later token must
    // not reach an earlier row, and 0 times NaN is NaN.
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
                    const bool high_seen = first + key + 1 < stop && sees(seen, position, first + key + 1);
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
        while (tile < stop && !rows.sees_any(tile, tile + TILE < stop ? tile + TILE : stop)) {
            tile += TILE;
        }
        return tile;
    }

    template <class View>
    KV_DEVICE void split_keys(const View& view, uint32_t start, uint32_t stop) {
        const HeadRows at(p.group, p.pool, p.layer, kv_head);
        float fetched[SCALE_LOADS];
        uint32_t tile = next_tile(start, stop);
        uint32_t stage = 0;
        fetch<false>(view, at, tile, stop, stage);
        fetch<true>(view, at, tile, stop, stage);
        fetch_scales(view, at, tile, stop, fetched);
        while (tile < stop) {
            const uint32_t next = next_tile(tile + TILE, stop);
            const unsigned char* k_tile = k_tiles + stage * STAGE_BYTES;
            const unsigned char* v_tile = v_tiles + stage * STAGE_BYTES;
            place_scales(fetched, stage);
            dev::cp_async_wait<1>();
            dev::sync_threads();
            // K is here, and nobody reads the tile before any more. Past the end, two groups of nothing.
            stage ^= 1;
            if (next < stop) {
                fetch<false>(view, at, next, stop, stage);
                fetch<true>(view, at, next, stop, stage);
                fetch_scales(view, at, next, stop, fetched);
            } else {
                dev::cp_async_commit();
                dev::cp_async_commit();
            }
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
            tile = next;
        }
        dev::cp_async_wait<0>();
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
        // The split before is done with by all.
        dev::sync_threads();
        if (p.group.addressing == KVPOOL_ADDRESSING_BLOCKS) {
            load_units(p, rows, start, stop, units);
            dev::sync_threads();
            const SharedTable table = {units, start >> p.group.unit_shift};
            split_keys(PagedView<SharedTable>(p.group, table), start, stop);
        } else {
            split_keys(ContiguousView(p.group, rows.seq.unit), start, stop);
        }
        sum_columns();
    }

    // ---- Results ----

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
                    const float a0 = values[m][2 * chunk][2 * half], a1 = values[m][2 * chunk][2 * half + 1];
                    const float b0 = values[m][2 * chunk + 1][2 * half], b1 = values[m][2 * chunk + 1][2 * half + 1];
                    float x[4];
                    uint32_t dim = warp * DIMS + 16 * chunk;
                    if constexpr (INT8) {
                        // One n-tile has the even dims, the other the odd ones.
                        x[0] = a0, x[1] = b0, x[2] = a1, x[3] = b1;
                        dim += 4 * t;
                    } else {
                        // An even lane takes the first n-tile's of both, an odd one the second's.
                        const bool odd = t % 2 != 0;
                        const float c0 = dev::shuffle_xor(odd ? a0 : b0, 1), c1 = dev::shuffle_xor(odd ? a1 : b1, 1);
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

    KV_DEVICE void store_partial() const {
        each_quad(acc, [&](uint32_t row, uint32_t dim, const float (&x)[4]) {
            const uint32_t place = rows.item.partial + row;
            const uint64_t at = partial_acc_at(p.partial_acc, kv_head, p.max_partials, place, head_dim);
            store_tensor_quad(at, dim, KVPOOL_DTYPE_F32, x);
        });
        KV_UNROLL
        for (int m = 0; m < M; ++m) {
            KV_UNROLL
            for (int half = 0; half < 2; ++half) {
                const uint32_t row = 16 * m + 8 * half + g;
                if (warp == 0 && t == 0 && row < rows.item.count) {
                    const uint64_t at = partial_ml_at(p.partial_ml, kv_head, p.max_partials, rows.item.partial + row);
                    const dev::Bytes8 pair = {{dev::f32_to_bits(max[m][half]), dev::f32_to_bits(sum[m][half])}};
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
            const uint32_t stop = end - start < KVPOOL_SPLIT_TOKENS ? end : start + KVPOOL_SPLIT_TOKENS;
            if (!rows.sees_any(start, stop)) {
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
                KV_UNROLL
                for (int n = 0; n < 2 * CHUNKS; ++n) {
                    KV_UNROLL
                    for (int i = 2 * half; i < 2 * half + 2; ++i) {
                        joined[m][n][i] = finish_value(joined[m][n][i], total[m][half].sum);
                    }
                }
                const uint32_t row = 16 * m + 8 * half + g;
                if (p.lse != 0 && warp == 0 && t == 0 && row < rows.item.count) {
                    const uint64_t head = rows.tensor_head(row, kv_head, p.group.num_kv_heads);
                    dev::store_global(dev::at_address<float>(p.lse + head * 4), finish_lse(total[m][half]));
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
            rows = load_rows(p.seqs, p.items, index);
            rows.q_per_kv = p.q_per_kv;
            rows.window = p.window;
            rows.sink_tokens = p.group.sink_tokens;
            // Nobody overwrites what others still read.
            dev::sync_threads();
            load_queries();
            const uint32_t end = rows.end();
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
