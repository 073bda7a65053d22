// Attention for tests: work lists of every kind, launches, and the exact answer.
#pragma once

#include "rig.hpp"

namespace kvpool::tests {

// How an attend call is dealt out.
struct Deal {
    bool tensor = false;        // tensor-core path, where the geometry has one
    uint32_t m = 1;             // its 16s of packed rows
    bool split = true;          // splits apart and combined, or all in one
    uint32_t rows_at_once = 0;  // packed rows of an item, at most; 0 = as many as the kernel takes
    uint32_t grid = 5;
};

struct AttendCall {
    uint32_t layer = 0;
    uint32_t window = 0;
    uint32_t q_per_kv = 1;
    uint32_t q_dtype = KVPOOL_DTYPE_F32;
    uint32_t out_dtype = KVPOOL_DTYPE_F32;
    float softmax_scale = 0.3f;
    float q_factor = 1.0f;  // on the usual queries
};

// Some rows of a sequence in a step.
struct Chunk {
    uint32_t seq;
    uint32_t first_position;
    uint32_t rows;
};

inline bool has_tensor_path(const Shape& shape) {
    return shape.format.element != KVPOOL_FORMAT_F32 && shape.head_dim % 16 == 0 &&
           shape.head_dim <= 256;
}
inline uint32_t tensor_width(uint32_t head_dim) {
    return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}
inline uint32_t plain_width(const Shape& shape) {
    const bool f32 = shape.format.element == KVPOOL_FORMAT_F32;
    return f32 && shape.head_dim <= 128 ? 128 : shape.head_dim <= 256 ? 256 : 1024;
}

// What a query at `position` sees: every key of `0..sinks` and `from..=position`.
inline bool sees_key(const Shape& shape, uint32_t window, uint32_t position, uint32_t key) {
    if (key > position) return false;
    if (window == 0 || key + window > position) return true;
    return key < shape.sink_tokens;
}

// An element of Q of one row.
inline float query(uint32_t seq, uint32_t position, uint32_t head, uint32_t i) {
    return 2.0f * element(seq + 77, position, 5, 1, head, i);
}

struct Answer {
    std::vector<float> out;  // [rows, num_q_heads, head_dim]
    std::vector<float> lse;  // [rows, num_q_heads]
};

struct AttendRun {
    Pool& pool;
    AttendCall call;
    Deal deal;
    std::vector<Chunk> chunks;
    uint32_t rows = 0;
    uint32_t num_q_heads;
    std::string kernel;
    uint32_t shared_bytes;
    KvpoolAttendParams params{};
    KvpoolCombineParams combine{};
    std::vector<KvpoolItem> items, combined;

    AttendRun(Pool& pool, const AttendCall& call, const std::vector<Chunk>& chunks,
              const Deal& deal)
        : pool(pool), call(call), deal(deal), chunks(chunks) {
        for (const Chunk& chunk : chunks) rows += chunk.rows;
        num_q_heads = call.q_per_kv * pool.shape.num_kv_heads;
        const Shape& shape = pool.shape;
        const std::string head = std::string("kvpool_attend_") + shape.format.name;
        uint32_t most;
        if (deal.tensor) {
            CHECK(has_tensor_path(shape), "no such path");
            const uint32_t width = tensor_width(shape.head_dim);
            kernel = head + "_t" + std::to_string(width) + "x" + std::to_string(deal.m);
            const bool groups = shape.format.scale == KVPOOL_SCALE_PER_GROUP_32;
            shared_bytes = KVPOOL_TENSOR_SHARED(shape.format.bytes, groups, width, deal.m);
            most = 16 * deal.m;
        } else {
            const uint32_t width = plain_width(shape);
            kernel = head + "_w" + std::to_string(width);
            shared_bytes = KVPOOL_WIDE_SHARED(shape.head_dim, width);
            most = KVPOOL_WIDE_ROWS(width);
        }
        if (deal.rows_at_once != 0) most = std::min(most, deal.rows_at_once);
        make_items(most);
    }

    bool split_is_seen(const Chunk& chunk, uint32_t first, uint32_t count, uint32_t split) const {
        const uint32_t early = chunk.first_position + first / call.q_per_kv;
        const uint32_t late = chunk.first_position + (first + count - 1) / call.q_per_kv;
        for (uint32_t key = split * KVPOOL_SPLIT_TOKENS; key < (split + 1) * KVPOOL_SPLIT_TOKENS;
             ++key) {
            for (uint32_t position = early; position <= late; ++position) {
                if (sees_key(pool.shape, call.window, position, key)) return true;
            }
        }
        return false;
    }

    void make_items(uint32_t most) {
        uint32_t places = 0;
        for (uint32_t seq = 0; seq < chunks.size(); ++seq) {
            const uint32_t packed = chunks[seq].rows * call.q_per_kv;
            for (uint32_t first = 0; first < packed; first += most) {
                const uint32_t count = std::min(most, packed - first);
                if (!deal.split) {
                    items.push_back({seq, first, count, KVPOOL_ALL_SPLITS, 0, 0});
                    continue;
                }
                KvpoolItem whole = {seq, first, count, 0, places, 0};
                const uint32_t end = chunks[seq].first_position + chunks[seq].rows;
                for (uint32_t split = 0; split * KVPOOL_SPLIT_TOKENS < end; ++split) {
                    if (split_is_seen(chunks[seq], first, count, split)) {
                        items.push_back({seq, first, count, split, places, 0});
                        places += count;
                        ++whole.splits;
                    }
                }
                combined.push_back(whole);
            }
        }
        params.max_partials = combine.max_partials = places + 3;
    }

    Answer launch() {
        Device& device = pool.device;
        const Shape& shape = pool.shape;
        const size_t outputs = static_cast<size_t>(rows) * num_q_heads * shape.head_dim;
        Tensor q(device, call.q_dtype, outputs), out(device, call.out_dtype, outputs);
        std::vector<KvpoolSeq> seqs;
        std::vector<uint32_t> tables = {12345};
        uint32_t row = 0;
        for (const Chunk& chunk : chunks) {
            KvpoolSeq seq = {pool.tables[chunk.seq][0],
                             row,
                             chunk.rows,
                             chunk.first_position,
                             static_cast<uint32_t>(tables.size()),
                             0};
            if (shape.addressing == KVPOOL_ADDRESSING_BLOCKS) {
                // A windowed sequence's blocks that nobody sees are gone: the kernel must not look
                // there.
                for (uint32_t block = 0;
                     block * shape.unit_tokens < chunk.first_position + chunk.rows; ++block) {
                    bool seen = false;
                    for (uint32_t i = 0; i < shape.unit_tokens; ++i) {
                        for (uint32_t r = 0; r < chunk.rows; ++r) {
                            seen = seen || sees_key(shape, call.window, chunk.first_position + r,
                                                    block * shape.unit_tokens + i);
                        }
                    }
                    tables.push_back(seen ? pool.tables[chunk.seq][block] : KVPOOL_NO_BLOCK);
                }
            }
            seqs.push_back(seq);
            for (uint32_t r = 0; r < chunk.rows; ++r, ++row) {
                for (uint32_t head = 0; head < num_q_heads; ++head) {
                    for (uint32_t i = 0; i < shape.head_dim; ++i) {
                        q.set((static_cast<size_t>(row) * num_q_heads + head) * shape.head_dim + i,
                              call.q_factor * query(chunk.seq, chunk.first_position + r, head, i));
                    }
                }
            }
        }
        auto lse = device.array<float>(std::max(1u, rows * num_q_heads));
        auto device_seqs = device.array(seqs);
        auto device_tables = device.array(tables);
        auto device_items = device.array(items);
        const size_t places = static_cast<size_t>(params.max_partials) * shape.num_kv_heads;
        auto partial_acc = device.array<float>(places * shape.head_dim);
        auto partial_ml = device.array<float>(places * 2);

        params.group = pool.group;
        params.pool = pool.bytes.address();
        params.q = q.address();
        params.out = out.address();
        params.lse = lse.address();
        params.seqs = device_seqs.address();
        params.tables = device_tables.address();
        params.items = device_items.address();
        params.partial_acc = partial_acc.address();
        params.partial_ml = partial_ml.address();
        params.num_items = static_cast<uint32_t>(items.size());
        params.layer = call.layer;
        params.window = call.window;
        params.q_per_kv = call.q_per_kv;
        params.q_dtype = call.q_dtype;
        params.out_dtype = call.out_dtype;
        params.softmax_scale = call.softmax_scale;
        params.k_scale = K_SCALE;
        params.v_scale = V_SCALE;
        run(device, kernel, {deal.grid, shape.num_kv_heads}, {128}, shared_bytes, params);
        if (!combined.empty()) {
            auto device_combined = device.array(combined);
            combine.out = out.address();
            combine.lse = lse.address();
            combine.seqs = device_seqs.address();
            combine.items = device_combined.address();
            combine.partial_acc = partial_acc.address();
            combine.partial_ml = partial_ml.address();
            combine.num_items = static_cast<uint32_t>(combined.size());
            combine.num_kv_heads = shape.num_kv_heads;
            combine.head_dim = shape.head_dim;
            combine.q_per_kv = call.q_per_kv;
            combine.out_dtype = call.out_dtype;
            run(device, "kvpool_combine", {deal.grid, shape.num_kv_heads}, {128}, 0, combine);
        }
        Answer answer;
        for (size_t i = 0; i < outputs; ++i) answer.out.push_back(out.get(i));
        answer.lse.assign(lse.host(), lse.host() + static_cast<size_t>(rows) * num_q_heads);
        q_used = std::make_unique<Tensor>(q);
        return answer;
    }
    std::unique_ptr<Tensor> q_used;

    // Compares with attention in double over what is stored.
    void check(const Answer& answer, const std::string& what) const {
        const Shape& shape = pool.shape;
        uint32_t row = 0;
        for (const Chunk& chunk : chunks) {
            const uint32_t end = chunk.first_position + chunk.rows;
            for (uint32_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
                std::vector<std::vector<double>> k(end), v(end);
                for (uint32_t key = 0; key < end; ++key) {
                    bool seen = false;
                    for (uint32_t r = 0; r < chunk.rows; ++r) {
                        seen = seen || sees_key(shape, call.window, chunk.first_position + r, key);
                    }
                    if (seen) {
                        k[key] = pool.vector(chunk.seq, call.layer, false, kv_head, key);
                        v[key] = pool.vector(chunk.seq, call.layer, true, kv_head, key);
                    }
                }
                for (uint32_t r = 0; r < chunk.rows; ++r) {
                    for (uint32_t head = 0; head < call.q_per_kv; ++head) {
                        check_row(answer, what, row + r, kv_head * call.q_per_kv + head,
                                  chunk.first_position + r, k, v);
                    }
                }
            }
            row += chunk.rows;
        }
    }
    void check_row(const Answer& answer, const std::string& what, uint32_t row, uint32_t q_head,
                   uint32_t position, const std::vector<std::vector<double>>& k,
                   const std::vector<std::vector<double>>& v) const {
        const Shape& shape = pool.shape;
        const size_t at = (static_cast<size_t>(row) * num_q_heads + q_head) * shape.head_dim;
        std::vector<double> scores(position + 1, -INFINITY);
        double max = -INFINITY, sum = 0;
        for (uint32_t key = 0; key <= position; ++key) {
            if (!sees_key(shape, call.window, position, key)) continue;
            double dot = 0;
            for (uint32_t i = 0; i < shape.head_dim; ++i) dot += q_used->get(at + i) * k[key][i];
            scores[key] = dot * call.softmax_scale;
            max = std::max(max, scores[key]);
        }
        std::vector<double> out(shape.head_dim, 0.0);
        double largest = 1e-30;
        for (uint32_t key = 0; key <= position; ++key) {
            if (!sees_key(shape, call.window, position, key)) continue;
            const double weight = exp(scores[key] - max);
            sum += weight;
            for (uint32_t i = 0; i < shape.head_dim; ++i) {
                out[i] += weight * v[key][i];
                largest = std::max(largest, fabs(v[key][i]));
            }
        }
        double tolerance = shape.format.tolerance * largest;
        if (call.out_dtype != KVPOOL_DTYPE_F32)
            tolerance += call.out_dtype == KVPOOL_DTYPE_F16 ? 5e-4 : 4e-3;
        for (uint32_t i = 0; i < shape.head_dim; ++i) {
            const double want = out[i] / sum, got = answer.out[at + i];
            CHECK(fabs(got - want) <= tolerance,
                  "%s: row %u, head %u, element %u: %.9g, wanted %.9g", what.c_str(), row, q_head,
                  i, got, want);
        }
        const double lse = answer.lse[static_cast<size_t>(row) * num_q_heads + q_head];
        const double want = max + log(sum);
        CHECK(fabs(lse - want) <= 3e-6 * (1 + fabs(want)),
              "%s: row %u, head %u: lse %.9g, wanted %.9g", what.c_str(), row, q_head, lse, want);
    }
};

inline void check_same(const std::vector<float>& a, const std::vector<float>& b,
                       const std::string& what) {
    CHECK(a.size() == b.size(), "%s: %zu and %zu numbers", what.c_str(), a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
        CHECK(memcmp(&a[i], &b[i], 4) == 0, "%s: number %zu: %.9g and %.9g", what.c_str(), i, a[i],
              b[i]);
    }
}

}  // namespace kvpool::tests
