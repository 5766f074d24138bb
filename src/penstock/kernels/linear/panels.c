/* y = x W^T + b over weights kept in panels of PANEL outputs, in the type they are stored in, with sums in
 * f32. What a row becomes does not depend on the rows beside it: every sum runs over the inputs in order, of
 * codes over those of a group and then over the groups.
 *
 * A panel of f32 is [inputs, PANEL]; of bf16 it is [inputs / 2, PANEL, 2], so that a word holds two inputs
 * of one output: a shift and a mask make both f32 on any CPU, and AVX512-BF16 multiplies them as they are.
 * Of codes it is [inputs, PANEL] bytes, or [inputs / 2, PANEL] with two inputs of an output in a byte, the
 * first one low, and a weight is code * scale + shift: f16 [inputs / group, 2, PANEL].
 */
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "calls.h"

#define INLINE static inline __attribute__((always_inline))
#define ROWS_OF_ITEM 128        /* rows of one panel that a thread takes at once */
#define EXPAND 16               /* rows from which a panel is made f32 once instead of for each tile */
#define BLOCK 128               /* inputs of a panel that all rows meet before those behind them */
#define AHEAD 8192              /* bytes between what is multiplied and what is asked for from memory */
#define RUN_MAX 8               /* items that a thread takes one after the other: what it asks for is its own */

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
/* How a panel is read; x is bf16 for DOTS, else f32. From NIBBLES on codes. NEAR is f32 and FLOATS codes made
 * f32 that a cache holds, so that nothing is asked for from memory. */
enum { F32, NEAR, PAIRS, DOTS, NIBBLES, BYTES, FLOATS };
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

/* sum[p][r] += x[r] . panel p over inputs `begin` to `end`, both even where two inputs lie side by side. */
INLINE void multiply(Vec *sum, const Panels *at, const void *x, int64_t stride, int64_t begin, int64_t end,
                     int rows, int panels, int kind)
{
    if (kind == F32 || kind == NEAR || kind == FLOATS)
        for (int64_t i = begin; i < end; i++)
            #pragma GCC unroll 8
            for (int p = 0; p < panels; p++) {
                const float *panel = (const float *)(at->weight + p * at->bytes) + i * PANEL;
                if (kind == F32)
                    fetch(panel, 4 * PANEL);
                Vec weight[WIDTH];
                #pragma GCC unroll 8
                for (int v = 0; v < WIDTH; v++)
                    weight[v] = *(const Vec *)(panel + v * LANES);
                step(sum + p * rows * WIDTH, weight, (const float *)x + i, stride, rows);
            }
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

/* Panels that are read at once. */
INLINE int side_by_side(const Linear *a)
{
    return a->rows > 2 ? 1 : a->rows == 1 ? 4 : 2;
}

/* A panel of bf16 or of codes as one of floats. */
static void expand_panel(float *out, const void *panel, int64_t inputs, int kind)
{
    Vec weight[2][WIDTH];
    for (int64_t i = 0; i < inputs; i += kind == BYTES ? 1 : 2) {
        if (kind == PAIRS) {
            const uint32_t *pairs = (const uint32_t *)panel + i / 2 * PANEL;
            fetch(pairs, 4 * PANEL);
            for (int v = 0; v < WIDTH; v++) {
                const Word pair = *(const Word *)(pairs + v * LANES);
                weight[0][v] = (Vec)(pair << 16), weight[1][v] = (Vec)(pair & 0xffff0000u);
            }
        } else if (kind == BYTES)
            codes(weight, panel, i, BYTES);
        else
            codes(weight, panel, i, NIBBLES);
        for (int b = 0; b < (kind == BYTES ? 1 : 2); b++)
            for (int v = 0; v < WIDTH; v++)
                *(Vec *)(out + (i + b) * PANEL + v * LANES) = weight[b][v];
    }
}

INLINE int64_t groups_of(const Linear *a)         /* of codes; no bf16, so no input is added to make a pair */
{
    return a->scales ? a->inputs / a->group : 0;
}

INLINE int64_t panel_bytes(const Linear *a, int64_t inputs)
{
    return inputs * PANEL * (a->scales ? a->bits : a->bf16 ? 16 : 32) / 8;
}

/* `count` sums, and the bias, of outputs `o` and on, into y. */
INLINE void leave(const Linear *a, const float *sum, int64_t o, int64_t row, int64_t count)
{
    if (a->bf16)
        for (int64_t j = 0; j < count; j++) {
            const float bias = a->bias ? widen(((const uint16_t *)a->bias)[o + j]) : 0.0f;
            ((uint16_t *)a->y)[row * a->outputs + o + j] = narrow(sum[j] + bias);
        }
    else
        for (int64_t j = 0; j < count; j++) {
            const float bias = a->bias ? ((const float *)a->bias)[o + j] : 0.0f;
            ((float *)a->y)[row * a->outputs + o + j] = sum[j] + bias;
        }
}

/* Inputs of a block, which a core's nearest cache holds for all rows. Of few rows all are one block. */
INLINE int64_t block_of(const Linear *a, int64_t inputs)
{
    const int64_t group = a->scales ? a->group : 2;
    return a->rows < EXPAND ? inputs : group < BLOCK ? BLOCK / group * group : group;
}

/* Rows `first` and on of panel p and those beside it. `expanded` is NULL, or has room for a block in f32. */
static void item(const Linear *a, const void *x, int64_t stride, int64_t inputs, const float *totals, int64_t p,
                 int panels, int64_t first, float *expanded)
{
    const int64_t last = a->rows - first < ROWS_OF_ITEM ? a->rows : first + ROWS_OF_ITEM, rows = last - first;
    const int64_t block = block_of(a, inputs);
    const int kind = a->scales ? a->bits == 4 ? NIBBLES : BYTES : a->bf16 ? DOT_BF16 ? DOTS : PAIRS : F32;
    Panels at = { .bytes = panel_bytes(a, inputs), .group = a->group, .groups = groups_of(a),
                  .halves = groups_of(a) * 2 * PANEL };
    float out[(ROWS_OF_ITEM > SUMS ? ROWS_OF_ITEM : SUMS) * PANEL];
    for (int64_t begin = 0; begin < inputs; begin += block) {
        const int64_t count = inputs - begin < block ? inputs - begin : block;
        const int64_t g = at.groups ? begin / at.group : 0;
        int how = kind;
        at.weight = (const char *)a->weight + p * at.bytes + panel_bytes(a, begin);
        at.scales = a->scales ? (const uint16_t *)a->scales + p * at.halves + g * 2 * PANEL : NULL;
        if (expanded) {
            expand_panel(expanded, at.weight, count, kind);
            at.weight = (const char *)expanded, how = a->scales ? FLOATS : NEAR;
        }
        for (int64_t t = first; t < last; ) {
            const void *row = (const char *)x + (t * stride + begin) * (kind == DOTS ? 2 : 4);
            float *sums = out + (t - first) * PANEL;
            int64_t done = 0;
            at.totals = totals + t * at.groups + g;
            #define CASE(k) case k: \
                done = tiles(&at, row, stride, count, sums, begin > 0, last - t, panels, k); break;
            switch (how) {
            CASE(F32)
            CASE(NEAR)
#if DOT_BF16
            CASE(DOTS)
#else
            CASE(PAIRS)
#endif
            CASE(NIBBLES)
            CASE(BYTES)
            CASE(FLOATS)
            }
            how = how == F32 ? NEAR : how;
            t += done;
        }
    }
    for (int64_t n = 0; n < panels * rows; n++) {
        const int64_t o = (p + n / rows) * PANEL;
        if (a->outputs - o >= PANEL)
            leave(a, out + n * PANEL, o, first + n % rows, PANEL);
        else
            leave(a, out + n * PANEL, o, first + n % rows, a->outputs - o);
    }
}

int penstock_panel(const void *none, int threads)
{
    (void)none, (void)threads;
    return PANEL;
}

/* x is copied where its rows are bf16: as it is, or as f32, with a zero after an odd row. 0, or 1: no memory. */
int penstock_linear(const Linear *a, int threads)
{
    const int64_t inputs = a->inputs + (a->bf16 ? a->inputs & 1 : 0);
    const int64_t panels = (a->outputs + PANEL - 1) / PANEL;
    const int64_t chunks = (a->rows + ROWS_OF_ITEM - 1) / ROWS_OF_ITEM;
    const int64_t side = side_by_side(a), whole = panels / side;      /* the last ones go one by one */
    const int64_t items = (whole + panels % side) * chunks, share = items / (4 * threads);
    const int64_t run = share < 1 ? 1 : share < RUN_MAX ? share : RUN_MAX;
    const int expand = a->rows >= EXPAND && (a->scales || (a->bf16 && !DOT_BF16));
    const void *x = a->x;
    int64_t stride = a->stride;
    const int64_t groups = groups_of(a), block = block_of(a, inputs);
    float *copy = NULL, *expanded = NULL, *totals = NULL;
    if (a->bf16) {
        copy = malloc((size_t)(a->rows * inputs) * (DOT_BF16 ? 2 : 4));
        x = copy, stride = inputs;
    }
    if (expand)
        expanded = malloc((size_t)(threads * block) * PANEL * sizeof(float));
    if (a->scales)
        totals = malloc((size_t)(a->rows * groups) * sizeof(float));
    if ((a->bf16 && !copy) || (expand && !expanded) || (a->scales && !totals)) {
        free(copy), free(expanded), free(totals);
        return 1;
    }
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        if (a->bf16) {
            #pragma omp for
            for (int64_t t = 0; t < a->rows; t++)
                for (int64_t i = 0; i < inputs; i++) {
                    const uint16_t half = i < a->inputs ? ((const uint16_t *)a->x)[t * a->stride + i] : 0;
                    if (DOT_BF16)
                        ((uint16_t *)copy)[t * inputs + i] = half;
                    else
                        copy[t * inputs + i] = widen(half);
                }
        }
        if (a->scales) {
            #pragma omp for
            for (int64_t n = 0; n < a->rows * groups; n++) {
                const float *part = (const float *)x + n / groups * stride + n % groups * a->group;
                totals[n] = 0;
                for (int64_t i = 0; i < a->group; i++)
                    totals[n] += part[i];
            }
        }
        #pragma omp for schedule(dynamic, run)
        for (int64_t n = 0; n < items; n++) {
            const int64_t i = n / chunks, p = i < whole ? i * side : i - whole + whole * side;
            float *mine = expanded ? expanded + omp_get_thread_num() * block * PANEL : NULL;
            item(a, x, stride, inputs, totals, p, i < whole ? side : 1, n % chunks * ROWS_OF_ITEM, mine);
        }
    }
    free(copy), free(expanded), free(totals);
    return 0;
}
