// Scores of every token that a query sees, of keys as their pages have them. Four warps multiply together what each
// of them brings for itself: 16 keys in one copy. Queries of keys in fp8 are in fp8.
//
// Names that are not declared here are set when it is compiled: SIZE tokens a page, a multiple of 16; HEADS of the
// indexer, up to 64; CODED, whether keys are in fp8 or in bfloat16.

typedef unsigned char byte;
typedef unsigned int word;
typedef unsigned long long address;

#define DIM 128
#define KEY (CODED ? DIM + 4 : DIM * 2)  // bytes of a key: its codes and a float32 that scales them, or its dims
#define STEPS (CODED ? 4 : 8)           // in which a key is multiplied, of 32 bytes of it
#define TOKENS 16                       // of a turn of one warp
#define TURN (TOKENS * KEY)
#define WARPS 4
#define STAGES 3                        // turns that are on their way
#define PADDED 64                       // heads that are multiplied

__device__ __forceinline__ word shared_at(const void *p) { return (word)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void wait_for(word barrier, word phase) {
    word done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
    } while (!done);
}

__device__ __forceinline__ void bring(word to, const byte *from, word barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(TURN) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"((address)from), "r"(TURN), "r"(barrier) : "memory");
}

// A matrix of 64 heads in shared memory, 16 bytes of each next to each other: columns, two to a step.
__device__ __forceinline__ address matrix(const void *p) {
    return (shared_at(p) & 0x3ffff) >> 4 | (address)(PADDED * 16 >> 4) << 16 | (address)(8 * 16 >> 4) << 32;
}

#define SUMS(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7])

#if CODED
#define PRODUCT "m64n64k32.f32.e4m3.e4m3"
#define AS_IS "p, 1, 1"
#else
#define PRODUCT "m64n64k16.f32.bf16.bf16"
#define AS_IS "p, 1, 1, 0"
#endif

// sum (+)= 16 keys of each warp times 64 heads, over 32 bytes of each.
__device__ __forceinline__ void multiply(float *sum, const word *a, address b, int more) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned." PRODUCT " "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
        "%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, " AS_IS "; }"
        : SUMS((sum)), SUMS((sum + 8)), SUMS((sum + 16)), SUMS((sum + 24))
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, CODED ? 4 : 3)
score_keys(const uint4 *q, const float *weight, const byte *key, const int *table, const int *row,
           const int *position, float *score, long long q_row, long long weight_row,
           long long key_page, long long table_row, long long most, long long news) {
    // Strides of weight and table in elements, of keys and queries in bytes; `most` tokens are a line of scores. Of
    // no row more than `news` keys, its last, are written by kernels in front that may not have ended.
    extern __shared__ __align__(128) byte room[];       // columns of queries, then what is brought
    byte (*q_code)[PADDED][16] = (byte (*)[PADDED][16])room;
    byte (*kept)[STAGES][TURN] = (byte (*)[STAGES][TURN])(room + 2 * STEPS * PADDED * 16);
    __shared__ __align__(8) address barriers[WARPS][STAGES];
    __shared__ __align__(8) float counts[PADDED];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, part = lane & 3;
    const long long b = blockIdx.y;
    // Nothing of ours writes positions and tables.
    const int end = position[b] + 1, line = row[b];
    const int *pages = table + (long long)max(line, 0) * table_row;
    const int step = gridDim.x * WARPS * TOKENS, own_first = (blockIdx.x * WARPS + warp) * TOKENS;
    if (lane == 0)
        for (int s = 0; s < STAGES; ++s)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_at(&barriers[warp][s])));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    int ahead = own_first, page = 0;        // the turn that is brought next, of which the page is known
    const auto begin = [&](int s, int before) {
        for (; lane == 0 && line >= 0 && s < STAGES && ahead < before; ++s, ahead += step)
            bring(shared_at(kept[warp][s]), key + pages[ahead / SIZE] * key_page + ahead % SIZE * KEY,
                  shared_at(&barriers[warp][s]));
        return s;
    };
    const int begun = begin(0, end - TOKENS - (int)news + 1);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (line < 0 || blockIdx.x * WARPS * TOKENS >= end) return;
    begin(begun, end);
    if (lane == 0 && ahead < end) page = pages[ahead / SIZE];
    {   // Half a head's query by each thread. Dim d lies where a key's word of it is multiplied: a lane takes
        // neighbours, as then few or none collide.
        const int head = threadIdx.x >> 1, half = threadIdx.x & 1;
        const bool used = head < HEADS;
        const uint4 *from = (const uint4 *)((const byte *)q + b * q_row + head * STEPS * 32) + half * STEPS;
        if (half == 0) counts[head] = used ? weight[b * weight_row + head] : 0.0f;
        #pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const uint4 some = used ? from[i] : make_uint4(0, 0, 0, 0);
            const word four[4] = {some.x, some.y, some.z, some.w};
            const int of = half * STEPS + i;                    // 16 bytes of the key
            #pragma unroll
            for (int j = 0; j < 4; ++j)
                *(word *)&q_code[CODED ? (of & 1) * 4 + j : (of >> 2) * 4 + j][head][(CODED ? of >> 1 : of & 3) * 4] =
                    four[j];
        }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const address heads = matrix(q_code[0]);
    float *to = score + b * most;
    int stage = 0;
    word phase = 0;
    for (int first = own_first; first - warp * TOKENS < end; first += step) {
        word a[STEPS][4];
        float own = CODED ? 0.0f : 1.0f;
        if (first < end) {
            wait_for(shared_at(&barriers[warp][stage]), phase);
#if CODED
            const word *low = (const word *)kept[warp][stage] + group * (KEY / 4), *high = low + 8 * (KEY / 4);
            #pragma unroll
            for (int s = 0; s < 4; ++s) {
                const int at = 8 * part + 2 * s;
                a[s][0] = low[at], a[s][1] = high[at], a[s][2] = low[at + 1], a[s][3] = high[at + 1];
            }
            own = __uint_as_float((part & 1 ? high : low)[DIM / 4]);
#else
            const uint4 *low = (const uint4 *)(kept[warp][stage] + group * KEY), *high = low + 8 * (KEY / 16);
            #pragma unroll
            for (int s = 0; s < STEPS; s += 2) {
                const uint4 x = low[2 * s + part], y = high[2 * s + part];
                a[s][0] = x.x, a[s][1] = y.x, a[s][2] = x.y, a[s][3] = y.y;
                a[s + 1][0] = x.z, a[s + 1][1] = y.z, a[s + 1][2] = x.w, a[s + 1][3] = y.w;
            }
#endif
        } else {
            #pragma unroll
            for (int s = 0; s < STEPS; ++s) a[s][0] = a[s][1] = a[s][2] = a[s][3] = 0;
        }
        float sum[32];
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        #pragma unroll
        for (int s = 0; s < STEPS; ++s) multiply(sum, a[s], heads + s * (2 * PADDED * 16 >> 4), s > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        __syncwarp();                       // all have read what is written over now
        if (lane == 0 && ahead < end) {
            bring(shared_at(kept[warp][stage]), key + page * key_page + ahead % SIZE * KEY,
                  shared_at(&barriers[warp][stage]));
            ahead += step;
            if (ahead < end) page = pages[ahead / SIZE];
        }
        if (++stage == STAGES) stage = 0, phase ^= 1;
        asm volatile("wgmma.wait_group.sync.aligned 0;" : SUMS((sum)), SUMS((sum + 8)), SUMS((sum + 16)),
                     SUMS((sum + 24)) :: "memory");
        float x = 0.0f, y = 0.0f;
        #pragma unroll
        for (int n = 0; n < PADDED / 8; ++n) {
            const float2 count = *(const float2 *)&counts[8 * n + 2 * part];
            x = fmaf(fmaxf(sum[4 * n], 0.0f), count.x, x);
            x = fmaf(fmaxf(sum[4 * n + 1], 0.0f), count.y, x);
            y = fmaf(fmaxf(sum[4 * n + 2], 0.0f), count.x, y);
            y = fmaf(fmaxf(sum[4 * n + 3], 0.0f), count.y, y);
        }
        x += __shfl_xor_sync(~0u, x, 1);
        y += __shfl_xor_sync(~0u, y, 1);
        x += __shfl_xor_sync(~0u, x, 2);
        y += __shfl_xor_sync(~0u, y, 2);
        // Of four lanes the first writes row `group`, the second row 8 + `group`.
        const int token = first + group + (part & 1) * 8;
        if (part < 2 && token < end) to[token] = (part ? y : x) * own;
    }
}
