// What the emulator's tests share: TEST(name) { … CHECK(…); … }
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <string>
#include <vector>

struct TestCase {
    const char* name;
    void (*run)();
};

inline std::vector<TestCase>& test_cases() {
    static std::vector<TestCase> all;
    return all;
}
struct TestRegistration {
    TestRegistration(const char* name, void (*run)()) {
        test_cases().push_back(TestCase{name, run});
    }
};
// Checks that failed so far.
inline int failed_checks = 0;

#define TEST(name)                                                         \
    static void test_##name();                                             \
    static const TestRegistration registration_##name(#name, test_##name); \
    static void test_##name()

#define CHECK(condition)                                                      \
    do {                                                                      \
        if (!(condition)) {                                                   \
            ++failed_checks;                                                  \
            printf("  %s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
        }                                                                     \
    } while (0)

#define CHECK_EQ(left, right)                                                                \
    do {                                                                                     \
        const auto left_value = (left);                                                      \
        const auto right_value = (right);                                                    \
        if (!(left_value == right_value)) {                                                  \
            ++failed_checks;                                                                 \
            printf("  %s:%d: %s is %s, expected %s\n", __FILE__, __LINE__, #left,            \
                   std::to_string(left_value).c_str(), std::to_string(right_value).c_str()); \
        }                                                                                    \
    } while (0)

#define CHECK_TEXT(left, right)                                                               \
    do {                                                                                      \
        const std::string left_value = (left);                                                \
        if (left_value != (right)) {                                                          \
            ++failed_checks;                                                                  \
            printf("  %s:%d: %s is \"%s\"\n", __FILE__, __LINE__, #left, left_value.c_str()); \
        }                                                                                     \
    } while (0)

#define CHECK_HAS(text, part)                                                                 \
    do {                                                                                      \
        const std::string text_value = (text);                                                \
        if (text_value.find(part) == std::string::npos) {                                     \
            ++failed_checks;                                                                  \
            printf("  %s:%d: \"%s\" has no \"%s\"\n", __FILE__, __LINE__, text_value.c_str(), \
                   part);                                                                     \
        }                                                                                     \
    } while (0)

// Numbers that look random, the same in every run.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint32_t next() {
        state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
        return static_cast<uint32_t>(state_ >> 32);
    }
    // In [from, to).
    int range(int from, int to) {
        return from + static_cast<int>(next() % static_cast<uint32_t>(to - from));
    }
    // In [-1, 1).
    float unit() { return static_cast<float>(static_cast<int32_t>(next())) * 0x1p-31f; }

private:
    uint64_t state_;
};
