/* What Python reads of a simulation: spans, counts, full links, and lanes that cannot go on. */
#include "loop.h"

EXPORTED int64_t n_events(const Simulation *s) { return s->n_events; }

/* Complete the record of background traffic, which is there until a time. */
EXPORTED int32_t finish(Simulation *s, double at_s) {
    DESCRIBE(s);
    for (int32_t link = 0; link < s->n_links; link++)
        if (s->links[link].saturation >= 0) end_saturation(s, link, at_s);
    DESCRIBED(s, 0);
}

EXPORTED int64_t read_spans(const Simulation *s, int32_t job, const Span **spans) {
    *spans = s->jobs[job].spans;
    return s->jobs[job].n_spans;
}

EXPORTED int64_t read_stretched(const Simulation *s, int32_t job, const Stretched **stretched, const double **rows_s,
                                int64_t *n_rows) {
    *stretched = s->jobs[job].stretched, *rows_s = s->jobs[job].rows_s, *n_rows = s->jobs[job].n_rows;
    return s->jobs[job].n_stretched;
}

/* States of links by their number, with the phases that cross them, and numbers in the order in which they first ended.
 */
EXPORTED int32_t read_states(const Simulation *s, const int32_t **order, const Saturation **states,
                             const Crosser **crossers, int64_t *sizes) {
    *order = s->saturated_order, *states = s->saturations, *crossers = s->crossers;
    sizes[0] = s->n_saturations, sizes[1] = s->n_crossers;
    return s->n_order;
}

/* How often each count was made, by its number, and numbers in the order in which they first were. */
EXPORTED int32_t read_counts(const Simulation *s, const int32_t **order, const int64_t **counts, int32_t *n_counts) {
    *order = s->count_order, *counts = s->counts, *n_counts = s->n_counts;
    return s->n_count_order;
}

/* When the host of each rank will have issued everything so far. */
EXPORTED void read_hosts(const Simulation *s, double *host_s) {
    for (int32_t i = 0; i < s->n_ranks; i++) host_s[i] = s->ranks[i].host_s;
}

EXPORTED int64_t runs_of_cut(const Simulation *s, int32_t cut) { return s->cuts[cut].runs; }

/* Where a lane is: what it waits for (Awaited), the label of that or its kind of communication, its tag, its step.
 *
 * Returned is the order in which lanes stopped.
 */
EXPORTED int64_t read_lane(const Simulation *s, int32_t number, int32_t *place) {
    const Lane *lane = &s->lanes[number];
    place[0] = lane->awaits, place[1] = lane->awaited, place[2] = -1, place[3] = lane->next_step;
    if (lane->awaits == A_RENDEZVOUS) {
        const Rendezvous *r = s->rendezvous[lane->awaited];
        place[1] = r->kind, place[2] = r->tag;
    }
    return lane->stopped;
}

/* Whether a rank has called the communication that a lane waits for. */
EXPORTED int32_t has_rank_called(const Simulation *s, int32_t lane, int32_t number) {
    const Rendezvous *r = s->rendezvous[s->lanes[lane].awaited];
    for (int32_t i = 0; i < r->n_callers; i++)
        if (s->ranks[r->callers[i].rank].number == number) return 1;
    return 0;
}

/* The lane and its kind of communication, the kind and the first caller that it met, of calls that differ. */
EXPORTED void read_differing(const Simulation *s, int32_t *differing) {
    memcpy(differing, s->differing, sizeof s->differing);
}

/* ---- What Python checks ---- */

/* The digest of the sources that this library was compiled from. */
EXPORTED const char *digest_of_sources(void) { return SOURCES; }

/* Write the sizes of the structures that Python describes too; return how many. */
EXPORTED int32_t sizes_of_records(int32_t *sizes) {
    const size_t all[] = {sizeof(CommKind), sizeof(Call), sizeof(Template), sizeof(PacedTemplate), sizeof(HostWork),
                          sizeof(Share), sizeof(Questions), sizeof(Step), sizeof(TaggedComm), sizeof(Piece),
                          sizeof(Span), sizeof(Stretched), sizeof(Saturation), sizeof(Crosser)};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) sizes[i] = (int32_t)all[i];
    return sizeof all / sizeof *all;
}
