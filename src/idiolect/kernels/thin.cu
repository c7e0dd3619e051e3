// Convolutions of a stack of clients with few channels, stride 1, in plain float32.
//
// A grouped convolution of thin groups leaves most of a GPU idle. Here a block takes a few images of
// one client into shared memory with that client's kernels, and every thread keeps a small tile of
// sums in registers. Sizes are constants of the compilation. Sums are taken in a fixed order.
//
// Constants: C, H, W (what is read), OC, OH, OW (what is made), KH, KW, PAD, TRANSPOSED, THREADS,
// RELU (1: bias and ReLU follow at once), POOL (2: 2x2 max-pooling too; 1: it does not), PX (pixels of a thread,
// in each of its POOL rows), OCT (channels of a thread), OCB (channels of a block),
// IMGS (images held at once), SLICES (threads that share the rows of one sum).

#include "common.cuh"

#define PH (H + 2 * PAD)
#define PW (W + 2 * PAD)
#define K (C * KH * KW)
#define MADE_H (OH / POOL)  // a last odd row or column is left out, as torch's max_pool2d does
#define MADE_W (OW / POOL)
#define COLS ((MADE_W * POOL + PX - 1) / PX)
#define GROUPS (OCB / OCT)
#define LINE (COLS * PX + KW - 1 > PW ? COLS * PX + KW - 1 : PW)  // room for the last tile's overrun

__device__ __forceinline__ void fetch(float* into, const float* from) {
#if OCT % 4 == 0
#pragma unroll
  for (int i = 0; i < OCT; i += 4) *(float4*)(into + i) = *(const float4*)(from + i);
#elif OCT % 2 == 0
#pragma unroll
  for (int i = 0; i < OCT; i += 2) *(float2*)(into + i) = *(const float2*)(from + i);
#else
#pragma unroll
  for (int i = 0; i < OCT; i++) into[i] = from[i];
#endif
}

// y[g, image, o] = sum over c and taps of w[g, o, c] * x[g, image, c]; where TRANSPOSED, the transpose:
// w is [g, c, o] as stored for the forward direction, with its taps flipped. Where POOL, `chosen`
// says which of the four pixels of a window was largest, and 4 where none was above 0.
extern "C" __global__ void __launch_bounds__(THREADS)
convolve(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias,
         float* __restrict__ y, unsigned char* __restrict__ chosen, int images) {
  extern __shared__ float4 memory[];
  float* kernels = (float*)memory;              // [K][OCB]
  float* held = kernels + K * OCB;              // [IMGS][C][PH][LINE]
  const int g = blockIdx.y, first = blockIdx.x * IMGS, base = blockIdx.z * OCB;
  const int here = min(IMGS, images - first);
  w += (size_t)g * OC * K;
  x += ((size_t)g * images + first) * (C * H * W);
  y += ((size_t)g * images + first) * (OC * MADE_H * MADE_W);
  for (int i = threadIdx.x; i < K * OCB; i += THREADS) {
    const int o = base + i % OCB, k = i / OCB;
#if TRANSPOSED
    const int tap = k % (KH * KW);
    const int place = ((k / (KH * KW)) * OC + o) * (KH * KW) + (KH * KW - 1 - tap);
#else
    const int place = o * K + k;
#endif
    kernels[i] = o < OC ? w[place] : 0.f;
  }
#if PAD > 0 || LINE > PW
  for (int i = threadIdx.x; i < here * C * PH * LINE; i += THREADS) held[i] = 0.f;
  __syncthreads();
#endif
  for (int i = threadIdx.x; i < here * C * H * W; i += THREADS) {
    const int col = i % W, row = (i / W) % H, plane = i / (W * H);
    held[(plane * PH + row + PAD) * LINE + col + PAD] = x[i];
  }
  __syncthreads();
  for (int unit = threadIdx.x; unit < here * MADE_H * COLS * GROUPS; unit += THREADS) {
    const int col = (unit % COLS) * PX, row = (unit / COLS) % MADE_H * POOL;
    const int group = (unit / (COLS * MADE_H)) % GROUPS, image = unit / (COLS * MADE_H * GROUPS);
    float sums[POOL][PX][OCT];
    clear(sums);
#pragma unroll 1
    for (int c = 0; c < C; c++) {
#pragma unroll
      for (int down = 0; down < KH + POOL - 1; down++) {
        const float* line = held + ((image * C + c) * PH + row + down) * LINE + col;
        float seen[PX + KW - 1];
#pragma unroll
        for (int i = 0; i < PX + KW - 1; i++) seen[i] = line[i];
#pragma unroll
        for (int r = 0; r < POOL; r++) {
          const int kh = down - r;
          if (kh < 0 || kh >= KH) continue;
#pragma unroll
          for (int kw = 0; kw < KW; kw++) {
            float weights[OCT];
            fetch(weights, kernels + ((c * KH + kh) * KW + kw) * OCB + group * OCT);
#pragma unroll
            for (int p = 0; p < PX; p++)
#pragma unroll
              for (int o = 0; o < OCT; o++) sums[r][p][o] += weights[o] * seen[p + kw];
          }
        }
      }
    }
#pragma unroll
    for (int o = 0; o < OCT; o++) {
      const int channel = base + group * OCT + o;
      if (channel >= OC) continue;
      const int place = ((image * OC + channel) * MADE_H + row / POOL) * MADE_W + col / POOL;
#if POOL == 1
      const float shift = RELU ? bias[g * OC + channel] : 0.f;
#pragma unroll
      for (int p = 0; p < PX; p++) {
        const float sum = sums[0][p][o] + shift;  // NaN must be seen
        if (col + p < OW) y[place + p] = RELU && sum <= 0.f ? 0.f : sum;
      }
#else
      const float shift = bias[g * OC + channel];
#pragma unroll
      for (int p = 0; p < PX; p += 2) {
        if (col + p >= MADE_W * 2) continue;
        const Largest most = largest_of(shift, [&](int i) { return sums[i / 2][p + i % 2][o]; });
        y[place + p / 2] = most.value;
        chosen[((size_t)g * images + first) * (OC * MADE_H * MADE_W) + place + p / 2] = most.which;
      }
#endif
    }
  }
}

// out[part, g, o, c, taps] = sum over the part's images and pixels of gradient[g, image, o] * x[g, image, c].
extern "C" __global__ void __launch_bounds__(THREADS)
weight_gradient(const float* __restrict__ gradient, const float* __restrict__ x, float* __restrict__ out,
          int images, int each) {
  extern __shared__ float4 memory[];
  const int across = PW | 1;                    // an odd row length spreads rows over the banks
  float* gradients = (float*)memory;            // [OH][OW][OCB]
  float* held = gradients + OH * OW * OCB;      // [C][PH][across]
  const int g = blockIdx.y, base = blockIdx.z * OCB;
  const int first = blockIdx.x * each, last = min(images, first + each);
  const int unit = threadIdx.x;                 // lanes of a warp share a slice, so gradients broadcast
  const int slice = unit / (C * KH * GROUPS), rest = unit % (C * KH * GROUPS);
  const int group = rest / (C * KH), c = (rest / KH) % C, kh = rest % KH;
  const bool works = slice < SLICES;
  x += (size_t)g * images * (C * H * W);
  gradient += (size_t)g * images * (OC * OH * OW);
  float sums[KW][OCT];
  clear(sums);
#if PAD > 0
  for (int i = threadIdx.x; i < C * PH * across; i += THREADS) held[i] = 0.f;
#endif
  for (int image = first; image < last; image++) {
    __syncthreads();
    const float* from = x + (size_t)image * (C * H * W);
    for (int i = threadIdx.x; i < C * H * W; i += THREADS) {
      const int col = i % W, row = (i / W) % H, plane = i / (W * H);
      held[(plane * PH + row + PAD) * across + col + PAD] = from[i];
    }
    const float* source = gradient + (size_t)image * (OC * OH * OW) + base * OH * OW;
    for (int i = threadIdx.x; i < OCB * OH * OW; i += THREADS) {
      const int o = i / (OH * OW);
      gradients[(i % (OH * OW)) * OCB + o] = base + o < OC ? source[i] : 0.f;
    }
    __syncthreads();
    if (works)
      for (int row = slice; row < OH; row += SLICES) {
        const float* line = held + (c * PH + row + kh) * across;
        const float* down = gradients + row * OW * OCB + group * OCT;
        float seen[KW];
#pragma unroll
        for (int kw = 0; kw < KW - 1; kw++) seen[kw + 1] = line[kw];
#pragma unroll 4
        for (int col = 0; col < OW; col++) {
#pragma unroll
          for (int kw = 0; kw < KW - 1; kw++) seen[kw] = seen[kw + 1];
          seen[KW - 1] = line[col + KW - 1];
          float pulls[OCT];
          fetch(pulls, down + col * OCB);
#pragma unroll
          for (int kw = 0; kw < KW; kw++)
#pragma unroll
            for (int o = 0; o < OCT; o++) sums[kw][o] += pulls[o] * seen[kw];
        }
      }
  }
  __syncthreads();
  float* shared = (float*)memory;               // [SLICES][OCB][K]
  if (works)
#pragma unroll
    for (int o = 0; o < OCT; o++)
#pragma unroll
      for (int kw = 0; kw < KW; kw++)
        shared[(slice * OCB + group * OCT + o) * K + (c * KH + kh) * KW + kw] = sums[kw][o];
  __syncthreads();
  out += ((size_t)blockIdx.x * gridDim.y + g) * OC * K + base * K;
  for (int i = threadIdx.x; i < min(OCB, OC - base) * K; i += THREADS) {
    float total = 0.f;
    for (int s = 0; s < SLICES; s++) total += shared[s * OCB * K + i];
    out[i] = total;
  }
}
