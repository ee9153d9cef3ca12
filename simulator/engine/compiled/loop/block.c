/* Blocks as ranks run them: which pieces, given what other lanes do meanwhile (engine.coalescing). */
#include "loop.h"

/* Tell whether another lane does nothing until a step of this one has ended, which has not. */
static bool is_idle(Simulation *s, const Lane *lane, const Lane *other) {
    const Rank *rank = &s->ranks[lane->rank];
    if (!other->has_begun) return false;
    if (other->awaits == NO_STEP) return true;
    return other->awaits == A_STEP && !rank->ended[other->awaited] &&
           s->roles[rank->role].lane_of_label[other->awaited] == lane->number_in_role;
}

/* Return where `met_lanes` has the other lanes whose communication may meet that of a block: their number, then they.
 */
static int32_t meeting(Simulation *s, int32_t lane, int32_t block) {
    int32_t key[2] = {lane, block}, at = recall(&s->met_at, key, 2);
    if (at >= 0) return at;
    int32_t n_lanes = role_of(s, &s->lanes[lane])->n_lanes;
    at = s->n_met_lanes;
    MAKE_ROOM(s, s->met_lanes, s->room_met_lanes, at + 1 + n_lanes);
    int32_t n = ANSWER_TO(s, meeting(lane, block, s->met_lanes + at + 1));
    s->met_lanes[at] = n;
    s->n_met_lanes += 1 + n;
    remember(s, &s->met_at, key, 2, at);
    return at;
}

/* Return the number of the pieces in which a lane runs the block of its step now. */
int32_t cut_of(Simulation *s, Lane *lane) {
    const Step *step = step_of(s, lane);
    int32_t number = (int32_t)(lane - s->lanes), met = meeting(s, number, step->op), n_idle = 0;
    MAKE_ROOM(s, s->key, s->room_key, 3 + s->met_lanes[met]);
    int32_t *key = s->key;
    key[0] = number, key[1] = step->op, key[2] = step->phase;
    for (int32_t i = 1; i <= s->met_lanes[met]; i++) {
        int32_t other = s->met_lanes[met + i];
        if (is_idle(s, lane, &s->lanes[s->ranks[lane->rank].first_lane + other])) key[3 + n_idle++] = other;
    }
    int32_t cut = recall(&s->cut_of, key, 3 + n_idle);
    if (cut < 0) {
        cut = ANSWER_TO(s, cut(number, step->op, step->phase, n_idle, key + 3));
        remember(s, &s->cut_of, key, 3 + n_idle, cut);
    }
    s->cuts[cut].runs++;
    return cut;
}
