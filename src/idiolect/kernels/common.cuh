// What the sources share: numbers as they lie in memory, sums over threads, copies into shared memory that run while a
// block computes, and matrix units.

// Numbers are stored as a Number and computed with as a WIDE one: REAL, which is single precision unless it is defined.
// With HALF they are stored as bfloat16, for which there is no type here: its bits are taken apart.
#ifndef REAL
#define REAL float
#endif
#ifdef HALF
typedef unsigned short Number;
typedef float WIDE;
__device__ __forceinline__ WIDE number(Number bits) { return __uint_as_float((unsigned)bits << 16); }
__device__ __forceinline__ Number kept(WIDE value) {
  const unsigned bits = __float_as_uint(value);  // to the nearest, of two the even one; what is no number stays so
  return value == value ? (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 : 0x7fc0u;
}
#else
typedef REAL Number;
typedef REAL WIDE;
__device__ __forceinline__ WIDE number(Number value) { return value; }
__device__ __forceinline__ Number kept(WIDE value) { return value; }
#endif

#ifdef HALF
// Two numbers as they lie in memory, the first of them first.
__device__ __forceinline__ unsigned both_kept(WIDE one, WIDE other) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(other), "f"(one));
  return bits;
}
#endif

// Write two neighbours down.
__device__ __forceinline__ void keep_both(void* to, WIDE one, WIDE other) {
#ifdef HALF
  *(unsigned*)to = both_kept(one, other);
#else
  struct alignas(2 * sizeof(Number)) Two { Number one, other; };
  *(Two*)to = {one, other};
#endif
}

struct alignas(sizeof(Number) * 4 < 16 ? sizeof(Number) * 4 : 16) Four { Number at[4]; };

// The sum over neighbouring threads, a power of two of them up to a warp, in a fixed order, for each of them.
template <int COUNT, class Real>
__device__ __forceinline__ Real over_lanes(Real value) {
#pragma unroll
  for (int mask = COUNT / 2; mask; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  return value;
}

// Set a thread's sums to 0, an array of whatever shape.
template <class Real>
__device__ __forceinline__ void clear(Real& sum) { sum = 0; }
template <class Sums, int COUNT>
__device__ __forceinline__ void clear(Sums (&sums)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) clear(sums[i]);
}

// Copy a number, or a zero, into shared memory asynchronously: `close_stage` commits, `await_stage` waits.
__device__ __forceinline__ void bring(float* to, const float* from, bool inside) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(to);
  const int bytes = inside ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(place), "l"(from), "r"(bytes));
}

// The same of two numbers.
__device__ __forceinline__ void bring8(float* to, const float* from, bool inside) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(to);
  const int bytes = inside ? 8 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(place), "l"(from), "r"(bytes));
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

// The same by way of the multiprocessor's own cache, for what its threads read again soon.
__device__ __forceinline__ void bring16_near(void* to, const void* from, bool inside) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(to);
  const int bytes = inside ? 16 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(bytes));
}

__device__ __forceinline__ void close_stage() { asm volatile("cp.async.commit_group;"); }

// Wait until all stages but the last few have arrived.
template <int LATER>
__device__ __forceinline__ void await_stage() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LATER));
}

// sums[16][8] += a[16][8] * b[8][8], each spread over the threads of a warp, of numbers that the unit cuts off after 11
// bits: TF32.
__device__ __forceinline__ void multiply_short(float* sums, const unsigned* a, const unsigned* b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same of pairs of bfloat16: sums[16][8] += a[16][16] * b[16][8].
__device__ __forceinline__ void multiply_half(float* sums, const unsigned* a, const unsigned* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four matrices of 8 rows of 16 bytes; each thread names one row, and gets four bytes of a row of each matrix.
__device__ __forceinline__ void load_matrices(unsigned* to, const char* from) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(from);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(place));
}

// The same, transposed, for numbers of two bytes.
__device__ __forceinline__ void load_turned(unsigned* to, const char* from) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(from);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(place));
}

// A number a little larger than it is: cut off after 11 bits, it is less than it was as often as more. One of 11 bits or
// fewer stays what it is, and what is no number stays so.
__device__ __forceinline__ unsigned nudged(float value) { return __float_as_uint(value * 1.000345f); }

#ifdef ROUNDED

// Take a number apart: the nearest one of 11 bits, and the rest, which is not needed where ROUNDED.
__device__ __forceinline__ void part(float value, unsigned* large, unsigned* small) {
#if ROUNDED
  *large = nudged(value);
#else
  *large = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
  *small = __float_as_uint(value - __uint_as_float(*large));  // NaN where the value is
#endif
}

// The same of two neighbours.
__device__ __forceinline__ void part2(const float* from, unsigned* large, unsigned* small, int next) {
  const float2 two = *(const float2*)from;
  part(two.x, large, small);
  part(two.y, large + next, small + next);
}

// sums += a * b, of numbers taken apart, for tiles of a warp below each other, `next` of `sums` from one to the next.
template <int TILES>
__device__ __forceinline__ void multiply_parts(float (*sums)[4], int next, const unsigned (&large)[TILES][4],
                                               const unsigned (&small)[TILES][4], const unsigned* big, const unsigned* little) {
#if !ROUNDED
#pragma unroll
  for (int m = 0; m < TILES; m++) multiply_short(sums[m * next], small[m], big);
#pragma unroll
  for (int m = 0; m < TILES; m++) multiply_short(sums[m * next], large[m], little);
#endif
#pragma unroll
  for (int m = 0; m < TILES; m++) multiply_short(sums[m * next], large[m], big);
}

#endif

// The largest of a window's four sums, with a bias and after ReLU, and which it is: 4 where none is above 0.
struct Largest { float value; int which; };
template <class Sum>
__device__ __forceinline__ Largest largest_of(float shift, Sum sum) {
  float most = sum(0) + shift;
  int which = 0;
#pragma unroll
  for (int i = 1; i < 4; i++) {
    const float other = sum(i) + shift;
    if (other > most || isnan(other)) { most = other; which = i; }
  }
  const bool off = most <= 0.f;                 // false for NaN, which must be seen
  return {off ? 0.f : most, off ? 4 : which};
}
