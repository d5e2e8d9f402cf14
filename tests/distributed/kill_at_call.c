/* Counts the calls of libc that concern files below one folder, and kills the process at a chosen one of them.
 *
 * For LD_PRELOAD. Nothing is counted before a process calls `kill_at_call`, nor in the processes it starts. The counts
 * are in a file that outlives the process. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum kind { OPEN, WRITE, FSYNC, CLOSE, RENAME, MKDIR, UNLINK, RMDIR, LINK, STAT, LOCK, TRUNCATE, KINDS };
enum moment { BEFORE, HALFWAY, AFTER }; /* HALFWAY: half of the bytes of a write are written */

/* Files are told apart by their names: the first pattern that matches. */
static const char *const patterns[] = {"manifest.json", ".metadata*",   "*.distcp", "records.jsonl", ".lock",
                                       ".shared-*",     "step-*.tmp-*", "step-*",   "*"};
#define FILES (int)(sizeof patterns / sizeof *patterns)

struct report {
    long counts[KINDS][FILES];
    long is_killed;
    char where[1024]; /* path of the call at which the process was killed */
};

static struct report *report;
static char folder[1024];
static pid_t owner;
static struct { int kind, file, moment, everyone; long number; } plan;

/* Kill at the call with this number, from 1, of those of this kind that concern this kind of file; kind -1: at none. */
void kill_at_call(const char *counts, const char *below, int kind, int file, long number, int moment, int everyone) {
    int descriptor = syscall(SYS_openat, AT_FDCWD, counts, O_RDWR | O_CREAT, 0644);
    if (syscall(SYS_ftruncate, descriptor, sizeof *report) != 0) _exit(70);
    struct report *shared = mmap(0, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    syscall(SYS_close, descriptor);
    if (shared == MAP_FAILED) _exit(70);
    snprintf(folder, sizeof folder, "%s", below);
    plan.kind = kind, plan.file = file, plan.number = number, plan.moment = moment, plan.everyone = everyone;
    owner = getpid();
    report = shared;
}

static void die(void) {
    report->is_killed = 1;
    kill(plan.everyone ? 0 : owner, SIGKILL);
    for (;;) pause();
}

/* Count a call on `path` in the folder open as `descriptor`, or on the descriptor itself if there is no path. Return
 * whether it is the chosen one and takes effect before the process dies. */
static int is_due(enum kind kind, int descriptor, const char *path) {
    if (!report || getpid() != owner) return 0;
    int before = errno;
    char name[2048] = "", link[64];
    size_t length = 0;
    if ((!path || path[0] != '/') && descriptor >= 0) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
        ssize_t got = readlink(link, name, sizeof name / 2);
        length = got > 0 ? (size_t)got : 0;
        name[length] = 0;
    }
    if (path && path[0]) snprintf(name + length, sizeof name - length, length ? "/%s" : "%s", path);
    errno = before;
    size_t shared = strlen(folder);
    if (strncmp(name, folder, shared) != 0 || (name[shared] != '/' && name[shared] != 0)) return 0;
    int file = 0;
    while (fnmatch(patterns[file], strrchr(name, '/') + 1, 0) != 0) file++;
    long number = __atomic_add_fetch(&report->counts[kind][file], 1, __ATOMIC_SEQ_CST);
    if ((int)kind != plan.kind || file != plan.file || number != plan.number) return 0;
    snprintf(report->where, sizeof report->where, "%s", name + shared);
    if (plan.moment == BEFORE) die();
    return 1;
}

#define CALL(kind, type, name, parameters, arguments, descriptor, path) \
    type name parameters {                                              \
        static type(*real) parameters;                                  \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name);  \
        int due = is_due(kind, descriptor, path);                       \
        type result = real arguments;                                   \
        if (due) die();                                                 \
        return result;                                                  \
    }

#define OPEN_CALL(name, parameters, arguments, descriptor)                   \
    int name parameters {                                                    \
        static int(*real) parameters;                                        \
        if (!real) real = (int(*) parameters)dlsym(RTLD_NEXT, #name);        \
        va_list rest;                                                        \
        va_start(rest, flags);                                               \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; \
        va_end(rest);                                                        \
        int due = is_due(OPEN, descriptor, path);                            \
        int result = real arguments;                                         \
        if (due) die();                                                      \
        return result;                                                       \
    }

OPEN_CALL(open, (const char *path, int flags, ...), (path, flags, mode), -1)
OPEN_CALL(open64, (const char *path, int flags, ...), (path, flags, mode), -1)
OPEN_CALL(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)
OPEN_CALL(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)

ssize_t write(int descriptor, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    int due = is_due(WRITE, descriptor, 0);
    ssize_t result = real(descriptor, data, due && plan.moment == HALFWAY ? size / 2 : size);
    if (due) die();
    return result;
}

#define FCNTL_CALL(name)                                                                              \
    int name(int descriptor, int operation, ...) {                                                    \
        static int (*real)(int, int, ...);                                                            \
        if (!real) real = (int (*)(int, int, ...))dlsym(RTLD_NEXT, #name);                            \
        va_list rest;                                                                                 \
        va_start(rest, operation);                                                                    \
        void *argument = va_arg(rest, void *);                                                        \
        va_end(rest);                                                                                 \
        int due = (operation == F_SETLK || operation == F_SETLKW) && is_due(LOCK, descriptor, 0);     \
        int result = real(descriptor, operation, argument);                                           \
        if (due) die();                                                                               \
        return result;                                                                                \
    }

FCNTL_CALL(fcntl)
FCNTL_CALL(fcntl64)

CALL(FSYNC, int, fsync, (int descriptor), (descriptor), descriptor, 0)
CALL(FSYNC, int, fdatasync, (int descriptor), (descriptor), descriptor, 0)
CALL(CLOSE, int, close, (int descriptor), (descriptor), descriptor, 0)
CALL(RENAME, int, rename, (const char *path, const char *to), (path, to), -1, path)
CALL(RENAME, int, renameat, (int at, const char *path, int into, const char *to), (at, path, into, to), at, path)
CALL(MKDIR, int, mkdir, (const char *path, mode_t mode), (path, mode), -1, path)
CALL(MKDIR, int, mkdirat, (int at, const char *path, mode_t mode), (at, path, mode), at, path)
CALL(UNLINK, int, unlink, (const char *path), (path), -1, path)
CALL(flags & AT_REMOVEDIR ? RMDIR : UNLINK, int, unlinkat, (int at, const char *path, int flags), (at, path, flags), at,
     path)
CALL(RMDIR, int, rmdir, (const char *path), (path), -1, path)
CALL(LINK, int, link, (const char *path, const char *to), (path, to), -1, path)
CALL(LINK, int, linkat, (int at, const char *path, int into, const char *to, int flags), (at, path, into, to, flags),
     at, path)
CALL(LINK, int, symlink, (const char *to, const char *path), (to, path), -1, path)
CALL(STAT, int, stat64, (const char *path, struct stat64 *found), (path, found), -1, path)
CALL(STAT, int, lstat64, (const char *path, struct stat64 *found), (path, found), -1, path)
CALL(STAT, int, fstat64, (int descriptor, struct stat64 *found), (descriptor, found), descriptor, 0)
CALL(STAT, int, fstatat64, (int at, const char *path, struct stat64 *found, int flags), (at, path, found, flags), at,
     path)
CALL(LOCK, int, flock, (int descriptor, int operation), (descriptor, operation), descriptor, 0)
CALL(TRUNCATE, int, ftruncate64, (int descriptor, off64_t size), (descriptor, size), descriptor, 0)
