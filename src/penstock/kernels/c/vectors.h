/* What the C kernels share: vectors of floats over f32 and bf16, sums in a fixed order, e^x for
 * x <= 0, attention of a chunk block by block, and the largest of a list. For any CPU that gcc 12 or
 * clang makes vectors for.
 */
#ifndef PENSTOCK_VECTORS_H
#define PENSTOCK_VECTORS_H

#include <stdint.h>
#include <string.h>

#define CHUNK 128               /* tokens whose weights are kept at once */
#define BLOCK 16                /* slots that are read together */
/* A vector is as wide as the CPU's: gcc takes wider ones apart lane by lane where a scalar goes into all lanes
 * or lanes change their place. SLOTS and WIDE: how many scores, and vectors of a value, registers hold. */
#if defined(__AVX512F__)
#define LANES 16
#define SLOTS 16
#define WIDE 4
#elif defined(__AVX2__)
#define LANES 8
#define SLOTS 8
#define WIDE 2
#else
#define LANES 4
#define SLOTS 8
#define WIDE 2
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t Half __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t Word __attribute__((vector_size(4 * LANES)));

INLINE Vec load(const void *base, int64_t at, int bf16)
{
    if (!bf16)
        return *(const Vec *)((const float *)base + at);
    Half half = *(const Half *)((const uint16_t *)base + at);
    return (Vec)(__builtin_convertvector(half, Word) << 16);
}

INLINE float one(const void *base, int64_t at, int bf16)
{
    union { uint32_t u; float f; } half;
    if (!bf16)
        return ((const float *)base)[at];
    half.u = (uint32_t)((const uint16_t *)base)[at] << 16;
    return half.f;
}

INLINE void put(void *base, int64_t at, Vec value, int bf16)
{
    if (!bf16) {
        *(Vec *)((float *)base + at) = value;
        return;
    }
    Word bits = (Word)value;                    /* to nearest, ties to even; a NaN stays one */
    Word rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Word is_nan = (Word)(value != value);
    *(Half *)((uint16_t *)base + at) =
        __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), Half);
}

/* As `put`, of one: written out so that loops over it become vectors, as the next two are. */
INLINE void put_one(void *base, int64_t at, float value, int bf16)
{
    if (!bf16) {
        ((float *)base)[at] = value;
        return;
    }
    union { float f; uint32_t u; } x = { value };
    uint32_t rounded = (x.u + 0x7fff + ((x.u >> 16) & 1)) >> 16;
    uint32_t bits = value != value ? 0x7fc0u : rounded;
    ((uint16_t *)base)[at] = (uint16_t)bits;
}

/* 2^t to 2e-7, for t from -126 to 127. */
INLINE float exp_two(float t)
{
    float n = __builtin_rintf(t), f = t - n;
    float p = 1.5353362e-4f;
    p = p * f + 1.3398874e-3f;
    p = p * f + 9.6184373e-3f;
    p = p * f + 5.5503324e-2f;
    p = p * f + 2.4022648e-1f;
    p = p * f + 6.9314720e-1f;
    p = p * f + 1.0f;
    union { int32_t i; float f; } scale = { ((int32_t)n + 127) << 23 };
    return p * scale.f;
}

/* e^x for x <= 0, 0 below -87. */
INLINE float exp_negative(float x)
{
    float t = x * 1.44269504f;
    float power = exp_two(t < -126.0f ? -126.0f : t);
    return x < -87.0f ? 0.0f : power;
}

/* a[i] becomes the sums of neighbours: of a[2 * i] in the lower lanes, of a[2 * i + 1] in the upper ones. */
#define FOLD(low, high) \
    for (int i = 0; i < count / 2; i++) \
        a[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], low) \
             + __builtin_shufflevector(a[2 * i], a[2 * i + 1], high); \
    count /= 2;
#define ALL(...) __VA_ARGS__

/* out[i] is the sum of the lanes of a[i], for BLOCK vectors, which are used up: by halving, two vectors into
 * one, neighbours first and the widest fold last, so that sums end up in order. */
INLINE void sums(Vec *a, float *out)
{
    int count = BLOCK;
#if LANES == 16
    FOLD(ALL(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
         ALL(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    FOLD(ALL(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
         ALL(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
    FOLD(ALL(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
         ALL(2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
    FOLD(ALL(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
         ALL(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
#elif LANES == 8
    FOLD(ALL(0, 1, 2, 3, 8, 9, 10, 11), ALL(4, 5, 6, 7, 12, 13, 14, 15))
    FOLD(ALL(0, 1, 4, 5, 8, 9, 12, 13), ALL(2, 3, 6, 7, 10, 11, 14, 15))
    FOLD(ALL(0, 2, 4, 6, 8, 10, 12, 14), ALL(1, 3, 5, 7, 9, 11, 13, 15))
#else
    FOLD(ALL(0, 1, 4, 5), ALL(2, 3, 6, 7))
    FOLD(ALL(0, 2, 4, 6), ALL(1, 3, 5, 7))
#endif
    for (int i = 0; i < count; i++)
        put(out, i * LANES, a[i], 0);
}

/* score[j] = q . k[slot[j]] for BLOCK slots and one query head. */
INLINE void score_block(const float *q, const void *k, const int64_t *at, int64_t dim, int bf16, float *score)
{
    Vec sum[BLOCK];
    for (int first = 0; first < BLOCK; first += SLOTS) {
        Vec some[SLOTS] = { 0 };
        for (int64_t d = 0; d < dim; d += LANES) {
            Vec query = load(q, d, 0);
            #pragma GCC unroll 16
            for (int j = 0; j < SLOTS; j++)
                some[j] += query * load(k, at[first + j] + d, bf16);
        }
        #pragma GCC unroll 16
        for (int j = 0; j < SLOTS; j++)
            sum[first + j] = some[j];
    }
    sums(sum, score);
}

/* sum[i][d .. d + vectors * LANES) += weight[i][j] * v[slot[j]], for up to four query heads. */
INLINE void value_block(float *sum, int64_t width, const float *weight, const void *v,
                        const int64_t *at, int heads, int vectors, int bf16)
{
    Vec total[4][WIDE];
    for (int i = 0; i < heads; i++)
        for (int d = 0; d < vectors; d++)
            total[i][d] = load(sum, i * width + d * LANES, 0);
    for (int j = 0; j < BLOCK; j++)
        for (int d = 0; d < vectors; d++) {
            Vec value = load(v, at[j] + d * LANES, bf16);
            for (int i = 0; i < heads; i++)
                total[i][d] += weight[i * CHUNK + j] * value;
        }
    for (int i = 0; i < heads; i++)
        for (int d = 0; d < vectors; d++)
            put(sum, i * width + d * LANES, total[i][d], 0);
}

INLINE void value_heads(float *sum, int64_t width, const float *weight, const void *v,
                        const int64_t *at, int64_t heads, int64_t dim, int bf16)
{
    for (int64_t n = 0; n < heads; n += 4, sum += 4 * width, weight += 4 * CHUNK)
        for (int64_t d = 0; d < dim; ) {
            const int vectors = dim - d >= WIDE * LANES ? WIDE : 1;
            int64_t place[BLOCK];
            for (int j = 0; j < BLOCK; j++)
                place[j] = at[j] + d;
            #define CASE(count, wide) \
                value_block(sum + d, width, weight, v, place, count, wide, bf16)
            switch ((heads - n > 4 ? 4 : heads - n) * 8 + vectors) {
            case 1 * 8 + WIDE: CASE(1, WIDE); break;
            case 2 * 8 + WIDE: CASE(2, WIDE); break;
            case 3 * 8 + WIDE: CASE(3, WIDE); break;
            case 4 * 8 + WIDE: CASE(4, WIDE); break;
            case 1 * 8 + 1: CASE(1, 1); break;
            case 2 * 8 + 1: CASE(2, 1); break;
            case 3 * 8 + 1: CASE(3, 1); break;
            case 4 * 8 + 1: CASE(4, 1); break;
            }
            d += vectors * LANES;
        }
}

/* Bits of a float such that larger floats have larger bits; -0 and 0 are the same. */
INLINE uint32_t ordered(float x)
{
    union { float f; uint32_t u; } bits = { x + 0.0f };
    return bits.u >> 31 ? ~bits.u : bits.u | 0x80000000u;
}

/* Places of the k largest of n keys, ascending, into `out`; of equal keys the first ones. k <= n.
 * Four passes of eight bits find the smallest key that is in, one more pass collects. */
static inline void largest(const uint32_t *key, int64_t n, int64_t k, int32_t *out)
{
    uint32_t cut = 0, mask = 0;
    int64_t left = k;                               /* of those that agree with `cut` so far */
    if (k <= 0)
        return;
    for (int shift = 24; shift >= 0 && k < n; shift -= 8) {
        int64_t count[256] = { 0 };
        for (int64_t i = 0; i < n; i++)
            if ((key[i] & mask) == cut)
                count[key[i] >> shift & 255]++;
        int digit = 255;
        while (count[digit] < left)
            left -= count[digit--];
        cut |= (uint32_t)digit << shift;
        mask |= 255u << shift;
    }
    for (int64_t i = 0, at = 0; at < k; i++)
        if (k == n || key[i] > cut || (key[i] == cut && left-- > 0))
            out[at++] = i;
}

/* The same of scores, whose place their keys take: they are not needed any more. */
static inline void largest_scores(float *score, int64_t n, int64_t k, int32_t *out)
{
    uint32_t *key = (uint32_t *)score;
    for (int64_t i = 0; i < n; i++) {
        float x;
        memcpy(&x, key + i, sizeof x);
        key[i] = ordered(x);
    }
    largest(key, n, k, out);
}

/* `count` scores become weights e^(score - the largest of them and `top`), those up to `padded` zero; returns that
 * largest, with the sum of the weights. */
INLINE float weigh(float *w, int64_t count, int64_t padded, float top, float *total)
{
    float sum = 0.0f;
    #pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < count; j++)
        top = w[j] > top ? w[j] : top;
    #pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < count; j++) {
        w[j] = exp_negative(w[j] - top);
        sum += w[j];
    }
    memset(w + count, 0, (padded - count) * sizeof(float));
    *total = sum;
    return top;
}

/* A chunk of a head's context leaves a part: (largest score, sum of weights, weighted values). This begins one;
 * no value is added yet. */
INLINE void begin_part(float *w, int64_t count, int64_t padded, float *part, int64_t dim)
{
    part[0] = weigh(w, count, padded, w[0], part + 1);
    memset(part + 2, 0, dim * sizeof(float));
}

/* Parts, `next` floats from one to the next, into out[at .. at + dim), with (largest, sum) of all into `of`. `sink`:
 * a score without a value, or NULL. */
INLINE void merge_parts(const float *part, int64_t next, int64_t chunks, int64_t dim, void *out, int64_t at,
                        int bf16, const float *sink, float *of)
{
    float top = sink ? *sink : chunks ? part[0] : -__builtin_inff(), sum[dim];
    for (int64_t c = 0; c < chunks; c++)
        top = part[c * next] > top ? part[c * next] : top;
    float total = sink ? exp_negative(*sink - top) : 0.0f;
    memset(sum, 0, dim * sizeof(float));
    for (int64_t c = 0; c < chunks; c++) {
        float share = exp_negative(part[c * next] - top);
        total += share * part[c * next + 1];
        for (int64_t d = 0; d < dim; d += LANES)
            put(sum, d, load(sum, d, 0) + share * load(part, c * next + 2 + d, 0), 0);
    }
    for (int64_t d = 0; d < dim; d += LANES)
        put(out, at + d, load(sum, d, 0) / (chunks ? total : 1.0f), bf16);
    of[0] = top;
    of[1] = total;
}

/* RUN(dim, bf16) with the type, and head dims that models have, as literals inside its parallel region: variables
 * would not survive the outlining, and a constant head dim keeps a head in registers. */
#define BY_SHAPE(small, large) \
    if (dim == small && bf16) { \
        RUN(small, 1) \
    } else if (dim == small) { \
        RUN(small, 0) \
    } else if (dim == large && bf16) { \
        RUN(large, 1) \
    } else if (dim == large) { \
        RUN(large, 0) \
    } else if (bf16) { \
        RUN(dim, 1) \
    } else { \
        RUN(dim, 0) \
    }

#endif
