/* Attention of a chunk of queries of one row over its pages, of bf16 on AMX, with an online softmax
 * (arXiv:1805.02867). A page's keys and values are packed once for all queries. A query meets its keys in blocks
 * that begin at multiples of KEYS, so its result does not depend on the chunk that it is in.
 *
 *   T queries   S context   N query heads   K KV heads   g = N / K   G page size   H head dim
 */
#include <float.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "amx.h"
#include "calls.h"

typedef struct {
    Decode step;                /* num_queries T; `table` is the row's own; but for queries and partial */
    int64_t context, head_dim;
    int64_t begin;              /* position of its first page, a whole number of pages; what is before is not read */
} Chunk;

/* Whether this process may run it. */
int penstock_chunk_runs(const void *none, int threads)
{
    (void)none, (void)threads;
    return AMX && amx_granted();
}

#if AMX
#define KEYS 128                /* of a block */
#define QUERIES (2 * AMX_ROWS)  /* of a block */

/* Keys n to n + 15, and pairs of values, as AMX wants them; zeros behind the context and before its first page.
 *   k: [H / 2, 16, 2]: two dimensions of a key side by side
 *   v: [H / 16, 16, 16, 2] of 32 of them: two values of a dimension side by side */
static void pack(const Chunk *a, int64_t head, int64_t n, uint32_t *k, uint32_t *v)
{
    const Decode *s = &a->step;
    const uint16_t *key[32], *value[32];
    static const uint16_t zeros[1024];
    const int64_t H = a->head_dim;
    for (int64_t j = 0; j < 32; j++) {
        const int64_t at = n + j >= a->begin && n + j < a->context
            ? s->table[(n + j - a->begin) / s->page_size] * s->page_stride + head * s->head_stride + (n + j) % s->page_size * s->token_stride : -1;
        key[j] = at < 0 ? zeros : (const uint16_t *)s->k + at;
        value[j] = at < 0 ? zeros : (const uint16_t *)s->v + at;
    }
    for (int64_t block = 0; block < 2; block++)
        for (int64_t d = 0; d < H / 2; d++)
            for (int64_t j = 0; j < 16; j++)
                memcpy(k + block * 8 * H + d * 16 + j, key[block * 16 + j] + 2 * d, 4);
    for (int64_t d = 0; d < H; d += 16)
        for (int64_t j = 0; j < 16; j++) {
            const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(value[2 * j] + d)));
            const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(value[2 * j + 1] + d)));
            _mm512_storeu_si512(v + d * 16 + j * 16, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
}

/* score[r][j] = q[r] . key j, of QUERIES rows and the first `keys` of a block, a multiple of 32. */
static void scores(const Chunk *a, const uint16_t *q, const uint32_t *k, float *score, int64_t keys)
{
    const int64_t H = a->head_dim, stride = 2 * a->step.q_stride;
    for (int64_t j = 0; j < keys; j += 32) {
        const uint32_t *left = k + j / 16 * 8 * H, *right = left + 8 * H;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < H; d += 32) {
            _tile_loadd(4, q + d, stride);
            _tile_loadd(5, q + AMX_ROWS * a->step.q_stride + d, stride);
            _tile_loadd(6, left + d * 8, 64);
            _tile_loadd(7, right + d * 8, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, score + j, 4 * KEYS);
        _tile_stored(1, score + j + 16, 4 * KEYS);
        _tile_stored(2, score + AMX_ROWS * KEYS + j, 4 * KEYS);
        _tile_stored(3, score + AMX_ROWS * KEYS + j + 16, 4 * KEYS);
    }
}

/* out[r] += weight[r] . values, of as many. */
static void values(const Chunk *a, const uint16_t *weight, const uint32_t *v, float *out, int64_t keys)
{
    const int64_t H = a->head_dim;
    __asm__ volatile ("" ::: "memory");         /* gcc 12 does not know that a tile is loaded from memory */
    for (int64_t d = 0; d < H; d += 32) {
        float *low = out + d, *high = out + AMX_ROWS * H + d;
        _tile_loadd(0, low, 4 * H);
        _tile_loadd(1, low + 16, 4 * H);
        _tile_loadd(2, high, 4 * H);
        _tile_loadd(3, high + 16, 4 * H);
        for (int64_t j = 0; j < keys; j += 32) {
            const uint32_t *pairs = v + j / 32 * 16 * H + d * 16;
            _tile_loadd(4, weight + j, 2 * KEYS);
            _tile_loadd(5, weight + AMX_ROWS * KEYS + j, 2 * KEYS);
            _tile_loadd(6, pairs, 64);
            _tile_loadd(7, pairs + 256, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, low, 4 * H);
        _tile_stored(1, low + 16, 4 * H);
        _tile_stored(2, high, 4 * H);
        _tile_stored(3, high + 16, 4 * H);
    }
}

/* 2^x for x <= 0, to 3e-6 of it. */
static inline __m512 power(__m512 x)
{
    x = _mm512_max_ps(_mm512_set1_ps(-126), x);         /* of a NaN it is the second: a NaN stays one */
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.3333558e-3f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1));
    return _mm512_scalef_ps(y, whole);
}

/* cap * tanh(x / cap). */
static inline __m512 capped(__m512 x, __m512 cap)
{
    x = _mm512_div_ps(x, cap);
    const __m512 one = _mm512_set1_ps(1), size = _mm512_abs_ps(x);
    const __m512 share = power(_mm512_mul_ps(_mm512_set1_ps(-2.88539008f), size));     /* e^(-2 |x|) */
    const __m512 tanh = _mm512_div_ps(_mm512_sub_ps(one, share), _mm512_add_ps(one, share));
    const __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mul_ps(cap, _mm512_mask_sub_ps(tanh, below, _mm512_setzero_ps(), tanh));
}

/* 1 / (total + 2^sink): a sink counts, and has no value. */
static inline __m512 beside_sink(float total, float sink)
{
    const __m512 small = power(_mm512_set1_ps(sink > 0 ? -sink : sink)), one = _mm512_set1_ps(1);
    const __m512 sum = _mm512_set1_ps(total);
    return sink > 0 ? _mm512_div_ps(small, _mm512_fmadd_ps(sum, small, one))
                    : _mm512_div_ps(one, _mm512_add_ps(sum, small));
}

/* One row's scores of a block, of which it sees [from, seen), as weights; what came before shrinks. `cap` is 0 or of
 * scores times `scale`. */
static void soften(const float *score, int64_t from, int64_t seen, float scale, float cap, uint16_t *weight,
                   float *top, float *total, float *out, int64_t H)
{
    const __m512 none = _mm512_set1_ps(-FLT_MAX), factor = _mm512_set1_ps(scale);
    __m512 x[KEYS / 16], most = none, sum = _mm512_setzero_ps();
    __mmask16 sees[KEYS / 16];
    #pragma GCC unroll 8
    for (int i = 0; i < KEYS / 16; i++) {
        const int64_t left = seen - 16 * i, before = from - 16 * i;
        sees[i] = left >= 16 ? 0xffff : left <= 0 ? 0 : (1u << left) - 1;
        if (before > 0)
            sees[i] &= before >= 16 ? 0 : 0xffffu << before;
        x[i] = _mm512_mul_ps(_mm512_loadu_ps(score + 16 * i), factor);
        if (cap > 0)
            x[i] = capped(x[i], _mm512_set1_ps(cap));
        x[i] = _mm512_mask_mov_ps(none, sees[i], x[i]);
        most = _mm512_max_ps(most, x[i]);
    }
    const float new = _mm512_reduce_max_ps(most);
    if (new > *top) {
        const __m512 share = power(_mm512_set1_ps(*top - new));
        for (int64_t d = 0; d < H; d += 16)
            _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), share));
        *total *= _mm512_cvtss_f32(share), *top = new;
    }
    #pragma GCC unroll 8
    for (int i = 0; i < KEYS / 16; i++) {
        x[i] = _mm512_maskz_mov_ps(sees[i], power(_mm512_sub_ps(x[i], _mm512_set1_ps(*top))));
        sum = _mm512_add_ps(sum, x[i]);
    }
    #pragma GCC unroll 4
    for (int i = 0; i < KEYS / 16; i += 2)
        _mm512_storeu_si512(weight + 16 * i, (__m512i)_mm512_cvtne2ps_pbh(x[i + 1], x[i]));
    *total += _mm512_reduce_add_ps(sum);
}

/* Queries `first` and on, QUERIES of them, of the heads of one KV head; the first `done` are another's. */
static void block(const Chunk *a, int64_t kv_head, int64_t first, int64_t done, const uint32_t *k, const uint32_t *v,
                  float *work)
{
    const Decode *s = &a->step;
    const int64_t H = a->head_dim, group = s->heads / s->kv_heads, before = a->context - s->num_queries + first;
    const float scale = s->scale * 1.44269504f, cap = s->softcap * 1.44269504f;        /* powers of two */
    const int64_t hides = s->window ? before + 1 - s->window : 0;       /* of the first query; each later one a key more */
    float *score = work, *out = score + QUERIES * KEYS, *top = out + group * QUERIES * H;
    float *total = top + group * QUERIES;
    uint16_t *weight = (uint16_t *)(total + group * QUERIES);
    memset(out, 0, group * QUERIES * H * sizeof(float));
    for (int64_t i = 0; i < group * QUERIES; i++)
        top[i] = -FLT_MAX, total[i] = 0;
    for (int64_t n = hides > 0 ? hides / KEYS * KEYS : 0; n < before + QUERIES; n += KEYS) {
        const int64_t seen = (before + QUERIES - n + 31) / 32 * 32, keys = seen < KEYS ? seen : KEYS;
        for (int64_t g = 0; g < group; g++) {
            const uint16_t *q = (const uint16_t *)s->q + first * s->q_stride + (kv_head * group + g) * H;
            scores(a, q, k + n * H / 2, score, keys);
            for (int64_t r = 0; r < QUERIES; r++)
                soften(score + r * KEYS, s->window ? hides + r - n : 0, before + r + 1 - n, scale, cap, weight + r * KEYS, top + g * QUERIES + r,
                       total + g * QUERIES + r, out + (g * QUERIES + r) * H, H);
            values(a, weight, v + n * H / 2, out + g * QUERIES * H, keys);
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t r = done; r < QUERIES; r++) {
            uint16_t *to = (uint16_t *)s->out + ((first + r) * s->heads + kv_head * group + g) * H;
            __m512 share = _mm512_set1_ps(1 / total[g * QUERIES + r]);
            if (s->sinks)
                share = beside_sink(total[g * QUERIES + r],
                                    s->sinks[kv_head * group + g] * 1.44269504f - top[g * QUERIES + r]);
            for (int64_t d = 0; d < H; d += 16)
                _mm256_storeu_si256((void *)(to + d), (__m256i)_mm512_cvtneps_pbh(
                    _mm512_mul_ps(_mm512_loadu_ps(out + (g * QUERIES + r) * H + d), share)));
        }
}

/* H a multiple of 32, at most 1,024; T at least QUERIES. 0, or 1: no memory, or 2: a page is absent. */
int penstock_chunk(const Chunk *a, int threads)
{
    const Decode *s = &a->step;
    for (int64_t n = a->begin; n < a->context; n += s->page_size)
        if (s->table[(n - a->begin) / s->page_size] < 0)
            return 2;
    const int64_t H = a->head_dim, padded = (a->context + KEYS - 1) / KEYS * KEYS, group = s->heads / s->kv_heads;
    const int64_t words = padded * H / 2, blocks = (s->num_queries + QUERIES - 1) / QUERIES;
    const int64_t each = (QUERIES * KEYS * 3 / 2 + group * QUERIES * (H + 2) + 15) / 16 * 16;      /* floats */
    uint32_t *packed = aligned_alloc(64, 2 * s->kv_heads * words * sizeof(uint32_t));
    float *work = aligned_alloc(64, threads * each * sizeof(float));
    if (!packed || !work) {
        free(packed), free(work);
        return 1;
    }
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        #pragma omp for collapse(2)
        for (int64_t head = 0; head < s->kv_heads; head++)
            for (int64_t n = a->begin / KEYS * KEYS; n < padded; n += 32)
                pack(a, head, n, packed + 2 * head * words + n * H / 2, packed + (2 * head + 1) * words + n * H / 2);
        amx_begin(QUERIES);
        #pragma omp for schedule(dynamic) collapse(2)
        for (int64_t head = 0; head < s->kv_heads; head++)
            for (int64_t b = blocks - 1; b >= 0; b--) {         /* the longest first */
                const int64_t begin = b * QUERIES, last = s->num_queries - QUERIES;
                const int64_t first = begin < last ? begin : last;
                block(a, head, first, begin - first, packed + 2 * head * words, packed + (2 * head + 1) * words,
                      work + omp_get_thread_num() * each);
            }
        amx_end();
    }
    free(packed), free(work);
    return 0;
}
#else
int penstock_chunk(const Chunk *a, int threads)
{
    (void)a, (void)threads;
    return 1;
}
#endif
