/* Bytes in motion: transfers share links at their max-min fair rates (simulator.network.flows).
 *
 * max_min.c works rates out, once for each set of phases that meet.
 */
#include "loop.h"

static void expect(Simulation *s, Flow *flow, double seconds);

/* Return the number of a phase at a share of its cap. */
static int32_t phase_at(Simulation *s, int32_t phase, double speed) {
    if (speed == 1) return phase;
    int32_t key[3] = {phase};
    memcpy(key + 1, &speed, sizeof speed);
    int32_t slower = recall(&s->slowed, key, 3);
    if (slower < 0) {
        MAKE_ROOM(s, s->phases, s->room_phases, s->n_phases + 1);
        slower = s->n_phases++;
        s->phases[slower] = s->phases[phase];
        s->phases[slower].cap_Bps *= speed;
        s->phases[slower].alone = -1;
        remember(s, &s->slowed, key, 3, slower);
    }
    return slower;
}

/* ---- The record of contention ---- */

/* Return the number of a state in the record, into which it comes with its crossers when it is first asked for. */
static int32_t recorded_state(Simulation *s, FullLink *full) {
    if (full->recorded >= 0) return full->recorded;
    MAKE_ROOM(s, s->saturations, s->room_saturations, s->n_saturations + 1);
    MAKE_ROOM(s, s->crossers, s->room_crossers, s->n_crossers + full->n);
    s->saturations[s->n_saturations] = (Saturation){-1, s->n_crossers, full->link, full->n};
    memcpy(s->crossers + s->n_crossers, full->crossers, (size_t)full->n * sizeof *s->crossers);
    s->n_crossers += full->n;
    return full->recorded = s->n_saturations++;
}

/* Add to the record the seconds of a state. */
void add_seconds(Simulation *s, int32_t saturation, double seconds) {
    if (s->saturations[saturation].seconds < 0) {
        s->saturations[saturation].seconds = 0;
        MAKE_ROOM(s, s->saturated_order, s->room_order, s->n_order + 1);
        s->saturated_order[s->n_order++] = saturation;
    }
    s->saturations[saturation].seconds += seconds;
}

/* Add to the record that a phase has been played so many seconds with nothing else on its links. */
void add_seconds_alone(Simulation *s, int32_t phase, double seconds) {
    Solution *solution = solution_alone(s, phase);
    for (int32_t i = 0; i < solution->n_full; i++) add_seconds(s, recorded_state(s, &solution->full[i]), seconds);
}

static void begin_saturation(Simulation *s, FullLink *full, double since_s) {
    Link *link = &s->links[full->link];
    int32_t saturation = recorded_state(s, full);
    s->n_saturated += link->saturation < 0;
    link->saturation = saturation;
    link->since_s = since_s;
}

void end_saturation(Simulation *s, int32_t number, double at_s) {
    Link *link = &s->links[number];
    double seconds = at_s - link->since_s;
    s->n_saturated--;
    add_seconds(s, link->saturation, seconds > 0 ? seconds : 0);
    link->saturation = -1;
}

/* ---- Flows on links ---- */

static Flow *new_flow(Simulation *s, int32_t phase, int32_t rendezvous, double left, double since_s) {
    int32_t n = s->phases[phase].n_links, number;
    Flow *flow = allocated(s, sizeof *flow + (size_t)n * sizeof *flow->crossings);
    if (s->n_free_flows) {
        number = s->free_flows[--s->n_free_flows];
    } else {
        number = s->n_flows;
        MAKE_ROOM(s, s->flows, s->room_flows, s->n_flows + 1);
        s->n_flows++;
    }
    s->flows[number] = flow;
    flow->number = number, flow->phase = phase, flow->rendezvous = rendezvous;
    flow->left = left, flow->since_s = since_s;
    for (int32_t i = 0; i < n; i++) flow->crossings[i].flow = flow;
    return flow;
}

static void free_flow(Simulation *s, Flow *flow) {
    MAKE_ROOM(s, s->free_flows, s->room_free_flows, s->n_free_flows + 1);
    s->free_flows[s->n_free_flows++] = flow->number;
    s->flows[flow->number] = NULL;
    free(flow);
}

static void put_on(Simulation *s, Flow *flow, int32_t i) {
    Link *link = &s->links[s->phases[flow->phase].links[i]];
    Crossing *crossing = &flow->crossings[i];
    crossing->before = link->last;
    crossing->after = NULL;
    *(link->last ? &link->last->after : &link->first) = crossing;
    link->last = crossing;
}

static void take_off(Simulation *s, Flow *flow) {
    const Phase *phase = &s->phases[flow->phase];
    for (int32_t i = 0; i < phase->n_links; i++) {
        Link *link = &s->links[phase->links[i]];
        Crossing *crossing = &flow->crossings[i];
        *(crossing->before ? &crossing->before->after : &link->first) = crossing->after;
        *(crossing->after ? &crossing->after->before : &link->last) = crossing->before;
    }
    flow->on_links = false;
}

static void touch(Simulation *s, int32_t number) {
    const Phase *phase = &s->phases[number];
    if (!s->n_changed) at_end_of_instant(s, UPDATE_RATES, -1);
    for (int32_t i = 0; i < phase->n_links; i++) {
        Link *link = &s->links[phase->links[i]];
        if (!link->changed) s->changed[s->n_changed++] = phase->links[i];
        link->changed = true;
    }
}

static void join_later(Simulation *s, Flow *flow) {
    schedule(s, flow->since_s - s->now_s, false, JOIN_FLOW, flow->number, 0);
}

/* Solve for the flow's rate from now on, as somebody else comes. Its first bytes may still be on the way. */
static void end_solitude(Simulation *s, Flow *flow) {
    if (!flow->alone) return;
    flow->alone = false;
    if (s->now_s < flow->since_s) {
        take_off(s, flow);
        flow->rate_Bps = 0;
        flow->timer = 0;
        join_later(s, flow);
        return;
    }
    Solution *solution = solution_alone(s, flow->phase);
    for (int32_t i = 0; i < solution->n_full; i++) begin_saturation(s, &solution->full[i], flow->since_s);
}

void join(Simulation *s, Flow *flow) {
    flow->since_s = s->now_s;
    for (int32_t i = 0; i < s->phases[flow->phase].n_links; i++) {
        for (Crossing *other = s->links[s->phases[flow->phase].links[i]].first, *after; other; other = after) {
            after = other->after;
            end_solitude(s, other->flow);
        }
        put_on(s, flow, i);
    }
    flow->on_links = true;
    touch(s, flow->phase);
}

/* Let background traffic cross the links of a phase from now on and for ever. */
void occupy(Simulation *s, int32_t phase) { join(s, new_flow(s, phase, -1, INFINITY, s->now_s)); }

static void expect(Simulation *s, Flow *flow, double seconds) {
    if (isinf(seconds)) return; /* background traffic does not end */
    flow->timer = schedule(s, seconds, false, END_FLOW, flow->number, 0);
}

/* ---- A rendezvous goes from phase to phase, a flow each ---- */

static bool has_neighbours(Simulation *s, const Phase *phase) {
    for (int32_t i = 0; i < phase->n_links; i++)
        if (s->links[phase->links[i]].first) return true;
    return false;
}

/* Let all that crosses the links of a phase, each once, in the order of links, share them from now on. */
static void end_solitude_of_neighbours(Simulation *s, int32_t phase) {
    int32_t n = 0, mark = ++s->mark;
    for (int32_t i = 0; i < s->phases[phase].n_links; i++)
        for (Crossing *other = s->links[s->phases[phase].links[i]].first; other; other = other->after)
            if (other->flow->mark != mark) {
                other->flow->mark = mark;
                MAKE_ROOM(s, s->met, s->room_met, n + 1);
                s->met[n++] = other->flow;
            }
    for (int32_t i = 0; i < n; i++) end_solitude(s, s->met[i]);
}

/* Start the phase that the rendezvous has come to; behind the last one it has arrived. */
void start_phase(Simulation *s, Rendezvous *r) {
    const Planned *planned = &s->planned[r->planned];
    r->flow = NULL;
    if (r->phase == planned->n_phases) {
        arrive(s, r);
        return;
    }
    int32_t number = phase_at(s, s->plan_phases[planned->first_phase + r->phase], r->speed);
    Phase phase = s->phases[number];
    if (phase.nbytes <= 0 || !phase.n_links) {
        double seconds = phase.latency_s + (phase.nbytes > 0 ? phase.nbytes / phase.cap_Bps : 0);
        schedule(s, seconds, false, NEXT_PHASE, r->number, 0);
        return;
    }
    Flow *flow = r->flow = new_flow(s, number, r->number, phase.nbytes, s->now_s + phase.latency_s);
    if (has_neighbours(s, &phase)) {
        end_solitude_of_neighbours(s, number);
        join_later(s, flow);
        return;
    }
    flow->alone = true;
    flow->rate_Bps = solution_alone(s, number)->rates_Bps[0];
    for (int32_t i = 0; i < phase.n_links; i++) put_on(s, flow, i);
    flow->on_links = true;
    expect(s, flow, phase.latency_s + flow->left / flow->rate_Bps);
}

/* Let the bytes of a rendezvous have this share of what its phases can drive, from now on; latencies stay. */
void slow(Simulation *s, Rendezvous *r, double speed) {
    r->speed = speed;
    Flow *flow = r->flow;
    if (!flow) return;
    end_solitude(s, flow);
    flow->phase = phase_at(s, s->phases[flow->phase].unslowed, speed);
    if (flow->on_links) touch(s, flow->phase);
}

/* A flow arrives, where this is still the end that was expected last. */
void flow_timer(Simulation *s, const Event *event) {
    Flow *flow = event->number < s->n_flows ? s->flows[event->number] : NULL;
    if (!flow || flow->timer != event->order) return;
    take_off(s, flow);
    Phase phase = s->phases[flow->phase];
    if (has_neighbours(s, &phase)) {
        touch(s, flow->phase);
    } else if (flow->alone) {
        add_seconds_alone(s, flow->phase, s->now_s - flow->since_s);
    } else {
        for (int32_t i = 0; i < phase.n_links; i++)
            if (s->links[phase.links[i]].saturation >= 0) end_saturation(s, phase.links[i], s->now_s);
    }
    Rendezvous *r = s->rendezvous[flow->rendezvous];
    free_flow(s, flow);
    r->phase++;
    start_phase(s, r);
}

/* ---- Rates are solved at the end of an instant, once for all that has changed ---- */

/* Put the flows connected with a changed link into `met`, and all their links into `reached`; return how many. */
static int32_t connected(Simulation *s, int32_t *n_links) {
    int32_t n = 0, n_reached = 0, mark = ++s->mark;
    for (int32_t i = 0; i < s->n_changed; i++) {
        s->reached[n_reached++] = s->changed[i];
        s->links[s->changed[i]].mark = mark;
        s->links[s->changed[i]].changed = false;
    }
    s->n_changed = 0;
    for (int32_t at = 0; at < n_reached; at++) /* grows while it is walked */
        for (Crossing *crossing = s->links[s->reached[at]].first; crossing; crossing = crossing->after) {
            Flow *flow = crossing->flow;
            if (flow->mark == mark || flow->alone) continue;
            flow->mark = mark;
            MAKE_ROOM(s, s->met, s->room_met, n + 1);
            s->met[n++] = flow;
            const Phase *phase = &s->phases[flow->phase];
            for (int32_t i = 0; i < phase->n_links; i++)
                if (s->links[phase->links[i]].mark != mark) {
                    s->links[phase->links[i]].mark = mark;
                    s->reached[n_reached++] = phase->links[i];
                }
        }
    *n_links = n_reached;
    return n;
}

void update_rates(Simulation *s) {
    Solution nothing = {0};
    int32_t n_links, n = connected(s, &n_links);
    MAKE_ROOM(s, s->met_phases, s->room_met_phases, n);
    for (int32_t i = 0; i < n; i++) s->met_phases[i] = s->met[i]->phase;
    Solution *solution = n ? solution_of(s, n, s->met_phases) : &nothing;
    for (int32_t i = 0; i < n; i++) {
        Flow *flow = s->met[i];
        double rate_Bps = solution->rates_Bps[i];
        if (rate_Bps == flow->rate_Bps) continue;
        if (flow->rate_Bps > 0) {
            double left = flow->left - flow->rate_Bps * (s->now_s - flow->since_s);
            flow->left = left > 0 ? left : 0;
        }
        flow->since_s = s->now_s;
        flow->rate_Bps = rate_Bps;
        expect(s, flow, flow->left / rate_Bps);
    }
    if (!solution->n_full && !s->n_saturated) return;
    int32_t stays = ++s->mark; /* of links that are in the same state as before */
    for (int32_t i = 0; i < solution->n_full; i++) {
        const FullLink *full = &solution->full[i];
        Link *link = &s->links[full->link];
        if (full->recorded >= 0 && link->saturation == full->recorded) link->mark = stays;
    }
    for (int32_t i = 0; i < n_links; i++) {
        const Link *link = &s->links[s->reached[i]];
        if (link->saturation >= 0 && link->mark != stays) end_saturation(s, s->reached[i], s->now_s);
    }
    for (int32_t i = 0; i < solution->n_full; i++)
        if (s->links[solution->full[i].link].mark != stays) begin_saturation(s, &solution->full[i], s->now_s);
}
