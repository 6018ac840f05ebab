/* The floor: what hashing and matching a prompt takes in C, called from Python.
 *
 * The same definition of keys as `prefixroute.keys.chain` (seeded XXH3-64 over strides of 32 blocks, wire keys are the upper
 * 48 bits) and the same search as `prefixroute.routing.index` on the same contents: first block, stride ends, bisection of the
 * deepest brackets, two back-checks. The index is an open-addressing table from wire key to a row of endpoint bits.
 *
 * Rules:
 * 1. It answers what `MergedIndex.search` answers while no endpoint's keys have holes; it knows no other case.
 * 2. Tokens are read as they are needed: a list is converted stride by stride, a buffer is hashed where it lies.
 * 3. Written from the published description of XXH3, for inputs of 17 bytes and more, which is all that a chain asks;
 *    who builds it compares it with another implementation before believing a figure (`floors.py`).
 * 4. Little-endian machines only. Never shipped: the benchmark builds it.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

typedef uint64_t u64;
typedef uint32_t u32;

#define STRIDE 32
#define MAX_KEEP 16
#define MAX_WORDS 64

/* --- XXH3-64 -------------------------------------------------------------------------------------------------- */

static const u64 P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
static const u64 P64_1 = 0x9E3779B185EBCA87u, P64_2 = 0xC2B2AE3D27D4EB4Fu, P64_3 = 0x165667B19E3779F9u;
static const u64 P64_4 = 0x85EBCA77C2B2AE63u, P64_5 = 0x27D4EB2F165667C5u, MIX = 0x165667919E3779F9u;

/* The default secret of the description. */
static const uint8_t SECRET[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline u64 read64(const uint8_t *at) {
    u64 value;
    memcpy(&value, at, 8);
    return value;
}

static inline u64 fold(u64 a, u64 b) {
    __uint128_t product = (__uint128_t)a * b;
    return (u64)product ^ (u64)(product >> 64);
}

static inline u64 avalanche(u64 h) {
    h = (h ^ (h >> 37)) * MIX;
    return h ^ (h >> 32);
}

static inline u64 mix16(const uint8_t *data, const uint8_t *secret, u64 seed) {
    return fold(read64(data) ^ (read64(secret) + seed), read64(data + 8) ^ (read64(secret + 8) - seed));
}

static u64 hash_to_128(const uint8_t *data, size_t n, u64 seed) {
    u64 acc = n * P64_1;
    for (size_t i = (n - 1) / 32 + 1; i-- > 0;)
        acc += mix16(data + 16 * i, SECRET + 32 * i, seed) + mix16(data + n - 16 * (i + 1), SECRET + 32 * i + 16, seed);
    return avalanche(acc);
}

static u64 hash_to_240(const uint8_t *data, size_t n, u64 seed) {
    u64 acc = n * P64_1, end = mix16(data + n - 16, SECRET + 136 - 17, seed);
    size_t i;
    for (i = 0; i < 8; i++) acc += mix16(data + 16 * i, SECRET + 16 * i, seed);
    acc = avalanche(acc);
    for (; i < n / 16; i++) end += mix16(data + 16 * i, SECRET + 16 * (i - 8) + 3, seed);
    return avalanche(acc + end);
}

#ifdef __SSE2__
typedef struct { __m128i v[4]; } Lanes;

static inline void accumulate(Lanes *acc, const uint8_t *data, const uint8_t *secret) {
    for (int i = 0; i < 4; i++) {
        __m128i value = _mm_loadu_si128((const __m128i *)data + i);
        __m128i key = _mm_xor_si128(value, _mm_loadu_si128((const __m128i *)secret + i));
        __m128i product = _mm_mul_epu32(key, _mm_shuffle_epi32(key, _MM_SHUFFLE(0, 3, 0, 1)));
        __m128i swapped = _mm_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
        acc->v[i] = _mm_add_epi64(product, _mm_add_epi64(acc->v[i], swapped));
    }
}

static inline void scramble(Lanes *acc, const uint8_t *secret) {
    const __m128i prime = _mm_set1_epi32((int)P32_1);
    for (int i = 0; i < 4; i++) {
        __m128i mixed = _mm_xor_si128(acc->v[i], _mm_srli_epi64(acc->v[i], 47));
        mixed = _mm_xor_si128(mixed, _mm_loadu_si128((const __m128i *)secret + i));
        __m128i high = _mm_mul_epu32(_mm_shuffle_epi32(mixed, _MM_SHUFFLE(0, 3, 0, 1)), prime);
        acc->v[i] = _mm_add_epi64(_mm_mul_epu32(mixed, prime), _mm_slli_epi64(high, 32));
    }
}
#else
typedef struct { u64 v[8]; } Lanes;

static inline void accumulate(Lanes *acc, const uint8_t *data, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) {
        u64 value = read64(data + 8 * i), key = value ^ read64(secret + 8 * i);
        acc->v[i ^ 1] += value;
        acc->v[i] += (key & 0xFFFFFFFFu) * (key >> 32);
    }
}

static inline void scramble(Lanes *acc, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) {
        u64 mixed = acc->v[i];
        acc->v[i] = (mixed ^ (mixed >> 47) ^ read64(secret + 8 * i)) * P32_1;
    }
}
#endif

static u64 hash_long(const uint8_t *data, size_t n, u64 seed) {
    uint8_t secret[192] __attribute__((aligned(64)));
    for (int i = 0; i < 192; i += 16) {
        u64 low = read64(SECRET + i) + seed, high = read64(SECRET + i + 8) - seed;
        memcpy(secret + i, &low, 8);
        memcpy(secret + i + 8, &high, 8);
    }
    u64 start[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    Lanes acc;
    memcpy(&acc, start, 64);
    size_t whole = (n - 1) / 1024, rest = (n - 1 - 1024 * whole) / 64;
    for (size_t block = 0; block < whole; block++, data += 1024, n -= 1024) {
        for (int i = 0; i < 16; i++) accumulate(&acc, data + 64 * i, secret + 8 * i);
        scramble(&acc, secret + 128);
    }
    for (size_t i = 0; i < rest; i++) accumulate(&acc, data + 64 * i, secret + 8 * i);
    accumulate(&acc, data + n - 64, secret + 121);
    u64 lanes[8], result = (n + 1024 * whole) * P64_1;
    memcpy(lanes, &acc, 64);
    for (int i = 0; i < 8; i += 2)
        result += fold(lanes[i] ^ read64(secret + 11 + 8 * i), lanes[i + 1] ^ read64(secret + 19 + 8 * i));
    return avalanche(result);
}

static inline u64 hash(const uint8_t *data, size_t n, u64 seed) {
    return n > 240 ? hash_long(data, n, seed) : n > 128 ? hash_to_240(data, n, seed) : hash_to_128(data, n, seed);
}

/* --- the index ------------------------------------------------------------------------------------------------ */

typedef struct {
    u64 *keys;  /* 0 is an empty place */
    u64 *masks; /* `words` of each place */
    u64 *nobody;
    size_t places, used;
    int words;
} Table;

static inline size_t place(const Table *table, u64 key) {
    size_t at = (size_t)(key * P64_1 >> 20) & (table->places - 1);
    while (table->keys[at] && table->keys[at] != key) at = (at + 1) & (table->places - 1);
    return at;
}

static inline const u64 *holders(const Table *table, u64 key) {
    size_t at = place(table, key);
    return table->keys[at] ? table->masks + at * table->words : table->nobody;
}

/* --- a prompt ------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject *list;      /* NULL: `data` has all tokens */
    const uint8_t *data; /* packed tokens */
    u32 *packed;         /* where a list's tokens go, `ready` of them so far */
    size_t tokens, ready, depth, block_tokens;
    u64 *bounds; /* keys at stride ends, `known` of them, the root's first */
    size_t known;
    u64 mix;
    int bad;
} Prompt;

static int convert(Prompt *prompt, size_t until) {
    for (size_t i = prompt->ready; i < until; i++) {
        long value = PyLong_AsLong(PyList_GET_ITEM(prompt->list, i));
        if (value < 0 || value > 0xFFFFFFFFL) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_OverflowError, "token ids must be in 0 .. 2**32 - 1");
            return prompt->bad = 1;
        }
        prompt->packed[i] = (u32)value;
    }
    prompt->ready = until;
    return 0;
}

static u64 span(Prompt *prompt, size_t from, size_t to) {
    size_t block = prompt->block_tokens;
    if (prompt->list && prompt->ready < to * block && convert(prompt, to * block)) return 0;
    return hash(prompt->data + from * block * 4, (to - from) * block * 4, prompt->bounds[from / STRIDE] ^ prompt->mix);
}

static u64 wire(Prompt *prompt, size_t depth) {
    size_t stride = depth / STRIDE;
    while (prompt->known <= stride) {
        size_t next = prompt->known;
        prompt->bounds[next] = span(prompt, (next - 1) * STRIDE, next * STRIDE);
        prompt->known++;
    }
    return (depth % STRIDE ? span(prompt, stride * STRIDE, depth) : prompt->bounds[stride]) >> 16;
}

/* --- searching ------------------------------------------------------------------------------------------------ */

typedef struct {
    size_t lower, upper;
    u64 *above, *below;
} Bracket;

typedef struct {
    size_t depth;
    u64 mask[MAX_WORDS];
} Stratum;

static inline int and_into(u64 *to, const u64 *a, const u64 *b, int words) {
    u64 any = 0;
    for (int i = 0; i < words; i++) any |= to[i] = a[i] & b[i];
    return any != 0;
}

static inline int same(const u64 *a, const u64 *b, int words) { return memcmp(a, b, words * 8) == 0; }

/* Brackets' masks live in `room`, which has a row for each: one a stride end, and 6 for what bisection adds. */
static int search(const Table *table, Prompt *prompt, int keep, Bracket *brackets, u64 *room, const u64 *end,
                  Stratum *strata) {
    int words = table->words, n = 0, found = 0;
    size_t lower = 1, upper = 1;
    u64 *mask = room, *row = room + words;
    if (!prompt->depth || !and_into(mask, holders(table, wire(prompt, 1)), holders(table, wire(prompt, 1)), words))
        return 0;
    int any = 1;
    while (any && upper < prompt->depth) {
        upper = (upper / STRIDE + 1) * STRIDE;
        if (upper > prompt->depth) upper = prompt->depth;
        u64 *below = row;
        row += words;
        any = and_into(below, mask, holders(table, wire(prompt, upper)), words);
        if (!same(below, mask, words)) brackets[n++] = (Bracket){lower, upper, mask, below};
        lower = upper, mask = below;
    }
    if (any) {
        memset(row, 0, words * 8);
        brackets[n++] = (Bracket){lower, lower + 1, mask, row};
        row += words;
    }
    while (n && found < keep && row < end && !prompt->bad) {
        Bracket b = brackets[--n];
        if (b.upper - b.lower > 1) {
            size_t middle = (b.lower + b.upper) / 2;
            const u64 *at = holders(table, wire(prompt, middle));
            u64 *half = row;
            row += words;
            for (int i = 0; i < words; i++) half[i] = (b.above[i] & at[i]) | b.below[i];
            if (!same(half, b.above, words)) brackets[n++] = (Bracket){b.lower, middle, b.above, half};
            if (!same(half, b.below, words)) brackets[n++] = (Bracket){middle, b.upper, half, b.below};
            continue;
        }
        Stratum *stratum = strata + found;
        stratum->depth = b.lower;
        u64 left = 0;
        for (int i = 0; i < words; i++) left |= stratum->mask[i] = b.above[i] & ~b.below[i];
        for (size_t above = b.lower - 1; left && above && above + 2 >= b.lower; above--)
            left = and_into(stratum->mask, stratum->mask, holders(table, wire(prompt, above)), words);
        found += left != 0;
    }
    return found;
}

/* --- for Python ----------------------------------------------------------------------------------------------- */

static Table *table_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, "floor.table"); }

static void drop(PyObject *capsule) {
    Table *table = table_of(capsule);
    free(table->keys), free(table->masks), free(table->nobody), free(table);
}

static PyObject *py_table(PyObject *self, PyObject *args) {
    Py_ssize_t keys;
    int words;
    if (!PyArg_ParseTuple(args, "ni", &keys, &words)) return NULL;
    if (words < 1 || words > MAX_WORDS) return PyErr_Format(PyExc_ValueError, "words must be 1 .. %d", MAX_WORDS);
    Table *table = calloc(1, sizeof *table);
    for (table->places = 64; table->places < 2 * (size_t)keys; table->places *= 2) {}
    table->words = words;
    table->keys = calloc(table->places, 8);
    table->masks = calloc(table->places * words, 8);
    table->nobody = calloc(words, 8);
    return PyCapsule_New(table, "floor.table", drop);
}

static PyObject *py_hold(PyObject *self, PyObject *args) {
    PyObject *capsule, *keys;
    int endpoint;
    if (!PyArg_ParseTuple(args, "OOi", &capsule, &keys, &endpoint)) return NULL;
    Table *table = table_of(capsule);
    PyObject *key, *all = PyObject_GetIter(keys);
    while (all && (key = PyIter_Next(all))) {
        u64 value = PyLong_AsUnsignedLongLong(key);
        Py_DECREF(key);
        size_t at = place(table, value);
        if (!table->keys[at] && 2 * ++table->used > table->places) {
            PyErr_SetString(PyExc_OverflowError, "more keys than the table was made for");
            break;
        }
        table->keys[at] = value;
        table->masks[at * table->words + endpoint / 64] |= 1ull << endpoint % 64;
    }
    Py_XDECREF(all);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_hash(PyObject *self, PyObject *args) {
    Py_buffer data;
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "y*K", &data, &seed)) return NULL;
    u64 value = data.len > 16 ? hash(data.buf, data.len, seed) : 0;
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLongLong(value);
}

/* search(table, tokens, root, mix, block_tokens, keep) -> [(depth, mask as little-endian bytes)], deepest first */
static PyObject *py_search(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 6) return PyErr_Format(PyExc_TypeError, "six arguments, please");
    Table *table = table_of(args[0]);
    u64 root = PyLong_AsUnsignedLongLong(args[2]), mix = PyLong_AsUnsignedLongLong(args[3]);
    Prompt prompt = {.block_tokens = PyLong_AsLong(args[4]), .known = 1, .mix = mix};
    int keep = (int)PyLong_AsLong(args[5]);
    Py_buffer view = {0};
    if (PyErr_Occurred()) return NULL;
    if (keep < 1 || keep > MAX_KEEP) return PyErr_Format(PyExc_ValueError, "keep must be 1 .. %d", MAX_KEEP);
    if (PyList_Check(args[1])) {
        prompt.list = args[1];
        prompt.tokens = PyList_GET_SIZE(args[1]);
    } else {
        if (PyObject_GetBuffer(args[1], &view, PyBUF_SIMPLE)) return NULL;
        prompt.data = view.buf;
        prompt.tokens = view.len / 4;
    }
    prompt.depth = prompt.tokens / prompt.block_tokens;
    size_t strides = prompt.depth / STRIDE + 2, rows = strides + 6 * (keep + 2);
    size_t bytes = 8 * strides + 8 * rows * table->words + rows * sizeof(Bracket);
    char *room = malloc(bytes + (prompt.list ? 4 * prompt.tokens : 0));
    prompt.bounds = (u64 *)room;
    prompt.bounds[0] = root;
    u64 *masks = prompt.bounds + strides;
    Bracket *brackets = (Bracket *)(masks + rows * table->words);
    if (prompt.list) {
        prompt.packed = (u32 *)(room + bytes);
        prompt.data = (const uint8_t *)prompt.packed;
    }
    Stratum strata[MAX_KEEP];
    int found = search(table, &prompt, keep, brackets, masks, masks + rows * table->words, strata);
    PyObject *answer = prompt.bad ? NULL : PyList_New(found);
    for (int i = 0; answer && i < found; i++)
        PyList_SET_ITEM(answer, i, Py_BuildValue("ny#", strata[i].depth, strata[i].mask, (Py_ssize_t)table->words * 8));
    free(room);
    if (view.obj) PyBuffer_Release(&view);
    return answer;
}

static PyMethodDef methods[] = {
    {"table", py_table, METH_VARARGS, "table(keys, words): room for so many keys of 64 * words endpoints"},
    {"hold", py_hold, METH_VARARGS, "hold(table, wire_keys, endpoint)"},
    {"hash", py_hash, METH_VARARGS, "hash(data, seed): XXH3-64 of 17 bytes or more"},
    {"search", (PyCFunction)(void (*)(void))py_search, METH_FASTCALL, "search(table, tokens, root, mix, block, keep)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "floor", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_floor(void) { return PyModule_Create(&module); }
