// What is written in braces, or is empty, means what it looks like.
#include <kvpool.hpp>

#include <cstring>

#include "check.h"

namespace {

// What would be gone when it is used is refused.
using kvpool::BeginItem;
using Prompt = std::vector<uint32_t>;
static_assert(std::is_constructible_v<BeginItem, const Prompt&> &&
              std::is_constructible_v<BeginItem, Prompt&>);
static_assert(!std::is_constructible_v<BeginItem, Prompt> &&
              !std::is_constructible_v<BeginItem, std::initializer_list<uint32_t>>);
static_assert(!std::is_constructible_v<kvpool::KeyPart, std::nullptr_t>);
// Tensors are of arrays too, and of what has a span's look and its values elsewhere.
static_assert(std::is_convertible_v<const float (&)[8], kvpool::TensorRef> &&
              std::is_convertible_v<float (&)[8], kvpool::TensorMut> &&
              std::is_convertible_v<kvpool::span<float>, kvpool::TensorMut> &&
              !std::is_convertible_v<std::vector<float>, kvpool::TensorMut> &&
              !std::is_convertible_v<kvpool::span<const float>, kvpool::TensorMut>);

// Leaves numbers on the stack where temporaries were.
__attribute__((noinline)) void litter() {
    volatile unsigned char bytes[8192];
    std::memset(const_cast<unsigned char*>(bytes), 0xA5, sizeof(bytes));
}

kvpool::Cache open() {
    const auto config = kvpool::Config::parse(CHECK_CONFIG, "check.toml").value();
    return kvpool::Cache::open(kvpool::Plan::create(config).value()).value();
}

// Options keep what they were given in braces.
void options_keep_their_retentions() {
    auto cache = open();
    const uint32_t prompt[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    kvpool::BeginOptions options;
    options.retentions = {kvpool::Retention(90).tokens(0, 4), kvpool::Retention(10).tokens(4, 8)};
    litter();
    const kvpool_begin_options_t c = options.c();
    CHECK(c.num_retentions == 2 && c.retentions[0].priority == 90 && c.retentions[1].from == 4);
    CHECK(cache.begin(prompt, options).ok());
    // A copy has its own.
    std::vector<kvpool::BeginItem> items(2);
    {
        kvpool::BeginOptions more;
        more.retentions = {kvpool::Retention(50)};
        for (auto& item : items) item = {prompt, more};
    }
    litter();
    CHECK(items[1].options.c().retentions == items[1].options.retentions.data());
    kvpool::Begun begun[2];
    CHECK(cache.begin_batch(items, begun).ok());
    // Too many are too many.
    const std::vector<kvpool::Retention> many(7, kvpool::Retention(1));
    options.retentions = many;
    CHECK(cache.begin(prompt, options).status() == kvpool::Status::bad_retention);
}

// No tokens are no tokens, whether the list ever had some or not.
void an_empty_list_of_tokens() {
    auto cache = open();
    auto sequence = cache.begin({1, 2, 3}).value().sequence;
    std::vector<uint32_t> tokens;
    CHECK(cache.reserve({{sequence, 3}}, tokens).ok());
    tokens.reserve(8);
    CHECK(cache.reserve({{sequence, 3}}, tokens).ok());
    CHECK(cache.reserve({{sequence, 3}}).ok());
    tokens = {1, 2};
    CHECK(cache.reserve({{sequence, 3}}, tokens).status() == kvpool::Status::wrong_shape);
}

// An owner that is moved to itself still owns, and a Result too.
void moved_to_itself() {
    auto cache = open();
    auto begun = cache.begin({1, 2, 3});
    auto& same = begun;
    begun = std::move(same);
    CHECK(begun.ok() && begun->sequence.info().ok());
    auto& sequence = begun->sequence;
    begun->sequence = std::move(sequence);
    CHECK(begun->sequence.info().ok() && cache.stats()->seqs == 1);
    begun = kvpool::Error(kvpool::Status::nobody, "gone");
    CHECK(!begun && cache.stats()->seqs == 0);
}

}  // namespace

int main() {
    options_keep_their_retentions();
    an_empty_list_of_tokens();
    moved_to_itself();
    std::printf("ok\n");
}
