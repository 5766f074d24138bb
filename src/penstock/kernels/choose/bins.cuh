// Scores in order, and in BINS bins of it: as `topn.key_of` and `topn.bin_of`.

__device__ __forceinline__ word key_of(float x) {
    const int bits = x == 0.0f ? 0 : __float_as_int(x);
    return (word)(bits ^ (bits >> 31 & 0x7fffffff)) ^ 0x80000000u;
}

__device__ __forceinline__ float score_of(word key) {
    const int bits = (int)(key ^ 0x80000000u);
    return __int_as_float(bits ^ (bits >> 31 & 0x7fffffff));
}

__device__ __forceinline__ int bin_of(float x) {
    const int part = BINS / 2 / 16;
    const int bits = x == 0.0f ? 0 : __float_as_int(x);
    const int size = min(max((bits & 0x7fffffff) / (0x800000 / part) - (127 - 8) * part, 0), BINS / 2 - 1);
    return bits < 0 ? BINS / 2 + size : BINS / 2 - 1 - size;
}
