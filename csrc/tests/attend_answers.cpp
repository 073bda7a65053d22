// Attention against the exact answer: formats, views, block sizes, head_dims, groups, windows and
// sinks, tails, types of queries and outputs. Whatever is not held is NaN.
#include "attend_rig.hpp"

using namespace kvpool::tests;

namespace {

struct Case {
    uint32_t head_dim, num_kv_heads, q_per_kv;
};

Shape shape_of(const Format& format, uint32_t head_dim, uint32_t num_kv_heads, uint32_t unit_tokens,
               uint32_t length, uint32_t sequences) {
    const uint32_t blocks = (length + unit_tokens - 1) / unit_tokens;
    return {format, KVPOOL_ADDRESSING_BLOCKS, unit_tokens, head_dim, num_kv_heads, 2, 0,
            0,      blocks * sequences + 1};
}

std::string text(const Pool& pool, const AttendCall& call, const Deal& deal) {
    char buffer[300];
    snprintf(buffer, sizeof buffer,
             "%s%s, addressing %u of %u, dim %u, heads %u x %u, window %u, %s, %s%s",
             pool.shape.format.name, scale_name(pool.shape.format.scale), pool.shape.addressing,
             pool.shape.unit_tokens, pool.shape.head_dim, pool.shape.num_kv_heads, call.q_per_kv,
             call.window, dtype_name(call.q_dtype),
             deal.tensor ? (deal.m == 1 ? "x1" : "x2") : "plain", deal.split ? ", splits" : "");
    return buffer;
}

// Fills sequence 0 with `length` tokens and lets the last `rows` of them attend, in every way there
// is, or on tensor cores only.
void check_all_ways(Device& device, const Shape& shape, AttendCall call, uint32_t length,
                    uint32_t rows, uint64_t base = Pool::BASE, bool tensor_only = false) {
    Pool pool(device, shape, 1, 7, base);
    std::vector<Token> tokens;
    // A ring holds the latest only.
    uint32_t from = 0;
    if (shape.addressing == KVPOOL_ADDRESSING_RING &&
        length > shape.ring_tokens + shape.sink_tokens) {
        from = length - shape.ring_tokens;
        for (uint32_t i = 0; i < shape.sink_tokens; ++i) tokens.push_back({0, i});
    }
    for (uint32_t i = from; i < length; ++i) tokens.push_back({0, i});
    append(pool, KVPOOL_DTYPE_F32, tokens, 1);
    call.layer = 1;
    for (uint32_t m = tensor_only ? 1 : 0; m <= 2; ++m) {
        if (m > 0 && !has_tensor_path(shape)) continue;
        if (m == 2 && shape.head_dim > 128) continue;
        for (const bool split : {false, true}) {
            Deal deal;
            deal.tensor = m > 0;
            deal.m = m;
            deal.split = split;
            AttendRun run(pool, call, {{0, length - rows, rows}}, deal);
            run.check(run.launch(), text(pool, call, deal));
        }
    }
}

// Where every score is -infinity the result is 0 and its logarithm -infinity, and nothing is NaN.
void check_no_finite_score(const Format& format) {
    Device device;
    Pool pool(device, shape_of(format, 64, 1, 16, 20, 1), 1, 7);
    std::vector<Token> tokens;
    for (uint32_t i = 0; i < 20; ++i) tokens.push_back({0, i});
    AppendRun run(pool, KVPOOL_DTYPE_F32, tokens, 1);
    // One element is -infinity, and its query positive.
    for (uint32_t i = 0; i < 20; ++i) run.k.set(i * 64 + 3, -INFINITY);
    run.launch(pool, 2);
    AttendCall call;
    call.layer = 1;
    for (const bool tensor : {false, true}) {
        for (const bool split : {false, true}) {
            if (tensor && !has_tensor_path(pool.shape)) continue;
            Deal deal;
            deal.tensor = tensor;
            deal.split = split;
            // The row at hand whose query's element 3 is positive, or else turned.
            call.q_factor = query(0, 19, 0, 3) > 0 ? 1.0f : -1.0f;
            const Answer answer = AttendRun(pool, call, {{0, 19, 1}}, deal).launch();
            for (const float x : answer.out)
                CHECK(x == 0, "%s, tensor %d: %g", format.name, tensor, x);
            CHECK(answer.lse[0] == -INFINITY, "%s, tensor %d: lse %g", format.name, tensor,
                  answer.lse[0]);
        }
    }
}

}  // namespace

int main() {
    uint32_t cases = 0;
    for (const Format& format : FORMATS) {
        const bool groups = format.scale == KVPOOL_SCALE_PER_GROUP_32;
        for (const Case& c : {Case{64, 1, 1}, Case{80, 2, 3}, Case{96, 1, 8}, Case{128, 2, 4},
                              Case{256, 1, 2}, Case{8, 3, 2}, Case{24, 1, 5}, Case{32, 2, 1},
                              Case{128, 1, 20}, Case{264, 1, 1}, Case{512, 1, 3}}) {
            if (groups && c.head_dim % 32 != 0) continue;
            // (A device a case: what a case has allocated goes with it.)
            const uint32_t block = 1u << (cases % 8);
            for (const auto& [length, rows] : {std::pair{1u, 1u}, {70u, 3u}, {601u, 1u}}) {
                Device device;
                AttendCall call;
                call.q_per_kv = c.q_per_kv;
                call.q_dtype = cases % 3;
                call.out_dtype = cases / 2 % 3;
                call.softmax_scale = 1.0f / sqrtf(static_cast<float>(c.head_dim));
                check_all_ways(device,
                               shape_of(format, c.head_dim, c.num_kv_heads, block, length, 1), call,
                               length, rows);
                ++cases;
            }
        }
        // Windows with and without sinks, in blocks, in a slot and in a ring.
        for (const uint32_t sinks : {0u, 5u}) {
            for (const uint32_t window : {1u, 40u, 600u}) {
                for (const uint32_t addressing :
                     {KVPOOL_ADDRESSING_BLOCKS, KVPOOL_ADDRESSING_SLOT, KVPOOL_ADDRESSING_RING}) {
                    Device device;
                    const uint32_t length = 1100, rows = 9;
                    Shape shape = shape_of(format, 64, 2, 16, length, 1);
                    shape.addressing = addressing;
                    shape.sink_tokens = sinks;
                    if (addressing == KVPOOL_ADDRESSING_SLOT)
                        shape.unit_tokens = length, shape.units = 2;
                    if (addressing == KVPOOL_ADDRESSING_RING) {
                        shape.ring_tokens = window + rows;
                        shape.unit_tokens = sinks + shape.ring_tokens;
                        shape.units = 2;
                    }
                    AttendCall call;
                    call.q_per_kv = 3;
                    call.window = window;
                    check_all_ways(device, shape, call, length, rows);
                    ++cases;
                }
            }
        }
        // Queries beyond the range of halves, either way.
        for (const float factor : {1e6f, 1e-20f}) {
            Device device;
            AttendCall call;
            call.q_per_kv = 2;
            call.q_factor = factor;
            call.softmax_scale = 0.2f / factor;
            check_all_ways(device, shape_of(format, 64, 1, 16, 100, 1), call, 100, 3);
            ++cases;
        }
        // And near the largest floats. (Of INT8 with a scale for a vector, plain sums of products
        // with the stored integers are no floats any more: docs/accuracy.md.)
        for (const uint32_t q_dtype : {KVPOOL_DTYPE_F32, KVPOOL_DTYPE_BF16}) {
            Device device;
            AttendCall call;
            call.q_per_kv = 2;
            call.q_dtype = q_dtype;
            call.q_factor = 1e35f;
            call.softmax_scale = 2e-36f;
            check_all_ways(device, shape_of(format, 64, 1, 16, 100, 1), call, 100, 3, Pool::BASE,
                           format.element == KVPOOL_FORMAT_INT8 && !groups);
            ++cases;
        }
        {
            // Offsets beyond 32 bits.
            Device device(8ull << 30);
            check_all_ways(device, shape_of(format, 64, 2, 16, 100, 1), AttendCall(), 100, 3,
                           (5ull << 30) + 4096);
            ++cases;
        }
        if (format.element != KVPOOL_FORMAT_INT8) check_no_finite_score(format);
        printf("%s%s: as in double\n", format.name, scale_name(format.scale));
        fflush(stdout);
    }
    printf("%u cases\n", cases);
    return 0;
}
