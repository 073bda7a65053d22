// Runs the tests, or those whose names contain the first argument.
#include <string.h>

#include "check.hpp"

int main(int count, char** arguments) {
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
