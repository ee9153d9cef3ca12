/* Lanes that go through their steps, with the hosts that issue them (engine.lane, engine.rank, engine.host).
 *
 * A lane is a generator in Python. Here it is a state: where it goes on when it wakes.
 */
#include "loop.h"

/* ---- The host (engine.host) ---- */

void host_waits_until(Rank *rank, double time_s) {
    if (time_s > rank->host_s) rank->host_s = time_s;
}

/* Do the work that stands before a step of the compute lane; before the one behind the last, what follows that. */
static void reach_step(Simulation *s, Rank *rank, int32_t step) {
    if (rank->work < 0) return;
    const HostWork *work = &s->works[rank->work];
    for (int64_t i = work->first_issue[step]; i < work->first_issue[step + 1]; i++) {
        rank->host_s += work->issue_s[i];
        if (work->issue_label[i] >= 0) rank->told_s[work->issue_label[i]] = rank->host_s;
    }
    rank->host_s += work->start_s[step];
}

/* Let the host catch up with the batches among the steps that this one waits for. */
static void synchronise(Simulation *s, Lane *lane) {
    Rank *rank = &s->ranks[lane->rank];
    const uint8_t *is_batch = role_of(s, lane)->is_batch;
    const Step *step = step_of(s, lane);
    for (int32_t i = 0; i < step->n_after; i++) {
        int32_t label = share_of(s, lane)->after[step->first_after + i];
        if (is_batch[label]) host_waits_until(rank, rank->told_s[label]);
    }
}

/* ---- Waiting ---- */

static bool waits_until(Simulation *s, Lane *lane, double time_s) {
    if (!(time_s > s->now_s)) return false;
    schedule(s, time_s - s->now_s, false, WAKE_LANE, (int32_t)(lane - s->lanes), ++lane->ticket);
    return true;
}

/* Say what the lane waits for, or runs: what stops it from the end of one step to the end of the next. */
void awaits(Simulation *s, Lane *lane, int kind, int32_t number) {
    if (lane->awaits == NO_STEP) lane->stopped = ++s->n_waits;
    lane->awaits = kind;
    lane->awaited = number;
}

/* Return whether the lane waits for a step of another. */
static bool waits_for_steps(Simulation *s, Lane *lane) {
    const Step *step = step_of(s, lane);
    lane->blocked_on = -1;
    for (; lane->after < step->n_after; lane->after++) {
        int32_t label = share_of(s, lane)->after[step->first_after + lane->after];
        if (s->ranks[lane->rank].ended[label]) continue;
        awaits(s, lane, A_STEP, label);
        lane->blocked_on = label;
        lane->wait_order = ++s->n_waits;
        return true;
    }
    return false;
}

static void end_step(Simulation *s, Lane *lane) {
    const Rank *rank = &s->ranks[lane->rank];
    const Role *role = &s->roles[rank->role];
    int32_t label = step_of(s, lane)->label;
    lane->awaits = NO_STEP;
    rank->ended[label] = 1;
    for (int32_t i = 0; i < role->n_lanes; i++)
        if (s->lanes[rank->first_lane + i].blocked_on == label) {
            schedule(s, 0, false, END_STEP, lane->rank, label);
            return;
        }
}

/* Let the lanes that wait for a step go on, in the order in which they came. */
void end_step_event(Simulation *s, int32_t number, int32_t label) {
    const Rank *rank = &s->ranks[number];
    int32_t n_lanes = s->roles[rank->role].n_lanes;
    for (;;) {
        Lane *next = NULL;
        for (Lane *lane = s->lanes + rank->first_lane; lane < s->lanes + rank->first_lane + n_lanes; lane++)
            if (lane->blocked_on == label && (!next || lane->wait_order < next->wait_order)) next = lane;
        if (!next) return;
        resume(s, next, false);
    }
}

void end_comm_event(Simulation *s, Rendezvous *r) {
    r->processed = true;
    for (int32_t lane = r->first_waiting, after; lane >= 0; lane = after) {
        after = s->lanes[lane].next_waiting; /* behind the last one there is no rendezvous any more */
        resume(s, &s->lanes[lane], false);
    }
}

/* Return whether a lane waits for the communication that it has come to among its pending ones. */
static bool waits_for_comm(Simulation *s, Lane *lane) {
    int32_t number = (int32_t)(lane - s->lanes);
    Rendezvous *r = s->rendezvous[lane->pending[lane->at_pending]];
    if (r->processed) return false;
    awaits(s, lane, A_RENDEZVOUS, r->number);
    lane->next_waiting = -1;
    if (r->last_waiting >= 0)
        s->lanes[r->last_waiting].next_waiting = number;
    else
        r->first_waiting = number;
    r->last_waiting = number;
    return true;
}

static void awaits_own_step(Simulation *s, Lane *lane) {
    awaits(s, lane, A_STEP, step_of(s, lane)->label);
}

/* ---- Spans ---- */

/* Record a span with the times that the lane came to it, was launched, began and ended; return its number. */
static int64_t record(Simulation *s, const Lane *lane, int32_t lane_name, int flags, int32_t template, double posted_s,
                      double launched_s, double start_s, double end_s) {
    Job *job = job_of(s, lane);
    MAKE_ROOM(s, job->spans, job->room_spans, job->n_spans + 1);
    job->spans[job->n_spans] = (Span){posted_s, launched_s, start_s, end_s, s->ranks[lane->rank].number, lane_name,
                                      lane->next_step, share_of(s, lane)->first_step + lane->step, template, flags};
    return job->n_spans++;
}

static int position(bool first, bool last) { return IN_ROW | (first ? IS_FIRST : 0) | (last ? IS_LAST : 0); }

static void record_comm(Simulation *s, Lane *lane) {
    Rendezvous *r = s->rendezvous[lane->pending[lane->at_pending]];
    bool in_block = step_of(s, lane)->kind == RUN_BLOCK;
    int flags = lane->in_overlap ? 0 : in_block ? position(lane->is_first, lane->is_last) : position(true, true);
    record(s, lane, s->kinds[lane->pending_kind[lane->at_pending]].lane_name, flags,
           s->calls[lane->pending_call[lane->at_pending]].template, lane->posted_s, lane->launched_s, r->departed_s,
           r->arrived_s);
    recorded(s, r);
}

static void record_segment(Simulation *s, Lane *lane) {
    const Piece *segment = &s->pieces[lane->piece];
    Rank *rank = &s->ranks[lane->rank];
    bool first = lane->is_first, last = lane->is_last;
    if (lane->in_overlap) {
        first = first && lane->segment == 0;
        last = last && lane->segment == lane->n_segments - 1;
    }
    if (segment->host_waits) host_waits_until(rank, s->now_s);
    double start_s = rank->gpu.segment.start_s;
    int64_t span = record(s, lane, plan_of(s, lane)->name, position(first, last), segment->template,
                          lane->segment_posted_s, start_s, start_s, s->now_s);
    stretch_if_late(s, lane, span);
}

/* ---- Steps (engine.lane) ---- */

static bool takes_sms(Simulation *s, const Lane *lane, const TaggedComm *comms, int32_t n) {
    if (!s->ranks[lane->rank].gpu.communication_waits || plan_of(s, lane)->computes) return false;
    for (int32_t i = 0; i < n; i++)
        if (s->kinds[comms[i].kind].holds_sms) return true;
    return false;
}

/* Read the communication that a lane has come to; return how many there are. */
static int32_t comms_of(Simulation *s, const Lane *lane, TaggedComm *one, const TaggedComm **comms) {
    const Step *step = step_of(s, lane);
    if (step->kind == RUN_BATCH) {
        *comms = share_of(s, lane)->batches + step->op;
        return step->n_ops;
    }
    *one = step->kind == RUN_COMM ? (TaggedComm){step->op, step->tag} : (TaggedComm){s->pieces[lane->piece].comm, 0};
    *comms = one;
    return 1;
}

static void call_comms(Simulation *s, Lane *lane) {
    TaggedComm one;
    const TaggedComm *comms;
    int32_t n = comms_of(s, lane, &one, &comms), room = lane->room_pending;
    MAKE_ROOM(s, lane->pending, room, n);
    room = lane->room_pending;
    MAKE_ROOM(s, lane->pending_kind, room, n);
    MAKE_ROOM(s, lane->pending_call, lane->room_pending, n);
    lane->n_pending = n;
    lane->at_pending = 0;
    for (int32_t i = 0; i < n; i++) {
        const TaggedComm *comm = &comms[i];
        lane->pending_kind[i] = comm->kind;
        lane->pending[i] = call(s, (int32_t)(lane - s->lanes), comm->kind, comm->tag, &lane->pending_call[i])->number;
    }
}

static int begin_step(Simulation *s, Lane *lane) {
    const Share *share = share_of(s, lane);
    Rank *rank = &s->ranks[lane->rank];
    bool computes = plan_of(s, lane)->computes;
    if (lane->step == share->n_steps) {
        Job *job = job_of(s, lane);
        if (computes) reach_step(s, rank, lane->step);
        if (job->grows && share->n_steps && share->extension == job->n_extensions)
            ask_for_extension(s, role_of(s, lane)->job);
        lane->had++;
        return AT_SHARE;
    }
    if (s->n_marks && lane - s->lanes == s->marked_lane && *s->marks == lane->step) {
        s->marks++, s->n_marks--;
        ANSWER_TO(s, mark(s->now_s));
    }
    lane->next_step = share->first + lane->step;
    lane->has_begun = true;
    lane->after = 0;
    if (computes) {
        synchronise(s, lane);
        reach_step(s, rank, lane->step);
    }
    return AT_AWAITED;
}

/* Begin the op of a step; AT_END where the lane waits. */
static int begin_op(Simulation *s, Lane *lane) {
    const Step *step = step_of(s, lane);
    Rank *rank = &s->ranks[lane->rank];
    lane->in_overlap = false;
    if (step->kind == RUN_BLOCK) {
        lane->cut = cut_of(s, lane);
        lane->piece = s->cuts[lane->cut].first;
        lane->left = s->cuts[lane->cut].n;
        lane->is_first = true;
        return AT_PIECE;
    }
    lane->posted_s = s->now_s;
    if (step->kind == RUN_BATCH) return AT_ISSUED;
    double issued_s = rank->told_s[step->label];
    if (plan_of(s, lane)->computes) issued_s = rank->host_s += s->works[rank->work].comm_s[lane->step];
    lane->state = AT_ISSUED;
    return waits_until(s, lane, issued_s) ? AT_END : AT_ISSUED;
}

/* Begin the next piece of a block; AT_END where the lane waits. */
static int begin_piece(Simulation *s, Lane *lane) {
    if (!lane->left) return AT_STEP_END;
    const Piece *piece = &s->pieces[lane->piece];
    Rank *rank = &s->ranks[lane->rank];
    lane->is_last = lane->left == 1;
    double host_s = rank->host_s;
    rank->host_s += piece->issue_s;
    if (piece->kind == SEGMENT) {
        lane->segment_posted_s = s->now_s;
        lane->state = AT_SEGMENT;
        begin_segment(s, lane, piece, host_s);
        return AT_END;
    }
    lane->posted_s = s->now_s;
    lane->state = AT_ISSUED;
    return waits_until(s, lane, rank->host_s) ? AT_END : AT_ISSUED;
}

static int end_piece(Lane *lane) {
    lane->piece++;
    lane->left--;
    lane->is_first = false;
    lane->in_overlap = false;
    return AT_PIECE;
}

/* The host has issued communication: call it, once it finds SMs. */
static int issued(Simulation *s, Lane *lane) {
    TaggedComm one;
    const TaggedComm *comms;
    lane->launched_s = s->now_s;
    const Piece *piece = step_of(s, lane)->kind == RUN_BLOCK ? &s->pieces[lane->piece] : NULL;
    if (piece && piece->kind == OVERLAPPED_CALL) {
        lane->n_segments = piece->n_segments;
        call_comms(s, lane);
        lane->in_overlap = true;
        lane->segment = -1;
        return AT_BESIDE;
    }
    int32_t n = comms_of(s, lane, &one, &comms);
    if (!takes_sms(s, lane, comms, n)) return AT_CALLS;
    lane->state = AT_SMS;
    schedule(s, 2 * INSTANT_s, false, WAKE_LANE, (int32_t)(lane - s->lanes), ++lane->ticket);
    return AT_END;
}

/* Run the next segment beside a collective, then wait for that. */
static int begin_beside(Simulation *s, Lane *lane) {
    Rank *rank = &s->ranks[lane->rank];
    if (++lane->segment == lane->n_segments) return AT_COMM;
    const Piece *segment = &s->pieces[++lane->piece];
    double host_s = rank->host_s;
    rank->host_s += segment->issue_s;
    lane->segment_posted_s = s->now_s;
    lane->state = AT_SEGMENT;
    begin_segment(s, lane, segment, host_s);
    return AT_END;
}

/* All communication that the lane has called has ended. */
static int end_comms(Simulation *s, Lane *lane) {
    const Step *step = step_of(s, lane);
    Rank *rank = &s->ranks[lane->rank];
    if (step->kind == RUN_COMM) return AT_STEP_END;
    if (step->kind == RUN_BATCH) {
        rank->told_s[step->label] = s->now_s;
        return AT_STEP_END;
    }
    if (!lane->in_overlap && s->kinds[s->pieces[lane->piece].comm].host_waits) host_waits_until(rank, s->now_s);
    awaits_own_step(s, lane);
    return end_piece(lane);
}

/* Go on with a lane until it waits. */
void resume(Simulation *s, Lane *lane, bool interrupted) {
    for (int state = lane->state; state != AT_END;) switch (state) {
            case AT_SHARE:
                state = begin_share(s, lane);
                break;
            case AT_STEP:
                state = begin_step(s, lane);
                break;
            case AT_AWAITED:
                lane->state = AT_AWAITED;
                if (waits_for_steps(s, lane)) return;
                if (plan_of(s, lane)->computes) synchronise(s, lane);
                awaits_own_step(s, lane);
                state = begin_op(s, lane);
                break;
            case AT_PIECE:
                state = begin_piece(s, lane);
                break;
            case AT_SEGMENT:
                if (!go_on_with_segment(s, lane, interrupted)) return;
                record_segment(s, lane);
                state = lane->in_overlap ? AT_BESIDE : end_piece(lane);
                break;
            case AT_BESIDE:
                state = begin_beside(s, lane);
                break;
            case AT_ISSUED:
                state = issued(s, lane);
                break;
            case AT_SMS:
                state = AT_CALLS;
                if (!computes(s, &s->ranks[lane->rank].gpu)) break;
                lane->state = AT_ROOM;
                wait_for_room(s, &s->ranks[lane->rank].gpu, (int32_t)(lane - s->lanes));
                return;
            case AT_ROOM: /* until now its kernel was not on the GPU */
                lane->posted_s = lane->launched_s = s->now_s;
                state = AT_CALLS;
                break;
            case AT_CALLS:
                call_comms(s, lane);
                state = AT_COMM;
                break;
            case AT_COMM:
                if (lane->at_pending == lane->n_pending) {
                    state = end_comms(s, lane);
                    break;
                }
                lane->state = state = AT_ARRIVAL;
                if (waits_for_comm(s, lane)) return;
                break;
            case AT_ARRIVAL:
                record_comm(s, lane);
                lane->at_pending++;
                state = AT_COMM;
                break;
            case AT_STEP_END:
                end_step(s, lane);
                lane->step++;
                state = AT_STEP;
                break;
        }
}
