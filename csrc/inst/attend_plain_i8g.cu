// Attention without tensor cores, i8g.
#include "../kernels/attend_plain.cuh"

using namespace kvpool;

KV_KERNEL_BLOCKS(kvpool_attend_i8g_w256, KvpoolAttendParams, 128, 2) {
    PlainAttend<Int8Groups, 256>(p).run();
}
KV_KERNEL_BLOCKS(kvpool_attend_i8g_w1024, KvpoolAttendParams, 128, 2) {
    PlainAttend<Int8Groups, 1024>(p).run();
}
