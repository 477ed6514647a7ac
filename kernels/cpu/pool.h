// Threads that run one function together. Inside it they share the parts of one phase after another; nobody
// waits for a thread, only for parts, so one that lost its core holds up no more than the part it had begun.
//
// A waiter spins briefly, then sleeps: on a small machine the thread that it waits for may need that core.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define MOST_THREADS 64
#define SPINS 2000

typedef struct pool {
    int threads;
    void (*run)(void *argument, int thread);
    void *argument;
    int core;  // the caller's, when the round began
    atomic_int round, done, closing;
    pthread_t ids[MOST_THREADS];
} pool;

typedef struct {
    pool *pool;
    int thread;
} pool_seat;

static inline void relax(int spins) {
    if (spins < SPINS) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    } else {
        const struct timespec moment = {0, 20000};
        nanosleep(&moment, NULL);
    }
}

static inline void sleep_while(atomic_int *word, int value) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    (void)word, (void)value;
    sched_yield();
#endif
}

static inline void wake_all(atomic_int *word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

static inline int core_of_caller(void) {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

// A thread that woke on the caller's core would take turns with it until the kernel notices, which can be seconds.
static inline void move_away(int core) {
#if defined(__linux__)
    cpu_set_t allowed, others;
    if (core < 0 || core >= CPU_SETSIZE || core != sched_getcpu()) return;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    others = allowed;
    CPU_CLR(core, &others);
    if (!CPU_COUNT(&others) || sched_setaffinity(0, sizeof others, &others)) return;
    sched_setaffinity(0, sizeof allowed, &allowed);
#else
    (void)core;
#endif
}

static void *pool_work(void *seat_) {
    pool_seat seat = *(pool_seat *)seat_;
    free(seat_);
    pool *p = seat.pool;
    int seen = 0;
    for (;;) {
        for (int spins = 0; atomic_load_explicit(&p->round, memory_order_acquire) == seen; spins++) {
            if (spins < SPINS)
                relax(spins);
            else
                sleep_while(&p->round, seen);
        }
        seen++;
        if (atomic_load(&p->closing)) return NULL;
        move_away(p->core);
        p->run(p->argument, seat.thread);
        atomic_fetch_add_explicit(&p->done, 1, memory_order_release);
    }
}

static int pool_open(pool *p, int threads) {
    p->threads = 1;
    atomic_store(&p->done, threads > 1 ? threads - 1 : 0);
    for (int t = 1; t < threads && t < MOST_THREADS; t++) {
        pool_seat *seat = malloc(sizeof *seat);
        if (!seat) return -1;
        *seat = (pool_seat){p, t};
        if (pthread_create(&p->ids[t], NULL, pool_work, seat)) {
            free(seat);
            return -1;
        }
        p->threads = t + 1;
    }
    return 0;
}

// Wait until no thread is left in the last round. A round's function returns when its parts are done, which may be before
// a thread that fell behind has seen it: that thread must be out before anything it looks at changes.
static void pool_settle(pool *p) {
    for (int spins = 0; atomic_load_explicit(&p->done, memory_order_acquire) < p->threads - 1; spins++) relax(spins);
}

// Run `run` on every thread, the caller included; returns when the caller's own run has. Settle first.
static void pool_run(pool *p, void (*run)(void *, int), void *argument) {
    p->run = run;
    p->argument = argument;
    p->core = core_of_caller();
    if (p->threads > 1) {
        atomic_store_explicit(&p->done, 0, memory_order_relaxed);
        atomic_fetch_add_explicit(&p->round, 1, memory_order_release);
        wake_all(&p->round);
    }
    run(argument, 0);
}

static void pool_close(pool *p) {
    atomic_store(&p->closing, 1);
    atomic_fetch_add(&p->round, 1);
    wake_all(&p->round);
    for (int t = 1; t < p->threads; t++) pthread_join(p->ids[t], NULL);
}
