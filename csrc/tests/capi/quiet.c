/* What kvpool.h says of calls in general: after kvpool_cache_open none allocates, but for those that it
 * names; and one that fails changes nothing, but for the counters that it names. */
#include "check.h"

/* The program's own malloc, which counts, and which the library gets too. */
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *old, size_t size);
extern void *__libc_memalign(size_t align, size_t size);
static volatile unsigned long allocations;

void *malloc(size_t size) {
    ++allocations;
    return __libc_malloc(size);
}
void *calloc(size_t count, size_t size) {
    ++allocations;
    return __libc_calloc(count, size);
}
void *realloc(void *old, size_t size) {
    ++allocations;
    return __libc_realloc(old, size);
}
int posix_memalign(void **out, size_t align, size_t size) {
    ++allocations;
    *out = __libc_memalign(align, size);
    return *out == NULL ? 12 : 0;
}
void *aligned_alloc(size_t align, size_t size) {
    ++allocations;
    return __libc_memalign(align, size);
}

/* Ends the program if a call allocated, or failed where it should not, or did not where it should. */
static void quiet(const char *call, int line, unsigned long before, kvpool_status_t got, int good) {
    if (allocations != before || (got == KVPOOL_OK) != good) {
        fprintf(stderr, "quiet.c:%d: %lu allocations in %s, which gave %s\n", line, allocations - before, call,
                kvpool_status_name(got));
        exit(1);
    }
}
#define QUIET(call, good)                            \
    do {                                             \
        const unsigned long before = allocations;    \
        const kvpool_status_t got = (call);          \
        quiet(#call, __LINE__, before, got, (good)); \
    } while (0)
#define QUIET_OK(call) QUIET(call, 1)
#define QUIET_FAILS(call) QUIET(call, 0)

static unsigned events;
static void count_event(void *context, const kvpool_event_t *event) {
    (void)context;
    (void)event;
    ++events;
}

/* Every function of a cache, good calls and bad ones. */
static void nothing_is_allocated(void) {
    /* As many threads as there are processors. */
    static const char *const threads[] = {"device.threads=0"};
    const kvpool_cache_t cache = check_open(threads, 1);
    const uint32_t prompt[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    static float kv[8 * KV_HEADS * HEAD_DIM], q[8 * Q_HEADS * HEAD_DIM], result[8 * Q_HEADS * HEAD_DIM];
    const kvpool_tensor_t k = check_tensor(kv, 8 * KV_HEADS * HEAD_DIM);
    const kvpool_tensor_t queries = check_tensor(q, 8 * Q_HEADS * HEAD_DIM);
    const kvpool_tensor_t out = check_tensor(result, 8 * Q_HEADS * HEAD_DIM);
    const kvpool_seq_t no_seq = {{0, 0}};
    const kvpool_pin_t no_pin = {{0, 0}};
    kvpool_begin_options_t options = KVPOOL_BEGIN_OPTIONS_INIT;
    kvpool_plan_info_t plan;
    kvpool_group_info_t group;
    kvpool_layer_t layer;
    kvpool_device_info_t device;
    kvpool_begun_t begun, batch[2];
    kvpool_begin_item_t items[2];
    kvpool_step_item_t item;
    kvpool_step_t step;
    kvpool_step_view_t view;
    kvpool_step_group_t step_group;
    kvpool_step_csr_t csr;
    kvpool_step_device_t step_device;
    kvpool_seq_t fork;
    kvpool_seq_info_t seq_info;
    kvpool_estimate_t estimate;
    kvpool_reservation_t reservation;
    kvpool_probe_t probe;
    kvpool_stats_t stats;
    kvpool_group_stats_t group_stats;
    kvpool_pin_t pin;
    kvpool_block_t block;
    kvpool_error_t error;
    kvpool_preempted_t preempted;
    struct DLManagedTensor *dlpack;
    uint64_t digest, evictions[KVPOOL_PRIORITIES], number;
    uint32_t refs, names[2], places;
    unsigned char bytes[64];
    void *base;

    QUIET_OK(kvpool_cache_get_plan_info(cache, KVPOOL_OUT(plan)));
    QUIET_OK(kvpool_cache_get_group(cache, 1, KVPOOL_OUT(group)));
    QUIET_FAILS(kvpool_cache_get_group(cache, 9, KVPOOL_OUT(group)));
    QUIET_OK(kvpool_cache_get_layer(cache, 1, KVPOOL_OUT(layer)));
    QUIET_FAILS(kvpool_cache_get_layer(cache, 9, KVPOOL_OUT(layer)));
    QUIET_OK(kvpool_cache_get_device(cache, KVPOOL_OUT(device)));
    QUIET_OK(kvpool_cache_get_pool(cache, &base, &number));
    /* What the plan and the device say of the same thing. */
    CHECK(plan.workspace_bytes == device.workspace_bytes);
    QUIET_OK(kvpool_cache_dlpack(cache, 1, KVPOOL_K, &dlpack));
    QUIET_FAILS(kvpool_cache_dlpack(cache, 1, KVPOOL_K_SCALES, &dlpack));
    QUIET_FAILS(kvpool_cache_set_stream(cache, NULL));
    QUIET_OK(kvpool_cache_synchronize(cache));

    QUIET_OK(kvpool_cache_check_admission(cache, prompt, 12, NULL, KVPOOL_OUT(estimate)));
    QUIET_FAILS(kvpool_cache_check_admission(cache, NULL, 12, NULL, KVPOOL_OUT(estimate)));
    QUIET_OK(kvpool_cache_can_admit(cache, prompt, 12, NULL, &reservation, KVPOOL_OUT(estimate)));
    QUIET_OK(kvpool_cache_reservations(cache, &places));
    QUIET_OK(kvpool_cache_cancel_reservation(cache, reservation));
    QUIET_FAILS(kvpool_cache_begin_reserved(cache, reservation, KVPOOL_OUT(begun)));
    QUIET_OK(kvpool_cache_cancel_reservations(cache, &places));

    options.name_space.salt.kind = KVPOOL_KEY_IS_NUMBER;
    QUIET_OK(kvpool_cache_begin(cache, prompt, 9, &options, KVPOOL_OUT(begun)));
    options.max_len = 1000;
    QUIET_FAILS(kvpool_cache_begin(cache, prompt, 9, &options, KVPOOL_OUT(begun)));
    for (int i = 0; i < 2; ++i) {
        items[i].prompt = prompt;
        items[i].prompt_len = 9;
        items[i].options = NULL;
    }
    QUIET_OK(kvpool_cache_begin_batch(cache, items, 2, batch, sizeof(batch[0])));
    QUIET_FAILS(kvpool_cache_begin_batch(cache, items, 2, batch, sizeof(batch[0])));
    QUIET_OK(kvpool_cache_release(cache, batch[0].sequence));

    item.sequence = batch[1].sequence;
    item.num_tokens = 8;
    item.reserved = 0;
    QUIET_FAILS(kvpool_cache_reserve(cache, &item, 1, prompt, 7, &step));
    QUIET_OK(kvpool_cache_reserve(cache, &item, 1, prompt, 8, &step));
    QUIET_FAILS(kvpool_cache_reset(cache));
    QUIET_OK(kvpool_step_get_view(cache, step, KVPOOL_OUT(view)));
    QUIET_OK(kvpool_step_get_group(cache, step, 1, KVPOOL_OUT(step_group)));
    QUIET_OK(kvpool_step_get_csr(cache, step, 1, KVPOOL_OUT(csr)));
    QUIET_FAILS(kvpool_step_get_csr(cache, step, 0, KVPOOL_OUT(csr)));
    QUIET_FAILS(kvpool_step_get_device(cache, step, 1, KVPOOL_TABLES_CSR, KVPOOL_OUT(step_device)));
    QUIET_FAILS(kvpool_step_prepare(cache, step));
    QUIET_FAILS(kvpool_step_attend(cache, step, 0, &queries, &out, NULL));
    QUIET_OK(kvpool_step_append(cache, step, 0, &k, &k));
    QUIET_FAILS(kvpool_step_append(cache, step, 0, &k, &k));
    QUIET_OK(kvpool_step_attend(cache, step, 0, &queries, &out, NULL));
    QUIET_FAILS(kvpool_step_attend(cache, step, 0, &queries, &queries, NULL));
    QUIET_OK(kvpool_step_append(cache, step, 1, &k, &k));
    QUIET_FAILS(kvpool_step_mark_appended(cache, step, 1));
    QUIET_OK(kvpool_step_mark_all_appended(cache, step));
    QUIET_OK(kvpool_step_commit(cache, step));
    QUIET_FAILS(kvpool_step_cancel(cache, step));

    QUIET_OK(kvpool_cache_fork(cache, batch[1].sequence, &fork));
    QUIET_OK(kvpool_cache_truncate(cache, fork, 7));
    QUIET_FAILS(kvpool_cache_truncate(cache, fork, 8));
    QUIET_OK(kvpool_cache_release(cache, fork));
    QUIET_FAILS(kvpool_cache_release(cache, fork));
    QUIET_OK(kvpool_seq_get_info(cache, batch[1].sequence, KVPOOL_OUT(seq_info)));
    QUIET_FAILS(kvpool_seq_get_info(cache, no_seq, KVPOOL_OUT(seq_info)));
    QUIET_OK(kvpool_cache_probe(cache, prompt, 12, NULL, KVPOOL_OUT(probe)));
    QUIET_OK(kvpool_cache_pin(cache, batch[1].sequence, &pin));
    QUIET_OK(kvpool_cache_unpin(cache, pin));
    QUIET_FAILS(kvpool_cache_unpin(cache, no_pin));
    QUIET_OK(kvpool_cache_set_retention(cache, batch[1].sequence, NULL, 0));
    QUIET_OK(kvpool_cache_set_time_ms(cache, 5));
    QUIET_OK(kvpool_cache_set_epoch(cache, 5));
    QUIET_FAILS(kvpool_cache_preempt_youngest(cache, KVPOOL_OUT(preempted)));
    QUIET_OK(kvpool_cache_poll_events(cache, count_event, NULL, &number, &number));
    QUIET_OK(kvpool_cache_resync_events(cache, count_event, NULL, &number));
    CHECK(events > 0);
    QUIET_OK(kvpool_cache_namespace_numbers(cache, NULL, names));
    QUIET_OK(kvpool_cache_stats(cache, KVPOOL_OUT(stats)));
    QUIET_OK(kvpool_cache_group_stats(cache, 1, KVPOOL_OUT(group_stats)));
    QUIET_OK(kvpool_cache_evictions(cache, evictions));
    QUIET_OK(kvpool_cache_digest(cache, &digest));
    QUIET_OK(kvpool_cache_export(cache, batch[1].sequence, 1, KVPOOL_K, 0, 4, kv, 4 * KV_HEADS * HEAD_DIM));
    QUIET_FAILS(kvpool_cache_export(cache, batch[1].sequence, 1, KVPOOL_K, 0, 9, kv, 9));
    QUIET_OK(kvpool_cache_read(cache, 0, bytes, sizeof(bytes)));
    QUIET_FAILS(kvpool_cache_read(cache, UINT64_MAX, bytes, sizeof(bytes)));
    QUIET_OK(kvpool_cache_block_of(cache, batch[1].sequence, 1, 0, &block));
    QUIET_OK(kvpool_cache_block_refs(cache, block, &refs));
    QUIET_OK(kvpool_cache_clear_cached(cache));

    /* The exceptions. */
    OK(kvpool_last_error(KVPOOL_OUT(error)));
    OK(kvpool_cache_check(cache));
    OK(kvpool_cache_text(cache, KVPOOL_TEXT, NULL, 0, (size_t *)&number));
    OK(kvpool_cache_close(cache));
    QUIET_FAILS(kvpool_cache_close(cache));
}

/* A refusal to begin is counted, and that is all that it leaves. */
static void refusals_are_counted(void) {
    const kvpool_cache_t cache = check_open(NULL, 0);
    const uint32_t prompt[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    kvpool_begin_options_t options = KVPOOL_BEGIN_OPTIONS_INIT;
    kvpool_begun_t begun;
    kvpool_stats_t before, after;
    uint64_t digest;
    options.max_len = 65;
    before = check_stats(cache);
    digest = check_digest(cache);
    EXPECT(KVPOOL_TOO_LONG, kvpool_cache_begin(cache, prompt, 8, &options, KVPOOL_OUT(begun)));
    after = check_stats(cache);
    CHECK(after.refused_too_long == before.refused_too_long + 1);
    after.refused_too_long = before.refused_too_long;
    CHECK(memcmp(&before, &after, sizeof(before)) == 0);
    CHECK(check_digest(cache) == digest);
    OK(kvpool_cache_close(cache));
}

/* In a batch "index" is the entry that was refused, whatever it was refused for. */
static void a_batch_says_which(void) {
    const kvpool_cache_t cache = check_open(NULL, 0);
    const uint32_t prompt[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    static const kvpool_retention_t bad[5] = {
        {0, 2, 10, 0, 1}, {2, 4, 10, 0, 1}, {4, 6, 10, 0, 1}, {6, 8, 10, 0, 1}, {8, 9, 10, 0, 1}};
    kvpool_begin_options_t options = KVPOOL_BEGIN_OPTIONS_INIT;
    kvpool_begin_item_t items[2];
    kvpool_begun_t begun[2];
    kvpool_error_t error;
    for (int i = 0; i < 2; ++i) {
        items[i].prompt = prompt;
        items[i].prompt_len = 8;
        items[i].options = NULL;
    }
    items[1].options = &options;
    options.retentions = bad;
    options.num_retentions = 5;
    EXPECT(KVPOOL_BAD_RETENTION, kvpool_cache_begin_batch(cache, items, 2, begun, sizeof(begun[0])));
    OK(kvpool_last_error(KVPOOL_OUT(error)));
    CHECK(error.index == 1);
    options.num_retentions = 0;
    options.name_space.salt.kind = KVPOOL_KEY_IS_BYTES;
    options.name_space.salt.num_bytes = KVPOOL_KEY_BYTES + 1;
    EXPECT(KVPOOL_KEY_TOO_LONG, kvpool_cache_begin_batch(cache, items, 2, begun, sizeof(begun[0])));
    OK(kvpool_last_error(KVPOOL_OUT(error)));
    CHECK(error.index == 1);
    options.name_space.salt.kind = 77;
    EXPECT(KVPOOL_BAD_ARGUMENT, kvpool_cache_begin_batch(cache, items, 2, begun, sizeof(begun[0])));
    OK(kvpool_last_error(KVPOOL_OUT(error)));
    CHECK(error.index == 1);
    items[1].options = NULL;
    items[1].prompt = NULL;
    EXPECT(KVPOOL_NULL_POINTER, kvpool_cache_begin_batch(cache, items, 2, begun, sizeof(begun[0])));
    OK(kvpool_last_error(KVPOOL_OUT(error)));
    CHECK(error.index == 1);
    check_empty(cache);
    OK(kvpool_cache_close(cache));
}

int main(void) {
    nothing_is_allocated();
    refusals_are_counted();
    a_batch_says_which();
    printf("ok\n");
    return 0;
}
