/* What the test programs of the C interface share. A program that gets through prints "ok" and exits with 0.
 */
#ifndef KVPOOL_TESTS_CHECK_H
#define KVPOOL_TESTS_CHECK_H

#include <kvpool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

/* Ends the program unless a call gives this status. */
#define EXPECT(status, call) expect_status(status, call, #call, __FILE__, __LINE__)
#define OK(call) EXPECT(KVPOOL_OK, call)

static inline void expect_status(kvpool_status_t wanted, kvpool_status_t got, const char* call,
                                 const char* file, int line) {
    if (got != wanted) {
        kvpool_error_t error;
        memset(&error, 0, sizeof(error));
        kvpool_last_error(&error, sizeof(error));
        fprintf(stderr, "%s:%d: %s gave %s instead of %s; the last error is: %s: %s\n", file, line, call,
                kvpool_status_name(got), kvpool_status_name(wanted), kvpool_status_name(error.status),
                error.message);
        exit(1);
    }
    if (got != KVPOOL_OK) {
        /* Every failure says what it is. */
        kvpool_error_t error;
        memset(&error, 0, sizeof(error));
        kvpool_last_error(&error, sizeof(error));
        if (error.status != got || error.message[0] == '\0' || error.size != sizeof(error)) {
            fprintf(stderr, "%s:%d: %s gave %s and the last error is %s: %s\n", file, line, call,
                    kvpool_status_name(got), kvpool_status_name(error.status), error.message);
            exit(1);
        }
    }
}

/* A hybrid cache: layer 0 in rings of 16 tokens with 2 sinks, layer 1 in blocks of 8. Overridden as asked. */
#define LAYERS 2
#define Q_HEADS 4
#define KV_HEADS 2
#define HEAD_DIM 16
static const char CHECK_CONFIG[] =
    "[model]\n"
    "num_layers = 2\n"
    "num_q_heads = 4\n"
    "num_kv_heads = 2\n"
    "head_dim = 16\n"
    "attention_window = [16, 0]\n"
    "sink_tokens = 2\n"
    "[limits]\n"
    "max_seqs = 4\n"
    "max_seq_len = 64\n"
    "max_batch_tokens = 32\n"
    "max_step_tokens = 8\n"
    "max_rewind_tokens = 4\n"
    "[cache]\n"
    "mode = 'hybrid'\n"
    "tokens_per_block = 8\n"
    "format = 'f32'\n"
    "event_buffer = 64\n"
    "hybrid.contiguous_layers = 'windowed'\n"
    "[device]\n"
    "threads = 1\n";

static inline kvpool_plan_t check_plan(const char* const* overrides, size_t num_overrides) {
    kvpool_config_t config;
    kvpool_plan_t plan;
    OK(kvpool_config_parse(CHECK_CONFIG, sizeof(CHECK_CONFIG) - 1, "check.toml", overrides, num_overrides,
                           &config));
    OK(kvpool_plan_new(config, &plan));
    OK(kvpool_config_destroy(config));
    return plan;
}

static inline kvpool_cache_t check_open(const char* const* overrides, size_t num_overrides) {
    kvpool_cache_t cache;
    const kvpool_plan_t plan = check_plan(overrides, num_overrides);
    OK(kvpool_cache_open(plan, &cache));
    OK(kvpool_plan_destroy(plan));
    return cache;
}

/* All in blocks: for tests that count blocks. */
static const char* const PAGED[] = {"cache.mode=paged",
                                    "cache.hybrid=", "model.attention_window=", "model.sink_tokens=0",
                                    "limits.max_rewind_tokens=0"};
#define NUM_PAGED (sizeof(PAGED) / sizeof(PAGED[0]))

static inline kvpool_tensor_t check_tensor(float* data, uint64_t len) {
    kvpool_tensor_t tensor;
    tensor.data = data;
    tensor.len = len;
    tensor.dtype = KVPOOL_F32;
    tensor.memory = KVPOOL_HOST;
    return tensor;
}

/* Appends `rows` rows of this value in every layer. */
static inline void check_append_all(kvpool_cache_t cache, kvpool_step_t step, uint32_t rows, float value) {
    float kv[32 * KV_HEADS * HEAD_DIM];
    for (size_t i = 0; i < sizeof(kv) / sizeof(kv[0]); ++i) kv[i] = value;
    const kvpool_tensor_t tensor = check_tensor(kv, (uint64_t)rows * KV_HEADS * HEAD_DIM);
    for (uint32_t layer = 0; layer < LAYERS; ++layer)
        OK(kvpool_step_append(cache, step, layer, &tensor, &tensor));
}

/* A step of one sequence, at most 8 tokens, from beginning to end; `tokens` may be NULL. */
static inline void check_step(kvpool_cache_t cache, kvpool_seq_t sequence, const uint32_t* tokens,
                              uint32_t num_tokens) {
    kvpool_step_item_t item;
    kvpool_step_t step;
    item.sequence = sequence;
    item.num_tokens = num_tokens;
    item.reserved = 0;
    OK(kvpool_cache_reserve(cache, &item, 1, tokens, tokens == NULL ? 0 : num_tokens, &step));
    check_append_all(cache, step, num_tokens, 1.0f);
    OK(kvpool_step_commit(cache, step));
}

static inline kvpool_seq_t check_begin(kvpool_cache_t cache, const uint32_t* prompt, size_t len) {
    kvpool_begun_t begun;
    OK(kvpool_cache_begin(cache, prompt, len, NULL, KVPOOL_OUT(begun)));
    return begun.sequence;
}

static inline kvpool_stats_t check_stats(kvpool_cache_t cache) {
    kvpool_stats_t stats;
    OK(kvpool_cache_stats(cache, KVPOOL_OUT(stats)));
    return stats;
}

static inline uint64_t check_digest(kvpool_cache_t cache) {
    uint64_t digest = 0;
    OK(kvpool_cache_digest(cache, &digest));
    return digest;
}

/* Nothing is held, and every invariant holds. */
static inline void check_empty(kvpool_cache_t cache) {
    const kvpool_stats_t stats = check_stats(cache);
    CHECK(stats.seqs == 0 && stats.held_bytes == 0 && stats.promised_bytes == 0);
    OK(kvpool_cache_check(cache));
}

#define HANDLE_EQUAL(a, b) ((a).word[0] == (b).word[0] && (a).word[1] == (b).word[1])

#endif /* KVPOOL_TESTS_CHECK_H */
