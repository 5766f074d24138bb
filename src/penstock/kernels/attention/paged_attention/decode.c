/* Attention of decode rows over a paged pool, for any CPU that gcc 12 or clang makes vectors for.
 *
 * A row's context is cut into chunks of at most CHUNK tokens, a chunk into blocks of BLOCK slots. Each chunk leaves (max, sum, accumulator)
 * in `partial`; the chunks of a row are merged at the end. Chunks depend neither on the batch nor on
 * the thread count, hence neither do results. Of a window, whose first chunk may lie before it, earlier pages are
 * not looked at.
 *
 *   N query heads   K KV heads   g = N / K   H head dim, a multiple of 16   P pages   G page size
 */
#include "calls.h"
#include "fp8.h"

/* The first position that a query of this context sees. */
INLINE int64_t seen_from(const Decode *s, int64_t context)
{
    if (s->window)
        return context > s->window ? context - s->window : 0;
    return s->first < context ? s->first : context - 1;
}

/* Scores up to the cap: cap * tanh(score / cap). */
INLINE void cap_scores(float *score, int64_t count, float cap)
{
    #pragma omp simd
    for (int64_t j = 0; j < count; j++) {
        const float x = score[j] / cap, power = exp_negative(x > 0.0f ? -2.0f * x : 2.0f * x);
        const float tanh = cap * (1.0f - power) / (1.0f + power);
        score[j] = x > 0.0f ? tanh : -tanh;
    }
}

/* The query that chunk `index` belongs to: the last whose first chunk is not behind it. */
INLINE int64_t query_of(const Decode *s, int64_t index)
{
    int64_t low = 0, high = s->num_queries;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (s->queries[3 * middle + 2] <= index)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* From block (j, h) to the one that is read next; 0 behind the last. */
INLINE int64_t ahead(const Decode *s, const int64_t *slot, int64_t j, int64_t padded, int64_t h)
{
    if (h + 1 < s->kv_heads)
        return s->head_stride;
    return j + BLOCK < padded ? slot[j + BLOCK] - slot[j] - h * s->head_stride : 0;
}

/* Ask for the block `step` elements behind this one: blocks of other heads and pages lie too far apart
 * for the CPU to guess. Up to twice as fast where a pool is larger than the caches. */
INLINE void fetch(const void *pool, const int64_t *at, int64_t step, int64_t dim, int64_t size)
{
    for (int i = 0; i < BLOCK; i++)
        for (int64_t byte = 0; byte < dim * size; byte += 64)
            __builtin_prefetch((const char *)pool + (at[i] + step) * size + byte, 0, 2);
}

INLINE void run_chunk(const Decode *s, int64_t index, int64_t dim, int bf16)
{
    const int64_t token = query_of(s, index), *query = s->queries + 3 * token;
    const int32_t *pages = s->table + query[0] * s->table_stride;
    const int64_t from = seen_from(s, query[1]), begin = (from / CHUNK + index - query[2]) * CHUNK;
    const int64_t first = begin < from ? from : begin, left = query[1] - first;
    const int64_t whole = begin + CHUNK - first, count = left < whole ? left : whole, size = s->page_size;
    const int64_t heads = s->heads, kv_heads = s->kv_heads, group = heads / kv_heads;
    const int64_t padded = (count + BLOCK - 1) / BLOCK * BLOCK, width = dim + 2;
    float q[heads * dim], weight[heads * CHUNK];
    float *partial = s->partial + index * heads * width;
    const int64_t bytes = s->codes ? 1 : bf16 ? 2 : 4;
    float tile[s->codes ? BLOCK * dim : 1];
    int64_t slot[CHUNK], at[BLOCK], place[BLOCK];

    for (int64_t i = 0; i < heads * dim; i += LANES)
        put(q, i, load(s->q, token * s->q_stride + i, bf16) * s->scale, 0);
    for (int64_t j = 0, page = first / size, token = first % size; j < count; j++) {
        slot[j] = pages[page] * s->page_stride + token * s->token_stride;
        if (++token == size) {
            token = 0;
            page++;
        }
    }
    /* The last block repeats the first slot, with weight zero: nothing else may be read. */
    for (int64_t j = count; j < padded; j++)
        slot[j] = slot[0];
    for (int64_t j = 0; j < padded; j += BLOCK)
        for (int64_t h = 0; h < kv_heads; h++) {
            for (int i = 0; i < BLOCK; i++)
                at[i] = slot[j + i] + h * s->head_stride;
            fetch(s->k, at, ahead(s, slot, j, padded, h), dim, bytes);
            if (s->codes)
                unpack_block(s->k, at, dim, tile, place);
            for (int64_t n = h * group; n < (h + 1) * group; n++)
                if (s->codes)
                    score_block(q + n * dim, tile, place, dim, 0, weight + n * CHUNK + j);
                else
                    score_block(q + n * dim, s->k, at, dim, bf16, weight + n * CHUNK + j);
        }
    for (int64_t n = 0; n < heads; n++) {
        if (s->softcap > 0.0f)
            cap_scores(weight + n * CHUNK, count, s->softcap);
        begin_part(weight + n * CHUNK, count, padded, partial + n * width, dim);
    }
    for (int64_t j = 0; j < padded; j += BLOCK)
        for (int64_t h = 0; h < kv_heads; h++) {
            for (int i = 0; i < BLOCK; i++)
                at[i] = slot[j + i] + h * s->head_stride;
            fetch(s->v, at, ahead(s, slot, j, padded, h), dim, bytes);
            if (s->codes) {
                unpack_block(s->v, at, dim, tile, place);
                value_heads(partial + h * group * width + 2, width, weight + h * group * CHUNK + j, tile, place, group,
                            dim, 0);
            } else {
                value_heads(partial + h * group * width + 2, width, weight + h * group * CHUNK + j, s->v, at, group,
                            dim, bf16);
            }
        }
}

/* The chunks of one query into its output. */
INLINE void merge_query(const Decode *s, int64_t token, int64_t dim, int bf16)
{
    const int64_t *query = s->queries + 3 * token, heads = s->heads, width = dim + 2;
    const int64_t chunks = (query[1] + CHUNK - 1) / CHUNK - seen_from(s, query[1]) / CHUNK;
    for (int64_t n = 0; n < heads; n++) {
        float of[2];
        merge_parts(s->partial + (query[2] * heads + n) * width, heads * width, chunks, dim, s->out,
                    (token * heads + n) * dim, bf16, s->sinks ? s->sinks + n : NULL, of);
    }
}

#define RUN(dim, bf16) \
    _Pragma("omp parallel num_threads(threads)") \
    { \
        _Pragma("omp for schedule(dynamic)") \
        for (int64_t i = 0; i < s->num_chunks; i++) \
            run_chunk(s, i, dim, bf16); \
        _Pragma("omp for schedule(static)") \
        for (int64_t i = 0; i < s->num_queries; i++) \
            merge_query(s, i, dim, bf16); \
    }

void penstock_decode(const Decode *s, int64_t dim, int bf16, int threads)
{
    BY_SHAPE(64, 128)
}
