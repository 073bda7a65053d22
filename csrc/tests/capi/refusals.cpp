// What the C++ layer does with a library of another ABI version, which this program pretends to have, and
// with a value that is asked for and not there.
//
//     refusals          the first
//     refusals abort    the second: ends by abort(), with the message
#include <kvpool.hpp>

#include "check.h"

// Found before the library's own.
uint32_t kvpool_abi_version(void) noexcept { return KVPOOL_ABI_VERSION + 1; }

int main(int argc, char**) {
    const auto config = kvpool::Config::parse(CHECK_CONFIG);
    if (argc > 1) (void)config.value();
    CHECK(config.status() == kvpool::Status::wrong_library);
    CHECK(strstr(config.error().message(), "was compiled for ABI version 1") != nullptr);
    CHECK(kvpool::Config::load("check.toml").status() == kvpool::Status::wrong_library);
    CHECK(kvpool::check_library().status() == kvpool::Status::wrong_library);
    std::printf("ok\n");
}
