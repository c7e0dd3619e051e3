// Convolutions of a stack of clients with channels last, by the matrix units of Hopper (wgmma), of stride 1 where the
// result is as large as the image. Images are [image, pixel, g, channel] in memory, weights [g, made, tap, read]; of
// bfloat16 with HALF, else of single precision, cut off to TF32 in products.
//
// In other forms every tap reads the pixels that it sees anew, and what the cache gives is the limit. Here a block holds
// its pixels, and those around them, in shared memory, and a tap is another beginning in it: images are thought of in one
// line, PAD zeros after every row and PAD rows of zeros after every image, so that a step to another pixel is the same
// everywhere. Where the line has zeros, what is made is thrown away.
//
// Constants: STAGES, THREADS; TRANSPOSED (1: the gradient by images, OC is their channels), BN (channels made by a block),
// MT (matrices of 64 places of a warpgroup); of weight gradients PLACES (at a time) and SIDE (of the kernels).

#define E (16 / (int)sizeof(Number))      // numbers of 16 bytes
#define BK (8 * E)                        // channels at a time: 128 bytes
#define LINES (THREADS / 8)               // rows of 128 bytes that are copied at a time
#define AHEAD (STAGES - 2)                // products of two steps may be under way

#include "common.cuh"
#include "warpgroup.cuh"

#if !WEIGHT_GRADIENT

#define TAPS (KH * KW)
#define BM (THREADS / 128 * MT * 64)      // places made by a block

extern "C" __global__ void __launch_bounds__(THREADS)
convolve(const Number* __restrict__ x, const Number* __restrict__ w, Number* __restrict__ y, int images, int C, int H,
         int W, int OC, int KH, int KW, int PAD) {
  extern __shared__ float4 memory[];
  char* weights = whole_pieces(memory);   // [STAGES][BN][128 bytes], then one or two of [room][128 bytes]
  char* pixels = weights + STAGES * BN * 128;
  const int g = blockIdx.y, groups = gridDim.y, base = blockIdx.z * BN, first = blockIdx.x * BM;
  const unsigned pitch = W + PAD, each = (H + PAD) * pitch;  // places of a row and of an image
  const int around = PAD * (int)pitch + PAD, room = BM + 2 * around, bytes = (room + 7) / 8 * 1024;
  const int chunks = C / BK, steps = chunks * TAPS, slices = TAPS - AHEAD, total = images * (int)each;
  const int piece = threadIdx.x % 8, line = threadIdx.x / 8;
  x += (size_t)g * C + piece * E;
  w += (size_t)g * OC * TAPS * C + piece * E;

  // Of a chunk of channels, every `of`-th line from the `slice`-th on.
  auto load_pixels = [&](int chunk, int slice, int of) {
    char* to = pixels + chunk % 2 * bytes;
    for (int row = line + slice * LINES; row < room; row += of * LINES) {
      const int place = first - around + row;
      const unsigned image = (unsigned)place / each, spot = (unsigned)place % each, h = spot / pitch, v = spot % pitch;
      const bool inside = place >= 0 && place < total && h < H && v < W;
      bring16(to + row * 128 + (piece ^ row % 8) * 16,
              x + (inside ? ((size_t)(image * H + h) * W + v) * groups * C + chunk * BK : 0), inside);
    }
  };
  auto load_weights = [&](int step) {
    char* to = weights + step % STAGES * (BN * 128);
    const int chunk = step / TAPS, tap = step % TAPS;
#pragma unroll
    for (int r = 0; r < BN / LINES; r++) {
      const int row = line + r * LINES, o = base + row;
      bring16(to + row * 128 + (piece ^ row % 8) * 16, w + (o < OC ? ((size_t)o * TAPS + tap) * C + chunk * BK : 0),
              o < OC);
    }
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = warp / 4 * MT * 64;  // the group's first place
  float sums[MT][BN / 2];
  load_pixels(0, 0, 1);
  for (int step = 0; step < AHEAD; step++) {
    if (step < steps) load_weights(step);
    close_stage();
  }
  for (int step = 0, chunk = 0, tap = 0; step < steps; step++) {
    await_stage<AHEAD - 1>();
    show_copies();
    __syncthreads();
    const int j = tap / KW, i = tap % KW;
    const int off = TRANSPOSED ? around - (j * (int)pitch + i) : j * (int)pitch + i - around;
    const Matrix a = matrix_of(pixels + chunk % 2 * bytes + (own + around + off) * 128, 1024, 1024);
    const Matrix b = matrix_of(weights + step % STAGES * (BN * 128), 1024, 1024);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int m = 0; m < MT; m++) add_product(sums[m], a + m * (64 * 128 / 16) + k * 2, b + k * 2, step | k);
    close_products();
    if (step + AHEAD < steps) load_weights(step + AHEAD);
    if (tap >= 1 && tap <= slices && chunk + 1 < chunks) load_pixels(chunk + 1, tap - 1, slices);
    close_stage();
    await_products<1>();
    if (++tap == TAPS) tap = 0, chunk++;
  }
  await_products<0>();
  struct alignas(2 * sizeof(Number)) Two { Number one, other; };
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int place = first + own + m * 64 + warp % 4 * 16 + half * 8 + lane / 4;
      const unsigned image = (unsigned)place / each, spot = (unsigned)place % each, h = spot / pitch, v = spot % pitch;
      if (place >= total || h >= H || v >= W) continue;
      Number* to = y + (((size_t)(image * H + h) * W + v) * groups + g) * OC;
#pragma unroll
      for (int n = 0; n < BN / 8; n++) {
        const int o = base + n * 8 + lane % 4 * 2;
        if (o < OC) *(Two*)(to + o) = {kept(sums[m][n * 4 + half * 2]), kept(sums[m][n * 4 + half * 2 + 1])};
      }
    }
}

#else

// out[part, g, o, tap, c] = sum over the part's places of gradient[place, g, o] * x[place at tap, g, c], for 64 o and 64
// c; a warpgroup has a row of taps.
extern "C" __global__ void __launch_bounds__(THREADS)
weight_gradient(const Number* __restrict__ gradient, const Number* __restrict__ x, float* __restrict__ out, int images,
                int each, int C, int H, int W, int OC) {
  extern __shared__ float4 memory[];
  char* stages = whole_pieces(memory);    // [STAGES] of [PLACES][128 bytes], then [room][128 bytes]
  const int across = (C + 63) / 64, PAD = SIDE / 2;
  const int g = blockIdx.y, groups = gridDim.y, base = blockIdx.z / across * 64, begin = blockIdx.z % across * 64;
  const unsigned pitch = W + PAD, whole = (H + PAD) * pitch;
  const int around = PAD * (int)pitch + PAD, room = PLACES + 2 * around, bytes = PLACES * 128 + (room + 7) / 8 * 1024;
  const int total = images * (int)whole, first = blockIdx.x * each, last = min(total, first + each);
  const int steps = (last - first + PLACES - 1) / PLACES, piece = threadIdx.x % 8, line = threadIdx.x / 8;
  const bool made = base + piece * E < OC, seen = begin + piece * E < C;
  gradient += (size_t)g * OC + base + piece * E;
  x += (size_t)g * C + begin + piece * E;

  auto load = [&](int step) {
    char* to = stages + step % STAGES * bytes;
    const int from = first + step * PLACES;
    auto bring_row = [&](char* to, const Number* images_of, int row, int place, int end, int channels, bool there) {
      const unsigned image = (unsigned)place / whole, spot = (unsigned)place % whole, h = spot / pitch, v = spot % pitch;
      const bool inside = there && place >= 0 && place < end && h < H && v < W;
      bring16(to + row * 128 + (piece ^ row % 8) * 16,
              images_of + (inside ? ((size_t)(image * H + h) * W + v) * groups * channels : 0), inside);
    };
    for (int row = line; row < PLACES; row += LINES) bring_row(to, gradient, row, from + row, last, OC, made);
    for (int row = line; row < room; row += LINES)
      bring_row(to + PLACES * 128, x, row, from - around + row, total, C, seen);
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, j = warp / 4;  // the row of taps
  float sums[SIDE][32];
  for (int step = 0; step < AHEAD; step++) {
    if (step < steps) load(step);
    close_stage();
  }
  for (int step = 0; step < steps; step++) {
    await_stage<AHEAD - 1>();
    show_copies();
    __syncthreads();
    const char* from = stages + step % STAGES * bytes;
    const Matrix a = matrix_of(from, 1024, 1024), b = matrix_of(from + (PLACES + j * (int)pitch) * 128, 1024, 1024);
    begin_products();
#pragma unroll
    for (int k = 0; k < PLACES / 16; k++)
#pragma unroll
      for (int i = 0; i < SIDE; i++) add_turned(sums[i], a + k * (16 * 128 / 16), b + (k * 16 + i) * (128 / 16), step | k);
    close_products();
    if (step + AHEAD < steps) load(step + AHEAD);
    close_stage();
    await_products<1>();
  }
  await_products<0>();
  out += ((size_t)blockIdx.x * groups + g) * OC * (SIDE * SIDE) * C;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int o = base + warp % 4 * 16 + half * 8 + lane / 4;
    if (o >= OC) continue;
#pragma unroll
    for (int i = 0; i < SIDE; i++)
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const int c = begin + n * 8 + lane % 4 * 2;
        if (c < C)
          *(float2*)(out + ((size_t)o * (SIDE * SIDE) + j * SIDE + i) * C + c) = {sums[i][n * 4 + half * 2], sums[i][n * 4 + half * 2 + 1]};
      }
  }
}

#endif
