// The layer in a second unit, where failed results throw.
#if defined(__cpp_exceptions)
#define KVPOOL_EXCEPTIONS
#endif
#include <kvpool.hpp>

int second_unit();

int second_unit() {
#if defined(KVPOOL_EXCEPTIONS)
    try {
        (void)kvpool::Config::load("/no/such/file.toml").value();
        return 1;
    } catch (const kvpool::Exception& error) {
        if (error.status() != kvpool::Status::config || error.what()[0] == '\0') return 2;
        if (error.error().status() != error.status()) return 3;
    }
    try {
        kvpool::check_library().value();
        kvpool::Sequence().release().value();
        return 4;
    } catch (const std::exception&) {
    }
#endif
    return 0;
}
