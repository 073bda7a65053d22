/* Uses every function and every macro of kvpool.h once, with what they must give. In a second unit,
 * second_unit.c, the header is included again. */
#include <kvpool.h>
/* Twice in one unit. */
#include <kvpool.h>

#include "check.h"

uint32_t abi_of_second_unit(void);
float widen_in_second_unit(uint16_t scale);

static void versions_and_errors(void) {
    CHECK(kvpool_abi_version() == KVPOOL_ABI_VERSION);
    CHECK(abi_of_second_unit() == KVPOOL_ABI_VERSION);
    CHECK(strcmp(kvpool_version(), KVPOOL_VERSION) == 0);
    char text[32];
    snprintf(text, sizeof(text), "%d.%d.%d", KVPOOL_VERSION_MAJOR, KVPOOL_VERSION_MINOR,
             KVPOOL_VERSION_PATCH);
    CHECK(strcmp(text, KVPOOL_VERSION) == 0);
    CHECK(strcmp(kvpool_status_name(KVPOOL_NOT_ADMITTED), "KVPOOL_NOT_ADMITTED") == 0);
    CHECK(strcmp(kvpool_status_name(12345), "unknown status") == 0);
    kvpool_error_t error;
    OK(kvpool_last_error(KVPOOL_OUT(error)));
    CHECK(error.status == KVPOOL_OK);
    CHECK(kvpool_scale_to_f32(0x7F00) == 1.0f && widen_in_second_unit(0) == 0.0f);
}

static void config_and_plan(void) {
    const char* const overrides[] = {"limits.max_seqs=3"};
    kvpool_config_t config;
    EXPECT(KVPOOL_CONFIG, kvpool_config_load("/no/such/file.toml", NULL, 0, &config));
    EXPECT(KVPOOL_CONFIG, kvpool_config_parse("[model]\nlayers = 1\n", 19, "bad.toml", NULL, 0, &config));
    kvpool_error_t error;
    OK(kvpool_last_error(KVPOOL_OUT(error)));
    CHECK(error.line == 2 && strstr(error.message, "bad.toml") != NULL);
    OK(kvpool_config_parse(CHECK_CONFIG, strlen(CHECK_CONFIG), "check.toml", overrides, 1, &config));

    char buffer[16384];
    size_t needed = 0;
    OK(kvpool_config_text(config, KVPOOL_TEXT, NULL, 0, &needed));
    OK(kvpool_config_text(config, KVPOOL_TEXT, buffer, sizeof(buffer), NULL));
    CHECK(needed == strlen(buffer) + 1 && strstr(buffer, "max_seqs = 3") != NULL);
    EXPECT(KVPOOL_BUFFER_TOO_SMALL, kvpool_config_text(config, KVPOOL_JSON, buffer, 3, NULL));
    OK(kvpool_last_error(KVPOOL_OUT(error)));
    CHECK(error.wanted > 3 && error.available == 3 && error.index == KVPOOL_NO_NUMBER);

    kvpool_plan_t plan;
    OK(kvpool_plan_new(config, &plan));
    kvpool_plan_info_t info;
    OK(kvpool_plan_get_info(plan, KVPOOL_OUT(info)));
    CHECK(info.size == sizeof(info) && info.mode == KVPOOL_MODE_HYBRID && info.format == KVPOOL_FORMAT_F32);
    CHECK(info.scale == KVPOOL_SCALE_NONE && info.admission == KVPOOL_GUARANTEED && info.max_seqs == 3);
    CHECK(info.num_layers == LAYERS && info.num_groups == 2 && info.head_dim == HEAD_DIM);
    uint32_t rings = 0, blocks = 0;
    for (uint32_t i = 0; i < info.num_groups; ++i) {
        kvpool_group_info_t group;
        OK(kvpool_plan_get_group(plan, i, KVPOOL_OUT(group)));
        uint32_t most = 77;
        OK(kvpool_plan_blocks_for(plan, i, 17, &most));
        if (group.kind == KVPOOL_PAGED) {
            ++blocks;
            CHECK(group.addressing == KVPOOL_BLOCKS && group.unit_tokens == 8 && most == 3);
            CHECK(group.reuse == KVPOOL_REUSE_INDEX);
        } else {
            ++rings;
            CHECK(group.kind == KVPOOL_CONTIGUOUS && group.addressing == KVPOOL_RING && most == 0);
            CHECK(group.window == 16 && group.sink_tokens == 2 && group.reuse == KVPOOL_REUSE_DONOR);
        }
    }
    CHECK(rings == 1 && blocks == 1);
    EXPECT(KVPOOL_NO_SUCH_GROUP, kvpool_plan_blocks_for(plan, 2, 17, &rings));
    kvpool_layer_t layer;
    OK(kvpool_plan_get_layer(plan, 1, KVPOOL_OUT(layer)));
    CHECK(layer.num_kv_heads == KV_HEADS && layer.k == NULL && layer.scales_per_row == 0);
    EXPECT(KVPOOL_NO_SUCH_LAYER, kvpool_plan_get_layer(plan, LAYERS, KVPOOL_OUT(layer)));
    OK(kvpool_plan_text(plan, KVPOOL_JSON, NULL, 0, &needed));
    OK(kvpool_plan_text(plan, KVPOOL_TEXT, buffer, sizeof(buffer), &needed));
    CHECK(needed == strlen(buffer) + 1);

    OK(kvpool_config_destroy(config));
    kvpool_cache_t cache;
    OK(kvpool_cache_open(plan, &cache));
    OK(kvpool_plan_destroy(plan));
    /* The cache needs neither. */
    check_empty(cache);
    OK(kvpool_cache_close(cache));
}

/* Queries are rotated as K is when it is appended, bit for bit. */
static void rotating(void) {
    const char* const overrides[] = {"rope.theta=10000", "rope.window_theta=100"};
    const kvpool_plan_t plan = check_plan(overrides, 2);
    kvpool_cache_t cache;
    OK(kvpool_cache_open(plan, &cache));
    kvpool_plan_info_t info;
    OK(kvpool_plan_get_info(plan, KVPOOL_OUT(info)));
    CHECK(info.rope == 1);
    enum { TOKENS = 8, ROW = KV_HEADS * HEAD_DIM, LEN = TOKENS * ROW };
    float x[LEN], rotated[LEN], exported[LEN], zeros[ROW] = {0};
    uint32_t prompt[TOKENS], positions[TOKENS + 1] = {0};
    for (uint32_t i = 0; i < LEN; ++i) x[i] = (float)(i % 29) - 14.0f;
    for (uint32_t i = 0; i < TOKENS; ++i) prompt[i] = positions[i] = i;
    const kvpool_seq_t sequence = check_begin(cache, prompt, TOKENS);
    const kvpool_step_item_t item = {sequence, TOKENS, 0};
    kvpool_step_t step;
    OK(kvpool_cache_reserve(cache, &item, 1, NULL, 0, &step));
    const kvpool_tensor_t kv = check_tensor(x, LEN);
    for (uint32_t layer = 0; layer < LAYERS; ++layer) OK(kvpool_step_append(cache, step, layer, &kv, &kv));
    OK(kvpool_step_commit(cache, step));
    for (uint32_t layer = 0; layer < LAYERS; ++layer) {
        OK(kvpool_cache_export(cache, sequence, layer, KVPOOL_K, 0, TOKENS, exported, LEN));
        OK(kvpool_plan_rotate(plan, layer, positions, TOKENS, KV_HEADS, x, rotated, LEN));
        CHECK(memcmp(rotated, exported, sizeof(rotated)) == 0 && memcmp(rotated, x, sizeof(x)) != 0);
    }
    float* const in_place = exported;
    memcpy(in_place, x, sizeof(x));
    OK(kvpool_plan_rotate(plan, LAYERS - 1, positions, TOKENS, KV_HEADS, in_place, in_place, LEN));
    CHECK(memcmp(rotated, in_place, sizeof(rotated)) == 0);
    OK(kvpool_plan_rotate(plan, 0, NULL, 0, KV_HEADS, NULL, NULL, 0));
    EXPECT(KVPOOL_NULL_POINTER, kvpool_plan_rotate(plan, 0, NULL, 1, KV_HEADS, x, rotated, ROW));
    EXPECT(KVPOOL_NULL_POINTER, kvpool_plan_rotate(plan, 0, positions, 1, KV_HEADS, NULL, rotated, ROW));
    EXPECT(KVPOOL_NULL_POINTER, kvpool_plan_rotate(plan, 0, positions, 1, KV_HEADS, x, NULL, ROW));
    EXPECT(KVPOOL_OVERLAP, kvpool_plan_rotate(plan, 0, positions, 1, KV_HEADS, x, x + 1, ROW));
    EXPECT(KVPOOL_OVERLAP,
           kvpool_plan_rotate(plan, 0, (const uint32_t*)(void*)zeros, 1, KV_HEADS, zeros, zeros, ROW));
    EXPECT(KVPOOL_WRONG_SHAPE, kvpool_plan_rotate(plan, 0, positions, TOKENS, KV_HEADS, x, rotated, LEN - 1));
    EXPECT(KVPOOL_WRONG_SHAPE, kvpool_plan_rotate(plan, 0, positions, 1, UINT32_MAX, x, rotated, LEN));
    EXPECT(KVPOOL_NO_SUCH_LAYER,
           kvpool_plan_rotate(plan, LAYERS, positions, TOKENS, KV_HEADS, x, rotated, LEN));
    positions[0] = 64;
    EXPECT(KVPOOL_TOO_LONG, kvpool_plan_rotate(plan, 0, positions, TOKENS, KV_HEADS, x, rotated, LEN));
    CHECK(memcmp(rotated, in_place, sizeof(rotated)) == 0);
    OK(kvpool_cache_close(cache));
    OK(kvpool_plan_destroy(plan));
    const kvpool_plan_t plain = check_plan(NULL, 0);
    EXPECT(KVPOOL_BAD_ARGUMENT, kvpool_plan_rotate(plain, 0, positions, 1, KV_HEADS, x, rotated, ROW));
    OK(kvpool_plan_destroy(plain));
}

static void looking(kvpool_cache_t cache) {
    kvpool_plan_info_t info;
    OK(kvpool_cache_get_plan_info(cache, KVPOOL_OUT(info)));
    void* base = NULL;
    uint64_t bytes = 0;
    OK(kvpool_cache_get_pool(cache, &base, &bytes));
    CHECK(base != NULL && bytes == info.pool_bytes);
    kvpool_layer_t layer;
    OK(kvpool_cache_get_layer(cache, 0, KVPOOL_OUT(layer)));
    CHECK(layer.format == KVPOOL_FORMAT_F32 && (char*)layer.k == (char*)base + layer.k_offset);
    kvpool_group_info_t group;
    OK(kvpool_cache_get_group(cache, layer.group, KVPOOL_OUT(group)));
    CHECK(group.addressing == KVPOOL_RING && group.ring_tokens >= 16);
    char text[16384];
    size_t needed = 0;
    OK(kvpool_cache_text(cache, KVPOOL_JSON, text, sizeof(text), &needed));
    CHECK(needed == strlen(text) + 1 && text[0] == '{');
    kvpool_device_info_t device;
    OK(kvpool_cache_get_device(cache, KVPOOL_OUT(device)));
    CHECK(device.kind == KVPOOL_CPU && device.kind != KVPOOL_CUDA && device.threads == 1);
    CHECK(device.pool_bytes == info.pool_bytes && strlen(device.kernel) > 0);
    EXPECT(KVPOOL_WRONG_MEMORY, kvpool_cache_set_stream(cache, NULL));
    OK(kvpool_cache_synchronize(cache));
    unsigned char first[8];
    OK(kvpool_cache_read(cache, 0, first, sizeof(first)));
    CHECK(memcmp(first, base, sizeof(first)) == 0);
    EXPECT(KVPOOL_BAD_ARGUMENT, kvpool_cache_read(cache, bytes, first, sizeof(first)));
}

/* As dlpack.h has it. */
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
    void (*deleter)(struct DLManagedTensor*);
};

static void dlpack(kvpool_cache_t cache) {
    struct DLManagedTensor* view = NULL;
    kvpool_layer_t layer;
    OK(kvpool_cache_get_layer(cache, 1, KVPOOL_OUT(layer)));
    OK(kvpool_cache_dlpack(cache, 1, KVPOOL_V, &view));
    CHECK((char*)view->dl_tensor.data + view->dl_tensor.byte_offset == (char*)layer.v);
    CHECK(view->dl_tensor.ndim == 4 && view->dl_tensor.dtype.bits == 32);
    CHECK(view->dl_tensor.shape[1] == KV_HEADS && view->dl_tensor.shape[3] == HEAD_DIM);
    CHECK((uint64_t)view->dl_tensor.strides[0] * 4 == layer.unit_stride);
    view->deleter(view);
    EXPECT(KVPOOL_BAD_ARGUMENT, kvpool_cache_dlpack(cache, 1, KVPOOL_V_SCALES, &view));
    OK(kvpool_cache_dlpack(cache, 0, KVPOOL_K, &view));
    view->deleter(view);
}

static void steps(kvpool_cache_t cache) {
    const uint32_t prompt[11] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    kvpool_begin_options_t options = KVPOOL_BEGIN_OPTIONS_INIT;
    kvpool_begun_t begun;
    options.key = 5;
    options.has_key = 1;
    options.max_len = 40;
    OK(kvpool_cache_begin(cache, prompt, 11, &options, KVPOOL_OUT(begun)));
    CHECK(begun.cached_len == 0 && begun.limit == 40);
    kvpool_step_item_t item = {begun.sequence, 8, 0};
    kvpool_step_t step;
    OK(kvpool_cache_reserve(cache, &item, 1, prompt, 8, &step));

    kvpool_step_view_t view;
    OK(kvpool_step_get_view(cache, step, KVPOOL_OUT(view)));
    CHECK(view.num_tokens == 8 && view.num_seqs == 1 && view.positions[7] == 7 && view.seq_lens[0] == 8);
    CHECK(view.seqs[0].rows == 8 && view.seqs[0].first_position == 0);
    kvpool_layer_t ring, paged;
    OK(kvpool_cache_get_layer(cache, 0, KVPOOL_OUT(ring)));
    OK(kvpool_cache_get_layer(cache, 1, KVPOOL_OUT(paged)));
    kvpool_step_group_t group;
    OK(kvpool_step_get_group(cache, step, ring.group, KVPOOL_OUT(group)));
    CHECK(group.block_table == NULL);
    OK(kvpool_step_get_group(cache, step, paged.group, KVPOOL_OUT(group)));
    const uint32_t* row = group.block_table + view.seqs[0].slot * group.block_table_row;
    CHECK(row[0] != KVPOOL_NO_BLOCK && group.token_slots[3] == row[0] * 8 + 3);
    kvpool_step_csr_t csr;
    OK(kvpool_step_get_csr(cache, step, paged.group, KVPOOL_OUT(csr)));
    CHECK(csr.kv_indptr[1] == 1 && csr.kv_indices[0] == row[0] && csr.kv_last_block_len[0] == 8);
    EXPECT(KVPOOL_NO_SUCH_GROUP, kvpool_step_get_csr(cache, step, ring.group, KVPOOL_OUT(csr)));
    kvpool_step_device_t device;
    EXPECT(KVPOOL_WRONG_MEMORY,
           kvpool_step_get_device(cache, step, paged.group, KVPOOL_TABLES_CSR | KVPOOL_TABLES_DENSE,
                                  KVPOOL_OUT(device)));
    EXPECT(KVPOOL_WRONG_MEMORY, kvpool_step_prepare(cache, step));

    float q[8 * Q_HEADS * HEAD_DIM], out[8 * Q_HEADS * HEAD_DIM], lse[8 * Q_HEADS];
    for (size_t i = 0; i < sizeof(q) / sizeof(q[0]); ++i) q[i] = 0.1f;
    const kvpool_tensor_t q_tensor = check_tensor(q, 8 * Q_HEADS * HEAD_DIM);
    const kvpool_tensor_t out_tensor = check_tensor(out, 8 * Q_HEADS * HEAD_DIM);
    kvpool_attend_options_t attend = KVPOOL_ATTEND_OPTIONS_INIT;
    attend.lse = check_tensor(lse, 8 * Q_HEADS);
    EXPECT(KVPOOL_NOT_APPENDED, kvpool_step_attend(cache, step, 1, &q_tensor, &out_tensor, NULL));
    float kv[8 * KV_HEADS * HEAD_DIM];
    for (size_t i = 0; i < sizeof(kv) / sizeof(kv[0]); ++i) kv[i] = 2.0f;
    const kvpool_tensor_t kv_tensor = check_tensor(kv, 8 * KV_HEADS * HEAD_DIM);
    OK(kvpool_step_append(cache, step, 1, &kv_tensor, &kv_tensor));
    EXPECT(KVPOOL_ALREADY_APPENDED, kvpool_step_append(cache, step, 1, &kv_tensor, &kv_tensor));
    OK(kvpool_step_attend(cache, step, 1, &q_tensor, &out_tensor, &attend));
    CHECK(out[0] > 1.999f && out[0] < 2.001f && lse[7] > lse[0]);
    /* A caller's own kernel writes layer 0: here with zeros. */
    for (uint32_t head = 0; head < KV_HEADS; ++head) {
        OK(kvpool_step_get_group(cache, step, ring.group, KVPOOL_OUT(group)));
        for (uint32_t token = 0; token < 8; ++token) {
            const uint64_t slot = group.token_slots[token];
            const uint64_t at = slot / ring.unit_tokens * ring.unit_stride + head * ring.head_stride +
                                slot % ring.unit_tokens * ring.token_stride;
            memset((char*)ring.k + at, 0, HEAD_DIM * sizeof(float));
            memset((char*)ring.v + at, 0, HEAD_DIM * sizeof(float));
        }
    }
    OK(kvpool_step_mark_appended(cache, step, 0));
    OK(kvpool_step_attend(cache, step, 0, &q_tensor, &out_tensor, NULL));
    CHECK(out[0] == 0.0f);
    OK(kvpool_step_commit(cache, step));

    item.num_tokens = 3;
    OK(kvpool_cache_reserve(cache, &item, 1, prompt + 8, 3, &step));
    EXPECT(KVPOOL_STEP_OPEN, kvpool_cache_release(cache, begun.sequence));
    OK(kvpool_step_mark_all_appended(cache, step));
    OK(kvpool_step_cancel(cache, step));
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_step_commit(cache, step));
    uint32_t cancelled = 77;
    OK(kvpool_cache_cancel_step(cache, &cancelled));
    CHECK(cancelled == 0);
    OK(kvpool_cache_reserve(cache, &item, 1, prompt + 8, 3, &step));
    OK(kvpool_cache_cancel_step(cache, NULL));
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_step_cancel(cache, step));

    /* What is given back while a step is open goes when that is over, and a step before all others. */
    kvpool_stats_t stats;
    kvpool_begun_t brief;
    OK(kvpool_cache_begin(cache, prompt, 3, NULL, KVPOOL_OUT(brief)));
    OK(kvpool_cache_reserve(cache, &item, 1, prompt + 8, 3, &step));
    OK(kvpool_cache_release_later(cache, brief.sequence));
    OK(kvpool_cache_stats(cache, KVPOOL_OUT(stats)));
    CHECK(stats.seqs == 2);
    OK(kvpool_step_cancel_later(cache, step));
    OK(kvpool_cache_stats(cache, KVPOOL_OUT(stats)));
    CHECK(stats.seqs == 1);
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_step_commit(cache, step));
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_cache_release(cache, brief.sequence));
    /* What is gone already needs nothing. */
    OK(kvpool_step_cancel_later(cache, step));
    OK(kvpool_cache_release_later(cache, brief.sequence));

    /* Which entry was refused. */
    kvpool_error_t refused;
    const kvpool_step_item_t twice[] = {item, item}, forged[] = {item, {{{1, 2}}, 1, 0}};
    EXPECT(KVPOOL_BAD_STEP, kvpool_cache_reserve(cache, twice, 2, NULL, 0, &step));
    OK(kvpool_last_error(KVPOOL_OUT(refused)));
    CHECK(refused.index == 1);
    EXPECT(KVPOOL_BAD_HANDLE, kvpool_cache_reserve(cache, forged, 2, NULL, 0, &step));
    OK(kvpool_last_error(KVPOOL_OUT(refused)));
    CHECK(refused.index == 1);
    EXPECT(KVPOOL_WRONG_SHAPE, kvpool_cache_reserve(cache, &item, 1, prompt, 1, &step));
    OK(kvpool_last_error(KVPOOL_OUT(refused)));
    CHECK(refused.index == KVPOOL_NO_NUMBER);

    kvpool_seq_info_t info;
    OK(kvpool_seq_get_info(cache, begun.sequence, KVPOOL_OUT(info)));
    CHECK(info.len == 8 && info.limit == 40);
    float exported[KV_HEADS * HEAD_DIM];
    OK(kvpool_cache_export(cache, begun.sequence, 1, KVPOOL_K, 7, 8, exported, KV_HEADS * HEAD_DIM));
    CHECK(exported[5] == 2.0f);
    OK(kvpool_cache_truncate(cache, begun.sequence, 6));
    kvpool_seq_t forked;
    OK(kvpool_cache_fork(cache, begun.sequence, &forked));
    kvpool_block_t block;
    OK(kvpool_cache_block_of(cache, forked, paged.group, 0, &block));
    uint32_t refs = 0;
    OK(kvpool_cache_block_refs(cache, block, &refs));
    CHECK(refs == 2);
    OK(kvpool_cache_release(cache, begun.sequence));
    OK(kvpool_cache_release(cache, forked));
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_cache_block_refs(cache, block, &refs));
    check_empty(cache);
}

static void admission(kvpool_cache_t cache) {
    const uint32_t prompt[3] = {1, 2, 3};
    kvpool_estimate_t estimate;
    OK(kvpool_cache_check_admission(cache, prompt, 3, NULL, KVPOOL_OUT(estimate)));
    CHECK(estimate.cached_len == 0 && estimate.limit == 64);
    kvpool_reservation_t reservations[3];
    for (int i = 0; i < 3; ++i) {
        OK(kvpool_cache_can_admit(cache, prompt, 3, NULL, &reservations[i], KVPOOL_OUT(estimate)));
    }
    uint32_t held = 0;
    OK(kvpool_cache_reservations(cache, &held));
    CHECK(held == 3);
    kvpool_begun_t begun;
    OK(kvpool_cache_begin_reserved(cache, reservations[0], KVPOOL_OUT(begun)));
    OK(kvpool_cache_cancel_reservation(cache, reservations[1]));
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_cache_cancel_reservation(cache, reservations[1]));
    OK(kvpool_cache_cancel_reservation_later(cache, reservations[1]));
    OK(kvpool_cache_can_admit(cache, prompt, 3, NULL, &reservations[1], KVPOOL_OUT(estimate)));
    OK(kvpool_cache_cancel_reservation_later(cache, reservations[1]));
    OK(kvpool_cache_reservations(cache, &held));
    CHECK(held == 1);
    EXPECT(KVPOOL_RESERVATIONS_HELD, kvpool_cache_set_epoch(cache, 1));
    OK(kvpool_cache_cancel_reservations(cache, &held));
    CHECK(held == 1);
    OK(kvpool_cache_release(cache, begun.sequence));

    const kvpool_begin_item_t items[2] = {{prompt, 3, NULL}, {prompt, 2, NULL}};
    kvpool_begun_t batch[2];
    OK(kvpool_cache_begin_batch(cache, items, 2, batch, sizeof(batch[0])));
    EXPECT(KVPOOL_SEQUENCES_ALIVE, kvpool_cache_reset(cache));
    OK(kvpool_cache_release(cache, batch[0].sequence));
    OK(kvpool_cache_release(cache, batch[1].sequence));
    kvpool_preempted_t preempted;
    EXPECT(KVPOOL_NOBODY, kvpool_cache_preempt_youngest(cache, KVPOOL_OUT(preempted)));
    OK(kvpool_cache_reset(cache));
    check_empty(cache);
}

struct heard {
    uint64_t stored, others, tokens;
};

static void hear(void* context, const kvpool_event_t* event) {
    struct heard* heard = context;
    if (event->kind == KVPOOL_STORED) {
        ++heard->stored;
        heard->tokens += event->num_tokens;
    } else {
        ++heard->others;
    }
}

static void prefixes(kvpool_cache_t cache) {
    uint32_t prompt[20];
    for (uint32_t i = 0; i < 20; ++i) prompt[i] = 100 + i;
    const kvpool_retention_t retention = {0, KVPOOL_TO_END, 90, 0, KVPOOL_FOREVER};
    kvpool_begin_options_t options = KVPOOL_BEGIN_OPTIONS_INIT;
    options.retentions = &retention;
    options.num_retentions = 1;
    options.name_space.salt.kind = KVPOOL_KEY_IS_BYTES;
    options.name_space.salt.num_bytes = 6;
    options.name_space.salt.bytes = (const uint8_t*)"tenant";
    options.name_space.adapter.kind = KVPOOL_KEY_IS_NUMBER;
    options.name_space.adapter.number = 3;
    CHECK(options.name_space.model.kind == KVPOOL_KEY_ABSENT && KVPOOL_KEY_BYTES >= 32);
    CHECK(KVPOOL_MAX_RETENTIONS >= 1);
    struct heard heard = {0, 0, 0};
    /* What came before. */
    OK(kvpool_cache_poll_events(cache, hear, &heard, NULL, NULL));
    memset(&heard, 0, sizeof(heard));
    kvpool_begun_t begun;
    OK(kvpool_cache_begin(cache, prompt, 20, &options, KVPOOL_OUT(begun)));
    for (uint32_t from = 0; from < 20; from += 5) check_step(cache, begun.sequence, prompt + from, 5);
    kvpool_pin_t pin;
    OK(kvpool_cache_pin(cache, begun.sequence, &pin));
    OK(kvpool_cache_set_retention(cache, begun.sequence, &retention, 1));
    OK(kvpool_cache_set_time_ms(cache, 1000));
    OK(kvpool_cache_release(cache, begun.sequence));
    kvpool_probe_t probe;
    OK(kvpool_cache_probe(cache, prompt, 20, &options.name_space, KVPOOL_OUT(probe)));
    CHECK(probe.full_blocks == 2 && probe.cached_len >= 16);
    OK(kvpool_cache_probe(cache, prompt, 20, NULL, KVPOOL_OUT(probe)));
    CHECK(probe.cached_len == 0);
    uint32_t numbers[2];
    OK(kvpool_cache_namespace_numbers(cache, &options.name_space, numbers));
    CHECK(numbers[0] != 0);
    OK(kvpool_cache_unpin(cache, pin));
    OK(kvpool_cache_unpin_later(cache, pin));

    uint64_t delivered = 0, lost = 77;
    OK(kvpool_cache_poll_events(cache, hear, &heard, &delivered, &lost));
    CHECK(heard.stored == 2 && heard.tokens == 16 && delivered == heard.stored + heard.others && lost == 0);
    OK(kvpool_cache_resync_events(cache, hear, &heard, &delivered));
    CHECK(heard.stored == 4);
    OK(kvpool_cache_clear_cached(cache));
    uint64_t evicted[KVPOOL_PRIORITIES];
    OK(kvpool_cache_evictions(cache, evicted));
    /* What the caller clears is not counted: nothing was pushed out yet. */
    for (int i = 0; i < KVPOOL_PRIORITIES; ++i) CHECK(evicted[i] == 0);
    OK(kvpool_cache_set_epoch(cache, 2));
    kvpool_group_stats_t group;
    OK(kvpool_cache_group_stats(cache, 1, KVPOOL_OUT(group)));
    CHECK(group.blocks_cached == 0 && group.peak_cached >= 2 && group.reuse != KVPOOL_REUSE_NONE);
    CHECK(check_stats(cache).prefix_queries == 1 && check_digest(cache) != 0);
    check_empty(cache);
}

/* A file in the folder for temporary files, of this process alone. */
static const char* temporary(const char* name) {
    static char path[512];
    const char* folder = getenv("TMPDIR");
    snprintf(path, sizeof(path), "%s/kvpool-%s-%p", folder != NULL ? folder : "/tmp", name, (void*)path);
    return path;
}

static void saves(kvpool_cache_t cache) {
    uint32_t prompt[20];
    for (uint32_t i = 0; i < 20; ++i) prompt[i] = 700 + i;
    kvpool_begun_t begun, again;
    OK(kvpool_cache_begin(cache, prompt, 20, NULL, KVPOOL_OUT(begun)));
    for (uint32_t from = 0; from < 20; from += 5) check_step(cache, begun.sequence, prompt + from, 5);
    const char* path = temporary("save");
    kvpool_save_options_t save = KVPOOL_SAVE_OPTIONS_INIT;
    kvpool_restore_options_t restore = KVPOOL_RESTORE_OPTIONS_INIT;
    save.model.kind = restore.model.kind = KVPOOL_KEY_IS_NUMBER;
    save.model.number = restore.model.number = 12;
    kvpool_saved_t saved;
    OK(kvpool_cache_save_sequence(cache, begun.sequence, path, &save, KVPOOL_OUT(saved)));
    CHECK(saved.size == sizeof(saved) && saved.tokens == 20 && saved.blocks == 3 && saved.bytes > 20);
    EXPECT(KVPOOL_SAVE_MISMATCH, kvpool_cache_restore_sequence(cache, path, NULL, KVPOOL_OUT(again)));
    restore.key = 6;
    restore.has_key = 1;
    restore.max_len = 30;
    OK(kvpool_cache_restore_sequence(cache, path, &restore, KVPOOL_OUT(again)));
    CHECK(again.cached_len == 20 && again.limit == 30);
    float old[KV_HEADS * HEAD_DIM], now[KV_HEADS * HEAD_DIM];
    OK(kvpool_cache_export(cache, begun.sequence, 0, KVPOOL_V, 19, 20, old, KV_HEADS * HEAD_DIM));
    OK(kvpool_cache_export(cache, again.sequence, 0, KVPOOL_V, 19, 20, now, KV_HEADS * HEAD_DIM));
    CHECK(memcmp(old, now, sizeof(old)) == 0);
    EXPECT(KVPOOL_DUPLICATE_KEY, kvpool_cache_restore_sequence(cache, path, &restore, KVPOOL_OUT(again)));
    OK(kvpool_cache_release(cache, again.sequence));
    OK(kvpool_cache_release(cache, begun.sequence));

    save.unsalted_only = 1;
    kvpool_begin_options_t private_to_one = KVPOOL_BEGIN_OPTIONS_INIT;
    private_to_one.name_space.salt.kind = KVPOOL_KEY_IS_NUMBER;
    OK(kvpool_cache_begin(cache, prompt, 20, &private_to_one, KVPOOL_OUT(again)));
    EXPECT(KVPOOL_BAD_ARGUMENT,
           kvpool_cache_save_sequence(cache, again.sequence, path, &save, KVPOOL_OUT(saved)));
    OK(kvpool_cache_release(cache, again.sequence));
    OK(kvpool_cache_save_prefixes(cache, path, &save, KVPOOL_OUT(saved)));
    CHECK(saved.tokens >= 16);
    OK(kvpool_cache_clear_cached(cache));
    kvpool_restored_t restored;
    OK(kvpool_cache_restore_prefixes(cache, path, &restore, KVPOOL_OUT(restored)));
    CHECK(restored.size == sizeof(restored) && restored.file_tokens == saved.tokens);
    CHECK(restored.blocks >= 2 && restored.blocks_present == 0 && restored.dropped_tokens == 0);
    kvpool_probe_t probe;
    OK(kvpool_cache_probe(cache, prompt, 20, NULL, KVPOOL_OUT(probe)));
    CHECK(probe.cached_len >= 16 && restored.slots >= 1);
    EXPECT(KVPOOL_SAVE_IO, kvpool_cache_save_prefixes(cache, "/no/such/folder/x", NULL, KVPOOL_OUT(saved)));
    EXPECT(KVPOOL_SAVE_IO,
           kvpool_cache_restore_prefixes(cache, "/no/such/file", NULL, KVPOOL_OUT(restored)));
    FILE* file = fopen(path, "r+b");
    CHECK(file != NULL && fseek(file, -20, SEEK_END) == 0 && fputc(77, file) == 77 && fclose(file) == 0);
    EXPECT(KVPOOL_SAVE_DAMAGED,
           kvpool_cache_restore_prefixes(cache, path, &restore, KVPOOL_OUT(restored)));
    CHECK(KVPOOL_SAVE_UNDER_WAY != KVPOOL_SAVE_IO && remove(path) == 0);
    check_empty(cache);
}

/* Constants that no path above takes. */
static void constants(void) {
    const int all[] = {KVPOOL_FORMAT_F16,
                       KVPOOL_FORMAT_BF16,
                       KVPOOL_FORMAT_INT8,
                       KVPOOL_SCALE_PER_TOKEN_HEAD,
                       KVPOOL_SCALE_PER_TENSOR,
                       KVPOOL_SCALE_PER_GROUP,
                       KVPOOL_MODE_CONTIGUOUS,
                       KVPOOL_MODE_PAGED,
                       KVPOOL_MAX_UTILIZATION,
                       KVPOOL_STATIC_BATCH,
                       KVPOOL_SLOT,
                       KVPOOL_REUSE_ATTACHED,
                       KVPOOL_K_SCALES,
                       KVPOOL_F16,
                       KVPOOL_BF16,
                       KVPOOL_DEVICE_MEMORY,
                       KVPOOL_ATTACHED,
                       KVPOOL_REMOVED,
                       KVPOOL_CLEARED};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); ++i) CHECK(all[i] >= 0 && all[i] < 4);
}

int main(void) {
    versions_and_errors();
    config_and_plan();
    rotating();
    constants();
    const kvpool_cache_t cache = check_open(NULL, 0);
    looking(cache);
    dlpack(cache);
    steps(cache);
    admission(cache);
    prefixes(cache);
    saves(cache);
    OK(kvpool_cache_close(cache));
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_cache_check(cache));
    printf("ok\n");
    return 0;
}
