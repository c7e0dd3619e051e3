// What every pixel of a convolution's result sees, as a row of a matrix, and the sum of such rows back into images. Images
// of a stack of clients are [image, pixel, g, channel] in memory, of bfloat16 with HALF; rows are [g, image and pixel, tap,
// channel]. A block has PIXELS pixels of a client, and a thread always the same channels, 16 bytes of them.
// Constants: THREADS, PIXELS; KH, KW, PAD and STRIDE, since to divide by what is not one would take longer than to copy.

#include "common.cuh"

#define TAPS (unsigned)(KH * KW)
#define SOME(taps) (((taps) + STRIDE - 1) / STRIDE)  // taps along an axis that see the same pixel
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
gather_rows(const Number* __restrict__ x, Number* __restrict__ rows, int images, int C, int H, int W, int OH, int OW) {
  extern __shared__ float4 memory[];
  Spot* spots = (Spot*)memory;
  const int g = blockIdx.y, groups = gridDim.y, first = blockIdx.x * PIXELS, total = images * OH * OW;
  find_spots(spots, first, total, OH, OW);
  const int lanes = C / E, some = THREADS / lanes, lane = threadIdx.x % lanes;
  const int last = min(PIXELS, total - first) * TAPS;
  if (threadIdx.x >= some * lanes) return;
#pragma unroll 4
  for (int at = threadIdx.x / lanes; at < last; at += some) {
    const unsigned tap = (unsigned)at % TAPS;
    const Spot spot = spots[(unsigned)at / TAPS];
    const int h = spot.h * STRIDE - PAD + (int)(tap / KW), v = spot.v * STRIDE - PAD + (int)(tap % KW);
    Pack pack = {};
    if (h >= 0 && h < H && v >= 0 && v < W)
      pack = *(const Pack*)(x + ((size_t)((spot.image * H + h) * W + v) * groups + g) * C + lane * E);
    *(Pack*)(rows + (((size_t)g * total + first) * TAPS + at) * C + lane * E) = pack;
  }
}

// dx[pixel] = the sum of the places of rows that are copies of it. H and W are those of dx.
extern "C" __global__ void __launch_bounds__(THREADS)
spread_rows(const Number* __restrict__ rows, Number* __restrict__ dx, int images, int C, int H, int W, int OH, int OW) {
  extern __shared__ float4 memory[];
  Spot* spots = (Spot*)memory;
  const int g = blockIdx.y, groups = gridDim.y, first = blockIdx.x * PIXELS, total = images * H * W;
  find_spots(spots, first, total, H, W);
  const int lanes = C / E, some = THREADS / lanes, lane = threadIdx.x % lanes;
  if (threadIdx.x >= some * lanes) return;
  rows += (size_t)g * images * OH * OW * TAPS * C + lane * E;
  for (int at = threadIdx.x / lanes; at < min(PIXELS, total - first); at += some) {
    const Spot spot = spots[at];
    const int up = (spot.h + PAD) % STRIDE, left = (spot.v + PAD) % STRIDE;  // the first taps whose copies it is
    WIDE sums[E] = {};
#pragma unroll
    for (int j = 0; j < SOME(KH); j++)
#pragma unroll
      for (int i = 0; i < SOME(KW); i++) {
        const int row = up + j * STRIDE, col = left + i * STRIDE;
        const int h = (spot.h + PAD) / STRIDE - j, v = (spot.v + PAD) / STRIDE - i;
        Pack pack = {};
        if (row < KH && col < KW && h >= 0 && h < OH && v >= 0 && v < OW)
          pack = *(const Pack*)(rows + ((size_t)((spot.image * OH + h) * OW + v) * TAPS + row * KW + col) * C);
#pragma unroll
        for (int n = 0; n < E; n++) sums[n] += number(pack.of[n]);
      }
    Pack pack;
#pragma unroll
    for (int n = 0; n < E; n++) pack.of[n] = kept(sums[n]);
    *(Pack*)(dx + ((size_t)(first + at) * groups + g) * C + lane * E) = pack;
  }
}
