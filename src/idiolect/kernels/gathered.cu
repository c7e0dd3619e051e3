// Convolutions of a stack of clients with channels last, by the matrix units of Hopper (wgmma), of any stride: a block
// gathers, for each tap, the pixels that it sees. `halo.cu` holds them instead, which is for images that are large, since
// zeros lie between them. Images are [image, pixel, g, channel] in memory, weights [g, made, tap, read]; of bfloat16 with
// HALF, else of single precision, cut off to TF32 in products.
//
// Constants: TRANSPOSED (1: the gradient by images, of which OC, OH and OW are), BN (channels made by a block), MT
// (matrices of 64 pixels of a warpgroup), STAGES, THREADS. Sizes are arguments: C, H, W (what is read), OC, OH, OW (what is
// made), KH, KW, PAD, STRIDE. C is a multiple of BK. Of weight gradients, for bfloat16 alone: PIXELS (at a time), and NT
// (twice 64 channels of what is read, of one tap or two).

#define TAPS (KH * KW)
#define BM (THREADS / 128 * MT * 64)      // pixels made by a block
#define STAGE ((BM + BN) * 128)
#define CLASSES (TRANSPOSED ? STRIDE : 1) // pixels made, along an axis, that different taps contribute to
#define FAR (1 << 20)                     // rows from any image

#include "common.cuh"
#include "warpgroup.cuh"

#if !WEIGHT_GRADIENT

extern "C" __global__ void __launch_bounds__(THREADS)
convolve(const Number* __restrict__ x, const Number* __restrict__ w, Number* __restrict__ y, int images, int C, int H,
         int W, int OC, int OH, int OW, int KH, int KW, int PAD, int STRIDE) {
  extern __shared__ float4 memory[];
  char* stages = whole_pieces(memory);    // [STAGES] of pixels [BM][128 bytes], then weights [BN][128 bytes]
  const int g = blockIdx.y, groups = gridDim.y, base = blockIdx.z * BN;
  // Pixels whose row and column leave the same rest are made together: they have the same taps.
  const int kind = blockIdx.x % (CLASSES * CLASSES), top = kind / CLASSES, left = kind % CLASSES;
  const int rows = (OH - top + CLASSES - 1) / CLASSES, cols = (OW - left + CLASSES - 1) / CLASSES;
  const int first = blockIdx.x / (CLASSES * CLASSES) * BM, count = images * rows * cols;
  const unsigned pixels = rows * cols, across = cols;  // as divisors
  if (first >= count) return;
  const int upper = TRANSPOSED ? (top + PAD) % STRIDE : 0, outer = TRANSPOSED ? (left + PAD) % STRIDE : 0;  // first taps
  const int high = max(0, (KH - upper + CLASSES - 1) / CLASSES), wide = max(0, (KW - outer + CLASSES - 1) / CLASSES);
  const int steps = C / BK * high * wide;
  const int piece = threadIdx.x % 8, line = threadIdx.x / 8, place = line * 128 + (piece ^ line % 8) * 16;
  x += (size_t)g * C + piece * E;
  w += (size_t)g * OC * TAPS * C + piece * E;

  int origin[BM / LINES], down[BM / LINES], right[BM / LINES];  // of each row: its image, and what its first tap sees
#pragma unroll
  for (int r = 0; r < BM / LINES; r++) {
    const unsigned own = first + line + r * LINES, image = own / pixels, pixel = own % pixels;
    const int row = pixel / across, col = pixel % across;
    down[r] = TRANSPOSED ? row + (top + PAD - upper) / STRIDE : row * STRIDE - PAD;
    right[r] = TRANSPOSED ? col + (left + PAD - outer) / STRIDE : col * STRIDE - PAD;
    origin[r] = ((int)image * H + down[r]) * W + right[r];
    if (own >= count) down[r] = -FAR;  // outside for every tap
  }
  int c = 0, j = 0, i = 0;                // the channels, and the row and column of the tap, of the next step
  auto load = [&](int step) {
    char* to = stages + step % STAGES * STAGE + place;
    const int tap = TRANSPOSED ? -(j * W + i) : j * W + i;
    const int part = (upper + j * CLASSES) * KW + outer + i * CLASSES;  // of the weights
#pragma unroll
    for (int r = 0; r < BM / LINES; r++) {
      const int row = TRANSPOSED ? down[r] - j : down[r] + j, col = TRANSPOSED ? right[r] - i : right[r] + i;
      const bool inside = row >= 0 && row < H && col >= 0 && col < W;
      bring16_near(to + r * LINES * 128, x + (inside ? (size_t)(origin[r] + tap) * (groups * C) + c : 0), inside);
    }
#pragma unroll
    for (int r = 0; r < BN / LINES; r++) {
      const int o = base + line + r * LINES;
      bring16(to + (BM + r * LINES) * 128, w + (o < OC ? ((size_t)o * TAPS + part) * C + c : 0), o < OC);
    }
    if (++i == wide) {                    // all taps of some channels, then the next: pixels are near, in the cache
      i = 0;
      if (++j == high) j = 0, c += BK;
    }
  };
  const int own = threadIdx.x / 128 * MT * 64;  // the group's first pixel
  float sums[MT][BN / 2];
  clear(sums);  // a pixel that no tap sees
  for (int step = 0; step < AHEAD; step++) {
    if (step < steps) load(step);
    close_stage();
  }
  for (int step = 0; step < steps; step++) {
    await_stage<AHEAD - 1>();
    show_copies();
    __syncthreads();
    const char* from = stages + step % STAGES * STAGE;
    const Matrix a = matrix_of(from + own * 128, 1024, 1024), b = matrix_of(from + BM * 128, 1024, 1024);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int m = 0; m < MT; m++) add_product(sums[m], a + m * (64 * 128 / 16) + k * 2, b + k * 2, 1);
    close_products();
    if (step + AHEAD < steps) load(step + AHEAD);
    close_stage();
    await_products<1>();
  }
  await_products<0>();
  write_pixels<MT, BN>(stages, sums, base, OC, [&](int row) -> Number* {
    const unsigned at = first + row, image = at / pixels, pixel = at % pixels;
    const int h = top + pixel / across * CLASSES, v = left + pixel % across * CLASSES;
    return at < count ? y + (((size_t)(image * OH + h) * OW + v) * groups + g) * OC : nullptr;
  });
}

#else

#define PANEL (PIXELS * 128)              // bytes of 64 channels of so many pixels
#define OUTS (THREADS / 128)              // such panels of the gradient: each warpgroup has one

// out[part, g, o, tap, c] = sum over the part's pixels of gradient[pixel, g, o] * x[pixel at tap, g, c].
extern "C" __global__ void __launch_bounds__(THREADS)
weight_gradient(const Number* __restrict__ gradient, const Number* __restrict__ x, float* __restrict__ out, int images,
                int each, int C, int H, int W, int OC, int OH, int OW, int KH, int KW, int PAD, int STRIDE) {
  extern __shared__ float4 memory[];
  char* stages = whole_pieces(memory);    // [STAGES] of panels: of the gradient, then of what taps see
  const int across = (TAPS * C / 64 + 2 * NT - 1) / (2 * NT);  // blocks side by side
  const int g = blockIdx.y, groups = gridDim.y, base = blockIdx.z / across * (OUTS * 64);
  const int begin = blockIdx.z % across * (2 * NT);            // the first panel
  const int first = blockIdx.x * each, last = min(images * OH * OW, first + each);
  const int steps = (last - first + PIXELS - 1) / PIXELS, piece = threadIdx.x % 8, line = threadIdx.x / 8;
  const unsigned whole = OH * OW, cols = OW;                   // as divisors
  gradient += (size_t)g * OC + base + piece * E;
  x += (size_t)g * C + piece * E;
  int down[2 * NT], right[2 * NT], from[2 * NT];               // of each panel: where its tap is, and its channel
#pragma unroll
  for (int p = 0; p < 2 * NT; p++) {
    const int tap = (begin + p) * 64 / C;
    down[p] = tap < TAPS ? tap / KW - PAD : FAR;
    right[p] = tap % KW - PAD;
    from[p] = (begin + p) * 64 % C + (down[p] * W + right[p]) * groups * C;
  }

  auto load = [&](int step) {
    char* to = stages + step % STAGES * ((OUTS + 2 * NT) * PANEL);
#pragma unroll
    for (int r = 0; r < PIXELS / LINES; r++) {
      const int row = line + r * LINES, at = first + step * PIXELS + row;
      char* place = to + row * 128 + (piece ^ row % 8) * 16;
#pragma unroll
      for (int p = 0; p < OUTS; p++) {
        const bool inside = at < last && base + p * 64 + piece * E < OC;
        bring16(place + p * PANEL, gradient + (inside ? (size_t)at * groups * OC + p * 64 : 0), inside);
      }
      const unsigned image = (unsigned)at / whole, pixel = (unsigned)at % whole;
      const int h = pixel / cols * STRIDE, v = pixel % cols * STRIDE;
      const Number* seen = x + (size_t)(((int)image * H + h) * W + v) * (groups * C);
#pragma unroll
      for (int p = 0; p < 2 * NT; p++) {
        const int row = h + down[p], col = v + right[p];
        const bool inside = at < last && row >= 0 && row < H && col >= 0 && col < W;
        bring16_near(place + (OUTS + p) * PANEL, inside ? seen + from[p] : x, inside);
      }
    }
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = warp / 4;  // the group's panel of the gradient
  float sums[NT][64];
  for (int step = 0; step < AHEAD; step++) {
    if (step < steps) load(step);
    close_stage();
  }
  for (int step = 0; step < steps; step++) {
    await_stage<AHEAD - 1>();
    show_copies();
    __syncthreads();
    const char* held = stages + step % STAGES * ((OUTS + 2 * NT) * PANEL);
    const Matrix a = matrix_of(held + own * PANEL, 1024, PANEL), b = matrix_of(held + OUTS * PANEL, 1024, PANEL);
    begin_products();
#pragma unroll
    for (int k = 0; k < PIXELS / 16; k++)
#pragma unroll
      for (int n = 0; n < NT; n++)
        add_turned(sums[n], a + k * (16 * 128 / 16), b + k * (16 * 128 / 16) + n * (2 * PANEL / 16), step | k);
    close_products();
    if (step + AHEAD < steps) load(step + AHEAD);
    close_stage();
    await_products<1>();
  }
  await_products<0>();
  out += ((size_t)blockIdx.x * groups + g) * OC * TAPS * C;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int o = base + own * 64 + warp % 4 * 16 + half * 8 + lane / 4;
    if (o >= OC) continue;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int m = 0; m < 16; m++) {
        const int place = (begin + n * 2) * 64 + m * 8 + lane % 4 * 2;
        if (place < TAPS * C)
          *(float2*)(out + (size_t)o * TAPS * C + place) = {sums[n][m * 4 + half * 2], sums[n][m * 4 + half * 2 + 1]};
      }
  }
}

#endif
