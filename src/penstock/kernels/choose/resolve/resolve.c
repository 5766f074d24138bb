/* Where chosen units are: one look into the page table and one into the hot map each.
 *
 * A row and head is one task; slots to give up are found only where units are missing.
 */
#include <stdlib.h>
#include "vectors.h"

typedef struct {
    const int32_t *chosen, *row, *device, *host, *hot_page, *now;
    int32_t *hot_slot, *hot_unit, *stamp;           /* [R, K, units], [R, K, slots] twice */
    int64_t *count;                                 /* [R, K, 4] */
    int32_t *slot, *miss, *num;                     /* [B, K, C], [B * K * C, 3], [1] */
    const int32_t *turn;                            /* [B], or nothing: all 0 */
    int64_t queries, kv_heads, chosen_width, pages, hot_pages, units, slots, page_units;
} Resolve;

enum { DEVICE, HITS, MISSES, EVICTIONS };
enum { OK, TOO_FEW_SLOTS, NO_COPY, NO_PAGE };

/* Slots for the `count` units at places `absent` of this row and head. */
static int admit(const Resolve *s, int64_t b, int64_t k, const int32_t *absent, int64_t count)
{
    const int64_t row = s->row[b], pair = row * s->kv_heads + k, size = s->page_units;
    const int32_t now = *s->now, *chosen = s->chosen + (b * s->kv_heads + k) * s->chosen_width;
    const int32_t *page = s->hot_page + row * s->hot_pages;
    int32_t *unit = s->hot_unit + pair * s->slots, *stamp = s->stamp + pair * s->slots;
    int32_t *slot = s->slot + (b * s->kv_heads + k) * s->chosen_width, at;
    int64_t slots = 0, idle = 0, evicted = 0;
    while (slots < s->hot_pages && page[slots] >= 0)
        slots++;
    slots *= size;
    uint32_t *age = malloc((slots + 1) * sizeof *age);
    int32_t *given = malloc((count + 1) * sizeof *given);
    int error = age && given ? OK : TOO_FEW_SLOTS;
    for (int64_t i = 0; !error && i < slots; i++) {
        age[i] = unit[i] < 0 ? UINT32_MAX : (uint32_t)now - (uint32_t)stamp[i];
        idle += age[i] != 0;
    }
    if (idle < count)
        error = TOO_FEW_SLOTS;
    if (!error)
        largest(age, slots, count, given);
    #pragma omp atomic capture
    { at = *s->num; *s->num += error ? 0 : (int32_t)count; }
    for (int64_t i = 0; !error && i < count; i++) {
        const int32_t wanted = chosen[absent[i]], to = given[i], old = unit[to];
        const int32_t from = s->host[row * s->pages + wanted / size];
        int32_t *miss = s->miss + 3 * (at + i);
        if (from < 0)
            error = NO_COPY;
        if (old >= 0) {
            s->hot_slot[pair * s->units + old] = -1;
            evicted++;
        }
        s->hot_slot[pair * s->units + wanted] = to;
        unit[to] = wanted;
        stamp[to] = now;
        slot[absent[i]] = page[to / size] * size + to % size;
        miss[0] = k;
        miss[1] = from * size + wanted % size;
        miss[2] = slot[absent[i]];
    }
    s->count[4 * pair + MISSES] += count;
    s->count[4 * pair + EVICTIONS] += evicted;
    free(age);
    free(given);
    return error;
}

static int look(const Resolve *s, int64_t b, int64_t k)
{
    const int64_t row = s->row[b], pair = row * s->kv_heads + k, size = s->page_units;
    const int32_t *chosen = s->chosen + (b * s->kv_heads + k) * s->chosen_width;
    const int32_t *device = s->device + row * s->pages, *page = s->hot_page + row * s->hot_pages;
    const int32_t *hot_slot = s->hot_slot + pair * s->units;
    int32_t *slot = s->slot + (b * s->kv_heads + k) * s->chosen_width, absent[s->chosen_width];
    int64_t here = 0, hits = 0, count = 0;
    for (int64_t c = 0; c < s->chosen_width; c++) {
        const int32_t unit = chosen[c];
        slot[c] = -1;
        if (unit < 0)
            continue;
        const int32_t at = device[unit / size];
        if (at >= 0) {
            slot[c] = at * size + unit % size;
            here++;
            continue;
        }
        if (!s->slots)
            return TOO_FEW_SLOTS;                   /* no row has hot units: there is no map either */
        const int32_t hot = hot_slot[unit];
        if (hot >= 0) {
            if (page[hot / size] < 0)
                return NO_PAGE;                     /* the map is of an earlier hot buffer */
            slot[c] = page[hot / size] * size + hot % size;
            s->stamp[pair * s->slots + hot] = *s->now;
            hits++;
        } else {
            absent[count++] = c;
        }
    }
    #pragma omp atomic
    s->count[4 * pair + DEVICE] += here;            /* other queries of the row may be at it */
    if (hits)
        s->count[4 * pair + HITS] += hits;
    return count ? admit(s, b, k, absent, count) : OK;
}

int penstock_resolve(const Resolve *s, int threads)
{
    const int64_t pairs = s->queries * s->kv_heads;
    int error = OK;
    *s->num = 0;
    #pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(max : error) \
        if (pairs * s->chosen_width > 4096)
    for (int64_t i = 0; i < pairs; i++) {
        int64_t b = i / s->kv_heads;
        if (s->turn && s->turn[b])
            continue;
        do {
            int found = look(s, b, i % s->kv_heads);
            error = found > error ? found : error;
        } while (++b < s->queries && s->turn && s->turn[b]);
    }
    return error;
}
