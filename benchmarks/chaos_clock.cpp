// Gives the processes that preload it a wall clock of their own: the machine's, moved by the seconds in a file.
//
// WATTUNE_CHAOS_CLOCK names a file of 8 bytes, a signed number of seconds. It is mapped, so a change counts at once in
// every process. The monotonic clocks stay as they are, as they do when an administrator sets the clock. A wait until a
// wall time that was computed from the moved clock is moved back, so that it takes as long as it was meant to.
//
//     g++ -O2 -shared -fPIC -o chaos_clock.so chaos_clock.cpp -ldl

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

namespace {

int64_t moved_s() {
    static const volatile int64_t* mapped = [] {
        const char* path = getenv("WATTUNE_CHAOS_CLOCK");
        static const int64_t none = 0;
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        if (file < 0) return static_cast<const volatile int64_t*>(&none);
        void* found = mmap(nullptr, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
        close(file);
        return found == MAP_FAILED ? static_cast<const volatile int64_t*>(&none)
                                   : static_cast<const volatile int64_t*>(found);
    }();
    return *mapped;
}

bool is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

// Whether a time is a wall time, not one since the machine started: a condition variable does not tell its clock.
timespec back(const timespec* until) {
    timespec result = *until;
    if (result.tv_sec > 1000000000) result.tv_sec -= moved_s();
    return result;
}

template <typename F> F next(const char* name) { return reinterpret_cast<F>(dlsym(RTLD_NEXT, name)); }

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, struct timespec* now) noexcept {
    long failed = syscall(SYS_clock_gettime, clock, now);
    if (failed == 0 && is_wall(clock)) now->tv_sec += moved_s();
    return static_cast<int>(failed);
}

int gettimeofday(struct timeval* now, void*) noexcept {
    timespec found;
    int failed = clock_gettime(CLOCK_REALTIME, &found);
    *now = {found.tv_sec, found.tv_nsec / 1000};
    return failed;
}

time_t time(time_t* now) noexcept {
    timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const struct timespec* until) {
    static auto real = next<decltype(&pthread_cond_timedwait)>("pthread_cond_timedwait");
    timespec moved = back(until);
    return real(condition, mutex, &moved);
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
    static auto real = next<decltype(&pthread_cond_clockwait)>("pthread_cond_clockwait");
    timespec moved = is_wall(clock) ? back(until) : *until;
    return real(condition, mutex, clock, &moved);
}

int pthread_mutex_timedlock(pthread_mutex_t* mutex, const struct timespec* until) noexcept {
    static auto real = next<decltype(&pthread_mutex_timedlock)>("pthread_mutex_timedlock");
    timespec moved = back(until);
    return real(mutex, &moved);
}

int sem_timedwait(sem_t* semaphore, const struct timespec* until) {
    static auto real = next<decltype(&sem_timedwait)>("sem_timedwait");
    timespec moved = back(until);
    return real(semaphore, &moved);
}

int sem_clockwait(sem_t* semaphore, clockid_t clock, const struct timespec* until) {
    static auto real = next<decltype(&sem_clockwait)>("sem_clockwait");
    timespec moved = is_wall(clock) ? back(until) : *until;
    return real(semaphore, clock, &moved);
}

}  // extern "C"
