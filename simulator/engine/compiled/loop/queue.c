/* SimPy's event queue, with an end to each instant (simulator.network.simulated_time), and memos. */
#include "loop.h"

/* Leave run() with this outcome. */
_Noreturn void fail(Simulation *s, int outcome) { longjmp(s->escape, outcome); }

/* Return Python's answer, or leave where it has failed. */
int32_t answered(Simulation *s) {
    if (*s->ask.answer < 0) fail(s, CALLBACK_FAILED);
    return *s->ask.answer;
}

void *allocated(Simulation *s, size_t bytes) {
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory) fail(s, OUT_OF_MEMORY);
    return memory;
}

static bool earlier(const Event *a, const Event *b) {
    return a->time_s < b->time_s || (a->time_s == b->time_s && a->order < b->order);
}

/* Let an event happen after a delay; return its order, which no other event has. */
uint64_t schedule(Simulation *s, double delay_s, bool urgent, int kind, int32_t number, int64_t detail) {
    uint64_t order = ++s->inserted | (urgent ? 0 : (uint64_t)1 << 62);
    Event event = {s->now_s + delay_s, order, detail, kind, number};
    MAKE_ROOM(s, s->queue, s->room_queue, s->n_queue + 1);
    int64_t at = s->n_queue++;
    while (at > 0) {
        int64_t parent = (at - 1) / 2;
        if (!earlier(&event, &s->queue[parent])) break;
        s->queue[at] = s->queue[parent];
        at = parent;
    }
    s->queue[at] = event;
    return order;
}

static Event first_of_queue(Simulation *s) {
    Event first = s->queue[0], last = s->queue[--s->n_queue];
    int64_t at = 0;
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= s->n_queue) break;
        if (child + 1 < s->n_queue && earlier(&s->queue[child + 1], &s->queue[child])) child++;
        if (!earlier(&s->queue[child], &last)) break;
        s->queue[at] = s->queue[child];
        at = child;
    }
    if (s->n_queue) s->queue[at] = last;
    return first;
}

/* Put work off until nothing else is left to happen now. */
void at_end_of_instant(Simulation *s, int kind, int32_t job) {
    if (s->first_put_off == s->n_put_off) s->first_put_off = s->n_put_off = 0;
    MAKE_ROOM(s, s->put_off, s->room_put_off, s->n_put_off + 1);
    s->put_off[s->n_put_off++] = (Work){kind, job};
}

/* Take the next event, or what was put off where that is later; return false where there is none. */
bool next_event(Simulation *s, Event *event, Work *work, bool *is_work) {
    *is_work = s->first_put_off < s->n_put_off && (!s->n_queue || s->queue[0].time_s > s->now_s);
    if (*is_work) {
        *work = s->put_off[s->first_put_off++];
        return true;
    }
    if (!s->n_queue) return false;
    *event = first_of_queue(s);
    s->now_s = event->time_s;
    return true;
}

/* ---- Memos ---- */

static uint64_t hash_of(const int32_t *key, int32_t length) {
    uint64_t hash = 0x9E3779B97F4A7C15u + (uint64_t)length;
    for (int32_t i = 0; i < length; i++) {
        hash = (hash ^ (uint32_t)key[i]) * 0xD6E8FEB86659FD93u;
        hash ^= hash >> 32;
    }
    return hash;
}

static int64_t slot_of(const Memo *memo, const int32_t *key, int32_t length) {
    int64_t slot = (int64_t)(hash_of(key, length) & (uint64_t)(memo->slots - 1));
    for (;; slot = (slot + 1) & (memo->slots - 1)) {
        int32_t entry = memo->table[slot];
        if (entry < 0) return slot;
        if (memo->length[entry] == length &&
            !memcmp(memo->keys + memo->start[entry], key, (size_t)length * sizeof *key))
            return slot;
    }
}

/* Return what is remembered under a key, or -1. */
int32_t recall(const Memo *memo, const int32_t *key, int32_t length) {
    if (!memo->slots) return -1;
    int32_t entry = memo->table[slot_of(memo, key, length)];
    return entry < 0 ? -1 : memo->value[entry];
}

static void enlarge(Simulation *s, Memo *memo) {
    int64_t slots = memo->slots ? 2 * memo->slots : 64;
    int32_t *table = malloc((size_t)slots * sizeof *table);
    if (!table) fail(s, OUT_OF_MEMORY);
    free(memo->table);
    memo->table = table;
    memo->slots = slots;
    for (int64_t i = 0; i < slots; i++) table[i] = -1;
    for (int64_t entry = 0; entry < memo->n; entry++)
        table[slot_of(memo, memo->keys + memo->start[entry], memo->length[entry])] = (int32_t)entry;
}

/* Remember a number under a key that is new. */
void remember(Simulation *s, Memo *memo, const int32_t *key, int32_t length, int32_t value) {
    if (2 * (memo->n + 1) > memo->slots) enlarge(s, memo);
    int64_t room = memo->room;
    MAKE_ROOM(s, memo->start, room, memo->n + 1);
    room = memo->room;
    MAKE_ROOM(s, memo->length, room, memo->n + 1);
    MAKE_ROOM(s, memo->value, memo->room, memo->n + 1);
    MAKE_ROOM(s, memo->keys, memo->room_keys, memo->n_keys + length);
    memo->start[memo->n] = memo->n_keys;
    memo->length[memo->n] = length;
    memo->value[memo->n] = value;
    memcpy(memo->keys + memo->n_keys, key, (size_t)length * sizeof *key);
    memo->n_keys += length;
    memo->table[slot_of(memo, key, length)] = (int32_t)memo->n;
    memo->n++;
}

/* Forget everything. */
void forget(Memo *memo) {
    free(memo->start);
    free(memo->length);
    free(memo->value);
    free(memo->table);
    free(memo->keys);
    memset(memo, 0, sizeof *memo);
}
