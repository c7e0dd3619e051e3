// Convolutions of a stack of clients with many channels, stride 1, in plain float32.
//
// A block makes a tile of one client's result: some channels and some pixels. It walks over the
// channels that are read a few at a time; while it computes with some, the next are on their way
// into shared memory. Every thread keeps a small tile of sums in registers. Sizes are constants of
// the compilation. Sums are taken in a fixed order.
//
// Constants: C, H, W (what is read), OC, OH, OW (what is made), KH, KW, PAD, TRANSPOSED, THREADS,
// RELU (1: bias and ReLU follow at once), POOL (2: 2x2 max-pooling too; 1: it does not), TALL and PX (rows and
// columns of a thread's tile), OCT (channels of a thread), OCB (channels of a block), CHUNK (channels
// read at a time), ROWS (rows of images that a block may need), BAND (rows of a step of weight_gradient).

#define MADE_H (OH / POOL)  // a last odd row or column is left out, as torch's max_pool2d does
#define MADE_W (OW / POOL)
#define BANDS ((MADE_H * POOL + TALL - 1) / TALL)
#define COLS ((MADE_W * POOL + PX - 1) / PX)
#define GROUPS (OCB / OCT)
#define UNITS (THREADS / GROUPS)  // tiles of pixels in a block; a warp's threads differ only in these
#define SPAN (BANDS * TALL + KH - 1)  // rows of a padded image that are used
#define LINE ((COLS * PX + KW - 1 + 3) / 4 * 4)
#define TAPS (KH * KW)

#include "common.cuh"

#if !WEIGHT_GRADIENT

// y[g, image, o] = sum over c and taps of w[g, c, tap, o] * x[g, image, c]; where TRANSPOSED, taps are
// flipped. Where POOL, `chosen` says which of the four pixels of a window was largest, and 4
// where none was above 0.
extern "C" __global__ void __launch_bounds__(THREADS)
convolve(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias,
         float* __restrict__ y, unsigned char* __restrict__ chosen, int images) {
  extern __shared__ float4 memory[];
  const int stage = CHUNK * (TAPS * OCB + ROWS * LINE);
  const int g = blockIdx.y, base = blockIdx.z * OCB;
  const int first = blockIdx.x * UNITS;                       // of all units of the client
  const int start = first / COLS;                             // its band, counted over the images
  const int top = start / BANDS * SPAN + start % BANDS * TALL;  // its row, likewise
  w += (size_t)g * C * TAPS * OC + base;
  x += (size_t)g * images * (C * H * W);

  // Where this thread's share of the rows comes from; the same for every channel.
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
    float* kernels = (float*)memory + (chunk & 1) * stage;    // [CHUNK][TAPS][OCB]
    float* held = kernels + CHUNK * TAPS * OCB;               // [CHUNK][ROWS][LINE]
    const float* from = w + (size_t)chunk * CHUNK * TAPS * OC;
    for (int i = threadIdx.x; i < CHUNK * TAPS * (OCB / 4); i += THREADS)
      bring4(kernels + 4 * i, from + i / (OCB / 4) * OC + i % (OCB / 4) * 4);
#pragma unroll
    for (int i = 0; i < SPOTS; i++) {
      const int spot = threadIdx.x + i * THREADS;
      if (spot >= ROWS * LINE) continue;
      const bool inside = origin[i] >= 0;
      const float* source = x + (inside ? origin[i] : 0) + chunk * CHUNK * H * W;
#pragma unroll
      for (int c = 0; c < CHUNK; c++)
        bring(held + c * ROWS * LINE + spot, source + c * H * W, inside);
    }
    close_stage();
  };

  const int group = threadIdx.x / UNITS, unit = first + threadIdx.x % UNITS;
  const int band = unit / COLS, col = unit % COLS * PX, image = band / BANDS;
  const int row = band % BANDS * TALL;                        // in the image that is made
  const int near = image * SPAN + row - top;                  // in the rows that are held
  float sums[TALL][PX][OCT];
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
    const float* kernels = (const float*)memory + (chunk & 1) * stage + group * OCT;
    const float* held = (const float*)memory + (chunk & 1) * stage + CHUNK * TAPS * OCB + near * LINE + col;
#pragma unroll 1
    for (int c = 0; c < CHUNK; c++) {
#pragma unroll
      for (int down = 0; down < KH + TALL - 1; down++) {
        float seen[PX + KW - 1];
        const float* line = held + (c * ROWS + down) * LINE;
#if PX % 4 == 0
#pragma unroll
        for (int i = 0; i < PX; i += 4) *(float4*)(seen + i) = *(const float4*)(line + i);
#pragma unroll
        for (int i = PX; i < PX + KW - 1; i++) seen[i] = line[i];
#elif PX % 2 == 0
#pragma unroll
        for (int i = 0; i < PX; i += 2) *(float2*)(seen + i) = *(const float2*)(line + i);
#pragma unroll
        for (int i = PX; i < PX + KW - 1; i++) seen[i] = line[i];
#else
#pragma unroll
        for (int i = 0; i < PX + KW - 1; i++) seen[i] = line[i];
#endif
#pragma unroll
        for (int r = 0; r < TALL; r++) {
          const int kh = down - r;
          if (kh < 0 || kh >= KH) continue;
#pragma unroll
          for (int kw = 0; kw < KW; kw++) {
            const int tap = TRANSPOSED ? TAPS - 1 - (kh * KW + kw) : kh * KW + kw;
            float weights[OCT];
#pragma unroll
            for (int o = 0; o < OCT; o += 4)
              *(float4*)(weights + o) = *(const float4*)(kernels + (c * TAPS + tap) * OCB + o);
#pragma unroll
            for (int p = 0; p < PX; p++)
#pragma unroll
              for (int o = 0; o < OCT; o++) sums[r][p][o] += weights[o] * seen[p + kw];
          }
        }
      }
    }
    __syncthreads();
  }
  if (image >= images) return;
#pragma unroll
  for (int o = 0; o < OCT; o++) {
    const int channel = base + group * OCT + o;
    const size_t plane = (((size_t)g * images + image) * OC + channel) * (MADE_H * MADE_W);
#if POOL == 1
    const float shift = RELU ? bias[g * OC + channel] : 0.f;
#pragma unroll
    for (int r = 0; r < TALL; r++)
#pragma unroll
      for (int p = 0; p < PX; p++) {
        const float sum = sums[r][p][o] + shift;  // NaN must be seen
        if (row + r < OH && col + p < OW)
          y[plane + (row + r) * OW + col + p] = RELU && sum <= 0.f ? 0.f : sum;
      }
#else
    const float shift = bias[g * OC + channel];
#pragma unroll
    for (int p = 0; p < PX; p += 2) {
      if (col + p >= MADE_W * 2) continue;
      const Largest most = largest_of(shift, [&](int i) { return sums[i / 2][p + i % 2][o]; });
      const size_t place = plane + row / 2 * MADE_W + (col + p) / 2;
      y[place] = most.value;
      chosen[place] = most.which;
    }
#endif
  }
}

#else

#define CB 32                                   // a warp's threads differ in the channel that is read
#define STEP 2                                  // pixels of a thread at once
#define WIDE ((OW + STEP - 1) / STEP * STEP)
#define ACROSS (WIDE + KW - 1)
#define DEEP (BAND + KH - 1)
#define PLANE ((DEEP * ACROSS) | 1)             // odd, so that channels lie in different banks
#define STRIPES ((OH + BAND - 1) / BAND)        // steps of an image
#define WARPS (THREADS / 32)

// out[part, g, o, c, taps] = sum over the part's pixels of gradient[g, image, o] * x[g, image, c].
extern "C" __global__ void __launch_bounds__(THREADS)
weight_gradient(const float* __restrict__ gradient, const float* __restrict__ x, float* __restrict__ out,
          int images, int each) {
  extern __shared__ float4 memory[];
  const int stage = (OCB * BAND * WIDE + CB * PLANE + 3) / 4 * 4;
  const int g = blockIdx.y, base = blockIdx.z % (OC / OCB) * OCB, low = blockIdx.z / (OC / OCB) * CB;
  const int first = blockIdx.x * each, last = min(images * STRIPES, first + each);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  x += (size_t)g * images * (C * H * W) + low * H * W;
  gradient += (size_t)g * images * (OC * OH * OW) + base * OH * OW;
  auto load = [&](int number) {
    float* gradients = (float*)memory + (number & 1) * stage; // [OCB][BAND][WIDE]
    float* held = gradients + OCB * BAND * WIDE;              // [CB][DEEP][ACROSS]
    const int image = number / STRIPES, top = number % STRIPES * BAND;
    const float* source = gradient + (size_t)image * (OC * OH * OW);
    for (int line = warp; line < OCB * BAND; line += WARPS) {
      const int row = top + line % BAND;
      const float* from = source + (line / BAND * OH + row) * OW;
      for (int col = lane; col < WIDE; col += 32) {
        const bool inside = row < OH && col < OW;
        bring(gradients + line * WIDE + col, inside ? from + col : gradient, inside);
      }
    }
    const float* picture = x + (size_t)image * (C * H * W);
    for (int line = warp; line < CB * DEEP; line += WARPS) {
      const int c = line / DEEP, row = top + line % DEEP - PAD;
      const float* from = picture + (c * H + row) * W;
      for (int i = lane; i < ACROSS; i += 32) {
        const int col = i - PAD;
        const bool inside = low + c < C && row >= 0 && row < H && col >= 0 && col < W;
        bring(held + c * PLANE + line % DEEP * ACROSS + i, inside ? from + col : x, inside);
      }
    }
    close_stage();
  };
  float sums[KH][KW][OCT];
  clear(sums);

  if (first < last) load(first);
  for (int number = first; number < last; number++) {
    if (number + 1 < last) {
      load(number + 1);
      await_stage<1>();
    } else {
      await_stage<0>();
    }
    __syncthreads();
    const float* gradients = (const float*)memory + (number & 1) * stage + warp * OCT * BAND * WIDE;
    const float* held = (const float*)memory + (number & 1) * stage + OCB * BAND * WIDE + lane * PLANE;
#pragma unroll 1
    for (int row = 0; row < BAND; row++) {
      float seen[KH][KW - 1 + STEP];
#pragma unroll
      for (int kh = 0; kh < KH; kh++)
#pragma unroll
        for (int i = 0; i < KW - 1; i++) seen[kh][i + STEP] = held[(row + kh) * ACROSS + i];
#pragma unroll 2
      for (int col = 0; col < WIDE; col += STEP) {
#pragma unroll
        for (int kh = 0; kh < KH; kh++) {
#pragma unroll
          for (int i = 0; i < KW - 1; i++) seen[kh][i] = seen[kh][i + STEP];
#pragma unroll
          for (int i = 0; i < STEP; i++)
            seen[kh][KW - 1 + i] = held[(row + kh) * ACROSS + col + KW - 1 + i];
        }
#pragma unroll
        for (int o = 0; o < OCT; o++) {
          const float2 pair = *(const float2*)(gradients + (o * BAND + row) * WIDE + col);
#pragma unroll
          for (int kh = 0; kh < KH; kh++)
#pragma unroll
            for (int kw = 0; kw < KW; kw++)
              sums[kh][kw][o] += pair.x * seen[kh][kw] + pair.y * seen[kh][kw + 1];
        }
      }
    }
    __syncthreads();
  }
  if (low + lane >= C) return;
  out += (((size_t)blockIdx.x * gridDim.y + g) * OC + base + warp * OCT) * (C * TAPS) + (low + lane) * TAPS;
#pragma unroll
  for (int o = 0; o < OCT; o++)
#pragma unroll
    for (int kh = 0; kh < KH; kh++)
#pragma unroll
      for (int kw = 0; kw < KW; kw++) out[o * C * TAPS + kh * KW + kw] = sums[kh][kw][o];
}

#endif
