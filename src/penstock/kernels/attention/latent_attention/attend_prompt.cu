// Queries of a prompt over the MLA KV entries ("rows") chosen for each: 64 heads, 512 values and 64 other dims of a row, bfloat16.
//
// A processor has one block, which takes queries one after another. Its third warp group copies rows, 64 at a time,
// into two buffers. The first group scores the rows of buffer 0, the second those of buffer 1; each sums half of the
// values of both, and gets the other's weights through the 64 dims of a buffer that only scores read. So one group's
// softmax runs beside the other's products, and half of a buffer is filled again once the last product over it has
// ended.
//
// SIZE rows a page is set when it is compiled.

#include "c/barriers.cuh"

typedef unsigned long long address;

#define VALUE 512
#define ROW 576                             // elements of a row
#define TILE 8192                           // bytes of 64 rows' 64 dims: rows of 128 bytes, swizzled
#define BUFFER (9 * TILE)
#define SLACK 8.0f                          // by which a score exceeds what exponents are relative to, in powers of 2
#define LEFT 0
#define RIGHT 1

#define SUMS(as, x) as((x)[0]), as((x)[1]), as((x)[2]), as((x)[3]), as((x)[4]), as((x)[5]), as((x)[6]), as((x)[7])
#define SUMS_32(as, x) SUMS(as, x), SUMS(as, x + 8), SUMS(as, x + 16), SUMS(as, x + 24)
#define SUMS_128(x) SUMS_32("+f", x), SUMS_32("+f", x + 32), SUMS_32("+f", x + 64), SUMS_32("+f", x + 96)
#define NAMES_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26," \
    "%27,%28,%29,%30,%31"
#define NAMES_128 NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53," \
    "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81," \
    "%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107," \
    "%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// Matrices of swizzled tiles in shared memory: eight rows are 1,024 bytes, 64 dims a tile. Of values, whose dims are
// the product's columns, the next tile has the next 64 of these.
__device__ __forceinline__ address by_dims(word at) {
    return (address)((at & 0x3ffff) >> 4 | 1 << 16) | (address)(1024 >> 4 | 1 << 30) << 32;
}
__device__ __forceinline__ address by_rows(word at) {
    return (address)((at & 0x3ffff) >> 4 | (TILE >> 4) << 16) | (address)(1024 >> 4 | 1 << 30) << 32;
}

// score (+)= 64 heads times 64 rows, over 16 dims. The first of a chain reads none of its registers: a copy into them
// beside other products would serialize these.
#define MULTIPLY "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, %32, %33, "
__device__ __forceinline__ void multiply(float *score, address heads, address rows) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; " MULTIPLY "p, 1, 1, 0, 0; }"
                 : SUMS_32("+f", score) : "l"(heads), "l"(rows));
}
__device__ __forceinline__ void multiply_first(float *score, address heads, address rows) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 0, 0; " MULTIPLY "p, 1, 1, 0, 0; }"
                 : SUMS_32("=f", score) : "l"(heads), "l"(rows));
}

#define ADD "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES_128
// sum += 64 heads' weights times 256 values of 16 rows: weights in registers, or in shared memory.
__device__ __forceinline__ void add(float *sum, const word *weight, address rows) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; " ADD "}, {%128,%129,%130,%131}, %132, p, 1, 1, 1; }"
                 : SUMS_128(sum) : "r"(weight[0]), "r"(weight[1]), "r"(weight[2]), "r"(weight[3]), "l"(rows));
}
__device__ __forceinline__ void add(float *sum, address weights, address rows) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; " ADD "}, %128, %129, p, 1, 1, 0, 1; }"
                 : SUMS_128(sum) : "l"(weights), "l"(rows));
}

__device__ __forceinline__ void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all that was committed has ended, and these may be read. With both in flight one cannot be waited for alone:
// ptxas would take that for a read of the other, and have each product wait for the one before (C7514).
__device__ __forceinline__ void scored(float *score) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : SUMS_32("+f", score) :: "memory");
}
__device__ __forceinline__ void added(float *sum) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : SUMS_128(sum) :: "memory");
}
__device__ __forceinline__ void visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ float power(float x) {       // of 2
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ word both(float low, float high) {
    word x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}

struct Turn { address here; int more; };    // which of a buffer's rows there are, and whether other rows follow

struct Shared {                             // behind queries and buffers
    address q_full, q_empty, full[2][2], empty[2][2];       // by buffer, left or right half
    Turn turn[2];
    float base[2][64], total[2][64];
};

// What a warp group knows: of two heads a thread, g and g + 8 of its warp's 16.
struct Heads {
    float base[2], total[2];

    // What `sum` is relative to becomes `next`.
    __device__ __forceinline__ void move(float *sum, const float *next) {
        if (!__any_sync(~0u, next[0] != base[0] || next[1] != base[1])) return;
        float by[2];
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            by[i] = next[i] == base[i] ? 1.0f : power(base[i] - next[i]);
            total[i] *= by[i], base[i] = next[i];
        }
        #pragma unroll
        for (int n = 0; n < 128; ++n) sum[n] *= by[n >> 1 & 1];
    }

    // What a block's scores are to be relative to.
    __device__ __forceinline__ void find(float *score, address here, int own, float scale, float *next) {
        if (~here) {
            const word low = (word)(here >> 2 * own), high = (word)((here >> 32) >> 2 * own);
            #pragma unroll
            for (int n = 0; n < 32; ++n)
                if (!((n < 16 ? low : high) >> (n / 4 % 4 * 8 + n % 2) & 1)) score[n] = __int_as_float(0xff800000);
        }
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            float most = __int_as_float(0xff800000);
            #pragma unroll
            for (int n = 0; n < 32; n += 4) most = fmaxf(most, fmaxf(score[n + 2 * i], score[n + 2 * i + 1]));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * scale;
            next[i] = most > base[i] + SLACK ? most : base[i];
        }
    }

    // Weights, relative to `next`, in pairs as a product takes them; their sums in `here`.
    __device__ __forceinline__ void weigh(const float *score, float scale, const float *next, word *weight,
                                          float *here) {
        float from[2];
        #pragma unroll
        for (int i = 0; i < 2; ++i) from[i] = next[i] == __int_as_float(0xff800000) ? 0.0f : next[i], here[i] = 0.0f;
        #pragma unroll
        for (int n = 0; n < 16; ++n) {
            const float x = power(fmaf(score[2 * n], scale, -from[n & 1]));
            const float y = power(fmaf(score[2 * n + 1], scale, -from[n & 1]));
            here[n & 1] += x + y;
            weight[n] = both(x, y);
        }
    }
};

// Weights into a tile of heads: `to` is this lane's row of it, `row` the row's number.
__device__ __forceinline__ void keep(const word *weight, word to, int row, int lane) {
    #pragma unroll
    for (int j = 0; j < 4; ++j)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(to + ((2 * j + (lane >> 4) ^ row & 7) << 4)), "r"(weight[4 * j]), "r"(weight[4 * j + 1]),
                        "r"(weight[4 * j + 2]), "r"(weight[4 * j + 3]) : "memory");
}

__device__ __forceinline__ void score_tiles(float *score, word q, word rows, int from, int until, int first) {
    #pragma unroll
    for (int tile = from; tile < until; ++tile)
        #pragma unroll
        for (int step = 0; step < 4; ++step) {
            const address heads = by_dims(q + tile * TILE + step * 32), other = by_dims(rows + tile * TILE + step * 32);
            if (tile == first && step == 0) multiply_first(score, heads, other); else multiply(score, heads, other);
        }
}

__device__ __forceinline__ void leave(const float *sum, const float *factor, unsigned short *out, int heads, int own) {
    #pragma unroll
    for (int i = 0; i < 2; ++i)
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
            word x[4];                      // of four times eight values two each: becomes eight values of one
            #pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float *pair = sum + 4 * (4 * n + j) + 2 * i;
                x[j] = both(pair[0] * factor[i], pair[1] * factor[i]);
            }
            #pragma unroll
            for (int step = 1; step < 4; step *= 2) {
                const bool upper = own & step;
                #pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (j & step) continue;
                    const word got = __shfl_xor_sync(~0u, upper ? x[j] : x[j + step], step);
                    if (upper) x[j] = got; else x[j + step] = got;
                }
            }
            if (8 * i < heads) *(uint4 *)(out + i * 8 * VALUE + 32 * n + 8 * own) = make_uint4(x[0], x[1], x[2], x[3]);
        }
}

extern "C" __global__ void __launch_bounds__(384, 1)
attend_prompt(const unsigned short *q, const unsigned short *pool, const int *slot, unsigned short *out, float *log_sum,
              long long scale_bits, long long pool_page, long long heads, long long chosen, long long work) {
    // `work` is of queries and their groups of 64 heads; scale: a float32 with log2(e) in it.
    extern __shared__ __align__(1024) unsigned char room[];
    const word q_at = shared_at(room), rows_at = q_at + BUFFER;
    Shared &shared = *(Shared *)(room + 3 * BUFFER);
    const int t = threadIdx.x, lane = t & 31, warp = __shfl_sync(~0u, t >> 5, 0), groups = ((int)heads + 63) / 64;
    if (t == 0) {
        expect(shared_at(&shared.q_full), 128), expect(shared_at(&shared.q_empty), 8);
        for (int i = 0; i < 4; ++i) {
            const int first = i == 0 || i == 3;         // that is copied: with it goes a Turn
            expect(shared_at(&shared.full[i / 2][i % 2]), 128 + first);
            expect(shared_at(&shared.empty[i / 2][i % 2]), 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const auto full = [&](int buffer, int half) { return shared_at(&shared.full[buffer][half]); };
    const auto empty = [&](int buffer, int half) { return shared_at(&shared.empty[buffer][half]); };
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        const int own = t & 7, line = (t & 127) >> 3, to = line * 128 + ((own ^ line & 7) << 4);
        const int last = ((int)chosen + 127) / 128;     // pairs of blocks
        word phase = 1, q_phase = 1;
        for (int w = blockIdx.x; w < (int)work; w += gridDim.x) {
            const int b = w / groups, first = w % groups * 64;
            const int *slots = slot + (long long)b * chosen;
            const auto of_pair = [&](int pair, int *at) {
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int n = pair * 128 + i * 32 + lane;
                    at[i] = n < (int)chosen ? slots[n] : -1;
                }
            };
            int at[4], next[4], later[4];
            of_pair(0, at), of_pair(1, next);
            for (int pair = 0;; ++pair) {
                of_pair(pair + 2, later);
                const unsigned short *from[8];
                word is_here = 0;
                #pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int x = __shfl_sync(~0u, at[i >> 1], (warp & 3) * 4 + (lane >> 3) + (i & 1) * 16);
                    is_here |= (x >= 0) << i;
                    from[i] = pool + (x < 0 ? 0 : x / SIZE * pool_page + x % SIZE * ROW) + own * 8;
                }
                const bool more = pair + 1 < last && __any_sync(~0u, (next[0] & next[1] & next[2] & next[3]) >= 0);
                const auto bring = [&](int buffer, int half, int begin, int until, int other) {
                    wait_for(empty(buffer, half), phase);
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int bytes = is_here >> (4 * buffer + i) & 1 ? 16 : 0;
                        #pragma unroll
                        for (int tile = 0; tile < 9; ++tile)
                            if ((begin <= tile && tile < until) || tile == other)
                                copy_16(rows_at + buffer * BUFFER + tile * TILE + i * 2048 + to,
                                        from[4 * buffer + i] + tile * 64, bytes);
                    }
                    arrive_when_copied(full(buffer, half));
                };
                const auto tell = [&](int buffer, int half) {
                    const word low = __ballot_sync(~0u, at[2 * buffer] >= 0);
                    const word high = __ballot_sync(~0u, at[2 * buffer + 1] >= 0);
                    if (t == 256) {
                        shared.turn[buffer].here = (address)high << 32 | low, shared.turn[buffer].more = more;
                        arrive(full(buffer, half));
                    }
                };
                bring(0, LEFT, 0, 4, -1);
                tell(0, LEFT);
                bring(0, RIGHT, 4, 8, 8);
                if (pair == 0) {
                    wait_for(shared_at(&shared.q_empty), q_phase);
                    q_phase ^= 1;
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int head = first + line + 16 * i;
                        const long long at_head = (long long)b * heads + (head < (int)heads ? head : 0);
                        const unsigned short *query = q + at_head * ROW + own * 8;
                        #pragma unroll
                        for (int tile = 0; tile < 9; ++tile)
                            copy_16(q_at + tile * TILE + i * 2048 + to, query + tile * 64, head < (int)heads ? 16 : 0);
                    }
                    arrive_when_copied(shared_at(&shared.q_full));
                }
                bring(1, RIGHT, 4, 8, -1);
                tell(1, RIGHT);
                bring(1, LEFT, 0, 4, 8);
                phase ^= 1;
                if (!more) break;
                #pragma unroll
                for (int i = 0; i < 4; ++i) at[i] = next[i], next[i] = later[i];
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    const int own = lane & 3, head = (warp & 3) * 16 + (lane >> 2), row = (warp & 3) * 16 + (lane & 15);
    const float scale = __int_as_float((int)scale_bits);
    const word weights_0 = rows_at + 8 * TILE, weights_1 = weights_0 + BUFFER;
    float sum[128], score[32];
    word weight[16], phase = 0, q_phase = 0;
    const auto let_go = [&](word barrier, bool really = true) {
        __syncwarp();
        arrive(barrier, really && lane == 0);
    };
    const auto has = [&](int buffer, int half) {
        wait_for(full(buffer, half), phase);
        visible();
    };
    for (int w = blockIdx.x; w < (int)work; w += gridDim.x) {
        Heads mine;
        float next[2], here[2];
        #pragma unroll
        for (int i = 0; i < 2; ++i) mine.base[i] = __int_as_float(0xff800000), mine.total[i] = 0.0f;
        #pragma unroll
        for (int n = 0; n < 128; ++n) sum[n] = 0.0f;
        wait_for(shared_at(&shared.q_full), q_phase);
        q_phase ^= 1;
        if (warp < 4) {
            for (bool again = false;; again = true) {
                has(0, LEFT);
                Turn turn = shared.turn[0];
                turn.more = __shfl_sync(~0u, turn.more, 0);
                begin();
                score_tiles(score, q_at, rows_at, 0, 4, 0);
                added(sum);              // of the pair before
                let_go(empty(1, LEFT), again);
                has(0, RIGHT);
                begin();
                score_tiles(score, q_at, rows_at, 4, 9, 0);
                commit();
                scored(score);
                asm volatile("bar.sync 3, 128;" ::: "memory");      // all have read the tile that weights go to
                let_go(shared_at(&shared.q_empty), !turn.more);
                mine.find(score, turn.here, own, scale, next);
                mine.weigh(score, scale, next, weight, here);
                keep(weight, weights_0 + row * 128, row, lane);
                if (own == 0) shared.base[0][head] = next[0], shared.base[0][head + 8] = next[1];
                visible();
                asm volatile("bar.arrive 1, 256;" ::: "memory");
                mine.move(sum, next);
                mine.total[0] += here[0], mine.total[1] += here[1];
                begin();
                #pragma unroll
                for (int j = 0; j < 4; ++j) add(sum, weight + 4 * j, by_rows(rows_at + j * 2048));
                commit();
                added(sum);
                let_go(empty(0, LEFT));
                asm volatile("bar.sync 2, 256;" ::: "memory");
                next[0] = shared.base[1][head], next[1] = shared.base[1][head + 8];
                mine.move(sum, next);
                begin();
                #pragma unroll
                for (int j = 0; j < 4; ++j) add(sum, by_dims(weights_1 + j * 32), by_rows(rows_at + BUFFER + j * 2048));
                commit();
                phase ^= 1;
                if (!turn.more) break;
            }
            added(sum);
            let_go(empty(1, LEFT));
        } else {
            while (true) {
                has(1, RIGHT);
                Turn turn = shared.turn[1];
                turn.more = __shfl_sync(~0u, turn.more, 0);
                begin();
                score_tiles(score, q_at, rows_at + BUFFER, 4, 8, 4);
                has(1, LEFT);
                begin();
                score_tiles(score, q_at, rows_at + BUFFER, 0, 4, 4);
                score_tiles(score, q_at, rows_at + BUFFER, 8, 9, 4);
                commit();
                scored(score);
                asm volatile("bar.sync 4, 128;" ::: "memory");
                let_go(shared_at(&shared.q_empty), !turn.more);
                asm volatile("bar.sync 1, 256;" ::: "memory");
                next[0] = shared.base[0][head], next[1] = shared.base[0][head + 8];
                mine.move(sum, next);
                begin();
                #pragma unroll
                for (int j = 0; j < 4; ++j)
                    add(sum, by_dims(weights_0 + j * 32), by_rows(rows_at + 4 * TILE + j * 2048));
                commit();
                mine.find(score, turn.here, own, scale, next);
                mine.weigh(score, scale, next, weight, here);
                keep(weight, weights_1 + row * 128, row, lane);
                if (own == 0) shared.base[1][head] = next[0], shared.base[1][head + 8] = next[1];
                visible();
                asm volatile("bar.arrive 2, 256;" ::: "memory");
                added(sum);
                let_go(empty(0, RIGHT));
                mine.move(sum, next);
                mine.total[0] += here[0], mine.total[1] += here[1];
                begin();
                #pragma unroll
                for (int j = 0; j < 4; ++j)
                    add(sum, weight + 4 * j, by_rows(rows_at + BUFFER + 4 * TILE + j * 2048));
                commit();
                added(sum);
                let_go(empty(1, RIGHT));
                phase ^= 1;
                if (!turn.more) break;
            }
        }
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            mine.total[i] += __shfl_xor_sync(~0u, mine.total[i], 1);
            mine.total[i] += __shfl_xor_sync(~0u, mine.total[i], 2);
            if (own == 0) shared.total[warp >> 2][head + 8 * i] = mine.total[i];
        }
        asm volatile("bar.sync 5, 256;" ::: "memory");
        const int first = w % groups * 64 + head;
        const long long line = (long long)(w / groups) * heads + first;
        float factor[2];
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float total = shared.total[0][head + 8 * i] + shared.total[1][head + 8 * i];
            factor[i] = total == 0.0f ? 0.0f : 1.0f / total;
            if (warp < 4 && own == 0 && first + 8 * i < (int)heads)
                log_sum[line + 8 * i] = total == 0.0f ? __int_as_float(0xff800000)
                                                      : (mine.base[i] + log2f(total)) * 0.6931471805599453f;
        }
        leave(sum, factor, out + line * VALUE + (warp >> 2) * 256, (int)heads - first, own);
    }
}
