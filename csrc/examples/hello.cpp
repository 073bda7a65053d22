// The same as hello.c over the C++ layer: value() ends the program with the library's message where a call
// failed, and every object gives back what it holds.
//
//     c++ -std=c++17 hello.cpp -lkvpool -o hello
#include <kvpool.hpp>
#include <cstdio>
#include <vector>

static constexpr char CONFIG[] = R"(
    model = { num_layers = 1, num_q_heads = 4, num_kv_heads = 2, head_dim = 64 }
    limits = { max_seqs = 2, max_seq_len = 128, max_batch_tokens = 32 }
    cache = { mode = "paged", format = "f16" })";

int main() {
    const auto config = kvpool::Config::parse(CONFIG).value();
    const auto plan = kvpool::Plan::create(config).value();
    auto cache = kvpool::Cache::open(plan).value();

    const std::vector<uint32_t> prompt = {11, 12, 13};
    const auto begun = cache.begin(prompt).value();

    const std::vector<float> k(3 * 2 * 64, 0.5f), v(3 * 2 * 64, 1.0f), q(3 * 4 * 64, 0.1f);
    std::vector<float> out(3 * 4 * 64);
    auto step = cache.reserve({{begun.sequence, 3}}, prompt).value();
    step.append(0, k, v).value();
    step.attend(0, q, out).value();
    step.commit().value();
    std::printf("kvpool %s: the attention of the third token begins with %.3f\n", kvpool::library_version(),
                out[2 * 4 * 64]);
}
