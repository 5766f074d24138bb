// The best of what each of many queries sees, in the order of their tokens, each by a block of THREADS threads that
// reads the scores once: every 64th of them says which may be among the best, some twice as many as are wanted; what
// is no smaller is kept, and chosen from exactly. Where too few or too many are kept `left` becomes 1, and nothing else
// is written: `choose_best` chooses there.
//
// Names that are not declared here are set when it is compiled: BINS, a multiple of 1,024; ROOM, a power of two.

#include "c/warps.cuh"
#include "choose/bins.cuh"

#define THREADS 512
#define WARPS (THREADS / 32)
#define KEPT (4 * ROOM)                     // that there is room for
#define NEAR 1024                           // of them in the bin of the cut
#define LINE (BINS / WARPS)                 // bins that a warp sums
#define EACH (LINE / 32)

extern "C" __global__ void __launch_bounds__(THREADS, 2)
choose_many(const float *score, const int *position, int *chosen, int *left, long long most, long long wanted) {
    // `score` begins at 16 bytes, and `most`, a line's floats, is a multiple of four; `wanted` are no more than ROOM.
    extern __shared__ __align__(16) int room[];
    int *bins = room, *at_of = bins + BINS, *out_of = at_of + KEPT;
    word *key_of_kept = (word *)(out_of + ROOM), *near = key_of_kept + KEPT;
    __shared__ int sums[WARPS], found, above, num, near_num, out_num;
    __shared__ word least;
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5, want = (int)wanted;
    const long long b = blockIdx.x;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int end = position[b] + 1;
    int *out = chosen + b * want;
    if (end <= want) {
        for (int n = t; n < want; n += THREADS) out[n] = n < end ? n : -1;
        if (t == 0) left[b] = 0;
        return;
    }
    const float *line = score + b * most;
    const auto clear = [&]() {
        for (int n = t; n < BINS / 4; n += THREADS) ((int4 *)bins)[n] = make_int4(0, 0, 0, 0);
    };
    // The bin with the n-th largest into `found`, and how many are in those of larger scores into `above`.
    const auto find = [&](int n) {
        __syncthreads();
        int sum = 0;
        for (int j = 0; j < EACH; ++j) sum += bins[warp * LINE + j * 32 + lane];
        sum = __reduce_add_sync(~0u, sum);
        if (lane == 0) sums[warp] = sum;
        __syncthreads();
        int before = 0, which = 0;
        while (which < WARPS - 1 && before + sums[which] < n) before += sums[which++];
        if (warp == which) {
            sum = 0;
            for (int j = 0; j < EACH; ++j) sum += bins[which * LINE + lane * EACH + j];
            const int with = before + sum_before(sum, lane);
            if (lane == min(__popc(__ballot_sync(~0u, with < n)), 31)) {
                int so = with - sum, bin = which * LINE + lane * EACH;
                for (int j = 0; j < EACH - 1 && so + bins[bin] < n; ++j) so += bins[bin++];
                found = bin, above = so;
            }
        }
        __syncthreads();
    };
    clear();
    if (t == 0) num = near_num = out_num = 0, least = ~0u;
    __syncthreads();
    const int samples = end >> 8;           // of four scores each, at least as many as make a choice out of
    for (int n = t; n < samples; n += THREADS) {
        const float4 four = *(const float4 *)(line + (n << 8) + (n * 52 & 252));
        atomicAdd(bins + bin_of(four.x), 1), atomicAdd(bins + bin_of(four.y), 1);
        atomicAdd(bins + bin_of(four.z), 1), atomicAdd(bins + bin_of(four.w), 1);
    }
    // Of so many samples that are expected, their spread four times and some more.
    const float expected = (float)want * 4.0f * samples / end;
    find(min((int)(expected + 4.0f * sqrtf(expected)) + 8, 4 * samples));
    const int last_bin = found;
    for (int n = t; n < samples; n += THREADS) {
        const float4 four = *(const float4 *)(line + (n << 8) + (n * 52 & 252));
        const float x[4] = {four.x, four.y, four.z, four.w};
        for (int i = 0; i < 4; ++i) if (bin_of(x[i]) <= last_bin) atomicMin(&least, key_of(x[i]));
    }
    __syncthreads();
    const word from = samples ? least : 0;
    clear();
    #pragma unroll 4
    for (int first = warp * 128; first < end; first += WARPS * 128) {
        const int at = first + lane * 4;
        const float4 four = at < end ? *(const float4 *)(line + at) : float4{};
        const word key[4] = {key_of(four.x), key_of(four.y), key_of(four.z), key_of(four.w)};
        int mine = 0;
        #pragma unroll
        for (int i = 0; i < 4; ++i) mine += at + i < end && key[i] >= from;
        if (!__any_sync(~0u, mine)) continue;
        const int up_to = sum_before(mine, lane);
        int place = 0;
        if (lane == 31) place = atomicAdd(&num, up_to);
        place = __shfl_sync(~0u, place, 31) + up_to - mine;
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            if (at + i < end && key[i] >= from) {
                if (place < KEPT) key_of_kept[place] = key[i], at_of[place] = at + i;
                ++place;
            }
    }
    __syncthreads();
    const int kept = num;
    if (kept < want || kept > KEPT) {
        if (t == 0) left[b] = 1;
        return;
    }
    for (int n = t; n < kept; n += THREADS) atomicAdd(bins + bin_of(score_of(key_of_kept[n])), 1);
    find(want);
    const int middle = found, rest = want - above;
    for (int n = t; n < ROOM; n += THREADS) out_of[n] = 0x7fffffff;
    __syncthreads();
    for (int n = t; n < kept; n += THREADS) {
        const int bin = bin_of(score_of(key_of_kept[n]));
        if (bin < middle) out_of[atomicAdd(&out_num, 1)] = at_of[n];
        if (bin == middle) {
            const int place = atomicAdd(&near_num, 1);
            if (place < NEAR) near[place] = n;
        }
    }
    __syncthreads();
    const int close = near_num;
    if (close > NEAR) {
        if (t == 0) left[b] = 1;
        return;
    }
    for (int n = t; n < close; n += THREADS) {
        const word key = key_of_kept[near[n]];
        const int at = at_of[near[n]];
        int larger = 0;                     // of equal ones the first counts as larger
        for (int k = 0; k < close; ++k) {
            const word other = key_of_kept[near[k]];
            larger += other > key || (other == key && at_of[near[k]] < at);
        }
        if (larger < rest) out_of[atomicAdd(&out_num, 1)] = at;
    }
    for (int size = 2; size <= ROOM; size *= 2)
        for (int step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            for (int n = t; n < ROOM / 2; n += THREADS) {
                const int low = 2 * n - (n & (step - 1)), high = low + step;
                const int x = out_of[low], y = out_of[high];
                if ((x > y) == ((low & size) == 0)) out_of[low] = y, out_of[high] = x;
            }
        }
    __syncthreads();
    for (int n = t; n < want; n += THREADS) out[n] = out_of[n];
    if (t == 0) left[b] = 0;
}
