// 1x1 convolutions of a stack of clients with channels first, on matrix units: images are [g, image, channel, pixel] in
// memory, weights [g, o, c]. The pixels of all images of a client are the columns of a matrix, wherever they lie; so
// weights are read for many images at once, and nothing is copied. Unless ROUNDED, numbers are split into two parts of 11
// bits, of whose four products three are added, which keeps single precision.
//
// Constants: TRANSPOSED (1: the gradient by images: rows are c, sums go over o), ROUNDED, THREADS, STAGES, AT_ONCE (weights
// that are copied at once, 4 or 1). PIXELS, of an image, are a multiple of four. Images that are read may be some channels of larger ones: from one to the
// next there are `far` numbers.

#include "common.cuh"

#define BM 64                 // rows of a block
#define BK 32                 // summed over at a time
#define WARPS (THREADS / 32)

// The parts of a number; or a number that is rounded by being cut off.
__device__ __forceinline__ void split(float value, unsigned& high, unsigned& low) {
#if ROUNDED
  high = nudged(value), low = 0;
#else
  high = __float_as_uint(value) & 0xffffe000u;
  low = __float_as_uint(value - __uint_as_float(high));
#endif
}

// sums[2][NT] += a * b: rows from lane / 4 on, columns from lane / 4 on; from one k to the next there are `across` and
// `step` numbers, from row to row `down`, from column to column `apart`. Products that are added to the same sum are far
// from each other, since each has to wait for the one before.
template <int NT>
__device__ __forceinline__ void add_products(float (*sums)[NT][4], const float* a, const float* b, int down, int across,
                                             int step, int apart) {
#pragma unroll
  for (int k = 0; k < BK; k += 8) {
    unsigned highs[2][4], lows[2][4], high[NT][2], low[NT][2];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) split(a[(m * 16 + i % 2 * 8) * down + (k + i / 2 * 4) * across], highs[m][i], lows[m][i]);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) split(b[n * 8 * apart + (k + i * 4) * step], high[n][i], low[n][i]);
#if !ROUNDED
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) multiply_short(sums[i / NT][i % NT], lows[i / NT], high[i % NT]);
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) multiply_short(sums[i / NT][i % NT], highs[i / NT], low[i % NT]);
#endif
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) multiply_short(sums[i / NT][i % NT], highs[i / NT], high[i % NT]);
  }
}

// Copy stage after stage, some ahead, and compute with each. A stage is overwritten when all threads are done with it.
template <class Load, class Compute>
__device__ __forceinline__ void in_stages(int steps, const Load& load, const Compute& compute) {
  for (int step = 0; step < STAGES - 1; step++) {
    if (step < steps) load(step);
    close_stage();
  }
  for (int step = 0; step < steps; step++) {
    await_stage<STAGES - 2>();
    __syncthreads();
    if (step + STAGES - 1 < steps) load(step + STAGES - 1);
    close_stage();
    compute(step % STAGES);
  }
}

#if !WEIGHT_GRADIENT

#define BN (THREADS / 2)      // columns of a block: a warp makes 32 x 32
#define PITCH (BN + 8)
#define WEIGHTS (TRANSPOSED ? BK * (BM + 8) : BM * (BK + 4))
#define STAGE (WEIGHTS + BK * PITCH)

// y[g, image, row, pixel] = sum over k of weight[row, k] * x[g, image, k, pixel]; `rows` are made of K.
extern "C" __global__ void __launch_bounds__(THREADS)
convolve(const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ y, int images, int PIXELS, int K,
         int rows, int far) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;
  const int g = blockIdx.y, base = blockIdx.z * BM, first = blockIdx.x * BN, total = images * PIXELS;
  const unsigned pixels = PIXELS;  // as a divisor
  x += (size_t)g * images * far;
  y += (size_t)g * images * rows * PIXELS;
  w += (size_t)g * rows * K;
  const int column = threadIdx.x % (BN / 4) * 4;  // the first of four that a thread copies
  const bool there = first + column < total;
  const unsigned image = (first + column) / pixels, pixel = (first + column) % pixels;
  const float* from = x + (there ? (size_t)image * far + pixel : 0);
  auto load = [&](int step) {
    float* a = room + step % STAGES * STAGE;
    float* b = a + WEIGHTS;
    // Neighbouring threads read neighbours, and lay them beside each other: [row][k], or [k][row].
#pragma unroll
    for (int i = threadIdx.x * AT_ONCE; i < BM * BK; i += THREADS * AT_ONCE) {
      const int row = TRANSPOSED ? i % BM : i / BK, k = TRANSPOSED ? i / BM : i % BK, at = step * BK + k;
      const bool inside = base + row < rows && at < K;
      const size_t spot = TRANSPOSED ? (size_t)at * rows + base + row : (size_t)(base + row) * K + at;
      float* to = a + (TRANSPOSED ? k * (BM + 8) + row : row * (BK + 4) + k);
#if AT_ONCE == 4
      bring16(to, w + (inside ? spot : 0), inside);
#else
      bring(to, w + (inside ? spot : 0), inside);
#endif
    }
#pragma unroll
    for (int k = threadIdx.x / (BN / 4); k < BK; k += THREADS / (BN / 4)) {
      const bool inside = there && step * BK + k < K;
      bring16(b + k * PITCH + column, from + (inside ? (size_t)(step * BK + k) * PIXELS : 0), inside);
    }
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, low = warp % 2 * 32, near = warp / 2 * 32;
  const int down = TRANSPOSED ? 1 : BK + 4, across = TRANSPOSED ? BM + 8 : 1;
  float sums[2][4][4];
  clear(sums);
  in_stages((K + BK - 1) / BK, load, [&](int stage) {
    const float* a = room + stage * STAGE;
    add_products<4>(sums, a + (low + lane / 4) * down + lane % 4 * across,
                    a + WEIGHTS + lane % 4 * PITCH + near + lane / 4, down, across, PITCH, 1);
  });
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const int at = first + near + n * 8 + lane % 4 * 2;
    if (at >= total) continue;
    float* to = y + (size_t)(at / pixels) * rows * PIXELS + at % pixels;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = base + low + m * 16 + half * 8 + lane / 4;
        if (row < rows) *(float2*)(to + (size_t)row * PIXELS) = {sums[m][n][half * 2], sums[m][n][half * 2 + 1]};
      }
  }
}

#else

#define BN 64                 // columns of a block
#define NT (16 / WARPS)       // eights of columns of a warp, which has 32 rows
#define STAGE ((BM + BN) * (BK + 4))

// out[part, g, o, c] = sum over the part's pixels of gradient[g, image, o, pixel] * x[g, image, c, pixel].
extern "C" __global__ void __launch_bounds__(THREADS)
weight_gradient(const float* __restrict__ gradient, const float* __restrict__ x, float* __restrict__ out, int images,
                int PIXELS, int C, int OC, int each, int farther, int far) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;
  const int across = (C + BN - 1) / BN, g = blockIdx.y, groups = gridDim.y;
  const int base = blockIdx.z / across * BM, begin = blockIdx.z % across * BN;
  const int first = blockIdx.x * each, last = min(images * PIXELS, first + each), steps = (last - first + BK - 1) / BK;
  const unsigned pixels = PIXELS;  // as a divisor
  gradient += (size_t)g * images * farther;
  x += (size_t)g * images * far;
  const int k = threadIdx.x % (BK / 4) * 4;  // the first of four pixels that a thread copies
  auto load = [&](int step) {
    float* a = room + step % STAGES * STAGE;
    const int at = first + step * BK + k;
    const bool there = at < last;
    const unsigned image = at / pixels, pixel = at % pixels;
#pragma unroll
    for (int row = threadIdx.x / (BK / 4); row < BM + BN; row += THREADS / (BK / 4)) {
      const bool left = row < BM;
      const int channel = left ? base + row : begin + row - BM, channels = left ? OC : C;
      const bool inside = there && channel < channels;
      bring16(a + row * (BK + 4) + k,
              (left ? gradient : x) + (inside ? (size_t)image * (left ? farther : far) + channel * PIXELS + pixel : 0), inside);
    }
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, low = warp % 2 * 32, near = warp / 2 * NT * 8;
  float sums[2][NT][4];
  clear(sums);
  in_stages(steps, load, [&](int stage) {
    const float* a = room + stage * STAGE + lane / 4 * (BK + 4) + lane % 4;
    add_products<NT>(sums, a + low * (BK + 4), a + (BM + near) * (BK + 4), BK + 4, 1, 1, BK + 4);
  });
  out += ((size_t)blockIdx.x * groups + g) * OC * C;
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int o = base + low + m * 16 + half * 8 + lane / 4;
      if (o >= OC) continue;
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const int c = begin + near + n * 8 + lane % 4 * 2;
        if (c < C) out[(size_t)o * C + c] = sums[m][n][half * 2];
        if (c + 1 < C) out[(size_t)o * C + c + 1] = sums[m][n][half * 2 + 1];
      }
    }
}

#endif
