/* simulator.analysis.training.caching_allocator, whose rules are PyTorch's: requests of a step played one by one.
 *
 * It has nothing to do with the event loop. Python describes all requests before, and reads the most bytes after.
 */
#include "loop.h"

#define MIB ((int64_t)1 << 20)
#define ROUND ((int64_t)512)
#define SMALL_REQUEST (1 * MIB)
#define SMALL_SEGMENT (2 * MIB)
#define MEDIUM_REQUEST (10 * MIB)
#define MEDIUM_SEGMENT (20 * MIB)
#define ROUND_LARGE (2 * MIB)
#define LARGE_REMAINDER (1 * MIB)

/* A piece of a segment, with the numbers of its neighbours there; -1 is none. Numbers are in the order of making. */
typedef struct {
    int64_t size, before, after;
    bool small, free;
} Block;

/* Numbers of free blocks, in the order of their sizes, then of their numbers. */
typedef struct {
    int64_t *blocks, n, room;
} FreeBlocks;

typedef struct {
    Block *blocks;
    int64_t n_blocks, room_blocks;
    FreeBlocks free[2]; /* of large blocks, and of small ones */
    double limit;
    int64_t allocated, reserved, most_allocated, most_reserved;
} Allocator;

/* Make room for one more entry; tell whether there is. */
static bool has_room(void **array, int64_t *room, int64_t n, size_t entry_bytes) {
    if (n < *room) return true;
    int64_t larger = n + n / 2 + 64;
    void *moved = realloc(*array, (size_t)larger * entry_bytes);
    if (!moved) return false;
    *array = moved, *room = larger;
    return true;
}

static bool is_before(const Allocator *a, int64_t number, int64_t size, int64_t other) {
    int64_t its_size = a->blocks[number].size;
    return its_size < size || (its_size == size && number < other);
}

/* Return where the first free block stands that is not before a block of this size and number.
 *
 * The search begins at `*place`, where the last one for the same request ended: a request that comes micro-batch by
 * micro-batch mostly finds its block near there.
 */
static int64_t place_of(const Allocator *a, const FreeBlocks *free_blocks, int64_t size, int64_t number,
                        int64_t *place) {
    const int64_t *blocks = free_blocks->blocks, n = free_blocks->n;
    int64_t at = *place < n ? *place : n;
    while (at > 0 && !is_before(a, blocks[at - 1], size, number)) at--;
    while (at < n && is_before(a, blocks[at], size, number)) at++;
    return *place = at;
}

static void take_out(FreeBlocks *free_blocks, int64_t at) {
    memmove(&free_blocks->blocks[at], &free_blocks->blocks[at + 1],
            (size_t)(--free_blocks->n - at) * sizeof *free_blocks->blocks);
}

static bool put(Allocator *a, int64_t number, int64_t *place) {
    FreeBlocks *free_blocks = &a->free[a->blocks[number].small];
    if (!has_room((void **)&free_blocks->blocks, &free_blocks->room, free_blocks->n, sizeof *free_blocks->blocks))
        return false;
    int64_t at = place_of(a, free_blocks, a->blocks[number].size, number, place);
    memmove(&free_blocks->blocks[at + 1], &free_blocks->blocks[at],
            (size_t)(free_blocks->n++ - at) * sizeof *free_blocks->blocks);
    free_blocks->blocks[at] = number;
    a->blocks[number].free = true;
    return true;
}

/* Return the number of a new block; -1 where there is no memory for it. */
static int64_t new_block(Allocator *a, int64_t size, bool small) {
    if (!has_room((void **)&a->blocks, &a->room_blocks, a->n_blocks, sizeof *a->blocks)) return -1;
    a->blocks[a->n_blocks] = (Block){size, -1, -1, small, false};
    return a->n_blocks++;
}

static int64_t segment_bytes(int64_t size) {
    if (size <= SMALL_REQUEST) return SMALL_SEGMENT;
    if (size < MEDIUM_REQUEST) return MEDIUM_SEGMENT;
    return (size + ROUND_LARGE - 1) / ROUND_LARGE * ROUND_LARGE;
}

/* Return every segment that is one free block to CUDA. */
static void release_free_segments(Allocator *a) {
    for (int small = 0; small < 2; small++) {
        FreeBlocks *free_blocks = &a->free[small];
        int64_t n_kept = 0;
        for (int64_t at = 0; at < free_blocks->n; at++) {
            const Block *block = &a->blocks[free_blocks->blocks[at]];
            if (block->before < 0 && block->after < 0)
                a->reserved -= block->size;
            else
                free_blocks->blocks[n_kept++] = free_blocks->blocks[at];
        }
        free_blocks->n = n_kept;
    }
}

static int64_t reserve(Allocator *a, int64_t size, bool small) {
    if ((double)(a->reserved + size) > a->limit) release_free_segments(a);
    a->reserved += size;
    if (a->reserved > a->most_reserved) a->most_reserved = a->reserved;
    return new_block(a, size, small);
}

/* Let a block stand for the free one at a place, and move it to its own; its size may be another. */
static void replace(Allocator *a, FreeBlocks *free_blocks, int64_t at, int64_t number) {
    int64_t *blocks = free_blocks->blocks, last = free_blocks->n - 1, size = a->blocks[number].size;
    for (; at > 0 && !is_before(a, blocks[at - 1], size, number); at--) blocks[at] = blocks[at - 1];
    for (; at < last && is_before(a, blocks[at + 1], size, number); at++) blocks[at] = blocks[at + 1];
    blocks[at] = number;
    a->blocks[number].free = true;
}

/* Return the number of a block of `size` rounded bytes; -1 where there is no memory for it.
 *
 * `places`: two of this request, where its searches ended the last time.
 */
static int64_t allocate(Allocator *a, int64_t size, int64_t *places) {
    bool small = size <= SMALL_REQUEST;
    FreeBlocks *free_blocks = &a->free[small];
    int64_t at = place_of(a, free_blocks, size, -1, &places[0]);
    bool is_cached = at < free_blocks->n;
    int64_t number = is_cached ? free_blocks->blocks[at] : reserve(a, segment_bytes(size), small);
    if (number < 0) return -1;
    a->blocks[number].free = false;
    int64_t remainder = a->blocks[number].size - size;
    if (small ? remainder >= ROUND : remainder > LARGE_REMAINDER) {
        int64_t rest = new_block(a, remainder, small);
        if (rest < 0) return -1;
        int64_t after = a->blocks[number].after;
        a->blocks[rest].before = number, a->blocks[rest].after = after;
        if (after >= 0) a->blocks[after].before = rest;
        a->blocks[number].after = rest, a->blocks[number].size = size;
        if (is_cached)
            replace(a, free_blocks, at, rest);
        else if (!put(a, rest, &places[1]))
            return -1;
    } else if (is_cached)
        take_out(free_blocks, at);
    a->allocated += a->blocks[number].size;
    if (a->allocated > a->most_allocated) a->most_allocated = a->allocated;
    return number;
}

/* Free a block, which joins free neighbours; tell whether there was memory for it. `places`: as of `allocate`. */
static bool free_block(Allocator *a, int64_t number, int64_t *places) {
    Block *block = &a->blocks[number];
    FreeBlocks *free_blocks = &a->free[block->small];
    int64_t before = block->before, after = block->after, at = -1;
    a->allocated -= block->size;
    if (before >= 0 && a->blocks[before].free) {
        const Block *neighbour = &a->blocks[before];
        at = place_of(a, free_blocks, neighbour->size, before, &places[0]);
        block->size += neighbour->size, block->before = neighbour->before;
        if (block->before >= 0) a->blocks[block->before].after = number;
    }
    if (after >= 0 && a->blocks[after].free) {
        if (at >= 0) take_out(free_blocks, at);
        const Block *neighbour = &a->blocks[after];
        at = place_of(a, free_blocks, neighbour->size, after, &places[1]);
        block->size += neighbour->size, block->after = neighbour->after;
        if (block->after >= 0) a->blocks[block->after].before = number;
    }
    if (at < 0) return put(a, number, &places[0]);
    replace(a, free_blocks, at, number);
    return true;
}

/* Play a sequence of `n` requests, the slot 0 of which is at `block_of`; tell whether there was memory for them. */
static bool play_sequence(Allocator *a, const int64_t *requests, int64_t n, int64_t *block_of, int64_t *places) {
    for (const int64_t *end = requests + 2 * n; requests < end; requests += 2, places += 2) {
        int64_t *block = &block_of[requests[0]], nbytes = requests[1];
        if (nbytes ? (*block = allocate(a, nbytes, places)) < 0 : !free_block(a, *block, places)) return false;
    }
    return true;
}

/* Play the sequences of requests of each of `n_ranks` ranks in order, on an allocator of its own.
 *
 * A request is a slot and rounded bytes, which are allocated; 0 frees the slot. `starts`: the first request of each
 * sequence, and behind the last of all `n_requests`. `sequences`: those that come, each with the slot in `first_slots`
 * that is its slot 0. `firsts`: the first of them of each rank, and behind the last. `most`: room for the most bytes
 * reserved, and allocated, of each rank. Return 0; -1 without memory.
 */
EXPORTED int32_t play_requests(const int64_t *starts, const int64_t *requests, const int64_t *firsts,
                               const int64_t *sequences, const int64_t *first_slots, int64_t n_ranks,
                               int64_t n_requests, int64_t n_slots, const double *limits, int64_t *most) {
    Allocator a = {0};
    int64_t *block_of = malloc((size_t)(n_slots ? n_slots : 1) * sizeof *block_of);
    int64_t *places = calloc((size_t)(n_requests ? n_requests : 1), 2 * sizeof *places);
    bool has_memory = block_of && places;
    for (int64_t rank = 0; has_memory && rank < n_ranks; rank++) {
        a.limit = limits[rank];
        a.n_blocks = a.free[0].n = a.free[1].n = a.allocated = a.reserved = a.most_allocated = a.most_reserved = 0;
        for (int64_t i = firsts[rank]; has_memory && i < firsts[rank + 1]; i++) {
            int64_t start = starts[sequences[i]], end = starts[sequences[i] + 1];
            has_memory =
                play_sequence(&a, &requests[2 * start], end - start, &block_of[first_slots[i]], &places[2 * start]);
        }
        most[2 * rank] = a.most_reserved, most[2 * rank + 1] = a.most_allocated;
    }
    free(block_of), free(places), free(a.blocks), free(a.free[0].blocks), free(a.free[1].blocks);
    return has_memory ? 0 : -1;
}
