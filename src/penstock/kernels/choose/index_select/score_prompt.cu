// Scores of every token that queries of a prompt see. A warp brings 64 keys at a time, once for all queries of a block;
// each of GROUPS warp groups multiplies them with the heads of two queries of its own, and sums while others multiply.
//
// Names that are not declared here are set when it is compiled: SIZE tokens a page, a multiple of 16; HEADS of the
// indexer, up to 64; CODED, whether queries and keys are in fp8 or in bfloat16; GROUPS, 3 or 4; STAGES of keys.

typedef unsigned char byte;
typedef unsigned int word;
typedef unsigned long long address;

#define DIM 128
#define KEY (CODED ? DIM + 4 : DIM * 2)     // bytes of a key: its codes and a float32 that scales them, or its dims
#define STEPS (CODED ? 4 : 8)               // in which a key is multiplied, of 32 bytes of it
#define TILE 64                             // keys that are brought together
#define RUN (SIZE % 64 == 0 ? 64 : SIZE % 32 == 0 ? 32 : 16)      // of them, by one copy
#define QUERIES (2 * GROUPS)
#define WIDE 128                            // heads of two queries
#define COLUMN (WIDE * 16)                  // 16 bytes of each of them
#define COLUMNS (2 * STEPS)

__device__ __forceinline__ word shared_at(const void *p) { return (word)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void expect(word barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void wait_for(word barrier, word phase) {
    word done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
    } while (!done);
}

// Two queries' heads in shared memory, 16 bytes of each next to each other: columns, two to a step.
__device__ __forceinline__ word matrix(const void *p) {
    return (shared_at(p) & 0x3ffff) >> 4 | (word)(COLUMN >> 4) << 16;
}

#define SUMS(x) "+f"((x)[0]), "+f"((x)[1]), "+f"((x)[2]), "+f"((x)[3]), "+f"((x)[4]), "+f"((x)[5]), "+f"((x)[6]), \
    "+f"((x)[7])
#define ALL_SUMS(x) SUMS(x), SUMS(x + 8), SUMS(x + 16), SUMS(x + 24), SUMS(x + 32), SUMS(x + 40), SUMS(x + 48), \
    SUMS(x + 56)

#if CODED
#define PRODUCT "m64n128k32.f32.e4m3.e4m3"
#define AS_IS "p, 1, 1"
#else
#define PRODUCT "m64n128k16.f32.bf16.bf16"
#define AS_IS "p, 1, 1, 0"
#endif

// sum (+)= 64 keys times two queries' heads, over 32 bytes of each.
__device__ __forceinline__ void multiply(float *sum, const word *a, word b, int more) {
    asm volatile("{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, %69, 0; mov.b64 b, {%68, %70}; wgmma.mma_async.sync.aligned." PRODUCT " "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
        "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"
        "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, b, " AS_IS "; }"
        : ALL_SUMS(sum) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(more), "n"(8 * 16 >> 4));
}

extern "C" __global__ void __launch_bounds__(128 * GROUPS + 128, 1)
score_prompt(const byte *q, const float *weight, const byte *key, const int *table, const int *row,
             const int *position, float *score, long long q_row, long long weight_row, long long key_page,
             long long table_row, long long most, long long num, long long part) {
    // Strides of weight and table in elements, of keys and queries in bytes; `most` tokens are a line of scores; `num`
    // queries; a block has `part` tokens of each row that its queries are of, a multiple of TILE.
    extern __shared__ __align__(128) byte room[];       // queries of each group, then what is brought
    byte *kept = room + GROUPS * COLUMNS * COLUMN;
    __shared__ __align__(8) address full[STAGES], empty[STAGES];
    __shared__ int line_of[QUERIES], end_of[QUERIES], until[QUERIES];
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5, first = blockIdx.x * (int)part;
    const long long b = (long long)blockIdx.y * QUERIES;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (t < QUERIES) {
        line_of[t] = b + t < num ? row[b + t] : -1;
        end_of[t] = line_of[t] < 0 ? 0 : position[b + t] + 1;
    }
    if (t == QUERIES) {
        for (int s = 0; s < STAGES; ++s) expect(shared_at(full + s), 1), expect(shared_at(empty + s), 4 * GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    int most_of_row = 0;
    if (t < QUERIES) {                      // where the first query of each row has it end, 0 of the others
        for (int n = 0; n < QUERIES; ++n) {
            if (line_of[n] != line_of[t]) continue;
            if (n < t) { most_of_row = 0; break; }
            most_of_row = max(most_of_row, min(end_of[n], first + (int)part));
        }
        until[t] = most_of_row;
    }
    if (!__syncthreads_or(most_of_row > first)) return;
    int turn = -1, token = 0, limit = 0;    // row after row, from `first` on
    const auto next = [&]() {
        token += TILE;
        while (token >= limit) {
            if (++turn == QUERIES) return false;
            token = first, limit = until[turn];
        }
        return true;
    };
    if (warp >= 4 * GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp > 4 * GROUPS) return;
        int stage = 0;
        word phase = 1;
        for (bool more = next(); more;) {
            const int at = token + lane * RUN;
            const byte *from = 0;           // of the lanes that bring
            if (lane * RUN < TILE && at < limit)
                from = key + (table + line_of[turn] * table_row)[at / SIZE] * key_page + at % SIZE * KEY;
            const int runs = min((limit - token + RUN - 1) / RUN, TILE / RUN);
            const word barrier = shared_at(full + stage), to = shared_at(kept) + stage * TILE * KEY;
            more = next();
            wait_for(shared_at(empty + stage), phase);
            if (lane == 0)
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                             :: "r"(barrier), "r"(runs * RUN * KEY) : "memory");
            __syncwarp();
            if (from)
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                             :: "r"(to + lane * RUN * KEY), "l"((address)from), "r"(RUN * KEY), "r"(barrier)
                             : "memory");
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(GROUPS == 3 ? 160 : 120));
        const int group = warp >> 2, column = lane >> 2, own = lane & 3;
        byte *mine = room + group * COLUMNS * COLUMN;
        {   // A head's query by each thread. Dim d lies where a key's word of it is multiplied.
            const int head = t & 63;
            const bool used = head < HEADS && b + (t >> 6) < num;
            const uint4 *from = (const uint4 *)(q + (b + (t >> 6)) * q_row + head * DIM * (CODED ? 1 : 2));
            byte *to = mine + (t & 127) * 16;
            #pragma unroll
            for (int m = 0; m < (CODED ? 1 : 4); ++m) {
                uint4 x[CODED ? 8 : 4];
                #pragma unroll
                for (int i = 0; i < (CODED ? 8 : 4); ++i)
                    x[i] = used ? from[m * 4 + i] : make_uint4(0, 0, 0, 0);
#if CODED
                #pragma unroll
                for (int h = 0; h < 2; ++h) {
                    *(uint4 *)(to + (4 * h) * COLUMN) = make_uint4(x[h].x, x[h + 2].x, x[h + 4].x, x[h + 6].x);
                    *(uint4 *)(to + (4 * h + 1) * COLUMN) = make_uint4(x[h].y, x[h + 2].y, x[h + 4].y, x[h + 6].y);
                    *(uint4 *)(to + (4 * h + 2) * COLUMN) = make_uint4(x[h].z, x[h + 2].z, x[h + 4].z, x[h + 6].z);
                    *(uint4 *)(to + (4 * h + 3) * COLUMN) = make_uint4(x[h].w, x[h + 2].w, x[h + 4].w, x[h + 6].w);
                }
#else
                *(uint4 *)(to + (4 * m) * COLUMN) = make_uint4(x[0].x, x[1].x, x[2].x, x[3].x);
                *(uint4 *)(to + (4 * m + 1) * COLUMN) = make_uint4(x[0].y, x[1].y, x[2].y, x[3].y);
                *(uint4 *)(to + (4 * m + 2) * COLUMN) = make_uint4(x[0].z, x[1].z, x[2].z, x[3].z);
                *(uint4 *)(to + (4 * m + 3) * COLUMN) = make_uint4(x[0].w, x[1].w, x[2].w, x[3].w);
#endif
            }
        }
        float count[2][16];                     // of heads 8n + 2 own and the next
        #pragma unroll
        for (int j = 0; j < 2; ++j)
            #pragma unroll
            for (int n = 0; n < 16; ++n) {
                const int head = n / 2 * 8 + 2 * own + n % 2;
                const long long at = b + 2 * group + j;
                count[j][n] = head < HEADS && at < num ? weight[at * weight_row + head] : 0.0f;
            }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" :: "r"(group + 1) : "memory");
        const word heads = matrix(mine);
        // What this lane writes: of one of the two queries, one of two tokens.
        const int query = 2 * group + (own >> 1), behind = (warp & 3) * 16 + column;
        const int end = end_of[query] - behind - (own & 1) * 8;
        const int to = (int)((b + query) * most) + behind + (own & 1) * 8;
        word turns = 0;                         // that are of its row
        for (int n = 0; n < QUERIES; ++n) turns |= (line_of[query] >= 0 && line_of[n] == line_of[query]) << n;
        int stage = 0;
        word phase = 0;
        while (next()) {
            wait_for(shared_at(full + stage), phase);
            word a[STEPS][4];
            const byte *line = kept + stage * TILE * KEY + behind * KEY;
            float scale = 1.0f;
#if CODED
            const word *low = (const word *)line, *high = low + 8 * (KEY / 4);
            #pragma unroll
            for (int s = 0; s < 4; ++s) {
                const int at = 8 * own + 2 * s;
                a[s][0] = low[at], a[s][1] = high[at], a[s][2] = low[at + 1], a[s][3] = high[at + 1];
            }
            scale = __uint_as_float((own & 1 ? high : low)[DIM / 4]);
#else
            const uint4 *low = (const uint4 *)line, *high = low + 8 * (KEY / 16);
            #pragma unroll
            for (int s = 0; s < STEPS; s += 2) {
                const uint4 x = low[2 * s + own], y = high[2 * s + own];
                a[s][0] = x.x, a[s][1] = y.x, a[s][2] = x.y, a[s][3] = y.y;
                a[s + 1][0] = x.z, a[s + 1][1] = y.z, a[s + 1][2] = x.w, a[s + 1][3] = y.w;
            }
#endif
            float sum[64];
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            #pragma unroll
            for (int s = 0; s < STEPS; ++s) multiply(sum, a[s], heads + s * (2 * COLUMN >> 4), s > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            __syncwarp();                       // all have read what may be written over now
            if (lane == 0)
                asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_at(empty + stage)) : "memory");
            if (++stage == STAGES) stage = 0, phase ^= 1;
            asm volatile("wgmma.wait_group.sync.aligned 0;" : ALL_SUMS(sum) :: "memory");
            float x[2][2] = {};                 // of two queries and two tokens
            #pragma unroll
            for (int n = 0; n < 16; ++n)
                #pragma unroll
                for (int j = 0; j < 2; ++j)
                    #pragma unroll
                    for (int i = 0; i < 2; ++i)
                        x[j][i] = fmaf(fmaxf(sum[32 * j + n / 2 * 4 + 2 * i + n % 2], 0.0f), count[j][n], x[j][i]);
            // Four lanes have a part of four sums each: each gets one of them whole.
            const float of_0 = own & 1 ? x[0][1] : x[0][0], of_1 = own & 1 ? x[1][1] : x[1][0];
            const float by_0 = __shfl_xor_sync(~0u, own & 1 ? x[0][0] : x[0][1], 1);
            const float by_1 = __shfl_xor_sync(~0u, own & 1 ? x[1][0] : x[1][1], 1);
            const float so_0 = of_0 + by_0, so_1 = of_1 + by_1;
            const float all = (own & 2 ? so_1 : so_0) + __shfl_xor_sync(~0u, own & 2 ? so_0 : so_1, 2);
            if (turns >> turn & 1 && token < end) score[to + token] = all * scale;
        }
    }
}
