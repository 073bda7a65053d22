/* Edge case 57: NULL for every pointer in turn, struct sizes that are wrong, misaligned pointers, objects
 * after their end, two pools in one process, and a thousand of them one after the other.
 *
 *     pointers [OPENINGS]     how many caches are opened one after the other; growth is looked at from 1000
 * on */
#include "check.h"

static kvpool_cache_t cache;
static kvpool_config_t config;
static kvpool_plan_t plan;
static kvpool_seq_t seq;
static kvpool_step_t step;
static kvpool_reservation_t reservation;
static kvpool_block_t block;
static const uint32_t PROMPT[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};

#define NULL_POINTER(call) EXPECT(KVPOOL_NULL_POINTER, call)

static void null_without_a_cache(void) {
    char text[8];
    size_t needed;
    uint32_t number;
    /* It does not put its own failure in the place of the one that is asked for. */
    CHECK(kvpool_last_error(NULL, sizeof(kvpool_error_t)) == KVPOOL_NULL_POINTER);
    NULL_POINTER(kvpool_config_load(NULL, NULL, 0, &config));
    NULL_POINTER(kvpool_config_load("x", NULL, 1, &config));
    NULL_POINTER(kvpool_config_load("x", NULL, 0, NULL));
    const char* const overrides[] = {NULL};
    NULL_POINTER(kvpool_config_load("x", overrides, 1, &config));
    NULL_POINTER(kvpool_config_parse(NULL, 1, "x", NULL, 0, &config));
    NULL_POINTER(kvpool_config_parse("x", 1, NULL, NULL, 0, &config));
    NULL_POINTER(kvpool_config_parse("x", 1, "x", NULL, 1, &config));
    NULL_POINTER(kvpool_config_parse("x", 1, "x", overrides, 1, &config));
    NULL_POINTER(kvpool_config_parse("x", 1, "x", NULL, 0, NULL));
    NULL_POINTER(kvpool_config_text(config, KVPOOL_TEXT, NULL, 8, &needed));
    NULL_POINTER(kvpool_config_text(config, KVPOOL_TEXT, NULL, 0, NULL));
    NULL_POINTER(kvpool_plan_new(config, NULL));
    NULL_POINTER(kvpool_plan_get_info(plan, NULL, sizeof(kvpool_plan_info_t)));
    NULL_POINTER(kvpool_plan_get_group(plan, 0, NULL, sizeof(kvpool_group_info_t)));
    NULL_POINTER(kvpool_plan_get_layer(plan, 0, NULL, sizeof(kvpool_layer_t)));
    NULL_POINTER(kvpool_plan_text(plan, KVPOOL_JSON, NULL, 8, &needed));
    NULL_POINTER(kvpool_plan_blocks_for(plan, 0, 1, NULL));
    NULL_POINTER(kvpool_cache_open(plan, NULL));
    /* Where NULL is right. */
    OK(kvpool_config_text(config, KVPOOL_TEXT, NULL, 0, &needed));
    EXPECT(KVPOOL_BUFFER_TOO_SMALL, kvpool_config_text(config, KVPOOL_TEXT, text, sizeof(text), NULL));
    EXPECT(KVPOOL_BAD_ARGUMENT, kvpool_config_text(config, 77, text, sizeof(text), NULL));
    EXPECT(KVPOOL_BAD_ARGUMENT, kvpool_config_parse("\xFF", 1, "x", NULL, 0, &config));
    EXPECT(KVPOOL_NO_SUCH_GROUP, kvpool_plan_blocks_for(plan, 77, 1, &number));
}

static void null_looking(void) {
    void* base;
    uint64_t bytes;
    size_t needed;
    NULL_POINTER(kvpool_cache_get_plan_info(cache, NULL, sizeof(kvpool_plan_info_t)));
    NULL_POINTER(kvpool_cache_get_group(cache, 0, NULL, sizeof(kvpool_group_info_t)));
    NULL_POINTER(kvpool_cache_get_layer(cache, 0, NULL, sizeof(kvpool_layer_t)));
    NULL_POINTER(kvpool_cache_text(cache, KVPOOL_TEXT, NULL, 8, &needed));
    NULL_POINTER(kvpool_cache_get_device(cache, NULL, sizeof(kvpool_device_info_t)));
    NULL_POINTER(kvpool_cache_get_pool(cache, NULL, &bytes));
    NULL_POINTER(kvpool_cache_get_pool(cache, &base, NULL));
    kvpool_saved_t saved;
    kvpool_restored_t restored;
    kvpool_begun_t begun;
    NULL_POINTER(kvpool_cache_save_prefixes(cache, NULL, NULL, KVPOOL_OUT(saved)));
    NULL_POINTER(kvpool_cache_save_prefixes(cache, "x", NULL, NULL, sizeof(saved)));
    NULL_POINTER(kvpool_cache_restore_prefixes(cache, NULL, NULL, KVPOOL_OUT(restored)));
    NULL_POINTER(kvpool_cache_restore_prefixes(cache, "x", NULL, NULL, sizeof(restored)));
    NULL_POINTER(kvpool_cache_save_sequence(cache, seq, NULL, NULL, KVPOOL_OUT(saved)));
    NULL_POINTER(kvpool_cache_save_sequence(cache, seq, "x", NULL, NULL, sizeof(saved)));
    NULL_POINTER(kvpool_cache_restore_sequence(cache, NULL, NULL, KVPOOL_OUT(begun)));
    NULL_POINTER(kvpool_cache_restore_sequence(cache, "x", NULL, NULL, sizeof(begun)));
    NULL_POINTER(kvpool_cache_dlpack(cache, 0, KVPOOL_K, NULL));
    NULL_POINTER(kvpool_cache_stats(cache, NULL, sizeof(kvpool_stats_t)));
    NULL_POINTER(kvpool_cache_group_stats(cache, 0, NULL, sizeof(kvpool_group_stats_t)));
    NULL_POINTER(kvpool_cache_evictions(cache, NULL));
    NULL_POINTER(kvpool_cache_digest(cache, NULL));
    NULL_POINTER(kvpool_cache_export(cache, seq, 0, KVPOOL_K, 0, 1, NULL, KV_HEADS * HEAD_DIM));
    NULL_POINTER(kvpool_cache_read(cache, 0, NULL, 1));
    OK(kvpool_cache_get_pool(cache, &base, &bytes));
    EXPECT(KVPOOL_OVERLAP, kvpool_cache_read(cache, 0, (char*)base + bytes - 1, 1));
    EXPECT(KVPOOL_OVERLAP,
           kvpool_cache_export(cache, seq, 0, KVPOOL_K, 0, 1, (float*)base, KV_HEADS * HEAD_DIM));
    NULL_POINTER(kvpool_cache_block_of(cache, seq, 1, 0, NULL));
    NULL_POINTER(kvpool_cache_block_refs(cache, block, NULL));
    NULL_POINTER(kvpool_cache_reservations(cache, NULL));
    NULL_POINTER(kvpool_seq_get_info(cache, seq, NULL, sizeof(kvpool_seq_info_t)));
    OK(kvpool_cache_read(cache, 0, NULL, 0));
}

static void null_sequences(void) {
    kvpool_begun_t begun;
    kvpool_estimate_t estimate;
    kvpool_probe_t probe;
    kvpool_reservation_t place;
    uint32_t numbers[2];
    kvpool_begin_options_t options = KVPOOL_BEGIN_OPTIONS_INIT;
    NULL_POINTER(kvpool_cache_begin(cache, NULL, 1, NULL, KVPOOL_OUT(begun)));
    NULL_POINTER(kvpool_cache_begin(cache, PROMPT, 1, NULL, NULL, sizeof(begun)));
    options.num_retentions = 1;
    NULL_POINTER(kvpool_cache_begin(cache, PROMPT, 1, &options, KVPOOL_OUT(begun)));
    /* What a later version may give a meaning. */
    const kvpool_retention_t retention = {0, 1, 50, 1, KVPOOL_FOREVER};
    options.retentions = &retention;
    EXPECT(KVPOOL_BAD_ARGUMENT, kvpool_cache_begin(cache, PROMPT, 1, &options, KVPOOL_OUT(begun)));
    options.num_retentions = 0;
    options.name_space.reserved = 1;
    EXPECT(KVPOOL_BAD_ARGUMENT, kvpool_cache_begin(cache, PROMPT, 1, &options, KVPOOL_OUT(begun)));
    options.name_space.reserved = 0;
    const kvpool_step_item_t odd_item = {seq, 1, 1};
    EXPECT(KVPOOL_BAD_ARGUMENT, kvpool_cache_reserve(cache, &odd_item, 1, NULL, 0, &step));
    options.name_space.model.kind = KVPOOL_KEY_IS_BYTES;
    options.name_space.model.num_bytes = 1;
    NULL_POINTER(kvpool_cache_begin(cache, PROMPT, 1, &options, KVPOOL_OUT(begun)));
    NULL_POINTER(kvpool_cache_namespace_numbers(cache, &options.name_space, numbers));
    options.name_space.model.num_bytes = KVPOOL_KEY_BYTES + 1;
    EXPECT(KVPOOL_KEY_TOO_LONG, kvpool_cache_begin(cache, PROMPT, 1, &options, KVPOOL_OUT(begun)));
    options.name_space.model.kind = 77;
    EXPECT(KVPOOL_BAD_ARGUMENT, kvpool_cache_begin(cache, PROMPT, 1, &options, KVPOOL_OUT(begun)));
    options.name_space.model.kind = KVPOOL_KEY_ABSENT;
    const kvpool_begin_item_t item = {NULL, 1, NULL};
    const kvpool_begin_item_t good = {PROMPT, 1, &options};
    NULL_POINTER(kvpool_cache_begin_batch(cache, NULL, 1, KVPOOL_OUT(begun)));
    NULL_POINTER(kvpool_cache_begin_batch(cache, &item, 1, KVPOOL_OUT(begun)));
    NULL_POINTER(kvpool_cache_begin_batch(cache, &good, 1, NULL, sizeof(begun)));
    NULL_POINTER(kvpool_cache_fork(cache, seq, NULL));
    NULL_POINTER(kvpool_cache_preempt_youngest(cache, NULL, sizeof(kvpool_preempted_t)));
    NULL_POINTER(kvpool_cache_check_admission(cache, NULL, 1, NULL, KVPOOL_OUT(estimate)));
    NULL_POINTER(kvpool_cache_check_admission(cache, PROMPT, 1, NULL, NULL, sizeof(estimate)));
    NULL_POINTER(kvpool_cache_can_admit(cache, NULL, 1, NULL, &place, KVPOOL_OUT(estimate)));
    NULL_POINTER(kvpool_cache_can_admit(cache, PROMPT, 1, NULL, NULL, KVPOOL_OUT(estimate)));
    NULL_POINTER(kvpool_cache_can_admit(cache, PROMPT, 1, NULL, &place, NULL, sizeof(estimate)));
    NULL_POINTER(kvpool_cache_begin_reserved(cache, reservation, NULL, sizeof(begun)));
    NULL_POINTER(kvpool_cache_probe(cache, NULL, 1, NULL, KVPOOL_OUT(probe)));
    NULL_POINTER(kvpool_cache_probe(cache, PROMPT, 1, NULL, NULL, sizeof(probe)));
    NULL_POINTER(kvpool_cache_pin(cache, seq, NULL));
    NULL_POINTER(kvpool_cache_set_retention(cache, seq, NULL, 1));
    NULL_POINTER(kvpool_cache_poll_events(cache, NULL, NULL, NULL, NULL));
    NULL_POINTER(kvpool_cache_resync_events(cache, NULL, NULL, NULL));
    NULL_POINTER(kvpool_cache_namespace_numbers(cache, &options.name_space, NULL));
    const kvpool_step_item_t one = {seq, 1, 0};
    kvpool_step_t opened;
    NULL_POINTER(kvpool_cache_reserve(cache, NULL, 1, NULL, 0, &opened));
    NULL_POINTER(kvpool_cache_reserve(cache, &one, 1, NULL, 1, &opened));
    NULL_POINTER(kvpool_cache_reserve(cache, &one, 1, NULL, 0, NULL));
    /* A list of nothing needs no pointer. */
    OK(kvpool_cache_check_admission(cache, NULL, 0, NULL, KVPOOL_OUT(estimate)));
    OK(kvpool_cache_set_retention(cache, seq, NULL, 0));
    OK(kvpool_cache_namespace_numbers(cache, NULL, numbers));
}

static void null_steps(void) {
    float data[8 * Q_HEADS * HEAD_DIM] = {0}, more[8 * Q_HEADS * HEAD_DIM];
    const kvpool_tensor_t kv = check_tensor(data, KV_HEADS * HEAD_DIM),
                          none = check_tensor(NULL, KV_HEADS * HEAD_DIM);
    const kvpool_tensor_t q = check_tensor(data, Q_HEADS * HEAD_DIM),
                          out = check_tensor(more, Q_HEADS * HEAD_DIM);
    const kvpool_tensor_t no_q = check_tensor(NULL, Q_HEADS * HEAD_DIM);
    NULL_POINTER(kvpool_step_get_view(cache, step, NULL, sizeof(kvpool_step_view_t)));
    NULL_POINTER(kvpool_step_get_group(cache, step, 0, NULL, sizeof(kvpool_step_group_t)));
    NULL_POINTER(kvpool_step_get_csr(cache, step, 1, NULL, sizeof(kvpool_step_csr_t)));
    NULL_POINTER(
        kvpool_step_get_device(cache, step, 1, KVPOOL_TABLES_CSR, NULL, sizeof(kvpool_step_device_t)));
    NULL_POINTER(kvpool_step_append(cache, step, 0, NULL, &kv));
    NULL_POINTER(kvpool_step_append(cache, step, 0, &kv, NULL));
    NULL_POINTER(kvpool_step_append(cache, step, 0, &none, &kv));
    NULL_POINTER(kvpool_step_append(cache, step, 0, &kv, &none));
    OK(kvpool_step_append(cache, step, 0, &kv, &kv));
    NULL_POINTER(kvpool_step_attend(cache, step, 0, NULL, &out, NULL));
    NULL_POINTER(kvpool_step_attend(cache, step, 0, &q, NULL, NULL));
    NULL_POINTER(kvpool_step_attend(cache, step, 0, &no_q, &out, NULL));
    NULL_POINTER(kvpool_step_attend(cache, step, 0, &q, &no_q, NULL));
    EXPECT(KVPOOL_OVERLAP, kvpool_step_attend(cache, step, 0, &q, &q, NULL));
    kvpool_tensor_t odd = q;
    odd.len -= 1;
    EXPECT(KVPOOL_WRONG_SHAPE, kvpool_step_attend(cache, step, 0, &odd, &out, NULL));
    odd = q;
    odd.dtype = 77;
    EXPECT(KVPOOL_BAD_ARGUMENT, kvpool_step_attend(cache, step, 0, &odd, &out, NULL));
    odd = q;
    odd.memory = KVPOOL_DEVICE_MEMORY;
    EXPECT(KVPOOL_WRONG_MEMORY, kvpool_step_attend(cache, step, 0, &odd, &out, NULL));
    odd = q;
    odd.data = (char*)odd.data + 1;
    EXPECT(KVPOOL_BAD_ARGUMENT, kvpool_step_attend(cache, step, 0, &odd, &out, NULL));
    kvpool_attend_options_t options = KVPOOL_ATTEND_OPTIONS_INIT;
    options.reserved = 1;
    EXPECT(KVPOOL_BAD_ARGUMENT, kvpool_step_attend(cache, step, 0, &q, &out, &options));
    odd = out;
    void* base;
    uint64_t bytes;
    OK(kvpool_cache_get_pool(cache, &base, &bytes));
    odd.data = base;
    EXPECT(KVPOOL_OVERLAP, kvpool_step_attend(cache, step, 0, &q, &odd, NULL));
}

/* A struct that comes out: of every wrong size, which must leave it alone. */
#define BAD_SIZES(type, call)                                                        \
    do {                                                                             \
        const size_t sizes[] = {0, 1, sizeof(type) - 1, sizeof(type) + 8, SIZE_MAX}; \
        unsigned char bytes[sizeof(type) + 8], untouched[sizeof(type) + 8];          \
        type object;                                                                 \
        type* out = &object;                                                         \
        memset(untouched, 0x5A, sizeof(untouched));                                  \
        memset(out, 0x5A, sizeof(object));                                           \
        for (size_t at = 0; at < sizeof(sizes) / sizeof(sizes[0]); ++at) {           \
            const size_t out_size = sizes[at];                                       \
            EXPECT(KVPOOL_BAD_SIZE, call);                                           \
            CHECK(memcmp(out, untouched, sizeof(object)) == 0);                      \
        }                                                                            \
        /* And misaligned. */                                                        \
        memset(bytes, 0x5A, sizeof(bytes));                                          \
        out = (type*)(void*)((uintptr_t)bytes % 2 == 0 ? bytes + 1 : bytes);         \
        const size_t out_size = sizeof(type);                                        \
        EXPECT(KVPOOL_BAD_ARGUMENT, call);                                           \
        CHECK(memcmp(bytes, untouched, sizeof(bytes)) == 0);                         \
    } while (0)

static void sizes(void) {
    kvpool_error_t error;
    CHECK(kvpool_last_error(&error, 0) == KVPOOL_BAD_SIZE);
    CHECK(kvpool_last_error(&error, sizeof(error) + 8) == KVPOOL_BAD_SIZE);
    BAD_SIZES(kvpool_plan_info_t, kvpool_plan_get_info(plan, out, out_size));
    BAD_SIZES(kvpool_group_info_t, kvpool_plan_get_group(plan, 0, out, out_size));
    BAD_SIZES(kvpool_layer_t, kvpool_plan_get_layer(plan, 0, out, out_size));
    BAD_SIZES(kvpool_plan_info_t, kvpool_cache_get_plan_info(cache, out, out_size));
    BAD_SIZES(kvpool_group_info_t, kvpool_cache_get_group(cache, 0, out, out_size));
    BAD_SIZES(kvpool_layer_t, kvpool_cache_get_layer(cache, 0, out, out_size));
    BAD_SIZES(kvpool_device_info_t, kvpool_cache_get_device(cache, out, out_size));
    BAD_SIZES(kvpool_stats_t, kvpool_cache_stats(cache, out, out_size));
    BAD_SIZES(kvpool_group_stats_t, kvpool_cache_group_stats(cache, 0, out, out_size));
    BAD_SIZES(kvpool_seq_info_t, kvpool_seq_get_info(cache, seq, out, out_size));
    BAD_SIZES(kvpool_begun_t, kvpool_cache_begin(cache, PROMPT, 1, NULL, out, out_size));
    const kvpool_begin_item_t item = {PROMPT, 1, NULL};
    BAD_SIZES(kvpool_begun_t, kvpool_cache_begin_batch(cache, &item, 1, out, out_size));
    BAD_SIZES(kvpool_begun_t, kvpool_cache_begin_reserved(cache, reservation, out, out_size));
    BAD_SIZES(kvpool_estimate_t, kvpool_cache_check_admission(cache, PROMPT, 1, NULL, out, out_size));
    kvpool_reservation_t place;
    BAD_SIZES(kvpool_estimate_t, kvpool_cache_can_admit(cache, PROMPT, 1, NULL, &place, out, out_size));
    BAD_SIZES(kvpool_preempted_t, kvpool_cache_preempt_youngest(cache, out, out_size));
    BAD_SIZES(kvpool_probe_t, kvpool_cache_probe(cache, PROMPT, 1, NULL, out, out_size));
}

static void sizes_of_steps(void) {
    BAD_SIZES(kvpool_step_view_t, kvpool_step_get_view(cache, step, out, out_size));
    BAD_SIZES(kvpool_step_group_t, kvpool_step_get_group(cache, step, 1, out, out_size));
    BAD_SIZES(kvpool_step_csr_t, kvpool_step_get_csr(cache, step, 1, out, out_size));
    BAD_SIZES(kvpool_step_device_t, kvpool_step_get_device(cache, step, 1, KVPOOL_TABLES_CSR, out, out_size));
    float data[Q_HEADS * HEAD_DIM] = {0}, more[Q_HEADS * HEAD_DIM];
    const kvpool_tensor_t q = check_tensor(data, Q_HEADS * HEAD_DIM),
                          out = check_tensor(more, Q_HEADS * HEAD_DIM);
    kvpool_attend_options_t options = KVPOOL_ATTEND_OPTIONS_INIT;
    options.size = 0;
    EXPECT(KVPOOL_BAD_SIZE, kvpool_step_attend(cache, step, 0, &q, &out, &options));
    options.size = sizeof(options) + 8;
    EXPECT(KVPOOL_BAD_SIZE, kvpool_step_attend(cache, step, 0, &q, &out, &options));
}

static void sizes_of_options(void) {
    kvpool_begun_t begun;
    kvpool_estimate_t estimate;
    kvpool_reservation_t place;
    kvpool_begin_options_t options = KVPOOL_BEGIN_OPTIONS_INIT;
    const kvpool_begin_item_t item = {PROMPT, 1, &options};
    const size_t sizes[] = {0, sizeof(options) - 1, sizeof(options) + 8, SIZE_MAX};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); ++i) {
        options.size = sizes[i];
        EXPECT(KVPOOL_BAD_SIZE, kvpool_cache_begin(cache, PROMPT, 1, &options, KVPOOL_OUT(begun)));
        EXPECT(KVPOOL_BAD_SIZE, kvpool_cache_begin_batch(cache, &item, 1, KVPOOL_OUT(begun)));
        EXPECT(KVPOOL_BAD_SIZE,
               kvpool_cache_check_admission(cache, PROMPT, 1, &options, KVPOOL_OUT(estimate)));
        EXPECT(KVPOOL_BAD_SIZE, kvpool_cache_can_admit(cache, PROMPT, 1, &options, &place, NULL, 0));
    }
}

static void sizes_of_saves(void) {
    kvpool_saved_t saved;
    kvpool_restored_t restored;
    kvpool_begun_t begun;
    kvpool_save_options_t save = KVPOOL_SAVE_OPTIONS_INIT;
    kvpool_restore_options_t restore = KVPOOL_RESTORE_OPTIONS_INIT;
    const size_t sizes[] = {0, sizeof(save) - 1, sizeof(save) + 24, SIZE_MAX};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); ++i) {
        save.size = restore.size = sizes[i];
        EXPECT(KVPOOL_BAD_SIZE, kvpool_cache_save_prefixes(cache, "x", &save, KVPOOL_OUT(saved)));
        EXPECT(KVPOOL_BAD_SIZE, kvpool_cache_save_sequence(cache, seq, "x", &save, KVPOOL_OUT(saved)));
        EXPECT(KVPOOL_BAD_SIZE, kvpool_cache_restore_prefixes(cache, "x", &restore, KVPOOL_OUT(restored)));
        EXPECT(KVPOOL_BAD_SIZE, kvpool_cache_restore_sequence(cache, "x", &restore, KVPOOL_OUT(begun)));
    }
    BAD_SIZES(kvpool_saved_t, kvpool_cache_save_prefixes(cache, "x", NULL, out, out_size));
    BAD_SIZES(kvpool_saved_t, kvpool_cache_save_sequence(cache, seq, "x", NULL, out, out_size));
    BAD_SIZES(kvpool_restored_t, kvpool_cache_restore_prefixes(cache, "x", NULL, out, out_size));
    BAD_SIZES(kvpool_begun_t, kvpool_cache_restore_sequence(cache, "x", NULL, out, out_size));
}

static void edge_57_pointers_and_sizes(void) {
    OK(kvpool_config_parse(CHECK_CONFIG, strlen(CHECK_CONFIG), "check.toml", NULL, 0, &config));
    OK(kvpool_plan_new(config, &plan));
    OK(kvpool_cache_open(plan, &cache));
    seq = check_begin(cache, PROMPT, 9);
    check_step(cache, seq, PROMPT, 8);
    OK(kvpool_cache_block_of(cache, seq, 1, 0, &block));
    OK(kvpool_cache_can_admit(cache, PROMPT, 9, NULL, &reservation, NULL, 0));
    const uint64_t before = check_digest(cache);
    const kvpool_config_t kept = config;
    null_without_a_cache();
    CHECK(HANDLE_EQUAL(kept, config));
    null_looking();
    null_sequences();
    sizes();
    sizes_of_options();
    sizes_of_saves();
    CHECK(check_digest(cache) == before);

    const kvpool_step_item_t item = {seq, 1, 0};
    OK(kvpool_cache_reserve(cache, &item, 1, NULL, 0, &step));
    null_steps();
    sizes_of_steps();
    OK(kvpool_step_cancel(cache, step));
    CHECK(check_digest(cache) == before);
    OK(kvpool_cache_close(cache));
    OK(kvpool_plan_destroy(plan));
    OK(kvpool_config_destroy(config));
}

/* Every object after its end. */
static void edge_57_after_the_end(void) {
    kvpool_begun_t begun;
    kvpool_plan_info_t info;
    size_t needed;
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_cache_begin(cache, PROMPT, 1, NULL, KVPOOL_OUT(begun)));
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_cache_release(cache, seq));
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_cache_get_plan_info(cache, KVPOOL_OUT(info)));
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_cache_close(cache));
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_cache_open(plan, &cache));
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_plan_get_info(plan, KVPOOL_OUT(info)));
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_plan_new(config, &plan));
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_config_text(config, KVPOOL_TEXT, NULL, 0, &needed));
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_config_destroy(config));
}

static void edge_57_two_pools(void) {
    const kvpool_cache_t a = check_open(NULL, 0), b = check_open(PAGED, NUM_PAGED);
    const uint64_t b_before = check_digest(b);
    const kvpool_seq_t in_a = check_begin(a, PROMPT, 9);
    check_step(a, in_a, PROMPT, 8);
    CHECK(check_digest(b) == b_before);
    const kvpool_seq_t in_b = check_begin(b, PROMPT, 9);
    EXPECT(KVPOOL_FOREIGN_HANDLE, kvpool_cache_release(b, in_a));
    EXPECT(KVPOOL_FOREIGN_HANDLE, kvpool_cache_release(a, in_b));
    OK(kvpool_cache_close(a));
    check_step(b, in_b, PROMPT, 8);
    OK(kvpool_cache_release(b, in_b));
    check_empty(b);
    OK(kvpool_cache_close(b));
}

/* Where nothing is shared, a retention is refused and not ignored, whatever it is given to. */
static void edge_64_retention_without_reuse(void) {
    const char* const modes[] = {"cache.mode=hybrid", "cache.mode=contiguous", "cache.mode=paged"};
    for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); ++i) {
        const char* const overrides[] = {"cache.prefix_reuse=false", "cache.event_buffer=0", modes[i],
                                         "cache.hybrid="};
        const kvpool_cache_t one = check_open(overrides, i == 0 ? 3 : 4);
        const kvpool_seq_t its = check_begin(one, PROMPT, 9);
        const kvpool_retention_t retention = {0, KVPOOL_TO_END, 90, 0, KVPOOL_FOREVER};
        kvpool_begin_options_t options = KVPOOL_BEGIN_OPTIONS_INIT;
        options.retentions = &retention;
        options.num_retentions = 1;
        const kvpool_begin_item_t item = {PROMPT, 9, &options};
        kvpool_begun_t begun;
        kvpool_estimate_t estimate;
        kvpool_reservation_t place;
        const uint64_t before = check_digest(one);
        EXPECT(KVPOOL_REUSE_OFF, kvpool_cache_begin(one, PROMPT, 9, &options, KVPOOL_OUT(begun)));
        EXPECT(KVPOOL_REUSE_OFF, kvpool_cache_begin_batch(one, &item, 1, KVPOOL_OUT(begun)));
        EXPECT(KVPOOL_REUSE_OFF,
               kvpool_cache_check_admission(one, PROMPT, 9, &options, KVPOOL_OUT(estimate)));
        EXPECT(KVPOOL_REUSE_OFF, kvpool_cache_can_admit(one, PROMPT, 9, &options, &place, NULL, 0));
        EXPECT(KVPOOL_REUSE_OFF, kvpool_cache_set_retention(one, its, &retention, 1));
        CHECK(check_digest(one) == before);
        OK(kvpool_cache_check(one));
        options.num_retentions = 0;
        OK(kvpool_cache_begin(one, PROMPT, 9, &options, KVPOOL_OUT(begun)));
        OK(kvpool_cache_close(one));
    }
}

static long resident_pages(void) {
    long size = 0, resident = 0;
    FILE* file = fopen("/proc/self/statm", "r");
    if (file == NULL) return 0;
    if (fscanf(file, "%ld %ld", &size, &resident) != 2) resident = 0;
    fclose(file);
    return resident;
}

static void edge_57_a_thousand_times(long openings) {
    long early = 0;
    for (long i = 0; i < openings; ++i) {
        const kvpool_cache_t one = check_open(NULL, 0);
        const kvpool_seq_t its = check_begin(one, PROMPT, 9);
        check_step(one, its, PROMPT, 8);
        OK(kvpool_cache_check(one));
        OK(kvpool_cache_close(one));
        EXPECT(KVPOOL_STALE_HANDLE, kvpool_cache_release(one, its));
        if (i == 99) early = resident_pages();
    }
    const long grown = resident_pages() - early;
    if (openings < 1000) return;
    printf("%ld openings: %ld pages more than after 100\n", openings, grown);
    /* Half a MiB; a pool alone has 50 KiB. */
    CHECK(grown < 128);
}

int main(int argc, char** argv) {
    edge_57_pointers_and_sizes();
    edge_57_after_the_end();
    edge_57_two_pools();
    edge_64_retention_without_reuse();
    edge_57_a_thousand_times(argc > 1 ? atol(argv[1]) : 1000);
    printf("ok\n");
    return 0;
}
