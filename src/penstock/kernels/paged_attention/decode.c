/* Attention of decode rows over a paged pool, for any CPU that gcc 12 or clang makes vectors for.
 *
 * A row's context is cut into chunks of at most CHUNK tokens, a chunk into blocks of BLOCK slots that
 * are read with all their KV heads, as they lie in memory. Each chunk leaves (max, sum, accumulator)
 * in `partial`; the chunks of a row are merged at the end. Chunks depend neither on the batch nor on
 * the thread count, hence neither do results.
 *
 *   N query heads   K KV heads   g = N / K   H head dim, a multiple of 16   G page size
 */
#include "vectors.h"

typedef struct {
    const void *q, *k, *v;          /* q [T, N, H], strided in T; pools [slots, K, H] */
    void *out;                      /* [T, N, H] */
    int64_t q_stride;               /* elements */
    const int64_t *pages;           /* of all rows, one after the other */
    const int64_t *chunks;          /* [num_chunks, 4]: token, place in pages, first position, end */
    const int64_t *rows;            /* [num_rows, 3]: token, first chunk, chunks */
    float *partial;                 /* [num_chunks, N, H + 2] */
    int64_t num_chunks, num_rows, heads, kv_heads, page_size;
    float scale;
} Step;

INLINE void run_chunk(const Step *s, int64_t index, int64_t dim, int bf16)
{
    const int64_t *chunk = s->chunks + 4 * index, *pages = s->pages + chunk[1];
    const int64_t first = chunk[2], count = chunk[3] - first, size = s->page_size;
    const int64_t heads = s->heads, kv_heads = s->kv_heads, group = heads / kv_heads;
    const int64_t padded = (count + BLOCK - 1) / BLOCK * BLOCK, width = dim + 2;
    float q[heads * dim], weight[heads * CHUNK];
    float *partial = s->partial + index * heads * width;
    int64_t slot[CHUNK], at[BLOCK];

    for (int64_t i = 0; i < heads * dim; i += LANES)
        put(q, i, load(s->q, chunk[0] * s->q_stride + i, bf16) * s->scale, 0);
    for (int64_t j = 0, page = first / size, place = first % size; j < count; j++) {
        slot[j] = (pages[page] * size + place) * kv_heads * dim;
        if (++place == size) {
            place = 0;
            page++;
        }
    }
    /* The last block repeats the first slot, with weight zero: nothing else may be read. */
    for (int64_t j = count; j < padded; j++)
        slot[j] = slot[0];
    for (int64_t j = 0; j < padded; j += BLOCK)
        for (int64_t h = 0; h < kv_heads; h++) {
            for (int i = 0; i < BLOCK; i++)
                at[i] = slot[j + i] + h * dim;
            for (int64_t n = h * group; n < (h + 1) * group; n++)
                put(weight, n * CHUNK + j, score_block(q + n * dim, s->k, at, dim, bf16), 0);
        }
    for (int64_t n = 0; n < heads; n++) {
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
        partial[n * width] = top;
        partial[n * width + 1] = sum;
        memset(partial + n * width + 2, 0, dim * sizeof(float));
    }
    for (int64_t j = 0; j < padded; j += BLOCK)
        for (int64_t h = 0; h < kv_heads; h++) {
            for (int i = 0; i < BLOCK; i++)
                at[i] = slot[j + i] + h * dim;
            value_heads(partial + h * group * width + 2, width, weight + h * group * CHUNK + j,
                        s->v, at, group, dim, bf16);
        }
}

/* The chunks of one row into its output. */
INLINE void merge_row(const Step *s, int64_t index, int64_t dim, int bf16)
{
    const int64_t *row = s->rows + 3 * index, heads = s->heads, width = dim + 2;
    const int64_t next = heads * width;
    for (int64_t n = 0; n < heads; n++) {
        const float *part = s->partial + (row[1] * heads + n) * width;
        float top = part[0], total = 0.0f, sum[dim];
        for (int64_t c = 1; c < row[2]; c++)
            top = part[c * next] > top ? part[c * next] : top;
        memset(sum, 0, dim * sizeof(float));
        for (int64_t c = 0; c < row[2]; c++) {
            float share = exp_negative(part[c * next] - top);
            total += share * part[c * next + 1];
            for (int64_t d = 0; d < dim; d += LANES)
                put(sum, d, load(sum, d, 0) + share * load(part, c * next + 2 + d, 0), 0);
        }
        for (int64_t d = 0; d < dim; d += LANES)
            put(s->out, (row[0] * heads + n) * dim + d, load(sum, d, 0) / total, bf16);
    }
}

/* Head dim and type are literals inside the parallel region: variables would not survive its
 * outlining, and a constant head dim keeps a head in registers. */
#define RUN(dim, bf16) \
    _Pragma("omp parallel num_threads(threads)") \
    { \
        _Pragma("omp for schedule(dynamic)") \
        for (int64_t i = 0; i < s->num_chunks; i++) \
            run_chunk(s, i, dim, bf16); \
        _Pragma("omp for schedule(static)") \
        for (int64_t i = 0; i < s->num_rows; i++) \
            merge_row(s, i, dim, bf16); \
    }

void penstock_decode(const Step *s, int64_t dim, int bf16, int threads)
{
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
}
