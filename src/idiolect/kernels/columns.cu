// Weights' gradients of convolutions with few channels, stride 1, on matrix units, for a stack of clients.
//
// A product's rows are channels made, its columns the taps of all channels read, and what is summed over are pixels: with
// few channels, all weights of a client are one tile, which every warp of a block sums over pixels of its own. Numbers are
// taken apart, or rounded with ROUNDED, as in `tensor.cu`.
//
// Constants: C, H, W (what is read), OC, OH, OW (what is made; OW is even), KH, KW, PAD, MT (tiles of 16 channels made:
// all), NT (tiles of 8 columns: all), BAND (lines of a step), LINE, PLANE and SP (numbers from line to line of images, and
// from channel to channel of images and gradients, in shared memory), THREADS.

#define TAPS (KH * KW)
#define COLUMNS (C * TAPS)

#include "common.cuh"

#define WARPS (THREADS / 32)
#define DEEP (BAND + KH - 1)
#define ACROSS (OW + KW - 1)
#define STRIPES ((OH + BAND - 1) / BAND)
#define PAIRS (BAND * OW / 2)
#define STEP ((OC * SP + C * PLANE + 1) / 2 * 2)
#define SUMS (MT * NT * 4)

// out[part, g, o, c, tap] = sum over the part's pixels of gradient[g, image, o] * x[g, image, c].
extern "C" __global__ void __launch_bounds__(THREADS)
weight_gradient(const float* __restrict__ gradient, const float* __restrict__ x, float* __restrict__ out,
                int images, int each) {
  extern __shared__ float4 memory[];
  float* shared = (float*)memory;
  const int g = blockIdx.y, first = blockIdx.x * each, last = min(images * STRIPES, first + each);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, across = lane / 4, along = lane % 4;
  x += (size_t)g * images * (C * H * W);
  gradient += (size_t)g * images * (OC * OH * OW);
  auto load = [&](int number) {
    float* gradients = shared + (number - first & 1) * STEP;  // [OC][SP]
    float* held = gradients + OC * SP;                        // [C][PLANE]
    const int image = number / STRIPES, top = number % STRIPES * BAND;
    const float* source = gradient + (size_t)image * (OC * OH * OW) + top * OW;
    for (int i = threadIdx.x; i < OC * PAIRS; i += THREADS) {
      const int o = i / PAIRS, k = i % PAIRS * 2;
      const bool inside = top * OW + k < OH * OW;
      bring8(gradients + o * SP + k, source + (inside ? o * OH * OW + k : 0), inside);
    }
    const float* picture = x + (size_t)image * (C * H * W);
    for (int i = threadIdx.x; i < C * DEEP * ACROSS; i += THREADS) {
      const int line = i / ACROSS, c = line / DEEP, row = top + line % DEEP - PAD, col = i % ACROSS - PAD;
      const bool inside = row >= 0 && row < H && col >= 0 && col < W;
      bring(held + c * PLANE + line % DEEP * LINE + i % ACROSS, picture + (inside ? (c * H + row) * W + col : 0), inside);
    }
    close_stage();
  };
  int shift[NT];                                // of the column that this thread loads of a tile
#pragma unroll
  for (int j = 0; j < NT; j++) {
    const int column = min(j * 8 + across, COLUMNS - 1);
    shift[j] = column / TAPS * PLANE + column % TAPS / KW * LINE + column % KW;
  }
  float sums[MT][NT][4];
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
    const float* gradients = shared + (number - first & 1) * STEP;
    const float* held = gradients + OC * SP;
#pragma unroll 2
    for (int four = warp; four < (PAIRS + 3) / 4; four += WARPS) {
      const int pair = four * 4 + along, there = min(pair, PAIRS - 1), row = there / (OW / 2);
      const float* near = held + row * LINE + (there - row * (OW / 2)) * 2;
      unsigned large[MT][4], small[MT][4];
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float2 two = *(const float2*)(gradients + (m * 16 + half * 8 + across) * SP + there * 2);
          part(pair < PAIRS ? two.x : 0.f, &large[m][half], &small[m][half]);
          part(pair < PAIRS ? two.y : 0.f, &large[m][half + 2], &small[m][half + 2]);
        }
#pragma unroll
      for (int j = 0; j < NT; j++) {
        unsigned big[2], little[2];
        part(near[shift[j]], &big[0], &little[0]);
        part(near[shift[j] + 1], &big[1], &little[1]);
        multiply_parts(&sums[0][j], NT, large, small, big, little);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < SUMS; i++) shared[(warp * SUMS + i) * 32 + lane] = (&sums[0][0][0])[i];
  __syncthreads();
  out += ((size_t)blockIdx.x * gridDim.y + g) * OC * COLUMNS;
  for (int k = threadIdx.x; k < OC * COLUMNS; k += THREADS) {
    const int o = k / COLUMNS, column = k % COLUMNS;
    const int place = ((o / 16 * NT + column / 8) * 4 + o % 16 / 8 * 2 + column % 2) * 32 + o % 8 * 4 + column % 8 / 2;
    float total = 0.f;
#pragma unroll
    for (int other = 0; other < WARPS; other++) total += shared[other * SUMS * 32 + place];
    out[k] = total;
  }
}
