/* Packed bits onto logits: a row is one task, read and written once. */
#include "vectors.h"

typedef struct {
    uint32_t *logits;                           /* [rows, vocab], bits of f32 */
    const uint32_t *words;                      /* [masks, width] */
    const int64_t *at;                          /* [masks] */
    uint8_t *ok;                                /* [masks] */
    int64_t masks, width, vocab;
} Mask;

#define MINUS_INFINITY 0xff800000u
#define EXPONENT 0x7f800000u                    /* all ones: not finite */

/* `count` tokens of one word. Returns bit 0: one is finite; bit 1: one is NaN or plus infinity. */
INLINE uint32_t some(uint32_t *x, uint32_t word, int count)
{
    uint32_t finite = 0, bad = 0;
    for (int i = 0; i < count; i++) {
        const uint32_t kept = word >> i & 1 ? x[i] : MINUS_INFINITY;
        const uint32_t is_finite = (kept & EXPONENT) != EXPONENT;
        x[i] = kept;
        finite |= is_finite;
        bad |= !is_finite & (kept != MINUS_INFINITY);
    }
    return finite | bad << 1;
}

static int row(const Mask *s, int64_t m)
{
    uint32_t *x = s->logits + s->at[m] * s->vocab, seen = 0;
    const uint32_t *words = s->words + m * s->width;
    const int64_t whole = s->vocab / 32;
    for (int64_t w = 0; w < whole; w++)
        seen |= some(x + 32 * w, w < s->width ? words[w] : 0, 32);
    if (s->vocab % 32)
        seen |= some(x + 32 * whole, whole < s->width ? words[whole] : 0, (int)(s->vocab % 32));
    return seen == 1;
}

int penstock_mask(const Mask *s, int threads)
{
    #pragma omp parallel for num_threads(threads) if (s->masks * s->vocab > 100000)
    for (int64_t m = 0; m < s->masks; m++)
        s->ok[m] = row(s, m);
    return 0;
}
