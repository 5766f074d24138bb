// y = x W^T + b of up to 8 TILES rows of x in bfloat16, of a weight in e4m3 with a float32 scale for each block of it. A
// block of threads makes 16 outputs after 16 others, of which each of its warps sums every WARPS-th chunk of the inputs.
// Codes go straight into registers, AHEAD chunks of them ahead: the first before the kernel in front has ended, those
// of the next outputs while these are summed up. A row's sums do not hang on how many rows there are.
//
// Names that are not declared here are set when it is compiled: WARPS; AHEAD, even; TILES.

typedef unsigned int word;
typedef unsigned short half;            // a bfloat16

#define CHUNK 64                        // inputs, of which a thread has 16 that follow one another
#define LIFTED 0x5d805d80u              // 2^60, twice
#define LIFT 0x1p60f                    // with that what a code is as a bfloat16, 2^-120 of it, is again what it is

// Relaxed, as a load that may be cached would be moved behind the wait for the kernel in front.
__device__ __forceinline__ uint4 codes_of(const unsigned char *at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

__device__ __forceinline__ float factor(const float *at) {
    float f;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(f) : "l"(at));
    return f;
}

__device__ __forceinline__ uint4 input(const half *at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ word lifted(word x) {
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(LIFTED));
    return x;
}

// Two of four codes as bfloat16: sign, exponent and fraction where those of a bfloat16 are.
__device__ __forceinline__ word wide(word codes, word which) {
    const word at = __byte_perm(codes, 0, which);
    return (at & 0x80008000u) | (at >> 4 & 0x07f007f0u);
}

__device__ __forceinline__ void add(float *sum, word a0, word a1, word a2, word a3, word b0, word b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};" : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Sixteen outputs' chunk times TILES of eight rows', each thread's inputs in the same order on both sides.
__device__ __forceinline__ void product(float (*sum)[4], const uint4 *w, const float *scale, const uint4 (*x)[2]) {
    const word low[4] = {w[0].x, w[0].y, w[0].z, w[0].w}, high[4] = {w[1].x, w[1].y, w[1].z, w[1].w};
    #pragma unroll
    for (int n = 0; n < TILES; ++n) {
        const word of[8] = {x[n][0].x, x[n][0].y, x[n][0].z, x[n][0].w, x[n][1].x, x[n][1].y, x[n][1].z, x[n][1].w};
        float part[4] = {0, 0, 0, 0};
        #pragma unroll
        for (int k = 0; k < 4; ++k)
            add(part, wide(low[k], 0x1404), wide(high[k], 0x1404), wide(low[k], 0x3424), wide(high[k], 0x3424),
                lifted(of[2 * k]), lifted(of[2 * k + 1]));
        #pragma unroll
        for (int j = 0; j < 4; ++j) sum[n][j] += part[j] * scale[j >> 1];
    }
}

struct Lines {                          // of two outputs, where this thread begins
    const unsigned char *code[2];
    const float *scale[2];
};

// Zeros behind the last chunk. shift: a block of the weight has 1 << shift chunks.
__device__ __forceinline__ void load(uint4 *w, float *s, const Lines &of, int turn, int warp, int chunks, int shift) {
    const int chunk = turn * WARPS + warp;
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
        w[h] = make_uint4(0, 0, 0, 0);
        s[h] = 0;
        if (chunk < chunks) {
            w[h] = codes_of(of.code[h] + turn * (WARPS * CHUNK));
            s[h] = factor(of.scale[h] + (chunk >> shift));
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
scaled_rows(const half *x, const unsigned char *weight, const float *scale, const half *bias, half *out,
            long long rows, long long outputs, long long inputs, long long x_row, long long block_rows,
            long long block_shift, long long scales) {
    __shared__ float part[2][WARPS][TILES * 8][17];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
    const int chunks = (int)inputs / CHUNK, groups = ((int)outputs + 15) / 16, shift = (int)block_shift;
    const int turns = (chunks + WARPS * AHEAD - 1) / (WARPS * AHEAD) * AHEAD;
    const auto lines_of = [&](int group) {
        Lines of;
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int o = group * 16 + h * 8 + g, own = o < outputs ? o : (int)outputs - 1;
            of.code[h] = weight + own * inputs + warp * CHUNK + q * 16;
            of.scale[h] = scale + own / (int)block_rows * scales;
        }
        return of;
    };
    uint4 w[AHEAD][2], b[2][TILES][2];
    float s[AHEAD][2];
    Lines here = lines_of(blockIdx.x);
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    #pragma unroll
    for (int i = 0; i < AHEAD; ++i) load(w[i], s[i], here, i, warp, chunks, shift);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const half *of_row[TILES];
    #pragma unroll
    for (int n = 0; n < TILES; ++n) {
        const int t = n * 8 + g;
        of_row[n] = x + (t < rows ? t : rows - 1) * x_row + q * 16;
    }
    const auto load_x = [&](int slot, int turn) {       // the first there are, where there are no codes
        const int chunk = turn * WARPS + warp;
        #pragma unroll
        for (int n = 0; n < TILES; ++n)
            #pragma unroll
            for (int p = 0; p < 2; ++p)
                b[slot][n][p] = input(of_row[n] + (chunk < chunks ? chunk * CHUNK : 0) + p * 8);
    };
    load_x(0, 0);
    load_x(1, 1);
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
                product(sum, w[i], s[i], b[i % 2]);
                if (more) load(w[i], s[i], from, at + i, warp, chunks, shift);
                load_x(i % 2, i + 2 < AHEAD ? start + i + 2 : at + i + 2 - AHEAD);
            }
        }
        here = then;
        #pragma unroll
        for (int n = 0; n < TILES; ++n)
            #pragma unroll
            for (int j = 0; j < 4; ++j) part[side][warp][n * 8 + q * 2 + (j & 1)][(j >> 1) * 8 + g] = sum[n][j];
        __syncthreads();
        for (int at = threadIdx.x; at < rows * 16; at += WARPS * 32) {
            const int o = group * 16 + at % 16, t = at / 16;
            if (o >= outputs) continue;
            float y = 0;
            #pragma unroll
            for (int of_warp = 0; of_warp < WARPS; ++of_warp) y += part[side][of_warp][t][at % 16];
            y *= LIFT;
            if (bias) y += __uint_as_float((word)bias[o] << 16);
            half rounded;
            asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(y));
            out[(long long)t * outputs + o] = rounded;
        }
    }
}
