/* Attention of queries over chosen latent rows: one row is the key of all heads, its first dims the value.
 *
 * A task is some heads of one query over all of its rows, CHUNK by CHUNK with a running maximum: no
 * order of sums depends on how many tasks or threads there are. Rows that are of another type than queries become
 * floats a CHUNK at a time.
 *
 *   N query heads   H row dim   R value dim, both multiples of 16   S chosen rows
 */
#include <math.h>
#include "fp8.h"

typedef struct {
    const void *q, *pool;           /* q [B, N, H]; pool [P, G, H] */
    void *out;                      /* [B, N, R] */
    float *lse;                     /* [B, N] */
    const int32_t *slot;            /* [B, S] */
    int64_t page_stride, row_stride;                /* elements of the pool */
    int64_t queries, heads, heads_task, chosen, page_size, value_dim;
    float scale;
} Latent;

INLINE void run_task(const Latent *s, int64_t b, int64_t head, int64_t dim, int bf16, int format)
{
    const int row_bf16 = format == SAME && bf16;
    const int64_t left = s->heads - head, heads = left < s->heads_task ? left : s->heads_task;
    const int64_t value = s->value_dim, row = b * s->heads + head;
    const int32_t *slot = s->slot + b * s->chosen;
    float q[heads * dim], weight[heads * CHUNK], sum[heads * value], top[heads], total[heads];
    float floats[format == SAME ? 1 : CHUNK * dim];
    const void *const rows = format == SAME ? s->pool : floats;
    int64_t at[CHUNK];

    for (int64_t i = 0; i < heads * dim; i += LANES)
        put(q, i, load(s->q, row * dim + i, bf16) * s->scale, 0);
    memset(sum, 0, sizeof sum);
    for (int64_t n = 0; n < heads; n++) {
        top[n] = -INFINITY;
        total[n] = 0.0f;
    }
    for (int64_t first = 0; first < s->chosen && slot[first] >= 0; first += CHUNK) {
        int64_t count = 0;
        while (count < CHUNK && first + count < s->chosen && slot[first + count] >= 0) {
            const int64_t n = slot[first + count];
            at[count] = n / s->page_size * s->page_stride + n % s->page_size * s->row_stride;
            if (format != SAME) {
                unpack((const char *)s->pool + at[count] * (format == BF16 ? 2 : 1), dim, value, format,
                       floats + count * dim);
                at[count] = count * dim;
            }
            count++;
        }
        /* The last block repeats the first row, with weight zero: nothing else may be read. */
        const int64_t padded = (count + BLOCK - 1) / BLOCK * BLOCK;
        for (int64_t j = count; j < padded; j++)
            at[j] = at[0];
        for (int64_t j = 0; j < padded; j += BLOCK)
            for (int64_t n = 0; n < heads; n++)
                score_block(q + n * dim, rows, at + j, dim, row_bf16, weight + n * CHUNK + j);
        for (int64_t n = 0; n < heads; n++) {
            float added;
            const float most = weigh(weight + n * CHUNK, count, padded, top[n], &added);
            if (first && most > top[n]) {
                const float share = exp_negative(top[n] - most);
                total[n] *= share;
                for (int64_t d = 0; d < value; d += LANES)
                    put(sum, n * value + d, load(sum, n * value + d, 0) * share, 0);
            }
            top[n] = most;
            total[n] += added;
        }
        for (int64_t j = 0; j < padded; j += BLOCK)
            value_heads(sum, value, weight + j, rows, at + j, heads, value, row_bf16);
    }
    for (int64_t n = 0; n < heads; n++) {
        const float scale = total[n] > 0.0f ? 1.0f / total[n] : 0.0f;
        for (int64_t d = 0; d < value; d += LANES)
            put(s->out, (row + n) * value + d, load(sum, n * value + d, 0) * scale, bf16);
        s->lse[row + n] = total[n] > 0.0f ? top[n] + logf(total[n]) : -INFINITY;
    }
}

int penstock_latent(const Latent *s, int64_t dim, int bf16, int format, int threads)
{
    const int64_t tasks = (s->heads + s->heads_task - 1) / s->heads_task;
    #define RUN(bf16, format) \
        _Pragma("omp parallel for schedule(dynamic) num_threads(threads)") \
        for (int64_t i = 0; i < s->queries * tasks; i++) \
            run_task(s, i / tasks, i % tasks * s->heads_task, dim, bf16, format);
    switch (format * 2 + bf16) {
    case SAME * 2 + 1: RUN(1, SAME) break;
    case SAME * 2: RUN(0, SAME) break;
    case BF16 * 2: RUN(0, BF16) break;
    case FP8 * 2 + 1: RUN(1, FP8) break;
    case FP8 * 2: RUN(0, FP8) break;
    default: return 1;
    }
    return 0;
}
