/* A few rows of x times panels of a weight (linear/panels.c has their layout): as many sums as registers hold. */
#ifndef PENSTOCK_PANELS_H
#define PENSTOCK_PANELS_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define AHEAD 8192              /* bytes between what is multiplied and what is asked for from memory */

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__FMA__)
#define FMA 1
#else
#define FMA 0
#endif
#if defined(__AVX512BF16__)
#define DOT_BF16 1
#else
#define DOT_BF16 0
#endif
/* Floats of a vector, vectors of a panel, rows of the tallest tile. With SIXTEEN registers 12 are sums, 3 a
 * weight and 1 an input: fewer sums would wait for each other. gcc 12 puts some of 12 on the stack, which
 * takes twice as long, unless it is told which register an instruction writes. */
#if defined(__AVX512F__)
#define LANES 16
#define WIDTH 2
#define TALL 8
#elif defined(__AVX2__)
#define LANES 8
#define WIDTH 3
#define TALL 4
#else
#define LANES 4
#define WIDTH 2
#define TALL 4
#endif

#define SIXTEEN (LANES == 8 && FMA)
#define PANEL (WIDTH * LANES)   /* outputs of a panel, so that a tile reads every byte in turn */
#define SUMS (TALL * WIDTH)     /* of the largest tile */

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Word __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Int __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t Half __attribute__((vector_size(2 * LANES), aligned(2)));
/* How a panel is read; x is bf16 for TILES and DOTS, else f32. From NIBBLES on codes. NEAR is f32 and FLOATS codes
 * made f32 that a cache holds, so that nothing is asked for from memory. */
enum { F32, NEAR, PAIRS, DOTS, TILES, NIBBLES, BYTES, FLOATS };
enum { ALL, LOW, HIGH };        /* of a byte */

INLINE float widen(uint16_t half)
{
    union { uint32_t u; float f; } x = { (uint32_t)half << 16 };
    return x.f;
}

INLINE uint16_t narrow(float value)             /* to nearest, ties to even; a NaN stays one */
{
    union { float f; uint32_t u; } x = { value };
    return value != value ? 0x7fc0 : (x.u + 0x7fff + ((x.u >> 16) & 1)) >> 16;
}

INLINE void step(Vec *sum, const Vec *weight, const float *x, int64_t stride, int rows)
{
    #pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        #pragma GCC unroll 8
        for (int v = 0; v < WIDTH; v++)
#if SIXTEEN
            __asm__ ("vfmadd231ps %2, %1, %0" : "+x"(sum[r * WIDTH + v])
                     : "x"(weight[v]), "x"(_mm256_broadcast_ss(x + r * stride)));
#else
            sum[r * WIDTH + v] += weight[v] * x[r * stride];
#endif
}

INLINE void dots(Vec *sum, const Word *pair, const uint16_t *x, int64_t stride, int rows)
{
#if DOT_BF16
    for (int r = 0; r < rows; r++) {
        uint32_t two;
        memcpy(&two, x + r * stride, 4);
        for (int v = 0; v < WIDTH; v++)
            sum[r * WIDTH + v] = (Vec)_mm512_dpbf16_ps((__m512)sum[r * WIDTH + v],
                                                         (__m512bh)_mm512_set1_epi32((int)two),
                                                         (__m512bh)pair[v]);
    }
#endif
}

/* f16 without inf and NaN to f32, with what every CPU has: the exponents differ by 112. */
INLINE Vec half_vector(const uint16_t *at)
{
    const Word bits = __builtin_convertvector(*(const Half *)at, Word);
    return (Vec)((bits & 0x7fff) << 13 | (bits & 0x8000) << 16) * 0x1p112f;
}

/* Ask for what is read next: beside many sums a CPU does not look far enough ahead by itself. */
INLINE void fetch(const void *at, int64_t bytes)
{
    for (int64_t line = 0; line < bytes; line += 64)
        __builtin_prefetch((const char *)at + AHEAD + line, 0, 2);
}

/* LANES bytes, or their low or high halves, as floats. gcc 12 takes bytes one by one where it is not told how. */
INLINE Vec widened(const uint8_t *at, int part)
{
#if defined(__AVX512F__)
    const Int code = (Int)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
#elif defined(__AVX2__)
    const Int code = (Int)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
#else
    Int code;
    for (int l = 0; l < LANES; l++)
        code[l] = at[l];
#endif
    const Int half = part == HIGH ? code >> 4 : code;
#if defined(__AVX512F__)
    if (part != ALL)                            /* a table of 16 looks at four bits, and makes floats of them */
        return (Vec)_mm512_permutexvar_ps((__m512i)half, _mm512_setr_ps(
            0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
#endif
    return __builtin_convertvector(part == LOW ? half & 15 : half, Vec);
}

/* The codes of inputs i and i + 1 as weight[b][v], or of i alone for BYTES. */
INLINE void codes(Vec weight[2][WIDTH], const uint8_t *panel, int64_t i, int kind)
{
    for (int v = 0; v < WIDTH; v++)
        if (kind == BYTES)
            weight[0][v] = widened(panel + i * PANEL + v * LANES, ALL);
        else {
            const uint8_t *both = panel + i / 2 * PANEL + v * LANES;
            weight[0][v] = widened(both, LOW), weight[1][v] = widened(both, HIGH);
        }
}

INLINE void group_scales(Vec *scale, const uint16_t *scales, int64_t g)
{
    for (int v = 0; v < 2 * WIDTH; v++)
        scale[v] = half_vector(scales + g * 2 * PANEL + v * LANES);
}

/* Panels one after the other, and the scales of each; bytes, and halves, from one to the next. */
typedef struct {
    const char *weight;
    const uint16_t *scales;
    const float *totals;                        /* of the first row: the sum of x in each group */
    int64_t bytes, halves, group, groups;       /* groups: of a whole row */
} Panels;

/* Input i of multiply, of floats; `far`: weights are asked for from memory. */
INLINE void floats(Vec *sum, const Panels *at, const float *x, int64_t stride, int64_t i, int rows, int panels,
                   int far)
{
    #pragma GCC unroll 8
    for (int p = 0; p < panels; p++) {
        const float *panel = (const float *)(at->weight + p * at->bytes) + i * PANEL;
        if (far && rows > 1)                    /* one row's loads are far enough ahead by themselves */
            fetch(panel, 4 * PANEL);
        Vec weight[WIDTH];
        #pragma GCC unroll 8
        for (int v = 0; v < WIDTH; v++)
            weight[v] = *(const Vec *)(panel + v * LANES);
        step(sum + p * rows * WIDTH, weight, x, stride, rows);
    }
}

/* sum[p][r] += x[r] . panel p over inputs `begin` to `end`, both even where two inputs lie side by side. */
INLINE void multiply(Vec *sum, const Panels *at, const void *x, int64_t stride, int64_t begin, int64_t end,
                     int rows, int panels, int kind)
{
    if (kind == NEAR || kind == FLOATS)
        #pragma GCC unroll 4
        for (int64_t i = begin; i < end; i++)
            floats(sum, at, (const float *)x + i, stride, i, rows, panels, 0);
    else if (kind == F32)
        for (int64_t i = begin; i < end; i++)
            floats(sum, at, (const float *)x + i, stride, i, rows, panels, 1);
    else if (kind == NIBBLES || kind == BYTES)
        for (int64_t i = begin; i < end; i += kind == BYTES ? 1 : 2)
            #pragma GCC unroll 8
            for (int p = 0; p < panels; p++) {
                Vec weight[2][WIDTH];
                codes(weight, (const uint8_t *)at->weight + p * at->bytes, i, kind);
                step(sum + p * rows * WIDTH, weight[0], (const float *)x + i, stride, rows);
                if (kind == NIBBLES)
                    step(sum + p * rows * WIDTH, weight[1], (const float *)x + i + 1, stride, rows);
            }
    else
        for (int64_t i = begin; i < end; i += 2)
            #pragma GCC unroll 8
            for (int p = 0; p < panels; p++) {
                const uint32_t *panel = (const uint32_t *)(at->weight + p * at->bytes) + i / 2 * PANEL;
                fetch(panel, 4 * PANEL);
                Vec *mine = sum + p * rows * WIDTH;
                if (kind == DOTS) {
                    Word pair[WIDTH];
                    #pragma GCC unroll 8
                    for (int v = 0; v < WIDTH; v++)
                        pair[v] = *(const Word *)(panel + v * LANES);
                    dots(mine, pair, (const uint16_t *)x + i, stride, rows);
                    continue;
                }
                Vec weight[WIDTH];
                #pragma GCC unroll 8
                for (int v = 0; v < WIDTH; v++)
                    weight[v] = (Vec)(*(const Word *)(panel + v * LANES) << 16);
                step(mine, weight, (const float *)x + i, stride, rows);
#if SIXTEEN
                __asm__ volatile ("" ::: "memory");     /* read again: there is no register to keep it in */
#endif
                #pragma GCC unroll 8
                for (int v = 0; v < WIDTH; v++) {
                    Word odd = *(const Word *)(panel + v * LANES);
#if SIXTEEN                                             /* nor for a mask */
                    odd >>= 16;
                    __asm__ ("" : "+x"(odd));
                    weight[v] = (Vec)(odd << 16);
#else
                    weight[v] = (Vec)(odd & 0xffff0000u);
#endif
                }
                step(mine, weight, (const float *)x + i + 1, stride, rows);
            }
}

/* out[p][r][0 .. PANEL) = x[r] . panel p, of `rows` rows and `panels` panels; constants after inlining.
 * `more`: is added to what is there. The scale and the shift of a group of codes meet its sums, not each weight. */
INLINE void tile(const Panels *at, const void *x, int64_t stride, int64_t inputs, float *out, int more,
                 int rows, int panels, int kind)
{
    Vec sum[SUMS];
    #pragma GCC unroll 64
    for (int i = 0; i < panels * rows * WIDTH; i++)
        sum[i] = more ? *(const Vec *)(out + i * LANES) : (Vec){ 0 };
    if (kind < NIBBLES)
        multiply(sum, at, x, stride, 0, inputs, rows, panels, kind);
    else
        for (int64_t g = 0; g < inputs / at->group; g++) {
            const int64_t bytes = at->group * PANEL / (kind == NIBBLES ? 2 : 1);
            Vec part[SUMS], scale[2 * WIDTH];
            #pragma GCC unroll 64
            for (int i = 0; i < panels * rows * WIDTH; i++)
                part[i] = (Vec){ 0 };
            multiply(part, at, x, stride, g * at->group, (g + 1) * at->group, rows, panels, kind);
            #pragma GCC unroll 8
            for (int p = 0; p < panels; p++) {
                if (kind != FLOATS)
                    fetch(at->weight + p * at->bytes + g * bytes, bytes);
                group_scales(scale, at->scales + p * at->halves, g);
                #pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    #pragma GCC unroll 8
                    for (int v = 0; v < WIDTH; v++)
                        sum[(p * rows + r) * WIDTH + v] += part[(p * rows + r) * WIDTH + v] * scale[v]
                            + scale[WIDTH + v] * at->totals[r * at->groups + g];
            }
        }
    for (int i = 0; i < panels * rows * WIDTH; i++)
        *(Vec *)(out + i * LANES) = sum[i];
}

/* Up to TALL rows of `panels` panels; returns how many. A sum waits for the one before it: where there are
 * few of them, because there are few rows, panels are read side by side. */
INLINE int64_t tiles(const Panels *at, const void *x, int64_t stride, int64_t inputs, float *out, int more,
                     int64_t left, int panels, int kind)
{
    #define TILE(rows, panels) tile(at, x, stride, inputs, out, more, rows, panels, kind); return rows;
    if (panels == 4) { TILE(1, 4) }
    if (panels == 2 && left == 1) { TILE(1, 2) }
    if (panels == 2) { TILE(2, 2) }
    if (SIXTEEN && kind == NIBBLES) {           /* beside 12 sums there is no room for two weights */
        if (left == 3 || left > 4) { TILE(3, 1) }
        if (left >= 2) { TILE(2, 1) }
        TILE(1, 1)
    }
    if (left >= TALL) { TILE(TALL, 1) }
    if (left >= 4) { TILE(4, 1) }
    if (left >= 2) { TILE(2, 1) }
    TILE(1, 1)
}

#endif
