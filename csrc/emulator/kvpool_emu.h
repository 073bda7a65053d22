/* What the emulated driver offers beyond the real one, for tests: exported by libcuda.so beside the cu* functions. */
#ifndef KVPOOL_EMU_H
#define KVPOOL_EMU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* That this is the emulated driver; the number grows when something here changes its meaning. */
uint32_t kvpool_emu_version(void);

/* How often since the last reset: "launches", "allocations", "host_allocations", "frees", "synchronisations" (of the host),
 * "copies_to_device", "copies_to_host", "copies_on_device", "fills", "bytes_to_device", "bytes_to_host", "modules",
 * "events", "streams" (made), "graph_launches" (what is captured counts when it is captured), "failures" (planned ones that
 * came). How many now: "live_allocations", "live_bytes", "live_host_allocations", "live_host_bytes", "live_modules",
 * "live_events", "live_streams", "live_contexts" (holds on the primary context), "pending" (operations in queues).
 * UINT64_MAX for any other name. */
uint64_t kvpool_emu_counter(const char *name);

/* What a kernel moved in all its launches: {bytes read, bytes written, sectors read, sectors written}, after doing what is
 * in the queues. Returns the number of launches. */
uint64_t kvpool_emu_traffic(const char *kernel, uint64_t out[4]);

/* The whole count: {launches, blocks, bytes read, sectors read, read instructions, bytes written, sectors written,
 * write instructions, atomics, bank conflicts}. */
void kvpool_emu_traffic_full(const char *kernel, uint64_t out[10]);

/* Calls fn for every kernel that has been launched since the last reset. */
void kvpool_emu_each_kernel(void (*fn)(const char *kernel, void *data), void *data);

/* Calls fn for every entry point that has been called since the last reset, and how often. */
void kvpool_emu_each_call(void (*fn)(const char *call, uint64_t count, void *data), void *data);

/* All counts but the live ones to 0; what is in the queues is done first. */
void kvpool_emu_reset_counters(void);

/* As KVPOOL_EMU_FAIL, at run time: "call:n:code", several with commas; NULL forgets all. Returns 0 when it is not that. */
int kvpool_emu_fail(const char *plan);

/* The entry point or kernel to which the last planned failure came; "" when none did. Valid until the next call. */
const char *kvpool_emu_last_failure(void);

/* As KVPOOL_EMU_SEED, at run time. */
void kvpool_emu_set_seed(uint64_t seed);

/* What the last failed launch did wrong and where; "" when none failed. Valid until the next call. */
const char *kvpool_emu_last_fault(void);

#ifdef __cplusplus
}
#endif
#endif
