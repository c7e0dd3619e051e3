// Convolutions of a stack of clients on matrix units, in which a thread takes runs of neighbouring pixels.
//
// A matrix unit does not care which pixel is which row or column of a product. Here the pixels that a thread loads are
// neighbours of one line of an image: what it has loaded for one tap of the kernel it also uses for the next taps, and
// two numbers come with one load. `tensor.cu` loads every pixel anew for every tap. Numbers are taken apart, or rounded
// with ROUNDED, as there.
//
// Constants: C, H, W (what is read), OC, OH, OW (what is made), KH, KW, PAD, MT (tiles of 16 channels of a warp), RUN
// (pixels of a run, even), LINE and PLANE (numbers from line to line and from channel to channel of images in shared
// memory, chosen against bank conflicts), THREADS.

#define TAPS (KH * KW)

#include "common.cuh"

// Add the sums of warps that share a tile, `PARTS` of `TILES`, in a fixed order, to those of the first of them.
template <int PARTS, int TILES, int COUNT>
__device__ __forceinline__ void add_up(float* sums, float* shared) {
  const int warp = threadIdx.x / 32, own = warp / TILES;
  float* room = shared + warp % TILES * COUNT * 32 + threadIdx.x % 32;
#pragma unroll 1
  for (int k = 1; k < PARTS; k++) {
    if (own == k)
#pragma unroll
      for (int i = 0; i < COUNT; i++) room[i * 32] = sums[i];
    __syncthreads();
    if (own == 0)
#pragma unroll
      for (int i = 0; i < COUNT; i++) sums[i] += room[i * 32];
    __syncthreads();
  }
}

#if WEIGHT_GRADIENT

// Besides: SEGS (runs of a line: 1, 2 or 4), BAND (lines of a step), SP (numbers from channel to channel of gradients),
// WM, WC and WK (warps along the channels made, the channels read and the steps of a block), AT_ONCE (pairs of pixels
// whose gradients a thread holds at once; 0: one, with all lines of the images around it).

#define OCB (16 * MT * WM)
#define CB (8 * WC)
#define LONG (SEGS * RUN)                       // a line of gradients, with zeros after OW of them
#define LINES (4 / SEGS)                        // lines that the four threads of a product's column take at once
#define DEEP (BAND + KH - 1)
#define ACROSS (OW + KW - 1)
#define STRIPES ((OH + BAND - 1) / BAND)
#define AHEAD (KW / 2)
#define STEP (OCB * SP + CB * PLANE)
#define SUMS (TAPS * MT * 4)                    // of a thread
#define SPREAD (8 * TAPS + 4)                   // of a line of results in shared memory
#define NEED (SUMS + (ROUNDED ? 56 : 96))       // registers, about
#define RESIDENT (65536 / (THREADS * (NEED > 256 ? 256 : NEED)))  // blocks of a multiprocessor

// Start to copy a line, from `from - PAD` on; what is outside of it is 0.
template <int WIDTH, int BEFORE>
__device__ __forceinline__ void bring_line(float* to, const float* from, int i, bool inside) {
#if PAIRED
  const int col = 2 * i - BEFORE;
  inside = inside && col >= 0 && col < WIDTH;
  bring8(to + 2 * i, inside ? from + col : from, inside);
#else
  const int col = i - BEFORE;
  inside = inside && col >= 0 && col < WIDTH;
  bring(to + i, inside ? from + col : from, inside);
#endif
}

// Load two pixels of the gradients of a warp's channels.
__device__ __forceinline__ void take(unsigned (*large)[4], unsigned (*small)[4], const float* from) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      part2(from + (m * 16 + half * 8) * SP, &large[m][half], &small[m][half], 2);
}

// out[part, g, o, c, tap] = sum over the part's pixels of gradient[g, image, o] * x[g, image, c].
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
weight_gradient(const float* __restrict__ gradient, const float* __restrict__ x, float* __restrict__ out,
                int images, int each) {
  extern __shared__ float4 memory[];
  float* shared = (float*)memory;
  const int g = blockIdx.y, base = blockIdx.z % (OC / OCB) * OCB, lowest = blockIdx.z / (OC / OCB) * CB;
  const int first = blockIdx.x * each, last = min(images * STRIPES, first + each);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, across = lane / 4, along = lane % 4;
  const int low = warp % WM * 16 * MT, c8 = warp / WM % WC * 8, own = warp / (WM * WC);
  x += ((size_t)g * images * C + lowest) * (H * W);
  gradient += ((size_t)g * images * OC + base) * (OH * OW);
  const int each_gradient = PAIRED ? OW / 2 : OW, each_line = PAIRED ? ACROSS / 2 : ACROSS;
#if LONG > OW
  for (int i = threadIdx.x; i < 2 * WK * STEP; i += THREADS) shared[i] = 0.f;
  __syncthreads();
#endif
  auto load = [&](int number) {
#pragma unroll 1
    for (int k = 0; k < WK && number + k < last; k++) {
      float* gradients = shared + (((number - first) / WK & 1) * WK + k) * STEP;  // [OCB][SP]
      float* held = gradients + OCB * SP;                                         // [CB][PLANE]
      const int image = (number + k) / STRIPES, top = (number + k) % STRIPES * BAND;
      const float* source = gradient + (size_t)image * (OC * OH * OW);
      for (int i = threadIdx.x; i < OCB * BAND * each_gradient; i += THREADS) {
        const int line = i / each_gradient, o = line / BAND, row = line % BAND;
        const bool inside = top + row < OH;
        bring_line<OW, 0>(gradients + o * SP + row * LONG, source + (inside ? (o * OH + top + row) * OW : 0),
                             i % each_gradient, inside);
      }
      const float* picture = x + (size_t)image * (C * H * W);
      for (int i = threadIdx.x; i < CB * DEEP * each_line; i += THREADS) {
        const int line = i / each_line, c = line / DEEP, row = top + line % DEEP - PAD;
        const bool inside = row >= 0 && row < H;
        bring_line<W, PAD>(held + c * PLANE + line % DEEP * LINE, picture + (inside ? (c * H + row) * W : 0),
                              i % each_line, inside);
      }
    }
    close_stage();
  };
  float sums[TAPS][MT][4];
  clear(sums);

  if (first < last) load(first);
  for (int number = first; number < last; number += WK) {
    if (number + WK < last) {
      load(number + WK);
      await_stage<1>();
    } else {
      await_stage<0>();
    }
    __syncthreads();
    if (number + own < last) {
      const float* gradients = shared + (((number - first) / WK & 1) * WK + own) * STEP + (low + across) * SP + along * RUN;
      const float* held = gradients + (OCB - low - across) * SP - along * RUN + (c8 + across) * PLANE +
                          along / SEGS * LINE + along % SEGS * RUN;
#pragma unroll 1
      for (int row = 0; row < BAND; row += LINES) {
#if !AT_ONCE
        unsigned big[KH][RUN + 2 * AHEAD], little[KH][RUN + 2 * AHEAD];  // of which a few are needed at once
#pragma unroll
        for (int kh = 0; kh < KH; kh++)
#pragma unroll
          for (int i = 0; i < 2 * AHEAD; i += 2)
            part2(held + (row + kh) * LINE + i, &big[kh][i], &little[kh][i], 1);
#pragma unroll
        for (int k = 0; k < RUN; k += 2) {
          unsigned large[MT][4], small[MT][4];
          take(large, small, gradients + row * LONG + k);
#pragma unroll
          for (int kh = 0; kh < KH; kh++) {
            part2(held + (row + kh) * LINE + k + 2 * AHEAD, &big[kh][k + 2 * AHEAD], &little[kh][k + 2 * AHEAD], 1);
#pragma unroll
            for (int kw = 0; kw < KW; kw++)
              multiply_parts(sums[kh * KW + kw], 1, large, small, &big[kh][k + kw], &little[kh][k + kw]);
          }
        }
#else
#pragma unroll 1
        for (int k = 0; k < RUN; k += 2 * AT_ONCE) {
          unsigned large[AT_ONCE][MT][4], small[AT_ONCE][MT][4];
#pragma unroll
          for (int i = 0; i < AT_ONCE; i++) take(large[i], small[i], gradients + row * LONG + k + 2 * i);
#pragma unroll
          for (int kh = 0; kh < KH; kh++) {
            unsigned big[2 * (AT_ONCE + AHEAD)], little[2 * (AT_ONCE + AHEAD)];
#pragma unroll
            for (int i = 0; i < 2 * (AT_ONCE + AHEAD); i += 2)
              part2(held + (row + kh) * LINE + k + i, big + i, little + i, 1);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
              for (int kw = 0; kw < KW; kw++)
                multiply_parts(sums[kh * KW + kw], 1, large[i], small[i], big + 2 * i + kw, little + 2 * i + kw);
          }
        }
#endif
      }
    }
    __syncthreads();
  }
  add_up<WK, WM * WC, SUMS>(&sums[0][0][0], shared);
  if (own) return;
  out += (((size_t)blockIdx.x * gridDim.y + g) * OC + base + low) * C * TAPS + (lowest + c8) * TAPS;
  float* room = shared + warp * 8 * SPREAD;     // [8][SPREAD]: in order, to be written side by side
#pragma unroll
  for (int eight = 0; eight < 2 * MT; eight++) {
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        room[across * SPREAD + (along * 2 + i) * TAPS + tap] = sums[tap][eight / 2][eight % 2 * 2 + i];
    __syncwarp();
    for (int i = lane; i < 8 * 2 * TAPS; i += 32)
      *(float4*)(out + (size_t)(eight * 8 + i / (2 * TAPS)) * C * TAPS + i % (2 * TAPS) * 4) =
          *(const float4*)(room + i / (2 * TAPS) * SPREAD + i % (2 * TAPS) * 4);
    __syncwarp();
  }
}

#else

// Besides: TRANSPOSED, RELU, POOL as in `tensor.cu`, TALL (lines of a run), WM, WN and WK (warps along the channels made,
// the runs, and the channels read), ROWS (lines of images that a block may need), GRAIN (numbers copied at once), STAGES (2: the next
// channels are copied meanwhile; 1: another block computes meanwhile).

#define MADE_H (OH / POOL)
#define MADE_W (OW / POOL)
#define BANDS ((MADE_H * POOL + TALL - 1) / TALL)
#define COLUMNS ((MADE_W * POOL + RUN - 1) / RUN)
#define SPAN (BANDS * TALL + KH - 1)            // lines of a padded image that are used
#define WIDE (RUN + (KW + 2) / 4 * 4)           // numbers that a thread loads of a line
#define OCB (16 * MT * WM)
#define NT (RUN * TALL)
#define RUNS (8 * WN)                           // of a block
#define CHUNK 8
#if TRANSPOSED                                  // weights in shared memory, against bank conflicts
#define BY_OUTPUT TAPS
#define BY_INPUT ((OCB * TAPS + 23) / 32 * 32 + 8)
#define KERNELS (CHUNK * BY_INPUT)
#else
#define BY_OUTPUT (CHUNK * TAPS + 4)
#define BY_INPUT TAPS
#define KERNELS (OCB * BY_OUTPUT)
#endif
#define STEP (KERNELS + CHUNK * PLANE)
#define NEED (MT * NT * 4 + (TALL * WIDE * 2 + MT * 4) * (2 - ROUNDED) + 48)  // registers, about
#define RESIDENT (65536 / (THREADS * (NEED > 256 ? 256 : NEED)))  // blocks of a multiprocessor

// y[g, image, o] = sum over c and taps of w[g, o, c, tap] * x[g, image, c]; where TRANSPOSED w is [g, c, o, tap], with
// its taps flipped. See `tensor.cu`.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
convolve(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias,
         float* __restrict__ y, unsigned char* __restrict__ chosen, int images) {
  extern __shared__ float4 memory[];
  float* shared = (float*)memory;
  const int g = blockIdx.y, base = blockIdx.z * OCB;
  const int first = blockIdx.x * RUNS, start = first / COLUMNS;
  const int top = start / BANDS * SPAN + start % BANDS * TALL;
  w += (size_t)g * OC * C * TAPS + (TRANSPOSED ? base * TAPS : base * C * TAPS);
  x += (size_t)g * images * (C * H * W);

  const int SPOTS = (ROWS * LINE / GRAIN + THREADS - 1) / THREADS;
  int origin[SPOTS];
#pragma unroll
  for (int i = 0; i < SPOTS; i++) {
    const int spot = (threadIdx.x + i * THREADS) * GRAIN, col = spot % LINE - PAD;
    const int line = top + spot / LINE, image = line / SPAN, row = line % SPAN - PAD;
    const bool inside = image < images && row >= 0 && row < H && col >= 0 && col < W;
    origin[i] = inside ? (image * C * H + row) * W + col : -1;
  }
  auto load = [&](int number) {
#pragma unroll 1
    for (int k = 0; k < WK; k++) {
      float* kernels = shared + (number % STAGES * WK + k) * STEP;
      float* held = kernels + KERNELS;          // [CHUNK][PLANE]
      const int channel = (number * WK + k) * CHUNK;
#if TRANSPOSED
      for (int i = threadIdx.x; i < CHUNK * (OCB * TAPS / 4); i += THREADS) {
        const int c = i / (OCB * TAPS / 4), at = i % (OCB * TAPS / 4) * 4;
        bring4(kernels + c * BY_INPUT + at, w + (size_t)(channel + c) * OC * TAPS + at);
      }
#else
      for (int i = threadIdx.x; i < OCB * (CHUNK * TAPS / 4); i += THREADS) {
        const int o = i / (CHUNK * TAPS / 4), at = i % (CHUNK * TAPS / 4) * 4;
        bring4(kernels + o * BY_OUTPUT + at, w + (size_t)o * C * TAPS + channel * TAPS + at);
      }
#endif
#pragma unroll
      for (int i = 0; i < SPOTS; i++) {
        const int spot = (threadIdx.x + i * THREADS) * GRAIN;
        if (spot >= ROWS * LINE) continue;
        const bool inside = origin[i] >= 0;
        const float* source = x + (inside ? origin[i] + channel * H * W : 0);
#pragma unroll
        for (int c = 0; c < CHUNK; c++)
#if GRAIN == 4
          bring16(held + c * PLANE + spot, inside ? source + c * H * W : source, inside);
#elif GRAIN == 2
          bring8(held + c * PLANE + spot, inside ? source + c * H * W : source, inside);
#else
          bring(held + c * PLANE + spot, inside ? source + c * H * W : source, inside);
#endif
      }
    }
    close_stage();
  };

  const int lane = threadIdx.x % 32, across = lane / 4, along = lane % 4;
  const int warp = threadIdx.x / 32, low = warp % WM * 16 * MT, own = warp / (WM * WN);
  const int lead = first + warp / WM % WN * 8;  // the warp's first run
  const int mine = lead + across, band = mine / COLUMNS;
  const int spot = (band / BANDS * SPAN + band % BANDS * TALL - top) * LINE + mine % COLUMNS * RUN + along * PLANE;
  float sums[MT][NT][4];
  clear(sums);

  const int numbers = C / (CHUNK * WK);
  if (STAGES > 1) load(0);
#pragma unroll 1
  for (int number = 0; number < numbers; number++) {
    if (STAGES == 1) load(number);
    if (STAGES > 1 && number + 1 < numbers) {
      load(number + 1);
      await_stage<1>();
    } else {
      await_stage<0>();
    }
    __syncthreads();
    const float* kernels = shared + (number % STAGES * WK + own) * STEP;
    const float* held = kernels + KERNELS + spot;
    kernels += (low + across) * BY_OUTPUT + along * BY_INPUT;
    unsigned big[KH + TALL - 1][WIDE][2], little[KH + TALL - 1][WIDE][2];  // of which TALL lines are needed at once
#pragma unroll
    for (int kh = 1 - TALL; kh < KH; kh++) {
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < WIDE; i += 4) {
          const float4 four = *(const float4*)(held + half * 4 * PLANE + (kh + TALL - 1) * LINE + i);
          const float each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int k = 0; k < 4; k++)
            part(each[k], &big[kh + TALL - 1][i + k][half], &little[kh + TALL - 1][i + k][half]);
        }
      if (kh < 0) continue;
#pragma unroll
      for (int kw = 0; kw < KW; kw++) {
        const int tap = TRANSPOSED ? TAPS - 1 - (kh * KW + kw) : kh * KW + kw;
        unsigned large[MT][4], small[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            part(kernels[(m * 16 + i % 2 * 8) * BY_OUTPUT + i / 2 * 4 * BY_INPUT + tap], &large[m][i], &small[m][i]);
#pragma unroll
        for (int j = 0; j < NT; j++) {
          const int line = kh + j / RUN, col = j % RUN + kw;
          multiply_parts(&sums[0][j], NT, large, small, big[line][col], little[line][col]);
        }
      }
    }
    __syncthreads();
  }
  add_up<WK, WM * WN, MT * NT * 4>(&sums[0][0][0], shared);
  if (own) return;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int channel = base + low + m * 16 + i / 2 * 8 + across, run = lead + along * 2 + i % 2;
      const int line = run / COLUMNS, image = line / BANDS, row = line % BANDS * TALL, col = run % COLUMNS * RUN;
      if (image >= images) continue;
      const size_t plane = (((size_t)g * images + image) * OC + channel) * (MADE_H * MADE_W);
#if POOL == 1
      const float shift = RELU ? bias[g * OC + channel] : 0.f;
#pragma unroll
      for (int j = 0; j < NT; j++) {
        const float sum = sums[m][j][i] + shift;  // NaN must be seen
        if (row + j / RUN < OH && col + j % RUN < OW)
          y[plane + (row + j / RUN) * OW + col + j % RUN] = RELU && sum <= 0.f ? 0.f : sum;
      }
#else
      const float shift = bias[g * OC + channel];
#pragma unroll
      for (int j = 0; j < RUN; j += 2) {
        if (col + j >= MADE_W * 2) continue;
        const Largest most = largest_of(shift, [&](int n) { return sums[m][n / 2 * RUN + j + n % 2][i]; });
        const size_t place = plane + row / 2 * MADE_W + (col + j) / 2;
        y[place] = most.value;
        chosen[place] = most.which;
      }
#endif
    }
}

#endif
