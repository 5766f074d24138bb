/* Attention of one query per row over chosen units, which differ from KV head to KV head.
 *
 * The tokens of the units, in order of their positions, are cut into chunks and blocks exactly as in
 * paged_attention's decode.c: with all units chosen, both compute the same sums in the same order.
 *
 *   N query heads   K KV heads   g = N / K   H head dim, a multiple of 16   C chosen units
 */
#include <math.h>
#include "vectors.h"

typedef struct {
    const void *q, *pool;           /* q [B, N, H], strided in B; pool [P, K, 2, G, H] */
    void *out;                      /* [B, N, H] */
    float *lse, *partial;           /* [B, N]; [B, N, chunks, H + 2] */
    const int32_t *chosen, *slot, *position;
    int64_t q_stride, page_stride, head_stride, plane_stride;                   /* elements */
    int64_t queries, kv_heads, group, chosen_width, chunks, unit, page_units;
    float scale;
} Sparse;

/* Tokens that query b sees of what was chosen for head k. */
INLINE int64_t tokens(const Sparse *s, int64_t b, int64_t k)
{
    const int32_t *chosen = s->chosen + (b * s->kv_heads + k) * s->chosen_width;
    int64_t low = 0, high = s->chosen_width;
    while (low < high) {                            /* the first -1 */
        int64_t middle = (low + high) / 2;
        if (chosen[middle] < 0)
            high = middle;
        else
            low = middle + 1;
    }
    if (low == 0)
        return 0;
    int64_t last = s->position[b] + 1 - chosen[low - 1] * s->unit;
    last = last < 0 ? 0 : last < s->unit ? last : s->unit;
    return (low - 1) * s->unit + last;
}

INLINE void run_chunk(const Sparse *s, int64_t b, int64_t k, int64_t c, int64_t dim, int bf16)
{
    const int64_t first = c * CHUNK, left = tokens(s, b, k) - first;
    const int64_t count = left < CHUNK ? left : CHUNK, group = s->group, width = dim + 2;
    if (count <= 0)
        return;
    const int64_t padded = (count + BLOCK - 1) / BLOCK * BLOCK, next = s->chunks * width;
    const int32_t *slot = s->slot + (b * s->kv_heads + k) * s->chosen_width;
    const void *v = (const char *)s->pool + s->plane_stride * (bf16 ? 2 : 4);
    float q[group * dim], weight[group * CHUNK];
    float *partial = s->partial + ((b * s->kv_heads + k) * group * s->chunks + c) * width;
    int64_t at[CHUNK];

    for (int64_t i = 0; i < group * dim; i += LANES)
        put(q, i, load(s->q, b * s->q_stride + k * group * dim + i, bf16) * s->scale, 0);
    for (int64_t j = 0, n = first / s->unit, place = first % s->unit; j < count; j++) {
        at[j] = slot[n] / s->page_units * s->page_stride + k * s->head_stride
                + (slot[n] % s->page_units * s->unit + place) * dim;
        if (++place == s->unit) {
            place = 0;
            n++;
        }
    }
    /* The last block repeats the first slot, with weight zero: nothing else may be read. */
    for (int64_t j = count; j < padded; j++)
        at[j] = at[0];
    for (int64_t j = 0; j < padded; j += BLOCK)
        for (int64_t n = 0; n < group; n++)
            put(weight, n * CHUNK + j, score_block(q + n * dim, s->pool, at + j, dim, bf16), 0);
    for (int64_t n = 0; n < group; n++) {
        float *w = weight + n * CHUNK, top = w[0], sum = 0.0f;
        #pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < count; j++)
            top = w[j] > top ? w[j] : top;
        #pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < count; j++) {
            w[j] = exp_negative(w[j] - top);
            sum += w[j];
        }
        memset(w + count, 0, (padded - count) * sizeof(float));
        partial[n * next] = top;
        partial[n * next + 1] = sum;
        memset(partial + n * next + 2, 0, dim * sizeof(float));
    }
    for (int64_t j = 0; j < padded; j += BLOCK)
        value_heads(partial + 2, next, weight + j, v, at + j, group, dim, bf16);
}

/* The chunks of one query and query head into its output. */
INLINE void merge_head(const Sparse *s, int64_t b, int64_t n, int64_t dim, int bf16)
{
    const int64_t heads = s->kv_heads * s->group, width = dim + 2, out = (b * heads + n) * dim;
    const int64_t chunks = (tokens(s, b, n / s->group) + CHUNK - 1) / CHUNK;
    const float *part = s->partial + (b * heads + n) * s->chunks * width;
    float top = chunks ? part[0] : -INFINITY, total = 0.0f, sum[dim];
    for (int64_t c = 1; c < chunks; c++)
        top = part[c * width] > top ? part[c * width] : top;
    memset(sum, 0, dim * sizeof(float));
    for (int64_t c = 0; c < chunks; c++) {
        float share = exp_negative(part[c * width] - top);
        total += share * part[c * width + 1];
        for (int64_t d = 0; d < dim; d += LANES)
            put(sum, d, load(sum, d, 0) + share * load(part, c * width + 2 + d, 0), 0);
    }
    for (int64_t d = 0; d < dim; d += LANES)
        put(s->out, out + d, load(sum, d, 0) / (chunks ? total : 1.0f), bf16);
    s->lse[b * heads + n] = chunks ? top + logf(total) : -INFINITY;
}

#define RUN(dim, bf16) \
    _Pragma("omp parallel num_threads(threads)") \
    { \
        _Pragma("omp for schedule(dynamic)") \
        for (int64_t i = 0; i < pairs * s->chunks; i++) \
            run_chunk(s, i / s->chunks / s->kv_heads, i / s->chunks % s->kv_heads, i % s->chunks, dim, \
                      bf16); \
        _Pragma("omp for schedule(static)") \
        for (int64_t i = 0; i < pairs * s->group; i++) \
            merge_head(s, i / (s->kv_heads * s->group), i % (s->kv_heads * s->group), dim, bf16); \
    }

int penstock_sparse(const Sparse *s, int64_t dim, int bf16, int threads)
{
    const int64_t pairs = s->queries * s->kv_heads;
    if (dim == 64 && bf16) {
        RUN(64, 1)
    } else if (dim == 64) {
        RUN(64, 0)
    } else if (dim == 128 && bf16) {
        RUN(128, 1)
    } else if (dim == 128) {
        RUN(128, 0)
    } else if (bf16) {
        RUN(dim, 1)
    } else {
        RUN(dim, 0)
    }
    return 0;
}
