// Convolutions of a stack of clients with channels last, on matrix units: images are [image, pixel, g, channel] in
// memory, of bfloat16 with HALF, else of single precision, rounded to TF32 in products. All clients are one launch.
//
// Each is a product of matrices whose elements are gathered as they are needed. Shared memory holds STAGES pieces of
// both factors; in every row of 128 bytes, pieces of 16 bytes are swizzled against bank conflicts.
//
// Constants: TRANSPOSED (1: the gradient by images, of which OC, OH and OW are), BM and BN (rows and columns of a
// block), WM and WN (of a warp), STAGES, THREADS. Sizes are arguments, so that all layers of a network are one kernel:
// C, H, W (what is read), OC, OH, OW (what is made), KH, KW, PAD, STRIDE.

#define TAPS (KH * KW)
#define E (16 / (int)sizeof(Number))    // numbers of 16 bytes
#define MT (WM / 16)
#define NT (WN / 8)

#include "common.cuh"

// sums[16][8] += a[16][k] * b[k][8], each spread over the threads of a warp; k is 32 bytes of numbers.
__device__ __forceinline__ void multiply(float* sums, const unsigned* a, const unsigned* b) {
#ifdef HALF
  multiply_half(sums, a, b);
#else
  multiply_short(sums, a, b);
#endif
}

// Near numbers of TF32, to which the unit would else cut them off.
__device__ __forceinline__ void round_off(unsigned* numbers, int count) {
#ifndef HALF
#pragma unroll
  for (int i = 0; i < count; i++) numbers[i] = nudged(__uint_as_float(numbers[i]));
#endif
}

#if !WEIGHT_GRADIENT

#define BK (8 * E)                      // 128 bytes
#define STAGE ((BM + BN) * 128)
#ifdef HALF  // of 32 rows of weights, such that eight neighbouring channels made are those of a thread
#define CHANNEL(row) ((row) / 32 * 32 + (row) % 8 / 2 * 8 + (row) / 8 % 4 * 2 + (row) % 2)
#else
#define CHANNEL(row) (row)
#endif
#define CLASSES (TRANSPOSED ? STRIDE : 1)   // pixels made, along an axis, that different taps contribute to
#define LINES (THREADS / 8)             // rows that are copied at a time

// y[image, pixel, g, o] = sum over taps and c of x[image, pixel at tap, g, c] * w[g, o, tap, c].
extern "C" __global__ void __launch_bounds__(THREADS)
convolve(const Number* __restrict__ x, const Number* __restrict__ w, Number* __restrict__ y, int images, int C, int H,
         int W, int OC, int OH, int OW, int KH, int KW, int PAD, int STRIDE) {
  extern __shared__ float4 memory[];
  const int g = blockIdx.y, groups = gridDim.y, base = blockIdx.z * BN;
  // Pixels whose row and column leave the same rest are made together: they have the same taps.
  const int kind = blockIdx.x % (CLASSES * CLASSES), top = kind / CLASSES, left = kind % CLASSES;
  const int rows = (OH - top + CLASSES - 1) / CLASSES, cols = (OW - left + CLASSES - 1) / CLASSES;
  const int first = blockIdx.x / (CLASSES * CLASSES) * BM, count = images * rows * cols;
  const unsigned pixels = rows * cols, across = cols;  // as divisors
  if (first >= count) return;
  const int upper = TRANSPOSED ? (top + PAD) % STRIDE : 0, outer = TRANSPOSED ? (left + PAD) % STRIDE : 0;  // first taps
  const int high = (KH - upper + CLASSES - 1) / CLASSES, wide = (KW - outer + CLASSES - 1) / CLASSES;
  const int steps = (high * wide * C + BK - 1) / BK;
  x += (size_t)g * C;
  w += (size_t)g * OC * TAPS * C;

  const int chunk = threadIdx.x % 8, line = threadIdx.x / 8;
  const int place = line * 128 + (chunk ^ line % 8) * 16;
  int origin[BM / LINES], down[BM / LINES], right[BM / LINES];  // of each row: its image, and what its first tap sees
#pragma unroll
  for (int i = 0; i < BM / LINES; i++) {
    const unsigned own = first + line + i * LINES, image = own / pixels, pixel = own % pixels;
    const int row = pixel / across, col = pixel % across;
    origin[i] = own < count ? image * (H * W) : -1;
    down[i] = TRANSPOSED ? row + (top + PAD - upper) / STRIDE : row * STRIDE - PAD;
    right[i] = TRANSPOSED ? col + (left + PAD - outer) / STRIDE : col * STRIDE - PAD;
  }
  int c = chunk * E, j = 0, i = 0;  // the channel, and the row and column of the tap, of the next step
  auto find_tap = [&]() {
    for (; c >= C; c -= C)
      if (++i == wide) i = 0, j++;
  };
  find_tap();
  auto load = [&](int step) {
    char* a = (char*)memory + step % STAGES * STAGE + place;
    char* b = a + BM * 128;
    const bool there = j < high;
    const int part = (upper + j * CLASSES) * KW + outer + i * CLASSES;  // of the weights
#pragma unroll
    for (int r = 0; r < BM / LINES; r++) {
      const int row = TRANSPOSED ? down[r] - j : down[r] + j, col = TRANSPOSED ? right[r] - i : right[r] + i;
      const bool inside = there && origin[r] >= 0 && row >= 0 && row < H && col >= 0 && col < W;
      bring16(a + r * LINES * 128, x + (inside ? (size_t)(origin[r] + row * W + col) * groups * C + c : 0), inside);
    }
#pragma unroll
    for (int r = 0; r < BN / LINES; r++) {
      const int o = base + CHANNEL(line + r * LINES);
      const bool inside = there && o < OC;
      bring16(b + r * LINES * 128, w + (inside ? ((size_t)o * TAPS + part) * C + c : 0), inside);
    }
    c += BK;
    find_tap();
    close_stage();
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int low = warp % (BM / WM) * WM, near = warp / (BM / WM) * WN;
  float sums[MT][NT][4];
  clear(sums);
  for (int step = 0; step < STAGES - 1; step++) {
    if (step < steps) load(step);
    else close_stage();
  }
  for (int step = 0; step < steps; step++) {
    await_stage<STAGES - 2>();
    __syncthreads();
    if (step + STAGES - 1 < steps) load(step + STAGES - 1);
    else close_stage();
    const char* a = (const char*)memory + step % STAGES * STAGE + (low + lane % 16) * 128;
    const char* b = (const char*)memory + step % STAGES * STAGE + (BM + near + lane / 16 * 8 + lane % 8) * 128;
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      unsigned as[MT][4], bs[NT * 2];
#pragma unroll
      for (int m = 0; m < MT; m++) load_matrices(as[m], a + m * 16 * 128 + ((k + lane / 16) ^ lane % 8) * 16);
#pragma unroll
      for (int n = 0; n < NT; n += 2) load_matrices(bs + n * 2, b + n * 8 * 128 + ((k + lane / 8 % 2) ^ lane % 8) * 16);
#pragma unroll
      for (int m = 0; m < MT; m++) round_off(as[m], 4);
      round_off(bs, NT * 2);
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++) multiply(sums[m][n], as[m], bs + n * 2);
    }
  }
  struct alignas(16) Eight { unsigned of[4]; };
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const unsigned own = first + low + m * 16 + half * 8 + lane / 4, image = own / pixels, pixel = own % pixels;
      if (own >= count) continue;
      const int row = top + pixel / across * CLASSES, col = left + pixel % across * CLASSES;
      const size_t to = ((size_t)image * (OH * OW) + row * OW + col) * groups + g;
#ifdef HALF
#pragma unroll
      for (int n = 0; n < NT; n += 4) {
        const int o = base + near + n * 8 + lane % 4 * 8;
        Eight made;
#pragma unroll
        for (int i = 0; i < 4; i++) made.of[i] = both_kept(sums[m][n + i][half * 2], sums[m][n + i][half * 2 + 1]);
        if (o < OC) *(Eight*)(y + to * OC + o) = made;
      }
#else
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const int o = base + near + n * 8 + lane % 4 * 2;
        if (o < OC) *(float2*)(y + to * OC + o) = {sums[m][n][half * 2], sums[m][n][half * 2 + 1]};
      }
#endif
    }
}

#else

#define BK 32                           // pixels of a stage
#ifdef HALF
#define PITCH(width) ((width) * 2)      // bytes from pixel to pixel
#else
#define PITCH(width) ((width) * 4 + 32) // 8 numbers more, against bank conflicts
#endif
#define STAGE (BK * (PITCH(BM) + PITCH(BN)))

// out[part, g, o, tap, c] = sum over the part's pixels of gradient[image, pixel, g, o] * x[image, pixel at tap, g, c].
extern "C" __global__ void __launch_bounds__(THREADS)
weight_gradient(const Number* __restrict__ gradient, const Number* __restrict__ x, float* __restrict__ out, int images,
                int each, int C, int H, int W, int OC, int OH, int OW, int KH, int KW, int PAD, int STRIDE) {
  extern __shared__ float4 memory[];
  const int across = (TAPS * C + BN - 1) / BN;  // blocks side by side
  const int g = blockIdx.y, groups = gridDim.y, base = blockIdx.z / across * BM, begin = blockIdx.z % across * BN;
  const int first = blockIdx.x * each, last = min(images * OH * OW, first + each);
  const int steps = (last - first + BK - 1) / BK;
  gradient += (size_t)g * OC;
  x += (size_t)g * C;

  // A thread copies the same channels of every pixel that it copies.
  const int CA = BM / E, CB = BN / E, LA = THREADS / CA, LB = THREADS / CB;
  const int o = base + threadIdx.x % CA * E, own = begin + threadIdx.x % CB * E, tap = own / C, c = own % C;
  const unsigned pixels = OH * OW, cols = OW;  // as divisors
  const int down = tap / KW - PAD, right = tap % KW - PAD;
#ifdef HALF
#define SPOT(chunk, row) (((chunk) ^ (row) % 8) * 16)
#else
#define SPOT(chunk, row) ((chunk) * 16)
#endif
  auto load = [&](int step) {
    char* a = (char*)memory + step % STAGES * STAGE;
    char* b = a + BK * PITCH(BM);
    const int from = first + step * BK;
#pragma unroll
    for (int r = 0; r < BK / LA; r++) {
      const int row = threadIdx.x / CA + r * LA;
      const bool inside = from + row < last && o < OC;
      bring16(a + row * PITCH(BM) + SPOT(threadIdx.x % CA, row),
              gradient + (inside ? (size_t)(from + row) * groups * OC + o : 0), inside);
    }
#pragma unroll
    for (int r = 0; r < BK / LB; r++) {
      const unsigned row = threadIdx.x / CB + r * LB, image = (from + row) / pixels, pixel = (from + row) % pixels;
      const int h = pixel / cols * STRIDE + down, v = pixel % cols * STRIDE + right;
      const bool inside = from + row < last && tap < TAPS && h >= 0 && h < H && v >= 0 && v < W;
      bring16(b + row * PITCH(BN) + SPOT(threadIdx.x % CB, row),
              x + (inside ? (size_t)(image * (H * W) + h * W + v) * groups * C + c : 0), inside);
    }
    close_stage();
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int low = warp % (BM / WM) * WM, near = warp / (BM / WM) * WN;
  float sums[MT][NT][4];
  clear(sums);
  for (int step = 0; step < STAGES - 1; step++) {
    if (step < steps) load(step);
    else close_stage();
  }
  for (int step = 0; step < steps; step++) {
    await_stage<STAGES - 2>();
    __syncthreads();
    if (step + STAGES - 1 < steps) load(step + STAGES - 1);
    else close_stage();
    const char* a = (const char*)memory + step % STAGES * STAGE;
    const char* b = a + BK * PITCH(BM);
#pragma unroll
    for (int k = 0; k < BK; k += 2 * E) {
      unsigned as[MT][4], bs[NT * 2];
#ifdef HALF
#pragma unroll
      for (int m = 0; m < MT; m++)
        load_turned(as[m], a + (k + lane / 16 * 8 + lane % 8) * PITCH(BM) +
                               SPOT((low + m * 16) / 8 + lane / 8 % 2, lane % 8));
#pragma unroll
      for (int n = 0; n < NT; n += 2)
        load_turned(bs + n * 2, b + (k + lane / 8 % 2 * 8 + lane % 8) * PITCH(BN) +
                               SPOT((near + n * 8) / 8 + lane / 16, lane % 8));
#else
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          as[m][i] = *(const unsigned*)(a + (k + lane % 4 + i / 2 * 4) * PITCH(BM) +
                                        (low + m * 16 + i % 2 * 8 + lane / 4) * 4);
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          bs[n * 2 + i] = *(const unsigned*)(b + (k + lane % 4 + i * 4) * PITCH(BN) + (near + n * 8 + lane / 4) * 4);
#endif
#pragma unroll
      for (int m = 0; m < MT; m++) round_off(as[m], 4);
      round_off(bs, NT * 2);
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++) multiply(sums[m][n], as[m], bs + n * 2);
    }
  }
  out += ((size_t)blockIdx.x * groups + g) * OC * TAPS * C;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int made = base + low + m * 16 + half * 8 + lane / 4;
      if (made >= OC) continue;
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const int place = begin + near + n * 8 + lane % 4 * 2;
        if (place < TAPS * C)
          *(float2*)(out + (size_t)made * TAPS * C + place) = {sums[m][n][half * 2], sums[m][n][half * 2 + 1]};
      }
    }
}

#endif
