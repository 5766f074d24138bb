/* A step's new rows into device page, host page and hot unit, then the bounds of the units they fill. */
#include "fp8.h"

#define PLANES 4

typedef struct {
    const char *value[PLANES];                      /* [T, K, H] each */
    char *device, *host, *bounds;                   /* [P, K, C, G, H] twice, [P, K, 2, S, H] */
    const int64_t *device_at, *host_at, *bounds_at;
    const int32_t *row, *position, *hot_slot, *hot_page;
    int64_t value_token[PLANES], value_head[PLANES];                            /* bytes, as below */
    int64_t device_page, device_head, device_plane, host_page, host_head, host_plane;
    int64_t bounds_page, bounds_head, bounds_plane;
    int64_t tokens, heads, planes, width, page_size, summaries, unit;
    int64_t bounds_row, format, codes;          /* bytes of a bound; which, as in fp8.h; values of a key in codes, or 0 */
    int64_t units, hot_pages;
} WriteKV;

INLINE uint32_t bits_of(float x)
{
    union { float f; uint32_t u; } bits = { .f = x };
    return bits.u;
}

INLINE float float_of(uint32_t u)
{
    union { uint32_t u; float f; } bits = { .u = u };
    return bits.f;
}

/* `width` bounds in bf16 or fp8, never less than they are if `up`, else never more: as in types/fp8.py. */
INLINE void outward(const float *x, char *out, int64_t width, int format, int up)
{
    if (format == BF16) {
        for (int64_t d = 0; d < width; d++) {
            const uint32_t bits = bits_of(x[d]), away = (x[d] > 0) == up && x[d] - x[d] == 0;
            ((uint16_t *)out)[d] = (bits + away * 0xffffu) >> 16;
        }
        return;
    }
    for (int64_t first = 0; first < width; first += FP8_BLOCK) {
        const int64_t end = first + FP8_BLOCK < width ? first + FP8_BLOCK : width;
        float most = 0;
        for (int64_t d = first; d < end; d++)
            most = __builtin_fabsf(x[d]) > most ? __builtin_fabsf(x[d]) : most;
        const int32_t exponent = (int32_t)((bits_of(most) + 0x1fffffu) >> 23) - 8;
        const uint32_t power = exponent < 1 ? 1 : exponent;
        const float scale = float_of(power << 23), over = float_of((254 - power) << 23);
        for (int64_t d = first; d < end; d++) {
            const float amount = __builtin_fabsf(x[d]) * over, small = amount * 512;
            const uint32_t away = (x[d] > 0) == up, floor = amount < 0x1p-6f ? (uint32_t)small : 0;
            uint32_t code = amount < 0x1p-6f ? floor + (away && (float)floor < small)
                            : ((bits_of(amount) + away * 0xfffffu) >> 20) - (120u << 3);
            code = amount <= 448 ? code : 0x7f;
            out[d] = (char)(code | (x[d] < 0 ? 0x80 : 0));
        }
        memcpy(out + width + first / FP8_BLOCK * 4, &scale, sizeof scale);
    }
}

/* Keys of one unit, rows of `width` values from `keys` on, into its lower and upper bound. codes: bytes of a key in
 * codes, whose values are decoded; 0: it has floats. */
INLINE void bound(const char *keys, char *low, char *high, int64_t unit, int64_t width, int format, int bf16,
                  int64_t codes)
{
    float ends[2][width], decoded[codes ? unit * width : 1];
    if (codes) {
        for (int64_t j = 0; j < unit; j++)
            unpack(keys + j * codes, width, width, FP8, decoded + j * width);
        keys = (const char *)decoded;
    }
    for (int64_t d = 0; d < width; d++) {
        float least = one(keys, d, bf16), most = least;
        for (int64_t j = 1; j < unit; j++) {
            float x = one(keys, j * width + d, bf16);
            least = x < least ? x : least;
            most = x > most ? x : most;
        }
        ends[0][d] = least;
        ends[1][d] = most;
        if (format != SAME)
            continue;
        if (bf16) {                                 /* exact: they are values of the type */
            uint32_t bits;
            memcpy(&bits, &least, sizeof bits);
            ((uint16_t *)low)[d] = bits >> 16;
            memcpy(&bits, &most, sizeof bits);
            ((uint16_t *)high)[d] = bits >> 16;
        } else {
            ((float *)low)[d] = least;
            ((float *)high)[d] = most;
        }
    }
    if (format != SAME) {
        outward(ends[0], low, width, format, 0);
        outward(ends[1], high, width, format, 1);
    }
}

INLINE int write_token(const WriteKV *s, int64_t t, int64_t k, int64_t bytes)
{
    const int64_t device = s->device_at[t], host = s->host_at[t], of_page = s->page_size / s->unit;
    const int32_t row = s->row[t], position = s->position[t];
    int64_t hot = -1, hot_page = -1;
    if (s->hot_slot && row >= 0)
        hot = s->hot_slot[(row * s->heads + k) * s->units + position / s->unit];
    if (hot >= 0 && (hot_page = s->hot_page[row * s->hot_pages + hot / of_page]) < 0)
        return 1;                                   /* the map is of an earlier hot buffer */
    for (int64_t c = 0; c < s->planes; c++) {
        const char *x = s->value[c] + t * s->value_token[c] + k * s->value_head[c];
        char *pool = s->device + k * s->device_head + c * s->device_plane;
        if (device >= 0)
            memcpy(pool + device / s->page_size * s->device_page + device % s->page_size * bytes, x,
                   bytes);
        if (host >= 0)
            memcpy(s->host + host / s->page_size * s->host_page + k * s->host_head
                   + c * s->host_plane + host % s->page_size * bytes, x, bytes);
        if (hot >= 0)
            memcpy(pool + hot_page * s->device_page
                   + (hot % of_page * s->unit + position % s->unit) * bytes, x, bytes);
    }
    return 0;
}

INLINE void write_bounds(const WriteKV *s, int64_t t, int64_t k, int64_t bytes, int bf16)
{
    const int64_t unit = s->bounds_at[t], on = s->device_at[t] >= 0;
    const int64_t slot = on ? s->device_at[t] : s->host_at[t];
    if (unit < 0 || (s->position[t] + 1) % s->unit)
        return;
    const char *keys = on ? s->device + slot / s->page_size * s->device_page + k * s->device_head
                          : s->host + slot / s->page_size * s->host_page + k * s->host_head;
    char *low = s->bounds + unit / s->summaries * s->bounds_page + k * s->bounds_head
                + unit % s->summaries * s->bounds_row;
    bound(keys + (slot % s->page_size - s->unit + 1) * bytes, low, low + s->bounds_plane, s->unit,
          s->codes ? s->codes : s->width, s->format, bf16, s->codes ? bytes : 0);
}

/* itemsize   bytes of a value; with bounds 4 (f32), 2 (bf16) or 1 (codes) */
int penstock_write_kv(const WriteKV *s, int64_t itemsize, int threads)
{
    const int64_t bytes = s->width * itemsize, pairs = s->tokens * s->heads;
    int error = 0;
    #pragma omp parallel num_threads(threads) reduction(| : error) if (pairs * s->planes * bytes > 65536)
    {
        #pragma omp for schedule(static)
        for (int64_t i = 0; i < pairs; i++)
            error |= write_token(s, i / s->heads, i % s->heads, bytes);
        if (s->bounds) {
            #pragma omp for schedule(static)
            for (int64_t i = 0; i < pairs; i++) {
                if (itemsize == 2)
                    write_bounds(s, i / s->heads, i % s->heads, bytes, 1);
                else
                    write_bounds(s, i / s->heads, i % s->heads, bytes, 0);
            }
        }
    }
    return error;
}
