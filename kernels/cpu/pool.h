// Threads that run one function together, claim its parts from shared counters and meet at barriers.
//
// A waiter spins briefly, then gives its core away: on a small machine the thread that it waits for may need that core.
#pragma once
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
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
    atomic_int round, done, closing;
    atomic_int arrived, meeting;
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
        sched_yield();
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

// Every thread of the running function comes here before any goes on.
static inline void meet(pool *p) {
    if (p->threads == 1) return;
    int meeting = atomic_load_explicit(&p->meeting, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) == p->threads - 1) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&p->meeting, meeting + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&p->meeting, memory_order_acquire) == meeting; spins++) relax(spins);
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
        p->run(p->argument, seat.thread);
        atomic_fetch_add_explicit(&p->done, 1, memory_order_release);
    }
}

static int pool_open(pool *p, int threads) {
    p->threads = 1;
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

// Run `run` on every thread, the caller included; returns when all have finished.
static void pool_run(pool *p, void (*run)(void *, int), void *argument) {
    p->run = run;
    p->argument = argument;
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
    if (p->threads > 1) {
        atomic_fetch_add_explicit(&p->round, 1, memory_order_release);
        wake_all(&p->round);
    }
    run(argument, 0);
    for (int spins = 0; atomic_load_explicit(&p->done, memory_order_acquire) < p->threads - 1; spins++) relax(spins);
}

static void pool_close(pool *p) {
    atomic_store(&p->closing, 1);
    atomic_fetch_add(&p->round, 1);
    wake_all(&p->round);
    for (int t = 1; t < p->threads; t++) pthread_join(p->ids[t], NULL);
}
