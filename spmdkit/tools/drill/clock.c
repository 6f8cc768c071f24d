/* LD_PRELOAD: the wall clock of a process, shifted by the seconds in the file of the variable SPMDKIT_CLOCK_FILE. Waits
   until a time of this clock (absl, pthread) end by it too. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <stdio.h>
#include <stdlib.h>
static long shift(void) {
    long s = 0;
    const char *path = getenv("SPMDKIT_CLOCK_FILE");
    FILE *f = path ? fopen(path, "r") : NULL;
    if (f) { if (fscanf(f, "%ld", &s) != 1) s = 0; fclose(f); }
    return s;
}
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int r = real(id, t);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) t->tv_sec += shift();
    return r;
}
long syscall(long n, ...) {
    static long (*real)(long, ...);
    long a[6];
    struct timespec t;
    va_list l;
    if (!real) real = dlsym(RTLD_NEXT, "syscall");
    va_start(l, n);
    for (int i = 0; i < 6; i++) a[i] = va_arg(l, long);
    va_end(l);
    if (n == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3]) {
        t = *(struct timespec *)a[3];
        t.tv_sec = t.tv_sec > shift() ? t.tv_sec - shift() : 0;
        a[3] = (long)&t;
    }
    return real(n, a[0], a[1], a[2], a[3], a[4], a[5]);
}
int pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec t = *until;
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!(c->__data.__wrefs & 2)) t.tv_sec -= shift();
    return real(c, m, &t);
}
int gettimeofday(struct timeval *t, void *z) {
    struct timespec s;
    clock_gettime(CLOCK_REALTIME, &s);
    t->tv_sec = s.tv_sec; t->tv_usec = s.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *t) {
    struct timespec s;
    clock_gettime(CLOCK_REALTIME, &s);
    if (t) *t = s.tv_sec;
    return s.tv_sec;
}
