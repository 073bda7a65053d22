// The emulator's side of ../kernels/device.cuh, which says what each of these means.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "engine.hpp"
#include "matrix.hpp"
#include "numbers.hpp"

namespace kvpool::dev {

using emu::Site;

// ---- Places in the grid -----------------------------------------------------------------------

inline uint32_t thread_x() { return emu::engine->self().index.x; }
inline uint32_t thread_y() { return emu::engine->self().index.y; }
inline uint32_t thread_z() { return emu::engine->self().index.z; }
inline uint32_t block_x() { return emu::engine->block_index().x; }
inline uint32_t block_y() { return emu::engine->block_index().y; }
inline uint32_t block_z() { return emu::engine->block_index().z; }
inline uint32_t block_dim_x() { return emu::engine->launch().block.x; }
inline uint32_t block_dim_y() { return emu::engine->launch().block.y; }
inline uint32_t block_dim_z() { return emu::engine->launch().block.z; }
inline uint32_t grid_dim_x() { return emu::engine->launch().grid.x; }
inline uint32_t grid_dim_y() { return emu::engine->launch().grid.y; }
inline uint32_t grid_dim_z() { return emu::engine->launch().grid.z; }
inline uint32_t lane_index() { return emu::engine->self().lane; }
inline uint32_t warp_index() { return emu::engine->self().warp_number; }
inline uint32_t thread_index() { return warp_index() * emu::LANES + lane_index(); }

inline unsigned char* dynamic_shared() {
    return reinterpret_cast<unsigned char*>(emu::engine->dynamic_shared());
}

// ---- Barriers, votes, shuffles ----------------------------------------------------------------

inline void sync_threads(Site site = Site::here()) { emu::engine->wait_barrier(0, 0, site); }
inline void sync_named(uint32_t barrier, uint32_t threads, Site site = Site::here()) {
    emu::engine->wait_barrier(barrier, threads, site);
}
inline void sync_warp(Site site = Site::here()) {
    emu::engine->meet(emu::Collective::Sync, site, [](auto&) {});
}
inline void fence_device() {}

inline uint32_t ballot_lanes(bool predicate, Site site = Site::here()) {
    emu::Engine& engine = *emu::engine;
    const uint32_t lane = engine.self().lane;
    engine.exchange()[lane][0] = predicate ? 1u : 0u;
    const uint32_t lanes = engine.self().warp->lanes;
    auto& votes = engine.meet(emu::Collective::Vote, site, [lanes](auto& all) {
        uint32_t mask = 0;
        for (uint32_t i = 0; i < emu::LANES; ++i) {
            if ((lanes >> i & 1u) != 0) mask |= all[i][0] << i;
        }
        all[0][1] = mask;
    });
    return votes[0][1];
}
inline bool any_lane(bool predicate, Site site = Site::here()) {
    return ballot_lanes(predicate, site) != 0;
}
inline bool all_lanes(bool predicate, Site site = Site::here()) {
    return ballot_lanes(!predicate, site) == 0;
}

namespace detail {
// Every lane's value, and the one of lane `source` where that is in the warp.
template <class T>
inline T exchange(T value, uint32_t source, Site site) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a number of 4 or 8 bytes");
    emu::Engine& engine = *emu::engine;
    memcpy(engine.exchange()[engine.self().lane], &value, sizeof(T));
    const uint32_t lanes = engine.self().warp->lanes;
    auto& values = engine.meet(emu::Collective::Shuffle, site, [](auto&) {});
    if (source >= emu::LANES || (lanes >> source & 1u) == 0) return value;
    T result;
    memcpy(&result, values[source], sizeof(T));
    return result;
}
}  // namespace detail

template <class T>
inline T shuffle(T value, uint32_t source_lane, Site site = Site::here()) {
    return detail::exchange(value, source_lane % emu::LANES, site);
}
template <class T>
inline T shuffle_xor(T value, uint32_t mask, Site site = Site::here()) {
    return detail::exchange(value, lane_index() ^ mask, site);
}
template <class T>
inline T shuffle_down(T value, uint32_t delta, Site site = Site::here()) {
    return detail::exchange(value, lane_index() + delta, site);
}
template <class T>
inline T shuffle_up(T value, uint32_t delta, Site site = Site::here()) {
    return detail::exchange(value, lane_index() - delta, site);
}

// ---- Global memory ----------------------------------------------------------------------------

template <class T>
inline T* at_address(uint64_t address) {
    return reinterpret_cast<T*>(address);
}

template <class T>
inline T load_global(const T* p, Site site = Site::here()) {
    T value;
    memcpy(&value,
           emu::engine->global(emu::Access::Read, reinterpret_cast<uint64_t>(p), sizeof(T), site),
           sizeof(T));
    return value;
}
template <class T>
inline T load_readonly(const T* p, Site site = Site::here()) {
    return load_global(p, site);
}
template <class T>
inline T load_once(const T* p, Site site = Site::here()) {
    return load_global(p, site);
}
template <class T>
inline void store_global(T* p, T value, Site site = Site::here()) {
    memcpy(emu::engine->global(emu::Access::Write, reinterpret_cast<uint64_t>(p), sizeof(T), site),
           &value, sizeof(T));
}
template <class T>
inline void store_once(T* p, T value, Site site = Site::here()) {
    store_global(p, value, site);
}

namespace detail {
// Replaces *p, in global or shared memory, with what `op` makes of it, and gives the old value.
template <class T, class Op>
inline T replace(T* p, Site site, Op op) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a number of 4 or 8 bytes");
    char* place = reinterpret_cast<char*>(p);
    if (emu::engine->is_shared(p)) {
        emu::engine->check_shared(p, sizeof(T), site, false);
    } else {
        place = emu::engine->global(emu::Access::Atomic, reinterpret_cast<uint64_t>(p), sizeof(T),
                                    site);
    }
    T old;
    memcpy(&old, place, sizeof(T));
    const T now = op(old);
    memcpy(place, &now, sizeof(T));
    return old;
}
}  // namespace detail

template <class T>
inline T atomic_add(T* p, T value, Site site = Site::here()) {
    return detail::replace(p, site, [value](T old) {
        return static_cast<T>(static_cast<uint64_t>(old) + static_cast<uint64_t>(value));
    });
}
template <class T>
inline T atomic_max(T* p, T value, Site site = Site::here()) {
    return detail::replace(p, site, [value](T old) { return old < value ? value : old; });
}

// ---- Shared memory ----------------------------------------------------------------------------

template <class T>
inline T load_shared(const T* p, Site site = Site::here()) {
    emu::engine->check_shared(p, sizeof(T), site, true);
    T value;
    memcpy(&value, p, sizeof(T));
    return value;
}
template <class T>
inline void store_shared(T* p, T value, Site site = Site::here()) {
    emu::engine->check_shared(p, sizeof(T), site, true);
    memcpy(static_cast<void*>(p), &value, sizeof(T));
}

inline void cp_async_16(void* shared, const void* global, Site site = Site::here()) {
    emu::engine->add_copy(shared, global, 16, 16, site);
}
inline void cp_async_8(void* shared, const void* global, Site site = Site::here()) {
    emu::engine->add_copy(shared, global, 8, 8, site);
}
inline void cp_async_4(void* shared, const void* global, Site site = Site::here()) {
    emu::engine->add_copy(shared, global, 4, 4, site);
}
inline void cp_async_16_or_zero(void* shared, const void* global, uint32_t bytes,
                                Site site = Site::here()) {
    emu::engine->add_copy(shared, global, bytes, 16, site);
}
inline void cp_async_4_or_zero(void* shared, const void* global, uint32_t bytes,
                               Site site = Site::here()) {
    emu::engine->add_copy(shared, global, bytes, 4, site);
}
inline void cp_async_commit() { emu::engine->commit_copies(); }
template <int N>
inline void cp_async_wait() {
    emu::engine->wait_copies(N);
}

// ---- Numbers ----------------------------------------------------------------------------------

inline float fma_f32(float a, float b, float c) { return ::fmaf(a, b, c); }
inline float exp2_fast(float x) { return emu::exp2_fast(x); }
inline float log2_fast(float x) { return emu::log2_fast(x); }
inline float bits_to_f32(uint32_t bits) { return emu::bits_as<float>(bits); }
inline uint32_t f32_to_bits(float x) { return emu::bits_as<uint32_t>(x); }
inline int32_t f32_to_i32(float x) { return emu::f32_to_i32(x); }
inline float i32_to_f32(int32_t x) { return static_cast<float>(x); }
inline float min_f32(float a, float b) { return ::fminf(a, b); }
inline float max_f32(float a, float b) { return ::fmaxf(a, b); }

inline float f16_to_f32(uint16_t x) { return emu::f16_to_f32(x); }
inline uint16_t f32_to_f16(float x) { return emu::f32_to_f16(x); }
inline float bf16_to_f32(uint16_t x) { return emu::bf16_to_f32(x); }
inline uint16_t f32_to_bf16(float x) { return emu::f32_to_bf16(x); }
inline uint32_t pack_f16(float low, float high) {
    return emu::f32_to_f16(low) | static_cast<uint32_t>(emu::f32_to_f16(high)) << 16;
}
inline uint32_t pack_bf16(float low, float high) {
    return emu::f32_to_bf16(low) | static_cast<uint32_t>(emu::f32_to_bf16(high)) << 16;
}
inline Float2 unpack_f16(uint32_t x) {
    return {emu::f16_to_f32(static_cast<uint16_t>(x)),
            emu::f16_to_f32(static_cast<uint16_t>(x >> 16))};
}
inline Float2 unpack_bf16(uint32_t x) {
    return {emu::bf16_to_f32(static_cast<uint16_t>(x)),
            emu::bf16_to_f32(static_cast<uint16_t>(x >> 16))};
}
inline uint32_t add_f16x2(uint32_t a, uint32_t b) { return emu::halves(emu::add_f16, a, b); }
inline uint32_t sub_f16x2(uint32_t a, uint32_t b) {
    return emu::halves(emu::add_f16, a, b ^ 0x80008000u);
}
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) { return emu::halves(emu::mul_f16, a, b); }
inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    return emu::halves(emu::fma_f16, a, b, c);
}
inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    return emu::halves(emu::fma_bf16, a, b, c);
}
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    return emu::permute_bytes(a, b, selector);
}
inline int32_t dp4a(uint32_t a, uint32_t b, int32_t c) { return emu::dp4a(a, b, c); }

// ---- Matrices ---------------------------------------------------------------------------------

namespace detail {
template <uint32_t COUNT, bool TRANSPOSED>
inline void load_matrices(uint32_t (&r)[COUNT], const void* row, Site site) {
    emu::Engine& engine = *emu::engine;
    const uint32_t lane = engine.self().lane;
    if (lane < 8 * COUNT) engine.check_shared(row, 16, site, true);
    memcpy(engine.exchange()[lane], &row, sizeof row);
    auto& words = engine.meet(emu::Collective::LoadMatrix, site,
                              [](auto& all) { emu::load_matrices<COUNT, TRANSPOSED>(all); });
    for (uint32_t i = 0; i < COUNT; ++i) r[i] = words[lane][i];
}

template <class T, uint32_t A, class Multiply>
inline void mma(T (&c)[4], const uint32_t (&a)[A], uint32_t b0, uint32_t b1, Site site,
                Multiply multiply) {
    emu::Engine& engine = *emu::engine;
    const uint32_t lane = engine.self().lane;
    uint32_t* words = engine.exchange()[lane];
    memcpy(words + emu::MMA_A, a, sizeof a);
    words[emu::MMA_B] = b0;
    words[emu::MMA_B + 1] = b1;
    memcpy(words + emu::MMA_C, c, sizeof c);
    auto& results = engine.meet(emu::Collective::Mma, site, multiply);
    memcpy(c, results[lane] + emu::MMA_RESULT, sizeof c);
}
}  // namespace detail

inline void ldmatrix_x1(uint32_t (&r)[1], const void* row, Site site = Site::here()) {
    detail::load_matrices<1, false>(r, row, site);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void* row, Site site = Site::here()) {
    detail::load_matrices<2, false>(r, row, site);
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, Site site = Site::here()) {
    detail::load_matrices<4, false>(r, row, site);
}
inline void ldmatrix_x1_trans(uint32_t (&r)[1], const void* row, Site site = Site::here()) {
    detail::load_matrices<1, true>(r, row, site);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row, Site site = Site::here()) {
    detail::load_matrices<2, true>(r, row, site);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, Site site = Site::here()) {
    detail::load_matrices<4, true>(r, row, site);
}

inline void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             Site site = Site::here()) {
    detail::mma(c, a, b0, b1, site, [](auto& all) { emu::multiply_halves<16, emu::HalfF16>(all); });
}
inline void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                              Site site = Site::here()) {
    detail::mma(c, a, b0, b1, site,
                [](auto& all) { emu::multiply_halves<16, emu::HalfBf16>(all); });
}
inline void mma_m16n8k8_f16(float (&c)[4], const uint32_t (&a)[2], uint32_t b0,
                            Site site = Site::here()) {
    detail::mma(c, a, b0, 0, site, [](auto& all) { emu::multiply_halves<8, emu::HalfF16>(all); });
}
inline void mma_m16n8k8_bf16(float (&c)[4], const uint32_t (&a)[2], uint32_t b0,
                             Site site = Site::here()) {
    detail::mma(c, a, b0, 0, site, [](auto& all) { emu::multiply_halves<8, emu::HalfBf16>(all); });
}
inline void mma_m16n8k32_s8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                            Site site = Site::here()) {
    detail::mma(c, a, b0, b1, site, [](auto& all) { emu::multiply_bytes(all); });
}

}  // namespace kvpool::dev
