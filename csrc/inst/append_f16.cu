// append of f16 K and V to every format.
#include "../kernels/append.cuh"

using namespace kvpool;

KV_KERNEL_BLOCKS(kvpool_append_f16_f32, KvpoolAppendParams, 256, 3) { append<F16, F32>(p); }
KV_KERNEL_BLOCKS(kvpool_append_f16_f16, KvpoolAppendParams, 256, 3) { append<F16, F16>(p); }
KV_KERNEL_BLOCKS(kvpool_append_f16_bf16, KvpoolAppendParams, 256, 3) { append<F16, Bf16>(p); }
KV_KERNEL_BLOCKS(kvpool_append_f16_i8, KvpoolAppendParams, 256, 3) { append<F16, Int8>(p); }
