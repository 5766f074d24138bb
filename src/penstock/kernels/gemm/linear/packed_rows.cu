// y = x W^T + b of up to 8 TILES rows of x in bfloat16, of a packed weight: codes of 8 or 4 bits, a scale for each block
// of it. A block of threads makes 16 outputs after 16 others, of which each of its warps sums every WARPS-th chunk of the
// inputs. Codes go straight into registers, AHEAD chunks of them ahead: the first before the kernel in front has ended,
// those of the next outputs while these are summed up. A row's sums do not hang on how many rows there are.
//
// Codes are exact in bfloat16, and what a block's sum is, is scaled. Names that are not declared here are set when it is
// compiled: WARPS; AHEAD, even; TILES; KIND, below; SCALE, type of the scales: 0 float, 1 half, 2 bfloat16; ZEROS, type of
// the codes that mean 0: 0 none, 16, 32 bits; SMALL: columns of a block where a chunk has several, else 0; GATE, below;
// HALF: 1 where a row ends with half a chunk, as one of codes of 4 bits may. Two of four threads have no codes of that
// then, and x is 0 where a row has ended.

typedef unsigned int word;
typedef unsigned short half;            // a bfloat16

#define E4M3 0
#define U4 1
#define E2M1 2
#define U8 3
#define FOUR (KIND == U4 || KIND == E2M1)       // codes of 4 bits, of an even column in the low half of a byte
#define CHUNK (FOUR ? 128 : 64)         // inputs, of which a thread has 16 bytes of codes
#define UNITS (FOUR ? 2 : 1)            // of a chunk, of 16 inputs a thread
#define PARTS (SMALL == 16 ? 2 : 1)     // blocks of which a thread has codes
// What e4m3 and e2m1 are as bfloat16s with their exponents: 2^-120 and 2^-126 of what they mean. Inputs bring 2^60 back.
#define LIFTED (KIND == E4M3 || KIND == E2M1)
#define SIXTY 0x5d805d80u               // 2^60, twice
#define LIFT (KIND == E4M3 ? 0x1p60f : 1.f)     // of a sum
#define LIFT_PART 0x1p66f               // of a block's sum of e2m1, as its scale may be small
// What becomes of sums: 0 dense; of experts that gate what goes up, that have no gate, that go down.
#define SILU 1
#define GELU 2
#define CLAMPED 3
#define RELU2 4
#define DOWN 5
#define ZERO (KIND == U4 ? 8 : 128)     // the code that means 0 where blocks have none of their own

// Relaxed, as a load that may be cached would be moved behind the wait for the kernel in front.
__device__ __forceinline__ uint4 codes_of(const unsigned char *at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

__device__ __forceinline__ word word_at(const void *at) {
    word v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

__device__ __forceinline__ half half_at(const void *at) {
    half v;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return v;
}

__device__ __forceinline__ uint4 input(const half *at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ word lifted(word x) {
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(SIXTY));
    return x;
}

__device__ __forceinline__ word less(word x, word y) {
    asm("sub.rn.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
    return x;
}

__device__ __forceinline__ float from_half(half x) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
    return f;
}

__device__ __forceinline__ half rounded(float x) {
    half y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ void add(float *sum, word a0, word a1, word a2, word a3, word b0, word b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};" : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float factor(const unsigned char *scale, int at) {
    if (SCALE == 0) return __uint_as_float(word_at(scale + 4ll * at));
    const half s = half_at(scale + 2ll * at);
    return SCALE == 1 ? from_half(s) : __uint_as_float((word)s << 16);
}

// A code that means 0, as `less` takes it: twice 128 + it as a bfloat16, which of u8 is more than one has.
__device__ __forceinline__ word zero_at(const unsigned char *zeros, int at) {
    const word zero = ZEROS == 16 ? half_at(zeros + 2ll * at) : ZEROS == 32 ? word_at(zeros + 4ll * at) : ZERO;
    return 0x43004300u + zero * 0x10001u;
}

// Pair k of the codes of a word, as bfloat16s: of 8 bits codes 2 k and 2 k + 1, of 4 bits k and k + 4.
__device__ __forceinline__ word pair(word codes, int k, word zero) {
    if (KIND == E4M3) {
        const word at = __byte_perm(codes, 0, k ? 0x3424 : 0x1404);
        return (at & 0x80008000u) | (at >> 4 & 0x07f007f0u);
    }
    if (KIND == U8) {                   // 128 + seven bits, less 128 where the eighth is there, else 256
        const word at = __byte_perm(codes, 0, k ? 0x4342 : 0x4140);
        return less((at & 0x007f007fu) | 0x43004300u, (~at & 0x00800080u) | 0x43004300u);
    }
    const word at = codes >> 4 * k;
    if (KIND == E2M1) return (at << 12 & 0x80008000u) | (at << 6 & 0x01c001c0u);
    return less((at & 0x000f000fu) | 0x43004300u, zero);
}

// The inputs of pair k of a word of eight codes.
__device__ __forceinline__ word inputs_of(const uint4 &x, int k) {
    const word even = k < 2 ? x.x : x.y, odd = k < 2 ? x.z : x.w;
    const word both = __byte_perm(even, odd, k & 1 ? 0x7632 : 0x5410);
    return LIFTED ? lifted(both) : both;
}

// Four threads' four words each: thread q then has the q-th of each.
__device__ __forceinline__ void swap(word *w, int q) {
    #pragma unroll
    for (int bit = 1; bit < 4; bit *= 2)
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            if (!(i & bit)) {
                const word got = __shfl_xor_sync(~0u, q & bit ? w[i] : w[i | bit], bit);
                if (q & bit) w[i] = got;
                else w[i | bit] = got;
            }
}

struct Codes {                          // of a chunk, of two outputs
    uint4 code[2];
    float scale[2][PARTS];
    word zero[2][PARTS];
};

// Adds what a part of a chunk's codes has summed up, with its two outputs' scales.
__device__ __forceinline__ void add_scaled(float *sum, const float *part, float low, float high) {
    #pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] += part[j] * (KIND == E2M1 ? LIFT_PART : 1.f) * (j < 2 ? low : high);
}

// Sixteen outputs' unit of a chunk times TILES of eight rows', each thread's inputs in the same order on both sides.
__device__ __forceinline__ void product(float (*sum)[4], const Codes &of, const word *low, const word *high, int unit,
                                        const uint4 (*x)[2], int lane) {
    if (!FOUR) {
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const word at[8] = {x[n][0].x, x[n][0].y, x[n][0].z, x[n][0].w, x[n][1].x, x[n][1].y, x[n][1].z, x[n][1].w};
            float part[4] = {0, 0, 0, 0};
            #pragma unroll
            for (int k = 0; k < 4; ++k)
                add(part, pair(low[k], 0, 0), pair(high[k], 0, 0), pair(low[k], 1, 0), pair(high[k], 1, 0),
                    LIFTED ? lifted(at[2 * k]) : at[2 * k], LIFTED ? lifted(at[2 * k + 1]) : at[2 * k + 1]);
            add_scaled(sum[n], part, of.scale[0][0], of.scale[1][0]);
        }
        return;
    }
    #pragma unroll
    for (int p = 0; p < 2; ++p) {
        const int j = 2 * unit + p, from = (lane & 28) | j;     // whose block this word is of, where blocks are small
        float scale[2][PARTS];
        word zero[2][PARTS];
        #pragma unroll
        for (int h = 0; h < 2; ++h)
            #pragma unroll
            for (int b = 0; b < PARTS; ++b) {
                scale[h][b] = SMALL ? __shfl_sync(~0u, of.scale[h][b], from) : of.scale[h][b];
                zero[h][b] = SMALL && ZEROS ? __shfl_sync(~0u, of.zero[h][b], from) : of.zero[h][b];
            }
        // Of blocks of 16 columns the first is the first two threads', the second the others'.
        const int mine = PARTS == 2 ? lane >> 1 & 1 : 0;
        const word zl = mine ? zero[0][PARTS - 1] : zero[0][0], zh = mine ? zero[1][PARTS - 1] : zero[1][0];
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
            word at[4];
            #pragma unroll
            for (int k = 0; k < 4; ++k) at[k] = inputs_of(x[n][p], k);
            #pragma unroll
            for (int b = 0; b < PARTS; ++b) {
                float part[4] = {0, 0, 0, 0};
                #pragma unroll
                for (int k = 0; k < 4; k += 2)
                    add(part, pair(low[j], k, zl), pair(high[j], k, zh), pair(low[j], k + 1, zl),
                        pair(high[j], k + 1, zh), PARTS == 1 || b == mine ? at[k] : 0,
                        PARTS == 1 || b == mine ? at[k + 1] : 0);
                add_scaled(sum[n], part, scale[0][b], scale[1][b]);
            }
        }
    }
}

struct Lines {                          // of two outputs, where this thread begins
    const unsigned char *code[2];
    int scale[2];                       // the first of the row
};

// Zeros behind the row's end. shift: a block of the weight has 1 << shift chunks.
__device__ __forceinline__ void load(Codes &to, const Lines &of, const unsigned char *scale, const unsigned char *zeros,
                                     int turn, int warp, int q, int chunks, int shift) {
    const int chunk = turn * WARPS + warp;
    const bool behind = HALF && q > 1 && chunk == chunks - 1;   // sums of such a thread have a large block's scale too
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
        to.code[h] = make_uint4(0, 0, 0, 0);
        #pragma unroll
        for (int b = 0; b < PARTS; ++b) to.scale[h][b] = 0, to.zero[h][b] = 0x43004300u + ZERO * 0x10001u;
        if (chunk < chunks && !(SMALL && behind)) {
            if (!behind) to.code[h] = codes_of(of.code[h] + turn * (WARPS * CHUNK / (FOUR ? 2 : 1)));
            const int at = of.scale[h] + (SMALL ? (chunk * CHUNK + q * 32) / (SMALL ? SMALL : 1) : chunk >> shift);
            #pragma unroll
            for (int b = 0; b < PARTS; ++b) {
                to.scale[h][b] = factor(scale, at + b);
                if (ZEROS) to.zero[h][b] = zero_at(zeros, at + b);
            }
        }
    }
}

struct Job {
    const half *x;
    const unsigned char *weight, *scale, *zeros;
    const half *bias;
    half *out;
    int rows, outputs, inputs;          // of x; of the weight, of one expert's MLP half of which gate, half go up
    long long x_row;
    int block_rows, shift, scales;      // a block of the weight has 1 << shift chunks
    int first;                          // row of the weight
    float weigh;                        // of what goes down
    float alpha, limit;
};

#define GATED (GATE == SILU || GATE == GELU || GATE == CLAMPED)
#define SIDE (GATED ? 8 : 16)           // outputs of a group: with a gate eight of it and the eight that go up

__device__ __forceinline__ float gated(float gate, float up, const Job &of) {
    if (GATE == RELU2) return up < 0 ? 0 : up * up;
    if (GATE == CLAMPED) {              // NaN stays NaN
        gate = gate > of.limit ? of.limit : gate;
        up = (up > of.limit ? of.limit : up < -of.limit ? -of.limit : up) + 1;
        return gate / (1 + __expf(-of.alpha * gate)) * up;
    }
    if (GATE == GELU) return gate / (1 + __expf(-1.5957691216057308f * (gate + .044715f * gate * gate * gate))) * up;
    return gate / (1 + __expf(-gate)) * up;
}

__device__ __forceinline__ void multiply(const Job &of) {
    __shared__ float part[2][WARPS][TILES * 8][17];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
    const int wide = GATED ? of.outputs / 2 : of.outputs;       // outputs of out
    const int chunks = of.inputs / CHUNK + HALF, groups = (wide + SIDE - 1) / SIDE;
    const int turns = (chunks + WARPS * AHEAD - 1) / (WARPS * AHEAD) * AHEAD;
    const long long width = FOUR ? of.inputs / 2 : of.inputs;   // bytes of an output's codes
    const auto lines_of = [&](int group) {
        Lines lines;
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int o = group * SIDE + (GATED ? 0 : h * 8) + g;
            const int own = of.first + (GATED ? h * wide : 0) + (o < wide ? o : wide - 1);
            lines.code[h] = of.weight + own * width + warp * (CHUNK / (FOUR ? 2 : 1)) + q * 16;
            lines.scale[h] = own / of.block_rows * of.scales;
        }
        return lines;
    };
    Codes w[AHEAD];
    uint4 b[2][TILES][2];
    Lines here = lines_of(blockIdx.x);
    const auto load_w = [&](int i, const Lines &from, int turn) {
        load(w[i], from, of.scale, of.zeros, turn, warp, q, chunks, of.shift);
    };
    #pragma unroll
    for (int i = 0; i < AHEAD; ++i) load_w(i, here, i);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const half *of_row[TILES];
    #pragma unroll
    for (int n = 0; n < TILES; ++n) {
        const int t = n * 8 + g, own = t < of.rows ? t : of.rows - 1;
        of_row[n] = of.x + own * of.x_row + q * (SMALL ? 8 : CHUNK / 4);
    }
    const auto load_x = [&](int slot, int turn, int unit) {     // the first there are, where there is no chunk
        const int at = turn * WARPS + warp, chunk = at < chunks ? at : 0;
        const bool behind = HALF && (SMALL ? unit : q > 1) && chunk == chunks - 1;
        #pragma unroll
        for (int n = 0; n < TILES; ++n)
            #pragma unroll
            for (int p = 0; p < 2; ++p)
                b[slot][n][p] = behind ? make_uint4(0, 0, 0, 0) : input(of_row[n] + chunk * CHUNK + (
                    SMALL ? unit * 64 + p * 32 : unit * 16 + p * 8));
    };
    load_x(0, 0, 0);
    load_x(1, 2 - UNITS, UNITS - 1);
    int side = 0;
    for (int group = blockIdx.x; group < groups; group += gridDim.x, side ^= 1) {
        const int next = group + gridDim.x;
        const Lines then = lines_of(next < groups ? next : group);
        float sum[TILES][4] = {};
        for (int start = 0; start < turns; start += AHEAD) {
            const bool last = start + AHEAD == turns, more = !last || next < groups;
            const Lines from = last ? then : here;
            const int at = last ? 0 : start + AHEAD;
            #pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                word low[4] = {w[i].code[0].x, w[i].code[0].y, w[i].code[0].z, w[i].code[0].w};
                word high[4] = {w[i].code[1].x, w[i].code[1].y, w[i].code[1].z, w[i].code[1].w};
                if (SMALL) swap(low, q), swap(high, q);
                #pragma unroll
                for (int unit = 0; unit < UNITS; ++unit) {
                    product(sum, w[i], low, high, unit, b[(i * UNITS + unit) % 2], lane);
                    const int later = i + 2 / UNITS;            // of which the same unit is read next
                    if (unit == UNITS - 1 && more) load_w(i, from, at + i);
                    load_x((i * UNITS + unit) % 2, later < AHEAD ? start + later : at + later - AHEAD, unit);
                }
            }
        }
        here = then;
        #pragma unroll
        for (int n = 0; n < TILES; ++n)
            #pragma unroll
            for (int j = 0; j < 4; ++j) part[side][warp][n * 8 + q * 2 + (j & 1)][(j >> 1) * 8 + g] = sum[n][j];
        __syncthreads();
        for (int at = threadIdx.x; at < of.rows * SIDE; at += WARPS * 32) {
            const int i = at % SIDE, o = group * SIDE + i, t = at / SIDE;
            if (o >= wide) continue;
            const auto summed = [&](int i, int row) {
                float y = 0;
                #pragma unroll
                for (int of_warp = 0; of_warp < WARPS; ++of_warp) y += part[side][of_warp][t][i];
                return y * LIFT + (of.bias ? __uint_as_float((word)of.bias[of.first + row] << 16) : 0);
            };
            float y = summed(i, o);
            if (GATED) y = gated(y, summed(8 + i, wide + o), of);
            if (GATE == RELU2) y = gated(0, y, of);
            if (GATE == DOWN) y *= of.weigh;
            of.out[(long long)t * wide + o] = rounded(y);
        }
    }
}

#if !GATE
extern "C" __global__ void __launch_bounds__(WARPS * 32, 16 / WARPS)
packed_rows(const half *x, const unsigned char *weight, const unsigned char *scale, const unsigned char *zeros,
            const half *bias, half *out, long long rows, long long outputs, long long inputs, long long x_row,
            long long block_rows, long long block_shift, long long scales) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    multiply({x, weight, scale, zeros, bias, out, (int)rows, (int)outputs, (int)inputs, x_row, (int)block_rows,
              (int)block_shift, (int)scales});
}
#else
// Of the experts that one token chose: a block of threads some outputs of one, into its row of out. What goes down has
// a row of x for each.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 16 / WARPS)
packed_experts(const half *x, const unsigned char *weight, const unsigned char *scale, const unsigned char *zeros,
               const half *bias, half *out, const long long *expert, const float *weighs, long long outputs,
               long long inputs, long long block_rows, long long block_shift, long long scales, long long first,
               long long experts, long long alpha, long long limit) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int m = blockIdx.y;
    const long long mine = expert[m] - first;
    if (mine < 0 || mine >= experts) return;
    const long long wide = GATED ? outputs / 2 : outputs;
    multiply({x + (GATE == DOWN ? m * inputs : 0), weight, scale, zeros, bias, out + m * wide, 1, (int)outputs,
              (int)inputs, 0, (int)block_rows, (int)block_shift, (int)scales, (int)(mine * outputs), weighs[m],
              __uint_as_float((word)alpha), __uint_as_float((word)limit)});
}
#endif
