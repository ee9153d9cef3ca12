/* The event loop of simulator.engine and simulator.network, compiled.
 *
 * Everything here mirrors a module in Python, which stays the reference; the same programs take the same times, bit for
 * bit. What is asked rarely and remembered is asked of Python (struct Questions): prices, loads of communication,
 * pieces of a block, extensions. Things are named by their number: ranks, lanes, steps, phases, templates.
 *
 *   queue.c      SimPy's event queue and simulator.network.simulated_time; memos
 *   network.c    simulator.network.flows
 *   max_min.c    simulator.network.max_min
 *   gpu.c        engine.gpu, engine.running_segment, engine.kernel_times, engine.memory_bandwidth
 *   rendezvous.c engine.communicator and engine.rendezvous
 *   lane.c       engine.lane, engine.rank, engine.host
 *   block.c      engine.coalescing, as far as it is asked while the clock runs
 *   growth.c     engine.growing_lanes
 *   simulation.c what Python calls to describe a simulation, and to run it
 *   results.c    what Python calls to read it
 *   allocator.c  analysis.training.caching_allocator, which has no part in the loop
 *
 * loop.h and network.h have the structures, functions.h what the files have of each other.
 *
 * All times are in s, all rates in bytes/s. A number of -1 is none.
 */
#ifndef LOOP_H
#define LOOP_H

#include <math.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "network.h"

/* Seconds within which all happens at once (engine.memory_bandwidth.INSTANT_s). */
#define INSTANT_s 1e-12
/* Shares of a segment's length that are no stretching, but rounding. */
#define ROUNDING 1e-12

/* ---- Answers of run() ---- */
enum Outcome { RUNNING = 0, ENDED = 1, CALLBACK_FAILED = 2, CALLS_DIFFER = 3, OUT_OF_MEMORY = 4 };

/* ---- Memos: sequence of numbers -> number ---- */
typedef struct {
    int64_t *start; /* of each entry's key in `keys` */
    int32_t *length, *value;
    int32_t *table; /* entry of each slot, or -1 */
    int64_t n, room, slots;
    int32_t *keys;
    int64_t n_keys, room_keys;
} Memo;

/* ---- Events (queue.c) ---- */
enum EventKind {
    BEGIN_LANE,     /* a lane begins */
    WAKE_LANE,      /* a lane goes on, if it still waits with this ticket */
    INTERRUPT_LANE, /* a lane that runs a segment works out its end anew */
    END_STEP,       /* lanes of rank `number` that wait for step `detail` go on */
    END_COMM,       /* lanes that wait for rendezvous `number` go on */
    END_FLOW,       /* a flow arrives, if this is still its timer */
    JOIN_FLOW,      /* the first bytes of a flow come to its links */
    NEXT_PHASE,     /* a rendezvous goes on to its next phase */
    BEGIN_RELEASE,  /* an extension of job `number` waits for its release */
    RELEASE,        /* it is released */
    NOTHING         /* a process has ended, and nobody waits for it */
};

typedef struct {
    double time_s;
    uint64_t order; /* by priority, then by insertion: SimPy's URGENT before its NORMAL */
    int64_t detail;
    int32_t kind, number;
} Event;

/* Work at the end of an instant. */
enum WorkKind { UPDATE_RATES, ASK_FOR_EXTENSION };
typedef struct {
    int32_t kind, job;
} Work;

/* ---- Communication (rendezvous.c) ---- */
typedef struct {
    double nbytes;
    int32_t op, lane_name;
    bool paired, spins, holds_sms, host_waits;
} CommKind; /* communication, whatever its tag */

/* A lane's call of a kind of communication. `channel` and a tag say which calls belong together. */
typedef struct {
    double memory_demand;
    int32_t kind, channel, planned, template, count;
} Call;

typedef struct {
    int32_t first_phase, n_phases, n_members;
} Planned;

typedef struct {
    int32_t rank;
    double memory_demand, speed;
} Caller;

typedef struct Rendezvous {
    struct Rendezvous *after; /* in the queue of its channel */
    double departed_s, arrived_s, speed;
    Flow *flow;
    int32_t number, kind, tag, planned, channel, count;
    int32_t phase; /* position in its plan */
    int32_t first_waiting, last_waiting; /* lanes that wait for its end */
    int32_t n_callers, n_recorded;
    bool triggered, processed;
    Caller callers[];
} Rendezvous;

/* ---- GPUs (gpu.c) ---- */
typedef struct {
    const double *work_s, *launched_s;
    const uint8_t *is_kernel;
    const double *memory_left;         /* by op */
    const int32_t *beside;             /* by op: how many kernels run beside it; NULL: beside none */
    const double *starts_s, *ends_s;   /* at full speed, where there is `beside` */
    double least_left;
    int32_t n_ops;
} Template;

typedef struct {
    const double *speed, *seconds, *starts_s, *ends_s, *lag_s;
} PacedTemplate;

typedef struct {
    double at_s;
    const double *starts_s, *ends_s;
    double *own; /* memory of starts and ends, where they are of this run alone */
    int32_t first;
    bool resumed;
} KernelTimes;

typedef struct {
    double seconds, host_s, start_s, end_s, change_s;
    KernelTimes *history;
    int32_t n_history, room, lane, template, load, paced, last_op, until;
    bool is_interrupted;
} RunningSegment;

typedef struct {
    double memory_demand;
    int32_t rendezvous, caller;
} Moving;

typedef struct {
    RunningSegment segment;
    Moving *moving;
    int32_t *spinning, *waiting; /* rendezvous; lanes that wait for SMs */
    double memory_demand, memory_left;
    int32_t n_spinning, n_moving, n_waiting, room_spinning, room_moving, room_waiting;
    int32_t load, interference; /* of costs; -1: communication does not slow kernels */
    bool is_running, communication_waits;
} Gpu;

/* ---- Lanes (lane.c) ---- */
enum PieceKind { SEGMENT, COLLECTIVE_CALL, OVERLAPPED_CALL };
typedef struct {
    double seconds, issue_s, tail_s;
    int32_t kind, template, comm, n_segments, host_waits, unused;
} Piece; /* of an OVERLAPPED_CALL the segments beside it follow */

typedef struct {
    int32_t first, n; /* pieces in a row, the segments of overlapped calls not counted */
    int64_t runs;
} CutBlock;

enum StepKind { RUN_BLOCK, RUN_COMM, RUN_BATCH };
typedef struct {
    int32_t kind, op, n_ops, tag; /* a block; a kind of communication and its tag; a part of `batches` */
    int32_t label, first_after, n_after, phase;
} Step;

typedef struct {
    int32_t kind, tag;
} TaggedComm;

/* Work of hosts of one kind around the steps of a share (engine.issue_order.HostWork). */
typedef struct {
    const int64_t *first_issue; /* of each step, and of what follows the last one; then their number */
    const int32_t *issue_label;
    const double *issue_s, *start_s, *comm_s;
} HostWork;

/* Steps that came together: the program's, or an extension's (engine.growth._Share). */
typedef struct {
    const Step *steps;
    const int32_t *after;
    const TaggedComm *batches;
    double release_s;
    int32_t extension, first, n_steps, first_step, host_work; /* of the first kind of host, -1: no work */
} Share;

typedef struct {
    Share *shares;
    int32_t n, room, name;
    bool computes;
} RoleLane;

typedef struct {
    RoleLane *lanes;
    int32_t *lane_of_label; /* lane that has the step, -1: none yet */
    uint8_t *is_batch;
    int32_t job, n_lanes, n_labels, room_labels;
} Role;

typedef struct {
    Gpu gpu;
    uint8_t *ended; /* by label */
    double *told_s; /* by label: when communication was issued, when a batch ended */
    double host_s;  /* when the host will have issued everything so far */
    int32_t number, role, first_lane, host_kind, work, n_labels, room_labels;
} Rank;

enum LaneState {
    AT_SHARE, AT_STEP, AT_AWAITED, AT_PIECE, AT_SEGMENT, AT_BESIDE, AT_ISSUED, AT_SMS, AT_ROOM, AT_CALLS, AT_COMM,
    AT_ARRIVAL, AT_STEP_END, AT_END
};
enum Awaited { NO_STEP, A_STEP, A_RENDEZVOUS, AN_EXTENSION };

typedef struct {
    double posted_s, launched_s; /* of the communication, or the piece, that the lane is at */
    double segment_posted_s;
    int32_t *pending, *pending_kind, *pending_call; /* rendezvous that the lane has called and waits for */
    int64_t ticket, wait_order, stopped; /* `stopped`: order of lanes by when they last began to wait */
    int32_t rank, number_in_role, state;
    int32_t had, step, after;                        /* shares that it has gone through; in this one */
    int32_t cut, piece, left, segment, n_segments;   /* where it is in a block */
    int32_t n_pending, at_pending, room_pending;
    int32_t next_step, awaits, awaited, blocked_on, next_waiting;
    bool has_begun, is_first, is_last, in_overlap;
} Lane;

typedef struct {
    double posted_s, launched_s, start_s, end_s;
    int32_t rank, lane_name, position, step, template, flags;
} Span;
enum SpanFlags { IS_FIRST = 1, IS_LAST = 2, IN_ROW = 4 };

/* Times of the ops of a span that did not run straight through. */
typedef struct {
    int64_t span, at;
    int32_t n_ops, unused;
} Stretched;

typedef struct {
    Span *spans;
    Stretched *stretched;
    double *rows_s; /* starts, then ends, of each of `stretched` */
    int64_t n_spans, room_spans, n_stretched, room_stretched, n_rows, room_rows;
    int32_t *waiting; /* lanes that wait for an extension, in the order in which they came */
    int32_t n_waiting, room_waiting, n_extensions;
    double release_s;
    bool grows, is_asked, is_over;
} Job;

/* ---- Questions to Python ----
 *
 * Python writes each answer to `answer`, where -1 is left where it has failed. What a function of ctypes returns is
 * lost where a signal interrupts it before its first line.
 */
enum GrowthStep { NEXT_EXTENSION, HAND_OUT };
enum Extended { NO_MORE, AT_RELEASE };
typedef struct {
    int32_t *answer;
    void (*load)(int32_t interference, int32_t n_spinning, int32_t n_moving, const int32_t *kinds);
    void (*paced)(int32_t template, int32_t load);
    void (*meeting)(int32_t lane, int32_t block, int32_t *lanes);
    void (*cut)(int32_t lane, int32_t block, int32_t phase, int32_t n_idle, const int32_t *idle);
    void (*call)(int32_t lane, int32_t kind);
    void (*grow)(int32_t job, int32_t what, double now_s, double *release_s);
    void (*mark)(double now_s);
} Questions;

typedef struct Simulation {
    Questions ask;
    const int32_t *marks; /* steps at which a lane tells Python that it has come there, ascending */
    int32_t n_marks, marked_lane;
    jmp_buf escape;
    double now_s;
    uint64_t inserted;
    int64_t n_events;
    Event *queue;
    int64_t n_queue, room_queue;
    Work *put_off;
    int64_t first_put_off, n_put_off, room_put_off;

    Link *links;
    int32_t n_links, n_saturated, mark;
    Phase *phases;
    int32_t n_phases, room_phases;
    Solution *solutions;
    int32_t n_solutions, room_solutions;
    Memo solved, slowed;
    Flow **flows;
    int32_t *free_flows;
    int32_t n_flows, room_flows, n_free_flows, room_free_flows;
    int32_t *changed, *reached, *met_phases;
    Flow **met;
    int32_t n_changed, room_met, room_met_phases;
    const double *capacity_Bps; /* by link */
    MaxMin max_min;
    Saturation *saturations;
    Crosser *crossers;
    int64_t n_crossers, room_crossers;
    int32_t *saturated_order; /* states in the order in which they first ended */
    int32_t n_saturations, room_saturations, room_order, n_order;

    CommKind *kinds;
    Call *calls;
    Planned *planned;
    int32_t *plan_phases;
    int32_t n_kinds, room_kinds, n_calls, room_calls, n_planned, room_planned, n_plan_phases, room_plan_phases;
    Memo called, channels, loads_of_gpus, paced_of, met_at, cut_of;
    Rendezvous **queues; /* first rendezvous of each channel */
    Rendezvous **rendezvous;
    int32_t *free_rendezvous;
    int32_t n_queues, room_queues, n_rendezvous, room_rendezvous, n_free_rendezvous, room_free_rendezvous;
    int64_t *counts;
    int32_t *count_order;
    int32_t n_counts, room_counts, n_count_order, room_count_order;

    Template *templates;
    PacedTemplate *paced;
    Piece *pieces;
    CutBlock *cuts;
    int32_t n_templates, room_templates, n_paced, room_paced, n_pieces, room_pieces, n_cuts, room_cuts;
    int32_t *key, *met_lanes;
    int32_t room_key, n_met_lanes, room_met_lanes;
    int64_t n_waits;

    Job *jobs;
    Role *roles;
    Rank *ranks;
    Lane *lanes;
    HostWork *works;
    int32_t n_jobs, n_roles, n_ranks, n_lanes, n_works, room_works;
    int32_t differing[4]; /* lane, its kind; kind and first caller of what it met */
} Simulation;

#include "functions.h"

#endif
