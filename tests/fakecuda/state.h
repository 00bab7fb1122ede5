/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the double: its objects and the rules between its files. One mutex (fc_lock) guards all of
 * it; fc_enter takes it, fc_leave gives it back, workers take it around a job's bookkeeping but not
 * around its bytes. fc_changed is broadcast whenever work ends. Objects with handles are never
 * freed, so that a stale handle can be told from a foreign one.
 */
#ifndef FAKECUDA_STATE_H
#define FAKECUDA_STATE_H

#include "fakecuda.h"
#include <pthread.h>

#define FC_MAX_DEVICES 16
#define FC_GRANULARITY ((size_t)2 << 20)

extern pthread_mutex_t fc_lock;
extern pthread_cond_t fc_changed;

/* ---- settings.c: the environment, read once ---- */
struct fc_settings {
    int devices, numa_nodes, driver_version;
    size_t memory_bytes;
    uint64_t delay_ns;
    bool hmm, host_pointers, touching;
};
const struct fc_settings *fc_settings(void);

/* ---- call.c: entering and leaving a call ---- */
enum {
    FC_ANYTIME = 0,
    FC_INIT = 1,    /* after cuInit */
    FC_CONTEXT = 2, /* with a current context in order */
    FC_QUIET = 8,   /* before cuInit it fails as ever, but to ask is no broken rule */
    FC_UNSAFE = 4   /* "potentially unsafe" during a stream capture, as
                       cuThreadExchangeStreamCaptureMode has it */
};
struct fc_context;
struct fc_call {
    const char *name;
    CUresult result;
    struct fc_context *context; /* the current one, or NULL */
    bool locked, injected;
    uint64_t start_ns;
    char args[320], violation[320];
};
bool fc_enter(struct fc_call *call, const char *name, unsigned needs, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
CUresult fc_leave(struct fc_call *call);
/* Record a broken rule; gives back `result`. The first one of a call counts. */
CUresult fc_violate(struct fc_call *call, CUresult result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void fc_set_initialised(void);

/* ---- log.c ---- */
uint64_t fc_now_ns(void);
void fc_log(const struct fc_call *call);
/* A broken rule outside a call: seen by a worker. */
void fc_log_worker_violation(const char *where, CUresult result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- inject.c. With fc_lock held. ---- */
bool fc_inject(const char *name, int *ret_result);
/* Without fc_lock: sleep for as long as this call was told to take. */
void fc_slow(const char *name);

/* ---- handles.c: handles are numbers that are no addresses; kind and index inside. With fc_lock
 * held. ---- */
enum fc_kind {
    FC_CONTEXT_HANDLE = 1,
    FC_STREAM_HANDLE,
    FC_EVENT_HANDLE,
    FC_MODULE_HANDLE,
    FC_FUNCTION_HANDLE,
    FC_ALLOCATION_HANDLE,
    FC_GRAPH_HANDLE
};
uintptr_t fc_handle_new(enum fc_kind kind, void *object);
/* NULL: not a handle of this kind. Dead objects are given too: the caller looks at their state. */
void *fc_handle_get(enum fc_kind kind, uintptr_t handle);
/* Each object of a kind in turn; NULL at the end. */
void *fc_handle_at(enum fc_kind kind, size_t index);

/* ---- context.c ---- */
struct fc_stream;
struct fc_context {
    uintptr_t handle;
    int device;
    bool primary, alive;
    unsigned retained, flags;
    CUresult sticky; /* the error that broke it, given back by every later call */
    bool peers[FC_MAX_DEVICES];
    struct fc_stream *legacy;
};
struct fc_context *fc_current(void);
struct fc_context *fc_primary(int device);

/* ---- block.c: physical memory, a memfd with a hidden mapping ---- */
enum fc_place { FC_PLACE_DEVICE = 1, FC_PLACE_HOST = 2, FC_PLACE_NUMA = 3 };
struct fc_block {
    uint64_t id;
    int fd, location, handle_types;
    enum fc_place place;
    size_t size;
    unsigned char *hidden;
    unsigned holders; /* handles + mappings + pending work; memory goes at 0 */
};
CUresult fc_block_new(enum fc_place place, int location, size_t size, int handle_types,
                      struct fc_block **ret);
CUresult fc_block_import(int path_fd, struct fc_block **ret);
int fc_block_export(const struct fc_block *block, int *ret_fd);
void fc_block_drop(struct fc_block *block);
size_t fc_device_used(int device);

/* ---- ranges.c: what lies at which address ---- */
enum fc_range_kind {
    FC_RANGE_DEVICE,
    FC_RANGE_MANAGED,
    FC_RANGE_PINNED,
    FC_RANGE_REGISTERED,
    FC_RANGE_MAPPED
};
/* Flags of cuMemHostRegister. */
enum { FC_REGISTER_PORTABLE = 1, FC_REGISTER_DEVICEMAP = 2 };
struct fc_range {
    uintptr_t address;
    size_t size;
    enum fc_range_kind kind;
    struct fc_block *block; /* DEVICE, MANAGED, MAPPED */
    struct fc_context *context;
    uintptr_t allocation; /* MAPPED: the handle that was mapped */
    uint64_t id;
    unsigned flags, pending;                           /* pending: work in flight that touches it */
    unsigned char access[FC_MAX_DEVICES], host_access; /* MAPPED: CU_MEM_ACCESS_FLAGS_* */
};
struct fc_range *fc_range_at(uintptr_t address);
struct fc_range *fc_range_after(uintptr_t address); /* the first that starts at or after */
int fc_range_add(struct fc_range *range);           /* 0, -ENOMEM, or -EEXIST: overlaps another */
void fc_range_remove(struct fc_range *range);       /* and frees it; remembered for messages */
const char *fc_range_past(uintptr_t address);       /* what lay there before, for messages */
bool fc_reserved(uintptr_t address, size_t size,
                 bool whole); /* in a reservation: all of it, or some of it */
/* Wait out work in flight, with a violation if there is any. */
void fc_range_quiesce(struct fc_call *call, struct fc_range *range);

/* A stretch of memory that work will touch. `bytes` is where this process can reach it. */
struct fc_piece {
    struct fc_range *range; /* NULL: plain host memory */
    unsigned char *bytes;
    size_t size;
    bool raw; /* the app's own memory, which may vanish: only through process_vm_* */
};
struct fc_span {
    struct fc_piece *pieces;
    size_t count;
};
enum fc_side { FC_SIDE_ANY, FC_SIDE_HOST, FC_SIDE_DEVICE };
/* Checks every rule for access to [address, size) by context's device and marks the ranges as
 * pending. */
CUresult fc_span_take(struct fc_call *call, const struct fc_context *context, CUdeviceptr start,
                      size_t size, bool write, enum fc_side side, struct fc_span *ret);
void fc_span_give(struct fc_span *span); /* fc_lock held */

/* ---- move.c: bytes between spans, without the lock. 0 or -EFAULT: host memory that is not there.
 * ---- */
int fc_move(const struct fc_span *to, const struct fc_span *from, size_t size);
int fc_fill(const struct fc_span *to, unsigned char value);
bool fc_readable(uintptr_t address);

/* ---- stream.c ---- */
struct fc_dep {
    struct fc_stream *stream;
    uint64_t count;
};
struct fc_event;
struct fc_copy {
    struct fc_span to, from;
    size_t size;
    unsigned char *staged; /* the source as it was at submission, or NULL */
};
struct fc_job {
    struct fc_job *next;
    uint64_t not_before_ns;
    struct fc_dep *deps;
    size_t dep_count;
    struct fc_copy *copies;
    size_t copy_count;
    bool fill;
    unsigned char fill_value;
    CUhostFn host_function;
    void *host_data;
    struct fakecuda_launch *launch;
    struct fc_event *event;
    uint64_t event_turn;
};
struct fc_stream {
    uintptr_t handle;
    struct fc_context *context;
    unsigned flags;
    int priority;
    bool legacy, alive, started;
    struct fc_job *head, *tail;
    uint64_t submitted, done;
    int capture_status, capture_mode;
    long capture_tid;
    uint64_t captured;
};
struct fc_event {
    uintptr_t handle;
    struct fc_context *context;
    unsigned flags;
    bool alive, recorded, captured;
    struct fc_stream *stream;
    uint64_t count, turn, done_ns;
};
/* The stream of a handle (0, legacy and per-thread included). NULL with call->result set. */
struct fc_stream *fc_stream_get(struct fc_call *call, CUstream handle);
struct fc_stream *fc_stream_new(struct fc_context *context, unsigned flags, int priority,
                                bool legacy);
struct fc_job *fc_job_new(void);
void fc_job_free(struct fc_job *job); /* fc_lock held */
/* Takes the job in any case. With `wait` returns when it is done, with the error that it left in
 * its context. */
CUresult fc_submit(struct fc_call *call, struct fc_stream *stream, struct fc_job *job, bool wait);
void fc_wait(const struct fc_stream *stream, uint64_t count);
/* Wait for everything in a context. */
void fc_context_drain(const struct fc_context *context);
void fc_context_kill_streams(const struct fc_context *context);

/* ---- capture.c ---- */
/* Is an unsafe call allowed now? Otherwise invalidates the captures that forbid it. */
CUresult fc_capture_check_unsafe(struct fc_call *call);
/* May work go into this stream? *ret_recorded: it is being captured; the work must not run. */
CUresult fc_capture_check_stream(struct fc_call *call, struct fc_stream *stream,
                                 bool *ret_recorded);
CUresult fc_capture_check_sync(struct fc_call *call, struct fc_stream *stream);

/* ---- kernels.c and module.c ---- */
struct fc_kernel {
    char name[96];
    fakecuda_kernel run;
    size_t param_bytes[16], param_count;
};
struct fakecuda_launch {
    const struct fc_kernel *kernel;
    struct fc_context *context;
    unsigned grid[3], block[3];
    unsigned char params[16][64];
    CUresult error;
};
const struct fc_kernel *fc_kernel_find(const char *name);
void fc_launch_run(struct fakecuda_launch *launch);

#endif
