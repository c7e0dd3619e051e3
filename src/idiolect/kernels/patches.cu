// What every pixel of a convolution's result sees, as a row of a matrix, and the sum of such rows back into images. Images
// of a stack of clients are [image, pixel, g, channel] in memory, of bfloat16 with HALF; rows are [g, image and pixel, tap,
// channel]. A block has PIXELS pixels of a client, and a thread always the same channels, 16 bytes of them.
// Constants: THREADS, PIXELS.

#include "common.cuh"

#define E (16 / (int)sizeof(Number))      // numbers of 16 bytes
struct alignas(16) Pack { Number of[E]; };

struct Spot { int image, h, v; };         // of a pixel

// The block's pixels, of which there are so many in all, in images of some size.
__device__ __forceinline__ void find_spots(Spot* spots, int first, int total, int height, int width) {
  const unsigned whole = height * width, cols = width;
  for (int i = threadIdx.x; i < PIXELS && first + i < total; i += THREADS) {
    const unsigned pixel = (first + i) % whole;
    spots[i] = {(int)((first + i) / whole), (int)(pixel / cols), (int)(pixel % cols)};
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
gather_rows(const Number* __restrict__ x, Number* __restrict__ rows, int images, int C, int H, int W, int OH, int OW,
            int KH, int KW, int PAD, int STRIDE) {
  extern __shared__ float4 memory[];
  Spot* spots = (Spot*)memory;
  const int g = blockIdx.y, groups = gridDim.y, first = blockIdx.x * PIXELS, total = images * OH * OW;
  find_spots(spots, first, total, OH, OW);
  const int lanes = C / E, some = THREADS / lanes, lane = threadIdx.x % lanes, taps = KH * KW;
  const int last = min(PIXELS, total - first) * taps;
  if (threadIdx.x >= some * lanes) return;
#pragma unroll 4
  for (int at = threadIdx.x / lanes; at < last; at += some) {
    const unsigned tap = (unsigned)at % (unsigned)taps;
    const Spot spot = spots[(unsigned)at / (unsigned)taps];
    const int h = spot.h * STRIDE - PAD + (int)(tap / (unsigned)KW), v = spot.v * STRIDE - PAD + (int)(tap % (unsigned)KW);
    Pack pack = {};
    if (h >= 0 && h < H && v >= 0 && v < W)
      pack = *(const Pack*)(x + ((size_t)((spot.image * H + h) * W + v) * groups + g) * C + lane * E);
    *(Pack*)(rows + (((size_t)g * total + first) * taps + at) * C + lane * E) = pack;
  }
}

// dx[pixel] = the sum of the places of rows that are copies of it. H and W are those of dx.
extern "C" __global__ void __launch_bounds__(THREADS)
spread_rows(const Number* __restrict__ rows, Number* __restrict__ dx, int images, int C, int H, int W, int OH, int OW,
            int KH, int KW, int PAD, int STRIDE) {
  extern __shared__ float4 memory[];
  Spot* spots = (Spot*)memory;
  const int g = blockIdx.y, groups = gridDim.y, first = blockIdx.x * PIXELS, total = images * H * W;
  find_spots(spots, first, total, H, W);
  const int lanes = C / E, some = THREADS / lanes, lane = threadIdx.x % lanes;
  if (threadIdx.x >= some * lanes) return;
  rows += (size_t)g * images * OH * OW * KH * KW * C + lane * E;
  for (int at = threadIdx.x / lanes; at < min(PIXELS, total - first); at += some) {
    const Spot spot = spots[at];
    WIDE sums[E] = {};
    for (int j = (spot.h + PAD) % STRIDE; j < KH; j += STRIDE) {
      const int h = (spot.h + PAD - j) / STRIDE;
      if (spot.h + PAD < j || h >= OH) continue;
#pragma unroll 3
      for (int i = (spot.v + PAD) % STRIDE; i < KW; i += STRIDE) {
        const int v = (spot.v + PAD - i) / STRIDE;
        if (spot.v + PAD < i || v >= OW) continue;
        const Pack pack = *(const Pack*)(rows + ((size_t)((spot.image * OH + h) * OW + v) * (KH * KW) + j * KW + i) * C);
#pragma unroll
        for (int n = 0; n < E; n++) sums[n] += number(pack.of[n]);
      }
    }
    Pack pack;
#pragma unroll
    for (int n = 0; n < E; n++) pack.of[n] = kept(sums[n]);
    *(Pack*)(dx + ((size_t)(first + at) * groups + g) * C + lane * E) = pack;
  }
}
