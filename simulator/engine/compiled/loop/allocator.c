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

/* Return where the first free block stands that is not before a block of this size and number. */
static int64_t place_of(const Allocator *a, const FreeBlocks *free_blocks, int64_t size, int64_t number) {
    int64_t low = 0, high = free_blocks->n;
    while (low < high) {
        int64_t middle = (low + high) / 2, other = free_blocks->blocks[middle];
        int64_t other_size = a->blocks[other].size;
        if (other_size < size || (other_size == size && other < number))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void take_out(FreeBlocks *free_blocks, int64_t at) {
    memmove(&free_blocks->blocks[at], &free_blocks->blocks[at + 1],
            (size_t)(--free_blocks->n - at) * sizeof *free_blocks->blocks);
}

static bool put(Allocator *a, int64_t number) {
    FreeBlocks *free_blocks = &a->free[a->blocks[number].small];
    if (!has_room((void **)&free_blocks->blocks, &free_blocks->room, free_blocks->n, sizeof *free_blocks->blocks))
        return false;
    int64_t at = place_of(a, free_blocks, a->blocks[number].size, number);
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

/* Return the number of a block of `size` rounded bytes; -1 where there is no memory for it. */
static int64_t allocate(Allocator *a, int64_t size) {
    bool small = size <= SMALL_REQUEST;
    FreeBlocks *free_blocks = &a->free[small];
    int64_t at = place_of(a, free_blocks, size, -1), number;
    if (at < free_blocks->n) {
        number = free_blocks->blocks[at];
        take_out(free_blocks, at);
        a->blocks[number].free = false;
    } else if ((number = reserve(a, segment_bytes(size), small)) < 0)
        return -1;
    int64_t remainder = a->blocks[number].size - size;
    if (small ? remainder >= ROUND : remainder > LARGE_REMAINDER) {
        int64_t rest = new_block(a, remainder, small);
        if (rest < 0) return -1;
        int64_t after = a->blocks[number].after;
        a->blocks[rest].before = number, a->blocks[rest].after = after;
        if (after >= 0) a->blocks[after].before = rest;
        a->blocks[number].after = rest, a->blocks[number].size = size;
        if (!put(a, rest)) return -1;
    }
    a->allocated += a->blocks[number].size;
    if (a->allocated > a->most_allocated) a->most_allocated = a->allocated;
    return number;
}

/* Let a block take in a free neighbour. */
static void join_with(Allocator *a, int64_t number, int64_t other, bool is_before) {
    FreeBlocks *free_blocks = &a->free[a->blocks[other].small];
    take_out(free_blocks, place_of(a, free_blocks, a->blocks[other].size, other));
    Block *block = &a->blocks[number], *neighbour = &a->blocks[other];
    block->size += neighbour->size;
    if (is_before) {
        block->before = neighbour->before;
        if (block->before >= 0) a->blocks[block->before].after = number;
    } else {
        block->after = neighbour->after;
        if (block->after >= 0) a->blocks[block->after].before = number;
    }
}

/* Free a block, which joins free neighbours; tell whether there was memory for it. */
static bool free_block(Allocator *a, int64_t number) {
    a->allocated -= a->blocks[number].size;
    int64_t before = a->blocks[number].before, after = a->blocks[number].after;
    if (before >= 0 && a->blocks[before].free) join_with(a, number, before, true);
    if (after >= 0 && a->blocks[after].free) join_with(a, number, after, false);
    return put(a, number);
}

/* Play a sequence of `n` requests, the slot 0 of which is at `block_of`; tell whether there was memory for them. */
static bool play_sequence(Allocator *a, const int64_t *requests, int64_t n, int64_t *block_of) {
    for (const int64_t *end = requests + 2 * n; requests < end; requests += 2) {
        int64_t *block = &block_of[requests[0]], nbytes = requests[1];
        if (nbytes ? (*block = allocate(a, nbytes)) < 0 : !free_block(a, *block)) return false;
    }
    return true;
}

/* Play the sequences of requests of each of `n_ranks` ranks in order, on an allocator of its own.
 *
 * A request is a slot and rounded bytes, which are allocated; 0 frees the slot. `starts`: the first request of each
 * sequence, and behind the last. `sequences`: those that come, each with the slot in `first_slots` that is its slot 0.
 * `firsts`: the first of them of each rank, and behind the last. `most`: room for the most bytes reserved, and
 * allocated, of each rank. Return 0; -1 without memory.
 */
EXPORTED int32_t play_requests(const int64_t *starts, const int64_t *requests, const int64_t *firsts,
                               const int64_t *sequences, const int64_t *first_slots, int64_t n_ranks, int64_t n_slots,
                               const double *limits, int64_t *most) {
    Allocator a = {0};
    int64_t *block_of = malloc((size_t)(n_slots ? n_slots : 1) * sizeof *block_of);
    bool has_memory = block_of != NULL;
    for (int64_t rank = 0; has_memory && rank < n_ranks; rank++) {
        a.limit = limits[rank];
        a.n_blocks = a.free[0].n = a.free[1].n = a.allocated = a.reserved = a.most_allocated = a.most_reserved = 0;
        for (int64_t i = firsts[rank]; has_memory && i < firsts[rank + 1]; i++) {
            int64_t start = starts[sequences[i]], end = starts[sequences[i] + 1];
            has_memory = play_sequence(&a, &requests[2 * start], end - start, &block_of[first_slots[i]]);
        }
        most[2 * rank] = a.most_reserved, most[2 * rank + 1] = a.most_allocated;
    }
    free(block_of), free(a.blocks), free(a.free[0].blocks), free(a.free[1].blocks);
    return has_memory ? 0 : -1;
}
