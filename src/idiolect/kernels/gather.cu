// Take examples by their rows and decode them: a block for each. Constants: NUMBERS (of an example), PLANE
// (numbers that share a shift), THREADS.

extern "C" __global__ void __launch_bounds__(THREADS)
take(const unsigned char* __restrict__ x, const long long* __restrict__ rows,
     const float* __restrict__ shift, const float* __restrict__ factor, float* __restrict__ out) {
  const unsigned char* from = x + (size_t)rows[blockIdx.x] * NUMBERS;
  float* to = out + (size_t)blockIdx.x * NUMBERS;
#if NUMBERS % 4 == 0 && PLANE % 4 == 0
  for (int i = 4 * threadIdx.x; i < NUMBERS; i += 4 * THREADS) {
    const unsigned four = *(const unsigned*)(from + i);
    const float low = shift[i / PLANE], by = factor[i / PLANE];
    float4 made;
    made.x = ((float)(four & 255u) - low) * by;
    made.y = ((float)(four >> 8 & 255u) - low) * by;
    made.z = ((float)(four >> 16 & 255u) - low) * by;
    made.w = ((float)(four >> 24) - low) * by;
    *(float4*)(to + i) = made;
  }
#else
  for (int i = threadIdx.x; i < NUMBERS; i += THREADS)
    to[i] = ((float)from[i] - shift[i / PLANE]) * factor[i / PLANE];
#endif
}
