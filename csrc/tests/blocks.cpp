// Copies of whole and partial units, gather, fill: every byte of the pool is as expected.
#include "rig.hpp"

using namespace kvpool::tests;

namespace {

Shape shape_of(const Format& format, uint32_t unit_tokens, uint32_t head_dim) {
    return {format, KVPOOL_ADDRESSING_BLOCKS, unit_tokens, head_dim, 3, 2, 0, 0, 12};
}

void check_copies(const Format& format, uint32_t unit_tokens, uint32_t head_dim) {
    Device device;
    Pool pool(device, shape_of(format, unit_tokens, head_dim), 1, 1);
    Random random{unit_tokens + head_dim};
    for (size_t i = 0; i < pool.bytes.size(); ++i)
        pool.bytes[i] = static_cast<uint8_t>(random.next());
    std::vector<KvpoolCopyPair> pairs;
    const uint32_t some = (unit_tokens + 1) / 2;
    pairs.push_back({0, 7, 0, unit_tokens});
    pairs.push_back({1, 8, 0, some});
    pairs.push_back({2, 9, unit_tokens - some, some});
    pairs.push_back({2, 10, unit_tokens / 3, 1});
    pairs.push_back({3, 11, 0, unit_tokens});
    std::vector<uint8_t> want(pool.bytes.host(), pool.bytes.host() + pool.bytes.size());
    const KvpoolKvGroup& group = pool.group;
    for (const KvpoolCopyPair& pair : pairs) {
        for (uint32_t kind = 0; kind < 2 * 2 * 3; ++kind) {
            for (uint32_t token = pair.first_token; token < pair.first_token + pair.num_tokens;
                 ++token) {
                const uint64_t row = static_cast<uint64_t>(kind) * unit_tokens + token;
                const auto copy = [&](uint64_t at, uint64_t bytes) {
                    memcpy(&want[Pool::BASE + pair.dst_unit * group.unit_bytes + at],
                           &pool.bytes[Pool::BASE + pair.src_unit * group.unit_bytes + at], bytes);
                };
                copy(row * group.row_bytes, group.row_bytes);
                if (group.scales_per_row > 0) {
                    copy(group.scales_at + row * group.scales_per_row * 2,
                         group.scales_per_row * 2);
                }
            }
        }
    }
    KvpoolCopyParams params = {};
    params.group = group;
    params.pool = pool.bytes.address();
    auto device_pairs = device.array(pairs);
    params.pairs = device_pairs.address();
    params.num_pairs = static_cast<uint32_t>(pairs.size());
    run(device, "kvpool_copy_pairs", {2, 3}, {256}, 0, params);
    for (size_t i = 0; i < want.size(); ++i) {
        CHECK(want[i] == pool.bytes[i], "copy of %s%s, %u tokens, dim %u: byte %zu", format.name,
              scale_name(format.scale), unit_tokens, head_dim, i);
    }
}

void check_gather(const Format& format, uint32_t addressing, uint32_t head_dim) {
    Device device;
    Shape shape = shape_of(format, 8, head_dim);
    shape.addressing = addressing;
    shape.sink_tokens = 3;
    if (addressing != KVPOOL_ADDRESSING_BLOCKS) shape.unit_tokens = 77;
    if (addressing == KVPOOL_ADDRESSING_RING) shape.ring_tokens = 74;
    Pool pool(device, shape, 1, 5);
    std::vector<Token> tokens;
    for (uint32_t i = 20; i < 77; ++i) tokens.push_back({0, i});
    append(pool, KVPOOL_DTYPE_F16, tokens, 1);
    for (const bool is_v : {false, true}) {
        KvpoolGatherParams params = {};
        params.group = pool.group;
        params.pool = pool.bytes.address();
        auto out = device.array<float>(57 * 3 * head_dim);
        auto table = device.array(pool.tables[0]);
        params.out = out.address();
        params.table = table.address();
        params.unit = pool.tables[0][0];
        params.first_position = 20;
        params.num_tokens = 57;
        params.layer = 1;
        params.is_v = is_v ? 1 : 0;
        params.static_scale = is_v ? V_SCALE : K_SCALE;
        run(device, std::string("kvpool_gather_") + format.stored, {3}, {256}, 0, params);
        for (uint32_t token = 0; token < 57; ++token) {
            for (uint32_t head = 0; head < 3; ++head) {
                const std::vector<double> want = pool.vector(0, 1, is_v, head, 20 + token);
                for (uint32_t i = 0; i < head_dim; ++i) {
                    const float got = out[(token * 3 + head) * head_dim + i];
                    CHECK(got == static_cast<float>(want[i]),
                          "gather of %s, token %u, head %u, element %u: %g, wanted %g", format.name,
                          token, head, i, got, want[i]);
                }
            }
        }
    }
}

void check_fill() {
    Device device;
    auto bytes = device.array<uint8_t>(5000);
    std::vector<uint8_t> want(5000);
    for (size_t i = 0; i < 5000; ++i) bytes[i] = want[i] = static_cast<uint8_t>(i % 251);
    const std::vector<KvpoolRange> ranges = {{0, 1},     {17, 3},   {100, 1},    {129, 1000},
                                             {1200, 16}, {1300, 0}, {2049, 2951}};
    for (const KvpoolRange& range : ranges) memset(&want[range.offset], 0xAB, range.bytes);
    auto device_ranges = device.array(ranges);
    const KvpoolFillParams params = {bytes.address(), device_ranges.address(),
                                     static_cast<uint32_t>(ranges.size()), 0xAB};
    run(device, "kvpool_fill", {2, 4}, {64}, 0, params);
    for (size_t i = 0; i < 5000; ++i)
        CHECK(bytes[i] == want[i], "fill: byte %zu is %u, wanted %u", i, bytes[i], want[i]);
}

}  // namespace

int main() {
    for (const Format& format : FORMATS) {
        for (const uint32_t dim : {8u, 64u, 96u}) {
            if (format.scale == KVPOOL_SCALE_PER_GROUP_32 && dim % 32 != 0) continue;
            for (const uint32_t tokens : {1u, 2u, 8u, 16u, 128u}) check_copies(format, tokens, dim);
            for (const uint32_t addressing : {0u, 1u, 2u}) check_gather(format, addressing, dim);
        }
    }
    check_fill();
    printf("copy, gather, fill: every byte as expected\n");
    return 0;
}
