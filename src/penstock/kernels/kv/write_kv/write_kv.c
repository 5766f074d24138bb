/* A step's new rows into device page, host page and hot unit, then the bounds of the units they fill. */
#include "vectors.h"

#define PLANES 4

typedef struct {
    const char *value[PLANES];                      /* [T, K, H] each */
    char *device, *host, *bounds;                   /* [P, K, C, G, H] twice, [P, K, 2, S, H] */
    const int64_t *device_at, *host_at, *bounds_at;
    const int32_t *row, *position, *hot_slot, *hot_page;
    int64_t value_token[PLANES], value_head[PLANES];                            /* bytes, as below */
    int64_t device_page, device_head, device_plane, host_page, host_head, host_plane;
    int64_t bounds_page, bounds_head, bounds_plane;
    int64_t tokens, heads, planes, width, page_size, summaries, unit, units, hot_pages;
} WriteKV;

/* Keys of one unit, rows of `width` values from `keys` on, into its lower and upper bound. */
INLINE void bound(const char *keys, char *low, char *high, int64_t unit, int64_t width, int bf16)
{
    for (int64_t d = 0; d < width; d++) {
        float least = one(keys, d, bf16), most = least;
        for (int64_t j = 1; j < unit; j++) {
            float x = one(keys, j * width + d, bf16);
            least = x < least ? x : least;
            most = x > most ? x : most;
        }
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
                + unit % s->summaries * bytes;
    bound(keys + (slot % s->page_size - s->unit + 1) * bytes, low, low + s->bounds_plane, s->unit,
          s->width, bf16);
}

/* itemsize   bytes of a value; with bounds 4 (f32) or 2 (bf16) */
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
