/* The small operations between a decoder layer's linears: one pass each, float32 or bfloat16 in
 * memory, float32 in registers. A token's result depends on that token alone.
 */
#include <math.h>
#include "vectors.h"

/* Fewer elements than this are done before a second thread has woken up. */
#define SERIAL 16384

INLINE void norm_token(void *h, const void *delta, const void *weight, void *out, int64_t t,
                       int64_t dim, float eps, int bf16)
{
    const int64_t row = t * dim;
    float sum = 0.0f;
    if (delta) {
        #pragma omp simd
        for (int64_t d = 0; d < dim; d++)
            put_one(h, row + d, one(h, row + d, bf16) + one(delta, row + d, bf16), bf16);
    }
    #pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < dim; d++) {
        float x = one(h, row + d, bf16);
        sum += x * x;
    }
    const float scale = 1.0f / sqrtf(sum / dim + eps);
    #pragma omp simd
    for (int64_t d = 0; d < dim; d++)
        put_one(out, row + d, one(h, row + d, bf16) * scale * one(weight, d, bf16), bf16);
}

INLINE void rotate_token(void *x, int64_t stride, const void *cosine, const void *sine, int64_t t,
                         int64_t heads, int64_t dim, int bf16)
{
    const int64_t half = dim / 2, angle = t * dim;
    for (int64_t m = 0; m < heads; m++) {
        const int64_t low = t * stride + m * dim, high = low + half;
        #pragma omp simd
        for (int64_t d = 0; d < half; d++) {
            float a = one(x, low + d, bf16), b = one(x, high + d, bf16);
            put_one(x, low + d, a * one(cosine, angle + d, bf16)
                            + b * one(sine, angle + d, bf16), bf16);
            put_one(x, high + d, b * one(cosine, angle + half + d, bf16)
                             + a * one(sine, angle + half + d, bf16), bf16);
        }
    }
}

/* Rounds after the norm and after the weight, as the definition does. */
INLINE void norm_rotate_token(void *x, int64_t stride, const void *cosine, const void *sine,
                              const void *q_weight, const void *k_weight, int64_t t, int64_t heads,
                              int64_t dim, int64_t queries, float eps, int bf16)
{
    for (int64_t m = 0; m < heads; m++) {
        const int64_t at = t * stride + m * dim;
        const void *weight = m < queries ? q_weight : k_weight;
        float sum = 0.0f;
        #pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < dim; d++) {
            float a = one(x, at + d, bf16);
            sum += a * a;
        }
        const float scale = 1.0f / sqrtf(sum / dim + eps);
        #pragma omp simd
        for (int64_t d = 0; d < dim; d++) {
            put_one(x, at + d, one(x, at + d, bf16) * scale, bf16);
            put_one(x, at + d, one(x, at + d, bf16) * one(weight, d, bf16), bf16);
        }
    }
    rotate_token(x, stride, cosine, sine, t, heads, dim, bf16);
}

INLINE void gate_token(const void *gate_up, int64_t stride, void *out, int64_t t, int64_t width,
                       int bf16)
{
    #pragma omp simd
    for (int64_t i = 0; i < width; i++) {
        float x = one(gate_up, t * stride + i, bf16);
        float silu = x / (1.0f + exp_two((x > 87.0f ? -87.0f : x < -88.0f ? 88.0f : -x) * 1.44269504f));
        put_one(out, t * width + i, silu * one(gate_up, t * stride + width + i, bf16), bf16);
    }
}

/* `bf16` is a literal inside the parallel region: a variable would not survive its outlining. */
#define FOR_TOKENS(elements, call_bf16, call_f32) \
    const int wide = tokens * (elements) > SERIAL; \
    if (bf16) { \
        _Pragma("omp parallel for if(wide) num_threads(threads)") \
        for (int64_t t = 0; t < tokens; t++) \
            call_bf16; \
    } else { \
        _Pragma("omp parallel for if(wide) num_threads(threads)") \
        for (int64_t t = 0; t < tokens; t++) \
            call_f32; \
    }

void penstock_norm(void *h, const void *delta, const void *weight, void *out, int64_t tokens,
                   int64_t dim, float eps, int bf16, int threads)
{
    FOR_TOKENS(dim, norm_token(h, delta, weight, out, t, dim, eps, 1),
               norm_token(h, delta, weight, out, t, dim, eps, 0))
}

void penstock_rotate(void *x, int64_t stride, const void *cosine, const void *sine, int64_t tokens,
                     int64_t heads, int64_t dim, int bf16, int threads)
{
    FOR_TOKENS(heads * dim, rotate_token(x, stride, cosine, sine, t, heads, dim, 1),
               rotate_token(x, stride, cosine, sine, t, heads, dim, 0))
}

void penstock_norm_rotate(void *x, int64_t stride, const void *cosine, const void *sine,
                          const void *q_weight, const void *k_weight, int64_t tokens, int64_t heads,
                          int64_t dim, int64_t queries, float eps, int bf16, int threads)
{
    FOR_TOKENS(2 * heads * dim,
               norm_rotate_token(x, stride, cosine, sine, q_weight, k_weight, t, heads, dim, queries,
                                 eps, 1),
               norm_rotate_token(x, stride, cosine, sine, q_weight, k_weight, t, heads, dim, queries,
                                 eps, 0))
}

void penstock_gate(const void *gate_up, int64_t stride, void *out, int64_t tokens, int64_t width,
                   int bf16, int threads)
{
    FOR_TOKENS(4 * width, gate_token(gate_up, stride, out, t, width, 1),
               gate_token(gate_up, stride, out, t, width, 0))
}
