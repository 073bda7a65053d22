// Runs the tests, or those whose names contain the first argument.
#include <string.h>

#include <algorithm>

#include "check.hpp"

int main(int count, char** arguments) {
    // By name: one is about the driver before anything else has used it.
    std::sort(test_cases().begin(), test_cases().end(),
              [](const TestCase& a, const TestCase& b) { return strcmp(a.name, b.name) < 0; });
    int failed_tests = 0;
    int run = 0;
    for (const TestCase& test : test_cases()) {
        if (count > 1 && strstr(test.name, arguments[1]) == nullptr) continue;
        const int before = failed_checks;
        test.run();
        const bool good = failed_checks == before;
        if (!good) ++failed_tests;
        ++run;
        printf("%s %s\n", good ? "ok    " : "FAILED", test.name);
        fflush(stdout);
    }
    printf("%d of %d tests failed\n", failed_tests, run);
    return failed_tests == 0 && run > 0 ? 0 : 1;
}
