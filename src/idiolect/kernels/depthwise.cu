// Depthwise convolutions of a stack of clients: every channel of every client has a kernel of its own. They move
// much memory for little arithmetic, so each number is read where it lies; neighbours share it in the cache.
// Images are [g, image, channel, row, column], kernels [g, channel, row, column].
// Constants: C (channels), H, W (what is convolved), OH, OW (the result), KH, KW, PAD, STRIDE, THREADS.

#include "common.cuh"

#define TAPS (KH * KW)
#define WARPS (THREADS / 32)

// The kernel that a plane of images, counted over all clients, is convolved with.
__device__ __forceinline__ const float* kernel_of(const float* w, size_t plane, int images) {
  return w + (plane / C / images * C + plane % C) * TAPS;
}

// y = the sum over taps of w * x, a pixel of y for each thread.
extern "C" __global__ void __launch_bounds__(THREADS)
convolve(const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ y, int images, int groups) {
  const size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x;
  if (at >= (size_t)groups * images * C * OH * OW) return;
  const int col = at % OW * STRIDE - PAD, row = at / OW % OH * STRIDE - PAD;
  const size_t plane = at / (OH * OW);
  const float* from = x + plane * (H * W);
  const float* own = kernel_of(w, plane, images);
  float sum = 0.f;
#pragma unroll
  for (int kh = 0; kh < KH; kh++)
#pragma unroll
    for (int kw = 0; kw < KW; kw++) {
      const int h = row + kh, v = col + kw;
      if (h >= 0 && h < H && v >= 0 && v < W) sum += own[kh * KW + kw] * from[h * W + v];
    }
  y[at] = sum;
}

// The transpose: a pixel of x gathers the gradients of all pixels of y that it had a part in.
extern "C" __global__ void __launch_bounds__(THREADS)
input_gradient(const float* __restrict__ gradient, const float* __restrict__ w, float* __restrict__ dx, int images, int groups) {
  const size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x;
  if (at >= (size_t)groups * images * C * H * W) return;
  const int col = at % W + PAD, row = at / W % H + PAD;
  const size_t plane = at / (H * W);
  const float* from = gradient + plane * (OH * OW);
  const float* own = kernel_of(w, plane, images);
  float sum = 0.f;
#pragma unroll
  for (int kh = 0; kh < KH; kh++)
#pragma unroll
    for (int kw = 0; kw < KW; kw++) {
      const int h = row - kh, v = col - kw;
      const bool met = h >= 0 && v >= 0 && h % STRIDE == 0 && v % STRIDE == 0;
      if (met && h / STRIDE < OH && v / STRIDE < OW)
        sum += own[kh * KW + kw] * from[h / STRIDE * OW + v / STRIDE];
    }
  dx[at] = sum;
}

// The gradients of one kernel, over `each` images: a block for each, its sums taken in a fixed order.
extern "C" __global__ void __launch_bounds__(THREADS)
weight_gradient(const float* __restrict__ gradient, const float* __restrict__ x, float* __restrict__ dw, int images, int each) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;
  const int channel = blockIdx.x, g = blockIdx.y, first = blockIdx.z * each;
  const int many = min(each, images - first) * (OH * OW);
  float sums[TAPS];
#pragma unroll
  for (int tap = 0; tap < TAPS; tap++) sums[tap] = 0.f;
  for (int at = threadIdx.x; at < many; at += THREADS) {
    const size_t plane = ((size_t)g * images + first + at / (OH * OW)) * C + channel;
    const int spot = at % (OH * OW);
    const int col = spot % OW * STRIDE - PAD, row = spot / OW * STRIDE - PAD;
    const float* from = x + plane * (H * W);
    const float incoming = gradient[plane * (OH * OW) + spot];
#pragma unroll
    for (int kh = 0; kh < KH; kh++)
#pragma unroll
      for (int kw = 0; kw < KW; kw++) {
        const int h = row + kh, v = col + kw;
        if (h >= 0 && h < H && v >= 0 && v < W) sums[kh * KW + kw] += incoming * from[h * W + v];
      }
  }
#pragma unroll
  for (int tap = 0; tap < TAPS; tap++) {
    float sum = sums[tap];
    sum = over_lanes<32>(sum);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32 * TAPS + tap] = sum;
  }
  __syncthreads();
  for (int tap = threadIdx.x; tap < TAPS; tap += THREADS) {
    float total = 0.f;
    for (int warp = 0; warp < WARPS; warp++) total += room[warp * TAPS + tap];
    dw[(((size_t)blockIdx.z * gridDim.y + g) * C + channel) * TAPS + tap] = total;
  }
}
