// Copy, gather and fill; combination of splits.
#include "../kernels/attend.cuh"
#include "../kernels/blocks.cuh"

using namespace kvpool;

KV_KERNEL(kvpool_copy_pairs, KvpoolCopyParams, 256) { copy_pairs(p); }
KV_KERNEL(kvpool_fill, KvpoolFillParams, 256) { fill(p); }
KV_KERNEL(kvpool_gather_f32, KvpoolGatherParams, 256) { gather<F32>(p); }
KV_KERNEL(kvpool_gather_f16, KvpoolGatherParams, 256) { gather<F16>(p); }
KV_KERNEL(kvpool_gather_bf16, KvpoolGatherParams, 256) { gather<Bf16>(p); }
KV_KERNEL(kvpool_gather_i8, KvpoolGatherParams, 256) { gather<Int8>(p); }
KV_KERNEL_BLOCKS(kvpool_combine, KvpoolCombineParams, 128, 4) { combine(p); }
