// One answer (P5), bit for bit: whatever the view, the block size, the batch, the chunks of a
// prompt, how items are dealt out, the order in which threads run, and what lies in places that are
// not held.
#include "attend_rig.hpp"

using namespace kvpool::tests;

namespace {

constexpr uint32_t LENGTH = 650, SEQUENCES = 3;

struct Setting {
    uint32_t addressing = KVPOOL_ADDRESSING_BLOCKS;
    uint32_t unit_tokens = 16;
    uint32_t window = 0;
    uint32_t sinks = 0;
    Deal deal;
    std::vector<Chunk> chunks;
    uint64_t seed = 0;
    bool nan_at_end = false;
};

// The answer of some chunks, each row's numbers under its sequence and position.
Answer answer(const Format& format, uint32_t head_dim, uint32_t q_per_kv, const Setting& setting) {
    Device device;
    device.seed = setting.seed;
    Shape shape = {format,
                   setting.addressing,
                   setting.unit_tokens,
                   head_dim,
                   2,
                   2,
                   setting.sinks,
                   0,
                   SEQUENCES * ((LENGTH + setting.unit_tokens - 1) / setting.unit_tokens)};
    if (setting.addressing == KVPOOL_ADDRESSING_SLOT)
        shape.unit_tokens = LENGTH + 3, shape.units = SEQUENCES + 1;
    if (setting.addressing == KVPOOL_ADDRESSING_RING) {
        // (No longer than what is appended, so that nothing is overwritten.)
        shape.ring_tokens = LENGTH;
        shape.unit_tokens = setting.sinks + LENGTH;
        shape.units = SEQUENCES;
    }
    Pool pool(device, shape, SEQUENCES,
              static_cast<uint32_t>(setting.unit_tokens + setting.addressing));
    std::vector<Token> tokens;
    for (const Chunk& chunk : setting.chunks) {
        for (uint32_t i = 0; i < chunk.first_position + chunk.rows; ++i)
            tokens.push_back({chunk.seq, i});
    }
    AppendRun run(pool, KVPOOL_DTYPE_F32, tokens, 1);
    if (setting.nan_at_end) {
        // The K and V of the last token of the first chunk. (Only INT8 makes numbers of it.)
        const size_t last = setting.chunks[0].first_position + setting.chunks[0].rows - 1;
        for (uint32_t i = 0; i < 2 * head_dim; ++i) {
            run.k.set(last * 2 * head_dim + i, NAN);
            run.v.set(last * 2 * head_dim + i, NAN);
        }
    }
    run.launch(pool, 2);
    AttendCall call;
    call.layer = 1;
    call.window = setting.window;
    call.q_per_kv = q_per_kv;
    call.softmax_scale = 0.2f;
    return AttendRun(pool, call, setting.chunks, setting.deal).launch();
}

// Rows `from..` of an answer.
std::vector<float> tail(const std::vector<float>& x, size_t rows, size_t from) {
    const size_t each = x.size() / rows;
    return {x.begin() + static_cast<long>(from * each), x.end()};
}

void check_one(const Format& format, uint32_t head_dim, uint32_t q_per_kv, uint32_t window,
               uint32_t sinks, bool tensor) {
    char what[200];
    snprintf(what, sizeof what, "%s%s, dim %u, group %u, window %u, sinks %u, %s", format.name,
             scale_name(format.scale), head_dim, q_per_kv, window, sinks,
             tensor ? "tensor" : "plain");
    const std::string name = what;
    Setting base;
    base.window = window;
    base.sinks = sinks;
    base.deal.tensor = tensor;
    base.chunks = {{1, LENGTH - 20, 20}};
    const Answer want = answer(format, head_dim, q_per_kv, base);
    for (const float x : want.out) CHECK(isfinite(x), "%s: %g", what, x);
    const auto same = [&](const Setting& setting, const std::string& how) {
        const Answer got = answer(format, head_dim, q_per_kv, setting);
        check_same(want.out, got.out, name + ": " + how);
        check_same(want.lse, got.lse, name + ": " + how + ", lse");
    };
    for (const uint32_t tokens : {1u, 2u, 8u, 32u, 64u, 128u}) {
        Setting other = base;
        other.unit_tokens = tokens;
        same(other, "blocks of " + std::to_string(tokens));
    }
    for (const uint32_t addressing : {KVPOOL_ADDRESSING_SLOT, KVPOOL_ADDRESSING_RING}) {
        Setting other = base;
        other.addressing = addressing;
        same(other, "addressing " + std::to_string(addressing));
    }
    {
        Setting other = base;
        other.deal.split = false;
        same(other, "all splits in one");
        other.deal.rows_at_once = 3;
        other.seed = 99;
        same(other, "three packed rows at once, threads in another order");
        if (tensor && head_dim <= 128) {
            other = base;
            other.deal.m = 2;
            other.deal.split = false;
            same(other, "x2");
            other.deal.split = true;
            other.deal.grid = 1;
            same(other, "x2, splits");
        }
    }
    // The chunk's rows one by one, and in other chunks, beside other sequences.
    for (const uint32_t step : {1u, 7u}) {
        Answer joined;
        for (uint32_t done = 0; done < 20; done += step) {
            Setting other = base;
            const uint32_t rows = std::min(step, 20 - done);
            other.chunks = {{1, LENGTH - 20 + done, rows}};
            if (step == 7)
                other.chunks.insert(other.chunks.begin(), {0, 40 + done, 3}),
                    other.chunks.push_back({2, 5, 1});
            const Answer part = answer(format, head_dim, q_per_kv, other);
            const size_t all = step == 7 ? rows + 4 : rows, skip = step == 7 ? 3 : 0;
            const auto add = [&](std::vector<float>& to, const std::vector<float>& from) {
                const size_t each = from.size() / all;
                to.insert(to.end(), from.begin() + static_cast<long>(skip * each),
                          from.begin() + static_cast<long>((skip + rows) * each));
            };
            add(joined.out, part.out);
            add(joined.lse, part.lse);
        }
        check_same(want.out, joined.out, name + ": in steps of " + std::to_string(step));
        check_same(want.lse, joined.lse, name + ": in steps of " + std::to_string(step));
    }
    // A NaN in the last token leaves the rows before it as they are.
    for (const bool split : {false, true}) {
        Setting other = base;
        other.nan_at_end = true;
        other.deal.split = split;
        const Answer got = answer(format, head_dim, q_per_kv, other);
        const size_t each = want.out.size() / 20;
        check_same({want.out.begin(), want.out.begin() + static_cast<long>(19 * each)},
                   {got.out.begin(), got.out.begin() + static_cast<long>(19 * each)},
                   name + ": NaN in the last token");
        if (format.element != KVPOOL_FORMAT_INT8) {
            CHECK(isnan(tail(got.out, 20, 19)[0]), "%s: the NaN's own row is %g", what,
                  tail(got.out, 20, 19)[0]);
        }
    }
    printf("%s: one answer\n", what);
    fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    for (const Format& format : FORMATS) {
        if (argc > 1 && strcmp(argv[1], format.name) != 0) continue;
        for (const bool tensor : {false, true}) {
            if (tensor && format.element == KVPOOL_FORMAT_F32) continue;
            if (format.scale == KVPOOL_SCALE_PER_TENSOR && !tensor) continue;
            check_one(format, 64, 4, 0, 0, tensor);
            check_one(format, 128, 3, 40, 5, tensor);
            check_one(format, 96, 1, 600, 3, tensor);
            if (tensor) check_one(format, 256, 2, 0, 0, tensor);
        }
    }
    return 0;
}
