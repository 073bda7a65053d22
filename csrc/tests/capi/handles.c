/* Edge cases 2, 3 and 8: handles that are released, stale, foreign, zero, forged or of another kind give a
 * status and change nothing; a sequence that ends in any state gives everything back once. */
#include "check.h"

/* What is asked with a handle that must be refused. */
typedef kvpool_status_t (*call_fn)(kvpool_cache_t cache, uint64_t a, uint64_t b);

#define HANDLE(type, name) \
    type name;             \
    name.word[0] = a;      \
    name.word[1] = b

static kvpool_status_t seq_info(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_seq_t, seq);
    kvpool_seq_info_t info;
    return kvpool_seq_get_info(cache, seq, KVPOOL_OUT(info));
}
static kvpool_status_t seq_release(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_seq_t, seq);
    return kvpool_cache_release(cache, seq);
}
static kvpool_status_t seq_release_later(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_seq_t, seq);
    return kvpool_cache_release_later(cache, seq);
}
static kvpool_status_t seq_fork(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_seq_t, seq);
    kvpool_seq_t forked;
    return kvpool_cache_fork(cache, seq, &forked);
}
static kvpool_status_t seq_truncate(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_seq_t, seq);
    return kvpool_cache_truncate(cache, seq, 0);
}
static kvpool_status_t seq_pin(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_seq_t, seq);
    kvpool_pin_t pin;
    return kvpool_cache_pin(cache, seq, &pin);
}
static kvpool_status_t seq_retention(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_seq_t, seq);
    return kvpool_cache_set_retention(cache, seq, NULL, 0);
}
static kvpool_status_t seq_export(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_seq_t, seq);
    float out[KV_HEADS * HEAD_DIM];
    return kvpool_cache_export(cache, seq, 0, KVPOOL_K, 0, 1, out, KV_HEADS * HEAD_DIM);
}
static kvpool_status_t seq_block_of(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_seq_t, seq);
    kvpool_block_t block;
    return kvpool_cache_block_of(cache, seq, 0, 0, &block);
}
static kvpool_status_t seq_reserve(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    kvpool_step_item_t item;
    kvpool_step_t step;
    item.sequence.word[0] = a;
    item.sequence.word[1] = b;
    item.num_tokens = 1;
    item.reserved = 0;
    return kvpool_cache_reserve(cache, &item, 1, NULL, 0, &step);
}
static const call_fn SEQ_CALLS[] = {seq_info,      seq_release, seq_fork,     seq_truncate, seq_pin,
                                    seq_retention, seq_export,  seq_block_of, seq_reserve};
#define NUM_SEQ_CALLS (sizeof(SEQ_CALLS) / sizeof(SEQ_CALLS[0]))

static kvpool_status_t step_view(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_step_t, step);
    kvpool_step_view_t view;
    return kvpool_step_get_view(cache, step, KVPOOL_OUT(view));
}
static kvpool_status_t step_group(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_step_t, step);
    kvpool_step_group_t group;
    return kvpool_step_get_group(cache, step, 0, KVPOOL_OUT(group));
}
static kvpool_status_t step_csr(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_step_t, step);
    kvpool_step_csr_t csr;
    return kvpool_step_get_csr(cache, step, 0, KVPOOL_OUT(csr));
}
static kvpool_status_t step_append(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_step_t, step);
    float kv[KV_HEADS * HEAD_DIM] = {0};
    const kvpool_tensor_t tensor = check_tensor(kv, KV_HEADS * HEAD_DIM);
    return kvpool_step_append(cache, step, 0, &tensor, &tensor);
}
static kvpool_status_t step_attend(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_step_t, step);
    float q[Q_HEADS * HEAD_DIM] = {0}, out[Q_HEADS * HEAD_DIM];
    const kvpool_tensor_t q_tensor = check_tensor(q, Q_HEADS * HEAD_DIM);
    const kvpool_tensor_t out_tensor = check_tensor(out, Q_HEADS * HEAD_DIM);
    return kvpool_step_attend(cache, step, 0, &q_tensor, &out_tensor, NULL);
}
static kvpool_status_t step_mark(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_step_t, step);
    return kvpool_step_mark_appended(cache, step, 0);
}
static kvpool_status_t step_mark_all(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_step_t, step);
    return kvpool_step_mark_all_appended(cache, step);
}
static kvpool_status_t step_commit(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_step_t, step);
    return kvpool_step_commit(cache, step);
}
static kvpool_status_t step_cancel(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_step_t, step);
    return kvpool_step_cancel(cache, step);
}
static const call_fn STEP_CALLS[] = {step_view, step_group,    step_csr,    step_append, step_attend,
                                     step_mark, step_mark_all, step_commit, step_cancel};
#define NUM_STEP_CALLS (sizeof(STEP_CALLS) / sizeof(STEP_CALLS[0]))

static kvpool_status_t pin_unpin(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_pin_t, pin);
    return kvpool_cache_unpin(cache, pin);
}
static kvpool_status_t reservation_begin(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_reservation_t, reservation);
    kvpool_begun_t begun;
    return kvpool_cache_begin_reserved(cache, reservation, KVPOOL_OUT(begun));
}
static kvpool_status_t reservation_cancel(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_reservation_t, reservation);
    return kvpool_cache_cancel_reservation(cache, reservation);
}
static kvpool_status_t block_refs(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_block_t, block);
    uint32_t refs;
    return kvpool_cache_block_refs(cache, block, &refs);
}
static kvpool_status_t cache_stats(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_cache_t, other);
    kvpool_stats_t stats;
    (void)cache;
    return kvpool_cache_stats(other, KVPOOL_OUT(stats));
}
static kvpool_status_t cache_close(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_cache_t, other);
    (void)cache;
    return kvpool_cache_close(other);
}
static kvpool_status_t plan_destroy(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_plan_t, plan);
    (void)cache;
    return kvpool_plan_destroy(plan);
}
static kvpool_status_t config_destroy(kvpool_cache_t cache, uint64_t a, uint64_t b) {
    HANDLE(kvpool_config_t, config);
    (void)cache;
    return kvpool_config_destroy(config);
}

static int refused_as_handle(kvpool_status_t status) {
    return status == KVPOOL_BAD_HANDLE || status == KVPOOL_STALE_HANDLE || status == KVPOOL_FOREIGN_HANDLE;
}

/* Asks all the calls, which must be refused with `wanted`, or with any status about handles if it is 0. */
static void refused(kvpool_cache_t cache, const call_fn* calls, size_t num_calls, uint64_t a, uint64_t b,
                    kvpool_status_t wanted) {
    const uint64_t before = check_digest(cache);
    for (size_t i = 0; i < num_calls; ++i) {
        const kvpool_status_t got = calls[i](cache, a, b);
        if (wanted == 0 ? !refused_as_handle(got) : got != wanted) {
            fprintf(stderr, "call %u with %016llx %016llx gave %s, not %s\n", (unsigned)i,
                    (unsigned long long)a, (unsigned long long)b, kvpool_status_name(got),
                    kvpool_status_name(wanted));
            exit(1);
        }
    }
    CHECK(check_digest(cache) == before);
}

static uint64_t random_state = 42;
static uint64_t next_random(void) {
    uint64_t z = random_state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* Zero, noise, and the good handle with any one bit changed. With `places`, of the first word too: it is
 * right for another object, if there is one, and only by its generation that is told. */
static void forged_of(int places, kvpool_cache_t cache, const call_fn* calls, size_t num_calls, uint64_t a,
                      uint64_t b) {
    refused(cache, calls, num_calls, 0, 0, KVPOOL_BAD_HANDLE);
    refused(cache, calls, num_calls, UINT64_MAX, UINT64_MAX, KVPOOL_BAD_HANDLE);
    for (int bit = 0; bit < 64; ++bit) {
        if (places) refused(cache, calls, num_calls, a ^ (uint64_t)1 << bit, b, 0);
        refused(cache, calls, num_calls, a, b ^ (uint64_t)1 << bit, 0);
    }
    for (int i = 0; i < 200; ++i) refused(cache, calls, num_calls, next_random(), next_random(), 0);
    /* The right kind, and noise. */
    for (int i = 0; i < 200; ++i) {
        const uint64_t kind = b & (uint64_t)0xFF << 56;
        refused(cache, calls, num_calls, next_random(), kind | (next_random() >> 8), 0);
        refused(cache, calls, num_calls, a, kind | (next_random() >> 8), 0);
    }
}

static const uint32_t PROMPT[20] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20};

static void forged(kvpool_cache_t cache, const call_fn* calls, size_t num_calls, uint64_t a, uint64_t b) {
    forged_of(1, cache, calls, num_calls, a, b);
}

/* A sequence with all of PROMPT. */
static kvpool_seq_t full(kvpool_cache_t cache) {
    kvpool_begun_t begun;
    OK(kvpool_cache_begin(cache, PROMPT, 20, NULL, KVPOOL_OUT(begun)));
    for (uint32_t from = begun.cached_len; from < 20;) {
        const uint32_t n = 20 - from < 8 ? 20 - from : 8;
        check_step(cache, begun.sequence, PROMPT + from, n);
        from += n;
    }
    return begun.sequence;
}

static void edge_02_handles_that_are_none(void) {
    const kvpool_cache_t cache = check_open(PAGED, NUM_PAGED), other = check_open(PAGED, NUM_PAGED);
    const kvpool_seq_t seq = full(cache), foreign = full(other);
    forged(cache, SEQ_CALLS, NUM_SEQ_CALLS, seq.word[0], seq.word[1]);
    refused(cache, SEQ_CALLS, NUM_SEQ_CALLS, foreign.word[0], foreign.word[1], KVPOOL_FOREIGN_HANDLE);
    EXPECT(KVPOOL_FOREIGN_HANDLE, seq_release_later(cache, foreign.word[0], foreign.word[1]));
    EXPECT(KVPOOL_BAD_HANDLE, seq_release_later(cache, 0, 0));

    kvpool_pin_t pin;
    kvpool_reservation_t reservation;
    kvpool_block_t block;
    const call_fn unpin[] = {pin_unpin}, reserved[] = {reservation_begin, reservation_cancel},
                  refs[] = {block_refs};
    OK(kvpool_cache_pin(cache, seq, &pin));
    OK(kvpool_cache_can_admit(cache, PROMPT, 5, NULL, &reservation, NULL, 0));
    OK(kvpool_cache_block_of(cache, seq, 0, 0, &block));
    forged(cache, unpin, 1, pin.word[0], pin.word[1]);
    forged(cache, reserved, 2, reservation.word[0], reservation.word[1]);
    /* Its neighbour is a block of this sequence too. */
    forged_of(0, cache, refs, 1, block.word[0], block.word[1]);
    /* Of another kind, each as each. */
    refused(cache, SEQ_CALLS, NUM_SEQ_CALLS, pin.word[0], pin.word[1], KVPOOL_BAD_HANDLE);
    EXPECT(KVPOOL_BAD_HANDLE, seq_release_later(cache, pin.word[0], pin.word[1]));
    refused(cache, SEQ_CALLS, NUM_SEQ_CALLS, reservation.word[0], reservation.word[1], KVPOOL_BAD_HANDLE);
    refused(cache, unpin, 1, seq.word[0], seq.word[1], KVPOOL_BAD_HANDLE);
    refused(cache, reserved, 2, seq.word[0], seq.word[1], KVPOOL_BAD_HANDLE);
    refused(cache, refs, 1, seq.word[0], seq.word[1], KVPOOL_BAD_HANDLE);
    /* Of another cache. */
    refused(other, unpin, 1, pin.word[0], pin.word[1], KVPOOL_FOREIGN_HANDLE);
    refused(other, reserved, 2, reservation.word[0], reservation.word[1], KVPOOL_FOREIGN_HANDLE);
    refused(other, refs, 1, block.word[0], block.word[1], KVPOOL_FOREIGN_HANDLE);

    /* Caches, plans and configs themselves. */
    const call_fn caches[] = {cache_stats, cache_close}, plans[] = {plan_destroy},
                  configs[] = {config_destroy};
    forged_of(0, cache, caches, 2, other.word[0], other.word[1]);
    const kvpool_plan_t plan = check_plan(NULL, 0);
    forged(cache, plans, 1, plan.word[0], plan.word[1]);
    refused(cache, configs, 1, plan.word[0], plan.word[1], KVPOOL_BAD_HANDLE);
    OK(kvpool_plan_destroy(plan));
    refused(cache, plans, 1, plan.word[0], plan.word[1], KVPOOL_STALE_HANDLE);

    /* Twice. */
    OK(kvpool_cache_unpin(cache, pin));
    refused(cache, unpin, 1, pin.word[0], pin.word[1], KVPOOL_STALE_HANDLE);
    OK(kvpool_cache_cancel_reservation(cache, reservation));
    refused(cache, reserved, 2, reservation.word[0], reservation.word[1], KVPOOL_STALE_HANDLE);
    OK(kvpool_cache_release(cache, seq));
    refused(cache, SEQ_CALLS, NUM_SEQ_CALLS, seq.word[0], seq.word[1], KVPOOL_STALE_HANDLE);
    OK(kvpool_cache_release(other, foreign));
    check_empty(cache);
    check_empty(other);
    OK(kvpool_cache_close(other));
    refused(cache, caches, 2, other.word[0], other.word[1], KVPOOL_STALE_HANDLE);
    OK(kvpool_cache_close(cache));
    EXPECT(KVPOOL_STALE_HANDLE, seq_info(cache, seq.word[0], seq.word[1]));
}

static void edge_02_steps(void) {
    const kvpool_cache_t cache = check_open(PAGED, NUM_PAGED), other = check_open(PAGED, NUM_PAGED);
    const kvpool_seq_t seq = check_begin(cache, PROMPT, 5), foreign = check_begin(other, PROMPT, 5);
    kvpool_step_item_t item = {seq, 1, 0};
    kvpool_step_t step, foreign_step, old;
    OK(kvpool_cache_reserve(cache, &item, 1, NULL, 0, &old));
    OK(kvpool_step_cancel(cache, old));
    OK(kvpool_cache_reserve(cache, &item, 1, NULL, 0, &step));
    item.sequence = foreign;
    OK(kvpool_cache_reserve(other, &item, 1, NULL, 0, &foreign_step));
    forged(cache, STEP_CALLS, NUM_STEP_CALLS, step.word[0], step.word[1]);
    refused(cache, STEP_CALLS, NUM_STEP_CALLS, seq.word[0], seq.word[1], KVPOOL_BAD_HANDLE);
    refused(cache, STEP_CALLS, NUM_STEP_CALLS, old.word[0], old.word[1], KVPOOL_STALE_HANDLE);
    refused(cache, STEP_CALLS, NUM_STEP_CALLS, foreign_step.word[0], foreign_step.word[1],
            KVPOOL_FOREIGN_HANDLE);
    /* After all that it still works. */
    check_append_all(cache, step, 1, 1.0f);
    OK(kvpool_step_commit(cache, step));
    refused(cache, STEP_CALLS, NUM_STEP_CALLS, step.word[0], step.word[1], KVPOOL_STALE_HANDLE);
    OK(kvpool_step_cancel(other, foreign_step));
    OK(kvpool_cache_close(cache));
    OK(kvpool_cache_close(other));
}

static void edge_03_stale_after_reuse(void) {
    const kvpool_cache_t cache = check_open(PAGED, NUM_PAGED);
    kvpool_seq_t old[100];
    for (int i = 0; i < 100; ++i) {
        const kvpool_seq_t seq = check_begin(cache, PROMPT, 3);
        for (int before = 0; before < i; ++before) {
            CHECK(!HANDLE_EQUAL(seq, old[before]));
            EXPECT(KVPOOL_STALE_HANDLE, seq_info(cache, old[before].word[0], old[before].word[1]));
        }
        if (i > 0) {
            const kvpool_seq_t stale = old[i / 2];
            refused(cache, SEQ_CALLS, NUM_SEQ_CALLS, stale.word[0], stale.word[1], KVPOOL_STALE_HANDLE);
        }
        OK(kvpool_cache_release(cache, seq));
        old[i] = seq;
    }
    check_empty(cache);
    OK(kvpool_cache_close(cache));
    /* A cache in the same place is another cache. */
    const kvpool_cache_t next = check_open(PAGED, NUM_PAGED);
    EXPECT(KVPOOL_STALE_HANDLE, seq_info(cache, old[99].word[0], old[99].word[1]));
    EXPECT(KVPOOL_FOREIGN_HANDLE, seq_info(next, old[99].word[0], old[99].word[1]));
    OK(kvpool_cache_close(next));
}

/* Free, active, cached and promised blocks always make up the whole. */
static void adds_up(kvpool_cache_t cache, uint32_t active) {
    kvpool_group_stats_t stats;
    kvpool_group_info_t info;
    OK(kvpool_cache_group_stats(cache, 0, KVPOOL_OUT(stats)));
    OK(kvpool_cache_get_group(cache, 0, KVPOOL_OUT(info)));
    CHECK(stats.blocks_free + stats.blocks_active + stats.blocks_cached + stats.blocks_promised ==
          info.units);
    CHECK(stats.blocks_active == active);
    OK(kvpool_cache_check(cache));
}

static void edge_08_ends_in_every_state(void) {
    const kvpool_cache_t cache = check_open(PAGED, NUM_PAGED);
    kvpool_step_item_t item;
    kvpool_step_t step;
    memset(&item, 0, sizeof(item));
    /* Just begun. */
    OK(kvpool_cache_release(cache, check_begin(cache, PROMPT, 20)));
    adds_up(cache, 0);
    /* Half prefilled. */
    item.sequence = check_begin(cache, PROMPT, 20);
    check_step(cache, item.sequence, PROMPT, 8);
    adds_up(cache, 1);
    OK(kvpool_cache_release(cache, item.sequence));
    adds_up(cache, 0);
    /* In an open step: refused, and free when it is cancelled; the first block is cached, so 12 are left. */
    item.sequence = check_begin(cache, PROMPT, 20);
    item.num_tokens = 7;
    OK(kvpool_cache_reserve(cache, &item, 1, NULL, 0, &step));
    EXPECT(KVPOOL_STEP_OPEN, kvpool_cache_release(cache, item.sequence));
    OK(kvpool_step_cancel(cache, step));
    OK(kvpool_cache_release(cache, item.sequence));
    adds_up(cache, 0);
    /* Forked, and in the middle of copy-on-write, released in both orders. */
    for (int order = 0; order < 2; ++order) {
        const kvpool_seq_t seq = full(cache);
        kvpool_seq_t forked;
        OK(kvpool_cache_fork(cache, seq, &forked));
        adds_up(cache, 3);
        item.sequence = forked;
        item.num_tokens = 1;
        OK(kvpool_cache_reserve(cache, &item, 1, NULL, 0, &step));
        OK(kvpool_step_cancel(cache, step));
        check_step(cache, forked, NULL, 1);
        adds_up(cache, 4);
        OK(kvpool_cache_release(cache, order == 0 ? seq : forked));
        adds_up(cache, 3);
        OK(kvpool_cache_release(cache, order == 0 ? forked : seq));
        adds_up(cache, 0);
    }
    /* Finished: its limit is reached. */
    kvpool_begin_options_t options = KVPOOL_BEGIN_OPTIONS_INIT;
    kvpool_begun_t begun;
    options.max_len = 20;
    OK(kvpool_cache_begin(cache, PROMPT, 20, &options, KVPOOL_OUT(begun)));
    for (uint32_t from = begun.cached_len; from < 20; ++from)
        check_step(cache, begun.sequence, PROMPT + from, 1);
    item.sequence = begun.sequence;
    EXPECT(KVPOOL_TOO_LONG, kvpool_cache_reserve(cache, &item, 1, NULL, 0, &step));
    OK(kvpool_cache_release(cache, begun.sequence));
    EXPECT(KVPOOL_STALE_HANDLE, kvpool_cache_release(cache, begun.sequence));
    check_empty(cache);
    OK(kvpool_cache_close(cache));
}

int main(void) {
    edge_02_handles_that_are_none();
    edge_02_steps();
    edge_03_stale_after_reuse();
    edge_08_ends_in_every_state();
    printf("ok\n");
    return 0;
}
