/* Copies whose destination does not pass through the caches.
 *
 * A plain store reads each cache line before it overwrites all of it, and puts what others had in the shared cache out
 * of it. A snapshot is not read again soon by who wrote it, so both are for nothing. Called through ctypes, without the
 * interpreter's lock.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

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
    _mm_sfence(); /* whoever is told of the copy after this sees it whole */
}

#else

void hpx_copy(void *to, const void *from, size_t size)
{
    memcpy(to, from, size);
}

#endif
