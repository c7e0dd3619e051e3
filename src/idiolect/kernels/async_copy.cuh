// Copies into shared memory that run while a block computes.

// Start to copy a number into shared memory, or a zero.
__device__ __forceinline__ void bring(float* to, const float* from, bool inside) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(to);
  const int bytes = inside ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(place), "l"(from), "r"(bytes));
}

__device__ __forceinline__ void bring4(float* to, const float* from) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from));
}

// Start to copy 16 bytes, or as many zeros.
__device__ __forceinline__ void bring16(void* to, const void* from, bool inside) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(to);
  const int bytes = inside ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(bytes));
}

__device__ __forceinline__ void close_stage() { asm volatile("cp.async.commit_group;"); }

// Wait until all stages but the last few have arrived.
template <int LATER>
__device__ __forceinline__ void await_stage() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LATER));
}
