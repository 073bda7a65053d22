// Attention without tensor cores, f16.
#include "../kernels/attend_plain.cuh"

using namespace kvpool;

KV_KERNEL_BLOCKS(kvpool_attend_f16_w256, KvpoolAttendParams, 128, 2) {
    PlainAttend<F16, 256>(p).run();
}
KV_KERNEL_BLOCKS(kvpool_attend_f16_w1024, KvpoolAttendParams, 128, 2) {
    PlainAttend<F16, 1024>(p).run();
}
