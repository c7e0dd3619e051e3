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
#define CELLS (OW % 4 == 0 ? 2 : 1)  // windows of a thread, side by side
#define WIDE ((OW + 2 * CELLS - 1) / (2 * CELLS))
struct alignas(OW % 4 == 0 ? 8 : 4) Cells { float at[CELLS]; };
struct alignas(OW % 4 == 0 ? 2 : 1) Choices { unsigned char at[CELLS]; };
struct alignas(OW % 4 == 0 ? 16 : OW % 2 == 0 ? 8 : 4) Line { float at[OW % 2 == 0 ? 2 * CELLS : 1]; };

// Each gradient goes to the pixel of its window that was chosen, and 0 elsewhere.
extern "C" __global__ void __launch_bounds__(THREADS)
pool_gradient(const float* __restrict__ gradient, const unsigned char* __restrict__ chosen,
              float* __restrict__ out, float* __restrict__ bias, int images) {
  extern __shared__ float4 memory[];
  const int channel = blockIdx.x, g = blockIdx.y;
  float sum = 0.f;
#pragma unroll 4
  for (int cell = threadIdx.x; cell < images * HIGH * WIDE; cell += THREADS) {
    const int col = cell % WIDE * CELLS, row = cell / WIDE % HIGH;
    const size_t plane = ((size_t)g * images + cell / (WIDE * HIGH)) * CHANNELS + channel;
    const bool pooled = row < OH / 2 && col < OW / 2;
    const size_t from = pooled ? (plane * (OH / 2) + row) * (OW / 2) + col : 0;
    const Cells values = *(const Cells*)(gradient + from);
    const Choices which = *(const Choices*)(chosen + from);
    float* to = out + (plane * OH + 2 * row) * OW + 2 * col;
#if OW % 2 == 0
    Line lines[2];
#pragma unroll
    for (int k = 0; k < CELLS; k++) {
      const int own = pooled ? which.at[k] : 4;
      if (own < 4) sum += values.at[k];
#pragma unroll
      for (int i = 0; i < 4; i++) lines[i / 2].at[2 * k + i % 2] = own == i ? values.at[k] : 0.f;
    }
    *(Line*)to = lines[0];
    if (2 * row + 1 < OH) *(Line*)(to + OW) = lines[1];
#else
    const int own = pooled ? which.at[0] : 4;
    if (own < 4) sum += values.at[0];
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (2 * row + i / 2 < OH && 2 * col + i % 2 < OW) to[i / 2 * OW + i % 2] = own == i ? values.at[0] : 0.f;
#endif
  }
  sum = over_block(sum, (float*)memory);
  if (threadIdx.x == 0) bias[g * CHANNELS + channel] = sum;
}

#else

#define NUMBERS (OH * OW % 4 == 0 ? 4 : 1)  // of a thread, side by side
struct alignas(4 * NUMBERS) Several { float at[NUMBERS]; };

// The gradient where y is above 0 (or NaN, which must be seen), and 0 elsewhere.
extern "C" __global__ void __launch_bounds__(THREADS)
relu_gradient(const float* __restrict__ gradient, const float* __restrict__ y, float* __restrict__ out,
              float* __restrict__ bias, int images) {
  extern __shared__ float4 memory[];
  const int channel = blockIdx.x, g = blockIdx.y;
  float sum = 0.f;
#pragma unroll 4
  for (int at = threadIdx.x * NUMBERS; at < images * OH * OW; at += THREADS * NUMBERS) {
    const size_t plane = ((size_t)g * images + at / (OH * OW)) * CHANNELS + channel;
    const size_t place = plane * (OH * OW) + at % (OH * OW);
    const Several above = *(const Several*)(y + place);
    Several value = *(const Several*)(gradient + place);
#pragma unroll
    for (int i = 0; i < NUMBERS; i++) {
      if (above.at[i] <= 0.f) value.at[i] = 0.f;
      sum += value.at[i];
    }
    *(Several*)(out + place) = value;
  }
  sum = over_block(sum, (float*)memory);
  if (threadIdx.x == 0) bias[g * CHANNELS + channel] = sum;
}

#endif
