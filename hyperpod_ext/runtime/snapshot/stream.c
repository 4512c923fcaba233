/* Copy memory without writing the destination to the CPU's caches, and compute a CRC64-NVME in the same pass.
 *
 * An ordinary store reads each cache line before it overwrites the whole line, and evicts other data from the shared
 * cache. Both are useless for a snapshot, because the process that writes it does not read it soon. Python calls these
 * functions through ctypes, without the GIL.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define LINE 64

void hpx_copy(void *to, const void *from, size_t size)
{
    char *d = to;
    const char *s = from;
    size_t head = -(uintptr_t)d & (LINE - 1);
    if (head > size)
        head = size;
    memcpy(d, s, head);
    d += head, s += head, size -= head;
    for (; size >= 2 * LINE; size -= 2 * LINE, d += 2 * LINE, s += 2 * LINE) {
        __m128i piece[8];
        for (int i = 0; i < 8; i++)
            piece[i] = _mm_loadu_si128((const __m128i *)s + i);
        for (int i = 0; i < 8; i++)
            _mm_stream_si128((__m128i *)d + i, piece[i]);
    }
    memcpy(d, s, size);
    _mm_sfence(); /* makes the copy visible to other cores before any later store */
}

#else

void hpx_copy(void *to, const void *from, size_t size)
{
    memcpy(to, from, size);
}

#endif

typedef struct {
    void *to;
    const void *from;
    size_t size;
} Piece;

#if defined(__x86_64__) && (__GNUC__ >= 8 || defined(__clang__))

/* The state of a CRC is the remainder of the bytes so far, divided by its polynomial P. Bytes can be replaced by fewer
 * bytes with the same remainder ("folding"): 16 bytes that are D bits before 16 other bytes are equivalent to
 * `low * (x^(D+63) mod P) + high * (x^(D-1) mod P)`. This product has 16 bytes, which are added to the other 16 bytes.
 * A test compares the checksum with the library that computes it elsewhere, and computes the constants below. */
#define FOLD __attribute__((target("avx2,pclmul,vpclmulqdq")))
#define AT_ONCE 4 /* number of registers of 32 bytes that are folded independently, so that none waits for another */
#define STEP (32 * AT_ONCE)
#define AT_A_TIME (256 << 10) /* bytes between two checks whether to end early */
#define AHEAD 1024 /* bytes to prefetch ahead: the CPU's own prefetcher stops at the end of a page */

typedef struct {
    uint64_t low, high;
} Distance;

static const Distance BITS_128 = {0xeadc41fd2ba3d420, 0x21e9761e252621ac};
static const Distance BITS_256 = {0xb0bc2e589204f500, 0xe1e0bb9d45d7a44c};
static const Distance BITS_1024 = {0xa1ca681e733f9c40, 0x5f852fb61e8d92dc}; /* the distance of a STEP */

FOLD static inline __m256i both_lanes(Distance by)
{
    return _mm256_set_epi64x((long long)by.high, (long long)by.low, (long long)by.high, (long long)by.low);
}

FOLD static inline __m256i fold(__m256i folded, __m256i by, __m256i next)
{
    __m256i low = _mm256_clmulepi64_epi128(folded, by, 0x00), high = _mm256_clmulepi64_epi128(folded, by, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

/* All callers pass constants of these two types, so that the compiler makes a separate loop for each combination. */
typedef enum { NOWHERE, PLAIN, PAST_CACHES } Where; /* how bytes are stored at the destination */
typedef enum { NEAREST_ONLY, ALL_CACHES } Fetch; /* the caches into which source bytes are prefetched */

FOLD static inline void put(char *to, __m256i piece, Where where)
{
    if (where == PAST_CACHES)
        _mm256_stream_si256((__m256i *)to, piece);
    else if (where == PLAIN)
        _mm256_storeu_si256((__m256i *)to, piece);
}

FOLD static inline void fetch(const char *line, Fetch into)
{
    if (into == ALL_CACHES)
        _mm_prefetch(line, _MM_HINT_T0);
    else
        _mm_prefetch(line, _MM_HINT_NTA);
}

/* Copy `size` bytes (a positive multiple of STEP), and fold them to the 16 bytes of `rest`. Dividing `rest` with the
 * initial state 0 yields the same state as dividing all `size` bytes with the initial state `state`. */
FOLD static inline void fold_memory(char *d, const char *s, size_t size, uint64_t state, uint64_t rest[2], Where where,
                                    Fetch into)
{
    const __m256i by = both_lanes(BITS_1024), next = both_lanes(BITS_256);
    __m256i folded[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) {
        folded[i] = _mm256_loadu_si256((const __m256i *)(s + 32 * i));
        put(d + 32 * i, folded[i], where);
    }
    folded[0] = _mm256_xor_si256(folded[0], _mm256_set_epi64x(0, 0, 0, (long long)state));
    for (size_t at = STEP; at < size; at += STEP) {
        fetch(s + at + AHEAD, into); /* may be beyond the end: a prefetch never faults */
        fetch(s + at + AHEAD + LINE, into);
        for (int i = 0; i < AT_ONCE; i++) {
            __m256i piece = _mm256_loadu_si256((const __m256i *)(s + at + 32 * i));
            put(d + at + 32 * i, piece, where);
            folded[i] = fold(folded[i], by, piece);
        }
    }
    for (int i = 1; i < AT_ONCE; i++)
        folded[i] = fold(folded[i - 1], next, folded[i]);
    __m256i last = folded[AT_ONCE - 1], high = _mm256_permute2x128_si256(last, last, 0x81);
    last = fold(last, both_lanes(BITS_128), high); /* folds the low lane into the high lane */
    _mm_storeu_si128((__m128i *)rest, _mm256_castsi256_si128(last));
    _mm_sfence();
}

FOLD static inline void check_into(void *to, const void *from, size_t size, uint64_t state, uint64_t rest[2], Fetch into)
{
    if (to == NULL)
        fold_memory(NULL, from, size, state, rest, NOWHERE, into);
    else if ((uintptr_t)to % 32 == 0)
        fold_memory(to, from, size, state, rest, PAST_CACHES, into);
    else
        fold_memory(to, from, size, state, rest, PLAIN, into);
}

/* Prefetching into the nearest cache only leaves the other caches to training. On Intel's CPUs it would make the copy
 * two fifths slower, so these prefetch into all caches. */
FOLD static void check(void *to, const void *from, size_t size, uint64_t state, uint64_t rest[2])
{
    if (__builtin_cpu_is("intel"))
        check_into(to, from, size, state, rest, ALL_CACHES);
    else
        check_into(to, from, size, state, rest, NEAREST_ONLY);
}

/* Divide by the polynomial, bit by bit: the 16 bytes after folding, and a last part that is shorter than STEP. */
static uint64_t divide(uint64_t state, const unsigned char *bytes, size_t size)
{
    for (; size; size--, bytes++) {
        state ^= *bytes;
        for (int bit = 0; bit < 8; bit++)
            state = state >> 1 ^ (-(state & 1) & 0x9a6c9329ac4bc9b5); /* P without its highest power */
    }
    return state;
}

/* Copy `count` pieces in order, and continue *checksum over their bytes. A piece whose `to` is NULL is not copied, only
 * added to the checksum. The function checks *hurry regularly, and ends early if it is not 0. It returns the number of
 * bytes done; or -1, without doing anything, if this CPU lacks the needed instructions. */
int64_t hpx_copy_checked(const Piece *pieces, size_t count, const volatile int *hurry, uint64_t *checksum)
{
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("vpclmulqdq"))
        return -1;
    uint64_t state = ~*checksum; /* callers see the CRC inverted */
    int64_t done = 0;
    for (; count; count--, pieces++) {
        char *to = pieces->to;
        const char *from = pieces->from;
        for (size_t left = pieces->size, now; left && !*hurry; left -= now, from += now, done += now) {
            now = left > AT_A_TIME ? AT_A_TIME : left;
            size_t folded = now - now % STEP;
            if (folded) {
                uint64_t rest[2];
                check(to, from, folded, state, rest);
                state = divide(0, (const unsigned char *)rest, sizeof rest);
            }
            state = divide(state, (const unsigned char *)from + folded, now - folded);
            if (to != NULL) {
                memcpy(to + folded, from + folded, now - folded);
                to += now;
            }
        }
    }
    *checksum = ~state;
    return done;
}

#else

int64_t hpx_copy_checked(const Piece *pieces, size_t count, const volatile int *hurry, uint64_t *checksum)
{
    return -1;
}

#endif
