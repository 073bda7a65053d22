// Bytes and sectors that kernels move, beside what must be moved.
#include "attend_rig.hpp"

using namespace kvpool::tests;

namespace {

// Most that is moved, as a multiple of what must be.
constexpr double BYTES_MOST = 1.02, SECTORS_MOST = 1.05;

// `read_apart`, `write_apart`: sectors that must be moved for runs shorter than a sector, beyond
// their bytes.
void report(const std::string& what, const kvpool::emu::Traffic& traffic, double read,
            double written, double read_apart = 0, double write_apart = 0) {
    const double r = traffic.read_bytes / std::max(1.0, read),
                 rs = traffic.read_sectors / (read / 32.0 + read_apart);
    const double w = written > 0 ? traffic.write_bytes / written : 1,
                 ws = written > 0 ? traffic.write_sectors / (written / 32.0 + write_apart) : 1;
    printf("%-64s reads %.4f, sectors %.4f; writes %.4f, sectors %.4f; bank conflicts %llu\n",
           what.c_str(), r, rs, w, ws, static_cast<unsigned long long>(traffic.bank_conflicts));
    // (Where Q is placed for INT8, once a split, there are two passes instead of one.)
    CHECK(traffic.bank_conflicts <= 128 * traffic.blocks, "%s: %llu bank conflicts in %llu blocks",
          what.c_str(), static_cast<unsigned long long>(traffic.bank_conflicts),
          static_cast<unsigned long long>(traffic.blocks));
    CHECK(r <= BYTES_MOST, "%s: reads %.4f times what must be read", what.c_str(), r);
    CHECK(rs <= SECTORS_MOST, "%s: reads %.4f times the sectors", what.c_str(), rs);
    CHECK(w <= BYTES_MOST, "%s: writes %.4f times what must be written", what.c_str(), w);
    CHECK(ws <= SECTORS_MOST, "%s: writes %.4f times the sectors", what.c_str(), ws);
}

void decode(const Format& format, uint32_t head_dim, uint32_t q_per_kv, uint32_t addressing,
            bool tensor) {
    Device device;
    const uint32_t length = 1024, sequences = 2, heads = 2;
    Shape shape = {format, addressing, 16, head_dim, heads, 1, 0, 0, sequences * 64};
    if (addressing == KVPOOL_ADDRESSING_SLOT) shape.unit_tokens = length, shape.units = sequences;
    Pool pool(device, shape, sequences, 1);
    std::vector<Token> tokens;
    for (uint32_t seq = 0; seq < sequences; ++seq) {
        for (uint32_t i = 0; i < length; ++i) tokens.push_back({seq, i});
    }
    append(pool, KVPOOL_DTYPE_F16, tokens, 0, 8);
    AttendCall call;
    call.q_per_kv = q_per_kv;
    call.q_dtype = call.out_dtype = KVPOOL_DTYPE_F16;
    Deal deal;
    deal.tensor = tensor;
    AttendRun run(pool, call, {{0, length - 1, 1}, {1, length - 1, 1}}, deal);
    device.clear_traffic();
    device.count_banks = true;
    run.launch();
    const double row = head_dim * format.bytes + pool.group.scales_per_row * 2;
    const double kv = 2.0 * sequences * heads * length * row;
    // Q is read once a split, too.
    const double queries = 2.0 * sequences * heads * q_per_kv * head_dim * 2;
    const double partials = 2.0 * sequences * heads * q_per_kv * (head_dim + 2) * 4;
    char what[200];
    snprintf(what, sizeof what, "decode %s%s, dim %u, group %u, %s, %s", format.name,
             scale_name(format.scale), head_dim, q_per_kv,
             addressing == KVPOOL_ADDRESSING_SLOT ? "slots" : "blocks of 16",
             tensor ? "tensor" : "plain");
    report(what, device.traffic(run.kernel.c_str()), kv + queries, partials);
}

void append_traffic(const Format& format, uint32_t head_dim, uint32_t dtype) {
    Device device;
    Shape shape = {format, KVPOOL_ADDRESSING_BLOCKS, 16, head_dim, 8, 1, 0, 0, 40};
    Pool pool(device, shape, 1, 1);
    std::vector<Token> tokens;
    for (uint32_t i = 0; i < 512; ++i) tokens.push_back({0, i});
    AppendRun run(pool, dtype, tokens, 0);
    device.clear_traffic();
    device.count_banks = true;
    run.launch(pool, 8);
    const double elements = 2.0 * tokens.size() * 8 * head_dim;
    const double scales = 2.0 * tokens.size() * 8 * pool.group.scales_per_row * 2;
    // A token's scales lie apart, head by head, beside those of the tokens before: 2 to 16 bytes in
    // a sector each.
    const double apart =
        pool.group.scales_per_row > 0 ? 2.0 * tokens.size() * 8 - scales / 32.0 : 0;
    report(run.kernel(pool) + scale_name(format.scale) + ", dim " + std::to_string(head_dim),
           device.traffic(run.kernel(pool).c_str()),
           elements * Tensor::element_bytes(dtype) + 8.0 * tokens.size(),
           elements * format.bytes + scales, 0, apart);
}

void copy_traffic(const Format& format, uint32_t tokens) {
    Device device;
    Pool pool(device, {format, KVPOOL_ADDRESSING_BLOCKS, 32, 128, 8, 4, 0, 0, 10}, 1, 1);
    std::vector<KvpoolCopyPair> pairs = {{0, 5, 0, tokens}, {1, 6, 0, tokens}, {2, 7, 0, tokens}};
    auto device_pairs = device.array(pairs);
    KvpoolCopyParams params = {};
    params.group = pool.group;
    params.pool = pool.bytes.address();
    params.pairs = device_pairs.address();
    params.num_pairs = 3;
    run(device, "kvpool_copy_pairs", {4, 3}, {256}, 0, params);
    const double bytes =
        3.0 * 2 * 4 * 8 * tokens * (128 * format.bytes + pool.group.scales_per_row * 2);
    // Scales of a few tokens are less than a sector.
    const double scales = tokens * pool.group.scales_per_row * 2;
    const double apart = tokens < 32 ? 3.0 * 2 * 4 * 8 * (ceil(scales / 32) - scales / 32) : 0;
    report(std::string("copy ") + format.name + scale_name(format.scale) + ", tokens " +
               std::to_string(tokens) + " of 32",
           device.traffic("kvpool_copy_pairs"), bytes, bytes, apart, apart);
}

}  // namespace

int main() {
    for (const Format& format : FORMATS) {
        for (const uint32_t dim : {64u, 128u, 256u}) {
            for (const uint32_t dtype : {0u, 1u}) append_traffic(format, dim, dtype);
        }
        for (const uint32_t tokens : {32u, 16u, 8u}) copy_traffic(format, tokens);
        for (const uint32_t addressing : {KVPOOL_ADDRESSING_BLOCKS, KVPOOL_ADDRESSING_SLOT}) {
            // Each geometry by the kernel that it has.
            if (format.element == KVPOOL_FORMAT_F32) {
                decode(format, 128, 8, addressing, false);
            } else {
                for (const auto& [dim, group] :
                     {std::pair{64u, 4u}, {128u, 8u}, {128u, 1u}, {256u, 2u}}) {
                    decode(format, dim, group, addressing, true);
                }
            }
        }
    }
    return 0;
}
