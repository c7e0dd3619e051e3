// Convolutions of a stack of clients with many channels, stride 1, on matrix units in single precision.
//
// A matrix unit multiplies numbers of 11 bits (TF32) and adds in single precision. Every number is taken
// apart into a large and a small piece of 11 bits, and three of the four products of pieces are added up;
// what is left out is below single precision. With ROUNDED one product of the large pieces is enough: TF32. Shared
// memory and stages are as in `wide.cu`.
//
// Constants: C, H, W (what is read), OC, OH, OW (what is made), KH, KW, PAD, TRANSPOSED, RELU (1: bias and ReLU
// follow at once), POOL (2: 2x2 max-pooling too), THREADS, OCB (channels of a block), MT and NT (tiles of 16 channels and
// of 8 pixels of a warp), ROWS (rows of images that a block may need). Gradients by the weights: `runs.cu`.

#define TAPS (KH * KW)

#include "common.cuh"

#define MADE_H (OH / POOL)
#define MADE_W (OW / POOL)
#define SPAN (MADE_H * POOL + KH - 1)           // rows of a padded image that are used
#define LINE (MADE_W * POOL + KW - 1)
#define PLANE ((ROWS * LINE + 7) / 16 * 16 + 8) // 8 more than a multiple of 16, against bank conflicts
#define OCP (OCB + 8)
#define WM (OCB / (16 * MT))                    // warps along the channels; the others along the pixels
#define WN (THREADS / 32 / WM)
#define CELLS (WN * NT * 8 / (POOL * POOL))     // pixels, or windows of them, of a block
#define CHUNK 8
#define RESIDENT ((MT * NT > 16 ? 256 : 512) / THREADS)  // blocks of a multiprocessor, as its registers allow

// y[g, image, o] = sum over c and taps of w[g, c, tap, o] * x[g, image, c]; see `wide.cu`.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
convolve(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias,
         float* __restrict__ y, unsigned char* __restrict__ chosen, int images) {
  extern __shared__ float4 memory[];
  const int stage = CHUNK * (TAPS * OCP + PLANE);
  const int g = blockIdx.y, base = blockIdx.z * OCB;
  const int first = blockIdx.x * CELLS, start = first / MADE_W;
  const int top = start / MADE_H * SPAN + start % MADE_H * POOL;
  w += (size_t)g * C * TAPS * OC + base;
  x += (size_t)g * images * (C * H * W);

  const int SPOTS = (ROWS * LINE + THREADS - 1) / THREADS;
  int origin[SPOTS];
#pragma unroll
  for (int i = 0; i < SPOTS; i++) {
    const int spot = threadIdx.x + i * THREADS, col = spot % LINE - PAD;
    const int line = top + spot / LINE, image = line / SPAN, row = line % SPAN - PAD;
    const bool inside = image < images && row >= 0 && row < H && col >= 0 && col < W;
    origin[i] = inside ? (image * C * H + row) * W + col : -1;
  }
  auto load = [&](int chunk) {
    float* kernels = (float*)memory + (chunk & 1) * stage;    // [CHUNK][TAPS][OCP]
    float* held = kernels + CHUNK * TAPS * OCP;               // [CHUNK][PLANE]
    const float* from = w + (size_t)chunk * CHUNK * TAPS * OC;
    for (int i = threadIdx.x; i < CHUNK * TAPS * (OCB / 4); i += THREADS)
      bring4(kernels + i / (OCB / 4) * OCP + i % (OCB / 4) * 4,
             from + i / (OCB / 4) * OC + i % (OCB / 4) * 4);
#pragma unroll
    for (int i = 0; i < SPOTS; i++) {
      const int spot = threadIdx.x + i * THREADS;
      if (spot >= ROWS * LINE) continue;
      const bool inside = origin[i] >= 0;
      const float* source = x + (inside ? origin[i] : 0) + chunk * CHUNK * H * W;
#pragma unroll
      for (int c = 0; c < CHUNK; c++) bring(held + c * PLANE + spot, source + c * H * W, inside);
    }
    close_stage();
  };

  const int lane = threadIdx.x % 32, across = lane / 4, along = lane % 4;
  const int warp = threadIdx.x / 32, low = warp % WM * 16 * MT;
  const int cell = first + warp / WM * (NT * 8 / (POOL * POOL));  // the warp's first
  int spot[NT];                                 // where the pixel is that this thread loads for a tile
#pragma unroll
  for (int j = 0; j < NT; j++) {
#if POOL == 1
    const int own = cell + j * 8 + across, down = 0, right = 0;
#else
    const int own = cell + j / 2 * 4 + across / 2, down = j % 2, right = across % 2;
#endif
    const int band = own / MADE_W, image = band / MADE_H;
    const int line = image * SPAN + band % MADE_H * POOL + down - top;
    spot[j] = line * LINE + own % MADE_W * POOL + right + along * PLANE;
  }
  float sums[MT][NT][4];
  clear(sums);

  load(0);
  for (int chunk = 0; chunk < C / CHUNK; chunk++) {
    if (chunk + 1 < C / CHUNK) {
      load(chunk + 1);
      await_stage<1>();
    } else {
      await_stage<0>();
    }
    __syncthreads();
    const float* kernels = (const float*)memory + (chunk & 1) * stage + along * TAPS * OCP + low + across;
    const float* held = (const float*)memory + (chunk & 1) * stage + CHUNK * TAPS * OCP;
#pragma unroll 1
    for (int kh = 0; kh < KH; kh++) {
#pragma unroll
      for (int kw = 0; kw < KW; kw++) {
        const int tap = TRANSPOSED ? TAPS - 1 - (kh * KW + kw) : kh * KW + kw;
        unsigned large[MT][4], small[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            part(kernels[(i / 2 * 4 * TAPS + tap) * OCP + m * 16 + i % 2 * 8], &large[m][i], &small[m][i]);
#pragma unroll
        for (int j = 0; j < NT; j++) {
          unsigned big[2], little[2];
#pragma unroll
          for (int i = 0; i < 2; i++)
            part(held[spot[j] + i * 4 * PLANE + kh * LINE + kw], &big[i], &little[i]);
#if !ROUNDED
#pragma unroll
          for (int m = 0; m < MT; m++) multiply_short(sums[m][j], small[m], big);
#pragma unroll
          for (int m = 0; m < MT; m++) multiply_short(sums[m][j], large[m], little);
#endif
#pragma unroll
          for (int m = 0; m < MT; m++) multiply_short(sums[m][j], large[m], big);
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int channel = base + low + m * 16 + half * 8 + across;
#if POOL == 1
      const float shift = RELU ? bias[g * OC + channel] : 0.f;
#pragma unroll
      for (int j = 0; j < NT; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int own = cell + j * 8 + along * 2 + i, image = own / (OH * OW);
          if (image >= images) continue;
          const size_t plane = (((size_t)g * images + image) * OC + channel) * (OH * OW);
          const float sum = sums[m][j][half * 2 + i] + shift;  // NaN must be seen
          y[plane + own % (OH * OW)] = RELU && sum <= 0.f ? 0.f : sum;
        }
#else
      const float shift = bias[g * OC + channel];
#pragma unroll
      for (int j = 0; j < NT; j += 2) {
        const int own = cell + j / 2 * 4 + along, image = own / (MADE_H * MADE_W);
        if (image >= images) continue;
        const Largest most = largest_of(shift, [&](int i) { return sums[m][j + i / 2][half * 2 + i % 2]; });
        const size_t place = (((size_t)g * images + image) * OC + channel) * (MADE_H * MADE_W) + own % (MADE_H * MADE_W);
        y[place] = most.value;
        chosen[place] = most.which;
      }
#endif
    }
}
