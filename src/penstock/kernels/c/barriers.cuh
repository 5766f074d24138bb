// What warps of a block wait for in shared memory, and copies that arrive there.

typedef unsigned int word;

__device__ __forceinline__ word shared_at(const void *p) { return (word)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void expect(word barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void arrive(word barrier, int really = 1) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0]; }"
                 :: "r"(barrier), "r"(really) : "memory");
}

__device__ __forceinline__ void wait_for(word barrier, word phase) {
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }"
                 :: "r"(barrier), "r"(phase) : "memory");
}

// 16 bytes, of which those beyond `bytes` become zero.
__device__ __forceinline__ void copy_16(word to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(to), "l"(from), "r"(bytes) : "memory");
}

// One of the barrier's arrivals, once what this thread has begun to copy is there.
__device__ __forceinline__ void arrive_when_copied(word barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}
