// Tensors of a step. A part of kvpool.hpp.
#ifndef KVPOOL_TENSOR_HPP
#define KVPOOL_TENSOR_HPP

#include "values.hpp"

namespace kvpool {
inline namespace KVPOOL_HPP_KIND {

enum class Dtype : int32_t { f32 = KVPOOL_F32, f16 = KVPOOL_F16, bf16 = KVPOOL_BF16 };
enum class Memory : int32_t { host = KVPOOL_HOST, device = KVPOOL_DEVICE_MEMORY };

// The bits of a half precision float and of a bfloat16.
enum class f16 : uint16_t {};
enum class bf16 : uint16_t {};

namespace detail {

template <class T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
    static constexpr Dtype value = Dtype::f32;
};
template <>
struct DtypeOf<f16> {
    static constexpr Dtype value = Dtype::f16;
};
template <>
struct DtypeOf<bf16> {
    static constexpr Dtype value = Dtype::bf16;
};

template <class T>
kvpool_tensor_t c_tensor(T* data, uint64_t len, Memory memory) noexcept {
    using Element = std::remove_const_t<T>;
    // The C struct is one for inputs and outputs; nothing is written through an input.
    return {const_cast<Element*>(data), len, static_cast<kvpool_dtype_t>(DtypeOf<Element>::value),
            static_cast<kvpool_memory_t>(memory)};
}

}  // namespace detail

// An output: float, f16 or bf16 elements of someone else. Without one it stands for "none".
class TensorMut {
public:
    TensorMut() noexcept : c_{nullptr, 0, KVPOOL_F32, KVPOOL_HOST} {}
    // Of a vector, an array or a span, in host memory.
    template <class C, class T = std::remove_pointer_t<decltype(std::declval<C&>().data())>,
              Dtype = detail::DtypeOf<T>::value>
    TensorMut(C& values) noexcept : c_(detail::c_tensor(values.data(), values.size(), Memory::host)) {}
    template <class T, size_t N, Dtype = detail::DtypeOf<T>::value>
    TensorMut(T (&values)[N]) noexcept : c_(detail::c_tensor(values, N, Memory::host)) {}
    // Of a span that is made where it is used, as std::span(out).first(n).
    template <class C, class T = std::remove_pointer_t<decltype(std::declval<C&>().data())>,
              Dtype = detail::DtypeOf<T>::value,
              std::enable_if_t<!std::is_lvalue_reference_v<C> && std::is_trivially_copyable_v<C> &&
                                   !std::is_const_v<T> && std::is_convertible_v<C, span<T>>,
                               int> = 0>
    TensorMut(C&& values) noexcept : c_(detail::c_tensor(values.data(), values.size(), Memory::host)) {}
    // `len` elements at an address.
    template <class T, Dtype = detail::DtypeOf<T>::value>
    static TensorMut at(T* data, uint64_t len, Memory memory) noexcept {
        TensorMut tensor;
        tensor.c_ = detail::c_tensor(data, len, memory);
        return tensor;
    }
    const kvpool_tensor_t& c() const noexcept { return c_; }

private:
    kvpool_tensor_t c_;
};

// An input.
class TensorRef {
public:
    TensorRef(const TensorMut& tensor) noexcept : c_(tensor.c()) {}
    template <class C, class T = std::remove_pointer_t<decltype(std::declval<const C&>().data())>,
              Dtype = detail::DtypeOf<std::remove_const_t<T>>::value>
    TensorRef(const C& values) noexcept : c_(detail::c_tensor(values.data(), values.size(), Memory::host)) {}
    template <class T, size_t N, Dtype = detail::DtypeOf<std::remove_const_t<T>>::value>
    TensorRef(const T (&values)[N]) noexcept : c_(detail::c_tensor(values, N, Memory::host)) {}
    // `len` elements at an address.
    template <class T, Dtype = detail::DtypeOf<std::remove_const_t<T>>::value>
    static TensorRef at(const T* data, uint64_t len, Memory memory) noexcept {
        return TensorRef(detail::c_tensor(data, len, memory));
    }
    const kvpool_tensor_t& c() const noexcept { return c_; }

private:
    explicit TensorRef(kvpool_tensor_t c) noexcept : c_(c) {}
    kvpool_tensor_t c_;
};

// Inputs by their name: kvpool::tensor(k).
inline TensorRef tensor(span<const float> values) noexcept { return TensorRef(values); }
inline TensorRef tensor(span<const f16> values) noexcept { return TensorRef(values); }
inline TensorRef tensor(span<const bf16> values) noexcept { return TensorRef(values); }
// Outputs by theirs.
inline TensorMut tensor_mut(span<float> values) noexcept { return TensorMut(values); }
inline TensorMut tensor_mut(span<f16> values) noexcept { return TensorMut(values); }
inline TensorMut tensor_mut(span<bf16> values) noexcept { return TensorMut(values); }

struct AttendOptions {
    float softmax_scale = 0;  // factor on q.k; 0 = 1 / sqrt(head_dim)
    TensorMut lse = {};       // f32 [num_tokens, num_q_heads], or none

    kvpool_attend_options_t c() const noexcept {
        kvpool_attend_options_t c = KVPOOL_ATTEND_OPTIONS_INIT;
        c.softmax_scale = softmax_scale;
        c.lse = lse.c();
        return c;
    }
};

}  // namespace KVPOOL_HPP_KIND
}  // namespace kvpool

#endif  // KVPOOL_TENSOR_HPP
