// append of f32 K and V to every format.
#include "../kernels/append.cuh"

using namespace kvpool;

KV_KERNEL_BLOCKS(kvpool_append_f32_f32, KvpoolAppendParams, 256, 3) { append<F32, F32>(p); }
KV_KERNEL_BLOCKS(kvpool_append_f32_f16, KvpoolAppendParams, 256, 3) { append<F32, F16>(p); }
KV_KERNEL_BLOCKS(kvpool_append_f32_bf16, KvpoolAppendParams, 256, 3) { append<F32, Bf16>(p); }
KV_KERNEL_BLOCKS(kvpool_append_f32_i8, KvpoolAppendParams, 256, 3) { append<F32, Int8>(p); }
