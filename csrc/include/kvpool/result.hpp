// Spans, statuses, errors and results. A part of kvpool.hpp.
#ifndef KVPOOL_RESULT_HPP
#define KVPOOL_RESULT_HPP

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <new>
#include <optional>
#include <type_traits>
#include <utility>

#include "../kvpool.h"

// What value() does differs between units with and without KVPOOL_EXCEPTIONS, so their types do too.
#if defined(KVPOOL_EXCEPTIONS)
#if !defined(__cpp_exceptions) && !defined(_CPPUNWIND)
#error "KVPOOL_EXCEPTIONS is defined, and the compiler's exceptions are off"
#endif
#include <exception>
#define KVPOOL_HPP_KIND throwing
#else
#define KVPOOL_HPP_KIND aborting
#endif

namespace kvpool {
inline namespace KVPOOL_HPP_KIND {

// `size` values that someone else owns.
template <class T>
class span {
    template <class C>
    using to_pointer = decltype(std::declval<C&>().data());
    template <class U>
    static constexpr bool fits = std::is_convertible_v<U (*)[], T (*)[]>;

public:
    using value_type = std::remove_cv_t<T>;

    constexpr span() noexcept = default;
    constexpr span(T* data, size_t size) noexcept : data_(data), size_(size) {}

    template <class U, size_t N, std::enable_if_t<fits<U>, int> = 0>
    constexpr span(U (&array)[N]) noexcept : data_(array), size_(N) {}

    // Of a vector, an array, another span: what has data() and size(). Of a temporary only to read.
    template <class C, class Pointer = to_pointer<C>,
              std::enable_if_t<fits<std::remove_pointer_t<Pointer>> &&
                                   (std::is_lvalue_reference_v<C> || std::is_const_v<T>) &&
                                   !std::is_same_v<std::decay_t<C>, span>,
                               int> = 0>
    constexpr span(C&& values) noexcept : data_(values.data()), size_(values.size()) {}

    // Of values in braces, for the length of a call.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winit-list-lifetime"
#endif
    template <class U = T, std::enable_if_t<std::is_const_v<U>, int> = 0>
    constexpr span(std::initializer_list<std::remove_cv_t<U>> values) noexcept
        : data_(values.begin()), size_(values.size()) {}
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

    constexpr T* data() const noexcept { return data_; }
    constexpr size_t size() const noexcept { return size_; }
    constexpr bool empty() const noexcept { return size_ == 0; }
    constexpr T* begin() const noexcept { return data_; }
    constexpr T* end() const noexcept { return data_ + size_; }
    // Not checked.
    constexpr T& operator[](size_t i) const noexcept { return data_[i]; }
    constexpr span subspan(size_t from, size_t size) const noexcept { return span(data_ + from, size); }

private:
    T* data_ = nullptr;
    size_t size_ = 0;
};

// The statuses of kvpool.h, where each is explained. A later library may give others.
enum class Status : int32_t {
    // Of this layer: the library has another ABI version than the header.
    wrong_library = -1,

    ok = KVPOOL_OK,
    null_pointer = KVPOOL_NULL_POINTER,
    bad_size = KVPOOL_BAD_SIZE,
    bad_argument = KVPOOL_BAD_ARGUMENT,
    bad_handle = KVPOOL_BAD_HANDLE,
    stale_handle = KVPOOL_STALE_HANDLE,
    foreign_handle = KVPOOL_FOREIGN_HANDLE,
    buffer_too_small = KVPOOL_BUFFER_TOO_SMALL,
    busy = KVPOOL_BUSY,
    step_open = KVPOOL_STEP_OPEN,
    wrong_shape = KVPOOL_WRONG_SHAPE,
    overlap = KVPOOL_OVERLAP,
    no_such_layer = KVPOOL_NO_SUCH_LAYER,
    no_such_group = KVPOOL_NO_SUCH_GROUP,

    panic = KVPOOL_PANIC,
    poisoned = KVPOOL_POISONED,
    invariant = KVPOOL_INVARIANT,

    config = KVPOOL_CONFIG,
    plan = KVPOOL_PLAN,
    memory_too_small = KVPOOL_MEMORY_TOO_SMALL,
    no_device = KVPOOL_NO_DEVICE,
    out_of_memory = KVPOOL_OUT_OF_MEMORY,
    too_many_objects = KVPOOL_TOO_MANY_OBJECTS,

    no_seq_slot = KVPOOL_NO_SEQ_SLOT,
    not_admitted = KVPOOL_NOT_ADMITTED,
    never_fits = KVPOOL_NEVER_FITS,
    too_long = KVPOOL_TOO_LONG,
    duplicate_key = KVPOOL_DUPLICATE_KEY,
    batch_under_way = KVPOOL_BATCH_UNDER_WAY,
    pool_exhausted = KVPOOL_POOL_EXHAUSTED,
    step_too_large = KVPOOL_STEP_TOO_LARGE,
    no_pin = KVPOOL_NO_PIN,
    no_view = KVPOOL_NO_VIEW,
    nobody = KVPOOL_NOBODY,

    bad_step = KVPOOL_BAD_STEP,
    token_mismatch = KVPOOL_TOKEN_MISMATCH,
    not_appended = KVPOOL_NOT_APPENDED,
    already_appended = KVPOOL_ALREADY_APPENDED,
    not_held = KVPOOL_NOT_HELD,
    bad_retention = KVPOOL_BAD_RETENTION,
    reuse_off = KVPOOL_REUSE_OFF,
    nothing_to_pin = KVPOOL_NOTHING_TO_PIN,
    reservations_held = KVPOOL_RESERVATIONS_HELD,
    pins_alive = KVPOOL_PINS_ALIVE,
    sequences_alive = KVPOOL_SEQUENCES_ALIVE,
    too_many_refs = KVPOOL_TOO_MANY_REFS,
    key_too_long = KVPOOL_KEY_TOO_LONG,

    device = KVPOOL_DEVICE,
    wrong_memory = KVPOOL_WRONG_MEMORY,

    save_io = KVPOOL_SAVE_IO,
    save_under_way = KVPOOL_SAVE_UNDER_WAY,
    save_damaged = KVPOOL_SAVE_DAMAGED,
    save_mismatch = KVPOOL_SAVE_MISMATCH
};

// Its name in kvpool.h, such as "KVPOOL_NOT_ADMITTED".
inline const char* name(Status status) noexcept {
    if (status == Status::wrong_library) return "kvpool::Status::wrong_library";
    return kvpool_status_name(static_cast<kvpool_status_t>(status));
}

// Why a call failed: a value, to be kept and copied.
class Error {
public:
    Status status() const noexcept { return static_cast<Status>(c_.status); }
    // One sentence: what, where, and what to do.
    const char* message() const noexcept { return c_.message; }
    // The setting to change, as "pool.capacity"; "" if none.
    const char* knob() const noexcept { return c_.knob; }
    // What was asked for and what there is, in the unit that the message says.
    std::optional<uint64_t> wanted() const noexcept { return number(c_.wanted); }
    std::optional<uint64_t> available() const noexcept { return number(c_.available); }
    // Which entry of an array was refused.
    std::optional<uint64_t> index() const noexcept { return number(c_.index); }
    // Of a file; 0 if none is meant.
    uint32_t line() const noexcept { return c_.line; }
    const kvpool_error_t& c() const noexcept { return c_; }

    // The calling thread's last failure; of status ok if nothing has failed on it.
    static Error last() noexcept {
        Error error;
        if (kvpool_last_error(KVPOOL_OUT(error.c_)) != KVPOOL_OK) {
            error = Error(Status::wrong_library, "the library does not know this kvpool_error_t");
        }
        return error;
    }

    // One that did not come from the library.
    Error(Status status, const char* message) noexcept {
        c_.status = static_cast<kvpool_status_t>(status);
        std::snprintf(c_.message, sizeof(c_.message), "%s", message);
    }

private:
    Error() noexcept = default;
    static std::optional<uint64_t> number(uint64_t value) noexcept {
        if (value == KVPOOL_NO_NUMBER) return std::nullopt;
        return value;
    }

    kvpool_error_t c_ = {sizeof(kvpool_error_t), KVPOOL_OK,        0,  KVPOOL_NO_NUMBER,
                         KVPOOL_NO_NUMBER,       KVPOOL_NO_NUMBER, "", ""};
};

#if defined(KVPOOL_EXCEPTIONS)
// What value() of a failed Result throws.
class Exception : public std::exception {
public:
    explicit Exception(const Error& error) noexcept : error_(error) {}
    const char* what() const noexcept override { return error_.message(); }
    const Error& error() const noexcept { return error_; }
    Status status() const noexcept { return error_.status(); }

private:
    Error error_;
};
#endif

namespace detail {

[[noreturn]] inline void no_value(const Error& error) {
#if defined(KVPOOL_EXCEPTIONS)
    throw Exception(error);
#else
    std::fprintf(stderr, "kvpool: %s: %s\n", name(error.status()), error.message());
    std::abort();
#endif
}

[[noreturn]] inline void no_error() noexcept {
    std::fprintf(stderr, "kvpool: error() of a Result that has none\n");
    std::abort();
}

}  // namespace detail

// A T, or the Error for which there is none.
template <class T>
class [[nodiscard]] Result {
public:
    Result(T value) noexcept : ok_(true), value_(std::move(value)) {}
    Result(const Error& error) noexcept : ok_(false), error_(error) {}
    Result(Result&& other) noexcept : ok_(other.ok_) { take(other); }
    Result& operator=(Result&& other) noexcept {
        if (this != &other) {
            end();
            ok_ = other.ok_;
            take(other);
        }
        return *this;
    }
    ~Result() { end(); }

    bool ok() const noexcept { return ok_; }
    explicit operator bool() const noexcept { return ok_; }
    Status status() const noexcept { return ok_ ? Status::ok : error_.status(); }
    const Error& error() const noexcept {
        if (ok_) detail::no_error();
        return error_;
    }

    T& value() & { return checked(); }
    const T& value() const& { return const_cast<Result*>(this)->checked(); }
    T value() && { return std::move(checked()); }
    T& operator*() & { return checked(); }
    const T& operator*() const& { return value(); }
    T operator*() && { return std::move(checked()); }
    T* operator->() { return &checked(); }
    const T* operator->() const { return &value(); }
    template <class U>
    T value_or(U&& other) && {
        return ok_ ? std::move(value_) : static_cast<T>(std::forward<U>(other));
    }

private:
    T& checked() {
        if (!ok_) detail::no_value(error_);
        return value_;
    }
    void take(Result& other) noexcept {
        if (ok_) {
            new (&value_) T(std::move(other.value_));
        } else {
            new (&error_) Error(other.error_);
        }
    }
    void end() noexcept {
        if (ok_) value_.~T();
    }

    bool ok_;
    union {
        T value_;
        Error error_;
    };
};

// Nothing, or the Error that came in between.
template <>
class [[nodiscard]] Result<void> {
public:
    Result() noexcept : ok_(true), none_(0) {}
    Result(const Error& error) noexcept : ok_(false), error_(error) {}
    Result(const Result& other) noexcept : ok_(other.ok_), none_(0) { take(other); }
    Result& operator=(const Result& other) noexcept {
        ok_ = other.ok_;
        take(other);
        return *this;
    }

    bool ok() const noexcept { return ok_; }
    explicit operator bool() const noexcept { return ok_; }
    Status status() const noexcept { return ok_ ? Status::ok : error_.status(); }
    const Error& error() const noexcept {
        if (ok_) detail::no_error();
        return error_;
    }
    // Says that this cannot have failed.
    void value() const {
        if (!ok_) detail::no_value(error_);
    }

private:
    void take(const Result& other) noexcept {
        if (!ok_ && this != &other) new (&error_) Error(other.error_);
    }

    bool ok_;
    union {
        char none_;
        Error error_;
    };
};

namespace detail {

inline Result<void> result(kvpool_status_t status) noexcept {
    if (status == KVPOOL_OK) return {};
    return Error::last();
}

// `value` was written by the call that gave `status`.
template <class T>
Result<T> result(kvpool_status_t status, T& value) noexcept {
    if (status == KVPOOL_OK) return Result<T>(std::move(value));
    return Error::last();
}

}  // namespace detail

// KVPOOL_VERSION and KVPOOL_ABI_VERSION of the library that runs.
inline const char* library_version() noexcept { return kvpool_version(); }
inline uint32_t library_abi_version() noexcept { return kvpool_abi_version(); }

// Whether the library is one for this header: Status::wrong_library. Config::load and Config::parse look too.
inline Result<void> check_library() noexcept {
    if (kvpool_abi_version() == KVPOOL_ABI_VERSION) return {};
    char message[160];
    std::snprintf(message, sizeof(message),
                  "the program was compiled for ABI version %u of kvpool, and the library %s has %u",
                  static_cast<unsigned>(KVPOOL_ABI_VERSION), kvpool_version(),
                  static_cast<unsigned>(kvpool_abi_version()));
    return Error(Status::wrong_library, message);
}

}  // namespace KVPOOL_HPP_KIND
}  // namespace kvpool

#endif  // KVPOOL_RESULT_HPP
