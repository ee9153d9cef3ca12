/* What Python calls: a simulation is described, and run for so many events at a time; results.c reads it.
 *
 * Arrays that are passed as `const` are Python's, and outlive the simulation. Functions that add something return its
 * number, or -1 where memory is short.
 */
#include "loop.h"

EXPORTED void free_simulation(Simulation *s);

/* ---- Description ---- */

static bool begin_max_min(MaxMin *m, size_t n_links) {
    int32_t **numbers[] = {&m->number_of, &m->links, &m->n_held_up, &m->n_crossers, &m->next_crosser};
    double **values[] = {&m->left, &m->pressure, &m->rise, &m->carried, &m->fastest};
    bool enough = true;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        enough = (*numbers[i] = calloc(n_links + 1, sizeof **numbers[i])) && enough;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        enough = (*values[i] = calloc(n_links + 1, sizeof **values[i])) && enough;
    for (size_t i = 0; enough && i < n_links; i++) m->number_of[i] = -1;
    return enough;
}

EXPORTED Simulation *new_simulation(const Questions *ask, const double *capacity_Bps, int32_t n_links, int32_t n_jobs,
                                    int32_t n_roles, int32_t n_ranks, int32_t n_lanes, double tie, double slack,
                                    int32_t remembered) {
    Simulation *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->ask = *ask;
    s->capacity_Bps = capacity_Bps;
    s->n_links = n_links, s->n_jobs = n_jobs, s->n_roles = n_roles, s->n_ranks = n_ranks, s->n_lanes = n_lanes;
    s->max_min.tie = tie, s->max_min.slack = slack, s->max_min.remembered = remembered;
    s->links = calloc((size_t)n_links + 1, sizeof *s->links);
    s->changed = calloc((size_t)n_links + 1, sizeof *s->changed);
    s->reached = calloc((size_t)n_links + 1, sizeof *s->reached);
    s->jobs = calloc((size_t)n_jobs + 1, sizeof *s->jobs);
    s->roles = calloc((size_t)n_roles + 1, sizeof *s->roles);
    s->ranks = calloc((size_t)n_ranks + 1, sizeof *s->ranks);
    s->lanes = calloc((size_t)n_lanes + 1, sizeof *s->lanes);
    if (!s->links || !s->changed || !s->reached || !s->jobs || !s->roles || !s->ranks || !s->lanes ||
        !begin_max_min(&s->max_min, (size_t)n_links)) {
        free_simulation(s);
        return NULL;
    }
    for (int32_t i = 0; i < n_links; i++) s->links[i].saturation = -1;
    return s;
}

EXPORTED int32_t add_phase(Simulation *s, double nbytes, double latency_s, double cap_Bps, int32_t n_links,
                           const int32_t *links, const double *loads) {
    DESCRIBE(s);
    MAKE_ROOM(s, s->phases, s->room_phases, s->n_phases + 1);
    int32_t number = s->n_phases++;
    s->phases[number] = (Phase){nbytes, latency_s, cap_Bps, links, loads, n_links, number, -1};
    DESCRIBED(s, number);
}

EXPORTED int32_t add_planned(Simulation *s, int32_t n_phases, const int32_t *phases, int32_t n_members) {
    DESCRIBE(s);
    MAKE_ROOM(s, s->planned, s->room_planned, s->n_planned + 1);
    MAKE_ROOM(s, s->plan_phases, s->room_plan_phases, s->n_plan_phases + n_phases);
    s->planned[s->n_planned] = (Planned){s->n_plan_phases, n_phases, n_members};
    for (int32_t i = 0; i < n_phases; i++) s->plan_phases[s->n_plan_phases++] = phases[i];
    DESCRIBED(s, s->n_planned++);
}

/* Write the rates of phases that meet, of which there is one at least. */
EXPORTED int32_t work_out_rates(Simulation *s, int32_t n, const int32_t *phases, double *rates_Bps) {
    DESCRIBE(s);
    memcpy(rates_Bps, solution_of(s, n, phases)->rates_Bps, (size_t)n * sizeof *rates_Bps);
    DESCRIBED(s, n);
}

/* Add to the record that a phase has been played so often with nothing else on its links. */
EXPORTED int32_t add_alone(Simulation *s, int32_t phase, int64_t times) {
    DESCRIBE(s);
    add_seconds_alone(s, phase, (double)times * s->phases[phase].nbytes / solution_alone(s, phase)->rates_Bps[0]);
    DESCRIBED(s, phase);
}

/* Add to the record the seconds of a state in time that was not played. */
EXPORTED int32_t prolong(Simulation *s, int32_t state, double seconds) {
    DESCRIBE(s);
    add_seconds(s, state, seconds);
    DESCRIBED(s, state);
}

EXPORTED int32_t add_kind(Simulation *s, const CommKind *kind) {
    DESCRIBE(s);
    MAKE_ROOM(s, s->kinds, s->room_kinds, s->n_kinds + 1);
    s->kinds[s->n_kinds] = *kind;
    DESCRIBED(s, s->n_kinds++);
}

EXPORTED int32_t add_call(Simulation *s, const Call *call) {
    DESCRIBE(s);
    MAKE_ROOM(s, s->calls, s->room_calls, s->n_calls + 1);
    MAKE_ROOM(s, s->counts, s->room_counts, call->count + 1);
    while (s->n_counts <= call->count) s->counts[s->n_counts++] = 0;
    s->calls[s->n_calls] = *call;
    DESCRIBED(s, s->n_calls++);
}

EXPORTED int32_t add_template(Simulation *s, const Template *template) {
    DESCRIBE(s);
    MAKE_ROOM(s, s->templates, s->room_templates, s->n_templates + 1);
    s->templates[s->n_templates] = *template;
    DESCRIBED(s, s->n_templates++);
}

EXPORTED int32_t add_paced(Simulation *s, const PacedTemplate *paced) {
    DESCRIBE(s);
    MAKE_ROOM(s, s->paced, s->room_paced, s->n_paced + 1);
    s->paced[s->n_paced] = *paced;
    DESCRIBED(s, s->n_paced++);
}

EXPORTED int32_t add_pieces(Simulation *s, int32_t n, const Piece *pieces) {
    DESCRIBE(s);
    MAKE_ROOM(s, s->pieces, s->room_pieces, s->n_pieces + n);
    for (int32_t i = 0; i < n; i++) s->pieces[s->n_pieces + i] = pieces[i];
    s->n_pieces += n;
    DESCRIBED(s, s->n_pieces - n);
}

/* Add a block as a rank runs it: so many pieces in a row, the segments of overlapped calls not counted. */
EXPORTED int32_t add_cut(Simulation *s, int32_t first_piece, int32_t n) {
    DESCRIBE(s);
    MAKE_ROOM(s, s->cuts, s->room_cuts, s->n_cuts + 1);
    s->cuts[s->n_cuts] = (CutBlock){first_piece, n, 0};
    DESCRIBED(s, s->n_cuts++);
}

EXPORTED int32_t add_work(Simulation *s, const HostWork *work) {
    DESCRIBE(s);
    MAKE_ROOM(s, s->works, s->room_works, s->n_works + 1);
    s->works[s->n_works] = *work;
    DESCRIBED(s, s->n_works++);
}

EXPORTED int32_t describe_role(Simulation *s, int32_t number, int32_t job, int32_t n_lanes, const int32_t *names,
                               int32_t compute_lane) {
    DESCRIBE(s);
    Role *role = &s->roles[number];
    role->lanes = allocated(s, (size_t)n_lanes * sizeof *role->lanes);
    role->job = job, role->n_lanes = n_lanes;
    for (int32_t i = 0; i < n_lanes; i++) role->lanes[i].name = names[i], role->lanes[i].computes = i == compute_lane;
    DESCRIBED(s, number);
}

/* Let a role know that its steps and what they wait for have `n` labels by now, and which lanes have `n_new` of them.
 */
EXPORTED int32_t describe_labels(Simulation *s, int32_t number, int32_t n, int32_t n_new, const int32_t *labels,
                                 const int32_t *lanes, const uint8_t *are_batches) {
    DESCRIBE(s);
    Role *role = &s->roles[number];
    int32_t room_labels = role->room_labels;
    MAKE_ROOM(s, role->lane_of_label, room_labels, n);
    MAKE_ROOM(s, role->is_batch, role->room_labels, n);
    for (; role->n_labels < n; role->n_labels++)
        role->lane_of_label[role->n_labels] = -1, role->is_batch[role->n_labels] = 0;
    for (int32_t i = 0; i < n_new; i++)
        role->lane_of_label[labels[i]] = lanes[i], role->is_batch[labels[i]] = are_batches[i];
    for (int32_t i = 0; i < s->n_ranks; i++) {
        Rank *rank = &s->ranks[i];
        if (rank->role != number) continue;
        int32_t room = rank->room_labels;
        MAKE_ROOM(s, rank->ended, room, n);
        MAKE_ROOM(s, rank->told_s, rank->room_labels, n);
        for (; rank->n_labels < n; rank->n_labels++) rank->ended[rank->n_labels] = 0, rank->told_s[rank->n_labels] = 0;
    }
    DESCRIBED(s, number);
}

EXPORTED int32_t add_share(Simulation *s, int32_t role, int32_t lane, const Share *share) {
    DESCRIBE(s);
    RoleLane *plan = &s->roles[role].lanes[lane];
    MAKE_ROOM(s, plan->shares, plan->room, plan->n + 1);
    plan->shares[plan->n] = *share;
    DESCRIBED(s, plan->n++);
}

EXPORTED void describe_rank(Simulation *s, int32_t index, int32_t number, int32_t role, int32_t first_lane,
                            int32_t host_kind, int32_t work, int32_t interference, int32_t communication_waits) {
    Rank *rank = &s->ranks[index];
    rank->number = number, rank->role = role, rank->first_lane = first_lane;
    rank->host_kind = host_kind, rank->work = work;
    rank->gpu.interference = interference;
    rank->gpu.communication_waits = communication_waits != 0;
    rank->gpu.memory_left = INFINITY;
    for (int32_t i = 0; i < s->roles[role].n_lanes; i++) {
        Lane *lane = &s->lanes[first_lane + i];
        lane->rank = index, lane->number_in_role = i;
        lane->state = AT_SHARE;
        lane->blocked_on = -1;
    }
}

/* ---- The simulation ---- */

/* Let background traffic cross the links of a phase from now on. */
EXPORTED int32_t begin_background(Simulation *s, int32_t phase) {
    DESCRIBE(s);
    occupy(s, phase);
    DESCRIBED(s, phase);
}

/* Let every lane of the ranks of a job begin now. */
EXPORTED int32_t begin_job(Simulation *s, int32_t job, int32_t grows, int32_t asks) {
    DESCRIBE(s);
    s->jobs[job].grows = grows != 0;
    for (int32_t rank = 0; rank < s->n_ranks; rank++) {
        const Role *role = &s->roles[s->ranks[rank].role];
        for (int32_t i = 0; role->job == job && i < role->n_lanes; i++)
            schedule(s, 0, true, BEGIN_LANE, s->ranks[rank].first_lane + i, 0);
    }
    if (asks) ask_for_extension(s, job);
    DESCRIBED(s, job);
}

static void happen(Simulation *s, const Event *event) {
    int32_t number = event->number;
    switch (event->kind) {
        case BEGIN_LANE:
            resume(s, &s->lanes[number], false);
            break;
        case WAKE_LANE:
            if (s->lanes[number].ticket == event->detail) resume(s, &s->lanes[number], false);
            break;
        case INTERRUPT_LANE:
            s->lanes[number].ticket++;
            resume(s, &s->lanes[number], true);
            break;
        case END_STEP:
            end_step_event(s, number, (int32_t)event->detail);
            break;
        case END_COMM:
            end_comm_event(s, s->rendezvous[number]);
            break;
        case END_FLOW:
            flow_timer(s, event);
            break;
        case JOIN_FLOW:
            join(s, s->flows[number]);
            break;
        case NEXT_PHASE:
            s->rendezvous[number]->phase++;
            start_phase(s, s->rendezvous[number]);
            break;
        case BEGIN_RELEASE:
            schedule(s, s->jobs[number].release_s - s->now_s, false, RELEASE, number, 0);
            break;
        case RELEASE:
            hand_out(s, number);
            schedule(s, 0, false, NOTHING, 0, 0);
            break;
        case NOTHING:
            break;
    }
}

/* Let a lane tell Python that it has come to each of these steps, which ascend. */
EXPORTED void set_marks(Simulation *s, int32_t lane, int32_t n, const int32_t *steps) {
    s->marked_lane = lane, s->n_marks = n, s->marks = steps;
}

/* Let the next events happen, so many at most; return an Outcome. */
EXPORTED int32_t run(Simulation *s, int64_t most_events) {
    int outcome = setjmp(s->escape);
    if (outcome) return outcome;
    for (int64_t last = s->n_events + most_events; s->n_events < last; s->n_events++) {
        Event event;
        Work work;
        bool is_work;
        if (!next_event(s, &event, &work, &is_work)) return ENDED;
        if (!is_work)
            happen(s, &event);
        else if (work.kind == UPDATE_RATES)
            update_rates(s);
        else
            receive_extension(s, work.job);
    }
    return RUNNING;
}

/* ---- The end ---- */

static void free_ranks(Simulation *s) {
    for (int32_t i = 0; s->ranks && i < s->n_ranks; i++) {
        Rank *rank = &s->ranks[i];
        RunningSegment *segment = &rank->gpu.segment;
        while (segment->n_history) free(segment->history[--segment->n_history].own);
        free(segment->history);
        free(rank->gpu.moving);
        free(rank->gpu.spinning);
        free(rank->gpu.waiting);
        free(rank->ended);
        free(rank->told_s);
    }
    for (int32_t i = 0; s->lanes && i < s->n_lanes; i++) {
        free(s->lanes[i].pending);
        free(s->lanes[i].pending_kind);
        free(s->lanes[i].pending_call);
    }
    for (int32_t i = 0; s->roles && i < s->n_roles; i++) {
        for (int32_t lane = 0; s->roles[i].lanes && lane < s->roles[i].n_lanes; lane++)
            free(s->roles[i].lanes[lane].shares);
        free(s->roles[i].lanes);
        free(s->roles[i].lane_of_label);
        free(s->roles[i].is_batch);
    }
    for (int32_t i = 0; s->jobs && i < s->n_jobs; i++) {
        free(s->jobs[i].spans);
        free(s->jobs[i].stretched);
        free(s->jobs[i].rows_s);
        free(s->jobs[i].waiting);
    }
}

EXPORTED void free_simulation(Simulation *s) {
    free_ranks(s);
    forget_solutions(s);
    for (int32_t i = 0; i < s->n_flows; i++) free(s->flows[i]);
    for (int32_t i = 0; i < s->n_rendezvous; i++) free(s->rendezvous[i]);
    Memo *memos[] = {&s->slowed, &s->called, &s->channels, &s->loads_of_gpus, &s->paced_of, &s->met_at, &s->cut_of};
    for (size_t i = 0; i < sizeof memos / sizeof *memos; i++) forget(memos[i]);
    MaxMin *m = &s->max_min;
    void *of_max_min[] = {m->loaded, m->stops, m->is_slow, m->number_of, m->links, m->left, m->pressure, m->rise,
                          m->carried, m->fastest, m->n_held_up, m->n_crossers, m->next_crosser};
    void *arrays[] = {s->queue, s->put_off, s->links, s->phases, s->solutions, s->flows, s->free_flows, s->changed,
                      s->reached, s->met_phases, s->met, s->saturations, s->saturated_order, s->crossers,
                      s->kinds, s->calls, s->planned, s->plan_phases, s->queues, s->rendezvous, s->free_rendezvous,
                      s->counts, s->count_order, s->templates, s->paced, s->pieces, s->cuts, s->key, s->met_lanes,
                      s->jobs, s->roles, s->ranks, s->lanes, s->works};
    for (size_t i = 0; i < sizeof of_max_min / sizeof *of_max_min; i++) free(of_max_min[i]);
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free(arrays[i]);
    free(s);
}
