// The tokens with the highest scores of one query, ascending, by one block of 1,024 threads: counted in bins, a
// list of what is in the bin of the cut, and then one pass in which each of 32 warps has a part of the tokens,
// in order. Exact; of more in that bin than the list holds by halves, which is slow.
//
// Names that are not declared here are set when it is compiled: BINS, a multiple of 1,024; NEAR entries of the
// list; ROUNDS of 1,024 tokens that a query has at most, a multiple of 32.

#include "c/warps.cuh"

#define WARPS 32
#define EACH (BINS / WARPS / 32)

// As `topn.key_of` and `topn.bin_of`.
__device__ __forceinline__ word key_of(float x) {
    const int bits = x == 0.0f ? 0 : __float_as_int(x);
    return (word)(bits ^ (bits >> 31 & 0x7fffffff)) ^ 0x80000000u;
}

__device__ __forceinline__ int bin_of(float x) {
    const int part = BINS / 2 / 16;
    const int bits = x == 0.0f ? 0 : __float_as_int(x);
    const int size = min(max((bits & 0x7fffffff) / (0x800000 / part) - (127 - 8) * part, 0), BINS / 2 - 1);
    return bits < 0 ? BINS / 2 + size : BINS / 2 - 1 - size;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
choose_keys(const float *score, const int *position, int *chosen, long long most, long long topk) {
    __shared__ int bins[BINS];
    __shared__ word near_key[NEAR];
    __shared__ int sums[WARPS], more_sums[WARPS], equal_sums[WARPS], cut_bin, above, num, larger, count;
    __shared__ word cut;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, top = (int)topk;
    const long long b = blockIdx.x;
    const int end = position[b] + 1;        // nothing of ours writes it
    for (int n = threadIdx.x; n < BINS; n += 32 * WARPS) bins[n] = 0;
    if (threadIdx.x == 0) num = 0;
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int *out = chosen + b * topk;
    if (end <= top) {
        for (int n = threadIdx.x; n < top; n += 32 * WARPS) out[n] = n < end ? n : -1;
        return;
    }
    const float *from = score + b * most;
    const int rounds = (end + 32 * WARPS - 1) / (32 * WARPS), first = warp * rounds * 32 + lane;
    #pragma unroll 8
    for (int j = 0; j < rounds; ++j) {
        const int t = first + j * 32;
        if (t < end) atomicAdd(bins + bin_of(from[t]), 1);
    }
    __syncthreads();
    // The bin in which the cut is, and how many are in those of larger scores.
    int of[EACH], mine = 0;
    #pragma unroll
    for (int j = 0; j < EACH; ++j) mine += of[j] = bins[(warp * EACH + j) * 32 + lane];
    mine = sum_before(mine, lane);
    if (lane == 31) sums[warp] = mine;
    __syncthreads();
    const int before = sum_before(sums[lane], lane);
    const int line = __popc(__ballot_sync(~0u, before < top));
    if (warp == line) {
        int so_far = line ? __shfl_sync(~0u, before, line - 1) : 0;
        #pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int with = so_far + sum_before(of[j], lane);
            const word short_of = __ballot_sync(~0u, with < top);
            if (so_far < top && short_of != ~0u) {
                const int at = __popc(short_of);
                if (lane == at) cut_bin = line * (32 * EACH) + j * 32 + lane, above = with - of[j];
            }
            so_far = __shfl_sync(~0u, with, 31);
        }
    }
    __syncthreads();
    const int want = top - above, middle = cut_bin;
    #pragma unroll 8
    for (int j = 0; j < rounds; ++j) {
        const int t = first + j * 32;
        const float x = t < end ? from[t] : 0.0f;
        if (t < end && bin_of(x) == middle) {
            const int at = atomicAdd(&num, 1);
            if (at < NEAR) near_key[at] = key_of(x);
        }
    }
    __syncthreads();
    const int listed = num;
    if (listed <= NEAR) {
        for (int n = threadIdx.x; n < listed; n += 32 * WARPS) {
            const word key = near_key[n];
            int more = 0, equal = 0;
            #pragma unroll 8
            for (int k = 0; k < listed; ++k) {
                more += near_key[k] > key;
                equal += near_key[k] == key;
            }
            if (more < want && want <= more + equal) cut = key, larger = more;    // all that say it say the same
        }
    } else {
        word low = 0, high = ~0u;           // at least `want` of the bin's keys are no smaller than `low`
        while (low < high) {
            const word half = low + ((high - low) >> 1) + 1;
            int found = 0;
            for (int j = 0; j < rounds; ++j) {
                const int t = first + j * 32;
                if (t < end && bin_of(from[t]) == middle) found += key_of(from[t]) >= half;
            }
            if (threadIdx.x == 0) count = 0;
            __syncthreads();
            if (found) atomicAdd(&count, found);
            __syncthreads();
            if (count >= want) low = half; else high = half - 1;
            __syncthreads();
        }
        int found = 0;
        for (int j = 0; j < rounds; ++j) {
            const int t = first + j * 32;
            if (t < end && bin_of(from[t]) == middle) found += key_of(from[t]) > low;
        }
        if (threadIdx.x == 0) count = 0;
        __syncthreads();
        if (found) atomicAdd(&count, found);
        __syncthreads();
        if (threadIdx.x == 0) cut = low, larger = count;
    }
    __syncthreads();
    // What is larger than the cut is taken, and of what equals it the first `spare`.
    const word limit = cut;
    const int spare = want - larger;
    word more_of[ROUNDS / 32], equal_of[ROUNDS / 32];       // a lane has those of its own rounds
    int more = 0, equal = 0;
    #pragma unroll
    for (int part = 0; part < ROUNDS / 32; ++part) {
        more_of[part] = equal_of[part] = 0;
        #pragma unroll 8
        for (int j = part * 32; j < min(rounds, part * 32 + 32); ++j) {
            const int t = first + j * 32;
            const word key = t < end ? key_of(from[t]) : 0;
            const word m = __ballot_sync(~0u, t < end && key > limit), e = __ballot_sync(~0u, t < end && key == limit);
            if (lane == (j & 31)) more_of[part] = m, equal_of[part] = e;
            more += __popc(m);
            equal += __popc(e);
        }
    }
    if (lane == 0) more_sums[warp] = more, equal_sums[warp] = equal;
    __syncthreads();
    const int all_more = sum_before(more_sums[lane], lane), all_equal = sum_before(equal_sums[lane], lane);
    int so_more = warp ? __shfl_sync(~0u, all_more, max(warp - 1, 0)) : 0;
    int so_equal = warp ? __shfl_sync(~0u, all_equal, max(warp - 1, 0)) : 0;
    const word below = (1u << lane) - 1;
    #pragma unroll
    for (int part = 0; part < ROUNDS / 32; ++part)
        for (int j = part * 32; j < min(rounds, part * 32 + 32); ++j) {
            const word m = __shfl_sync(~0u, more_of[part], j & 31), e = __shfl_sync(~0u, equal_of[part], j & 31);
            if (m | e) {
                const int equals = so_equal + __popc(e & below);
                if (m >> lane & 1 || (e >> lane & 1 && equals < spare))
                    out[so_more + __popc(m & below) + min(equals, spare)] = first + j * 32;
                so_more += __popc(m);
                so_equal += __popc(e);
            }
        }
}
