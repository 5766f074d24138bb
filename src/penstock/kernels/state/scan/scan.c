/* A short convolution and a state a head, token by token: nothing depends on how tokens are cut into steps.
 *
 * A task of the scan is COLUMNS values of one head over all tokens of a row: its part of the state stays in the
 * first-level cache. Key by key, each in registers: what the state answers, then what it becomes.
 *
 * A state lies in parts [R, E], each of some heads of one key head: the inputs of its Y channels [W - 1, Y], then
 * its heads' states [N / R, S, V].
 *
 *   X channels   W taps   N heads   K key heads   S key dim   V value dim   R parts   Y channels of a part
 */
#include <math.h>
#include "vectors.h"

#define COLUMNS (WIDE * LANES)
#define EPS 1e-6f

typedef struct {
    const void *x, *step, *write;           /* [T, X], [T, N], [T, N] or NULL: not the delta rule */
    void *out;                              /* [T, N, V] */
    const float *conv, *bias;               /* [W, X], [X] or NULL */
    const float *decay, *add, *skip;        /* [N]; skip: or NULL */
    float *pool;                            /* [P, R * E] */
    const int64_t *starts, *from, *to;      /* [B + 1], [B], [T] */
    float *y, *gate;                        /* [T, X], [T, N, 2]: convolved; what is kept, what is written */
    int64_t x_stride, step_stride, write_stride, page_stride;       /* elements */
    int64_t rows, tokens, heads, key_heads, key_dim, value_dim, taps, parts;
    float least, most;
} Scan;

INLINE float sigmoid(float x)
{
    float t = x * -1.44269504f;
    t = t < -126.0f ? -126.0f : t > 126.0f ? 126.0f : t;
    return 1.0f / (1.0f + exp_two(t));
}

INLINE int64_t channels(const Scan *s)
{
    return 2 * s->key_heads * s->key_dim + s->heads * s->value_dim;
}

INLINE int64_t part_channels(const Scan *s)
{
    return 2 * s->key_dim + s->heads / s->parts * s->value_dim;
}

INLINE int64_t part_elements(const Scan *s)
{
    return (s->taps - 1) * part_channels(s) + s->heads / s->parts * s->key_dim * s->value_dim;
}

/* Inputs of one token, `x` [X], into the state at `page`, as those of its tap w; out: out of it. Parts of one key
 * head have the same queries and keys. */
INLINE void tap(const Scan *s, float *page, int64_t w, float *x, int out)
{
    const int64_t keys = s->key_heads * s->key_dim, values = s->heads / s->parts * s->value_dim;
    for (int64_t part = 0; part < s->parts; part++) {
        float *held = page + part * part_elements(s) + w * part_channels(s);
        const int64_t split = s->parts / s->key_heads, key = part / split * s->key_dim;
        const int64_t from[] = { key, keys + key, 2 * keys + part * values };
        const int64_t count[] = { s->key_dim, s->key_dim, values };
        for (int i = 0; i < 3; held += count[i++])
            if (!out)
                memcpy(held, x + from[i], count[i] * sizeof(float));
            else if (i == 2 || part % split == 0)
                memcpy(x + from[i], held, count[i] * sizeof(float));
    }
}

/* The inputs of token t of a row that begins at `first`, or of one before it, out of its state: floats in `room`,
 * or where they are. */
INLINE const float *inputs(const Scan *s, int64_t row, int64_t first, int64_t t, int64_t width, int bf16,
                           float *room)
{
    if (t < first) {
        if (s->from[row] >= 0)
            tap(s, s->pool + s->from[row] * s->page_stride, s->taps - 1 + t - first, room, 1);
        else
            memset(room, 0, width * sizeof(float));
        return room;
    }
    if (!bf16)
        return (const float *)s->x + t * s->x_stride;
    for (int64_t i = 0; i < width; i++)
        room[i] = one(s->x, t * s->x_stride + i, 1);
    return room;
}

/* `count` floats become of this length. */
INLINE void normed(float *x, int64_t count, float length)
{
    float sum = EPS;
    for (int64_t i = 0; i < count; i++)
        sum += x[i] * x[i];
    const float scale = length / sqrtf(sum);
    for (int64_t i = 0; i < count; i++)
        x[i] *= scale;
}

static void prepare(const Scan *s, int64_t t, int bf16)
{
    const int64_t width = channels(s), dim = s->key_dim;
    float room[width], *y = s->y + t * width;
    int64_t row = 0;
    for (int64_t end = s->rows; end - row > 1; ) {
        const int64_t middle = (row + end) / 2;
        *(s->starts[middle] <= t ? &row : &end) = middle;
    }
    for (int64_t i = 0; i < width; i++)
        y[i] = s->bias ? s->bias[i] : 0.0f;
    for (int64_t w = 0; w < s->taps; w++) {
        const float *x = inputs(s, row, s->starts[row], t - s->taps + 1 + w, width, bf16, room);
        const float *conv = s->conv + w * width;
        for (int64_t i = 0; i < width; i++)
            y[i] += conv[i] * x[i];
    }
    for (int64_t i = 0; i < width; i++)
        y[i] *= sigmoid(y[i]);
    for (int64_t k = 0; s->write && k < 2 * s->key_heads; k++)
        normed(y + k * dim, dim, k < s->key_heads ? 1.0f / sqrtf((float)dim) : 1.0f);
    for (int64_t n = 0; n < s->heads; n++) {
        const float raw = one(s->step, t * s->step_stride + n, bf16) + s->add[n];
        float step = raw > 20.0f ? raw : log1pf(expf(raw)), *gate = s->gate + (t * s->heads + n) * 2;
        if (!s->write)
            step = step < s->least ? s->least : step > s->most ? s->most : step;
        gate[0] = expf(s->decay[n] * step);
        gate[1] = s->write ? sigmoid(one(s->write, t * s->write_stride + n, bf16)) : step;
    }
}

static void scan(const Scan *s, int64_t row, int64_t n, int64_t column, int bf16)
{
    const int64_t dim = s->key_dim, values = s->value_dim, width = channels(s), keys = s->key_heads * dim;
    const int64_t left = values - column, wide = left < COLUMNS ? left : COLUMNS;
    const int64_t each = s->heads / s->parts;
    const int64_t at = n / each * part_elements(s) + (s->taps - 1) * part_channels(s)
                     + n % each * dim * values + column;
    const int64_t head = n / (s->heads / s->key_heads) * dim;
    float state[dim * COLUMNS], value[COLUMNS], out[COLUMNS];

    memset(state, 0, sizeof state);
    memset(value, 0, sizeof value);
    for (int64_t k = 0; s->from[row] >= 0 && k < dim; k++)
        memcpy(state + k * COLUMNS, s->pool + s->from[row] * s->page_stride + at + k * values,
               wide * sizeof(float));
    for (int64_t t = s->starts[row]; t < s->starts[row + 1]; t++) {
        const float *q = s->y + t * width + head, *key = q + keys;
        const float kept = s->gate[(t * s->heads + n) * 2], share = s->gate[(t * s->heads + n) * 2 + 1];
        memcpy(value, s->y + t * width + 2 * keys + n * values + column, wide * sizeof(float));
        Vec d[WIDE] = { 0 }, sum[WIDE] = { 0 };
        if (s->write)
            for (int64_t k = 0; k < dim; k++)
                for (int i = 0; i < WIDE; i++)
                    d[i] += load(state, k * COLUMNS + i * LANES, 0) * key[k];
        for (int i = 0; i < WIDE; i++)
            d[i] = (load(value, i * LANES, 0) - d[i] * kept) * share;
        for (int64_t k = 0; k < dim; k++)
            for (int i = 0; i < WIDE; i++) {
                const Vec z = load(state, k * COLUMNS + i * LANES, 0) * kept + d[i] * key[k];
                put(state, k * COLUMNS + i * LANES, z, 0);
                sum[i] += z * q[k];
            }
        for (int i = 0; i < WIDE; i++)
            put(out, i * LANES, sum[i], 0);
        for (int64_t i = 0; i < wide; i++)
            put_one(s->out, (t * s->heads + n) * values + column + i,
                    s->skip ? out[i] + s->skip[n] * value[i] : out[i], bf16);
        for (int64_t k = 0; s->to[t] >= 0 && k < dim; k++)
            memcpy(s->pool + s->to[t] * s->page_stride + at + k * values, state + k * COLUMNS,
                   wide * sizeof(float));
    }
}

/* What the convolution of the next tokens needs. The last first: what a row begins with may be overwritten. */
static void keep(const Scan *s, int64_t row, int bf16)
{
    const int64_t width = channels(s), first = s->starts[row];
    float room[width];
    for (int64_t t = s->starts[row + 1] - 1; t >= first; t--)
        for (int64_t w = 0; s->to[t] >= 0 && w < s->taps - 1; w++)
            tap(s, s->pool + s->to[t] * s->page_stride, w,
                (float *)inputs(s, row, first, t - s->taps + 2 + w, width, bf16, room), 0);
}

int penstock_scan(const Scan *s, int bf16, int threads)
{
    const int64_t blocks = (s->value_dim + COLUMNS - 1) / COLUMNS, each = s->heads * blocks;
    #pragma omp parallel num_threads(threads) if (s->tokens * s->heads * s->key_dim * s->value_dim > 100000)
    {
        #pragma omp for
        for (int64_t t = 0; t < s->tokens; t++)
            prepare(s, t, bf16);
        #pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < s->rows * each; i++)
            scan(s, i / each, i % each / blocks, i % blocks * COLUMNS, bf16);
        #pragma omp for
        for (int64_t row = 0; row < s->rows; row++)
            keep(s, row, bf16);
    }
    return 0;
}
