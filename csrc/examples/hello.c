/* The shortest whole way: a config becomes a cache, and three tokens of one sequence go through a step.
 *
 *     cc -std=c11 hello.c -lkvpool -o hello */
#include <kvpool.h>
#include <stdio.h>
#include <stdlib.h>

static const char CONFIG[] =
    "model = { num_layers = 1, num_q_heads = 4, num_kv_heads = 2, head_dim = 64 }\n"
    "limits = { max_seqs = 2, max_seq_len = 128, max_batch_tokens = 32 }\n"
    "cache = { mode = 'paged', format = 'f16' }\n";

/* Ends the program where a call failed, with what the library says about it. */
static void must(kvpool_status_t status) {
    kvpool_error_t error;
    if (status == KVPOOL_OK) return;
    kvpool_last_error(KVPOOL_OUT(error));
    fprintf(stderr, "%s: %s\n", kvpool_status_name(status), error.message);
    exit(1);
}

int main(void) {
    kvpool_config_t config;
    kvpool_plan_t plan;
    kvpool_cache_t cache;
    must(kvpool_config_parse(CONFIG, sizeof(CONFIG) - 1, "hello.toml", NULL, 0, &config));
    must(kvpool_plan_new(config, &plan));
    must(kvpool_cache_open(plan, &cache));

    const uint32_t prompt[3] = {11, 12, 13};
    kvpool_begun_t begun;
    must(kvpool_cache_begin(cache, prompt, 3, NULL, KVPOOL_OUT(begun)));

    float k[3 * 2 * 64], v[3 * 2 * 64], q[3 * 4 * 64], out[3 * 4 * 64];
    for (int i = 0; i < 3 * 2 * 64; ++i) k[i] = 0.5f, v[i] = 1.0f;
    for (int i = 0; i < 3 * 4 * 64; ++i) q[i] = 0.1f;
    const kvpool_tensor_t k_tensor = {k, 3 * 2 * 64, KVPOOL_F32, KVPOOL_HOST};
    const kvpool_tensor_t v_tensor = {v, 3 * 2 * 64, KVPOOL_F32, KVPOOL_HOST};
    const kvpool_tensor_t q_tensor = {q, 3 * 4 * 64, KVPOOL_F32, KVPOOL_HOST};
    const kvpool_tensor_t out_tensor = {out, 3 * 4 * 64, KVPOOL_F32, KVPOOL_HOST};

    const kvpool_step_item_t item = {begun.sequence, 3, 0};
    kvpool_step_t step;
    must(kvpool_cache_reserve(cache, &item, 1, prompt, 3, &step));
    must(kvpool_step_append(cache, step, 0, &k_tensor, &v_tensor));
    must(kvpool_step_attend(cache, step, 0, &q_tensor, &out_tensor, NULL));
    must(kvpool_step_commit(cache, step));
    printf("kvpool %s: the attention of the third token begins with %.3f\n", kvpool_version(),
           out[2 * 4 * 64]);

    must(kvpool_cache_release(cache, begun.sequence));
    must(kvpool_cache_check(cache));
    must(kvpool_cache_close(cache));
    must(kvpool_plan_destroy(plan));
    must(kvpool_config_destroy(config));
    return 0;
}
