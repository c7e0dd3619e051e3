// Backward through ReLU, and through ReLU and 2x2 max-pooling: gradients of the input of ReLU, and their
// sums, which are the gradients of the biases. A block takes one channel of one client. Sums are taken in a
// fixed order. Constants: CHANNELS, OH, OW (of the input of ReLU), THREADS.

#include "common.cuh"

#define WARPS (THREADS / 32)

// The sum over a block's threads, in a fixed order, for thread 0.
__device__ __forceinline__ float over_block(float value, float* room) {
  value = over_lanes<32>(value);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.f;
  if (threadIdx.x == 0)
    for (int warp = 0; warp < WARPS; warp++) total += room[warp];
  return total;
}

#ifdef POOL_GRADIENT

#define HIGH ((OH + 1) / 2)  // an odd last row or column gets zeros
#define WIDE ((OW + 1) / 2)

// Each gradient goes to the pixel of its window that was chosen, and 0 elsewhere.
extern "C" __global__ void __launch_bounds__(THREADS)
pool_gradient(const float* __restrict__ gradient, const unsigned char* __restrict__ chosen,
              float* __restrict__ out, float* __restrict__ bias, int images) {
  extern __shared__ float4 memory[];
  const int channel = blockIdx.x, g = blockIdx.y;
  float sum = 0.f;
  for (int cell = threadIdx.x; cell < images * HIGH * WIDE; cell += THREADS) {
    const int col = cell % WIDE, row = cell / WIDE % HIGH;
    const size_t plane = ((size_t)g * images + cell / (WIDE * HIGH)) * CHANNELS + channel;
    const bool pooled = row < OH / 2 && col < OW / 2;
    const size_t from = (plane * (OH / 2) + row) * (OW / 2) + col;
    const int which = pooled ? chosen[from] : 4;
    const float value = which < 4 ? gradient[from] : 0.f;
    sum += value;
    float* to = out + (plane * OH + 2 * row) * OW + 2 * col;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (2 * row + i / 2 < OH && 2 * col + i % 2 < OW) to[i / 2 * OW + i % 2] = which == i ? value : 0.f;
  }
  sum = over_block(sum, (float*)memory);
  if (threadIdx.x == 0) bias[g * CHANNELS + channel] = sum;
}

#else

// The gradient where y is above 0 (or NaN, which must be seen), and 0 elsewhere.
extern "C" __global__ void __launch_bounds__(THREADS)
relu_gradient(const float* __restrict__ gradient, const float* __restrict__ y, float* __restrict__ out,
              float* __restrict__ bias, int images) {
  extern __shared__ float4 memory[];
  const int channel = blockIdx.x, g = blockIdx.y;
  float sum = 0.f;
#pragma unroll 4
  for (int at = threadIdx.x; at < images * OH * OW; at += THREADS) {
    const size_t plane = ((size_t)g * images + at / (OH * OW)) * CHANNELS + channel;
    const size_t place = plane * (OH * OW) + at % (OH * OW);
    const float value = y[place] <= 0.f ? 0.f : gradient[place];
    out[place] = value;
    sum += value;
  }
  sum = over_block(sum, (float*)memory);
  if (threadIdx.x == 0) bias[g * CHANNELS + channel] = sum;
}

#endif
