// Attention without tensor cores, i8.
#include "../kernels/attend_plain.cuh"

using namespace kvpool;

KV_KERNEL_BLOCKS(kvpool_attend_i8_w256, KvpoolAttendParams, 128, 2) {
    PlainAttend<Int8, 256>(p).run();
}
KV_KERNEL_BLOCKS(kvpool_attend_i8_w1024, KvpoolAttendParams, 128, 2) {
    PlainAttend<Int8, 1024>(p).run();
}
