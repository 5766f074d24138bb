/* Units named by one flat list, from host pages into hot buffers: a run of bytes a plane. */
#include <stdint.h>
#include <string.h>

typedef struct {
    const char *host;
    char *pool;
    const int32_t *miss, *num;
    int64_t host_page, host_head, host_plane, pool_page, pool_head, pool_plane;     /* bytes */
    int64_t planes, host_units, pool_units, run;        /* units a page of either tier; bytes of a unit */
} Gather;

int penstock_gather(const Gather *s, int threads)
{
    const int64_t num = *s->num;
    #pragma omp parallel for schedule(static) num_threads(threads) if (num * s->planes * s->run > 65536)
    for (int64_t i = 0; i < num; i++) {
        const int64_t head = s->miss[3 * i], from = s->miss[3 * i + 1], to = s->miss[3 * i + 2];
        const char *source = s->host + from / s->host_units * s->host_page + head * s->host_head
                             + from % s->host_units * s->run;
        char *target = s->pool + to / s->pool_units * s->pool_page + head * s->pool_head
                       + to % s->pool_units * s->run;
        for (int64_t c = 0; c < s->planes; c++)
            memcpy(target + c * s->pool_plane, source + c * s->host_plane, s->run);
    }
    return 0;
}
