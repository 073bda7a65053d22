// An engine's own kernels: they write K and V into the token slots of a step, and attend by the block tables.
//
// This is what a service does that brings its kernels and leaves only the memory to kvpool. It reads f32, f16
// and bf16 caches, in layers of every kind: in blocks, in slots, and in rings with windows and sinks.
#pragma once

#include <kvpool.hpp>

#include <cmath>
#include <cstring>
#include <vector>

namespace service {

inline float f16_to_f32(uint16_t half) {
    const uint32_t sign = uint32_t{half} >> 15 << 31;
    const uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 0) return std::ldexp(static_cast<float>(fraction), -24) * (sign ? -1.0f : 1.0f);
    const uint32_t bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// Rounds to nearest, ties to even. For finite values of the toy model, below 65,504.
inline uint16_t f32_to_f16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    bits &= 0x7FFFFFFF;
    if (bits < 0x38800000) {  // below the smallest normal number, 2^-14
        float size;
        std::memcpy(&size, &bits, sizeof(size));
        return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(size, 24))));
    }
    bits += 0xFFF + (bits >> 13 & 1);
    return static_cast<uint16_t>(sign | ((bits >> 13) - (112 << 10)));
}

inline float bf16_to_f32(uint16_t value) {
    const uint32_t bits = uint32_t{value} << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof(wide));
    return wide;
}

inline uint16_t f32_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Stores `n` elements at an address of the pool.
inline void store(kvpool::Format format, void* to, const float* from, uint32_t n) {
    if (format == kvpool::Format::f32) {
        std::memcpy(to, from, n * sizeof(float));
        return;
    }
    const bool half = format == kvpool::Format::f16;
    uint16_t* out = static_cast<uint16_t*>(to);
    for (uint32_t i = 0; i < n; ++i) out[i] = half ? f32_to_f16(from[i]) : f32_to_bf16(from[i]);
}

inline void load(kvpool::Format format, const void* from, float* to, uint32_t n) {
    if (format == kvpool::Format::f32) {
        std::memcpy(to, from, n * sizeof(float));
        return;
    }
    const bool half = format == kvpool::Format::f16;
    const uint16_t* in = static_cast<const uint16_t*>(from);
    for (uint32_t i = 0; i < n; ++i) to[i] = half ? f16_to_f32(in[i]) : bf16_to_f32(in[i]);
}

// A layer as the kernels see it during a step.
struct LayerView {
    kvpool::Layer layer;
    kvpool::GroupInfo group;
    kvpool::StepGroup tables;

    const char* k() const { return static_cast<const char*>(layer.k); }
    const char* v() const { return static_cast<const char*>(layer.v); }

    // The token slot of a position of the sequence in `slot`.
    uint64_t token_slot(uint32_t slot, uint32_t position) const {
        uint32_t unit = slot, token = position;
        if (group.addressing() == kvpool::Addressing::blocks) {
            unit = tables.row(slot)[position / group.unit_tokens];
            token = position % group.unit_tokens;
        } else if (group.addressing() == kvpool::Addressing::ring && position >= group.sink_tokens) {
            token = group.sink_tokens + (position - group.sink_tokens) % group.ring_tokens;
        }
        return uint64_t{unit} * group.unit_tokens + token;
    }

    bool sees(uint32_t query, uint32_t key) const {
        return key < group.sink_tokens || group.window == 0 || query - key < group.window;
    }
};

// Writes K and V of one row, [num_kv_heads, head_dim] each, to where the cache wants them.
inline void append_row(const LayerView& view, uint32_t row, const float* k, const float* v) {
    const kvpool::Layer& layer = view.layer;
    for (uint32_t head = 0; head < layer.num_kv_heads; ++head) {
        const uint64_t offset = layer.vector_offset(view.tables.token_slots[row], head);
        const size_t from = size_t{head} * layer.head_dim;
        store(layer.format(), static_cast<char*>(layer.k) + offset, k + from, layer.head_dim);
        store(layer.format(), static_cast<char*>(layer.v) + offset, v + from, layer.head_dim);
    }
}

// Room for one row's attention, for each worker its own.
struct Scratch {
    std::vector<uint64_t> slots;
    std::vector<float> scores, vector;
};

// Attention of one query row, [num_q_heads, head_dim], over its sequence. Keys go in the order of their
// positions and no sum crosses rows: the bits depend on nothing but the row.
inline void attend_row(const LayerView& view, uint32_t slot, uint32_t position, uint32_t num_q_heads,
                       const float* q, float* out, Scratch& scratch) {
    const kvpool::Layer& layer = view.layer;
    const uint32_t dim = layer.head_dim, per_kv_head = num_q_heads / layer.num_kv_heads;
    scratch.slots.clear();
    for (uint32_t key = 0; key <= position; ++key) {
        if (view.sees(position, key)) scratch.slots.push_back(view.token_slot(slot, key));
    }
    const size_t num_keys = scratch.slots.size();
    scratch.scores.resize(num_keys * per_kv_head);
    scratch.vector.resize(dim);
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    for (uint32_t kv_head = 0; kv_head < layer.num_kv_heads; ++kv_head) {
        const float* q_of_head = q + size_t{kv_head} * per_kv_head * dim;
        float* out_of_head = out + size_t{kv_head} * per_kv_head * dim;
        for (size_t i = 0; i < num_keys; ++i) {
            const uint64_t offset = layer.vector_offset(scratch.slots[i], kv_head);
            load(layer.format(), view.k() + offset, scratch.vector.data(), dim);
            for (uint32_t head = 0; head < per_kv_head; ++head) {
                float dot = 0;
                for (uint32_t d = 0; d < dim; ++d) dot += q_of_head[head * dim + d] * scratch.vector[d];
                scratch.scores[head * num_keys + i] = dot * scale;
            }
        }
        for (uint32_t head = 0; head < per_kv_head; ++head) {
            float* scores = &scratch.scores[head * num_keys];
            float largest = scores[0], sum = 0;
            for (size_t i = 1; i < num_keys; ++i) largest = std::fmax(largest, scores[i]);
            for (size_t i = 0; i < num_keys; ++i) sum += scores[i] = std::exp(scores[i] - largest);
            for (size_t i = 0; i < num_keys; ++i) scores[i] /= sum;
            std::memset(out_of_head + head * dim, 0, dim * sizeof(float));
        }
        for (size_t i = 0; i < num_keys; ++i) {
            const uint64_t offset = layer.vector_offset(scratch.slots[i], kv_head);
            load(layer.format(), view.v() + offset, scratch.vector.data(), dim);
            for (uint32_t head = 0; head < per_kv_head; ++head) {
                const float weight = scratch.scores[head * num_keys + i];
                for (uint32_t d = 0; d < dim; ++d) out_of_head[head * dim + d] += weight * scratch.vector[d];
            }
        }
    }
}

}  // namespace service
