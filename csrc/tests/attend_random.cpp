// Attention over random geometries, windows, batches and orders of threads: near the exact answer,
// and the same bits for every way in which it can be dealt out. Arguments: [cases] [first seed]
#include "attend_rig.hpp"

using namespace kvpool::tests;

namespace {

uint32_t one_of(Random& random, const std::vector<uint32_t>& of) {
    return of[random.below(static_cast<uint32_t>(of.size()))];
}

void check_case(uint32_t seed) {
    Random random{seed * 7919ull + 1};
    for (int i = 0; i < 8; ++i) random.next();
    Device device;
    device.seed = random.below(3) == 0 ? 0 : seed + 1;
    const Format& format = FORMATS[random.below(6)];
    AttendCall call;
    call.layer = random.below(2);
    call.q_dtype = random.below(3);
    call.window = random.below(2) == 0 ? 0 : one_of(random, {1, 2, 17, 64, 130, 520});
    Shape shape = {};
    shape.format = format;
    shape.head_dim =
        one_of(random, {16, 32, 48, 64, 64, 80, 96, 112, 128, 128, 160, 256, 8, 24, 136, 288});
    if (format.scale == KVPOOL_SCALE_PER_GROUP_32)
        shape.head_dim = one_of(random, {32, 64, 96, 128, 160, 224, 256, 288});
    shape.num_kv_heads = 1 + random.below(2);
    shape.num_layers = 2;
    shape.sink_tokens = call.window == 0 ? 0 : random.below(6);
    call.q_per_kv = one_of(random, {1, 1, 2, 3, 4, 7, 8, 13, 17, 33});
    call.softmax_scale = 1.5f / sqrtf(static_cast<float>(shape.head_dim));
    shape.addressing = random.below(3);
    if (call.window == 0 && shape.addressing == KVPOOL_ADDRESSING_RING)
        shape.addressing = KVPOOL_ADDRESSING_SLOT;

    // Few rows where each is many packed ones.
    const uint32_t sequences = 1 + random.below(3), most_rows = std::max(1u, 60 / call.q_per_kv);
    std::vector<Chunk> chunks;
    uint32_t longest = 0, rows = 0;
    for (uint32_t seq = 0; seq < sequences; ++seq) {
        const uint32_t now = 1 + random.below(most_rows);
        chunks.push_back(
            {seq, one_of(random, {0, 1, 15, 63, 64, 200, 511, 512, 700}) + random.below(3), now});
        longest = std::max(longest, chunks.back().first_position + now);
        rows = std::max(rows, now);
    }
    if (random.below(2) == 0) std::swap(chunks.front(), chunks.back());
    if (shape.addressing == KVPOOL_ADDRESSING_BLOCKS) {
        shape.unit_tokens = one_of(random, {1, 4, 8, 16, 32, 64, 128});
        shape.units =
            sequences * ((longest + shape.unit_tokens - 1) / shape.unit_tokens) + random.below(4);
    } else {
        shape.ring_tokens =
            shape.addressing == KVPOOL_ADDRESSING_RING ? call.window + rows + random.below(3) : 0;
        shape.unit_tokens = shape.ring_tokens > 0 ? shape.sink_tokens + shape.ring_tokens
                                                  : longest + random.below(3);
        shape.units = sequences + random.below(2);
    }
    Pool pool(device, shape, sequences, seed);
    std::vector<Token> tokens;
    for (const Chunk& chunk : chunks) {
        const uint32_t end = chunk.first_position + chunk.rows;
        for (uint32_t i = 0; i < end; ++i) {
            // A ring holds the latest only.
            if (shape.ring_tokens == 0 || i < shape.sink_tokens || i + shape.ring_tokens >= end)
                tokens.push_back({chunk.seq, i});
        }
    }
    append(pool, random.below(3), tokens, call.layer);

    char what[300];
    snprintf(what, sizeof what,
             "seed %u: %s%s, addressing %u of %u, dim %u, heads %u x %u, window %u, sinks %u, %u "
             "sequences",
             seed, format.name, scale_name(format.scale), shape.addressing, shape.unit_tokens,
             shape.head_dim, shape.num_kv_heads, call.q_per_kv, call.window, shape.sink_tokens,
             sequences);
    const bool tensor = has_tensor_path(shape);
    Answer first;
    for (const uint32_t m :
         tensor&& shape.head_dim <= 128 ? std::vector<uint32_t>{1, 2} : std::vector<uint32_t>{1}) {
        for (const bool split : {true, false}) {
            Deal deal;
            deal.tensor = tensor;
            deal.m = m;
            deal.split = split;
            deal.rows_at_once = random.below(2) == 0 ? 0 : 1 + random.below(16);
            deal.grid = 1 + random.below(9);
            AttendRun run(pool, call, chunks, deal);
            const Answer answer = run.launch();
            if (first.out.empty()) {
                run.check(answer, what);
                first = answer;
            }
            check_same(first.out, answer.out, what);
            check_same(first.lse, answer.lse, what);
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    const uint32_t cases = argc > 1 ? static_cast<uint32_t>(atoi(argv[1])) : 150;
    const uint32_t from = argc > 2 ? static_cast<uint32_t>(atoi(argv[2])) : 0;
    for (uint32_t seed = from; seed < from + cases; ++seed) check_case(seed);
    printf("%u random cases from seed %u: near the exact answer, and each way the same bits\n",
           cases, from);
    return 0;
}
