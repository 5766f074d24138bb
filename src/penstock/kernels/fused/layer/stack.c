/* The layers of a step in which every row decodes, in one call: pre-norm, one projection of q, k and v, RoPE,
 * write_kv, attention over pages, gated MLP. The kernels are those that run one by one elsewhere, called
 * in the same order, so that nothing of a result changes.
 *
 *   T tokens   D model dim   N query heads   K KV heads   H head dim   I MLP width
 */
#include <stdlib.h>
#include <string.h>

#include "calls.h"

typedef struct {
    Linear qkv, out, gate_up, down;             /* but for rows, x, y and stride */
    const void *norm_in, *norm_mlp;
    const void *q_norm, *k_norm;                /* NULL: heads are not normed */
} Layer;

typedef struct {
    int (*linear)(const Linear *, int);
    void (*norm)(void *, const void *, const void *, void *, int64_t, int64_t, float, int, int);
    void (*rotate)(void *, int64_t, const void *, const void *, int64_t, int64_t, int64_t, int, int);
    void (*norm_rotate)(void *, int64_t, const void *, const void *, const void *, const void *, int64_t, int64_t,
                        int64_t, int64_t, float, int, int);
    void (*gate)(const void *, int64_t, void *, int64_t, int64_t, int, int);
    void (*attend)(const Decode *, int64_t, int, int);
} Kernels;

typedef struct {
    Kernels run;
    const Layer *layers;
    int64_t num_layers, dim, heads, kv_heads, head_dim, width;      /* D N K H I */
    int64_t bf16;                               /* everything; else f32 */
    float eps;
} Stack;

typedef struct {
    void *h;                                    /* [T, D], changed in place */
    const void *before;                         /* [T, D] that the first layer adds to h; NULL: none */
    void *delta;                                /* [T, D]: what the last layer leaves to be added */
    const void *cosine, *sine;                  /* [T, H] */
    const int64_t *page, *offset;               /* [T]: where each token is written */
    void *const *pools;                         /* of each layer: k and v, [P, K, G, H] */
    const Decode *attend;                       /* but for q, k, v and out */
    int64_t tokens;
} Step;

static int linear(const Stack *s, const Linear *weight, const void *x, void *y, int64_t rows, int threads)
{
    Linear call = *weight;
    call.x = x, call.y = y, call.rows = rows, call.stride = weight->inputs;
    return s->run.linear(&call, threads);
}

/* The heads of k and v, which follow those of q, into their slots. */
static void write_kv(const Stack *s, const Step *step, const char *qkv, int64_t stride, void *const *pools)
{
    const int64_t size = s->bf16 ? 2 : 4;
    const Decode *at = step->attend;
    for (int64_t t = 0; t < step->tokens; t++)
        for (int64_t n = 0; n < 2 * s->kv_heads; n++) {
            const int64_t slot = step->page[t] * at->page_stride + step->offset[t] * at->token_stride
                + n % s->kv_heads * at->head_stride;
            memcpy((char *)pools[n / s->kv_heads] + slot * size,
                   qkv + (t * stride + (s->heads + n) * s->head_dim) * size, s->head_dim * size);
        }
}

/* 0, or 1: no memory. */
int penstock_stack(const Stack *s, const Step *step, int threads)
{
    const int64_t T = step->tokens, D = s->dim, H = s->head_dim, I = s->width, size = s->bf16 ? 2 : 4;
    const int64_t q = s->heads * H, wide = (s->heads + 2 * s->kv_heads) * H, turned = s->heads + s->kv_heads;
    const int bf16 = s->bf16;
    char *x = malloc(T * (D + wide + q + 3 * I) * size);
    if (!x)
        return 1;
    char *qkv = x + T * D * size, *mixed = qkv + T * wide * size;
    char *gate_up = mixed + T * q * size, *gated = gate_up + T * 2 * I * size;
    Decode attend = *step->attend;
    attend.q = qkv, attend.q_stride = wide, attend.out = mixed;
    int failed = 0;
    for (int64_t l = 0; l < s->num_layers && !failed; l++) {
        const Layer *w = s->layers + l;
        s->run.norm(step->h, l ? step->delta : step->before, w->norm_in, x, T, D, s->eps, bf16, threads);
        failed |= linear(s, &w->qkv, x, qkv, T, threads);
        if (w->q_norm)
            s->run.norm_rotate(qkv, wide, step->cosine, step->sine, w->q_norm, w->k_norm, T, turned, H,
                               s->heads, s->eps, bf16, threads);
        else
            s->run.rotate(qkv, wide, step->cosine, step->sine, T, turned, H, bf16, threads);
        write_kv(s, step, qkv, wide, step->pools + 2 * l);
        attend.k = step->pools[2 * l], attend.v = step->pools[2 * l + 1];
        s->run.attend(&attend, H, bf16, threads);
        failed |= linear(s, &w->out, mixed, step->delta, T, threads);
        s->run.norm(step->h, step->delta, w->norm_mlp, x, T, D, s->eps, bf16, threads);
        failed |= linear(s, &w->gate_up, x, gate_up, T, threads);
        s->run.gate(gate_up, 2 * I, gated, T, I, bf16, threads);
        failed |= linear(s, &w->down, gated, step->delta, T, threads);
    }
    free(x);
    return failed;
}
