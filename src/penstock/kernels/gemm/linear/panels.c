/* y = x W^T + b over weights kept in panels of PANEL outputs, in the type they are stored in, with sums in
 * f32. What a row becomes does not depend on the rows beside it: every sum runs over the inputs in the same
 * order, of codes over those of a group and then over the groups.
 *
 * A panel of f32 is [inputs, PANEL]; of bf16 it is [inputs / 2, PANEL, 2], so that a word holds two inputs
 * of one output: a shift and a mask make both f32 on any CPU, AVX512-BF16 and AMX multiply them as they are.
 * Of codes it is [inputs, PANEL] bytes, or [inputs / 2, PANEL] with two inputs of an output in a byte, the
 * first one low, and a weight is code * scale + shift: f16 [inputs / group, 2, PANEL].
 */
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>

#include "amx.h"
#include "calls.h"
#include "panels.h"

#define ROWS_OF_ITEM 128        /* rows of one panel that a thread takes at once, at most */
#define EXPAND 16               /* rows from which a panel is made f32 once instead of for each tile */
#define BLOCK 128               /* inputs of a panel that all rows meet before those behind them */
#define GROUP 4                 /* panels whose rows are taken one part after the other */

_Static_assert(!AMX || PANEL == 32, "amx_product has panels of 32 outputs");

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

/* Inputs of a panel: zeros follow the last one where two are read at once, or AMX_INPUTS. */
INLINE int64_t padded(int64_t inputs, int bf16)
{
    const int64_t whole = !bf16 ? 1 : AMX ? AMX_INPUTS : 2;
    return (inputs + whole - 1) / whole * whole;
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

INLINE int kind_of(const Linear *a)
{
    return a->scales ? a->bits == 4 ? NIBBLES : BYTES
        : !a->bf16 ? F32 : AMX && amx_granted() ? TILES : DOT_BF16 ? DOTS : PAIRS;
}

/* Rows `first` up to `last` of panel p and those beside it. `expanded` is NULL, or has room for a block in f32. */
static void item(const Linear *a, int kind, const void *x, int64_t stride, int64_t inputs, const float *totals,
                 int64_t p, int panels, int64_t first, int64_t last, float *expanded)
{
    const int64_t rows = last - first;
    const int64_t block = kind == TILES ? inputs : block_of(a, inputs);
    Panels at = { .bytes = panel_bytes(a, inputs), .group = a->group, .groups = groups_of(a),
                  .halves = groups_of(a) * 2 * PANEL };
    const int many = rows >= EXPAND && kind != TILES && kind != DOTS;
    const int64_t share = panel_bytes(a, block) * TALL / rows;
    if (many && !a->bf16)                       /* what is written in the end is asked for, too */
        for (int64_t t = first; t < last; t++)
            for (int64_t line = 0; line < 4 * PANEL; line += 64)
                __builtin_prefetch((char *)a->y + (t * a->outputs + p * PANEL) * 4 + line, 1, 2);
    float out[(ROWS_OF_ITEM > SUMS ? ROWS_OF_ITEM : SUMS) * PANEL];
    for (int64_t begin = 0; begin < inputs; begin += block) {
        const int64_t count = inputs - begin < block ? inputs - begin : block;
        const int64_t g = at.groups ? begin / at.group : 0;
        const char *next = (const char *)a->weight + p * at.bytes + panel_bytes(a, begin + count);
        int how = kind;
        at.weight = (const char *)a->weight + p * at.bytes + panel_bytes(a, begin);
        at.scales = a->scales ? (const uint16_t *)a->scales + p * at.halves + g * 2 * PANEL : NULL;
        if (expanded) {
            expand_panel(expanded, at.weight, count, kind);
            at.weight = (const char *)expanded, how = a->scales ? FLOATS : NEAR;
        } else if (many)
            how = NEAR;
        if (kind == TILES)
            amx_product(at.weight, (const uint16_t *)x + first * stride, stride, inputs, out, rows, AHEAD);
        else for (int64_t t = first; t < last; ) {
            const void *row = (const char *)x + (t * stride + begin) * (kind == DOTS ? 2 : 4);
            float *sums = out + (t - first) * PANEL;
            int64_t done = 0;
            if (many)                           /* each tile asks for its share of the next block */
                for (int64_t line = 0; line < share; line += 64)
                    __builtin_prefetch(next + (t - first) * share / TALL + line, 0, 2);
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

/* Inputs of a panel of bf16 are a multiple of this. */
int penstock_whole(const void *none, int threads)
{
    (void)none, (void)threads;
    return padded(1, 1);
}

/* Whether bf16 goes through AMX: compiled for it, and this process may. */
int penstock_tiles(const void *none, int threads)
{
    (void)none, (void)threads;
    return AMX && amx_granted();
}

/* A thread's next run of items, `first` and on, of all there are: a share of what is left, so that they lie side by
 * side in memory and threads end together. Returns how many; a multiple of `side` but at the end. */
static int64_t claim(int64_t *next, int64_t items, int threads, int64_t side, int64_t *first)
{
    int64_t take;
    *first = __atomic_load_n(next, __ATOMIC_RELAXED);
    do {
        const int64_t left = items - *first, share = (left + threads - 1) / threads / side * side;
        take = left < side ? left : share < side ? side : share;
    } while (take && !__atomic_compare_exchange_n(next, first, *first + take, 1, __ATOMIC_RELAXED,
                                                  __ATOMIC_RELAXED));
    return take;
}

/* x is copied where it is padded with zeros, or bf16 and multiplied as f32. 0, or 1: no memory. */
int penstock_linear(const Linear *a, int threads)
{
    const int kind = kind_of(a), narrow_x = kind == DOTS || kind == TILES;
    const int64_t inputs = padded(a->inputs, a->bf16);
    const int copied = a->bf16 && !(narrow_x && inputs == a->inputs);
    const int64_t panels = (a->outputs + PANEL - 1) / PANEL;
    const int64_t chunks = (a->rows + ROWS_OF_ITEM - 1) / ROWS_OF_ITEM;
    const int64_t side = kind == TILES ? 1 : side_by_side(a);
    int64_t next = 0;
    const int expand = a->rows >= EXPAND && (a->scales || kind == PAIRS);
    const void *x = a->x;
    int64_t stride = a->stride;
    const int64_t groups = groups_of(a), block = block_of(a, inputs);
    float *copy = NULL, *expanded = NULL, *totals = NULL;
    if (copied) {
        copy = malloc((size_t)(a->rows * inputs) * (narrow_x ? 2 : 4));
        x = copy, stride = inputs;
    }
    if (expand)
        expanded = aligned_alloc(64, (size_t)(threads * block) * PANEL * sizeof(float));     /* `block` is even */
    if (a->scales)
        totals = malloc((size_t)(a->rows * groups) * sizeof(float));
    if ((copied && !copy) || (expand && !expanded) || (a->scales && !totals)) {
        free(copy), free(expanded), free(totals);
        return 1;
    }
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        if (copied) {
            #pragma omp for
            for (int64_t t = 0; t < a->rows; t++)
                for (int64_t i = 0; i < inputs; i++) {
                    const uint16_t half = i < a->inputs ? ((const uint16_t *)a->x)[t * a->stride + i] : 0;
                    if (narrow_x)
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
        if (kind == TILES)
            amx_begin(a->rows);
        float *mine = expanded ? expanded + omp_get_thread_num() * block * PANEL : NULL;
        for (int64_t n, run; (run = claim(&next, panels * chunks, threads, side, &n)); )
            for (int64_t beside; run; n += beside, run -= beside) {
                /* GROUP panels, then those of the next rows: what they share stays in a core's second cache. */
                const int64_t g = n / (chunks * GROUP) * GROUP, size = panels - g < GROUP ? panels - g : GROUP;
                const int64_t p = g + n % (chunks * GROUP) % size, c = n % (chunks * GROUP) / size;
                beside = run < side ? 1 : side;
                item(a, kind, x, stride, inputs, totals, p, beside, a->rows * c / chunks,
                     a->rows * (c + 1) / chunks, mine);
            }
        if (kind == TILES)
            amx_end();
    }
    free(copy), free(expanded), free(totals);
    return 0;
}
