/* What C kernels are called with, where another one calls them (layer/stack.c). */
#ifndef PENSTOCK_CALLS_H
#define PENSTOCK_CALLS_H

#include <stdint.h>

typedef struct {                                /* y = x W^T + b (linear/panels.c) */
    const void *weight, *bias, *x;
    void *y;
    int64_t rows, outputs, inputs, stride;      /* stride: elements from a row of x to the next */
    int64_t bf16;                               /* all of weight, bias, x and y; else f32 */
    const void *scales;                         /* of codes, else NULL: [panels, groups, 2, PANEL] f16 */
    int64_t bits, group;                        /* of codes: 4 or 8; inputs that share a scale, even */
} Linear;

typedef struct {                                /* attention of decode rows (paged_attention/decode.c) */
    const void *q, *k, *v;          /* q [T, N, H], strided in T; one layer's pools [P, K, G, H] */
    void *out;                      /* [T, N, H] */
    int64_t q_stride;               /* elements, as all strides */
    int64_t page_stride, head_stride, token_stride;     /* of both pools */
    const int32_t *table;           /* pages of all rows, one row every table_stride */
    int64_t table_stride;
    const int64_t *queries;         /* [T, 3]: table row, context, first chunk */
    float *partial;                 /* [num_chunks, N, H + 2] */
    int64_t num_queries, num_chunks, heads, kv_heads, page_size;
    float scale, softcap;           /* softcap: 0: scores stay as they are */
    int64_t window;                 /* tokens that a query sees; 0: all */
    const float *sinks;             /* [N], or NULL: none */
    int64_t first;                  /* 1: the first token is seen by its own query alone; without a window */
    int64_t codes;                  /* pools are of codes, uint8 [P, K, G, W], as in types/fp8.py; strides in bytes */
} Decode;

#endif
