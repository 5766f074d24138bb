// What kernels in CUDA C++ say of the 32 threads of a warp.

typedef unsigned int word;

__device__ __forceinline__ int sum_before(int x, int lane) {       // and with its own
    #pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int y = __shfl_up_sync(~0u, x, step);
        if (lane >= step) x += y;
    }
    return x;
}
