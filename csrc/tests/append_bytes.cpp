// What append stores, byte for byte: every source, format, view and head_dim; extremes; counts;
// RoPE; and that nothing else is written.
#include "rig.hpp"

using namespace kvpool::tests;

namespace {

float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// A plain reading of src/device/quant.rs. scales: [scales per vector]
struct Quantized {
    std::vector<int8_t> q;
    std::vector<uint16_t> scales;
    uint64_t nonfinite = 0, saturated = 0;
};
Quantized quantize(const std::vector<float>& x, uint32_t kind, float static_scale) {
    Quantized done;
    const size_t part = kind == KVPOOL_SCALE_PER_GROUP_32 ? 32 : x.size();
    for (size_t from = 0; from < x.size(); from += part) {
        float amax = 0;
        for (size_t i = from; i < from + part; ++i) {
            if (isfinite(x[i])) amax = std::max(amax, fabsf(x[i]));
            done.nonfinite += isfinite(x[i]) ? 0 : 1;
            done.saturated += kind == KVPOOL_SCALE_PER_TENSOR && isfinite(x[i]) &&
                                      fabsf(x[i]) > 127.0f * static_scale
                                  ? 1
                                  : 0;
        }
        float scale = static_scale;
        if (kind != KVPOOL_SCALE_PER_TENSOR) {
            const float exact = amax / 127.0f;
            uint32_t stored = 0;
            if (exact >= 1.17549435e-38f) {
                stored = float_to_bits(exact) >> 15;
                if (bits_to_float(stored << 15) < exact) ++stored;
            }
            done.scales.push_back(static_cast<uint16_t>(stored));
            scale = bits_to_float(stored << 15);
        }
        for (size_t i = from; i < from + part; ++i) {
            double y = 0;
            if (scale != 0 && !isnan(x[i]))
                y = nearbyintf(std::min(127.0f, std::max(-127.0f, x[i] / scale)));
            done.q.push_back(static_cast<int8_t>(y));
        }
    }
    return done;
}

// The bytes of a vector and of its scales.
void expected(const Shape& shape, const std::vector<float>& x, uint32_t dtype, bool is_v,
              std::vector<uint8_t>& data, std::vector<uint8_t>& scales, uint64_t (&counts)[2]) {
    data.clear();
    scales.clear();
    const auto add = [](std::vector<uint8_t>& to, const void* from, size_t n) {
        to.insert(to.end(), static_cast<const uint8_t*>(from),
                  static_cast<const uint8_t*>(from) + n);
    };
    if (shape.format.element == KVPOOL_FORMAT_INT8) {
        const Quantized done = quantize(x, shape.format.scale, is_v ? V_SCALE : K_SCALE);
        add(data, done.q.data(), done.q.size());
        add(scales, done.scales.data(), done.scales.size() * 2);
        counts[0] += done.nonfinite;
        counts[1] += done.saturated;
        return;
    }
    (void)dtype;
    for (const float wide : x) {
        const uint16_t f16 = kvpool::emu::f32_to_f16(wide), bf16 = kvpool::emu::f32_to_bf16(wide);
        if (shape.format.element == KVPOOL_FORMAT_F32) add(data, &wide, 4);
        if (shape.format.element == KVPOOL_FORMAT_F16) add(data, &f16, 2);
        if (shape.format.element == KVPOOL_FORMAT_BF16) add(data, &bf16, 2);
    }
}

const float EXTREMES[] = {0.0f,   -0.0f,  1e-40f, 1e4f,     -65504.0f, 65520.0f,
                          3e38f,  -3e38f, 1e-30f, INFINITY, -INFINITY, NAN,
                          127.5f, 0.5f,   1.5f,   2.5f,     1e-38f};

void check_append(uint32_t dtype, const Format& format, uint32_t addressing, uint32_t head_dim,
                  uint32_t heads, bool extremes, uint32_t rope) {
    Device device;
    Shape shape = {format, addressing, 16, head_dim, heads, 2, 3, 0, 9};
    if (addressing != KVPOOL_ADDRESSING_BLOCKS) shape.unit_tokens = 61;
    if (addressing == KVPOOL_ADDRESSING_RING) shape.ring_tokens = 58;
    Pool pool(device, shape, 2, 3);
    std::vector<Token> tokens;
    for (uint32_t i = 0; i < 5; ++i) tokens.push_back({0, 13 + i});
    tokens.push_back({1, 0});
    for (uint32_t i = 0; i < 20; ++i) tokens.push_back({1, 30 + i});
    AppendRun run(pool, dtype, tokens, 1);
    if (extremes) {
        Random random{head_dim};
        for (size_t i = 0; i < run.k.size; ++i) {
            if (random.below(9) == 0) run.k.set(i, EXTREMES[random.below(17)]);
            if (random.below(40) == 0) run.v.set(i, EXTREMES[random.below(17)]);
        }
        for (uint32_t i = 0; i < head_dim; ++i) run.k.set(i, 0.0f), run.v.set(i, NAN);
    }
    const uint32_t half = head_dim / 4;
    auto positions = device.array<uint32_t>(tokens.size());
    auto cosines = device.array<float>(64 * half), sines = device.array<float>(64 * half);
    for (uint32_t i = 0; i < 64 * half; ++i) {
        cosines[i] = cosf(static_cast<float>(i / half) / static_cast<float>(1 + i % half));
        sines[i] = sinf(static_cast<float>(i / half) / static_cast<float>(1 + i % half));
    }
    for (size_t i = 0; i < tokens.size(); ++i) positions[i] = tokens[i].position;
    run.params.rope = rope;
    run.params.rope_dims = 2 * half;
    run.params.positions = positions.address();
    run.params.rope_cos = cosines.address();
    run.params.rope_sin = sines.address();

    std::vector<uint8_t> want(pool.bytes.host(), pool.bytes.host() + pool.bytes.size());
    uint64_t counts[2] = {0, 0};
    for (size_t token = 0; token < tokens.size(); ++token) {
        for (uint32_t head = 0; head < heads; ++head) {
            for (const bool is_v : {false, true}) {
                std::vector<float> x(head_dim);
                for (uint32_t i = 0; i < head_dim; ++i) {
                    x[i] = (is_v ? run.v : run.k).get((token * heads + head) * head_dim + i);
                }
                if (rope != KVPOOL_ROPE_NONE && !is_v) {
                    for (uint32_t pair = 0; pair < half; ++pair) {
                        const float c = cosines[tokens[token].position * half + pair];
                        const float s = sines[tokens[token].position * half + pair];
                        float& a = x[rope == KVPOOL_ROPE_PAIRS ? 2 * pair : pair];
                        float& b = x[rope == KVPOOL_ROPE_PAIRS ? 2 * pair + 1 : pair + half];
                        const float turned = fmaf(a, c, -(b * s));
                        b = fmaf(a, s, b * c);
                        a = turned;
                    }
                }
                std::vector<uint8_t> data, scales;
                expected(shape, x, dtype, is_v, data, scales, counts);
                const auto to = [&](const uint8_t* p) {
                    return want.data() + (p - pool.bytes.host());
                };
                const Token& t = tokens[token];
                memcpy(to(pool.row(t.seq, 1, is_v, head, t.position)), data.data(), data.size());
                if (!scales.empty()) {
                    memcpy(to(pool.scales(t.seq, 1, is_v, head, t.position)), scales.data(),
                           scales.size());
                }
            }
        }
    }
    run.launch(pool, 1 + head_dim % 4);
    char what[200];
    snprintf(what, sizeof what, "%s, %s%s, addressing %u, dim %u, heads %u, extremes %d, rope %u",
             run.kernel(pool).c_str(), format.name, scale_name(format.scale), addressing, head_dim,
             heads, extremes, rope);
    for (size_t i = 0; i < want.size(); ++i) {
        CHECK(want[i] == pool.bytes[i], "%s: byte %zu of the pool is %u, wanted %u", what, i,
              pool.bytes[i], want[i]);
    }
    CHECK(run.counts[0] == counts[0] && run.counts[1] == counts[1],
          "%s: counts %llu %llu, wanted %llu %llu", what,
          static_cast<unsigned long long>(run.counts[0]),
          static_cast<unsigned long long>(run.counts[1]),
          static_cast<unsigned long long>(counts[0]), static_cast<unsigned long long>(counts[1]));
}

}  // namespace

int main() {
    uint32_t cases = 0;
    for (const uint32_t dtype : {0u, 1u, 2u}) {
        for (const Format& format : FORMATS) {
            for (const uint32_t addressing : {0u, 1u, 2u}) {
                for (const auto& [dim, heads] : {std::pair{64u, 2u},
                                                 {8u, 3u},
                                                 {80u, 1u},
                                                 {96u, 3u},
                                                 {128u, 8u},
                                                 {256u, 1u},
                                                 {320u, 2u},
                                                 {1024u, 1u}}) {
                    if (format.scale == KVPOOL_SCALE_PER_GROUP_32 && dim % 32 != 0) continue;
                    check_append(dtype, format, addressing, dim, heads, false, KVPOOL_ROPE_NONE);
                    // (NaNs keep their bits where nothing is converted; elsewhere any NaN will do,
                    // and is not compared.)
                    if (format.element == KVPOOL_FORMAT_INT8) {
                        check_append(dtype, format, addressing, dim, heads, true, KVPOOL_ROPE_NONE);
                    }
                    cases += 2;
                    if (dim % 32 == 0 && addressing == 0) {
                        check_append(dtype, format, addressing, dim, heads, false,
                                     KVPOOL_ROPE_HALVES);
                        check_append(dtype, format, addressing, dim, heads, false,
                                     KVPOOL_ROPE_PAIRS);
                        cases += 2;
                    }
                }
            }
        }
    }
    printf("append: %u cases, every byte of the pool as expected\n", cases);
    return 0;
}
