/* Adds what stands in a file to the wall clock of whoever loads it. The host's own clock is everybody's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *seconds;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int file = open(getenv("ATOLL_TEST_CLOCK"), O_RDONLY | O_CLOEXEC);
    void *at = mmap(NULL, sizeof *seconds, PROT_READ, MAP_SHARED, file, 0);
    seconds = at == MAP_FAILED ? NULL : at;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = real(clock, now);
    if (result == 0 && clock == CLOCK_REALTIME && seconds) now->tv_sec += *seconds;
    return result;
}
