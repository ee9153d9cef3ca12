/* The network: phases on links, and the rates that they reach (network.c, max_min.c). */
#ifndef NETWORK_H
#define NETWORK_H

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    double nbytes, latency_s, cap_Bps;
    const int32_t *links;
    const double *loads; /* bytes on each of its links for each of its own */
    int32_t n_links;
    int32_t unslowed; /* the phase that this one is a slower version of, or itself */
    int32_t alone;    /* its solution with nothing else on its links, or -1 */
} Phase;

/* A state in which a full link held somebody up, as it is recorded (simulator.network.max_min.Saturation). */
typedef struct {
    double seconds; /* -1: the state has not ended yet */
    int64_t first;  /* of its `n` crossers */
    int32_t link, n;
} Saturation;

/* A phase that crosses a full link. */
typedef struct {
    double rate_Bps, cap_Bps;
    int32_t phase; /* without what slows it */
    int32_t is_held_up;
} Crosser;

/* A state that a link would come to; once a link has, it is `recorded` as the saturation of that number, else -1. */
typedef struct {
    const Crosser *crossers;
    int32_t link, n, recorded;
} FullLink;

/* Rates of phases that meet, and the states of links that hold some of them up. */
typedef struct {
    double *rates_Bps;
    FullLink *full;
    Crosser *crossers; /* of one state after another */
    int32_t n_full;
} Solution;

/* A link that one of the phases crosses, and what it puts there for each byte of its own. */
typedef struct {
    double load;
    int32_t phase, link;
    bool is_held_up;
} LoadedLink;

/* What max_min.c works with: by number of a phase, or of a link, among those that meet. */
typedef struct {
    LoadedLink *loaded;
    bool *stops, *is_slow; /* by phase */
    int32_t *number_of;    /* by link of the cluster: its number, or -1 */
    int32_t *links;        /* by number: the link */
    double *left, *pressure, *rise;
    double *carried, *fastest;
    int32_t *n_held_up, *n_crossers;
    int32_t *next_crosser; /* where the next crosser of a link is written */
    int32_t n_loaded, n_links, room, room_stops;
    double tie, slack; /* of simulator.network.max_min */
    int32_t remembered; /* of simulator.network.flows */
} MaxMin;

typedef struct Crossing {
    struct Crossing *before, *after;
    struct Flow *flow;
} Crossing;

typedef struct Flow {
    double left, since_s, rate_Bps;
    uint64_t timer; /* order of the event at which it is expected to end; 0: of none */
    int32_t number, phase;
    int32_t rendezvous; /* whose bytes these are; -1: background traffic */
    int32_t mark;
    bool alone, on_links;
    Crossing crossings[]; /* one for each link of its phase */
} Flow;

typedef struct {
    Crossing *first, *last;
    double since_s;
    int32_t saturation; /* its state while it holds somebody up, or -1 */
    int32_t mark;
    bool changed;
} Link;

#endif
