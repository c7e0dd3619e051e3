// Depthwise convolutions of a stack of clients: every channel of every client has a kernel of its own. They move
// much memory for little arithmetic, so each number is read where it lies; neighbours share it in the cache.
// Images are [g, image, channel, row, column], kernels [g, channel, row, column].
// Constants: C (channels), H, W (what is convolved), OH, OW (the result), KH, KW, PAD, STRIDE, THREADS, SIDE_BY_SIDE (the
// pixels of a row that a thread makes: 1 or 4).

#include "common.cuh"

#define TAPS (KH * KW)
#define WARPS (THREADS / 32)

// The kernel that a plane of images, counted over all clients, is convolved with.
__device__ __forceinline__ const float* kernel_of(const float* w, size_t plane, int images) {
  return w + (plane / C / images * C + plane % C) * TAPS;
}

struct alignas(SIDE_BY_SIDE * 4) Pixels { float at[SIDE_BY_SIDE]; };

// y = the sum over taps of w * x; a thread makes some pixels side by side, for which it reads every pixel of a row once.
extern "C" __global__ void __launch_bounds__(THREADS)
convolve(const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ y, int images, int groups) {
  const unsigned pack = blockIdx.x * THREADS + threadIdx.x, plane = pack / (OH * OW / SIDE_BY_SIDE);
  if (plane >= (unsigned)groups * images * C) return;
  const int spot = pack % (OH * OW / SIDE_BY_SIDE) * SIDE_BY_SIDE;
  const int col = spot % OW * STRIDE - PAD, row = spot / OW * STRIDE - PAD;
  const float* from = x + (size_t)plane * (H * W);
  const float* own = kernel_of(w, plane, images);
  Pixels sums;
#pragma unroll
  for (int i = 0; i < SIDE_BY_SIDE; i++) sums.at[i] = 0.f;
#pragma unroll
  for (int kh = 0; kh < KH; kh++) {
    const int h = row + kh;
    if (h < 0 || h >= H) continue;
    float seen[(SIDE_BY_SIDE - 1) * STRIDE + KW];
#pragma unroll
    for (int j = 0; j < (SIDE_BY_SIDE - 1) * STRIDE + KW; j++)
      seen[j] = col + j >= 0 && col + j < W ? from[h * W + col + j] : 0.f;
#pragma unroll
    for (int i = 0; i < SIDE_BY_SIDE; i++)
#pragma unroll
      for (int kw = 0; kw < KW; kw++) sums.at[i] += own[kh * KW + kw] * seen[i * STRIDE + kw];
  }
  *(Pixels*)(y + (size_t)plane * (OH * OW) + spot) = sums;
}

// The transpose: a pixel of x gathers the gradients of all pixels of y that it had a part in. The first of some side by
// side is at a multiple of the stride, so that it is known of each which taps reach it.
#define LEAST ((PAD - KW + 1 - (STRIDE - 1)) / STRIDE)                // columns of y from that of the first pixel on
#define MANY ((SIDE_BY_SIDE - 1 + PAD) / STRIDE - LEAST + 1)
extern "C" __global__ void __launch_bounds__(THREADS)
input_gradient(const float* __restrict__ gradient, const float* __restrict__ w, float* __restrict__ dx, int images, int groups) {
  const unsigned pack = blockIdx.x * THREADS + threadIdx.x, plane = pack / (H * W / SIDE_BY_SIDE);
  if (plane >= (unsigned)groups * images * C) return;
  const int spot = pack % (H * W / SIDE_BY_SIDE) * SIDE_BY_SIDE;
  const int col = spot % W, row = spot / W + PAD;
  const float* from = gradient + (size_t)plane * (OH * OW);
  const float* own = kernel_of(w, plane, images);
  Pixels sums;
#pragma unroll
  for (int i = 0; i < SIDE_BY_SIDE; i++) sums.at[i] = 0.f;
#pragma unroll
  for (int kh = 0; kh < KH; kh++) {
    const int h = row - kh;
    if (h < 0 || h % STRIDE || h / STRIDE >= OH) continue;
#if SIDE_BY_SIDE % STRIDE == 0
    float seen[MANY];
#pragma unroll
    for (int j = 0; j < MANY; j++) {
      const int v = col / STRIDE + LEAST + j;
      seen[j] = v >= 0 && v < OW ? from[h / STRIDE * OW + v] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < SIDE_BY_SIDE; i++)
#pragma unroll
      for (int kw = 0; kw < KW; kw++)
        if ((i + PAD - kw) % STRIDE == 0) sums.at[i] += own[kh * KW + kw] * seen[(i + PAD - kw) / STRIDE - LEAST];
#else
#pragma unroll
    for (int kw = 0; kw < KW; kw++) {
      const int v = col + PAD - kw;
      if (v >= 0 && v % STRIDE == 0 && v / STRIDE < OW) sums.at[0] += own[kh * KW + kw] * from[h / STRIDE * OW + v / STRIDE];
    }
#endif
  }
  *(Pixels*)(dx + (size_t)plane * (H * W) + spot) = sums;
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
