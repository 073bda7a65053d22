// What the tests of kernels share: layouts, sequences and their places, work lists, and plain
// references in double.
//
// Addresses are computed here once more, from the picture of src/plan/layout.rs rather than with
// the kernels' code.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "../emulator/launch.hpp"
#include "../emulator/numbers.hpp"
#include "../kernels/params.h"

namespace kvpool::tests {

using emu::Array;
using emu::Device;
using emu::Dim3;

// Ends the program with a message.
#define CHECK(condition, ...)                                               \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                   \
            fputc('\n', stderr);                                            \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

struct Random {
    uint64_t state;
    uint32_t next() {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return static_cast<uint32_t>(state >> 33);
    }
    uint32_t below(uint32_t n) { return next() % n; }
    // In -1..1.
    float number() { return static_cast<float>(next() % 65536) / 32768.0f - 1.0f; }
};

// How vectors are stored.
struct Format {
    const char* name;    // in the names of attention kernels
    const char* stored;  // in the names of the others
    uint32_t element;    // KVPOOL_FORMAT_*
    uint32_t scale;      // KVPOOL_SCALE_*
    uint32_t bytes;
    double tolerance;  // of attention, beside the exact result of what is stored; |v| is at most 1
};
constexpr Format FORMATS[] = {
    {"f32", "f32", KVPOOL_FORMAT_F32, KVPOOL_SCALE_NONE, 4, 2e-6},
    {"f16", "f16", KVPOOL_FORMAT_F16, KVPOOL_SCALE_NONE, 2, 2e-6},
    {"bf16", "bf16", KVPOOL_FORMAT_BF16, KVPOOL_SCALE_NONE, 2, 4e-5},
    {"i8", "i8", KVPOOL_FORMAT_INT8, KVPOOL_SCALE_PER_TOKEN_HEAD, 1, 2e-5},
    {"i8g", "i8", KVPOOL_FORMAT_INT8, KVPOOL_SCALE_PER_GROUP_32, 1, 2e-5},
    {"i8", "i8", KVPOOL_FORMAT_INT8, KVPOOL_SCALE_PER_TENSOR, 1, 2e-5},
};

inline const char* scale_name(uint32_t scale) {
    static const char* NAMES[] = {"", "/token-head", "/group-32", "/tensor"};
    return NAMES[scale];
}

// The shape of a group's units.
struct Shape {
    Format format;
    uint32_t addressing;
    uint32_t unit_tokens;
    uint32_t head_dim;
    uint32_t num_kv_heads;
    uint32_t num_layers;
    uint32_t sink_tokens;
    uint32_t ring_tokens;
    uint32_t units;
};

inline KvpoolKvGroup layout_of(const Shape& shape, uint64_t base) {
    KvpoolKvGroup group = {};
    const uint64_t row_bytes = static_cast<uint64_t>(shape.head_dim) * shape.format.bytes;
    const uint32_t scales = shape.format.scale == KVPOOL_SCALE_PER_TOKEN_HEAD ? 1
                            : shape.format.scale == KVPOOL_SCALE_PER_GROUP_32 ? shape.head_dim / 32
                                                                              : 0;
    const uint64_t rows = 2ull * shape.num_layers * shape.num_kv_heads * shape.unit_tokens;
    group.base = base;
    group.used_bytes = rows * row_bytes + rows * scales * 2;
    group.unit_bytes = (group.used_bytes + 63) / 64 * 64;
    group.head_stride = row_bytes * shape.unit_tokens;
    group.kv_stride = group.head_stride * shape.num_kv_heads;
    group.layer_stride = group.kv_stride * 2;
    group.scales_at = rows * row_bytes;
    group.row_bytes = static_cast<uint32_t>(row_bytes);
    group.scales_per_row = scales;
    group.unit_tokens = shape.unit_tokens;
    while ((1u << group.unit_shift) < shape.unit_tokens) ++group.unit_shift;
    group.units = shape.units;
    group.addressing = shape.addressing;
    group.sink_tokens = shape.sink_tokens;
    group.ring_tokens = shape.ring_tokens;
    group.num_layers = shape.num_layers;
    group.num_kv_heads = shape.num_kv_heads;
    group.head_dim = shape.head_dim;
    group.element_bytes = shape.format.bytes;
    group.format = shape.format.element;
    group.scale = shape.format.scale;
    return group;
}

constexpr float K_SCALE = 0.0123f, V_SCALE = 0.0087f;  // static ones

// A pool with one group, and the sequences in it.
struct Pool {
    Shape shape;
    KvpoolKvGroup group;
    Device& device;
    Array<uint8_t> bytes;
    std::vector<std::vector<uint32_t>> tables;  // of each sequence: its blocks, or its unit

    static constexpr uint64_t BASE = 4096;
    uint64_t base;  // byte offset of unit 0

    Pool(Device& device, const Shape& shape, uint32_t sequences, uint32_t seed,
         uint64_t base = BASE)
        : shape(shape),
          group(layout_of(shape, base)),
          device(device),
          bytes(device.array<uint8_t>(base + group.unit_bytes * shape.units)),
          base(base) {
        memset(bytes.host() + base, 0xFF, bytes.size() - base);
        // Units in no order.
        std::vector<uint32_t> units(shape.units);
        for (uint32_t i = 0; i < shape.units; ++i) units[i] = i;
        Random random{seed};
        for (uint32_t i = shape.units; i > 1; --i) std::swap(units[i - 1], units[random.below(i)]);
        tables.resize(sequences);
        const uint32_t each =
            shape.addressing == KVPOOL_ADDRESSING_BLOCKS ? shape.units / sequences : 1;
        for (uint32_t seq = 0; seq < sequences; ++seq) {
            tables[seq].assign(units.begin() + seq * each, units.begin() + (seq + 1) * each);
        }
    }

    // Unit and token of a position.
    void place(uint32_t seq, uint32_t position, uint32_t& unit, uint32_t& token) const {
        if (shape.addressing == KVPOOL_ADDRESSING_BLOCKS) {
            unit = tables[seq][position / shape.unit_tokens];
            token = position % shape.unit_tokens;
            return;
        }
        unit = tables[seq][0];
        token = position;
        if (shape.addressing == KVPOOL_ADDRESSING_RING && position >= shape.sink_tokens) {
            token = shape.sink_tokens + (position - shape.sink_tokens) % shape.ring_tokens;
        }
    }
    uint64_t token_slot(uint32_t seq, uint32_t position) const {
        uint32_t unit, token;
        place(seq, position, unit, token);
        return static_cast<uint64_t>(unit) * shape.unit_tokens + token;
    }
    uint64_t row_index(uint32_t layer, bool is_v, uint32_t head, uint32_t token) const {
        const uint64_t kind = layer * 2ull + (is_v ? 1 : 0);
        return (kind * shape.num_kv_heads + head) * shape.unit_tokens + token;
    }
    uint8_t* row(uint32_t seq, uint32_t layer, bool is_v, uint32_t head, uint32_t position) const {
        uint32_t unit, token;
        place(seq, position, unit, token);
        return bytes.host() + base + unit * group.unit_bytes +
               row_index(layer, is_v, head, token) * shape.head_dim * shape.format.bytes;
    }
    uint8_t* scales(uint32_t seq, uint32_t layer, bool is_v, uint32_t head,
                    uint32_t position) const {
        uint32_t unit, token;
        place(seq, position, unit, token);
        return bytes.host() + base + unit * group.unit_bytes + group.scales_at +
               row_index(layer, is_v, head, token) * group.scales_per_row * 2;
    }
    // One vector as it is stored, widened.
    std::vector<double> vector(uint32_t seq, uint32_t layer, bool is_v, uint32_t head,
                               uint32_t position) const {
        const uint8_t* data = row(seq, layer, is_v, head, position);
        const uint8_t* scale = scales(seq, layer, is_v, head, position);
        std::vector<double> x(shape.head_dim);
        for (uint32_t i = 0; i < shape.head_dim; ++i) {
            uint16_t half = 0;
            memcpy(&half, data + 2 * (shape.format.bytes == 2 ? i : 0), 2);
            float wide = 0;
            switch (shape.format.element) {
                case KVPOOL_FORMAT_F32:
                    memcpy(&wide, data + 4 * i, 4);
                    break;
                case KVPOOL_FORMAT_F16:
                    wide = emu::f16_to_f32(half);
                    break;
                case KVPOOL_FORMAT_BF16:
                    wide = emu::bf16_to_f32(half);
                    break;
                default: {
                    float s = is_v ? V_SCALE : K_SCALE;
                    if (group.scales_per_row > 0) {
                        uint16_t stored;
                        memcpy(&stored, scale + 2 * (group.scales_per_row > 1 ? i / 32 : 0), 2);
                        const uint32_t bits = static_cast<uint32_t>(stored) << 15;
                        memcpy(&s, &bits, 4);
                    }
                    wide = static_cast<float>(static_cast<int8_t>(data[i])) * s;
                }
            }
            x[i] = wide;
        }
        return x;
    }
};

// Elements of a tensor in one of the callers' types.
struct Tensor {
    uint32_t dtype;
    Array<uint8_t> bytes;
    size_t size;

    static uint32_t element_bytes(uint32_t dtype) { return dtype == KVPOOL_DTYPE_F32 ? 4 : 2; }
    Tensor(Device& device, uint32_t dtype, size_t size)
        : dtype(dtype),
          bytes(device.array<uint8_t>(std::max<size_t>(1, size) * element_bytes(dtype))),
          size(size) {}
    void set(size_t i, float x) {
        if (dtype == KVPOOL_DTYPE_F32) {
            memcpy(bytes.host() + 4 * i, &x, 4);
        } else {
            const uint16_t half =
                dtype == KVPOOL_DTYPE_F16 ? emu::f32_to_f16(x) : emu::f32_to_bf16(x);
            memcpy(bytes.host() + 2 * i, &half, 2);
        }
    }
    float get(size_t i) const {
        if (dtype == KVPOOL_DTYPE_F32) {
            float x;
            memcpy(&x, bytes.host() + 4 * i, 4);
            return x;
        }
        uint16_t half;
        memcpy(&half, bytes.host() + 2 * i, 2);
        return dtype == KVPOOL_DTYPE_F16 ? emu::f16_to_f32(half) : emu::bf16_to_f32(half);
    }
    uint64_t address() const { return bytes.address(); }
};
inline const char* dtype_name(uint32_t dtype) {
    static const char* NAMES[] = {"f32", "f16", "bf16"};
    return NAMES[dtype];
}

template <class Params>
void run(Device& device, const std::string& kernel, Dim3 grid, Dim3 block, uint32_t shared,
         const Params& params) {
    const emu::Fault fault = device.launch(kernel.c_str(), grid, block, shared, params);
    CHECK(fault.code == emu::FaultCode::None, "%s: %s", kernel.c_str(), fault.text.c_str());
}

// A step's token: which sequence, and its position.
struct Token {
    uint32_t seq;
    uint32_t position;
};

// An element of K (0) or V (1) of a token: in -1..1, with the numbers that formats find hard here
// and there.
inline float element(uint32_t seq, uint32_t position, uint32_t layer, uint32_t kind, uint32_t head,
                     uint32_t i) {
    Random random{(((seq * 100003ull + position) * 8 + layer) * 2 + kind) * 512ull + head};
    random.state = random.state * 2654435761ull + i * 40503ull;
    random.next();
    return random.number();
}

// Appends tokens to a layer; [tokens, heads, head_dim] of `dtype`.
struct AppendRun {
    Tensor k, v;
    Array<uint64_t> slots;
    Array<uint64_t> counts;
    KvpoolAppendParams params;

    AppendRun(Pool& pool, uint32_t dtype, const std::vector<Token>& tokens, uint32_t layer)
        : k(pool.device, dtype, size(pool, tokens)),
          v(pool.device, dtype, size(pool, tokens)),
          slots(pool.device.array<uint64_t>(std::max<size_t>(1, tokens.size()))),
          counts(pool.device.array<uint64_t>(2)),
          params{} {
        size_t at = 0;
        for (size_t token = 0; token < tokens.size(); ++token) {
            slots[token] = pool.token_slot(tokens[token].seq, tokens[token].position);
            for (uint32_t head = 0; head < pool.shape.num_kv_heads; ++head) {
                for (uint32_t i = 0; i < pool.shape.head_dim; ++i, ++at) {
                    k.set(at,
                          element(tokens[token].seq, tokens[token].position, layer, 0, head, i));
                    v.set(at,
                          element(tokens[token].seq, tokens[token].position, layer, 1, head, i));
                }
            }
        }
        counts[0] = counts[1] = 0;
        params.group = pool.group;
        params.pool = pool.bytes.address();
        params.k = k.address();
        params.v = v.address();
        params.token_slots = slots.address();
        params.counts = counts.address();
        params.num_tokens = static_cast<uint32_t>(tokens.size());
        params.layer = layer;
        params.k_scale = K_SCALE;
        params.v_scale = V_SCALE;
    }
    static size_t size(const Pool& pool, const std::vector<Token>& tokens) {
        return tokens.size() * pool.shape.num_kv_heads * pool.shape.head_dim;
    }
    std::string kernel(const Pool& pool) const {
        return std::string("kvpool_append_") + dtype_name(k.dtype) + "_" + pool.shape.format.stored;
    }
    void launch(Pool& pool, uint32_t grid) const {
        run(pool.device, kernel(pool), {grid}, {256}, 0, params);
    }
};

inline void append(Pool& pool, uint32_t dtype, const std::vector<Token>& tokens, uint32_t layer,
                   uint32_t grid = 3) {
    AppendRun(pool, dtype, tokens, layer).launch(pool, grid);
}

}  // namespace kvpool::tests
