/* CUDA's caching allocator replayed in C: the same as `caching_allocator.py` beside this, which explains it and which
   the tests hold this to.

   replay(sizes, events, empties, expandable_segments, limit_bytes, blocks=None, reservation_bytes=ENDLESS)
     -> (peak_allocated_bytes, peak_reserved_bytes, survived, granted_bytes, refused_bytes)

   `sizes`, `events` and `empties` are buffers of int64; `blocks` is a writable one, as long as `sizes`, for the bytes of
   every storage's block, or None. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((int64_t)1 << 20)
#define ENDLESS ((int64_t)1 << 60)
#define SMALLEST_BLOCK 512
#define SMALL_REQUEST MIB
#define SMALL_SEGMENT (2 * MIB)
#define LARGE_SEGMENT (20 * MIB)
#define OWN_SEGMENT (10 * MIB)
#define SEGMENT_ROUNDING (2 * MIB)

/* A stretch of a segment; `previous` and `next` are its neighbours there. Of a segment's first block `segment_end` is the
   address behind the segment. */
typedef struct Block {
    int64_t address, size, segment_end;
    struct Block *previous, *next;
    bool small, free, mapped;
} Block;

typedef struct {
    Block **items;
    size_t number, room;
} Blocks;

typedef struct Chunk {
    struct Chunk *before;
    Block blocks[512];
} Chunk;

typedef struct {
    bool expandable;
    int64_t limit, allocated, reserved, most_allocated, most_reserved, most_granted, least_refused;
    Blocks free[2];     /* by size, then address; [1]: small */
    int64_t reservation; /* bytes of addresses that the driver takes at once */
    Blocks segments;    /* the first block of each segment, by address */
    Block *first[2];    /* of the expandable segments */
    Chunk *chunks;
    size_t used;        /* blocks of the last chunk */
    Block *unused;      /* blocks to use again, by `next` */
    jmp_buf out_of_host_memory;
} Allocator;

static int64_t rounded_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t segment_bytes(int64_t size) {
    if (size <= SMALL_REQUEST) return SMALL_SEGMENT;
    if (size < OWN_SEGMENT) return LARGE_SEGMENT;
    return rounded_up(size, SEGMENT_ROUNDING);
}

static Block *new_block(Allocator *a, int64_t address, int64_t size, bool small) {
    Block *block = a->unused;
    if (block != NULL) {
        a->unused = block->next;
    } else {
        if (a->chunks == NULL || a->used == sizeof a->chunks->blocks / sizeof(Block)) {
            Chunk *chunk = malloc(sizeof *chunk);
            if (chunk == NULL) longjmp(a->out_of_host_memory, 1);
            chunk->before = a->chunks;
            a->chunks = chunk;
            a->used = 0;
        }
        block = &a->chunks->blocks[a->used++];
    }
    *block = (Block){.address = address, .size = size, .small = small, .free = true, .mapped = true};
    return block;
}

static void drop_block(Allocator *a, Block *block) {
    block->next = a->unused;
    a->unused = block;
}

/* Lists of blocks in order */

static size_t place_by_size(const Blocks *list, int64_t size, int64_t address) {
    size_t low = 0, high = list->number;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const Block *block = list->items[middle];
        if (block->size < size || (block->size == size && block->address < address)) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void insert(Allocator *a, Blocks *list, size_t place, Block *block) {
    if (list->number == list->room) {
        size_t room = list->room ? 2 * list->room : 64;
        Block **items = realloc(list->items, room * sizeof *items);
        if (items == NULL) longjmp(a->out_of_host_memory, 1);
        list->items = items;
        list->room = room;
    }
    memmove(list->items + place + 1, list->items + place, (list->number - place) * sizeof *list->items);
    list->items[place] = block;
    list->number++;
}

static Block *take_out(Blocks *list, size_t place) {
    Block *block = list->items[place];
    list->number--;
    memmove(list->items + place, list->items + place + 1, (list->number - place) * sizeof *list->items);
    return block;
}

static void add_free(Allocator *a, Block *block) {
    Blocks *pool = &a->free[block->small];
    insert(a, pool, place_by_size(pool, block->size, block->address), block);
}

static void drop_free(Allocator *a, Block *block) {
    Blocks *pool = &a->free[block->small];
    take_out(pool, place_by_size(pool, block->size, block->address));
}

/* Neighbours */

static Block *split(Allocator *a, Block *block, int64_t size) {
    Block *rest = new_block(a, block->address + size, block->size - size, block->small);
    rest->mapped = block->mapped;
    rest->previous = block;
    rest->next = block->next;
    if (block->next != NULL) block->next->previous = rest;
    block->next = rest;
    block->size = size;
    return rest;
}

static void swallow_next(Allocator *a, Block *block) {
    Block *following = block->next;
    block->size += following->size;
    block->next = following->next;
    if (following->next != NULL) following->next->previous = block;
    drop_block(a, following);
}

static bool is_cached(const Block *block) { return block != NULL && block->free && block->mapped; }

/* Room of a free block: its size, and the hole behind it at the edge of an expandable segment. */
static int64_t room_of(const Block *block) {
    const Block *following = block->next;
    return block->size + (following != NULL && !following->mapped ? following->size : 0);
}

static Block *take_free(Allocator *a, int64_t size, bool small) {
    Blocks *pool = &a->free[small];
    size_t place = place_by_size(pool, size, INT64_MIN);
    if (place == pool->number) return NULL;
    while (place + 1 < pool->number && room_of(pool->items[place + 1]) < room_of(pool->items[place])) place++;
    return take_out(pool, place);
}

/* Segments */

static void reserve(Allocator *a, int64_t size) {
    a->reserved += size;
    if (a->reserved > a->most_reserved) a->most_reserved = a->reserved;
}

/* A segment of its own at the lowest address with room in reservations, otherwise in a new one at the highest. */
static Block *new_segment(Allocator *a, int64_t size, bool small) {
    int64_t needed = rounded_up(size, a->reservation), address = 0, before = 0;
    size_t place = 0;
    for (size_t i = 0; i <= a->segments.number; i++) {
        const Block *first = i < a->segments.number ? a->segments.items[i] : NULL;
        int64_t after = first != NULL ? first->address : ENDLESS;
        int64_t low = least(rounded_up(before, a->reservation), after); /* reserved are the addresses from `before` to */
        int64_t high = most(after / a->reservation * a->reservation, before); /* `low`, and from `high` to `after` */
        if (low - before >= size || after - high >= size) {
            address = low - before >= size ? before : high;
            place = i;
            break;
        }
        if (high - low >= needed) {
            address = high - needed;
            place = i;
        }
        if (first != NULL) before = first->segment_end;
    }
    Block *block = new_block(a, address, size, small);
    block->segment_end = address + size;
    insert(a, &a->segments, place, block);
    reserve(a, size);
    return block;
}

/* Map pages from `block` on, a free block or a hole, until it is of `size`; it is in no list then. */
static Block *map_pages(Allocator *a, Block *block, int64_t size) {
    int64_t page = block->small ? SMALL_SEGMENT : LARGE_SEGMENT;
    if (block->mapped) drop_free(a, block);
    while (!block->mapped || block->size < size) {
        Block *hole = block->mapped ? block->next : block;
        int64_t missing = block->mapped ? size - block->size : (size < hole->size ? size : hole->size);
        int64_t mapped = rounded_up(missing, page);
        if (mapped > hole->size) mapped = hole->size;
        reserve(a, mapped);
        if (mapped < hole->size) split(a, hole, mapped);
        hole->mapped = true;
        if (hole != block) swallow_next(a, block);
        if (is_cached(block->next)) {
            drop_free(a, block->next);
            swallow_next(a, block);
        }
    }
    return block;
}

/* Map pages at the lowest address where holes and free blocks in a row have room. */
static Block *expand(Allocator *a, int64_t size, bool small) {
    for (Block *hole = a->first[small]; hole != NULL; hole = hole->next) {
        if (hole->mapped) continue;
        Block *start = is_cached(hole->previous) ? hole->previous : hole;
        int64_t room = 0;
        for (Block *block = start; block != NULL && block->free && room < size; block = block->next) room += block->size;
        if (room >= size) return map_pages(a, start, size);
    }
    return NULL; /* the address space has no end */
}

static Block *more(Allocator *a, int64_t size, bool small) {
    int64_t segment = segment_bytes(size), wanted = a->reserved + segment;
    if (wanted > a->limit) {
        if (wanted < a->least_refused) a->least_refused = wanted;
        return NULL;
    }
    if (wanted > a->most_granted) a->most_granted = wanted;
    return a->expandable ? expand(a, size, small) : new_segment(a, segment, small);
}

/* Give back the whole pages of a free block that is in no list; the rest of it goes back into its list. */
static void unmap(Allocator *a, Block *block) {
    int64_t page = block->small ? SMALL_SEGMENT : LARGE_SEGMENT;
    int64_t start = rounded_up(block->address, page), end = (block->address + block->size) / page * page;
    Block *hole = block;
    if (end <= start) {
        add_free(a, block);
        return;
    }
    if (start > block->address) {
        hole = split(a, block, start - block->address);
        add_free(a, block);
    }
    if (end < hole->address + hole->size) add_free(a, split(a, hole, end - start));
    hole->mapped = false;
    a->reserved -= hole->size;
    if (hole->next != NULL && !hole->next->mapped) swallow_next(a, hole);
    if (hole->previous != NULL && !hole->previous->mapped) swallow_next(a, hole->previous);
}

static void give_back_segment(Allocator *a, Block *block) {
    size_t place = 0;
    while (a->segments.items[place] != block) place++;
    take_out(&a->segments, place);
    a->reserved -= block->size;
    drop_block(a, block);
}

static void empty_cache(Allocator *a) {
    for (int small = 0; small < 2; small++) {
        Blocks before = a->free[small];
        a->free[small] = (Blocks){0};
        for (size_t i = 0; i < before.number; i++) { /* not freed if memory runs out here: the process is ending */
            Block *block = before.items[i];
            if (a->expandable) unmap(a, block);
            else if (block->previous == NULL && block->next == NULL) give_back_segment(a, block);
            else add_free(a, block);
        }
        free(before.items);
    }
}

/* Requests and releases */

static Block *allocate(Allocator *a, int64_t size_bytes) {
    int64_t size = rounded_up(size_bytes, SMALLEST_BLOCK);
    bool small = size <= SMALL_REQUEST;
    Block *block = take_free(a, size, small);
    if (block == NULL) block = more(a, size, small);
    if (block == NULL) {
        empty_cache(a);
        block = more(a, size, small);
        if (block == NULL) return NULL;
    }
    int64_t rest = block->size - size;
    if (rest >= SMALLEST_BLOCK && (small || a->expandable || rest > SMALL_REQUEST)) add_free(a, split(a, block, size));
    block->free = false;
    a->allocated += block->size;
    if (a->allocated > a->most_allocated) a->most_allocated = a->allocated;
    return block;
}

static void release(Allocator *a, Block *block) {
    a->allocated -= block->size;
    block->free = true;
    if (is_cached(block->next)) {
        drop_free(a, block->next);
        swallow_next(a, block);
    }
    if (is_cached(block->previous)) {
        block = block->previous;
        drop_free(a, block);
        swallow_next(a, block);
    }
    add_free(a, block);
}

typedef struct {
    Py_buffer view;
    int64_t *items;
    Py_ssize_t number;
} Int64s;

/* Play the events; 1: all were granted, 0: a request was refused, -1: the host has no memory, -2: no such storage. */
static int play(Allocator *a, Block **live, const Int64s *sizes, const Int64s *events, const Int64s *empties,
                int64_t *blocks) {
    if (setjmp(a->out_of_host_memory)) return -1;
    for (int small = 0; a->expandable && small < 2; small++) {
        a->first[small] = new_block(a, small ? ENDLESS : 0, ENDLESS, small);
        a->first[small]->mapped = false;
    }
    Py_ssize_t emptied = 0;
    for (Py_ssize_t event = 0; event < events->number; event++) {
        for (; emptied < empties->number && empties->items[emptied] <= event; emptied++) empty_cache(a);
        int64_t storage = events->items[event];
        if (storage < 0 || storage >= sizes->number) return -2;
        if (live[storage] != NULL) {
            release(a, live[storage]);
            live[storage] = NULL;
        } else if (sizes->items[storage] > 0) {
            if ((live[storage] = allocate(a, sizes->items[storage])) == NULL) return 0;
            if (blocks != NULL) blocks[storage] = live[storage]->size;
        }
    }
    return 1;
}

static bool view_int64s(PyObject *object, Int64s *into, int flags) {
    if (PyObject_GetBuffer(object, &into->view, flags) < 0) return false;
    if (into->view.itemsize != sizeof(int64_t)) {
        PyErr_SetString(PyExc_TypeError, "buffers of int64 are needed");
        PyBuffer_Release(&into->view);
        into->view.obj = NULL;
        return false;
    }
    into->items = into->view.buf;
    into->number = into->view.len / (Py_ssize_t)sizeof(int64_t);
    return true;
}

static PyObject *replay(PyObject *module, PyObject *args) {
    PyObject *objects[4] = {NULL, NULL, NULL, Py_None};
    int expandable;
    long long limit, reservation = ENDLESS;
    if (!PyArg_ParseTuple(args, "OOOpL|OL", &objects[0], &objects[1], &objects[2], &expandable, &limit, &objects[3],
                          &reservation))
        return NULL;
    Int64s views[4] = {{{0}}};
    bool has_blocks = objects[3] != Py_None, is_read = true;
    for (int i = 0; is_read && i < 3 + has_blocks; i++)
        is_read = view_int64s(objects[i], &views[i], i < 3 ? PyBUF_SIMPLE : PyBUF_WRITABLE);
    if (is_read && has_blocks && views[3].number < views[0].number) {
        PyErr_SetString(PyExc_ValueError, "`blocks` is shorter than `sizes`");
        is_read = false;
    }
    PyObject *result = NULL;
    Block **live = is_read ? calloc((size_t)views[0].number + 1, sizeof *live) : NULL;
    if (is_read && live == NULL) PyErr_NoMemory();
    if (live != NULL) {
        Allocator a = {.expandable = expandable, .limit = limit, .least_refused = ENDLESS + SMALLEST_BLOCK,
                       .reservation = reservation};
        int outcome;
        Py_BEGIN_ALLOW_THREADS
        outcome = play(&a, live, &views[0], &views[1], &views[2], has_blocks ? views[3].items : NULL);
        for (Chunk *chunk = a.chunks; chunk != NULL;) {
            Chunk *before = chunk->before;
            free(chunk);
            chunk = before;
        }
        free(a.free[0].items);
        free(a.free[1].items);
        free(a.segments.items);
        free(live);
        Py_END_ALLOW_THREADS
        if (outcome == -1) PyErr_NoMemory();
        else if (outcome == -2) PyErr_SetString(PyExc_IndexError, "an event names a storage that has no size");
        else
            result = Py_BuildValue("LLOLL", (long long)a.most_allocated, (long long)a.most_reserved,
                                   outcome ? Py_True : Py_False, (long long)a.most_granted, (long long)a.least_refused);
    }
    for (int i = 0; i < 4; i++)
        if (views[i].view.obj != NULL) PyBuffer_Release(&views[i].view);
    return result;
}

static PyMethodDef METHODS[] = {{"replay", replay, METH_VARARGS, "Replay a stream of storages; see the C source."},
                                {NULL, NULL, 0, NULL}};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "_caching_allocator", .m_size = 0,
                                    .m_methods = METHODS};

PyMODINIT_FUNC PyInit__caching_allocator(void) { return PyModuleDef_Init(&MODULE); }
