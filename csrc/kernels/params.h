// What the host hands to the kernels: plain structs, one a kernel, passed by value.
//
// Plain C, shared by CUDA C++, the emulator and (through bindgen) Rust. Addresses are of device
// memory, as 64-bit numbers; the shape of what lies there stands in brackets beside each. Offsets
// are bytes from the start of the pool. Layout and words are those of src/plan/layout.rs.
//
// Entry points
// ------------
// `extern "C" __global__ void NAME(const __grid_constant__ STRUCT p)`. Formats <fmt>: f32, f16,
// bf16, i8 (a scale a row or a static one) and i8g (a scale for every 32 elements).
//
// | name                             | struct                   | grid                     | block | dynamic shared bytes |
// |----------------------------------|--------------------------|--------------------------|-------|----------------------|
// | kvpool_append_<src>_<fmt>        | KvpoolAppendParams       | x: any, enough warps for tokens * 2 * heads | 256 | 0 |
// | kvpool_attend_<fmt>_w<W>         | KvpoolAttendParams       | x: any, y: num_kv_heads  | 128   | KVPOOL_WIDE_SHARED(head_dim, W) |
// | kvpool_attend_<fmt>_t<D>x<M>     | KvpoolAttendParams       | x: any, y: num_kv_heads  | 128   | KVPOOL_TENSOR_SHARED(element bytes, is i8g, D, M) |
// | kvpool_combine                   | KvpoolCombineParams      | x: any, y: num_kv_heads  | 128   | 0 |
// | kvpool_copy_pairs                | KvpoolCopyParams         | x: any, y: pairs at most 65535 | 256 | 0 |
// | kvpool_gather_<fmt> (f32, f16, bf16, i8) | KvpoolGatherParams       | x: any, enough warps for tokens * heads | 256 | 0 |
// | kvpool_fill                      | KvpoolFillParams         | x: any, y: ranges at most 65535 | 256 | 0 |
//
// "any": the kernels go through their work in strides of the grid, so that a grid may be chosen
// once, for the device, and a captured graph stays valid whatever the batch. No result depends on
// it. Good values: attend and combine as many in x as there are items (for a captured graph: as a
// step can have); append, gather, copy, fill: min(work, 8 * multiprocessors).
// Kernels that use more than 48 KiB of shared memory need
// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES set once.
//
// <src> of append: the element type of K and V, f32, f16 or bf16. <fmt> of append is f32, f16,
// bf16 or i8 (all scale forms).
//
// Which attention kernel
// ----------------------
// By format and head_dim alone, so that the order of arithmetic depends on nothing else (P5):
//   tensor cores, `t<D>`: not f32, head_dim a multiple of 16 and at most 256;
//       D = the smallest of 64, 128, 256 that is not below head_dim;
//       x<M>: items of at most 16 * M packed rows; M = 1 or, for D of 64 and 128, 2.
//       x1 and x2 give the same bits: choose by the batch.
//   plain, `w<W>`: everything else; W = the smallest of 128 (f32 only), 256, 1024 not below head_dim;
//       items of at most KVPOOL_WIDE_ROWS(W) packed rows: 8, 8, 2.
//
// Items of attention
// ------------------
// A *packed row* of a sequence is (row, query head of the KV head's group): number
// row * group + head, where row counts the sequence's rows in this step. An item is a run of
// packed rows of one sequence, and either one split of KVPOOL_SPLIT_TOKENS keys, whose result goes
// to the workspace to be combined (decode: many items, few rows), or KVPOOL_ALL_SPLITS, all of them
// one after the other, and the result goes to `out` (prefill, and where one split is all there
// is). Both ways give the same bits. Splits in which no row of the item sees a key may be left
// out; then `splits` of the combine item counts those that are there, in ascending order.
#ifndef KVPOOL_PARAMS_H
#define KVPOOL_PARAMS_H

#include <stdint.h>

#ifdef __cplusplus
#define KVPOOL_STATIC_ASSERT(condition, text) static_assert(condition, text)
#else
#define KVPOOL_STATIC_ASSERT(condition, text) _Static_assert(condition, text)
#endif

// Element types of the tensors that callers have.
enum {
    KVPOOL_DTYPE_F32 = 0,
    KVPOOL_DTYPE_F16 = 1,
    KVPOOL_DTYPE_BF16 = 2,
};

// Element types of the cache.
enum {
    KVPOOL_FORMAT_F32 = 0,
    KVPOOL_FORMAT_F16 = 1,
    KVPOOL_FORMAT_BF16 = 2,
    KVPOOL_FORMAT_INT8 = 3,
};

// What shares an INT8 scale.
enum {
    KVPOOL_SCALE_NONE = 0,
    KVPOOL_SCALE_PER_TOKEN_HEAD = 1,
    KVPOOL_SCALE_PER_GROUP_32 = 2,
    KVPOOL_SCALE_PER_TENSOR = 3,
};

// How a token's position leads to its place (plan::Addressing).
enum {
    KVPOOL_ADDRESSING_BLOCKS = 0,
    KVPOOL_ADDRESSING_SLOT = 1,
    KVPOOL_ADDRESSING_RING = 2,
};

// Which pairs of elements RoPE rotates.
enum {
    KVPOOL_ROPE_NONE = 0,
    // Element i with element i + rope_dims / 2.
    KVPOOL_ROPE_HALVES = 1,
    // Element 2i with element 2i + 1.
    KVPOOL_ROPE_PAIRS = 2,
};

// The entry of a block table that names no block.
#define KVPOOL_NO_BLOCK 0xFFFFFFFFu
// Keys of a split; splits begin at its multiples (plan::SPLIT_TOKENS).
#define KVPOOL_SPLIT_TOKENS 512u
// In KvpoolItem::split: all splits, one after the other.
#define KVPOOL_ALL_SPLITS 0xFFFFFFFFu
// Bytes of one stored scale (plan::SCALE_BYTES), and the elements of a group.
#define KVPOOL_SCALE_BYTES 2u
#define KVPOOL_SCALE_GROUP 32u

// Packed rows of an item of the plain kernel of width W.
#define KVPOOL_WIDE_ROWS(W) ((W) > 256u ? 2u : 8u)
// Dynamic shared bytes of the plain kernel: queries, the split's result and the total,
// [3][rows][head_dim] f32, then [6][rows] f32, then the split's units [SPLIT_TOKENS] u32.
#define KVPOOL_WIDE_SHARED(head_dim, W) \
    (3u * KVPOOL_WIDE_ROWS(W) * (head_dim) * 4u + 6u * KVPOOL_WIDE_ROWS(W) * 4u + KVPOOL_SPLIT_TOKENS * 4u)

// Keys of a tile of the tensor-core kernel of width D.
#define KVPOOL_TENSOR_TILE(D) ((D) > 128u ? 32u : 64u)
// Dynamic shared bytes of the tensor-core kernel: two stages of K and V tiles; queries in two halves; weights;
// scales (INT8: one of a vector, or one for every 32 elements); maxima, sums and factors; the split's units.
#define KVPOOL_TENSOR_SHARED(element_bytes, groups, D, M)                                        \
    (4u * KVPOOL_TENSOR_TILE(D) * (D) * (element_bytes) + 2u * 16u * (M) * (D) * 2u +            \
     16u * (M) * (KVPOOL_TENSOR_TILE(D) + 8u) * 4u +                                             \
     4u * ((groups) ? (D) / 32u : 1u) * KVPOOL_TENSOR_TILE(D) * 4u + 9u * 16u * (M) * 4u +       \
     KVPOOL_SPLIT_TOKENS * 4u)

// One layer group's layout (plan::GroupLayout).
typedef struct KvpoolKvGroup {
    uint64_t base;          // byte offset of unit 0 in the pool
    uint64_t unit_bytes;    // one unit, padding included
    uint64_t used_bytes;    // one unit without its padding
    uint64_t layer_stride;  // bytes from a layer to the next, elements only
    uint64_t kv_stride;     // from K to V
    uint64_t head_stride;   // from a KV head to the next
    uint64_t scales_at;     // byte offset of the scales in a unit
    uint32_t row_bytes;     // one vector: from a token to the next
    uint32_t scales_per_row;
    uint32_t unit_tokens;   // a power of two for BLOCKS
    uint32_t unit_shift;    // log2 of unit_tokens for BLOCKS, otherwise unused
    uint32_t units;
    uint32_t addressing;    // KVPOOL_ADDRESSING_*
    uint32_t sink_tokens;   // in every windowed group; 0 otherwise
    uint32_t ring_tokens;   // RING: tokens behind the sinks; otherwise 0
    uint32_t num_layers;
    uint32_t num_kv_heads;
    uint32_t head_dim;      // a multiple of 8, at most 1024
    uint32_t element_bytes;
    uint32_t format;        // KVPOOL_FORMAT_*
    uint32_t scale;         // KVPOOL_SCALE_*
} KvpoolKvGroup;
KVPOOL_STATIC_ASSERT(sizeof(KvpoolKvGroup) == 112, "shared with Rust");

// One sequence's rows in a step (device::BatchSeq), seen through one group.
typedef struct KvpoolSeq {
    uint32_t unit;            // SLOT and RING: the sequence's unit
    uint32_t row_start;       // its first row in the step's tensors
    uint32_t rows;
    uint32_t first_position;  // position of its first row
    uint32_t table_at;        // BLOCKS: the block of position p is tables[table_at + (p >> unit_shift)],
                              // added in 32 bits, so that a table may begin with a later block
    uint32_t reserved;        // 0
} KvpoolSeq;
KVPOOL_STATIC_ASSERT(sizeof(KvpoolSeq) == 24, "shared with Rust");

// Attention or combination of some packed rows of one sequence.
typedef struct KvpoolItem {
    uint32_t seq;      // index in `seqs`
    uint32_t first;    // first packed row
    uint32_t count;    // packed rows, at least 1
    uint32_t split;    // attend: which split, or KVPOOL_ALL_SPLITS
    uint32_t partial;  // attend: first place in the workspace, unused for KVPOOL_ALL_SPLITS;
                       // combine: the first split's; split number s of them lies s * count behind
    uint32_t splits;   // combine: splits in the workspace
} KvpoolItem;
KVPOOL_STATIC_ASSERT(sizeof(KvpoolItem) == 24, "shared with Rust");

// K and V of a step, to be stored in one layer.
typedef struct KvpoolAppendParams {
    KvpoolKvGroup group;
    uint64_t pool;           // [pool bytes]
    uint64_t k;              // [num_tokens, num_kv_heads, head_dim] of <src>
    uint64_t v;              // [num_tokens, num_kv_heads, head_dim] of <src>
    uint64_t token_slots;    // [num_tokens] u64: unit * unit_tokens + token. No slot twice.
    uint64_t num_tokens_at;  // [1] u32, or 0: num_tokens counts
    uint64_t counts;         // [2] u64: nonfinite and saturated elements are added; INT8 only
    uint64_t positions;      // [num_tokens] u32; only with RoPE
    uint64_t rope_cos;       // [positions, rope_dims / 2] f32; only with RoPE
    uint64_t rope_sin;       // [positions, rope_dims / 2] f32; only with RoPE
    uint32_t num_tokens;
    uint32_t layer;          // in the group
    uint32_t rope;           // KVPOOL_ROPE_*: K is rotated before it is stored
    uint32_t rope_dims;      // at most head_dim; a multiple of 8, for HALVES of 16
    float k_scale;           // static scales, for PER_TENSOR
    float v_scale;
} KvpoolAppendParams;
KVPOOL_STATIC_ASSERT(sizeof(KvpoolAppendParams) == 208, "shared with Rust");

// Causal attention of a step's queries in one layer.
typedef struct KvpoolAttendParams {
    KvpoolKvGroup group;
    uint64_t pool;           // [pool bytes]
    uint64_t q;              // [rows, num_q_heads, head_dim] of q_dtype
    uint64_t out;            // [rows, num_q_heads, head_dim] of out_dtype
    uint64_t lse;            // [rows, num_q_heads] f32, or 0
    uint64_t seqs;           // [num_seqs] KvpoolSeq
    uint64_t tables;         // [table entries] u32, see KvpoolSeq::table_at; BLOCKS only
    uint64_t items;          // [num_items] KvpoolItem
    uint64_t num_items_at;   // [1] u32, or 0: num_items counts
    uint64_t partial_acc;    // [num_kv_heads, max_partials, head_dim] f32
    uint64_t partial_ml;     // [num_kv_heads, max_partials, 2] f32: largest score (in log2), sum
    uint32_t num_items;
    uint32_t max_partials;   // places of the workspace: packed rows times splits
    uint32_t layer;          // in the group
    uint32_t window;         // keys a query may see, itself included; 0 = all
    uint32_t q_per_kv;       // query heads of a KV head: the group
    uint32_t q_dtype;        // KVPOOL_DTYPE_*
    uint32_t out_dtype;      // KVPOOL_DTYPE_*
    float softmax_scale;     // factor on q·k
    float k_scale;           // static scales, for PER_TENSOR
    float v_scale;
    uint32_t reserved[2];    // 0
} KvpoolAttendParams;
KVPOOL_STATIC_ASSERT(sizeof(KvpoolAttendParams) == 240, "shared with Rust");

// The splits of an attention, combined in ascending order.
typedef struct KvpoolCombineParams {
    uint64_t out;            // [rows, num_q_heads, head_dim] of out_dtype
    uint64_t lse;            // [rows, num_q_heads] f32, or 0
    uint64_t seqs;           // [num_seqs] KvpoolSeq
    uint64_t items;          // [num_items] KvpoolItem
    uint64_t num_items_at;   // [1] u32, or 0: num_items counts
    uint64_t partial_acc;    // [num_kv_heads, max_partials, head_dim] f32
    uint64_t partial_ml;     // [num_kv_heads, max_partials, 2] f32
    uint32_t num_items;
    uint32_t max_partials;
    uint32_t num_kv_heads;
    uint32_t head_dim;
    uint32_t q_per_kv;
    uint32_t out_dtype;      // KVPOOL_DTYPE_*
} KvpoolCombineParams;
KVPOOL_STATIC_ASSERT(sizeof(KvpoolCombineParams) == 80, "shared with Rust");

// Some tokens of a unit, to be copied to the same places of another: K, V and scales of every
// layer and head, and no byte more.
typedef struct KvpoolCopyPair {
    uint32_t src_unit;
    uint32_t dst_unit;
    uint32_t first_token;
    uint32_t num_tokens;
} KvpoolCopyPair;
KVPOOL_STATIC_ASSERT(sizeof(KvpoolCopyPair) == 16, "shared with Rust");

// Copies within one group. No token of a unit is a destination twice, or source and destination.
typedef struct KvpoolCopyParams {
    KvpoolKvGroup group;
    uint64_t pool;   // [pool bytes]
    uint64_t pairs;  // [num_pairs] KvpoolCopyPair
    uint32_t num_pairs;
    uint32_t reserved;  // 0
} KvpoolCopyParams;
KVPOOL_STATIC_ASSERT(sizeof(KvpoolCopyParams) == 136, "shared with Rust");

// K or V of one sequence's positions in one layer, dequantised, for export and tests.
typedef struct KvpoolGatherParams {
    KvpoolKvGroup group;
    uint64_t pool;    // [pool bytes]
    uint64_t out;     // [num_tokens, num_kv_heads, head_dim] f32
    uint64_t table;   // [table entries] u32: the block of position p is table[p >> unit_shift]; BLOCKS only
    uint32_t unit;    // SLOT and RING: the sequence's unit
    uint32_t first_position;
    uint32_t num_tokens;
    uint32_t layer;   // in the group
    uint32_t is_v;    // 0: K, 1: V
    float static_scale;  // for PER_TENSOR
} KvpoolGatherParams;
KVPOOL_STATIC_ASSERT(sizeof(KvpoolGatherParams) == 160, "shared with Rust");

// A range of the pool.
typedef struct KvpoolRange {
    uint64_t offset;
    uint64_t bytes;
} KvpoolRange;
KVPOOL_STATIC_ASSERT(sizeof(KvpoolRange) == 16, "shared with Rust");

// Bytes of the pool, set to a value. Ranges do not overlap.
typedef struct KvpoolFillParams {
    uint64_t pool;    // [pool bytes]
    uint64_t ranges;  // [num_ranges] KvpoolRange
    uint32_t num_ranges;
    uint32_t value;   // the byte
} KvpoolFillParams;
KVPOOL_STATIC_ASSERT(sizeof(KvpoolFillParams) == 24, "shared with Rust");

#endif
