/* The tokens that a lightning indexer chooses: weighted sums of positive scores, and the largest.
 *
 * Tokens are scored BLOCK at a time; a token's sum has one order wherever it stands in a block, so
 * scores depend neither on the batch nor on the thread count.
 *
 *   I index heads   J index head dim, a multiple of 16   G page size
 */
#include "fp8.h"

#define TASK 512                /* tokens that one thread scores at a time */

typedef struct {
    const void *q, *key;            /* q [B, I, J]; key [P, G, J] */
    const float *weight;            /* [B, I] */
    const int32_t *table, *row, *position;
    float *score;                   /* [B, width] */
    int32_t *chosen;                /* [B, topk] */
    int64_t page_stride, key_stride, table_stride;          /* elements */
    int64_t queries, heads, page_size, width, topk;
} Index;

INLINE void score_tokens(const Index *s, int64_t b, int64_t first, int64_t end, int64_t dim, int bf16,
                         int format)
{
    const int key_bf16 = format == SAME && bf16;
    float floats[format == SAME ? 1 : BLOCK * dim];
    const void *const keys = format == SAME ? s->key : floats;
    const int32_t *pages = s->table + s->row[b] * s->table_stride;
    float q[s->heads * dim], one_head[BLOCK], *score = s->score + b * s->width;
    for (int64_t i = 0; i < s->heads * dim; i += LANES)
        put(q, i, load(s->q, b * s->heads * dim + i, bf16), 0);
    for (int64_t p = first; p < end; p += BLOCK) {
        int64_t at[BLOCK];
        for (int j = 0; j < BLOCK; j++) {           /* past the end: the first again, not kept */
            int64_t token = p + j < end ? p + j : p;
            at[j] = pages[token / s->page_size] * s->page_stride + token % s->page_size * s->key_stride;
            if (format != SAME) {
                unpack((const char *)s->key + at[j] * (format == BF16 ? 2 : 1), dim, dim, format,
                       floats + j * dim);
                at[j] = j * dim;
            }
        }
        float total[BLOCK] = { 0 };
        for (int64_t i = 0; i < s->heads; i++) {
            score_block(q + i * dim, keys, at, dim, key_bf16, one_head);
            for (int j = 0; j < BLOCK; j++)
                total[j] += s->weight[b * s->heads + i] * (one_head[j] > 0.0f ? one_head[j] : 0.0f);
        }
        for (int64_t j = 0; j < BLOCK && p + j < end; j++)
            score[p + j] = total[j];
    }
}

static void choose(const Index *s, int64_t b)
{
    int32_t *out = s->chosen + b * s->topk;
    const int64_t seen = s->position[b] + 1, count = seen < s->topk ? seen : s->topk;
    if (seen > s->topk) {
        largest_scores(s->score + b * s->width, seen, s->topk, out);
    } else {
        for (int64_t i = 0; i < count; i++)
            out[i] = i;
    }
    for (int64_t i = count; i < s->topk; i++)
        out[i] = -1;
}

#define RUN_AS(dim, bf16, format) \
    _Pragma("omp parallel num_threads(threads)") \
    { \
        _Pragma("omp for schedule(dynamic)") \
        for (int64_t i = 0; i < s->queries * tasks; i++) { \
            int64_t b = i / tasks, from = i % tasks * TASK, end = s->position[b] + 1; \
            if (end <= s->topk) \
                continue; \
            end = end < from + TASK ? end : from + TASK; \
            if (from < end) \
                score_tokens(s, b, from, end, dim, bf16, format); \
        } \
        _Pragma("omp for schedule(dynamic)") \
        for (int64_t b = 0; b < s->queries; b++) \
            choose(s, b); \
    }

int penstock_index(const Index *s, int64_t dim, int bf16, int format, int threads)
{
    const int64_t tasks = (s->width + TASK - 1) / TASK;
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
