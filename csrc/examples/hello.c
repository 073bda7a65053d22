/* Three tokens of one sequence through a step: cc -std=c11 hello.c -lkvpool -o hello */
#include <kvpool.h>
#include <stdio.h>

int main(void) {
    const char text[] =
        "model = { num_layers = 1, num_q_heads = 1, num_kv_heads = 1, head_dim = 64 }\n"
        "limits = { max_seqs = 2, max_seq_len = 64, max_batch_tokens = 8 }\ncache = { mode = 'paged' }";
    const uint32_t ids[3] = {11, 12, 13};
    float qkv[3 * 64] = {3}, out[3 * 64]; /* queries, keys and values at once */
    const kvpool_tensor_t in = {qkv, 3 * 64, KVPOOL_F32, KVPOOL_HOST};
    const kvpool_tensor_t result = {out, 3 * 64, KVPOOL_F32, KVPOOL_HOST};
    kvpool_config_t config;
    kvpool_plan_t plan;
    kvpool_cache_t cache;
    kvpool_begun_t seq;
    kvpool_step_t step;
    if (kvpool_config_parse(text, sizeof(text) - 1, "hello", NULL, 0, &config) ||
        kvpool_plan_new(config, &plan) || kvpool_cache_open(plan, &cache) ||
        kvpool_cache_begin(cache, ids, 3, NULL, KVPOOL_OUT(seq)) ||
        kvpool_cache_reserve(cache, &(kvpool_step_item_t){seq.sequence, 3, 0}, 1, ids, 3, &step) ||
        kvpool_step_append(cache, step, 0, &in, &in) ||
        kvpool_step_attend(cache, step, 0, &in, &result, NULL) || kvpool_step_commit(cache, step) ||
        kvpool_cache_close(cache) || kvpool_plan_destroy(plan) || kvpool_config_destroy(config)) {
        kvpool_error_t error; /* every call gives KVPOOL_OK, which is 0, or what went wrong */
        kvpool_last_error(KVPOOL_OUT(error));
        return fprintf(stderr, "%s\n", error.message), 1;
    }
    return printf("the attention of the third token begins with %.3f\n", out[2 * 64]) < 0;
}
