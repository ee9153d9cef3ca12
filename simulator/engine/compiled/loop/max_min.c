/* Max-min fair rates, and the links that hold phases up: sum by sum as simulator.network.max_min works them out. */
#include "loop.h"

/* Sets of concurrent phases whose rates are remembered. */
#define REMEMBERED 100000
/* Two constraints closer than this (relative) bind together. */
#define TIE 1e-12
/* A phase slower than its cap by less than this share is not held up, and a link less short of full is full. */
#define SLACK 1e-9

static void forget_solutions(Simulation *s) {
    for (int32_t i = 0; i < s->n_solutions; i++) free(s->solutions[i].rates_Bps);
    s->n_solutions = 0;
    for (int32_t i = 0; i < s->n_phases; i++) s->phases[i].alone = -1;
    forget(&s->solved);
}

/* Note which of these phases puts how much on which link. Links are numbered in the order in which phases name them. */
static void note_loads(Simulation *s, int32_t n, const int32_t *phases) {
    MaxMin *m = &s->max_min;
    m->n_loads = m->n_links = 0;
    for (int32_t i = 0; i < n; i++) {
        const Phase *phase = &s->phases[phases[i]];
        MAKE_ROOM(s, m->loads, m->room, m->n_loads + phase->n_links);
        for (int32_t j = 0; j < phase->n_links; j++) {
            int32_t link = phase->links[j];
            if (phase->loads[j] <= 0) continue;
            if (m->number_of[link] < 0) {
                m->number_of[link] = m->n_links;
                m->links[m->n_links++] = link;
            }
            m->loads[m->n_loads++] = (Load){phase->loads[j], i, m->number_of[link], false};
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
        for (int32_t i = 0; i < m->n_loads; i++)
            if (rates[m->loads[i].phase] < 0) m->pressure[m->loads[i].link] += m->loads[i].load;
        for (int32_t link = 0; link < m->n_links; link++) {
            m->rise[link] = m->pressure[link] > 0 ? m->left[link] / m->pressure[link] : INFINITY;
            if (m->rise[link] < rise) rise = m->rise[link];
        }
        for (int32_t i = 0; i < n; i++)
            if (rates[i] < 0 && s->phases[phases[i]].cap_Bps < least_cap) least_cap = s->phases[phases[i]].cap_Bps;
        if (least_cap - level < rise) rise = least_cap - level;
        double threshold = rise + TIE * (level + rise), next_level = level + rise;
        for (int32_t i = 0; i < n; i++) m->stops[i] = isinf(rise) || s->phases[phases[i]].cap_Bps - level <= threshold;
        for (int32_t i = 0; i < m->n_loads; i++)
            if (m->rise[m->loads[i].link] <= threshold) m->stops[m->loads[i].phase] = true;
        for (int32_t i = 0; i < n; i++)
            if (rates[i] < 0 && m->stops[i]) rates[i] = next_level, n_rising--;
        for (int32_t link = 0; link < m->n_links; link++) {
            double left = m->left[link] - m->pressure[link] * rise;
            m->left[link] = left > 0 ? left : 0;
        }
        level = next_level;
    }
}

/* Add the states of links that hold a phase below its cap at these rates (saturations); return how many. */
static int32_t add_saturations(Simulation *s, int32_t n, const int32_t *phases, const double *rates) {
    MaxMin *m = &s->max_min;
    int32_t n_slow = 0, before = s->n_saturations;
    for (int32_t i = 0; i < n; i++) n_slow += m->stops[i] = rates[i] < s->phases[phases[i]].cap_Bps * (1 - SLACK);
    if (!n_slow) return 0;
    for (int32_t link = 0; link < m->n_links; link++) m->pressure[link] = m->rise[link] = 0;
    double *carried = m->pressure, *fastest = m->rise;
    for (int32_t i = 0; i < m->n_loads; i++) {
        const Load *load = &m->loads[i];
        carried[load->link] += load->load * rates[load->phase];
        if (rates[load->phase] > fastest[load->link]) fastest[load->link] = rates[load->phase];
    }
    for (int32_t link = 0; link < m->n_links; link++) m->holders[link] = m->crossers[link] = 0;
    for (int32_t i = 0; i < m->n_loads; i++) {
        Load *load = &m->loads[i];
        bool full = carried[load->link] >= s->capacity_Bps[m->links[load->link]] * (1 - SLACK);
        load->is_held_up = m->stops[load->phase] && full && rates[load->phase] >= fastest[load->link] * (1 - SLACK);
        m->holders[load->link] += load->is_held_up;
        m->crossers[load->link]++;
    }
    for (int32_t link = 0; link < m->n_links; link++) {
        if (!m->holders[link]) continue;
        MAKE_ROOM(s, s->saturations, s->room_saturations, s->n_saturations + 1);
        s->saturations[s->n_saturations++] = (Saturation){-1, s->n_crossers, m->links[link], m->crossers[link]};
        MAKE_ROOM(s, s->crossers, s->room_crossers, s->n_crossers + m->crossers[link]);
        m->crossers[link] = (int32_t)(s->n_crossers - s->saturations[before].first); /* of the next that is written */
        s->n_crossers += s->saturations[s->n_saturations - 1].n;
    }
    if (s->n_saturations == before) return 0;
    for (int32_t i = 0; i < m->n_loads; i++) {
        const Load *load = &m->loads[i];
        if (!m->holders[load->link]) continue;
        const Phase *phase = &s->phases[phases[load->phase]];
        s->crossers[s->saturations[before].first + m->crossers[load->link]++] =
            (Crosser){rates[load->phase], phase->cap_Bps, phase->unslowed, load->is_held_up};
    }
    return s->n_saturations - before;
}

static int32_t solve(Simulation *s, int32_t n, const int32_t *phases) {
    if (s->n_solutions >= REMEMBERED) forget_solutions(s);
    MAKE_ROOM(s, s->solutions, s->room_solutions, s->n_solutions + 1);
    MAKE_ROOM(s, s->max_min.stops, s->max_min.room_stops, n);
    note_loads(s, n, phases);
    Solution solution = {allocated(s, (size_t)n * sizeof(double)), s->n_saturations, 0};
    s->solutions[s->n_solutions++] = solution;
    fill(s, n, phases, solution.rates_Bps);
    s->solutions[s->n_solutions - 1].n_saturations = add_saturations(s, n, phases, solution.rates_Bps);
    remember(s, &s->solved, phases, n, s->n_solutions - 1);
    return s->n_solutions - 1;
}

static int32_t number_of_solution(Simulation *s, int32_t n, const int32_t *phases) {
    int32_t number = recall(&s->solved, phases, n);
    return number < 0 ? solve(s, n, phases) : number;
}

/* Return the rates of phases that meet, worked out once. They are good until the next ones are asked for. */
const Solution *solution_of(Simulation *s, int32_t n, const int32_t *phases) {
    int32_t number = number_of_solution(s, n, phases);
    return &s->solutions[number];
}

/* Return the rate of a phase with nothing else on its links; it is as good as those of `solution_of`. */
const Solution *solution_alone(Simulation *s, int32_t phase) {
    if (s->phases[phase].alone < 0) {
        int32_t number = number_of_solution(s, 1, &phase);
        s->phases[phase].alone = number;
    }
    return &s->solutions[s->phases[phase].alone];
}
