// Uses every function of the C++ layer, and with it every function of kvpool.h. Built with exceptions off and
// on; the second unit, second_unit.cpp, has KVPOOL_EXCEPTIONS where this one has not.
#include <kvpool.hpp>

#include <unordered_set>

#include "check.h"

// As dlpack.h has it.
struct DLManagedTensor {
    struct {
        void* data;
        struct {
            int32_t device_type, device_id;
        } device;
        int32_t ndim;
        struct {
            uint8_t code, bits;
            uint16_t lanes;
        } dtype;
        int64_t *shape, *strides;
        uint64_t byte_offset;
    } dl_tensor;
    void* manager_ctx;
    void (*deleter)(DLManagedTensor*);
};

int second_unit();

namespace {

using kvpool::Status;

unsigned leaks = 0;

std::vector<uint32_t> tokens(uint32_t from, uint32_t n) {
    std::vector<uint32_t> tokens(n);
    for (uint32_t i = 0; i < n; ++i) tokens[i] = from + i;
    return tokens;
}

void errors() {
    CHECK(kvpool::check_library().ok() && kvpool::library_abi_version() == KVPOOL_ABI_VERSION);
    CHECK(std::string_view(kvpool::library_version()) == KVPOOL_VERSION);
    CHECK(std::string_view(name(Status::not_admitted)) == "KVPOOL_NOT_ADMITTED");
    CHECK(std::string_view(name(Status::wrong_library)) == "kvpool::Status::wrong_library");
    const auto missing = kvpool::Config::load("/no/such/file.toml");
    CHECK(!missing && missing.status() == Status::config && missing.error().message()[0] != '\0');
    CHECK(kvpool::Error::last().status() == Status::config);
    auto parsed = kvpool::Config::parse("[model]\nlayers = 1\n", "bad.toml");
    CHECK(parsed.status() == Status::config && parsed.error().line() == 2);
    // An error is a value: it stays what it was.
    const kvpool::Error kept = parsed.error();
    parsed = kvpool::Config::parse(CHECK_CONFIG);
    CHECK(parsed.ok() && kept.status() == Status::config && kept.c().line == 2);
    CHECK(std::string_view(kept.knob()) == kept.c().knob && !kept.index());
    const auto plan = kvpool::Plan::create(kvpool::Config());
    CHECK(plan.status() == Status::bad_handle && !plan.error().wanted() && !plan.error().available());
    CHECK(kvpool::scale_to_f32(0x7F00) == 1.0f);
    const kvpool::Result<uint32_t> none = kept;
    CHECK(kvpool::Result<uint32_t>(none.error()).value_or(7u) == 7);
}

kvpool::Cache open() {
    auto config = kvpool::Config::parse(CHECK_CONFIG, "check.toml", {"limits.max_seqs=3", "pool.scrub=on-reuse"}).value();
    CHECK(config.text()->find("max_seqs = 3") != std::string::npos);
    CHECK(config.text(kvpool::TextForm::json)->front() == '{');
    auto plan = kvpool::Plan::create(config).value();
    CHECK(config.destroy().ok() && !config && config.destroy().status() == Status::bad_handle);
    const kvpool::PlanInfo info = plan.info().value();
    CHECK(info.mode() == kvpool::Mode::hybrid && info.format() == kvpool::Format::f32 && info.max_seqs == 3);
    CHECK(info.scale() == kvpool::Scale::none && info.admission() == kvpool::Admission::guaranteed);
    CHECK(info.scrub() == kvpool::Scrub::on_reuse);
    CHECK(info.prefix_reuse() && !info.rope() && plan.layer(1)->k == nullptr);
    const uint32_t paged = plan.layer(1)->group;
    CHECK(plan.group(paged)->kind() == kvpool::GroupKind::paged && plan.blocks_for(paged, 17).value() == 3);
    CHECK(plan.text()->size() > 100 && plan.text(kvpool::TextForm::json)->front() == '{');
    kvpool::Plan moved = std::move(plan);
    CHECK(moved && !plan);
    auto cache = kvpool::Cache::open(moved).value();
    CHECK(moved.destroy().ok());
    return cache;
}

// Queries are rotated as K is when it is appended.
void rotating() {
    const auto config = kvpool::Config::parse(CHECK_CONFIG, "check.toml", {"rope.theta=10000"}).value();
    const auto plan = kvpool::Plan::create(config).value();
    std::vector<float> q(2 * Q_HEADS * HEAD_DIM, 1.0f), out(q.size());
    const uint32_t positions[] = {0, 5};
    CHECK(plan.info()->rope() && plan.rotate(0, positions, Q_HEADS, q, out).ok());
    CHECK(out[0] == 1.0f && out[Q_HEADS * HEAD_DIM] != 1.0f);
    CHECK(plan.rotate(0, positions, Q_HEADS, q, q).ok() && q == out);
    out.pop_back();
    CHECK(plan.rotate(0, positions, Q_HEADS, q, out).status() == Status::wrong_shape);
}

void looking(kvpool::Cache& cache) {
    const kvpool::PlanInfo info = cache.plan_info().value();
    const kvpool::Layer layer = cache.layer(0).value();
    const auto pool = cache.pool().value();
    CHECK(pool.size() == info.pool_bytes && pool.data() + layer.k_offset == layer.k);
    CHECK(layer.format() == kvpool::Format::f32 && layer.scale() == kvpool::Scale::none);
    CHECK(layer.vector_offset(1, 1) == layer.head_stride + layer.token_stride &&
          layer.scale_offset(0, 0) == 0);
    const kvpool::GroupInfo group = cache.group(layer.group).value();
    CHECK(group.addressing() == kvpool::Addressing::ring && group.reuse() == kvpool::Reuse::donor);
    const kvpool::DeviceInfo device = cache.device().value();
    CHECK(device.kind() == kvpool::DeviceKind::cpu && !device.emulated());
    CHECK(cache.text()->size() > 100 && cache.text(kvpool::TextForm::json)->front() == '{');
    CHECK(cache.set_stream(nullptr).status() == Status::wrong_memory && cache.synchronize().ok());
    unsigned char first[8];
    CHECK(cache.read(0, first).ok() && memcmp(first, pool.data(), sizeof(first)) == 0);
    const auto view = cache.dlpack(1, kvpool::Part::v).value();
    CHECK(view->dl_tensor.ndim == 4 && view->dl_tensor.shape[3] == HEAD_DIM);
}

void steps(kvpool::Cache& cache) {
    const std::vector<uint32_t> prompt = tokens(1, 11);
    kvpool::BeginOptions options;
    options.key = 5;
    options.max_len = 40;
    auto begun = cache.begin(prompt, options).value();
    CHECK(begun.cached_len == 0 && begun.limit == 40);
    CHECK(cache.begin(prompt, options).status() == Status::duplicate_key);
    kvpool::Sequence& sequence = begun.sequence;
    const uint32_t paged = cache.layer(1)->group, ring = cache.layer(0)->group;

    auto step = cache.reserve({{sequence, 8}}, tokens(1, 8)).value();
    const kvpool::StepView view = step.view().value();
    CHECK(view.num_tokens() == 8 && view.num_seqs() == 1 && step.num_tokens() == 8 && step.num_seqs() == 1);
    CHECK(view.positions[7] == 7 && view.seq_lens[0] == 8 && view.seqs[0].rows == 8);
    const kvpool::StepGroup group = step.group(paged).value();
    const uint32_t block = group.row(view.seqs[0].slot)[0];
    CHECK(block != kvpool::no_block && group.token_slots[3] == block * 8 + 3 &&
          group.token_slots.size() == 8);
    const kvpool::StepCsr csr = step.csr(paged).value();
    CHECK(csr.kv_indptr[1] == 1 && csr.kv_indices.size() == 1 && csr.kv_indices[0] == block);
    CHECK(step.csr(ring).status() == Status::no_such_group);
    CHECK(step.device(paged, kvpool::Tables::csr | kvpool::Tables::dense).status() == Status::wrong_memory &&
          step.prepare().status() == Status::wrong_memory);

    const std::vector<float> kv(8 * KV_HEADS * HEAD_DIM, 2.0f), q(8 * Q_HEADS * HEAD_DIM, 0.1f);
    std::vector<float> out(q.size()), lse(8 * Q_HEADS);
    CHECK(step.append(1, kv, kv).ok() && step.append(1, kv, kv).status() == Status::already_appended);
    kvpool::AttendOptions attend;
    attend.lse = lse;
    CHECK(step.attend(1, q, out, attend).ok() && out[0] > 1.999f && out[0] < 2.001f && lse[7] > lse[0]);
    const std::vector<kvpool::f16> halves(kv.size(), kvpool::f16{0x3C00});
    CHECK(step.append(0, kvpool::tensor(halves),
                      kvpool::TensorRef::at(halves.data(), halves.size(), kvpool::Memory::host))
              .ok());
    std::vector<kvpool::bf16> narrow(q.size());
    CHECK(step.attend(0, kvpool::tensor(q), kvpool::tensor_mut(narrow)).ok() &&
          narrow[0] == kvpool::bf16{0x3F80});
    CHECK(step.attend(0, q, kvpool::TensorMut::at(out.data(), out.size(), kvpool::Memory::device)).status() ==
          Status::wrong_memory);
    CHECK(sequence.release().status() == Status::step_open && sequence);
    CHECK(step.commit().ok() && !step);
    CHECK(sequence.info()->len == 8 && cache.info(sequence)->limit == 40);

    std::vector<float> exported(KV_HEADS * HEAD_DIM);
    CHECK(cache.export_tokens(sequence, 1, kvpool::Part::k, 7, 8, exported).ok() && exported[5] == 2.0f);
    {
        // Ends without a commit: cancelled.
        const auto dropped = cache.reserve({{sequence, 3}}).value();
        CHECK(cache.reserve({{sequence, 3}}).status() == Status::step_open);
    }
    auto marked = cache.reserve({{sequence, 3}}, tokens(9, 3)).value();
    CHECK(marked.mark_appended(0).ok() && marked.commit().status() == Status::not_appended && !marked);
    marked = cache.reserve({{sequence, 3}}, tokens(9, 3)).value();
    CHECK(marked.mark_all_appended().ok() && marked.cancel().ok());

    CHECK(sequence.truncate(6).ok());
    auto forked = sequence.fork().value();
    const kvpool::BlockId shared = cache.block_of(forked, paged, 0).value();
    CHECK(cache.block_refs(shared).value() == 2);
    std::unordered_set<kvpool::SeqId> ids = {sequence.id(), forked};
    CHECK(ids.size() == 2 && ids.count(sequence) == 1 && forked.id() != sequence.id());
    CHECK(cache.release(forked).ok() && forked.release().status() == Status::stale_handle);
}

void admission(kvpool::Cache& cache) {
    const std::vector<uint32_t> prompt = tokens(1, 3);
    CHECK(cache.check_admission(prompt)->limit == 64);
    {
        auto first = cache.can_admit(prompt).value(), second = cache.can_admit(prompt).value();
        CHECK(first.estimate.limit == 64 && first.reservation.id() != second.reservation.id());
        CHECK(cache.reservations().value() == 2);
        const auto begun = first.reservation.begin().value();
        // A reservation has a place, as a sequence has.
        CHECK(!first.reservation && cache.stats()->seqs == 2 && second.reservation.cancel().ok());
        const auto third = cache.can_admit(prompt).value();
        CHECK(cache.cancel_reservations().value() == 1);
        // Its owner finds it gone, and says nothing.
    }
    CHECK(cache.stats()->seqs == 0 && cache.reservations().value() == 0);
    kvpool::Begun batch[2];
    const std::vector<uint32_t> two = tokens(7, 2);
    const kvpool::BeginItem items[] = {{prompt, {}}, {two, {}}};
    CHECK(cache.begin_batch(items, batch).ok() && cache.stats()->seqs == 2);
    CHECK(cache.reset().status() == Status::sequences_alive);
    CHECK(cache.begin_batch(items, {batch, 1}).status() == Status::wrong_shape);
    const kvpool::BeginItem empty[] = {{prompt, {}}, {}};
    kvpool::Begun more[2];
    const auto refused = cache.begin_batch(empty, more);
    CHECK(!refused && cache.stats()->seqs == 2);
    // More than the stack has room for.
    const std::vector<kvpool::BeginItem> many(100, kvpool::BeginItem{prompt, {}});
    std::vector<kvpool::Begun> begun(100);
    CHECK(!cache.begin_batch(many, begun).ok());
    CHECK(cache.preempt_youngest().status() == Status::nobody);
    batch[0].sequence = kvpool::Sequence();
    CHECK(cache.stats()->seqs == 1 && batch[1].sequence.release().ok() && cache.reset().ok());
    // Ownership goes and comes.
    const kvpool::SeqId plain = cache.begin(prompt).value().sequence.detach();
    CHECK(cache.info(plain)->len == 0);
    {
        const kvpool::Sequence owned = cache.own(plain);
    }
    CHECK(cache.info(plain).status() == Status::stale_handle);
}

void preemption() {
    auto config = kvpool::Config::parse(
        CHECK_CONFIG, "check.toml",
        {"cache.mode=paged", "cache.hybrid=", "model.attention_window=", "model.sink_tokens=0",
         "limits.max_rewind_tokens=0", "cache.admission=max-utilization", "pool.capacity=blocks:8"});
    auto cache = kvpool::Cache::open(kvpool::Plan::create(*config).value()).value();
    kvpool::BeginOptions options;
    options.key = 1;
    auto elder = cache.begin(tokens(0, 8), options).value().sequence;
    options.key = 2;
    auto younger = cache.begin(tokens(50, 8), options).value().sequence;
    for (;;) {
        auto step = cache.reserve({{elder, 8}, {younger, 8}});
        if (!step) {
            CHECK(step.status() == Status::pool_exhausted);
            break;
        }
        CHECK(step->mark_all_appended().ok() && step->commit().ok());
    }
    const kvpool::Preempted preempted = cache.preempt_youngest().value();
    CHECK(preempted.key() == uint64_t{2} && preempted.sequence() == younger.id() && preempted.len == 32);
    CHECK(!preempted.was_reservation() && younger.info().status() == Status::stale_handle);
    CHECK(cache.stats()->seqs == 1 && cache.close().ok());
    // Both owners outlive their cache.
}

void prefixes(kvpool::Cache& cache) {
    const std::vector<uint32_t> prompt = tokens(100, 20);
    const kvpool::Retention retentions[] = {kvpool::Retention(90).tokens(0, 16),
                                            kvpool::Retention(10).tokens(16, kvpool::to_end).for_ms(5)};
    CHECK(retentions[0].duration_ms == kvpool::forever);
    kvpool::BeginOptions options;
    options.retentions = retentions;
    options.name_space.salt = "tenant";
    options.name_space.adapter = 3;
    auto sequence = cache.begin(prompt, options).value().sequence;
    CHECK(cache.poll_events([](const kvpool::Event&) {}).ok());
    for (uint32_t from = 0; from < 20; from += 5) check_step(cache.c(), sequence.c(), &prompt[from], 5);
    auto pin = sequence.pin().value();
    CHECK(sequence.set_retention({retentions, 1}).ok() && cache.set_time_ms(1000).ok());
    CHECK(sequence.release().ok());
    CHECK(cache.probe(prompt, options.name_space)->full_blocks == 2 && cache.probe(prompt)->cached_len == 0);
    CHECK(cache.namespace_numbers(options.name_space)->first != 0);
    CHECK(cache.reset().status() == Status::pins_alive && pin.id() && pin.unpin().ok());

    uint64_t stored = 0, tokens_seen = 0, firsts = 0;
    const auto hear = [&](const kvpool::Event& event) {
        if (event.kind != kvpool::EventKind::stored) return;
        ++stored;
        firsts += event.parent ? 0 : 1;
        tokens_seen += event.tokens.size();
    };
    const kvpool::EventCount count = cache.poll_events(hear).value();
    CHECK(stored == 2 && firsts == 1 && tokens_seen == 16 && count.delivered >= 2 && count.lost == 0);
    CHECK(cache.resync_events(hear).value() >= 2 && stored == 4);
#if defined(__cpp_exceptions)
    // What a callback throws comes out behind the call, which goes to its end.
    int calls = 0;
    try {
        (void)cache.resync_events([&](const kvpool::Event&) {
            ++calls;
            throw calls;
        });
        CHECK(false);
    } catch (int thrown) {
        CHECK(thrown == 1 && calls == 1);
    }
#endif
    // A verb in a callback is refused.
    Status inside = Status::ok;
    CHECK(cache.resync_events([&](const kvpool::Event&) { inside = cache.clear_cached().status(); }).ok());
    CHECK(inside == Status::busy);
    CHECK(cache.clear_cached().ok() && cache.set_epoch(2).ok());
    CHECK(cache.evictions().value()[90] == 0 && cache.group_stats(cache.layer(1)->group)->blocks_cached == 0);
    CHECK(cache.group_stats(cache.layer(1)->group)->reuse() == kvpool::Reuse::index);
    CHECK(cache.digest().value() != 0 && cache.check().ok());
}

void saves(kvpool::Cache& cache) {
    const char* folder = std::getenv("TMPDIR");
    const std::string path = std::string(folder != nullptr ? folder : "/tmp") + "/kvpool-cpp-" +
                             std::to_string(reinterpret_cast<uintptr_t>(&cache)) + "-" +
                             std::to_string(reinterpret_cast<uintptr_t>(&leaks));
    const std::vector<uint32_t> prompt = tokens(700, 20);
    auto sequence = cache.begin(prompt).value().sequence;
    for (uint32_t from = 0; from < 20; from += 5) check_step(cache.c(), sequence.c(), &prompt[from], 5);
    kvpool::SaveOptions save;
    kvpool::RestoreOptions restore;
    save.model = restore.model = "weights";
    CHECK(cache.save_sequence(sequence, path.c_str(), save)->tokens == 20);
    CHECK(cache.restore_sequence(path.c_str()).status() == Status::save_mismatch);
    restore.key = 8;
    restore.max_len = 30;
    {
        const auto again = cache.restore_sequence(path.c_str(), restore).value();
        CHECK(again.cached_len == 20 && again.limit == 30 && again.sequence.info()->len == 20);
    }
    CHECK(sequence.release().ok());
    save.unsalted_only = true;
    const kvpool::Saved saved = cache.save_prefixes(path.c_str(), save).value();
    CHECK(cache.clear_cached().ok() && cache.probe(prompt)->cached_len == 0);
    const kvpool::Restored restored = cache.restore_prefixes(path.c_str(), restore).value();
    CHECK(restored.file_tokens == saved.tokens && cache.probe(prompt)->cached_len >= 16);
    CHECK(cache.restore_prefixes("/no/such/file").status() == Status::save_io);
    CHECK(std::remove(path.c_str()) == 0);
}

// What ends while it cannot go goes as soon as it can, and what never can is told.
void ending(kvpool::Cache& cache) {
    kvpool::set_leak_handler([](const kvpool::Leak& leak) {
        CHECK(std::string_view(leak.what) == "Sequence" && leak.status == KVPOOL_BUSY);
        CHECK((leak.handle[0] | leak.handle[1]) != 0 && (leak.cache.word[0] | leak.cache.word[1]) != 0 &&
              leak.message[0] != '\0');
        ++leaks;
    });
    auto sequence = cache.begin({1, 2, 3}).value().sequence;
    auto other = cache.begin({1, 2, 3}).value().sequence;
    {
        auto step = cache.reserve({{sequence, 1}}).value();
        sequence = kvpool::Sequence();
        CHECK(leaks == 0 && cache.stats()->seqs == 2);
        step.mark_all_appended().value();
        CHECK(step.commit().ok() && cache.stats()->seqs == 1);
    }
    {
        auto step = cache.reserve({{other, 1}}).value();
        const kvpool::SeqId id = other.detach();
        // More than good handles can be: the same one again and again.
        int given = 0;
        for (; leaks == 0 && given < 100000; ++given) kvpool::Sequence(cache.c(), id);
        CHECK(leaks == 1 && given > 64);
    }
    // The step was cancelled at its end, and the sequence went behind it.
    CHECK(cache.stats()->seqs == 0 && cache.clear_cached().ok());
    // A cache that ends takes along what waits for it, however many such caches there are.
    for (int i = 0; i < 600; ++i) {
        auto brief = kvpool::Cache::own(check_open(nullptr, 0));
        auto held = brief.begin({1, 2, 3}).value().sequence;
        brief.reserve({{held, 1}}).value().detach();
        held = kvpool::Sequence();
        // By its owner, or behind all owners' backs.
        if (i % 2 == 0) CHECK(kvpool_cache_close(brief.detach()) == KVPOOL_OK);
        CHECK(leaks == 1);
    }
    CHECK(cache.stats()->seqs == 0 && cache.clear_cached().ok());

    // A step that ends while another thread is in a verb is not in the way of what comes.
    sequence = cache.begin({1, 2, 3, 4, 5, 6, 7, 8, 9}).value().sequence;
    check_step(cache.c(), sequence.c(), tokens(1, 8).data(), 8);
    auto step = cache.reserve({{sequence, 1}}).value();
    const auto polled = cache.poll_events([&](const kvpool::Event&) { step = kvpool::Step(); });
    CHECK(polled.ok() && polled->delivered > 0);
    CHECK(cache.clear_cached().ok());
    // One whose owner is lost.
    const kvpool_step_t lost = cache.reserve({{sequence, 1}})->detach();
    CHECK(cache.reserve({{sequence, 1}}).status() == Status::step_open);
    CHECK(cache.own(lost)->num_tokens() == 1);
    CHECK(!cache.cancel_step().value());
    const kvpool_step_t again = cache.reserve({{sequence, 1}})->detach();
    CHECK(cache.cancel_step().value() && cache.own(again).status() == Status::stale_handle);
    CHECK(sequence.release().ok() && leaks == 1);
    kvpool::set_leak_handler(nullptr);
}

// Handles of a C part of the program.
void taking_over() {
    const char* const none[] = {""};
    kvpool_config_t config;
    OK(kvpool_config_parse(CHECK_CONFIG, strlen(CHECK_CONFIG), "check.toml", none, 0, &config));
    const auto owned = kvpool::Config::own(config);
    kvpool_plan_t plan;
    OK(kvpool_plan_new(config, &plan));
    const auto planned = kvpool::Plan::own(plan);
    kvpool_cache_t cache;
    OK(kvpool_cache_open(plan, &cache));
    auto opened = kvpool::Cache::own(cache);
    CHECK(owned.text().ok() && planned.info().ok() && opened.close().ok());
}

// Keys are copied: what they were made of may go.
void keys(kvpool::Cache& cache) {
    const auto of = [](const std::string& tenant) {
        kvpool::BeginOptions options;
        options.name_space.salt = kvpool::KeyPart(tenant + "/production/eu-central-1");
        return options;
    };
    const auto alice = of("alice"), malry = of("malry");
    CHECK(std::string_view(reinterpret_cast<const char*>(alice.c().name_space.salt.bytes), 6) == "alice/");
    CHECK(std::string_view(reinterpret_cast<const char*>(malry.c().name_space.salt.bytes), 6) == "malry/");
    auto filled = cache.begin(tokens(1, 9), alice).value();
    check_step(cache.c(), filled.sequence.c(), tokens(1, 8).data(), 8);
    CHECK(filled.sequence.release().ok());
    CHECK(cache.begin(tokens(1, 9), malry)->cached_len == 0);
    CHECK(cache.begin(tokens(1, 9), alice)->cached_len == 8);
    kvpool::BeginOptions longer;
    longer.name_space.model = std::string(KVPOOL_KEY_BYTES + 1, 'x');
    CHECK(cache.begin(tokens(1, 9), longer).status() == Status::key_too_long);
}

}  // namespace

int main() {
    rotating();
    errors();
    auto cache = open();
    looking(cache);
    steps(cache);
    admission(cache);
    preemption();
    CHECK(cache.reset().ok());
    prefixes(cache);
    saves(cache);
    ending(cache);
    keys(cache);
    taking_over();
    check_empty(cache.c());
    kvpool::Cache moved = std::move(cache);
    CHECK(!cache && moved.check().ok() && moved.close().ok() && moved.close().status() == Status::bad_handle);
    CHECK(second_unit() == 0);
    std::printf("ok\n");
}
