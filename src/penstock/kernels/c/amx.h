/* Rows of bf16 times a panel of 32 outputs on AMX: eight registers ("tiles") of up to 16 rows of 64 bytes.
 * AMX 0: this is not compiled for it. What a row becomes depends on that row alone. */
#ifndef PENSTOCK_AMX_H
#define PENSTOCK_AMX_H

#include <stdint.h>

#define AMX_ROWS 16             /* of a tile */
#define AMX_INPUTS 32           /* of a row of a tile */

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Whether this process may use tiles: Linux grants them to those who ask. */
static int amx_granted(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    static int known;                           /* 0: not asked yet */
    int now = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!now) {
        now = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? -1 : 1;
        __atomic_store_n(&known, now, __ATOMIC_RELAXED);
    }
    return now > 0;
}

/* For this thread: tiles 0 to 3 are sums, 4 and 5 have rows of x, up to `rows` each, 6 and 7 weights. */
static void amx_begin(int64_t rows)
{
    struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } tiles = { .palette = 1 };
    for (int n = 0; n < 8; n++)
        tiles.bytes[n] = 64, tiles.rows[n] = n > 5 || rows > AMX_ROWS ? AMX_ROWS : rows;
    __asm__ volatile ("ldtilecfg %0" :: "m"(tiles));    /* gcc 12's intrinsic tells of its first 8 bytes only */
}

static void amx_end(void)
{
    _tile_release();
}

/* out[r][0 .. 32) = x[r] . panel: [inputs / 2, 32, 2], inputs a multiple of 32. `stride`: elements from a row of x
 * to the next. `ahead`: bytes between what is multiplied and what is asked for from memory while the first rows are.
 * The last of many rows are a whole tile too: some of them are multiplied twice. */
static void amx_product(const void *panel, const uint16_t *x, int64_t stride, int64_t inputs, float *out,
                        int64_t rows, int64_t ahead)
{
    __asm__ volatile ("" ::: "memory");         /* gcc 12 does not know that a tile is loaded from memory */
    const int64_t end = rows > AMX_ROWS ? rows - AMX_ROWS : 0;     /* where the last tile begins */
    for (int64_t t = 0; t < rows; t += 2 * AMX_ROWS) {
        const int two = rows - t > AMX_ROWS;
        const int64_t a = t < end ? t : end, b = t + AMX_ROWS < end ? t + AMX_ROWS : end;
        const uint16_t *first = x + a * stride, *second = x + b * stride;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < inputs; i += AMX_INPUTS) {
            const char *weight = (const char *)panel + i * 64;
            if (!t)
                for (int line = 0; line < 64 * AMX_INPUTS; line += 64)
                    __builtin_prefetch(weight + ahead + line, 0, 2);
            _tile_loadd(4, first + i, 2 * stride);
            _tile_loadd(6, weight, 128);
            _tile_loadd(7, weight + 64, 128);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (two) {
                _tile_loadd(5, second + i, 2 * stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, out + a * 32, 128);
        _tile_stored(1, out + a * 32 + 16, 128);
        if (two) {
            _tile_stored(2, out + b * 32, 128);
            _tile_stored(3, out + b * 32 + 16, 128);
        }
    }
}
#else
#define AMX 0
static int amx_granted(void) { return 0; }
static void amx_begin(int64_t rows) { (void)rows; }
static void amx_end(void) { }
static void amx_product(const void *panel, const uint16_t *x, int64_t stride, int64_t inputs, float *out,
                        int64_t rows, int64_t ahead)
{
    (void)panel, (void)x, (void)stride, (void)inputs, (void)out, (void)rows, (void)ahead;
}
#endif

#endif
