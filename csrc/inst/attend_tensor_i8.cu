// Attention on tensor cores, i8.
#include "../kernels/attend_tensor.cuh"

using namespace kvpool;

KV_KERNEL_BLOCKS(kvpool_attend_i8_t64x1, KvpoolAttendParams, 128, 3) {
    TensorAttend<Int8, 64, 1>(p).run();
}
KV_KERNEL_BLOCKS(kvpool_attend_i8_t64x2, KvpoolAttendParams, 128, 2) {
    TensorAttend<Int8, 64, 2>(p).run();
}
KV_KERNEL_BLOCKS(kvpool_attend_i8_t128x1, KvpoolAttendParams, 128, 3) {
    TensorAttend<Int8, 128, 1>(p).run();
}
KV_KERNEL_BLOCKS(kvpool_attend_i8_t128x2, KvpoolAttendParams, 128, 2) {
    TensorAttend<Int8, 128, 2>(p).run();
}
KV_KERNEL_BLOCKS(kvpool_attend_i8_t256x1, KvpoolAttendParams, 128, 2) {
    TensorAttend<Int8, 256, 1>(p).run();
}
