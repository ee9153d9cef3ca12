/* Which calls of ranks belong together, and when their bytes depart and arrive (engine.communicator, .rendezvous). */
#include "loop.h"

static Rendezvous *new_rendezvous(Simulation *s, const Call *call, int32_t tag) {
    int32_t members = s->planned[call->planned].n_members, number;
    Rendezvous *r = allocated(s, sizeof *r + (size_t)members * sizeof *r->callers);
    if (s->n_free_rendezvous) {
        number = s->free_rendezvous[--s->n_free_rendezvous];
    } else {
        number = s->n_rendezvous;
        MAKE_ROOM(s, s->rendezvous, s->room_rendezvous, number + 1);
        s->n_rendezvous++;
    }
    s->rendezvous[number] = r;
    r->number = number, r->kind = call->kind, r->tag = tag, r->planned = call->planned, r->count = call->count;
    r->speed = 1;
    r->first_waiting = r->last_waiting = -1;
    return r;
}

/* Say that one more lane has recorded the end: behind the last one nobody asks for the rendezvous any more. */
void recorded(Simulation *s, Rendezvous *r) {
    if (++r->n_recorded < s->planned[r->planned].n_members) return;
    MAKE_ROOM(s, s->free_rendezvous, s->room_free_rendezvous, s->n_free_rendezvous + 1);
    s->free_rendezvous[s->n_free_rendezvous++] = r->number;
    s->rendezvous[r->number] = NULL;
    free(r);
}

static bool has_called(const Rendezvous *r, int32_t rank) {
    for (int32_t i = 0; i < r->n_callers; i++)
        if (r->callers[i].rank == rank) return true;
    return false;
}

/* Leave where ranks call different things: a real machine would hang or corrupt data. */
static void check_match(Simulation *s, int32_t lane, const CommKind *kind, const Rendezvous *r) {
    const CommKind *other = &s->kinds[r->kind];
    if (kind->nbytes == other->nbytes && (kind->op == other->op) != kind->paired) return;
    s->differing[0] = lane, s->differing[1] = (int32_t)(kind - s->kinds);
    s->differing[2] = r->kind, s->differing[3] = r->callers[0].rank;
    fail(s, CALLS_DIFFER);
}

static int32_t call_of(Simulation *s, int32_t lane, int32_t kind) {
    int32_t key[2] = {lane, kind}, number = recall(&s->called, key, 2);
    if (number < 0) {
        number = ANSWER_TO(s, call(lane, kind));
        remember(s, &s->called, key, 2, number);
    }
    return number;
}

static int32_t queue_of(Simulation *s, int32_t channel, int32_t tag) {
    int32_t key[2] = {channel, tag}, queue = recall(&s->channels, key, 2);
    if (queue < 0) {
        queue = s->n_queues;
        MAKE_ROOM(s, s->queues, s->room_queues, queue + 1);
        s->queues[s->n_queues++] = NULL;
        remember(s, &s->channels, key, 2, queue);
    }
    return queue;
}

static void depart(Simulation *s, Rendezvous *r) {
    if (!s->counts[r->count]++) {
        MAKE_ROOM(s, s->count_order, s->room_count_order, s->n_count_order + 1);
        s->count_order[s->n_count_order++] = r->count;
    }
    r->departed_s = s->now_s;
    start_phase(s, r);
    if (r->triggered) return; /* a group of one has nothing to move */
    if (s->kinds[r->kind].holds_sms)
        for (int32_t i = 0; i < r->n_callers; i++) move_bytes(s, &s->ranks[r->callers[i].rank].gpu, r, i);
}

/* Call a communication: its kernel is on the GPU from now on; the last call sets the bytes in motion.
 *
 * `number` becomes that of the lane's call.
 */
Rendezvous *call(Simulation *s, int32_t lane, int32_t kind, int32_t tag, int32_t *number) {
    *number = call_of(s, lane, kind);
    Call call = s->calls[*number];
    int32_t rank = s->lanes[lane].rank, queue = queue_of(s, call.channel, tag);
    Rendezvous **place = &s->queues[queue];
    while (*place && has_called(*place, rank)) place = &(*place)->after;
    Rendezvous *r = *place;
    if (r)
        check_match(s, lane, &s->kinds[kind], r);
    else
        r = *place = new_rendezvous(s, &call, tag);
    r->callers[r->n_callers++] = (Caller){rank, call.memory_demand, 1};
    if (s->kinds[kind].spins) spin(s, &s->ranks[rank].gpu, r);
    if (r->n_callers == s->planned[call.planned].n_members) {
        *place = r->after;
        depart(s, r);
    }
    return r;
}

/* The last byte has arrived. */
void arrive(Simulation *s, Rendezvous *r) {
    r->triggered = true;
    if (s->kinds[r->kind].holds_sms)
        for (int32_t i = 0; i < r->n_callers; i++) release(s, &s->ranks[r->callers[i].rank].gpu, r);
    r->arrived_s = s->now_s;
    schedule(s, 0, false, END_COMM, r->number, 0);
}

/* Let a caller's GPU allow the bytes under way this share of full speed. The slowest member decides. */
void limit(Simulation *s, Rendezvous *r, int32_t caller, double speed) {
    if (r->callers[caller].speed == speed) return;
    r->callers[caller].speed = speed;
    double slowest = r->callers[0].speed;
    for (int32_t i = 1; i < r->n_callers; i++)
        if (r->callers[i].speed < slowest) slowest = r->callers[i].speed;
    if (slowest != r->speed) slow(s, r, slowest);
}
