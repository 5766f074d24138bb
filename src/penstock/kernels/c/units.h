/* Which units of a row a selection scores and keeps, by a query's position: as `SelectRule` in choose/select/spec.py. */
#ifndef PENSTOCK_UNITS_H
#define PENSTOCK_UNITS_H

#include "vectors.h"

typedef struct {
    int64_t unit, sink_units, window;       /* tokens of a unit; units; tokens */
} Rule;

/* Units [first, end) are scored by a query at `position`: the others, up to its own, are kept. */
INLINE void scored(const Rule *rule, int64_t position, int64_t *first, int64_t *end)
{
    int64_t before = position + 1 - rule->window;
    *end = before > 0 ? before / rule->unit : 0;
    *first = rule->sink_units < *end ? rule->sink_units : *end;
}

/* How many of those it takes, of `budget` units in all; perhaps less than 0. */
INLINE int64_t num_taken(const Rule *rule, int64_t position, int64_t budget)
{
    int64_t first, end;
    scored(rule, position, &first, &end);
    const int64_t want = budget - first - (position / rule->unit + 1 - end), have = end - first;
    return want < have ? want : have;
}

/* What a query keeps, ascending, then -1 up to `width`. `score`, of all units of its row, is used up. */
static inline void keep_units(const Rule *rule, int64_t position, int64_t budget, float *score, int32_t *out,
                              int64_t width)
{
    int32_t *last = out + width;
    if (position >= 0) {
        int64_t first, end, want = num_taken(rule, position, budget);
        scored(rule, position, &first, &end);
        for (int64_t u = 0; u < first; u++)
            *out++ = u;
        if (want == end - first) {
            for (int64_t u = first; u < end; u++)
                *out++ = u;
        } else if (want > 0) {
            largest_scores(score + first, end - first, want, out);
            for (int64_t i = 0; i < want; i++)
                *out++ += first;
        }
        for (int64_t u = end; u <= position / rule->unit; u++)
            *out++ = u;
    }
    while (out < last)
        *out++ = -1;
}

#endif
