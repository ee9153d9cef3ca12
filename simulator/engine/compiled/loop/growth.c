/* Programs that grow: lanes ask for extensions, and wait for their shares of them (engine.growing_lanes). */
#include "loop.h"

/* Go on with the next share of the program; AT_END where the lane waits for one, or has had all. */
int begin_share(Simulation *s, Lane *lane) {
    const RoleLane *plan = plan_of(s, lane);
    Job *job = job_of(s, lane);
    Rank *rank = &s->ranks[lane->rank];
    lane->awaits = NO_STEP;
    if (lane->had == plan->n && job->grows && !job->is_over) {
        awaits(s, lane, AN_EXTENSION, -1);
        lane->state = AT_SHARE;
        MAKE_ROOM(s, job->waiting, job->room_waiting, job->n_waiting + 1);
        job->waiting[job->n_waiting++] = (int32_t)(lane - s->lanes);
        return AT_END;
    }
    if (lane->had == plan->n) {
        schedule(s, 0, false, NOTHING, 0, 0);
        return AT_END;
    }
    const Share *share = share_of(s, lane);
    if (share->host_work >= 0) {
        rank->work = share->host_work + rank->host_kind;
        host_waits_until(rank, share->release_s);
    }
    lane->step = 0;
    return AT_STEP;
}

/* Ask for an extension at the end of this instant. */
void ask_for_extension(Simulation *s, int32_t number) {
    Job *job = &s->jobs[number];
    if (job->is_asked) return;
    job->is_asked = true;
    at_end_of_instant(s, ASK_FOR_EXTENSION, number);
}

/* Wake lanes that have steps to run, or none to come: compute lanes first, so that hosts have issued what others need.
 */
static void wake_lanes(Simulation *s, Job *job) {
    int32_t kept = 0, n = job->n_waiting;
    for (int pass = 0; pass < 2; pass++)
        for (int32_t i = 0; i < n; i++) {
            Lane *lane = &s->lanes[job->waiting[i]];
            const RoleLane *plan = plan_of(s, lane);
            if (plan->computes == (pass == 0) && (job->is_over || plan->n > lane->had))
                schedule(s, 0, false, WAKE_LANE, job->waiting[i], ++lane->ticket);
        }
    for (int32_t i = 0; i < n; i++) {
        const Lane *lane = &s->lanes[job->waiting[i]];
        if (!job->is_over && plan_of(s, lane)->n <= lane->had) job->waiting[kept++] = job->waiting[i];
    }
    job->n_waiting = kept;
}

/* Ask the source of a job for the next extension. */
void receive_extension(Simulation *s, int32_t number) {
    Job *job = &s->jobs[number];
    if (ANSWER_TO(s, grow(number, NEXT_EXTENSION, s->now_s, &job->release_s)) == NO_MORE) {
        job->is_over = true;
        wake_lanes(s, job);
    } else if (job->release_s <= s->now_s) {
        hand_out(s, number);
    } else {
        schedule(s, 0, true, BEGIN_RELEASE, number, 0);
    }
}

/* Give lanes their shares of the extension, and wake those that have waited for one. */
void hand_out(Simulation *s, int32_t number) {
    Job *job = &s->jobs[number];
    job->n_extensions++;
    job->is_asked = false;
    bool is_empty = ANSWER_TO(s, grow(number, HAND_OUT, s->now_s, &job->release_s));
    wake_lanes(s, job);
    if (is_empty) ask_for_extension(s, number);
}
