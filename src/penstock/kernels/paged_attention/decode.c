/* Attention of decode rows over a paged pool, for any CPU that gcc 12 or clang makes vectors for.
 *
 * A row's context is cut into chunks of at most CHUNK tokens, a chunk into blocks of BLOCK slots that
 * are read with all their KV heads, as they lie in memory. Each chunk leaves (max, sum, accumulator)
 * in `partial`; the chunks of a row are merged at the end. Chunks depend neither on the batch nor on
 * the thread count, hence neither do results.
 *
 *   N query heads   K KV heads   g = N / K   H head dim, a multiple of 16   G page size
 */
#include <stdint.h>
#include <string.h>

#define CHUNK 128
#define BLOCK 16
#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t Half __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t Word __attribute__((vector_size(4 * LANES)));

INLINE Vec load(const void *base, int64_t at, int bf16)
{
    if (!bf16)
        return *(const Vec *)((const float *)base + at);
    Half half = *(const Half *)((const uint16_t *)base + at);
    return (Vec)(__builtin_convertvector(half, Word) << 16);
}

INLINE void put(void *base, int64_t at, Vec value, int bf16)
{
    if (!bf16) {
        *(Vec *)((float *)base + at) = value;
        return;
    }
    Word bits = (Word)value;                    /* to nearest, ties to even; a NaN stays one */
    Word rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Word is_nan = (Word)(value != value);
    *(Half *)((uint16_t *)base + at) =
        __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), Half);
}

/* e^x for x <= 0 to 2e-7, 0 below -87. Written out so that loops over it become vectors. */
INLINE float exp_negative(float x)
{
    float t = x * 1.44269504f;
    t = t < -126.0f ? -126.0f : t;
    float n = __builtin_rintf(t), f = t - n;
    float p = 1.5353362e-4f;
    p = p * f + 1.3398874e-3f;
    p = p * f + 9.6184373e-3f;
    p = p * f + 5.5503324e-2f;
    p = p * f + 2.4022648e-1f;
    p = p * f + 6.9314720e-1f;
    p = p * f + 1.0f;
    union { int32_t i; float f; } scale = { ((int32_t)n + 127) << 23 };
    return x < -87.0f ? 0.0f : p * scale.f;
}

/* Lane i of the result is the sum of the lanes of a[i]: 16 sums by halving, two vectors into one. */
#define FOLD(a, b, ...) (__builtin_shufflevector(a, b, __VA_ARGS__))
#define LO8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HI8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LO4 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define HI4 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#define LO2 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29
#define HI2 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31
#define LO1 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define HI1 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
INLINE Vec sums(Vec *a)
{
    /* Neighbours first and the widest fold last, so that sums end up in order. */
    for (int i = 0; i < 8; i++)
        a[i] = FOLD(a[2 * i], a[2 * i + 1], LO8) + FOLD(a[2 * i], a[2 * i + 1], HI8);
    for (int i = 0; i < 4; i++)
        a[i] = FOLD(a[2 * i], a[2 * i + 1], LO4) + FOLD(a[2 * i], a[2 * i + 1], HI4);
    for (int i = 0; i < 2; i++)
        a[i] = FOLD(a[2 * i], a[2 * i + 1], LO2) + FOLD(a[2 * i], a[2 * i + 1], HI2);
    return FOLD(a[0], a[1], LO1) + FOLD(a[0], a[1], HI1);
}

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

/* score[j] = q . k[slot[j]] for BLOCK slots and one query head. */
INLINE Vec score_block(const float *q, const void *k, const int64_t *at, int64_t dim, int bf16)
{
    Vec sum[BLOCK] = { 0 };
    for (int64_t d = 0; d < dim; d += LANES) {
        Vec query = load(q, d, 0);
        for (int j = 0; j < BLOCK; j++)
            sum[j] += query * load(k, at[j] + d, bf16);
    }
    return sums(sum);
}

/* sum[i][d .. d + vectors * LANES) += weight[i][j] * v[slot[j]], for up to four query heads. */
INLINE void value_block(float *sum, int64_t width, const float *weight, const void *v,
                        const int64_t *at, int heads, int vectors, int bf16)
{
    Vec total[4][4];
    for (int i = 0; i < heads; i++)
        for (int d = 0; d < vectors; d++)
            total[i][d] = load(sum, i * width + d * LANES, 0);
    for (int j = 0; j < BLOCK; j++)
        for (int d = 0; d < vectors; d++) {
            Vec value = load(v, at[j] + d * LANES, bf16);
            for (int i = 0; i < heads; i++)
                total[i][d] += weight[i * CHUNK + j] * value;
        }
    for (int i = 0; i < heads; i++)
        for (int d = 0; d < vectors; d++)
            put(sum, i * width + d * LANES, total[i][d], 0);
}

INLINE void value_heads(float *sum, int64_t width, const float *weight, const void *v,
                        const int64_t *at, int64_t heads, int64_t dim, int bf16)
{
    for (int64_t n = 0; n < heads; n += 4, sum += 4 * width, weight += 4 * CHUNK)
        for (int64_t d = 0; d < dim; ) {
            const int vectors = dim - d >= 4 * LANES ? 4 : 1;
            int64_t place[BLOCK];
            for (int j = 0; j < BLOCK; j++)
                place[j] = at[j] + d;
            #define CASE(count, wide) \
                value_block(sum + d, width, weight, v, place, count, wide, bf16)
            switch ((heads - n > 4 ? 4 : heads - n) * 8 + vectors) {
            case 12: CASE(1, 4); break;
            case 20: CASE(2, 4); break;
            case 28: CASE(3, 4); break;
            case 36: CASE(4, 4); break;
            case 9: CASE(1, 1); break;
            case 17: CASE(2, 1); break;
            case 25: CASE(3, 1); break;
            case 33: CASE(4, 1); break;
            }
            d += vectors * LANES;
        }
}

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
