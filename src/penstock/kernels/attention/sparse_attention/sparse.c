/* Attention of one query per row over chosen units, which differ from KV head to KV head.
 *
 * The tokens of the units, in order of their positions, are cut into chunks and blocks exactly as in
 * paged_attention's decode.c: with all units chosen, both compute the same sums in the same order.
 *
 *   N query heads   K KV heads   g = N / K   H head dim, a multiple of 16   C chosen units
 */
#include <math.h>
#include "fp8.h"

typedef struct {
    const void *q, *pool;           /* q [B, N, H], strided in B; pool [P, K, 2, G, H] */
    void *out;                      /* [B, N, H] */
    float *lse, *partial;           /* [B, N]; [B, N, chunks, H + 2] */
    const int32_t *chosen, *slot, *position;
    int64_t q_stride, page_stride, head_stride, plane_stride, token_stride;     /* elements */
    int64_t codes;                  /* whether the pool is of codes, uint8 [P, K, 2, G, W], as in types/fp8.py */
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
    const void *v = (const char *)s->pool + s->plane_stride * (s->codes ? 1 : bf16 ? 2 : 4);
    float q[group * dim], weight[group * CHUNK];
    float *partial = s->partial + ((b * s->kv_heads + k) * group * s->chunks + c) * width;
    float tile[s->codes ? BLOCK * dim : 1];
    int64_t at[CHUNK], lies[BLOCK];

    for (int64_t i = 0; i < group * dim; i += LANES)
        put(q, i, load(s->q, b * s->q_stride + k * group * dim + i, bf16) * s->scale, 0);
    for (int64_t j = 0, n = first / s->unit, place = first % s->unit; j < count; j++) {
        at[j] = slot[n] / s->page_units * s->page_stride + k * s->head_stride
                + (slot[n] % s->page_units * s->unit + place) * s->token_stride;
        if (++place == s->unit) {
            place = 0;
            n++;
        }
    }
    /* The last block repeats the first slot, with weight zero: nothing else may be read. */
    for (int64_t j = count; j < padded; j++)
        at[j] = at[0];
    for (int64_t j = 0; j < padded; j += BLOCK) {
        if (s->codes)
            unpack_block(s->pool, at + j, dim, tile, lies);
        for (int64_t n = 0; n < group; n++)
            if (s->codes)
                score_block(q + n * dim, tile, lies, dim, 0, weight + n * CHUNK + j);
            else
                score_block(q + n * dim, s->pool, at + j, dim, bf16, weight + n * CHUNK + j);
    }
    for (int64_t n = 0; n < group; n++)
        begin_part(weight + n * CHUNK, count, padded, partial + n * next, dim);
    for (int64_t j = 0; j < padded; j += BLOCK)
        if (s->codes) {
            unpack_block(v, at + j, dim, tile, lies);
            value_heads(partial + 2, next, weight + j, tile, lies, group, dim, 0);
        } else {
            value_heads(partial + 2, next, weight + j, v, at + j, group, dim, bf16);
        }
}

/* The chunks of one query and query head into its output. */
INLINE void merge_head(const Sparse *s, int64_t b, int64_t n, int64_t dim, int bf16)
{
    const int64_t heads = s->kv_heads * s->group, width = dim + 2, out = (b * heads + n) * dim;
    const int64_t chunks = (tokens(s, b, n / s->group) + CHUNK - 1) / CHUNK;
    const float *part = s->partial + (b * heads + n) * s->chunks * width;
    float of[2];
    merge_parts(part, width, chunks, dim, s->out, out, bf16, NULL, of);
    s->lse[b * heads + n] = chunks ? of[0] + logf(of[1]) : of[0];
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
    BY_SHAPE(64, 128)
    return 0;
}
