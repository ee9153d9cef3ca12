/* GPUs of simulated ranks: engine.gpu, engine.running_segment, engine.kernel_times, engine.memory_bandwidth. */
#include "loop.h"

/* ---- Times of kernels (engine.kernel_times, and `play` of simulator.timeline.template) ---- */

/* Play ops from `start` on, none before its launch: a running maximum. `left_s` >= 0 replaces the first one's work. */
static void play(int32_t n, const double *work_s, double left_s, const double *launched_s, double host_s, double start,
                 double *starts_s, double *ends_s) {
    double done = 0, latest = -INFINITY;
    for (int32_t op = 0; op < n; op++) {
        double work = op == 0 && left_s >= 0 ? left_s : work_s[op], launched = host_s + launched_s[op];
        done = op ? done + work : work;
        double begin = (launched > start ? launched : start) - (done - work);
        if (begin > latest) latest = begin;
        ends_s[op] = done + latest;
        starts_s[op] = ends_s[op] - work;
    }
}

/* Play a template in which collectives go on beside kernels; ops run at full speed once the host is ahead for good. */
static void play_beside(Simulation *s, const Template *t, double host_s, double start, double *starts_s,
                        double *ends_s) {
    double now = start, until = start, latest = -INFINITY, *lag_s = allocated(s, (size_t)t->n_ops * sizeof *lag_s);
    int32_t left = 0;
    for (int32_t op = t->n_ops - 1; op >= 0; op--) {
        double lag = host_s + t->launched_s[op] - t->starts_s[op];
        lag_s[op] = latest = lag > latest ? lag : latest;
    }
    for (int32_t op = 0; op < t->n_ops; op++) {
        double shift = now - t->starts_s[op], ready = host_s + t->launched_s[op], seconds = t->work_s[op];
        if (!left && lag_s[op] <= shift) {
            for (; op < t->n_ops; op++) {
                starts_s[op] = t->starts_s[op] + shift;
                ends_s[op] = t->ends_s[op] + shift;
            }
            break;
        }
        double begin = now > ready ? now : ready;
        starts_s[op] = begin;
        ends_s[op] = begin + seconds;
        if (t->beside[op]) {
            now = begin, until = begin + seconds, left = t->beside[op];
            continue;
        }
        now = begin + seconds;
        if (left && !--left && until > now) now = until;
    }
    free(lag_s);
}

/* Record start and end of each op of a span. */
static void stretch(Simulation *s, Job *job, int64_t span, const double *starts_s, const double *ends_s, int32_t n) {
    MAKE_ROOM(s, job->stretched, job->room_stretched, job->n_stretched + 1);
    MAKE_ROOM(s, job->rows_s, job->room_rows, job->n_rows + 2 * (int64_t)n);
    job->stretched[job->n_stretched++] = (Stretched){span, job->n_rows, n, 0};
    memcpy(job->rows_s + job->n_rows, starts_s, (size_t)n * sizeof *starts_s);
    memcpy(job->rows_s + job->n_rows + n, ends_s, (size_t)n * sizeof *ends_s);
    job->n_rows += 2 * (int64_t)n;
}

static const KernelTimes *present(const RunningSegment *run) { return &run->history[run->n_history - 1]; }

/* Return the first op that ends after a time; the number of ops where none does. */
static int32_t op_ending_after(const RunningSegment *run, double time_s) {
    const KernelTimes *times = present(run);
    double elapsed_s = time_s - times->at_s;
    int32_t low = times->first, high = run->last_op + 1;
    while (low < high) {
        int32_t middle = (low + high) / 2;
        if (elapsed_s < times->ends_s[middle])
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static int32_t op_at(const RunningSegment *run, double now) {
    int32_t op = op_ending_after(run, now);
    return op < run->last_op ? op : run->last_op;
}

static bool has_begun(const KernelTimes *times, int32_t op, double time_s) {
    return (times->resumed && op == times->first) || times->at_s + times->starts_s[op] < time_s;
}

/* Go on with the ops from `first` on, of which the first has `left_s` of work left at full speed where it has begun. */
static void add_times(Simulation *s, RunningSegment *run, int32_t first, bool resumed, double left_s) {
    const PacedTemplate *paced = &s->paced[run->paced];
    const Template *t = &s->templates[run->template];
    double lag_s = paced->lag_s[first + resumed];
    double at_s = resumed ? s->now_s + left_s / paced->speed[first] - paced->ends_s[first]
                          : s->now_s - paced->starts_s[first];
    MAKE_ROOM(s, run->history, run->room, run->n_history + 1);
    KernelTimes *times = &run->history[run->n_history];
    *times = (KernelTimes){at_s, paced->starts_s, paced->ends_s, NULL, first, resumed};
    if (!(run->host_s + lag_s <= at_s)) {
        size_t n = (size_t)t->n_ops;
        times->own = allocated(s, 2 * n * sizeof *times->own);
        times->at_s = 0, times->starts_s = times->own, times->ends_s = times->own + n;
        play(t->n_ops - first, paced->seconds + first, resumed ? left_s / paced->speed[first] : -1,
             t->launched_s + first, run->host_s, s->now_s, times->own + first, times->own + n + first);
    }
    run->n_history++;
}

/* ---- A segment that runs on a GPU whose speed changes (engine.running_segment) ---- */

static int32_t paced(Simulation *s, int32_t template, int32_t load) {
    int32_t key[2] = {template, load}, number = recall(&s->paced_of, key, 2);
    if (number < 0) {
        number = ANSWER_TO(s, paced(template, load));
        remember(s, &s->paced_of, key, 2, number);
    }
    return number;
}

static void change_load(Simulation *s, RunningSegment *run, int32_t load) {
    if (load == run->load) return;
    const KernelTimes *times = present(run);
    int32_t op = op_at(run, s->now_s);
    bool begun = has_begun(times, op, s->now_s);
    double left_s = begun ? (times->at_s + times->ends_s[op] - s->now_s) * s->paced[run->paced].speed[op] : 0;
    run->load = load;
    run->paced = paced(s, run->template, load);
    add_times(s, run, op, begun, left_s);
}

static bool has_less_left_than(Simulation *s, const RunningSegment *run, double demand) {
    return demand > 0 && demand > s->templates[run->template].least_left;
}

/* Return the share of the memory's time that the present op leaves, and when that changes (share_left). */
static double memory_left(Simulation *s, const RunningSegment *run, double demand, double *change_s) {
    *change_s = INFINITY;
    if (!has_less_left_than(s, run, demand)) return INFINITY;
    const double *left = s->templates[run->template].memory_left;
    const KernelTimes *times = present(run);
    double elapsed_s = s->now_s + INSTANT_s - times->at_s;
    int32_t n = run->last_op + 1, op = op_ending_after(run, s->now_s + INSTANT_s), last;
    if (op == n) return INFINITY;
    if (isinf(left[op]) || times->starts_s[op] > elapsed_s) {
        for (; op < n; op++)
            if (left[op] < INFINITY && times->starts_s[op] > elapsed_s) {
                *change_s = times->at_s + times->starts_s[op];
                break;
            }
        return INFINITY;
    }
    for (last = op; last < n - 1; last++) /* until an op that leaves another share, or until the host is late */
        if (left[last + 1] != left[last] || times->starts_s[last + 1] > times->ends_s[last] + INSTANT_s) break;
    *change_s = times->at_s + times->ends_s[last];
    return left[op];
}

/* ---- The memory's time, in max-min fair shares ---- */

static int by_size(const void *a, const void *b) {
    double first = *(const double *)a, second = *(const double *)b;
    return (first > second) - (first < second);
}

static double equal_part(Simulation *s, const Gpu *gpu, double left) {
    double few[16], part = INFINITY;
    double *demands = gpu->n_moving <= 16 ? few : allocated(s, (size_t)gpu->n_moving * sizeof *demands);
    for (int32_t i = 0; i < gpu->n_moving; i++) demands[i] = gpu->moving[i].memory_demand;
    qsort(demands, (size_t)gpu->n_moving, sizeof *demands, by_size);
    for (int32_t i = 0; i < gpu->n_moving; i++) {
        double equal = left / (gpu->n_moving - i);
        if (equal < demands[i]) {
            part = equal;
            break;
        }
        left -= demands[i];
    }
    if (demands != few) free(demands);
    return part;
}

static void share_memory(Simulation *s, Gpu *gpu) {
    if (!gpu->n_moving) return;
    double part = equal_part(s, gpu, gpu->memory_left);
    for (int32_t i = 0; i < gpu->n_moving; i++) {
        const Moving *moving = &gpu->moving[i];
        double demand = moving->memory_demand;
        limit(s, s->rendezvous[moving->rendezvous], moving->caller, part < demand ? part / demand : 1.0);
    }
}

/* ---- The GPU (engine.gpu) ---- */

/* Read the load of the communication on kernels, and its demand of the memory's time. */
static void read_load(Simulation *s, Gpu *gpu) {
    int32_t n = gpu->n_spinning + gpu->n_moving;
    gpu->memory_demand = 0;
    MAKE_ROOM(s, s->key, s->room_key, n + 3);
    int32_t *key = s->key;
    key[0] = gpu->interference, key[1] = gpu->n_spinning, key[2] = gpu->n_moving;
    for (int32_t i = 0; i < gpu->n_spinning; i++) key[3 + i] = s->rendezvous[gpu->spinning[i]]->kind;
    for (int32_t i = 0; i < gpu->n_moving; i++) {
        key[3 + gpu->n_spinning + i] = s->rendezvous[gpu->moving[i].rendezvous]->kind;
        gpu->memory_demand += gpu->moving[i].memory_demand;
    }
    int32_t load = recall(&s->loads_of_gpus, key, n + 3);
    if (load < 0) {
        load = ANSWER_TO(s, load(key[0], key[1], key[2], key + 3));
        remember(s, &s->loads_of_gpus, key, n + 3, load);
    }
    gpu->load = load;
}

void interrupt(Simulation *s, Gpu *gpu) {
    if (gpu->segment.is_interrupted) return;
    gpu->segment.is_interrupted = true;
    schedule(s, 0, true, INTERRUPT_LANE, gpu->segment.lane, 0);
}

/* Wake the running segment where communication changes its speed, or the demand of memory. */
static void change_of_load(Simulation *s, Gpu *gpu) {
    if (!gpu->is_running) return;
    int32_t load = gpu->load;
    double demand = gpu->memory_demand;
    read_load(s, gpu);
    if (gpu->memory_demand > demand) demand = gpu->memory_demand;
    if (gpu->load != load || has_less_left_than(s, &gpu->segment, demand)) interrupt(s, gpu);
}

static void take_from_spinning(Gpu *gpu, int32_t rendezvous) {
    int32_t kept = 0;
    for (int32_t i = 0; i < gpu->n_spinning; i++)
        if (gpu->spinning[i] != rendezvous) gpu->spinning[kept++] = gpu->spinning[i];
    gpu->n_spinning = kept;
}

/* Put the kernel of a communication on the GPU, where it waits for its peers. */
void spin(Simulation *s, Gpu *gpu, Rendezvous *r) {
    if (gpu->interference < 0) return;
    MAKE_ROOM(s, gpu->spinning, gpu->room_spinning, gpu->n_spinning + 1);
    gpu->spinning[gpu->n_spinning++] = r->number;
    change_of_load(s, gpu);
}

/* Let a communication move its bytes from now on. */
void move_bytes(Simulation *s, Gpu *gpu, Rendezvous *r, int32_t caller) {
    if (gpu->interference < 0) return;
    take_from_spinning(gpu, r->number);
    MAKE_ROOM(s, gpu->moving, gpu->room_moving, gpu->n_moving + 1);
    gpu->moving[gpu->n_moving++] = (Moving){r->callers[caller].memory_demand, r->number, caller};
    change_of_load(s, gpu);
    share_memory(s, gpu);
}

/* Take the kernel of a communication off the GPU. */
void release(Simulation *s, Gpu *gpu, Rendezvous *r) {
    if (gpu->interference < 0) return;
    take_from_spinning(gpu, r->number);
    int32_t kept = 0;
    for (int32_t i = 0; i < gpu->n_moving; i++)
        if (gpu->moving[i].rendezvous != r->number) gpu->moving[kept++] = gpu->moving[i];
    gpu->n_moving = kept;
    change_of_load(s, gpu);
    share_memory(s, gpu);
}

/* Tell whether a kernel that has begun, be it at this instant, is still to end. */
bool computes(Simulation *s, Gpu *gpu) {
    if (!gpu->is_running) return false;
    double soon_s = s->now_s + INSTANT_s;
    int32_t op = op_ending_after(&gpu->segment, soon_s);
    return op <= gpu->segment.last_op && s->templates[gpu->segment.template].is_kernel[op] &&
           has_begun(present(&gpu->segment), op, soon_s);
}

void wait_for_room(Simulation *s, Gpu *gpu, int32_t lane) {
    MAKE_ROOM(s, gpu->waiting, gpu->room_waiting, gpu->n_waiting + 1);
    gpu->waiting[gpu->n_waiting++] = lane;
    interrupt(s, gpu);
}

static void wake_later(Simulation *s, Lane *lane, double delay_s) {
    schedule(s, delay_s, false, WAKE_LANE, (int32_t)(lane - s->lanes), ++lane->ticket);
}

/* Expect the end of the segment, or of its present op where communication waits for SMs. */
static void expect_end(Simulation *s, Gpu *gpu) {
    RunningSegment *run = &gpu->segment;
    const KernelTimes *times = present(run);
    run->until = gpu->n_waiting ? op_at(run, s->now_s) : run->last_op;
    double end_s = times->at_s + times->ends_s[run->until];
    run->end_s = end_s >= s->now_s ? end_s : s->now_s;
    gpu->memory_left = memory_left(s, run, gpu->memory_demand, &run->change_s);
    share_memory(s, gpu);
    wake_later(s, &s->lanes[run->lane], (run->change_s < run->end_s ? run->change_s : run->end_s) - s->now_s);
}

/* Begin a segment that the host launches from `host_s` on; its lane wakes at the end, or where its speed changes. */
void begin_segment(Simulation *s, Lane *lane, const Piece *segment, double host_s) {
    Gpu *gpu = &s->ranks[lane->rank].gpu;
    RunningSegment *run = &gpu->segment;
    const Template *t = &s->templates[segment->template];
    run->seconds = segment->seconds, run->host_s = host_s, run->template = segment->template;
    run->lane = (int32_t)(lane - s->lanes);
    if (gpu->interference < 0) {
        double launched_s = host_s + t->launched_s[0];
        double start_s = run->start_s = launched_s > s->now_s ? launched_s : s->now_s;
        double end_s = start_s + segment->seconds, issued_s = host_s + segment->tail_s;
        run->end_s = issued_s > end_s ? issued_s : end_s;
        wake_later(s, lane, run->end_s - s->now_s);
        return;
    }
    read_load(s, gpu);
    run->load = gpu->load;
    run->last_op = t->n_ops - 1;
    run->n_history = 0;
    run->is_interrupted = false;
    run->paced = paced(s, run->template, run->load);
    add_times(s, run, 0, false, 0);
    run->start_s = present(run)->at_s + present(run)->starts_s[0];
    gpu->is_running = true;
    expect_end(s, gpu);
}

/* Return start and end of every op, where each of the segment's times held until the next began (joined_times). */
static void join_times(const RunningSegment *run, double *starts_s, double *ends_s) {
    for (int32_t i = 0; i < run->n_history; i++) {
        const KernelTimes *times = &run->history[i];
        for (int32_t op = times->first; op <= run->last_op; op++) {
            if (op > times->first || !times->resumed) starts_s[op] = times->starts_s[op] + times->at_s;
            ends_s[op] = times->ends_s[op] + times->at_s;
        }
    }
}

/* Go on with the segment of a lane; return whether it has ended, and is recorded. */
bool go_on_with_segment(Simulation *s, Lane *lane, bool interrupted) {
    Gpu *gpu = &s->ranks[lane->rank].gpu;
    RunningSegment *run = &gpu->segment;
    if (gpu->interference < 0) return true;
    if (interrupted) run->is_interrupted = false;
    if (s->now_s >= run->end_s || (run->change_s >= run->end_s && !interrupted)) {
        while (gpu->n_waiting) wake_later(s, &s->lanes[gpu->waiting[--gpu->n_waiting]], 0);
        if (run->until == run->last_op) {
            gpu->is_running = false;
            gpu->memory_left = INFINITY;
            share_memory(s, gpu);
            return true;
        }
    }
    change_load(s, run, gpu->load);
    expect_end(s, gpu);
    return false;
}

/* Record the times of the ops of a span that has just ended, where they did not run straight through. */
void stretch_if_late(Simulation *s, Lane *lane, int64_t span) {
    const Rank *rank = &s->ranks[lane->rank];
    RunningSegment *run = &s->ranks[lane->rank].gpu.segment;
    const Template *t = &s->templates[run->template];
    size_t n = (size_t)t->n_ops;
    double length_s = run->seconds * (1 + ROUNDING);
    bool is_shared = rank->gpu.interference >= 0;
    if (is_shared ? s->now_s - run->start_s > length_s : run->end_s > run->start_s + length_s) {
        double *starts_s = allocated(s, 2 * n * sizeof *starts_s), *ends_s = starts_s + n;
        if (is_shared)
            join_times(run, starts_s, ends_s);
        else if (t->beside)
            play_beside(s, t, run->host_s, run->start_s, starts_s, ends_s);
        else
            play(t->n_ops, t->work_s, -1, t->launched_s, run->host_s, run->start_s, starts_s, ends_s);
        stretch(s, &s->jobs[s->roles[rank->role].job], span, starts_s, ends_s, t->n_ops);
        free(starts_s);
    }
    for (; is_shared && run->n_history; run->n_history--) free(run->history[run->n_history - 1].own);
}
