/* Vectors of a page that is of another type than what is computed in: as in types/fp8.py. */
#ifndef PENSTOCK_FP8_H
#define PENSTOCK_FP8_H

#include "vectors.h"

#define FP8_BLOCK 128
enum { SAME, BF16, FP8 };           /* what a page has: the type of queries, bf16 for f32 ones, or codes */

INLINE float e4m3(uint8_t code)
{
    const uint32_t amount = code & 0x7fu, sign = (uint32_t)(code & 0x80u) << 24;
    union { uint32_t u; float f; } small = { .f = (float)(int32_t)amount * 0x1p-9f }, x;
    x.u = amount < 8 ? small.u : (amount << 20) + (120u << 23);
    x.u = amount == 0x7f ? 0x7fc00000u : x.u | sign;
    return x.f;
}

/* `dim` floats of one vector; the first `coded` of codes are in blocks that have a scale. */
INLINE void unpack(const char *kept, int64_t dim, int64_t coded, int format, float *out)
{
    if (format == BF16) {
        for (int64_t d = 0; d < dim; d++)
            out[d] = one(kept, d, 1);
        return;
    }
    const int64_t blocks = (coded + FP8_BLOCK - 1) / FP8_BLOCK;
    const uint8_t *code = (const uint8_t *)kept;
    const char *scales = kept + coded, *rest = scales + 4 * blocks;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t end = (b + 1) * FP8_BLOCK < coded ? (b + 1) * FP8_BLOCK : coded;
        float scale;
        memcpy(&scale, scales + 4 * b, sizeof scale);
        for (int64_t d = b * FP8_BLOCK; d < end; d++)
            out[d] = e4m3(code[d]) * scale;
    }
    for (int64_t d = coded; d < dim; d++) {
        out[d] = one(rest, d - coded, 1);
    }
}

/* BLOCK slots of keys or values of a KV head in codes into floats [BLOCK, dim], and where each begins there. */
INLINE void unpack_block(const void *pool, const int64_t *at, int64_t dim, float *tile, int64_t *place)
{
    for (int i = 0; i < BLOCK; i++) {
        unpack((const char *)pool + at[i], dim, dim, FP8, tile + i * dim);
        place[i] = i * dim;
    }
}

#endif
