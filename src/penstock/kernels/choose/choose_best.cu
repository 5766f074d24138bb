// The best of what one query may choose from, tokens or units of them, in their order, by a cluster of SHARE blocks
// of 1,024 threads: each counts its part of the scores in bins, and lists what it has in the bin of the cut; then each
// warp writes its part. Exact, of any number; of more in that bin than a list holds by halves, which is slow. `score`
// begins at 16 bytes, and `most`, a line's floats, is a multiple of four; there are SHARE blocks a query and head.
//
// Names that are not declared here are set when it is compiled: BINS, a multiple of 1,024; NEAR entries of the
// list, no more than BINS; SHARE, 1, 2, 4 or 8.

#include "c/warps.cuh"
#include "choose/bins.cuh"

#define WARPS 32
#define LINE (BINS / WARPS)             // bins that a warp sums
#define EACH (LINE / 32)
#define STEP 128                        // scores of a warp at once, four of each lane

// Where a block of the cluster has what lies at `own` here.
__device__ __forceinline__ word at_block(const void *own, int block) {
    word there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((word)__cvta_generic_to_shared(own)), "r"(block));
    return there;
}

__device__ __forceinline__ int get(const void *own, int block) {
    int x;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(at_block(own, block)) : "memory");
    return x;
}

__device__ __forceinline__ void put(void *own, int block, int x) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(at_block(own, block)), "r"(x) : "memory");
}

__device__ __forceinline__ void arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void meet() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// each(score) of a warp's part, from `first` to `last`, four of a lane after each other, of what is not before `begin`.
template <typename Each> __device__ __forceinline__ void
look(const float *from, int first, int last, int begin, const Each &each) {
    #pragma unroll 4
    for (int t = first; t < last; t += STEP) {
        const float4 four = *(const float4 *)(from + t);
        if (t >= begin) each(four.x);
        if (t + 1 >= begin && t + 1 < last) each(four.y);
        if (t + 2 >= begin && t + 2 < last) each(four.z);
        if (t + 3 >= begin && t + 3 < last) each(four.w);
    }
}

extern "C" __global__ void __cluster_dims__(SHARE, 1, 1) __launch_bounds__(32 * WARPS, 1)
choose_best(const float *score, const int *position, const int *budget, int *chosen, long long most, long long room,
            long long heads, long long unit, long long sinks, long long window, const int *left) {
    // Units of `unit` tokens up to a query's position. Chosen are `sinks` at the front, all that is not whole before the
    // last `window` tokens, and of the rest as many as `budget` leaves, or, without one, the room for what is chosen.
    // With `left` only of lines where that is not 0.
    __shared__ int bins[BINS], line[LINE], lines[SHARE][WARPS], nums[SHARE], counts[SHARE];
    __shared__ int mores[SHARE * WARPS], equals[SHARE * WARPS], num, count, larger;
    __shared__ int more_of[WARPS], equal_of[WARPS];
    __shared__ word near_key[NEAR], cut;
    __shared__ unsigned char near_warp[NEAR];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int rank = blockIdx.x % SHARE, own = rank * WARPS + warp;
    const long long b = blockIdx.x / SHARE;
    for (int n = threadIdx.x; n < BINS; n += 32 * WARPS) bins[n] = 0;
    if (threadIdx.x == 0) num = count = 0;
    arrive();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    meet();                                 // all blocks are there, to be written to
    if (left && !left[b]) return;
    const int p = position[b / heads];
    const int end = max(p + 1 - (int)window, 0) / (int)unit, begin = min((int)sinks, end);
    const int behind = p < 0 ? 0 : p / (int)unit + 1 - end;
    const int top = max(min((budget ? budget[b / heads] : (int)room) - begin - behind, end - begin), 0);
    int *out = chosen + b * room;
    const bool all_of_them = top == end - begin;
    for (int n = rank * 32 * WARPS + threadIdx.x; n < (int)room; n += 32 * WARPS * SHARE)
        if (n < begin || n >= begin + top || all_of_them) {
            const int whole = n < begin + top ? n : end + n - begin - top;
            out[n] = n < begin + top + behind ? whole : -1;
        }
    if (all_of_them || top == 0) return;
    out += begin;
    const int start = begin / 4 * 4, steps = (end - start + STEP - 1) / STEP;
    const int first = start + own * steps / (WARPS * SHARE) * STEP + lane * 4;
    const int last = min(end, start + (own + 1) * steps / (WARPS * SHARE) * STEP);
    const float *from = score + b * most;
    look(from, first, last, begin, [&](float x) { atomicAdd(bins + bin_of(x), 1); });
    __syncthreads();
    int sum = 0;
    #pragma unroll
    for (int j = 0; j < EACH; ++j) sum += bins[warp * LINE + j * 32 + lane];
    sum = __reduce_add_sync(~0u, sum);
    if (lane < SHARE) put(&lines[rank][warp], lane, sum);
    arrive(), meet();
    // The bin in which the cut is, and how many are in those of larger scores: each warp for itself.
    sum = 0;
    #pragma unroll
    for (int k = 0; k < SHARE; ++k) sum += lines[k][lane];
    sum = sum_before(sum, lane);
    const int which = __popc(__ballot_sync(~0u, sum < top));
    int above = __shfl_sync(~0u, sum, max(which - 1, 0));
    if (which == 0) above = 0;
    if (threadIdx.x < LINE) {
        sum = 0;
        #pragma unroll
        for (int k = 0; k < SHARE; ++k) sum += get(bins + which * LINE + threadIdx.x, k);
        line[threadIdx.x] = sum;
    }
    __syncthreads();
    sum = 0;
    #pragma unroll
    for (int j = 0; j < EACH; ++j) sum += line[lane * EACH + j];
    const int with = above + sum_before(sum, lane), owner = __popc(__ballot_sync(~0u, with < top));
    int middle = 0;
    sum = with - sum;
    #pragma unroll
    for (int j = 0; j < EACH; ++j)
        if (middle == j && sum + line[lane * EACH + j] < top) sum += line[lane * EACH + j], middle = j + 1;
    middle = __shfl_sync(~0u, which * LINE + lane * EACH + middle, owner);
    const int want = top - __shfl_sync(~0u, sum, owner);
    sum = 0;
    look(from, first, last, begin, [&](float x) {
        const int bin = bin_of(x);
        sum += bin < middle;
        if (bin != middle) return;
        const int at = atomicAdd(&num, 1);
        if (at < NEAR) near_key[at] = key_of(x), near_warp[at] = warp;
    });
    sum = __reduce_add_sync(~0u, sum);
    if (lane == 0) more_of[warp] = sum, equal_of[warp] = 0;
    __syncthreads();
    if (threadIdx.x < SHARE) put(&nums[rank], threadIdx.x, num);
    arrive(), meet();
    int listed = 0;
    #pragma unroll
    for (int k = 0; k < SHARE; ++k) listed += nums[k];
    if (listed <= NEAR) {
        word *all = (word *)bins;           // which are read no more
        for (int n = threadIdx.x; n < listed; n += 32 * WARPS) {
            int of = 0, at = n;
            while (at >= nums[of]) at -= nums[of++];
            all[n] = get(near_key + at, of);
        }
        __syncthreads();
        int split = 1;                      // lanes that compare one of them
        while (split < 32 && 2 * split * listed <= 32 * WARPS) split *= 2;
        for (int n = threadIdx.x / split; n - lane / split < listed; n += 32 * WARPS / split) {
            const word key = n < listed ? all[n] : 0;
            int more = 0, equal = 0;
            #pragma unroll 8
            for (int k = lane % split; k < listed; k += split) {
                more += all[k] > key;
                equal += all[k] == key;
            }
            for (int step = 1; step < split; step *= 2) {
                more += __shfl_xor_sync(~0u, more, step);
                equal += __shfl_xor_sync(~0u, equal, step);
            }
            if (n < listed && more < want && want <= more + equal) cut = key, larger = more;   // all say the same
        }
    } else {
        const auto all_of = [&](int found) {            // the sum of what all threads of the cluster found
            found = __reduce_add_sync(~0u, found);
            if (lane == 0 && found) atomicAdd(&count, found);
            __syncthreads();
            if (threadIdx.x < SHARE) put(&counts[rank], threadIdx.x, count);
            arrive(), meet();
            found = 0;
            #pragma unroll
            for (int k = 0; k < SHARE; ++k) found += counts[k];
            if (threadIdx.x == 0) count = 0;
            arrive(), meet();
            return found;
        };
        word low = 0, high = ~0u;           // at least `want` of the bin's keys are no smaller than `low`
        int of = 0;
        while (nums[of] == 0) ++of;
        const word one = get(near_key, of); // where many are equal it is likely to be the cut
        for (word half = one; low < high;) {
            int found = 0;
            look(from, first, last, begin, [&](float x) { found += bin_of(x) == middle && key_of(x) >= half; });
            if (all_of(found) >= want) low = half; else high = half - 1;
            half = half == one && low == one ? one + 1 : low + ((high - low) >> 1) + 1;
        }
        int found = 0;
        look(from, first, last, begin, [&](float x) { found += bin_of(x) == middle && key_of(x) > low; });
        found = all_of(found);
        if (threadIdx.x == 0) cut = low, larger = found;
    }
    __syncthreads();
    // What is larger than the cut is taken, and of what equals it the first `spare`. Of each warp:
    const word limit = cut;
    const int spare = want - larger;
    if (listed <= NEAR) {
        for (int n = threadIdx.x; n < num; n += 32 * WARPS) {
            if (near_key[n] > limit) atomicAdd(more_of + near_warp[n], 1);
            if (near_key[n] == limit) atomicAdd(equal_of + near_warp[n], 1);
        }
        __syncthreads();
    } else {
        int more = 0, equal = 0;
        look(from, first, last, begin, [&](float x) {
            more += key_of(x) > limit;
            equal += key_of(x) == limit;
        });
        more = __reduce_add_sync(~0u, more), equal = __reduce_add_sync(~0u, equal);
        if (lane == 0) more_of[warp] = more, equal_of[warp] = equal;
        __syncwarp();
    }
    if (lane < SHARE) put(mores + own, lane, more_of[warp]), put(equals + own, lane, equal_of[warp]);
    arrive(), meet();
    int more = 0, equal = 0;
    for (int k = lane; k < own; k += 32) more += mores[k], equal += equals[k];
    more = __reduce_add_sync(~0u, more), equal = __reduce_add_sync(~0u, equal);
    #pragma unroll 4
    for (int t = first; t - lane * 4 < last; t += STEP) {
        const float4 four = t < end ? *(const float4 *)(from + t) : float4{};
        const word key[4] = {key_of(four.x), key_of(four.y), key_of(four.z), key_of(four.w)};
        int mine = 0;                       // the larger ones, and 1 << 16 of each that equals
        #pragma unroll
        for (int i = 0; i < 4; ++i) mine += t + i >= begin && t + i < end
            ? (key[i] > limit) + ((key[i] == limit) << 16) : 0;
        if (!__any_sync(~0u, mine)) continue;
        const int up_to = sum_before(mine, lane), before = up_to - mine, whole = __shfl_sync(~0u, up_to, 31);
        int so_more = more + (before & 0xffff), so_equal = equal + (before >> 16);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool is_one = t + i >= begin && t + i < end;
            const bool is_more = is_one && key[i] > limit, is_equal = is_one && key[i] == limit;
            if (is_more || (is_equal && so_equal < spare)) out[so_more + min(so_equal, spare)] = t + i;
            so_more += is_more, so_equal += is_equal;
        }
        more += whole & 0xffff, equal += whole >> 16;
    }
}
