// The kernels that were compiled in, by name.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <vector>

namespace kvpool::emu {

struct KernelEntry {
    const char* name;
    size_t params_bytes;
    uint32_t max_threads;
    // Runs the body of one thread. params: [params_bytes]
    void (*run)(const void* params);
};

inline std::vector<const KernelEntry*>& kernels() {
    static std::vector<const KernelEntry*> all;
    return all;
}

inline const KernelEntry* find_kernel(const char* name) {
    for (const KernelEntry* kernel : kernels()) {
        if (strcmp(kernel->name, name) == 0) return kernel;
    }
    return nullptr;
}

// Adds a kernel before main() runs, or when the library is loaded.
struct KernelRegistration {
    explicit KernelRegistration(const KernelEntry* kernel) { kernels().push_back(kernel); }
};

}  // namespace kvpool::emu

#define KV_KERNEL(name, Params, most_threads)                                          \
    extern "C" void name(const Params& p);                                             \
    static const ::kvpool::emu::KernelEntry name##_entry{                              \
        #name, sizeof(Params), most_threads,                                           \
        [](const void* params) { name(*static_cast<const Params*>(params)); }};        \
    static const ::kvpool::emu::KernelRegistration name##_registration{&name##_entry}; \
    extern "C" void name([[maybe_unused]] const Params& p)
#define KV_KERNEL_BLOCKS(name, Params, most_threads, min_blocks) \
    KV_KERNEL(name, Params, most_threads)

#define KV_SHARED(type, name, dims)                                                      \
    using name##_type = type dims;                                                       \
    static char name##_key;                                                              \
    name##_type& name = *static_cast<name##_type*>(::kvpool::emu::engine->static_shared( \
        &name##_key, sizeof(name##_type), alignof(name##_type)))
