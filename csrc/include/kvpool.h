/*
 * kvpool: a static pooled KV-cache runtime for large-language-model inference. The C interface.
 *
 * The way of a value: a TOML file becomes a config, a config becomes a plan (every size and offset;
 * nothing is allocated), a plan is opened on a device and becomes a cache. Sequences live in a cache;
 * tokens enter them in steps. See README.md, "From C++", for the way to a first program, and
 * csrc/examples/ for whole ones. kvpool.hpp is a C++17 layer on top.
 *
 * RULES
 *
 * Status. Every function that can fail gives a kvpool_status_t; KVPOOL_OK is 0. What went wrong, with
 * the numbers and the setting to change, is kept for each thread: kvpool_last_error. A function
 * that fails has changed nothing: no sequence, block, counter or event, unless its comment says so,
 * and has written none of its outputs. (Those that begin sequences count what they refuse: refused_... of
 * kvpool_stats_t.) KVPOOL_DEVICE alone is another matter, since the device failed on the way: sequences, their
 * tokens and what is promised are as before, but cached blocks and slots whose tokens were given up for the
 * call are not found again, with their events, counters of evictions and copies have counted them, free and
 * cached blocks may have another order, and the outputs of attend, export and read are not valid. A status
 * keeps its number for ever; one that is retired is not used again. A later library may give statuses that
 * this header does not know.
 *
 * Panics. A defect of kvpool that would end a Rust program gives KVPOOL_PANIC (in a kernel of the CPU device:
 * KVPOOL_DEVICE, and nothing is poisoned). If it was met in a verb or a reader of a cache, the cache is
 * poisoned: its state is not to be trusted, and every later call with it gives KVPOOL_POISONED,
 * kvpool_cache_close excepted. Other caches are not concerned. Nothing is thrown through this interface, and
 * nothing may be thrown or longjmp'ed out of a callback.
 *
 * Ownership. Handles are values of 16 bytes that hold a kind, a generation and a place; copy them as you
 * like. All zeros is no object. A handle of something that is gone, was never given out, is of another
 * kind or belongs to another cache gives a status, for ever: never another object's data. What
 * kvpool_config_load, kvpool_config_parse, kvpool_plan_new, and kvpool_cache_open give is the caller's,
 * until the function named ..._destroy or ..._close takes it back. They do not depend on one another: a
 * config may go before its plan, and a plan before its cache. Sequences, pins, reservations and the step go
 * with their cache.
 *
 * Pointers. Every pointer is checked for NULL, and for its alignment where the type asks for one; NULL is
 * right only where a comment says so, or for an array of length 0. Inputs are read during the call and not
 * kept. An output overlaps no input. Strings are UTF-8. Buffers are followed by their size.
 *
 * Structs. Those with a member `size` may grow in later versions. In one that goes in, set `size` to sizeof,
 * or begin with its ..._INIT, which also sets every default. One that comes out is followed by its size, as
 * in kvpool_cache_stats(cache, KVPOOL_OUT(stats)). Any size but that of this version of the library gives
 * KVPOOL_BAD_SIZE. Members named `reserved` must be 0 in what goes in (KVPOOL_BAD_ARGUMENT): a later version
 * may give them a meaning.
 *
 * Threads. "Any" below: may be called by any thread at any time, beside every other function. "Reader": the
 * same, but it waits while a verb or another reader of the same cache is under way. "Verb": one at a time for
 * each cache; a second thread gets KVPOOL_BUSY, at once and without any effect, and so does a callback that
 * calls back. A verb waits for the readers that are under way; most are over at once, but not _check and
 * _digest, nor _save_prefixes, _save_sequence, _export and _read of many bytes. Whoever waits comes before
 * those who come later, so none is kept out. A callback may call no verb and no reader, of any cache
 * (KVPOOL_BUSY): so different caches never wait for each other. A cache is not tied to the thread that opened it.
 * The library's own threads take none of the process's signals.
 *
 * After fork(2) the child of a process that had opened a cache, even one that is closed again, may close caches,
 * or end, and nothing else: the worker threads are not there. On Linux it waits for nobody, whatever other threads
 * were doing: closing gives KVPOOL_OK, and everything else that takes or makes a handle KVPOOL_STALE_HANDLE. A
 * server that forks its workers opens its caches in them, and none before.
 *
 * - Any: everything without a cache; kvpool_cache_get_..., kvpool_cache_text and kvpool_cache_dlpack; the four
 *   calls whose names end in _later;
 *   kvpool_cache_probe (in a plan with contiguous layers it is a reader: what their slots hold is known to
 *   the cache alone).
 * - Reader: kvpool_cache_stats, _group_stats, _evictions, _check, _digest, _export, _read,
 *   _check_admission, _reservations, _block_of, _block_refs, _namespace_numbers, _save_prefixes,
 *   _save_sequence; kvpool_seq_get_info.
 * - Verb: everything else, kvpool_cache_close included.
 *
 * One step at a time. While a step is open, verbs that are not of the step give KVPOOL_STEP_OPEN, but for
 * kvpool_cache_poll_events, kvpool_cache_resync_events, kvpool_cache_synchronize, kvpool_cache_cancel_step
 * and kvpool_cache_close.
 *
 * Giving back later. kvpool_cache_release_later, kvpool_cache_unpin_later, kvpool_cache_cancel_reservation_later
 * and kvpool_step_cancel_later are for destructors and for threads other than the one that serves: they are never
 * refused for an open step or another thread's verb, wait for nobody and make nobody busy. What the handle names
 * goes at once where nobody is in the cache and no step is open, otherwise as soon as that is so, at the latest
 * before the next verb or reader of the cache sees anything; an open step that is given back goes before all
 * others. (From within a callback nothing goes at once.) Until then it is there, and its handle good. A handle whose object is gone by then does nothing.
 * KVPOOL_BUSY: more wait than the cache has sequences, reservations and pins, which only handles that are given
 * back more than once can do.
 *
 * Memory. After kvpool_cache_open no call of a cache allocates, on the host or on the device, failing calls
 * included; kvpool_cache_text and kvpool_cache_check are the exceptions, and the functions that save and
 * restore, which say what they take. Pointers into
 * the pool and its tables stay the same for the life of the cache.
 *
 * Units. Sizes and strides of memory are in bytes, lengths of tensors in elements, lengths of sequences in
 * tokens, times in milliseconds. Shapes stand in brackets, the last dimension contiguous.
 */
#ifndef KVPOOL_H
#define KVPOOL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The version of this header, and of its binary interface: a library is right for a program when
 * kvpool_abi_version() gives the KVPOOL_ABI_VERSION that the program was compiled with. */
#define KVPOOL_VERSION_MAJOR 0
#define KVPOOL_VERSION_MINOR 1
#define KVPOOL_VERSION_PATCH 0
#define KVPOOL_VERSION "0.1.0"
#define KVPOOL_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#define KVPOOL_NOEXCEPT noexcept
#else
#define KVPOOL_NOEXCEPT
#endif

/* ---------------------------------------------------------------- Status */

typedef int32_t kvpool_status_t;
enum {
    KVPOOL_OK = 0,

    /* The call itself is wrong. */
    KVPOOL_NULL_POINTER = 1,     /* a pointer that must not be NULL */
    KVPOOL_BAD_SIZE = 2,         /* the size of a struct is not that of this version of the library */
    KVPOOL_BAD_ARGUMENT = 3,     /* a number without meaning, text that is not UTF-8, a misaligned pointer */
    KVPOOL_BAD_HANDLE = 4,       /* no handle of this kind: zero, forged, or of another kind */
    KVPOOL_STALE_HANDLE = 5,     /* what it names is gone */
    KVPOOL_FOREIGN_HANDLE = 6,   /* it belongs to another cache */
    KVPOOL_BUFFER_TOO_SMALL = 7, /* for the text: "wanted" of kvpool_last_error says what it takes */
    KVPOOL_BUSY = 8,             /* another thread, or a callback's caller, is in a verb of this cache */
    KVPOOL_STEP_OPEN = 9,        /* commit or cancel the step first */
    KVPOOL_WRONG_SHAPE = 10,     /* a tensor or a list of the wrong length */
    KVPOOL_OVERLAP = 11,         /* an output overlaps an input */
    KVPOOL_NO_SUCH_LAYER = 12,
    KVPOOL_NO_SUCH_GROUP = 13, /* no such layer group, or not of the kind that the call needs */

    /* A defect of kvpool. */
    KVPOOL_PANIC = 20,
    KVPOOL_POISONED = 21,  /* this cache met a panic before */
    KVPOOL_INVARIANT = 22, /* kvpool_cache_check found its state to be wrong */

    /* Opening. */
    KVPOOL_CONFIG = 30,           /* the file, or a setting of it */
    KVPOOL_PLAN = 31,             /* settings that cannot be planned */
    KVPOOL_MEMORY_TOO_SMALL = 32, /* the plan does not fit: "wanted" and "available" are bytes */
    KVPOOL_NO_DEVICE = 33,     /* the device cannot be used here: no driver, no such GPU, no kernels, ... */
    KVPOOL_OUT_OF_MEMORY = 34, /* the system or the driver refused an allocation */
    KVPOOL_TOO_MANY_OBJECTS = 35, /* more open configs, plans or caches than one process can have */

    /* Not admitted, or not now. */
    KVPOOL_NO_SEQ_SLOT = 40,     /* as many sequences are alive as the plan has places */
    KVPOOL_NOT_ADMITTED = 41,    /* too few blocks now */
    KVPOOL_NEVER_FITS = 42,      /* too few blocks in the whole pool */
    KVPOOL_TOO_LONG = 43,        /* more tokens than the sequence may have */
    KVPOOL_DUPLICATE_KEY = 44,   /* a sequence with this key is alive */
    KVPOOL_BATCH_UNDER_WAY = 45, /* admission "static-batch": the batch that runs has not ended */
    KVPOOL_POOL_EXHAUSTED = 46,  /* a step needs more blocks than are free: preempt or release */
    KVPOOL_STEP_TOO_LARGE = 47,  /* more tokens than a step may have */
    KVPOOL_NO_PIN = 48,          /* all pins are in use */
    KVPOOL_NO_VIEW = 49,         /* all DLPack views are in use */
    KVPOOL_NOBODY = 50,          /* kvpool_cache_preempt_youngest: nobody to preempt */

    /* Verbs in the wrong state. */
    KVPOOL_BAD_STEP = 60,       /* a sequence twice in a step, or with 0 tokens */
    KVPOOL_TOKEN_MISMATCH = 61, /* a token of a step is not the prompt's */
    KVPOOL_NOT_APPENDED = 62,   /* attended or committed before every layer was appended */
    KVPOOL_ALREADY_APPENDED = 63,
    KVPOOL_NOT_HELD = 64, /* the tokens are not there, or not any more */
    KVPOOL_BAD_RETENTION = 65,
    KVPOOL_REUSE_OFF = 66, /* the plan shares no prefixes, or none in blocks */
    KVPOOL_NOTHING_TO_PIN = 67,
    KVPOOL_RESERVATIONS_HELD = 68,
    KVPOOL_PINS_ALIVE = 69,
    KVPOOL_SEQUENCES_ALIVE = 70,
    KVPOOL_TOO_MANY_REFS = 71, /* a block has as many holders as can be counted */
    KVPOOL_KEY_TOO_LONG = 72,  /* more than KVPOOL_KEY_BYTES bytes */

    /* A device call failed. */
    KVPOOL_DEVICE = 80,
    KVPOOL_WRONG_MEMORY = 81, /* host memory for what must be the device's, or the reverse */

    /* Save and restore. */
    KVPOOL_SAVE_IO = 90,        /* the file cannot be written or read */
    KVPOOL_SAVE_UNDER_WAY = 91, /* another save to the same file is under way */
    KVPOOL_SAVE_DAMAGED = 92,   /* not a save, cut off, or a checksum that is wrong */
    KVPOOL_SAVE_MISMATCH = 93   /* of another version, kind, geometry, format, model or epoch */
};

/* The name of a status, such as "KVPOOL_NOT_ADMITTED"; "unknown status" for others. Never NULL. Any */
const char *kvpool_status_name(kvpool_status_t status) KVPOOL_NOEXCEPT;

/* Stands for "no number" in kvpool_error_t. */
#define KVPOOL_NO_NUMBER UINT64_MAX

/* The last failure of the calling thread. */
typedef struct kvpool_error {
    size_t size;
    kvpool_status_t status; /* KVPOOL_OK if nothing has failed on this thread yet */
    uint32_t line;          /* of a file; 0 if none is meant */
    uint64_t wanted;        /* what was asked for, in the unit that the message says; KVPOOL_NO_NUMBER */
    uint64_t available;     /* what there is; KVPOOL_NO_NUMBER */
    uint64_t index;     /* which entry of an array was refused; KVPOOL_NO_NUMBER where it was all of them */
    char knob[64];      /* the setting to change, as "pool.capacity"; "" if none */
    char message[1024]; /* one sentence: what, where, and what to do. Cut to fit */
} kvpool_error_t;

/* Copies the calling thread's last failure, which calls that succeed leave as it is, as this one does. The
 * message is made now, for which this call may allocate for a moment. Any */
kvpool_status_t kvpool_last_error(kvpool_error_t *out, size_t out_size) KVPOOL_NOEXCEPT;

/* For an output struct and its size. */
#define KVPOOL_OUT(object) &(object), sizeof(object)

/* ---------------------------------------------------------------- Version */

/* KVPOOL_ABI_VERSION and KVPOOL_VERSION of the library. Any */
uint32_t kvpool_abi_version(void) KVPOOL_NOEXCEPT;
const char *kvpool_version(void) KVPOOL_NOEXCEPT;

/* ---------------------------------------------------------------- Handles */

typedef struct kvpool_config {
    uint64_t word[2];
} kvpool_config_t;
typedef struct kvpool_plan {
    uint64_t word[2];
} kvpool_plan_t;
typedef struct kvpool_cache {
    uint64_t word[2];
} kvpool_cache_t;
typedef struct kvpool_seq {
    uint64_t word[2];
} kvpool_seq_t;
typedef struct kvpool_step {
    uint64_t word[2];
} kvpool_step_t;
typedef struct kvpool_pin {
    uint64_t word[2];
} kvpool_pin_t;
typedef struct kvpool_reservation {
    uint64_t word[2];
} kvpool_reservation_t;
typedef struct kvpool_block {
    uint64_t word[2];
} kvpool_block_t;

/* ---------------------------------------------------------------- Config */

/* Loads a TOML file. `overrides` are settings as "limits.max_seqs=8", which win over the file; messages call
 * them --set, as the command line does. Any KVPOOL_CONFIG says which file, line and key, and what was expected. */
kvpool_status_t kvpool_config_load(const char *path, const char *const *overrides, size_t num_overrides,
                                   kvpool_config_t *out) KVPOOL_NOEXCEPT;

/* The same with the text itself, of `text_len` bytes; `name` stands for the file in messages. Relative paths
 * in it are relative to the folder of `name`. Any */
kvpool_status_t kvpool_config_parse(const char *text, size_t text_len, const char *name,
                                    const char *const *overrides, size_t num_overrides,
                                    kvpool_config_t *out) KVPOOL_NOEXCEPT;

kvpool_status_t kvpool_config_destroy(kvpool_config_t config) KVPOOL_NOEXCEPT;

/* What a text is written as. */
typedef int32_t kvpool_text_form_t;
enum { KVPOOL_TEXT = 0, KVPOOL_JSON = 1 };

/* The effective configuration, every default filled in: TOML, or JSON. Any
 *
 * This and every other text: with `buffer` NULL and `capacity` 0, *needed is set to the bytes that the text
 * takes, its final NUL included. With a buffer, the text is written there and *needed is set;
 * KVPOOL_BUFFER_TOO_SMALL writes nothing. `needed` may be NULL with a buffer. */
kvpool_status_t kvpool_config_text(kvpool_config_t config, kvpool_text_form_t form, char *buffer,
                                   size_t capacity, size_t *needed) KVPOOL_NOEXCEPT;

/* ---------------------------------------------------------------- Plan */

typedef int32_t kvpool_format_t;
enum { KVPOOL_FORMAT_F32 = 0, KVPOOL_FORMAT_F16 = 1, KVPOOL_FORMAT_BF16 = 2, KVPOOL_FORMAT_INT8 = 3 };

/* How INT8 elements are scaled: the value is scale * element. Scales computed on append lie in the cache, 2
 * bytes each; kvpool_scale_to_f32 widens them. */
typedef int32_t kvpool_scale_t;
enum {
    KVPOOL_SCALE_NONE = 0,           /* not INT8 */
    KVPOOL_SCALE_PER_TOKEN_HEAD = 1, /* one for each token and head, computed on append */
    KVPOOL_SCALE_PER_TENSOR = 2,     /* one for K and one for V of a layer, from the config */
    KVPOOL_SCALE_PER_GROUP = 3       /* one for each 32 elements, computed on append */
};

/* A stored scale as a number: it holds bits 30 to 15 of a float that is not negative. */
static inline float kvpool_scale_to_f32(uint16_t scale) KVPOOL_NOEXCEPT {
    uint32_t bits = scale;
    float value;
    bits <<= 15;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

typedef int32_t kvpool_mode_t;
enum { KVPOOL_MODE_CONTIGUOUS = 0, KVPOOL_MODE_PAGED = 1, KVPOOL_MODE_HYBRID = 2 };

typedef int32_t kvpool_admission_t;
enum { KVPOOL_GUARANTEED = 0, KVPOOL_MAX_UTILIZATION = 1, KVPOOL_STATIC_BATCH = 2 };

/* When bytes that nobody holds any more are zeroed ([pool] scrub). */
typedef int32_t kvpool_scrub_t;
enum { KVPOOL_SCRUB_OFF = 0, KVPOOL_SCRUB_ON_RELEASE = 1, KVPOOL_SCRUB_ON_REUSE = 2 };

/* The numbers of a plan. */
typedef struct kvpool_plan_info {
    size_t size;
    kvpool_mode_t mode;
    kvpool_format_t format;
    kvpool_scale_t scale;
    kvpool_admission_t admission;
    uint32_t num_layers;
    uint32_t num_q_heads;
    uint32_t num_kv_heads;
    uint32_t head_dim;
    uint32_t num_groups; /* layer groups */
    uint32_t tokens_per_block;
    uint32_t max_seqs;
    uint32_t max_seq_len;
    uint32_t max_batch_tokens; /* tokens of one step, all sequences together */
    uint32_t max_step_tokens;  /* tokens of one sequence in one step */
    uint32_t max_rewind_tokens;
    uint32_t watermark_blocks;
    uint32_t seq_slots;        /* places for sequences */
    uint32_t full_length_seqs; /* sequences of max_seq_len that are certain to run to their end at once */
    uint32_t max_pins;
    uint32_t prefix_reuse; /* 1 where sequences share prefixes */
    uint32_t rope;         /* 1 where K is rotated by its position when it is appended ([rope]) */
    kvpool_scrub_t scrub;
    uint64_t pool_bytes;      /* the one allocation for K, V and scales */
    uint64_t padding_bytes;   /* of these, bytes that hold nothing */
    uint64_t host_bytes;      /* tables and lists in host memory */
    uint64_t workspace_bytes; /* the device's, beside the pool */
    uint64_t bytes_per_token; /* in all layers, windows aside */
    uint64_t capacity_tokens; /* that fit, over all sequences */
} kvpool_plan_info_t;

typedef int32_t kvpool_group_kind_t;
enum { KVPOOL_CONTIGUOUS = 0, KVPOOL_PAGED = 1 };

/* How a position of a sequence leads to its place. */
typedef int32_t kvpool_addressing_t;
enum {
    KVPOOL_BLOCKS = 0, /* block_table[slot][position / unit_tokens], then position % unit_tokens */
    KVPOOL_SLOT = 1,   /* unit = slot, token = position */
    KVPOOL_RING = 2    /* unit = slot; positions below sink_tokens are their own token, the others
                          sink_tokens + (position - sink_tokens) % ring_tokens */
};

/* How a group takes part when sequences share a prefix. */
typedef int32_t kvpool_reuse_t;
enum { KVPOOL_REUSE_NONE = 0, KVPOOL_REUSE_INDEX = 1, KVPOOL_REUSE_ATTACHED = 2, KVPOOL_REUSE_DONOR = 3 };

/* A layer group: the layers with the same kind, window and format. */
typedef struct kvpool_group_info {
    size_t size;
    kvpool_group_kind_t kind;
    kvpool_addressing_t addressing;
    kvpool_reuse_t reuse;
    uint32_t window;      /* keys that a query may see, itself included; 0 = all */
    uint32_t sink_tokens; /* tokens at the start that stay visible in a windowed group */
    uint32_t ring_tokens; /* KVPOOL_RING: tokens of the ring */
    uint32_t num_layers;
    uint32_t units; /* blocks of a paged group, slots of a contiguous one */
    uint32_t unit_tokens;
    uint32_t max_blocks_per_seq; /* entries of a row of the block table; 0 in a contiguous group */
    uint64_t unit_bytes;
    uint64_t offset;          /* of unit 0 in the pool */
    uint64_t bytes_per_token; /* K, V and scales, in the group's layers */
} kvpool_group_info_t;

/* Where a layer's K and V lie. The vector of `head_dim` elements of a token slot (a token's place in the
 * group: unit * unit_tokens + token) begins at
 *   k + unit * unit_stride + head * head_stride + token * token_stride
 * and its scales, 2 bytes each, at
 *   k_scales + unit * unit_stride + head * scale_head_stride + token * scale_token_stride. */
typedef struct kvpool_layer {
    size_t size;
    uint32_t group;
    uint32_t index_in_group;
    kvpool_format_t format;
    kvpool_scale_t scale;
    uint32_t num_kv_heads;
    uint32_t head_dim;
    uint32_t units;
    uint32_t unit_tokens;
    uint32_t scales_per_row; /* scales of a vector in the cache; 0 where there are none */
    uint32_t reserved;
    float k_static_scale; /* KVPOOL_SCALE_PER_TENSOR */
    float v_static_scale;
    uint64_t k_offset; /* from the pool's first byte */
    uint64_t v_offset;
    uint64_t k_scales_offset; /* 0 where scales_per_row is 0 */
    uint64_t v_scales_offset;
    uint64_t unit_stride;
    uint64_t head_stride;
    uint64_t token_stride;
    uint64_t scale_head_stride;
    uint64_t scale_token_stride;
    void *k; /* addresses in the device's memory; NULL from a plan, which has none */
    void *v;
    void *k_scales; /* NULL where scales_per_row is 0 */
    void *v_scales;
} kvpool_layer_t;

/* Plans the config for its device. Nothing is allocated, and the device is only looked at where the capacity
 * is a share of what it has free. Any KVPOOL_PLAN, KVPOOL_NO_DEVICE. */
kvpool_status_t kvpool_plan_new(kvpool_config_t config, kvpool_plan_t *out) KVPOOL_NOEXCEPT;
kvpool_status_t kvpool_plan_destroy(kvpool_plan_t plan) KVPOOL_NOEXCEPT;

kvpool_status_t kvpool_plan_get_info(kvpool_plan_t plan, kvpool_plan_info_t *out,
                                     size_t out_size) KVPOOL_NOEXCEPT;
kvpool_status_t kvpool_plan_get_group(kvpool_plan_t plan, uint32_t group, kvpool_group_info_t *out,
                                      size_t out_size) KVPOOL_NOEXCEPT;
kvpool_status_t kvpool_plan_get_layer(kvpool_plan_t plan, uint32_t layer, kvpool_layer_t *out,
                                      size_t out_size) KVPOOL_NOEXCEPT;
/* The plan as people read it, or all its numbers as JSON. */
kvpool_status_t kvpool_plan_text(kvpool_plan_t plan, kvpool_text_form_t form, char *buffer, size_t capacity,
                                 size_t *needed) KVPOOL_NOEXCEPT;

/* Blocks of a group that a sequence of `len` tokens may come to hold at most; 0 in a contiguous group.
 * KVPOOL_TOO_LONG beyond limits.max_seq_len. */
kvpool_status_t kvpool_plan_blocks_for(kvpool_plan_t plan, uint32_t group, uint32_t len,
                                       uint32_t *out) KVPOOL_NOEXCEPT;

/* Rotates vectors by their tokens' positions as K is rotated when it is appended, bit for bit: for queries
 * that lie in host memory, which attend takes rotated. `x` and `out`: [num_tokens, num_heads, head_dim] of
 * `len` elements in all; `out` may be `x` itself, and otherwise does not overlap it. Each angle is computed
 * anew. KVPOOL_BAD_ARGUMENT where the config has no [rope], KVPOOL_WRONG_SHAPE, KVPOOL_NO_SUCH_LAYER, and
 * KVPOOL_TOO_LONG for a position that the plan does not reach. */
kvpool_status_t kvpool_plan_rotate(kvpool_plan_t plan, uint32_t layer, const uint32_t *positions,
                                   size_t num_tokens, uint32_t num_heads, const float *x, float *out,
                                   size_t len) KVPOOL_NOEXCEPT;

/* ---------------------------------------------------------------- Cache: open, look, close */

/* Opens a cache: checks that the plan fits, then allocates all that the cache will ever need. Any
 * KVPOOL_MEMORY_TOO_SMALL (nothing was allocated), KVPOOL_NO_DEVICE, KVPOOL_OUT_OF_MEMORY, KVPOOL_DEVICE. */
kvpool_status_t kvpool_cache_open(kvpool_plan_t plan, kvpool_cache_t *out) KVPOOL_NOEXCEPT;

/* Ends a cache, with everything in it. DLPack views that are still out keep the device and the pool's memory
 * until the last is deleted. Verb; KVPOOL_BUSY while a verb is under way; waits for readers. Works on a
 * poisoned cache. */
kvpool_status_t kvpool_cache_close(kvpool_cache_t cache) KVPOOL_NOEXCEPT;

/* As those of the plan; the layer with addresses. */
kvpool_status_t kvpool_cache_get_plan_info(kvpool_cache_t cache, kvpool_plan_info_t *out,
                                           size_t out_size) KVPOOL_NOEXCEPT;
kvpool_status_t kvpool_cache_get_group(kvpool_cache_t cache, uint32_t group, kvpool_group_info_t *out,
                                       size_t out_size) KVPOOL_NOEXCEPT;
kvpool_status_t kvpool_cache_get_layer(kvpool_cache_t cache, uint32_t layer, kvpool_layer_t *out,
                                       size_t out_size) KVPOOL_NOEXCEPT;

/* The effective configuration and the plan that the cache was opened with, and its device. */
kvpool_status_t kvpool_cache_text(kvpool_cache_t cache, kvpool_text_form_t form, char *buffer,
                                  size_t capacity, size_t *needed) KVPOOL_NOEXCEPT;

typedef int32_t kvpool_device_kind_t;
enum { KVPOOL_CPU = 0, KVPOOL_CUDA = 1 };

typedef struct kvpool_device_info {
    size_t size;
    kvpool_device_kind_t kind;
    uint32_t threads;    /* that compute, the calling one included; multiprocessors of a GPU */
    uint32_t huge_pages; /* 1 if the pool lies in huge pages, as far as the system says */
    uint32_t emulated;   /* 1 for CUDA kernels that the host executes, in tests */
    uint64_t pool_bytes;
    uint64_t workspace_bytes;
    const char *kernel; /* such as "avx512+vnni"; lives as long as the library */
} kvpool_device_info_t;

kvpool_status_t kvpool_cache_get_device(kvpool_cache_t cache, kvpool_device_info_t *out,
                                        size_t out_size) KVPOOL_NOEXCEPT;

/* The pool's first byte, in the device's memory, and its bytes. The caller's kernels may read it, and write
 * the token slots of an open step: on the CPU while no verb, kvpool_cache_export or kvpool_cache_read of the
 * cache is under way, on a GPU in the cache's stream, or ordered with it. */
kvpool_status_t kvpool_cache_get_pool(kvpool_cache_t cache, void **base, uint64_t *bytes) KVPOOL_NOEXCEPT;

/* Which part of a layer. */
typedef int32_t kvpool_part_t;
enum { KVPOOL_K = 0, KVPOOL_V = 1, KVPOOL_K_SCALES = 2, KVPOOL_V_SCALES = 3 };

struct DLManagedTensor; /* of dlpack.h */

/* A view of a layer's K, V or scales as a DLPack tensor, without copying: [units, num_kv_heads, unit_tokens,
 * head_dim], the last dimension scales_per_row for scales, which are of type uint16. The view keeps the
 * pool's memory alive, not its contents; call its deleter once, on any thread. KVPOOL_NO_VIEW when 8 views
 * for each layer are out already. */
kvpool_status_t kvpool_cache_dlpack(kvpool_cache_t cache, uint32_t layer, kvpool_part_t part,
                                    struct DLManagedTensor **out) KVPOOL_NOEXCEPT;

/* CUDA: all work from here on goes into the caller's stream (CUstream or cudaStream_t, made in the GPU's
 * primary context), behind what was put into the one before; NULL is the default stream. It must live until
 * another is set, or the cache is closed. CU_STREAM_PER_THREAD is refused with KVPOOL_BAD_ARGUMENT: it is
 * another stream in each thread, and a cache may change threads. KVPOOL_WRONG_MEMORY on the CPU. */
kvpool_status_t kvpool_cache_set_stream(kvpool_cache_t cache, void *stream) KVPOOL_NOEXCEPT;

/* Waits for the work that was put into the stream. On the CPU there is none. KVPOOL_DEVICE: what went wrong
 * in it. */
kvpool_status_t kvpool_cache_synchronize(kvpool_cache_t cache) KVPOOL_NOEXCEPT;

/* ---------------------------------------------------------------- Sequences */

/* A salt, an adapter's or a model's id. Absent, empty and 0 are three different things. */
#define KVPOOL_KEY_BYTES 47
typedef int32_t kvpool_key_kind_t;
enum { KVPOOL_KEY_ABSENT = 0, KVPOOL_KEY_IS_BYTES = 1, KVPOOL_KEY_IS_NUMBER = 2 };
typedef struct kvpool_key_part {
    kvpool_key_kind_t kind;
    uint32_t num_bytes;   /* at most KVPOOL_KEY_BYTES; give a digest of what is longer */
    const uint8_t *bytes; /* [num_bytes] */
    uint64_t number;
} kvpool_key_part_t;

/* What a prompt's blocks are told apart by, beside their tokens: sequences share only with those of the same
 * namespace. What K and V depend on and can differ between sequences of a cache (position scaling, images of
 * the prompt, ...) belongs into one of the parts. */
typedef struct kvpool_namespace {
    kvpool_key_part_t salt;    /* keeps a tenant's tokens private, from salt_from on */
    kvpool_key_part_t adapter; /* that computes K and V */
    kvpool_key_part_t model;
    uint32_t salt_from; /* position of the first salted token, rounded down to a block */
    uint32_t reserved;
} kvpool_namespace_t;

/* How long a range of tokens is kept for others. */
#define KVPOOL_MAX_RETENTIONS 4
#define KVPOOL_TO_END UINT32_MAX
#define KVPOOL_FOREVER UINT64_MAX
typedef struct kvpool_retention {
    uint32_t from;     /* first token */
    uint32_t to;       /* end, not included; KVPOOL_TO_END */
    uint32_t priority; /* 0 to 100; 0 is evicted first. What has no range has 35 */
    uint32_t reserved;
    uint64_t duration_ms; /* after the last sequence has released it; KVPOOL_FOREVER */
} kvpool_retention_t;

typedef struct kvpool_begin_options {
    size_t size;
    uint64_t key;              /* the engine's name; no two live sequences have the same */
    uint32_t has_key;          /* not 0: `key` counts */
    uint32_t max_len;          /* tokens, prompt and output together; 0 = limits.max_seq_len */
    uint32_t lookahead_tokens; /* beyond max_len, that speculative decoding may append and rewind */
    uint32_t num_retentions;   /* at most KVPOOL_MAX_RETENTIONS; 0 where no prefixes are kept in blocks */
    const kvpool_retention_t *retentions; /* [num_retentions] */
    kvpool_namespace_t name_space;
} kvpool_begin_options_t;

/* All defaults. */
#ifdef __cplusplus
#define KVPOOL_BEGIN_OPTIONS_INIT                                                                            \
    (kvpool_begin_options_t{sizeof(kvpool_begin_options_t), 0, 0, 0, 0, 0, nullptr, {}})
#else
#define KVPOOL_BEGIN_OPTIONS_INIT                                                                            \
    {sizeof(kvpool_begin_options_t),                                                                         \
     0,                                                                                                      \
     0,                                                                                                      \
     0,                                                                                                      \
     0,                                                                                                      \
     0,                                                                                                      \
     NULL,                                                                                                   \
     {{0, 0, NULL, 0}, {0, 0, NULL, 0}, {0, 0, NULL, 0}, 0, 0}}
#endif

typedef struct kvpool_begun {
    size_t size;
    kvpool_seq_t sequence;
    uint32_t cached_len; /* tokens of the prompt that are in the cache: the first step appends from here on.
                            Less than the prompt, unless that is empty */
    uint32_t limit;      /* tokens that the sequence may have, look-ahead included */
} kvpool_begun_t;

/* Begins a sequence with a prompt. `options` may be NULL: all defaults.
 * KVPOOL_TOO_LONG, KVPOOL_NEVER_FITS: waiting does not help. KVPOOL_NO_SEQ_SLOT, KVPOOL_NOT_ADMITTED,
 * KVPOOL_BATCH_UNDER_WAY: try again when a sequence was released. KVPOOL_DUPLICATE_KEY, KVPOOL_BAD_RETENTION,
 * KVPOOL_KEY_TOO_LONG. KVPOOL_REUSE_OFF: a retention, where the plan keeps no prefixes in blocks. */
kvpool_status_t kvpool_cache_begin(kvpool_cache_t cache, const uint32_t *prompt, size_t prompt_len,
                                   const kvpool_begin_options_t *options, kvpool_begun_t *out,
                                   size_t out_size) KVPOOL_NOEXCEPT;

typedef struct kvpool_begin_item {
    const uint32_t *prompt; /* [prompt_len] */
    size_t prompt_len;
    const kvpool_begin_options_t *options; /* or NULL */
} kvpool_begin_item_t;

/* Begins several sequences, all or none; what each finds in the cache is claimed before anything is evicted
 * for any. `out` is [num_items], and `out_size` the size of one entry. "index" of kvpool_last_error is the
 * first entry that was refused, or is wrong in itself. More than seq_slots never begin together
 * (KVPOOL_NO_SEQ_SLOT with an index of seq_slots). */
kvpool_status_t kvpool_cache_begin_batch(kvpool_cache_t cache, const kvpool_begin_item_t *items,
                                         size_t num_items, kvpool_begun_t *out,
                                         size_t out_size) KVPOOL_NOEXCEPT;

/* A second sequence with the same tokens. Blocks are shared; the first write that differs copies. Contiguous
 * layers copy at once, and blocks within the look-ahead too. It is admitted as begin does it:
 * KVPOOL_NO_SEQ_SLOT, KVPOOL_NOT_ADMITTED, KVPOOL_BATCH_UNDER_WAY, KVPOOL_TOO_MANY_REFS. */
kvpool_status_t kvpool_cache_fork(kvpool_cache_t cache, kvpool_seq_t sequence,
                                  kvpool_seq_t *out) KVPOOL_NOEXCEPT;

/* Rewinds to `len` tokens, and forgets what the prompt had behind them; to the length that it has, nothing
 * changes. KVPOOL_NOT_HELD: it is not as long ("available" is its length), or a windowed layer has lost what
 * it would need ("available" is the shortest length left). KVPOOL_NOT_ADMITTED: guaranteed admission would
 * have to promise again what others share, and there is no room; never for its own look-ahead. */
kvpool_status_t kvpool_cache_truncate(kvpool_cache_t cache, kvpool_seq_t sequence,
                                      uint32_t len) KVPOOL_NOEXCEPT;

/* Ends a sequence. Its shareable blocks stay cached until they are evicted. */
kvpool_status_t kvpool_cache_release(kvpool_cache_t cache, kvpool_seq_t sequence) KVPOOL_NOEXCEPT;
/* The same as soon as it can be: see "Giving back later". */
kvpool_status_t kvpool_cache_release_later(kvpool_cache_t cache, kvpool_seq_t sequence) KVPOOL_NOEXCEPT;

typedef struct kvpool_seq_info {
    size_t size;
    uint32_t slot;  /* its row in block tables, its unit in contiguous groups */
    uint32_t len;   /* tokens committed */
    uint32_t limit; /* tokens that it may have */
    uint32_t reserved;
    uint64_t table_version; /* changes when a block leaves it: a row that was read before is stale */
} kvpool_seq_info_t;

kvpool_status_t kvpool_seq_get_info(kvpool_cache_t cache, kvpool_seq_t sequence, kvpool_seq_info_t *out,
                                    size_t out_size) KVPOOL_NOEXCEPT;

typedef struct kvpool_preempted {
    size_t size;
    kvpool_seq_t sequence; /* stale now */
    uint64_t key;
    uint32_t has_key;
    uint32_t was_reservation; /* it was a reservation, which is cancelled */
    uint32_t len;             /* tokens that it had; beginning it again may find them cached */
    uint32_t reserved;
} kvpool_preempted_t;

/* Admission "max-utilization", after KVPOOL_POOL_EXHAUSTED: releases the youngest sequence, or cancels the
 * youngest reservation. Never the only one. KVPOOL_NOBODY. */
kvpool_status_t kvpool_cache_preempt_youngest(kvpool_cache_t cache, kvpool_preempted_t *out,
                                              size_t out_size) KVPOOL_NOEXCEPT;

/* Forgets all sequences' traces: counters, cached blocks and the order of the free lists are as after open.
 * KVPOOL_SEQUENCES_ALIVE, KVPOOL_PINS_ALIVE. */
kvpool_status_t kvpool_cache_reset(kvpool_cache_t cache) KVPOOL_NOEXCEPT;

/* ---------------------------------------------------------------- Admission */

typedef struct kvpool_estimate {
    size_t size;
    uint32_t cached_len;
    uint32_t limit;
} kvpool_estimate_t;

/* What kvpool_cache_begin would give now; the same statuses. Changes nothing. */
kvpool_status_t kvpool_cache_check_admission(kvpool_cache_t cache, const uint32_t *prompt, size_t prompt_len,
                                             const kvpool_begin_options_t *options, kvpool_estimate_t *out,
                                             size_t out_size) KVPOOL_NOEXCEPT;

/* Keeps a place for a sequence, if kvpool_cache_begin would succeed now: slot, blocks and match are its,
 * until it is begun or cancelled. `estimate` may be NULL, with size 0. */
kvpool_status_t kvpool_cache_can_admit(kvpool_cache_t cache, const uint32_t *prompt, size_t prompt_len,
                                       const kvpool_begin_options_t *options, kvpool_reservation_t *out,
                                       kvpool_estimate_t *estimate, size_t estimate_size) KVPOOL_NOEXCEPT;

kvpool_status_t kvpool_cache_begin_reserved(kvpool_cache_t cache, kvpool_reservation_t reservation,
                                            kvpool_begun_t *out, size_t out_size) KVPOOL_NOEXCEPT;
kvpool_status_t kvpool_cache_cancel_reservation(kvpool_cache_t cache,
                                                kvpool_reservation_t reservation) KVPOOL_NOEXCEPT;
/* The same as soon as it can be: see "Giving back later". */
kvpool_status_t kvpool_cache_cancel_reservation_later(kvpool_cache_t cache,
                                                      kvpool_reservation_t reservation) KVPOOL_NOEXCEPT;
/* All of them; *cancelled is how many, and may be NULL. */
kvpool_status_t kvpool_cache_cancel_reservations(kvpool_cache_t cache, uint32_t *cancelled) KVPOOL_NOEXCEPT;
kvpool_status_t kvpool_cache_reservations(kvpool_cache_t cache, uint32_t *out) KVPOOL_NOEXCEPT;

/* ---------------------------------------------------------------- Steps */

typedef struct kvpool_step_item {
    kvpool_seq_t sequence;
    uint32_t num_tokens; /* 1 in decoding, more in prefill */
    uint32_t reserved;
} kvpool_step_item_t;

/* Opens a step: all sequences get room for their tokens, or none. `tokens` are the ids of the step's tokens
 * in the order of its rows [num_tokens], so that blocks behind the prompt can be shared; or NULL with 0.
 * A step of no items is a step: it is to be committed or cancelled as any other.
 * KVPOOL_POOL_EXHAUSTED (not under guaranteed admission), KVPOOL_STEP_TOO_LARGE, KVPOOL_TOO_LONG,
 * KVPOOL_BAD_STEP, KVPOOL_TOKEN_MISMATCH. */
kvpool_status_t kvpool_cache_reserve(kvpool_cache_t cache, const kvpool_step_item_t *items, size_t num_items,
                                     const uint32_t *tokens, size_t num_tokens,
                                     kvpool_step_t *out) KVPOOL_NOEXCEPT;

/* Rows of all tensors are in the order of the items: all tokens of the first sequence, then those of the
 * second, ... */
typedef struct kvpool_batch_seq {
    uint32_t slot;
    uint32_t row_start; /* its first row in the step's tensors */
    uint32_t rows;
    uint32_t first_position; /* the position of its first row in the sequence */
} kvpool_batch_seq_t;

/* What a step is made of. The pointers are the same for the life of the cache; what they point to is right
 * until the step ends. */
typedef struct kvpool_step_view {
    size_t size;
    uint32_t num_tokens;
    uint32_t num_seqs;
    const uint32_t *positions;      /* [num_tokens], what a position encoding must use */
    const uint32_t *seq_lens;       /* [num_seqs], the step's tokens included */
    const kvpool_batch_seq_t *seqs; /* [num_seqs] */
} kvpool_step_view_t;

/* A layer group in a step. */
typedef struct kvpool_step_group {
    size_t size;
    const uint64_t *token_slots; /* [num_tokens] */
    const uint32_t *block_table; /* [seq_slots, block_table_row], by slot; NULL in a contiguous group */
    uint32_t block_table_row;
    uint32_t reserved;
} kvpool_step_group_t;

/* The blocks of a step's sequences in compressed sparse row form, as FlashInfer takes it. In a windowed group
 * the blocks of a sequence begin with those of its sinks, ceil(min(sink_tokens, length) / tokens_per_block)
 * of them, and go on at kv_first_position, the position of the first token of the first block behind them;
 * what lies between has left the window. Without a window kv_first_position is 0. */
typedef struct kvpool_step_csr {
    size_t size;
    const uint32_t *kv_indptr;         /* [num_seqs + 1] */
    const uint32_t *kv_indices;        /* [kv_indptr[num_seqs]] */
    const uint32_t *kv_last_block_len; /* [num_seqs], 1 to tokens_per_block */
    const uint32_t *kv_first_position; /* [num_seqs] */
    uint32_t num_indices;
    uint32_t reserved;
} kvpool_step_csr_t;

#define KVPOOL_NO_BLOCK UINT32_MAX /* an entry of a block table that names no block */

kvpool_status_t kvpool_step_get_view(kvpool_cache_t cache, kvpool_step_t step, kvpool_step_view_t *out,
                                     size_t out_size) KVPOOL_NOEXCEPT;
kvpool_status_t kvpool_step_get_group(kvpool_cache_t cache, kvpool_step_t step, uint32_t group,
                                      kvpool_step_group_t *out, size_t out_size) KVPOOL_NOEXCEPT;
/* KVPOOL_NO_SUCH_GROUP in a contiguous group. The first call of a step builds the form for all groups. */
kvpool_status_t kvpool_step_get_csr(kvpool_cache_t cache, kvpool_step_t step, uint32_t group,
                                    kvpool_step_csr_t *out, size_t out_size) KVPOOL_NOEXCEPT;

typedef int32_t kvpool_dtype_t;
enum { KVPOOL_F32 = 0, KVPOOL_F16 = 1, KVPOOL_BF16 = 2 };
typedef int32_t kvpool_memory_t;
enum { KVPOOL_HOST = 0, KVPOOL_DEVICE_MEMORY = 1 };

/* A dense tensor of `len` elements. In host memory aligned to its element; in a GPU's memory to 16 bytes. On
 * a GPU, calls with tensors in its own memory are put into the stream and not waited for; those with tensors
 * in host memory wait. None lies in the pool, or overlaps an output (KVPOOL_OVERLAP). */
typedef struct kvpool_tensor {
    void *data;
    uint64_t len;
    kvpool_dtype_t dtype;
    kvpool_memory_t memory;
} kvpool_tensor_t;

/* Stores K and V of the step's tokens in a layer, [num_tokens, num_kv_heads, head_dim] each, of the same type
 * and in the same memory. Once for each layer. With [rope] in the config K is rotated by its position on the
 * way; queries are not: rotate them by `positions` before kvpool_step_attend. */
kvpool_status_t kvpool_step_append(kvpool_cache_t cache, kvpool_step_t step, uint32_t layer,
                                   const kvpool_tensor_t *k, const kvpool_tensor_t *v) KVPOOL_NOEXCEPT;

/* Declares that the caller's own kernels write K and V of the step in this layer. */
kvpool_status_t kvpool_step_mark_appended(kvpool_cache_t cache, kvpool_step_t step,
                                          uint32_t layer) KVPOOL_NOEXCEPT;
/* In every layer that was neither appended nor marked yet. */
kvpool_status_t kvpool_step_mark_all_appended(kvpool_cache_t cache, kvpool_step_t step) KVPOOL_NOEXCEPT;

typedef struct kvpool_attend_options {
    size_t size;
    float softmax_scale; /* factor on q.k; 0 = 1 / sqrt(head_dim) */
    uint32_t reserved;
    kvpool_tensor_t lse; /* f32 [num_tokens, num_q_heads], written: natural logarithm of the softmax's
                            denominator; `data` NULL for none */
} kvpool_attend_options_t;

#ifdef __cplusplus
#define KVPOOL_ATTEND_OPTIONS_INIT                                                                           \
    (kvpool_attend_options_t{sizeof(kvpool_attend_options_t), 0.0f, 0, {nullptr, 0, 0, 0}})
#else
#define KVPOOL_ATTEND_OPTIONS_INIT {sizeof(kvpool_attend_options_t), 0.0f, 0, {NULL, 0, 0, 0}}
#endif

/* Causal attention of the step's queries over all that their sequences hold in a layer, the step's own tokens
 * included; window and sinks apply. `q` and `out` are [num_tokens, num_q_heads, head_dim]. `out` is f32, f16
 * or bf16. `options` may be NULL. KVPOOL_NOT_APPENDED. */
kvpool_status_t kvpool_step_attend(kvpool_cache_t cache, kvpool_step_t step, uint32_t layer,
                                   const kvpool_tensor_t *q, const kvpool_tensor_t *out,
                                   const kvpool_attend_options_t *options) KVPOOL_NOEXCEPT;

/* CUDA: uploads what the kernels read of the step, so that appends and attentions with tensors in device
 * memory are nothing but kernels in the stream, which a graph can capture once. For a later step: prepare it,
 * launch the graph in place of those calls, and mark every layer as appended. While a stream is captured,
 * whatever a graph must not repeat (calls on a step that was not prepared, reserving, reading back) is
 * refused with KVPOOL_DEVICE, and the capture goes on. On the CPU: KVPOOL_WRONG_MEMORY. */
kvpool_status_t kvpool_step_prepare(kvpool_cache_t cache, kvpool_step_t step) KVPOOL_NOEXCEPT;

/* Which forms of a paged group's blocks are wanted in device memory; whole rows are many more bytes. */
typedef uint32_t kvpool_tables_t;
enum { KVPOOL_TABLES_CSR = 1, KVPOOL_TABLES_DENSE = 2 };

/* A step's tables of one group in device memory, for the caller's kernels in the cache's stream. The pointers
 * are the same for the life of the cache. */
typedef struct kvpool_step_device {
    size_t size;
    const uint32_t *positions;   /* [num_tokens] */
    const uint32_t *seq_lens;    /* [num_seqs] */
    const uint64_t *token_slots; /* [num_tokens] */
    /* NULL in a contiguous group, and unless KVPOOL_TABLES_DENSE asks for it. */
    const uint32_t *block_table; /* [num_seqs, block_table_row], in the step's order of sequences */
    /* As in kvpool_step_csr_t. NULL in a contiguous group, and unless KVPOOL_TABLES_CSR asks for them. */
    const uint32_t *kv_indptr;
    const uint32_t *kv_indices;
    const uint32_t *kv_last_block_len;
    const uint32_t *kv_first_position;
    uint32_t block_table_row;
    uint32_t reserved;
} kvpool_step_device_t;

/* Uploads a group's tables through the stream and says where they are. KVPOOL_WRONG_MEMORY on the CPU, where
 * the host's tables are all there is. */
kvpool_status_t kvpool_step_get_device(kvpool_cache_t cache, kvpool_step_t step, uint32_t group,
                                       kvpool_tables_t wanted, kvpool_step_device_t *out,
                                       size_t out_size) KVPOOL_NOEXCEPT;

/* Makes the step's tokens part of their sequences. KVPOOL_NOT_APPENDED: the step is over too, cancelled. */
kvpool_status_t kvpool_step_commit(kvpool_cache_t cache, kvpool_step_t step) KVPOOL_NOEXCEPT;
/* Gives everything back. The cache is as before, but for this: handles of blocks that the step had taken are
 * stale, and what was cached and had to go for it, or was taken out of the index to be written, does not come
 * back. */
kvpool_status_t kvpool_step_cancel(kvpool_cache_t cache, kvpool_step_t step) KVPOOL_NOEXCEPT;
/* The same as soon as it can be: see "Giving back later". */
kvpool_status_t kvpool_step_cancel_later(kvpool_cache_t cache, kvpool_step_t step) KVPOOL_NOEXCEPT;
/* The same of the step that is open, whoever has its handle; `cancelled` (may be NULL) is 0 where none was.
 */
kvpool_status_t kvpool_cache_cancel_step(kvpool_cache_t cache, uint32_t *cancelled) KVPOOL_NOEXCEPT;

/* ---------------------------------------------------------------- Prefixes */

typedef struct kvpool_probe {
    size_t size;
    uint32_t cached_len;     /* tokens that need no computing */
    uint32_t full_blocks;    /* whole blocks among them */
    uint32_t partial_tokens; /* tokens of the block that matches in part */
    uint32_t reserved;
} kvpool_probe_t;

/* How much of a prompt is cached. Changes nothing, and runs beside a verb: it then looks again, until what it
 * saw was of one moment; after a thousand times it gives what it saw last, which may be too much or too
 * little. `name_space` may be NULL: absent in every part. */
kvpool_status_t kvpool_cache_probe(kvpool_cache_t cache, const uint32_t *prompt, size_t prompt_len,
                                   const kvpool_namespace_t *name_space, kvpool_probe_t *out,
                                   size_t out_size) KVPOOL_NOEXCEPT;

/* Keeps what is shareable of a sequence now, whatever happens to the sequence. KVPOOL_NOTHING_TO_PIN,
 * KVPOOL_NO_PIN, KVPOOL_REUSE_OFF; with windows KVPOOL_NOT_ADMITTED, where what is promised could not be kept. */
kvpool_status_t kvpool_cache_pin(kvpool_cache_t cache, kvpool_seq_t sequence,
                                 kvpool_pin_t *out) KVPOOL_NOEXCEPT;
kvpool_status_t kvpool_cache_unpin(kvpool_cache_t cache, kvpool_pin_t pin) KVPOOL_NOEXCEPT;
/* The same as soon as it can be: see "Giving back later". */
kvpool_status_t kvpool_cache_unpin_later(kvpool_cache_t cache, kvpool_pin_t pin) KVPOOL_NOEXCEPT;

/* Replaces a sequence's retention; [num_retentions], at most KVPOOL_MAX_RETENTIONS. KVPOOL_REUSE_OFF where the
 * plan keeps no prefixes in blocks: there is nothing to keep then. */
kvpool_status_t kvpool_cache_set_retention(kvpool_cache_t cache, kvpool_seq_t sequence,
                                           const kvpool_retention_t *retentions,
                                           size_t num_retentions) KVPOOL_NOEXCEPT;
/* What time it is, for retention with a duration: nothing in kvpool looks at a clock. An earlier time
 * than the one before changes nothing. */
kvpool_status_t kvpool_cache_set_time_ms(kvpool_cache_t cache, uint64_t now_ms) KVPOOL_NOEXCEPT;
/* Sequences begin in another epoch: nothing that was cached in others is found any more, because the weights or
 * an adapter changed. An epoch is its number: one that is used again finds again what was cached in it.
 * KVPOOL_RESERVATIONS_HELD. */
kvpool_status_t kvpool_cache_set_epoch(kvpool_cache_t cache, uint64_t epoch) KVPOOL_NOEXCEPT;
/* Evicts every block that nobody holds. These do not count as evictions, which are for want of room. */
kvpool_status_t kvpool_cache_clear_cached(kvpool_cache_t cache) KVPOOL_NOEXCEPT;

/* ---------------------------------------------------------------- Save and restore */

/* A file holds one sequence, or everything that is cached for reuse: tokens, K, V and scales, by layer. A
 * plan of the same geometry and format can take it, whatever its mode and block size. docs/save-format.md
 * describes it. These functions allocate a buffer of a size that follows from the plan, and give it back. */

typedef struct kvpool_save_options {
    size_t size;
    uint32_t unsalted_only; /* not 0: what has a salt is left out, from its salt on */
    uint32_t reserved;
    kvpool_key_part_t model; /* what computes K and V: a restore must give the same */
} kvpool_save_options_t;

typedef struct kvpool_restore_options {
    size_t size;
    uint64_t key;     /* of a sequence, as in kvpool_begin_options_t */
    uint32_t has_key; /* not 0: `key` counts */
    uint32_t max_len; /* of a sequence, look-ahead aside; 0 = its old limit */
    kvpool_key_part_t model;
} kvpool_restore_options_t;

/* All defaults. */
#ifdef __cplusplus
#define KVPOOL_SAVE_OPTIONS_INIT (kvpool_save_options_t{sizeof(kvpool_save_options_t), 0, 0, {}})
#define KVPOOL_RESTORE_OPTIONS_INIT (kvpool_restore_options_t{sizeof(kvpool_restore_options_t), 0, 0, 0, {}})
#else
#define KVPOOL_SAVE_OPTIONS_INIT {sizeof(kvpool_save_options_t), 0, 0, {0, 0, NULL, 0}}
#define KVPOOL_RESTORE_OPTIONS_INIT {sizeof(kvpool_restore_options_t), 0, 0, 0, {0, 0, NULL, 0}}
#endif

typedef struct kvpool_saved {
    size_t size;
    uint64_t bytes;  /* of the file */
    uint64_t blocks; /* of tokens_per_block tokens; the last of a chain may have less */
    uint64_t tokens;
} kvpool_saved_t;

typedef struct kvpool_restored {
    size_t size;
    uint64_t file_tokens;
    uint64_t dropped_tokens; /* of these, tokens that are not cached now: there was no room for them, they do
                                not fill a block, this plan needs more of them than the file has, or too many
                                chains before them could not be used. Of tokens that the first of the groups
                                with blocks took; where this plan's blocks are larger or its windows need what
                                the file's plan had dropped, fewer of those can be found: docs/save-format.md */
    uint64_t blocks;         /* restored */
    uint64_t blocks_present; /* cached before */
    uint64_t slots;          /* of contiguous layers, that were filled */
} kvpool_restored_t;

/* Writes everything that is cached for reuse, in the present epoch, to a file. The file of that name is
 * replaced when the new one is whole and on the disk: whoever is killed leaves the old one or the new one. It
 * can be read by its owner alone, because prompts and salts are in it. A link of that name is replaced, and not
 * what it points to; what is neither a file nor a link is refused. Verbs wait for the writing, which may take
 * long; what is given back later waits too, and makes nobody wait. `options` may be NULL. KVPOOL_SAVE_IO,
 * KVPOOL_SAVE_UNDER_WAY, KVPOOL_REUSE_OFF, KVPOOL_OUT_OF_MEMORY (of the buffers; where the system refuses even
 * allocations of a few bytes, it ends the program, as everywhere that Rust allocates). */
kvpool_status_t kvpool_cache_save_prefixes(kvpool_cache_t cache, const char *path,
                                           const kvpool_save_options_t *options, kvpool_saved_t *out,
                                           size_t out_size) KVPOOL_NOEXCEPT;
/* Takes the prefixes of a file. Nothing is evicted for them; what has no room is dropped, the least recently
 * used first; what is cached stays as it is. The whole file is checked first. KVPOOL_SAVE_IO,
 * KVPOOL_SAVE_DAMAGED, KVPOOL_SAVE_MISMATCH. `options` may be NULL. */
kvpool_status_t kvpool_cache_restore_prefixes(kvpool_cache_t cache, const char *path,
                                              const kvpool_restore_options_t *options, kvpool_restored_t *out,
                                              size_t out_size) KVPOOL_NOEXCEPT;
/* The same for one sequence. Restored, it begins with all its tokens in the cache: `cached_len` of them; what
 * its prompt has behind them is expected of the next steps, as before. It is admitted as by
 * kvpool_cache_begin. If the device fails meanwhile, or reading the file, what was evicted to make room stays
 * so. A sequence that has a salt, or of which the cache does not know, is not saved with `unsalted_only`:
 * KVPOOL_BAD_ARGUMENT. */
kvpool_status_t kvpool_cache_save_sequence(kvpool_cache_t cache, kvpool_seq_t sequence, const char *path,
                                           const kvpool_save_options_t *options, kvpool_saved_t *out,
                                           size_t out_size) KVPOOL_NOEXCEPT;
kvpool_status_t kvpool_cache_restore_sequence(kvpool_cache_t cache, const char *path,
                                              const kvpool_restore_options_t *options, kvpool_begun_t *out,
                                              size_t out_size) KVPOOL_NOEXCEPT;

/* ---------------------------------------------------------------- Events */

typedef int32_t kvpool_event_kind_t;
enum {
    KVPOOL_STORED = 0,   /* `block` is shareable: `parent`, `tokens`, `name_space` */
    KVPOOL_ATTACHED = 1, /* `block`, of a windowed group, holds the tokens of `parent`, of the lead group */
    KVPOOL_REMOVED = 2,  /* `block` is not shareable any more */
    KVPOOL_CLEARED = 3   /* no block is */
};

typedef struct kvpool_event {
    size_t size;
    uint64_t
        number; /* counts from 0; a gap is what was lost. Of resync: the number that comes next, for all */
    kvpool_event_kind_t kind;
    uint32_t group;
    uint32_t block;
    uint32_t parent;     /* KVPOOL_NO_BLOCK at the start of a prompt */
    uint32_t name_space; /* the number of the namespace that begins here; 0 = the parent's */
    uint32_t num_tokens;
    const uint32_t *tokens; /* [num_tokens]; valid during the call */
} kvpool_event_t;

typedef void (*kvpool_event_fn)(void *context, const kvpool_event_t *event);

/* Hands over the events since the last call, oldest first; `delivered` and `lost` (overwritten before they
 * were polled: see resync) may be NULL. There are none without cache.event_buffer. `each` must not call verbs
 * or readers, of this cache or another (KVPOOL_BUSY). */
kvpool_status_t kvpool_cache_poll_events(kvpool_cache_t cache, kvpool_event_fn each, void *context,
                                         uint64_t *delivered, uint64_t *lost) KVPOOL_NOEXCEPT;
/* Hands over the whole index as events, for a reader that begins late or has lost some: first
 * KVPOOL_CLEARED, then what is shareable now, parents first. What was not polled yet is forgotten. */
kvpool_status_t kvpool_cache_resync_events(kvpool_cache_t cache, kvpool_event_fn each, void *context,
                                           uint64_t *delivered) KVPOOL_NOEXCEPT;
/* The numbers under which a namespace's first block and its first salted block stand in events; 0 = nothing
 * of it is cached. `name_space` may be NULL: absent in every part. */
kvpool_status_t kvpool_cache_namespace_numbers(kvpool_cache_t cache, const kvpool_namespace_t *name_space,
                                               uint32_t out[2]) KVPOOL_NOEXCEPT;

/* ---------------------------------------------------------------- Statistics and checks */

/* Counters and gauges. Gauges: seqs, and the four ..._bytes without "peak". All else only grows. held_bytes +
 * promised_bytes - used_bytes is the waste. */
typedef struct kvpool_stats {
    size_t size;
    uint64_t seqs;           /* alive, places that are kept for reservations included */
    uint64_t used_bytes;     /* of tokens that some query may still see */
    uint64_t held_bytes;     /* of blocks and slots that sequences hold */
    uint64_t promised_bytes; /* of blocks that admission promised and that are not taken yet */
    uint64_t cached_bytes;   /* of blocks that nobody holds, kept for reuse */
    uint64_t peak_used_bytes;
    uint64_t peak_held_bytes;
    uint64_t tokens_appended;
    uint64_t steps_committed;
    uint64_t steps_cancelled;
    uint64_t seqs_begun;
    uint64_t nonfinite;      /* elements that were NaN or infinite on the way into INT8 */
    uint64_t saturated;      /* elements beyond a static INT8 scale */
    uint64_t copied_bytes;   /* within the pool */
    uint64_t scrubbed_bytes; /* zeroed, as pool.scrub asks for it */
    uint64_t scrub_failures; /* times that the device refused to */
    uint64_t prefix_queries; /* sequences that looked for a prefix */
    uint64_t prefix_query_tokens;
    uint64_t prefix_hit_tokens;
    uint64_t prefix_hit_blocks;
    uint64_t prefix_partial_hits;
    uint64_t prefix_partial_tokens;
    uint64_t window_misses; /* matches that a windowed group made shorter */
    uint64_t donor_misses;  /* matches that were shorter because no contiguous slot had as much */
    uint64_t blocks_published;
    uint64_t blocks_deduplicated;
    uint64_t evictions;
    uint64_t cow_copies;
    uint64_t blocks_withdrawn;
    uint64_t partial_copies;
    uint64_t partial_takeovers;
    uint64_t donor_copies;
    uint64_t donor_takeovers;
    uint64_t namespaces_refused;
    uint64_t saves;        /* files written */
    uint64_t saved_tokens; /* their tokens */
    uint64_t restored_seqs;
    uint64_t restored_blocks; /* of prefixes, and not cached before */
    uint64_t restored_slots;  /* of contiguous layers, filled with a prefix */
    uint64_t preemptions;
    uint64_t refused_slots;
    uint64_t refused_blocks;
    uint64_t refused_never;
    uint64_t refused_too_long;
    uint64_t refused_static_batch;
} kvpool_stats_t;

kvpool_status_t kvpool_cache_stats(kvpool_cache_t cache, kvpool_stats_t *out,
                                   size_t out_size) KVPOOL_NOEXCEPT;

typedef struct kvpool_group_stats {
    size_t size;
    kvpool_reuse_t reuse;
    uint32_t blocks_free;   /* nobody's and not promised; free + active + cached + promised = units of a paged
                               group */
    uint32_t blocks_active; /* held by sequences */
    uint32_t blocks_cached; /* held by nobody, kept for reuse, and not promised */
    uint32_t blocks_promised; /* to sequences that were admitted, and not taken yet */
    uint32_t peak_cached;
    uint64_t live_tokens; /* that some query may still see, over all sequences */
} kvpool_group_stats_t;

kvpool_status_t kvpool_cache_group_stats(kvpool_cache_t cache, uint32_t group, kvpool_group_stats_t *out,
                                         size_t out_size) KVPOOL_NOEXCEPT;

#define KVPOOL_PRIORITIES 101
/* Blocks evicted so far, by the priority that they had. */
kvpool_status_t kvpool_cache_evictions(kvpool_cache_t cache, uint64_t out[KVPOOL_PRIORITIES]) KVPOOL_NOEXCEPT;

/* Checks every invariant of the cache: takes time in proportion to its blocks. KVPOOL_INVARIANT with what is
 * wrong. */
kvpool_status_t kvpool_cache_check(kvpool_cache_t cache) KVPOOL_NOEXCEPT;
/* A number that is equal for equal states. */
kvpool_status_t kvpool_cache_digest(kvpool_cache_t cache, uint64_t *out) KVPOOL_NOEXCEPT;

/* Reads K or V (KVPOOL_K, KVPOOL_V) of tokens from..to back as f32, [to - from, num_kv_heads, head_dim], in
 * host memory outside the pool (KVPOOL_OVERLAP). KVPOOL_NOT_HELD. */
kvpool_status_t kvpool_cache_export(kvpool_cache_t cache, kvpool_seq_t sequence, uint32_t layer,
                                    kvpool_part_t part, uint32_t from, uint32_t to, float *out,
                                    size_t out_len) KVPOOL_NOEXCEPT;
/* Copies bytes of the pool to host memory outside it (KVPOOL_OVERLAP). */
kvpool_status_t kvpool_cache_read(kvpool_cache_t cache, uint64_t offset, void *out,
                                  size_t out_len) KVPOOL_NOEXCEPT;

/* The block that holds a position of a sequence, and how many hold that block; it is stale once nobody held the
 * block, or other tokens were to be written over those that it shared. */
kvpool_status_t kvpool_cache_block_of(kvpool_cache_t cache, kvpool_seq_t sequence, uint32_t group,
                                      uint32_t position, kvpool_block_t *out) KVPOOL_NOEXCEPT;
kvpool_status_t kvpool_cache_block_refs(kvpool_cache_t cache, kvpool_block_t block,
                                        uint32_t *out) KVPOOL_NOEXCEPT;

#ifdef __cplusplus
}
#endif
#endif /* KVPOOL_H */
