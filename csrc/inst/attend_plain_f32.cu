// Attention without tensor cores, f32.
#include "../kernels/attend_plain.cuh"

using namespace kvpool;

KV_KERNEL_BLOCKS(kvpool_attend_f32_w128, KvpoolAttendParams, 128, 2) {
    PlainAttend<F32, 128>(p).run();
}
KV_KERNEL_BLOCKS(kvpool_attend_f32_w256, KvpoolAttendParams, 128, 2) {
    PlainAttend<F32, 256>(p).run();
}
KV_KERNEL_BLOCKS(kvpool_attend_f32_w1024, KvpoolAttendParams, 128, 2) {
    PlainAttend<F32, 1024>(p).run();
}
