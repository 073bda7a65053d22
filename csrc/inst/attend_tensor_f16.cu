// Attention on tensor cores, f16.
#include "../kernels/attend_tensor.cuh"

using namespace kvpool;

KV_KERNEL_BLOCKS(kvpool_attend_f16_t64x1, KvpoolAttendParams, 128, 3) {
    TensorAttend<F16, 64, 1>(p).run();
}
KV_KERNEL_BLOCKS(kvpool_attend_f16_t64x2, KvpoolAttendParams, 128, 2) {
    TensorAttend<F16, 64, 2>(p).run();
}
KV_KERNEL_BLOCKS(kvpool_attend_f16_t128x1, KvpoolAttendParams, 128, 2) {
    TensorAttend<F16, 128, 1>(p).run();
}
KV_KERNEL_BLOCKS(kvpool_attend_f16_t128x2, KvpoolAttendParams, 128, 2) {
    TensorAttend<F16, 128, 2>(p).run();
}
KV_KERNEL_BLOCKS(kvpool_attend_f16_t256x1, KvpoolAttendParams, 128, 2) {
    TensorAttend<F16, 256, 1>(p).run();
}
