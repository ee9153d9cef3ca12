/* What the files of the event loop have of each other. */
#ifndef FUNCTIONS_H
#define FUNCTIONS_H

#ifdef _WIN32
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED __attribute__((visibility("default")))
#endif

/* Python describes things before the simulation runs, and in its answers while it does. */
#define DESCRIBE(s)                                         \
    jmp_buf before_;                                        \
    memcpy(&before_, &(s)->escape, sizeof before_);         \
    if (setjmp((s)->escape)) {                              \
        memcpy(&(s)->escape, &before_, sizeof before_);     \
        return -1;                                          \
    }
#define DESCRIBED(s, number)                                \
    memcpy(&(s)->escape, &before_, sizeof before_);         \
    return (number)

/* Make room for `n` entries of an array that is `room` long. */
#define MAKE_ROOM(s, array, room, n)                                                          \
    do {                                                                                      \
        if ((n) > (room)) {                                                                   \
            int64_t larger_ = (int64_t)(n) + (int64_t)(n) / 2 + 8;                            \
            void *moved_ = realloc((array), (size_t)larger_ * sizeof *(array));               \
            if (!moved_) fail((s), OUT_OF_MEMORY);                                            \
            (array) = moved_;                                                                 \
            (room) = larger_;                                                                 \
        }                                                                                     \
    } while (0)

/* Where a lane is in its program. */
static inline Role *role_of(Simulation *s, const Lane *lane) { return &s->roles[s->ranks[lane->rank].role]; }
static inline RoleLane *plan_of(Simulation *s, const Lane *lane) {
    return &role_of(s, lane)->lanes[lane->number_in_role];
}
static inline const Share *share_of(Simulation *s, const Lane *lane) { return &plan_of(s, lane)->shares[lane->had]; }
static inline const Step *step_of(Simulation *s, const Lane *lane) { return &share_of(s, lane)->steps[lane->step]; }
static inline Job *job_of(Simulation *s, const Lane *lane) { return &s->jobs[role_of(s, lane)->job]; }

/* Ask Python, and return its answer; leave where it has failed. */
#define ANSWER_TO(s, question) (*(s)->ask.answer = -1, (s)->ask.question, answered(s))

/* queue.c */
_Noreturn void fail(Simulation *s, int outcome);
int32_t answered(Simulation *s);
void *allocated(Simulation *s, size_t bytes);
uint64_t schedule(Simulation *s, double delay_s, bool urgent, int kind, int32_t number, int64_t detail);
void at_end_of_instant(Simulation *s, int kind, int32_t job);
bool next_event(Simulation *s, Event *event, Work *work, bool *is_work);
int32_t recall(const Memo *memo, const int32_t *key, int32_t length);
void remember(Simulation *s, Memo *memo, const int32_t *key, int32_t length, int32_t value);
void forget(Memo *memo);

/* network.c */
void start_phase(Simulation *s, Rendezvous *r);
void slow(Simulation *s, Rendezvous *r, double speed);
void occupy(Simulation *s, int32_t phase);
void join(Simulation *s, Flow *flow);
void flow_timer(Simulation *s, const Event *event);
void update_rates(Simulation *s);
void end_saturation(Simulation *s, int32_t link, double at_s);
void add_seconds(Simulation *s, int32_t saturation, double seconds);
void add_seconds_alone(Simulation *s, int32_t phase, double seconds);

/* max_min.c */
void forget_solutions(Simulation *s);
Solution *solution_of(Simulation *s, int32_t n, const int32_t *phases);
Solution *solution_alone(Simulation *s, int32_t phase);

/* gpu.c */
void begin_segment(Simulation *s, Lane *lane, const Piece *segment, double host_s);
bool go_on_with_segment(Simulation *s, Lane *lane, bool interrupted);
bool computes(Simulation *s, Gpu *gpu);
void interrupt(Simulation *s, Gpu *gpu);
void wait_for_room(Simulation *s, Gpu *gpu, int32_t lane);
void spin(Simulation *s, Gpu *gpu, Rendezvous *r);
void move_bytes(Simulation *s, Gpu *gpu, Rendezvous *r, int32_t caller);
void release(Simulation *s, Gpu *gpu, Rendezvous *r);
void stretch_if_late(Simulation *s, Lane *lane, int64_t span);

/* rendezvous.c */
Rendezvous *call(Simulation *s, int32_t lane, int32_t kind, int32_t tag, int32_t *number);
void arrive(Simulation *s, Rendezvous *r);
void limit(Simulation *s, Rendezvous *r, int32_t caller, double speed);
void recorded(Simulation *s, Rendezvous *r);

/* block.c */
int32_t cut_of(Simulation *s, Lane *lane);

/* lane.c */
void host_waits_until(Rank *rank, double time_s);
void awaits(Simulation *s, Lane *lane, int kind, int32_t number);
void resume(Simulation *s, Lane *lane, bool interrupted);
void end_step_event(Simulation *s, int32_t rank, int32_t label);
void end_comm_event(Simulation *s, Rendezvous *r);

/* growth.c */
int begin_share(Simulation *s, Lane *lane);
void ask_for_extension(Simulation *s, int32_t job);
void receive_extension(Simulation *s, int32_t job);
void hand_out(Simulation *s, int32_t job);

#endif
