// What a kernel needs beyond plain C++: the one header of device intrinsics.
//
// It has two sides with the same names and the same meaning: CUDA C++ (nvcc, sm_80 and later),
// below, and the emulator (any C++17 compiler with -DKVPOOL_EMULATED), in
// ../emulator/intrinsics.hpp. Kernels include this and nothing of either toolkit, and obey four
// rules, which the emulator checks:
//
//  1. Global memory is reached through load_*, store_*, cp_async_* and atomic_* only, never by
//     `*p`: a device address is not an address of the host. Every access is aligned to its size.
//  2. A warp collective (sync_warp, shuffle_*, ballot_lanes, any_lane, all_lanes, ldmatrix_*,
//     mma_*) is executed by all 32 lanes of the warp, at one place of the source. A barrier
//     likewise by all threads of the block.
//  3. What cp_async_* fetches may be read after cp_async_wait by the thread that asked for it, and
//     by others after a barrier as well. What it overwrites is lost from the moment it is asked for.
//  4. A multiply and an add are fused where fma_f32() says so, and nowhere else (-fmad=false).
//
// Words of 32 bits that hold two halves have the one with the lower index in the low 16 bits.
#pragma once

#include <stdint.h>
#include <string.h>

namespace kvpool::dev {

constexpr int WARP = 32;

// 8 and 16 bytes that are loaded and stored at once.
struct alignas(8) Bytes8 {
    uint32_t word[2];
};
struct alignas(16) Bytes16 {
    uint32_t word[4];
};
struct Float2 {
    float x, y;
};

}  // namespace kvpool::dev

#if defined(KVPOOL_EMULATED)

#define KV_DEVICE inline
#define KV_HOST_DEVICE inline
#define KV_UNROLL

#include "../emulator/intrinsics.hpp"

#else

#include <cuda_runtime.h>

// A function that runs on the device, and one that also runs on the host.
#define KV_DEVICE __device__ __forceinline__
#define KV_HOST_DEVICE __host__ __device__ __forceinline__
// Before a loop: unroll it entirely.
#define KV_UNROLL _Pragma("unroll")

// KV_KERNEL(name, Params, max_threads) { … } defines the entry point `name`, which the driver finds
// by that name and which takes one plain struct, `const Params& p` or as good as. `max_threads`
// bounds the threads of a block, and so the registers of a thread.
#define KV_KERNEL(name, Params, max_threads) \
    extern "C" __global__ void __launch_bounds__(max_threads) name(const __grid_constant__ Params p)
// Likewise, asking for registers that let `min_blocks` blocks live on a multiprocessor.
#define KV_KERNEL_BLOCKS(name, Params, max_threads, min_blocks)           \
    extern "C" __global__ void __launch_bounds__(max_threads, min_blocks) \
        name(const __grid_constant__ Params p)

// KV_SHARED(float, scores, [64][8]); declares memory that the threads of a block share. It has no
// initial value (on the emulator: NaN), and is aligned to 16 bytes.
#define KV_SHARED(type, name, dims) __shared__ alignas(16) type name dims

namespace kvpool::dev {

// ---- Places in the grid -----------------------------------------------------------------------

KV_DEVICE uint32_t thread_x() { return threadIdx.x; }
KV_DEVICE uint32_t thread_y() { return threadIdx.y; }
KV_DEVICE uint32_t thread_z() { return threadIdx.z; }
KV_DEVICE uint32_t block_x() { return blockIdx.x; }
KV_DEVICE uint32_t block_y() { return blockIdx.y; }
KV_DEVICE uint32_t block_z() { return blockIdx.z; }
KV_DEVICE uint32_t block_dim_x() { return blockDim.x; }
KV_DEVICE uint32_t block_dim_y() { return blockDim.y; }
KV_DEVICE uint32_t block_dim_z() { return blockDim.z; }
KV_DEVICE uint32_t grid_dim_x() { return gridDim.x; }
KV_DEVICE uint32_t grid_dim_y() { return gridDim.y; }
KV_DEVICE uint32_t grid_dim_z() { return gridDim.z; }

// The thread in its block, x fastest.
KV_DEVICE uint32_t thread_index() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
KV_DEVICE uint32_t lane_index() { return thread_index() % WARP; }
KV_DEVICE uint32_t warp_index() { return thread_index() / WARP; }

// The dynamic shared memory of the launch, aligned to 128 bytes.
KV_DEVICE unsigned char* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char kvpool_dynamic_shared[];
    return kvpool_dynamic_shared;
}

// ---- Barriers, votes, shuffles ----------------------------------------------------------------

KV_DEVICE void sync_threads() { __syncthreads(); }
KV_DEVICE void sync_warp() { __syncwarp(); }
// A barrier of `threads` threads (whole warps) out of the block. `barrier` is 1 to 15.
KV_DEVICE void sync_named(uint32_t barrier, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Writes before it are visible on the whole device before writes after it.
KV_DEVICE void fence_device() { __threadfence(); }

KV_DEVICE uint32_t ballot_lanes(bool predicate) { return __ballot_sync(0xFFFFFFFFu, predicate); }
KV_DEVICE bool any_lane(bool predicate) { return __any_sync(0xFFFFFFFFu, predicate) != 0; }
KV_DEVICE bool all_lanes(bool predicate) { return __all_sync(0xFFFFFFFFu, predicate) != 0; }

// T is a number of 4 or 8 bytes. Without a source inside the warp a lane gets its own value.
template <class T>
KV_DEVICE T shuffle(T value, uint32_t source_lane) {
    return __shfl_sync(0xFFFFFFFFu, value, static_cast<int>(source_lane));
}
template <class T>
KV_DEVICE T shuffle_xor(T value, uint32_t mask) {
    return __shfl_xor_sync(0xFFFFFFFFu, value, static_cast<int>(mask));
}
template <class T>
KV_DEVICE T shuffle_down(T value, uint32_t delta) {
    return __shfl_down_sync(0xFFFFFFFFu, value, delta);
}
template <class T>
KV_DEVICE T shuffle_up(T value, uint32_t delta) {
    return __shfl_up_sync(0xFFFFFFFFu, value, delta);
}

// ---- Global memory ----------------------------------------------------------------------------

namespace detail {
// The built-in type that the load and store instructions of a size take.
template <int SIZE>
struct Word;
template <>
struct Word<1> {
    using Type = unsigned char;
};
template <>
struct Word<2> {
    using Type = unsigned short;
};
template <>
struct Word<4> {
    using Type = unsigned int;
};
template <>
struct Word<8> {
    using Type = uint2;
};
template <>
struct Word<16> {
    using Type = uint4;
};
template <class T>
using WordOf = typename Word<sizeof(T)>::Type;

template <class To, class From>
KV_DEVICE To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

KV_DEVICE uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
}  // namespace detail

// A device address of a parameter struct as a pointer. [as many T as the struct says]
template <class T>
KV_DEVICE T* at_address(uint64_t address) {
    return reinterpret_cast<T*>(address);
}

// T is any plain type of 1, 2, 4, 8 or 16 bytes. p: [1], aligned to sizeof(T)
// Memory that this kernel may also write.
template <class T>
KV_DEVICE T load_global(const T* p) {
    using W = detail::WordOf<T>;
    return detail::bits_as<T>(__ldca(reinterpret_cast<const W*>(p)));
}
// Memory that nobody writes while the kernel runs.
template <class T>
KV_DEVICE T load_readonly(const T* p) {
    using W = detail::WordOf<T>;
    return detail::bits_as<T>(__ldg(reinterpret_cast<const W*>(p)));
}
// Likewise, read once: keeps out of the way of what is worth caching.
template <class T>
KV_DEVICE T load_once(const T* p) {
    using W = detail::WordOf<T>;
    if constexpr (sizeof(T) == 16) {
        uint4 w;
        asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
            : "l"(p));
        return detail::bits_as<T>(w);
    } else {
        return detail::bits_as<T>(__ldg(reinterpret_cast<const W*>(p)));
    }
}
template <class T>
KV_DEVICE void store_global(T* p, T value) {
    using W = detail::WordOf<T>;
    __stwb(reinterpret_cast<W*>(p), detail::bits_as<W>(value));
}
// Written once and not read again soon.
template <class T>
KV_DEVICE void store_once(T* p, T value) {
    using W = detail::WordOf<T>;
    __stcs(reinterpret_cast<W*>(p), detail::bits_as<W>(value));
}

// Atomics of global or shared memory, T = uint32_t or uint64_t (add: int32_t too). They give the
// old value.
template <class T>
KV_DEVICE T atomic_add(T* p, T value) {
    if constexpr (sizeof(T) == 8) {
        return static_cast<T>(atomicAdd(reinterpret_cast<unsigned long long*>(p),
                                        static_cast<unsigned long long>(value)));
    } else {
        return atomicAdd(p, value);
    }
}
template <class T>
KV_DEVICE T atomic_max(T* p, T value) {
    if constexpr (sizeof(T) == 8) {
        return static_cast<T>(atomicMax(reinterpret_cast<unsigned long long*>(p),
                                        static_cast<unsigned long long>(value)));
    } else {
        return atomicMax(p, value);
    }
}

// ---- Shared memory ----------------------------------------------------------------------------

// As load_global and store_global; plain `x[i]` is as good, and these are checked by the emulator.
template <class T>
KV_DEVICE T load_shared(const T* p) {
    using W = detail::WordOf<T>;
    return detail::bits_as<T>(*reinterpret_cast<const W*>(p));
}
template <class T>
KV_DEVICE void store_shared(T* p, T value) {
    using W = detail::WordOf<T>;
    *reinterpret_cast<W*>(p) = detail::bits_as<W>(value);
}

// Asynchronous copies of 16, 8 or 4 bytes, both ends aligned to that. shared, global: [that many
// bytes]
KV_DEVICE void cp_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(detail::shared_address(shared)),
                 "l"(global)
                 : "memory");
}
KV_DEVICE void cp_async_8(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(detail::shared_address(shared)),
                 "l"(global)
                 : "memory");
}
KV_DEVICE void cp_async_4(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(detail::shared_address(shared)),
                 "l"(global)
                 : "memory");
}
// Fetches the first `bytes` (0 to 16) and writes zeros for the rest. With 0, `global` is not read,
// but must still be aligned.
KV_DEVICE void cp_async_16_or_zero(void* shared, const void* global, uint32_t bytes) {
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(detail::shared_address(shared)),
        "l"(global), "r"(bytes)
        : "memory");
}
KV_DEVICE void cp_async_4_or_zero(void* shared, const void* global, uint32_t bytes) {
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(detail::shared_address(shared)),
        "l"(global), "r"(bytes)
        : "memory");
}
// Closes the group of this thread's copies since the last one; it may be empty.
KV_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the N youngest groups of this thread are under way.
template <int N>
KV_DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- Numbers ----------------------------------------------------------------------------------

// a * b + c, rounded once.
KV_DEVICE float fma_f32(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// 2^x and log2 x to about 2 units in the last place, subnormals as zeros: the two sides differ in
// the last bits.
KV_DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
KV_DEVICE float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
KV_DEVICE float bits_to_f32(uint32_t bits) { return __uint_as_float(bits); }
KV_DEVICE uint32_t f32_to_bits(float x) { return __float_as_uint(x); }
// Rounds half to even; saturates; NaN gives 0.
KV_DEVICE int32_t f32_to_i32(float x) { return __float2int_rn(x); }
KV_DEVICE float i32_to_f32(int32_t x) { return __int2float_rn(x); }
KV_DEVICE float min_f32(float a, float b) { return fminf(a, b); }
// The other number where one is NaN.
KV_DEVICE float max_f32(float a, float b) { return fmaxf(a, b); }

// To 16 bits rounds half to even; beyond the range gives infinity, NaN gives 0x7FFF.
KV_DEVICE float f16_to_f32(uint16_t x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
KV_DEVICE uint16_t f32_to_f16(float x) {
    uint16_t y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
KV_DEVICE float bf16_to_f32(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }
KV_DEVICE uint16_t f32_to_bf16(float x) {
    uint16_t y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
KV_DEVICE uint32_t pack_f16(float low, float high) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
KV_DEVICE uint32_t pack_bf16(float low, float high) {
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
KV_DEVICE Float2 unpack_f16(uint32_t x) {
    return {f16_to_f32(static_cast<uint16_t>(x)), f16_to_f32(static_cast<uint16_t>(x >> 16))};
}
KV_DEVICE Float2 unpack_bf16(uint32_t x) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u)};
}

// Two halves at a time, each operation rounded once, to even.
KV_DEVICE uint32_t add_f16x2(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
KV_DEVICE uint32_t sub_f16x2(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
KV_DEVICE uint32_t mul_f16x2(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
KV_DEVICE uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t y;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}
KV_DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

// Byte i of the result is the byte of (b, a), 0 to 7 from the low end of a, that hex digit i of
// `selector` names; a digit of 8 and more spreads that byte's sign.
KV_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    return __byte_perm(a, b, selector);
}
// The sum of four products of signed bytes, plus c.
KV_DEVICE int32_t dp4a(uint32_t a, uint32_t b, int32_t c) {
    return __dp4a(static_cast<int32_t>(a), static_cast<int32_t>(b), c);
}

// ---- Matrices ---------------------------------------------------------------------------------

// 1, 2 or 4 matrices of 8 x 8 halves. Lane 8 i + j gives the address of row j of matrix i (16
// bytes, aligned to 16; the other lanes' is ignored). Lane l gets elements (l / 4, 2 (l % 4)) and
// the next of each; _trans: of its transpose.
KV_DEVICE void ldmatrix_x1(uint32_t (&r)[1], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(detail::shared_address(row))
                 : "memory");
}
KV_DEVICE void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(detail::shared_address(row))
                 : "memory");
}
KV_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(detail::shared_address(row))
                 : "memory");
}
KV_DEVICE void ldmatrix_x1_trans(uint32_t (&r)[1], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(detail::shared_address(row))
                 : "memory");
}
KV_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(detail::shared_address(row))
                 : "memory");
}
KV_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(detail::shared_address(row))
                 : "memory");
}

// c [16][8] += a [16][k] b [k][8], spread over the warp. With g = lane / 4 and t = lane % 4:
//   c[0], c[1] = (g, 2t), (g, 2t + 1)      c[2], c[3] = the same of row g + 8
// k = 16, halves:       a[0] = (g, 2t…)      a[1] = (g + 8, 2t…)
//                       a[2] = (g, 2t + 8…)  a[3] = (g + 8, 2t + 8…)
//                       b0 = (2t…, g)        b1 = (2t + 8…, g)
// k = 8, halves:        a[0] = (g, 2t…)      a[1] = (g + 8, 2t…)
//                       b0 = (2t…, g)
// k = 32, signed bytes: a[0] = (g, 4t…)      a[1] = (g + 8, 4t…)
//                       a[2] = (g, 4t + 16…) a[3] = (g + 8, 4t + 16…)
//                       b0 = (4t…, g)        b1 = (4t + 16…, g)
// The halves' products are exact; the order and the rounding of their sum within one instruction
// are the device's own.
KV_DEVICE void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
KV_DEVICE void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
KV_DEVICE void mma_m16n8k8_f16(float (&c)[4], const uint32_t (&a)[2], uint32_t b0) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
}
KV_DEVICE void mma_m16n8k8_bf16(float (&c)[4], const uint32_t (&a)[2], uint32_t b0) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
}
// Sums of 32 bits, which wrap.
KV_DEVICE void mma_m16n8k32_s8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace kvpool::dev

#endif
