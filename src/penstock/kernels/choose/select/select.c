/* Which units a query attends to: bounds of q.k over each unit's keys, and the largest scores made of them.
 *
 * Units are scored BLOCK at a time; a unit's sum has one order wherever it stands in a block, so scores
 * depend neither on the batch nor on the thread count. MOST max(q lo, q hi) + LEAST min(q lo, q hi) is
 * q times one of them for hi plus q times the other for lo, by the sign of q.
 *
 *   N query heads   K KV heads   g = N / K   H head dim   S units of a page of summaries
 */
#include "fp8.h"
#include "units.h"

#define TASK 256                /* units that one thread scores at a time */
#define MOST 0.75f              /* as in spec.py */
#define LEAST 0.25f

typedef struct {
    const void *q, *bounds;         /* q [B, N, H]; bounds [P, K, 2, S, `vector`] */
    const int32_t *table, *row, *position, *budget;
    float *score;                   /* [B, K, width] */
    int32_t *chosen;                /* [B, K, chosen_width] */
    int64_t q_stride, page_stride, head_stride, plane_stride, table_stride;     /* elements */
    int64_t queries, kv_heads, group, page_units, width, chosen_width;
    Rule rule;
    int64_t vector, format;         /* elements of a bound; which, as in fp8.h */
} Select;

/* The largest score of the heads, of BLOCK units: lower bounds at `at`, the upper ones `plane` behind. */
INLINE void best_of_block(const float *above, const float *below, const void *bounds, const int64_t *at,
                          int64_t plane, int64_t group, int64_t dim, int bf16, float *best)
{
    const int64_t whole = dim / LANES * LANES;
    float total[BLOCK];
    for (int64_t n = 0; n < group; n++) {
        Vec sum[BLOCK] = { 0 };
        for (int64_t d = 0; d < whole; d += LANES) {
            Vec up = load(above, n * dim + d, 0), down = load(below, n * dim + d, 0);
            for (int j = 0; j < BLOCK; j++) {
                sum[j] += up * load(bounds, at[j] + plane + d, bf16);
                sum[j] += down * load(bounds, at[j] + d, bf16);
            }
        }
        for (int64_t d = whole; d < dim; d++)
            for (int j = 0; j < BLOCK; j++) {
                sum[j][d - whole] += above[n * dim + d] * one(bounds, at[j] + plane + d, bf16);
                sum[j][d - whole] += below[n * dim + d] * one(bounds, at[j] + d, bf16);
            }
        sums(sum, total);
        for (int j = 0; j < BLOCK; j++)
            best[j] = n == 0 || total[j] > best[j] ? total[j] : best[j];
    }
}

INLINE void score_units(const Select *s, int64_t b, int64_t k, int64_t first, int64_t end, int64_t dim,
                        int bf16)
{
    const int64_t group = s->group, kept = s->format == SAME ? 0 : BLOCK * 2 * dim;
    const int64_t bytes = s->format == FP8 ? 1 : 2;
    const int32_t *pages = s->table + s->row[b] * s->table_stride;
    float above[group * dim], below[group * dim], *score = s->score + (b * s->kv_heads + k) * s->width;
    float unpacked[kept + 1];
    for (int64_t i = 0; i < group * dim; i++) {
        int64_t at = b * s->q_stride + k * group * dim + i;
        float q = one(s->q, at, bf16);
        above[i] = q * (q > 0.0f ? MOST : LEAST);
        below[i] = q * (q > 0.0f ? LEAST : MOST);
    }
    for (int64_t u = first; u < end; u += BLOCK) {
        int64_t at[BLOCK];
        float best[BLOCK];
        for (int j = 0; j < BLOCK; j++) {       /* past the end: the first again, not kept */
            int64_t unit = u + j < end ? u + j : u;
            at[j] = pages[unit / s->page_units] * s->page_stride + k * s->head_stride
                    + unit % s->page_units * s->vector;
        }
        if (!kept)
            best_of_block(above, below, s->bounds, at, s->plane_stride, group, dim, bf16, best);
        else {
            for (int j = 0; j < BLOCK; j++) {
                const char *low = (const char *)s->bounds + at[j] * bytes;
                unpack(low, dim, dim, s->format, unpacked + j * 2 * dim);
                unpack(low + s->plane_stride * bytes, dim, dim, s->format, unpacked + (j * 2 + 1) * dim);
                at[j] = j * 2 * dim;
            }
            best_of_block(above, below, unpacked, at, dim, group, dim, 0, best);
        }
        for (int64_t j = 0; j < BLOCK && u + j < end; j++)
            score[u + j] = best[j];
    }
}

#define RUN(dim, bf16) \
    _Pragma("omp parallel num_threads(threads)") \
    { \
        _Pragma("omp for schedule(dynamic)") \
        for (int64_t i = 0; i < pairs * tasks; i++) { \
            int64_t b = i / tasks / s->kv_heads, first, end, from = i % tasks * TASK; \
            scored(&s->rule, s->position[b], &first, &end); \
            if (num_taken(&s->rule, s->position[b], s->budget[b]) >= end - first) \
                continue; \
            from = from > first ? from : first; \
            end = end < (i % tasks + 1) * TASK ? end : (i % tasks + 1) * TASK; \
            if (from < end) \
                score_units(s, b, i / tasks % s->kv_heads, from, end, dim, bf16); \
        } \
        _Pragma("omp for schedule(static)") \
        for (int64_t i = 0; i < pairs; i++) \
            keep_units(&s->rule, s->position[i / s->kv_heads], s->budget[i / s->kv_heads], \
                       s->score + i * s->width, s->chosen + i * s->chosen_width, s->chosen_width); \
    }

int penstock_select(const Select *s, int64_t dim, int bf16, int threads)
{
    const int64_t pairs = s->queries * s->kv_heads, tasks = (s->width + TASK - 1) / TASK;
    BY_SHAPE(64, 128)
    return 0;
}
