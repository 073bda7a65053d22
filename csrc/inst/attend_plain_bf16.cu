// Attention without tensor cores, bf16.
#include "../kernels/attend_plain.cuh"

using namespace kvpool;

KV_KERNEL_BLOCKS(kvpool_attend_bf16_w256, KvpoolAttendParams, 128, 2) {
    PlainAttend<Bf16, 256>(p).run();
}
KV_KERNEL_BLOCKS(kvpool_attend_bf16_w1024, KvpoolAttendParams, 128, 2) {
    PlainAttend<Bf16, 1024>(p).run();
}
