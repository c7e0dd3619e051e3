// Numbers as they lie in memory, REAL, and as they are reckoned with, WIDE. With HALF they lie there as bfloat16, for
// which there is no type here: its bits are taken apart.

#ifdef HALF
typedef unsigned short REAL;
typedef float WIDE;
__device__ __forceinline__ WIDE wide(REAL x) { return __uint_as_float((unsigned)x << 16); }
__device__ __forceinline__ REAL narrow(WIDE x) {
  const unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;            // NaN stays one
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;                // to the nearest, ties to even
}
#else
typedef REAL WIDE;
__device__ __forceinline__ WIDE wide(REAL x) { return x; }
__device__ __forceinline__ REAL narrow(WIDE x) { return x; }
#endif

struct alignas(sizeof(REAL) * 4 < 16 ? sizeof(REAL) * 4 : 16) Four { REAL at[4]; };
