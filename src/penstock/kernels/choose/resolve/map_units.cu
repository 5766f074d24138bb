// Where the chosen units of one query and KV head are, by one block: hits are stamped, and what is missing goes
// into the slots that are free or were used longest ago. As `triton_map.resolve_units`, one query behind the other
// of a row that has several.
//
// Names that are not declared here are set when it is compiled: THREADS, a multiple of 32 up to 1,024; CHOSEN and
// SLOTS, multiples of it that no query and no hot buffer is larger than, the latter below 1 << 15; PAGE_UNITS;
// TURNS, whether `turn` says anything.

#include "c/warps.cuh"

#define WARPS (THREADS / 32)
#define OF_CHOSEN (CHOSEN / THREADS)
#define OF_SLOTS (SLOTS / THREADS)
#define FREE 0xffffffffu

// Of a number of each warp: the sum of those before it, and of all. `sums` may be used again behind the next barrier.
__device__ __forceinline__ int warps_before(int mine, int *sums, int lane, int warp, int *all) {
    if (lane == 0) sums[warp] = mine;
    __syncthreads();
    const int with = sum_before(lane < WARPS ? sums[lane] : 0, lane);
    *all = __shfl_sync(~0u, with, 31);
    return __shfl_sync(~0u, with, warp) - mine;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
map_units(const int *chosen, const int *row, const int *turn, const int *device, const int *host, int *hot_slot,
          int *hot_unit, int *hot_stamp, const int *hot_page, unsigned long long *count, const int *now, int *slot,
          int *miss, int *num, long long device_row, long long host_row, long long width, long long units,
          long long slots, long long hot_pages) {
    __shared__ unsigned char used[SLOTS];
    __shared__ int victim[CHOSEN], sums[2][WARPS], told[4], first_miss;
    __shared__ word most_of[WARPS], least_of[WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const word below = (1u << lane) - 1;
    const int head = blockIdx.x, heads = gridDim.x;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int b = blockIdx.y;
    if (TURNS && turn[b] != 0) return;
    const int step = *now;
    do {
        const long long r = row[b], at = ((long long)b * heads + head) * width, of = r * heads + head;
        int *slot_of = hot_slot + of * units, *unit_of = hot_unit + of * slots, *stamp_of = hot_stamp + of * slots;
        const int *pages = hot_page + r * hot_pages;
        int unit[OF_CHOSEN], page[OF_CHOSEN], found[OF_CHOSEN], source[OF_CHOSEN];
        word age[OF_SLOTS];             // 0: not to be given up
        #pragma unroll
        for (int j = 0; j < OF_CHOSEN; ++j) {
            const int c = (warp * OF_CHOSEN + j) * 32 + lane;
            unit[j] = c < width ? chosen[at + c] : -1;
        }
        #pragma unroll
        for (int j = 0; j < OF_SLOTS; ++j) {
            const int s = (warp * OF_SLOTS + j) * 32 + lane;
            const bool inside = s < slots && pages[s / PAGE_UNITS] >= 0;
            const int old = inside ? unit_of[s] : -1, stamp = inside ? stamp_of[s] : 0;
            age[j] = !inside ? 0 : old < 0 ? FREE : (word)(step - stamp);
            used[s] = 0;
        }
        #pragma unroll
        for (int j = 0; j < OF_CHOSEN; ++j) {
            const int p = unit[j] / PAGE_UNITS;
            page[j] = unit[j] < 0 ? 0 : device[r * device_row + p];
            found[j] = unit[j] < 0 ? 0 : slot_of[unit[j]];
            source[j] = unit[j] < 0 ? 0 : host[r * host_row + p];
        }
        if (threadIdx.x < 4) told[threadIdx.x] = 0;
        __syncthreads();
        int lacking = 0, here = 0, hits = 0;
        #pragma unroll
        for (int j = 0; j < OF_CHOSEN; ++j) {
            const bool on = unit[j] >= 0 && page[j] >= 0, hit = unit[j] >= 0 && page[j] < 0 && found[j] >= 0;
            lacking += __popc(__ballot_sync(~0u, unit[j] >= 0 && page[j] < 0 && found[j] < 0));
            here += __popc(__ballot_sync(~0u, on));
            hits += __popc(__ballot_sync(~0u, hit));
            if (hit) {
                stamp_of[found[j]] = step;
                used[found[j]] = 1;
                page[j] = pages[found[j] / PAGE_UNITS];
                source[j] = page[j] * PAGE_UNITS + found[j] % PAGE_UNITS;
            } else if (on) source[j] = page[j] * PAGE_UNITS + unit[j] % PAGE_UNITS;
            else if (unit[j] >= 0) source[j] = source[j] * PAGE_UNITS + unit[j] % PAGE_UNITS;
        }
        if (lane == 0) atomicAdd(told, here), atomicAdd(told + 1, hits);
        int want, so_far = warps_before(lacking, sums[0], lane, warp, &want);
        if (want > 0) {
            int begin = 0;
            if (threadIdx.x == 0) begin = atomicAdd(num, want);
            // The cut: `want` of the ages are no smaller, `larger` of them are larger.
            word most = 0, least = FREE;
            int free = 0;
            #pragma unroll
            for (int j = 0; j < OF_SLOTS; ++j) {
                if (used[(warp * OF_SLOTS + j) * 32 + lane]) age[j] = 0;
                free += __popc(__ballot_sync(~0u, age[j] == FREE));
                if (age[j] != FREE) most = max(most, age[j]);
                if (age[j] != 0) least = min(least, age[j]);
            }
            most = __reduce_max_sync(~0u, most);
            least = __reduce_min_sync(~0u, least);
            if (lane == 0) most_of[warp] = most, least_of[warp] = least;
            int larger;
            warps_before(free, sums[1], lane, warp, &larger);
            word low = FREE;
            if (larger >= want) larger = 0;             // free ones are enough
            else {
                low = __reduce_min_sync(~0u, lane < WARPS ? least_of[lane] : FREE);
                word high = __reduce_max_sync(~0u, lane < WARPS ? most_of[lane] : 0);
                int round = 0;
                while (low < high) {
                    const word half = low + ((high - low) >> 1) + 1;
                    int mine = 0, many;
                    #pragma unroll
                    for (int j = 0; j < OF_SLOTS; ++j) mine += __popc(__ballot_sync(~0u, age[j] >= half));
                    if (lane == 0) sums[round & 1][warp] = mine;
                    __syncthreads();
                    many = __reduce_add_sync(~0u, lane < WARPS ? sums[round & 1][lane] : 0);
                    ++round;
                    if (many == want) {
                        low = high = half - 1;          // all that are above it
                        larger = want;
                    } else if (many > want) low = half;
                    else high = half - 1, larger = many;
                }
                __syncthreads();
            }
            const int spare = want - larger;
            int taken = 0, all;
            #pragma unroll
            for (int j = 0; j < OF_SLOTS; ++j)
                taken += __popc(__ballot_sync(~0u, age[j] > low))
                         + (__popc(__ballot_sync(~0u, age[j] == low && low != 0)) << 16);
            const int before = warps_before(taken, sums[0], lane, warp, &all);
            int more = before & 0xffff, equal = before >> 16, gone = 0;
            #pragma unroll
            for (int j = 0; j < OF_SLOTS; ++j) {
                const bool above = age[j] > low, same = age[j] == low && low != 0;
                const word m = __ballot_sync(~0u, above), e = __ballot_sync(~0u, same);
                const int equals = equal + __popc(e & below);
                const bool take = above || (same && equals < spare);
                const int s = (warp * OF_SLOTS + j) * 32 + lane;
                if (take) victim[more + __popc(m & below) + min(equals, spare)] = s;
                if (take && age[j] != FREE) slot_of[unit_of[s]] = -1;
                gone += __popc(__ballot_sync(~0u, take && age[j] != FREE));
                more += __popc(m);
                equal += __popc(e);
            }
            if (lane == 0) atomicAdd(told + 3, gone);
            if (threadIdx.x == 0) told[2] = want, first_miss = begin;
            __syncthreads();
            #pragma unroll
            for (int j = 0; j < OF_CHOSEN; ++j) {
                const bool absent = unit[j] >= 0 && page[j] < 0;
                const word a = __ballot_sync(~0u, absent);
                if (absent) {
                    const int i = so_far + __popc(a & below), into = victim[i];
                    const int to = pages[into / PAGE_UNITS] * PAGE_UNITS + into % PAGE_UNITS;
                    int *entry = miss + 3ll * (first_miss + i);
                    slot_of[unit[j]] = into;
                    unit_of[into] = unit[j];
                    stamp_of[into] = step;
                    entry[0] = head, entry[1] = source[j], entry[2] = to;
                    source[j] = to;
                }
                so_far += __popc(a);
            }
        }
        #pragma unroll
        for (int j = 0; j < OF_CHOSEN; ++j) {
            const int c = (warp * OF_CHOSEN + j) * 32 + lane;
            if (c < width) slot[at + c] = unit[j] < 0 ? -1 : source[j];
        }
        __syncthreads();                // maps and stamps are as the next query finds them
        if (threadIdx.x < 4) atomicAdd(count + of * 4 + threadIdx.x, (unsigned long long)told[threadIdx.x]);
        __syncthreads();
        ++b;
    } while (TURNS && b < (int)gridDim.y && turn[b] > 0);
}
