/* Max-min fair rates, and the links that hold phases up: sum by sum as simulator.network.max_min works them out. */
#include "loop.h"

static void free_solution(Solution *solution) {
    free(solution->rates_Bps);
    free(solution->full);
    free(solution->crossers);
}

/* Give all solutions up, with the states that no link has come to; those that are recorded stay. */
void forget_solutions(Simulation *s) {
    for (int32_t i = 0; i < s->n_solutions; i++) free_solution(&s->solutions[i]);
    s->n_solutions = 0;
    for (int32_t i = 0; i < s->n_phases; i++) s->phases[i].alone = -1;
    forget(&s->solved);
}

/* Note which of these phases puts how much on which link. Links are numbered in the order in which phases name them. */
static void note_loaded_links(Simulation *s, int32_t n, const int32_t *phases) {
    MaxMin *m = &s->max_min;
    m->n_loaded = m->n_links = 0;
    for (int32_t i = 0; i < n; i++) {
        const Phase *phase = &s->phases[phases[i]];
        MAKE_ROOM(s, m->loaded, m->room, m->n_loaded + phase->n_links);
        for (int32_t j = 0; j < phase->n_links; j++) {
            int32_t link = phase->links[j];
            if (phase->loads[j] <= 0) continue;
            if (m->number_of[link] < 0) {
                m->number_of[link] = m->n_links;
                m->links[m->n_links++] = link;
            }
            m->loaded[m->n_loaded++] = (LoadedLink){phase->loads[j], i, m->number_of[link], false};
        }
    }
    for (int32_t i = 0; i < m->n_links; i++) m->number_of[m->links[i]] = -1;
}

/* Write the rates of phases, by progressive filling (max_min_rates). */
static void fill(Simulation *s, int32_t n, const int32_t *phases, double *rates) {
    MaxMin *m = &s->max_min;
    double level = 0;
    int32_t n_rising = n;
    for (int32_t link = 0; link < m->n_links; link++) m->left[link] = s->capacity_Bps[m->links[link]];
    for (int32_t i = 0; i < n; i++) rates[i] = -1; /* it still rises */
    while (n_rising) {
        double rise = INFINITY, least_cap = INFINITY;
        for (int32_t link = 0; link < m->n_links; link++) m->pressure[link] = 0;
        for (int32_t i = 0; i < m->n_loaded; i++)
            if (rates[m->loaded[i].phase] < 0) m->pressure[m->loaded[i].link] += m->loaded[i].load;
        for (int32_t link = 0; link < m->n_links; link++) {
            m->rise[link] = m->pressure[link] > 0 ? m->left[link] / m->pressure[link] : INFINITY;
            if (m->rise[link] < rise) rise = m->rise[link];
        }
        for (int32_t i = 0; i < n; i++)
            if (rates[i] < 0 && s->phases[phases[i]].cap_Bps < least_cap) least_cap = s->phases[phases[i]].cap_Bps;
        if (least_cap - level < rise) rise = least_cap - level;
        double threshold = rise + m->tie * (level + rise), next_level = level + rise;
        for (int32_t i = 0; i < n; i++) m->stops[i] = isinf(rise) || s->phases[phases[i]].cap_Bps - level <= threshold;
        for (int32_t i = 0; i < m->n_loaded; i++)
            if (m->rise[m->loaded[i].link] <= threshold) m->stops[m->loaded[i].phase] = true;
        for (int32_t i = 0; i < n; i++)
            if (rates[i] < 0 && m->stops[i]) rates[i] = next_level, n_rising--;
        for (int32_t link = 0; link < m->n_links; link++) {
            double left = m->left[link] - m->pressure[link] * rise;
            m->left[link] = left > 0 ? left : 0;
        }
        level = next_level;
    }
}

/* Mark which phase is held up where, at these rates; return on how many links any is, and how many cross these. */
static int32_t mark_held_up(Simulation *s, int32_t n, const int32_t *phases, const double *rates, int32_t *n_crossers) {
    MaxMin *m = &s->max_min;
    int32_t n_slow = 0, n_full = 0;
    *n_crossers = 0;
    for (int32_t i = 0; i < n; i++) n_slow += m->is_slow[i] = rates[i] < s->phases[phases[i]].cap_Bps * (1 - m->slack);
    if (!n_slow) return 0;
    for (int32_t link = 0; link < m->n_links; link++) {
        m->carried[link] = m->fastest[link] = 0;
        m->n_held_up[link] = m->n_crossers[link] = 0;
    }
    for (int32_t i = 0; i < m->n_loaded; i++) {
        const LoadedLink *at = &m->loaded[i];
        m->carried[at->link] += at->load * rates[at->phase];
        if (rates[at->phase] > m->fastest[at->link]) m->fastest[at->link] = rates[at->phase];
    }
    for (int32_t i = 0; i < m->n_loaded; i++) {
        LoadedLink *at = &m->loaded[i];
        bool is_full = m->carried[at->link] >= s->capacity_Bps[m->links[at->link]] * (1 - m->slack);
        at->is_held_up =
            m->is_slow[at->phase] && is_full && rates[at->phase] >= m->fastest[at->link] * (1 - m->slack);
        m->n_held_up[at->link] += at->is_held_up;
        m->n_crossers[at->link]++;
    }
    for (int32_t link = 0; link < m->n_links; link++)
        if (m->n_held_up[link]) n_full++, *n_crossers += m->n_crossers[link];
    return n_full;
}

/* Write the states of links that hold a phase below its cap, in the order of links (saturations). */
static void write_full_links(Simulation *s, const int32_t *phases, Solution *solution) {
    MaxMin *m = &s->max_min;
    int32_t n = 0, first = 0;
    for (int32_t link = 0; link < m->n_links; link++) {
        if (!m->n_held_up[link]) continue;
        solution->full[n++] = (FullLink){solution->crossers + first, m->links[link], m->n_crossers[link], -1};
        m->next_crosser[link] = first;
        first += m->n_crossers[link];
    }
    for (int32_t i = 0; i < m->n_loaded; i++) {
        const LoadedLink *at = &m->loaded[i];
        if (!m->n_held_up[at->link]) continue;
        const Phase *phase = &s->phases[phases[at->phase]];
        solution->crossers[m->next_crosser[at->link]++] =
            (Crosser){solution->rates_Bps[at->phase], phase->cap_Bps, phase->unslowed, at->is_held_up};
    }
}

static int32_t solve(Simulation *s, int32_t n, const int32_t *phases) {
    MaxMin *m = &s->max_min;
    if (s->n_solutions >= m->remembered) forget_solutions(s);
    MAKE_ROOM(s, s->solutions, s->room_solutions, s->n_solutions + 1);
    int32_t room = m->room_stops;
    MAKE_ROOM(s, m->stops, room, n);
    MAKE_ROOM(s, m->is_slow, m->room_stops, n);
    note_loaded_links(s, n, phases);
    /* It is counted at once, so that what it has is freed whenever memory is short. */
    Solution *solution = &s->solutions[s->n_solutions++];
    *solution = (Solution){0};
    solution->rates_Bps = allocated(s, (size_t)n * sizeof *solution->rates_Bps);
    fill(s, n, phases, solution->rates_Bps);
    int32_t n_crossers, n_full = mark_held_up(s, n, phases, solution->rates_Bps, &n_crossers);
    if (n_full) {
        solution->full = allocated(s, (size_t)n_full * sizeof *solution->full);
        solution->crossers = allocated(s, (size_t)n_crossers * sizeof *solution->crossers);
        solution->n_full = n_full;
        write_full_links(s, phases, solution);
    }
    remember(s, &s->solved, phases, n, s->n_solutions - 1);
    return s->n_solutions - 1;
}

static int32_t number_of_solution(Simulation *s, int32_t n, const int32_t *phases) {
    int32_t number = recall(&s->solved, phases, n);
    return number < 0 ? solve(s, n, phases) : number;
}

/* Return the rates of phases that meet, worked out once. They are good until the next ones are asked for. */
Solution *solution_of(Simulation *s, int32_t n, const int32_t *phases) {
    int32_t number = number_of_solution(s, n, phases);
    return &s->solutions[number];
}

/* Return the rate of a phase with nothing else on its links; it is as good as those of `solution_of`. */
Solution *solution_alone(Simulation *s, int32_t phase) {
    if (s->phases[phase].alone < 0) {
        int32_t number = number_of_solution(s, 1, &phase);
        s->phases[phase].alone = number;
    }
    return &s->solutions[s->phases[phase].alone];
}
