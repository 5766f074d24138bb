/* The blocks that index heads select: of each block the largest q.k of its keys, and the largest of these.
 *
 * Tokens are scored BLOCK at a time; a token's sum has one order wherever it stands, so scores depend neither on the
 * batch nor on the thread count.
 *
 *   I index heads   J index head dim, a multiple of 16   G page size
 */
#include "fp8.h"
#include "units.h"

#define TASK 512                /* tokens that one thread scores at a time, or one block */

typedef struct {
    const void *q, *key;            /* q [B, I, J]; key [P, G, J] */
    const int32_t *table, *row, *position;
    float *score;                   /* [B, I, width] */
    int32_t *chosen;                /* [B, I, topk] */
    Rule rule;
    int64_t q_stride, page_stride, key_stride, table_stride;        /* elements */
    int64_t queries, heads, page_size, width, topk;
} Blocks;

INLINE void score_blocks(const Blocks *s, int64_t b, int64_t first, int64_t end, int64_t dim, int bf16, int format)
{
    const int key_bf16 = format == SAME && bf16;
    float floats[format == SAME ? 1 : BLOCK * dim];
    const void *const keys = format == SAME ? s->key : floats;
    const int32_t *pages = s->table + s->row[b] * s->table_stride;
    float q[s->heads * dim], one_head[BLOCK], *score = s->score + b * s->heads * s->width;
    for (int64_t i = 0; i < s->heads * dim; i += LANES)
        put(q, i, load(s->q, b * s->q_stride + i, bf16), 0);
    for (int64_t u = first; u < end; u++) {
        const int64_t behind = (u + 1) * s->rule.unit;
        for (int64_t p = u * s->rule.unit; p < behind; p += BLOCK) {
            int64_t at[BLOCK];
            for (int j = 0; j < BLOCK; j++) {       /* past the end: the first again, which changes no maximum */
                int64_t token = p + j < behind ? p + j : p;
                at[j] = pages[token / s->page_size] * s->page_stride + token % s->page_size * s->key_stride;
                if (format != SAME) {
                    unpack((const char *)s->key + at[j] * (format == BF16 ? 2 : 1), dim, dim, format,
                           floats + j * dim);
                    at[j] = j * dim;
                }
            }
            for (int64_t i = 0; i < s->heads; i++) {
                float *best = score + i * s->width + u;
                score_block(q + i * dim, keys, at, dim, key_bf16, one_head);
                for (int j = 0; j < BLOCK; j++)
                    *best = (j == 0 && p == u * s->rule.unit) || one_head[j] > *best ? one_head[j] : *best;
            }
        }
    }
}

#define RUN_AS(dim, bf16, format) \
    _Pragma("omp parallel num_threads(threads)") \
    { \
        _Pragma("omp for schedule(dynamic)") \
        for (int64_t i = 0; i < s->queries * tasks; i++) { \
            int64_t b = i / tasks, first, end, from = i % tasks * each; \
            scored(&s->rule, s->position[b], &first, &end); \
            if (num_taken(&s->rule, s->position[b], s->topk) >= end - first) \
                continue; \
            end = end < from + each ? end : from + each; \
            from = from > first ? from : first; \
            if (from < end) \
                score_blocks(s, b, from, end, dim, bf16, format); \
        } \
        _Pragma("omp for schedule(dynamic)") \
        for (int64_t i = 0; i < s->queries * s->heads; i++) \
            keep_units(&s->rule, s->position[i / s->heads], s->topk, s->score + i * s->width, \
                       s->chosen + i * s->topk, s->topk); \
    }

int penstock_blocks(const Blocks *s, int64_t dim, int bf16, int format, int threads)
{
    const int64_t each = s->rule.unit < TASK ? TASK / s->rule.unit : 1, tasks = (s->width + each - 1) / each;
    #define RUN(dim, bf16) RUN_AS(dim, bf16, SAME)
    if (format == SAME) {
        BY_SHAPE(32, 128)
    #undef RUN
    #define RUN(dim, bf16) RUN_AS(dim, bf16, FP8)
    } else if (format == FP8) {
        BY_SHAPE(32, 128)
    } else {
        RUN_AS(dim, 0, BF16)
    }
    return 0;
}
