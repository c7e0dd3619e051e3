// Numbers of images: bfloat16 with HALF, else single precision.

#ifdef HALF
typedef unsigned short Number;
__device__ __forceinline__ float number(Number bits) { return __uint_as_float((unsigned)bits << 16); }
__device__ __forceinline__ Number kept(float value) {
  const unsigned bits = __float_as_uint(value);  // to the nearest, of two the even one; what is no number stays so
  return value == value ? (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 : 0x7fc0u;
}
#else
typedef float Number;
__device__ __forceinline__ float number(Number value) { return value; }
__device__ __forceinline__ Number kept(float value) { return value; }
#endif
