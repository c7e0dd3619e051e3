// Convolutions of a stack of clients with channels last, by the matrix units of Hopper (wgmma), where the result is as
// large as the image, or as that of every STRIDE-th row and column. Images are [image, pixel, g, channel] in memory,
// weights [g, made, tap, read]; of bfloat16 with HALF, else of single precision, cut off to TF32 in products.
//
// In other forms every tap reads the pixels that it sees anew, and what the cache gives is the limit. Here a block holds
// its pixels, and those around them, in shared memory, and a tap is another beginning in it: images are thought of in one
// line, REACH zeros after every row and REACH rows of zeros after every image, so that a step to another pixel is the same
// everywhere. Where the line has zeros, what is made is thrown away. With a stride, pixels whose row and column leave the
// same rest are a plane by themselves: one image is read as STRIDE * STRIDE planes, or made as so many.
//
// Constants: STRIDE, STAGES, THREADS; TRANSPOSED (1: the gradient by images, OC is their channels), BN (channels made by a
// block), MT (matrices of 64 places of a warpgroup); of weight gradients PLACES (at a time) and SIDE (of the kernels).

#include "common.cuh"
#include "warpgroup.cuh"

#define REACH ((PAD + STRIDE - 1) / STRIDE)
#define SHIFTED (1 << 10)                 // a multiple of the stride that makes numbers positive

#if !WEIGHT_GRADIENT

#define TAPS (KH * KW)
#define BM (THREADS / 128 * MT * 64)      // places made by a block
#define READ (TRANSPOSED ? 1 : STRIDE)    // planes along an axis: of what is read,
#define MADE (TRANSPOSED ? STRIDE : 1)    // and of what is made: a block has one
#define RING (MADE > 1 ? 4 : 2)           // chunks of channels that are held, at most

// H and W are those of what is read, OH and OW of what is made.
extern "C" __global__ void __launch_bounds__(THREADS)
convolve(const Number* __restrict__ x, const Number* __restrict__ w, Number* __restrict__ y, int images, int C, int H,
         int W, int OC, int OH, int OW, int KH, int KW, int PAD) {
  extern __shared__ float4 memory[];
  char* weights = whole_pieces(memory);   // [STAGES][BN][128 bytes], then as many chunks of [plane][room][128 bytes]
  char* pixels = weights + STAGES * BN * 128;
  const int g = blockIdx.y, groups = gridDim.y, base = blockIdx.z * BN, first = blockIdx.x / (MADE * MADE) * BM;
  const int top = blockIdx.x % (MADE * MADE) / MADE, left = blockIdx.x % MADE;  // the plane that is made
  const unsigned high = TRANSPOSED ? H : OH, wide = TRANSPOSED ? W : OW;        // rows and columns of places
  const unsigned pitch = wide + REACH, each = (high + REACH) * pitch;           // places of a row and of an image
  const int reach = REACH * ((int)pitch + 1), less = PAD / STRIDE * ((int)pitch + 1);
  const int before = TRANSPOSED ? less : reach, room = BM + reach + less, bytes = (room + 7) / 8 * 1024;
  // The taps of the plane: from these on, every MADE-th.
  const int upper = (top + PAD) % MADE, outer = (left + PAD) % MADE, across = (KW - outer + MADE - 1) / MADE;
  const int taps = (KH - upper + MADE - 1) / MADE * across, slices = taps - AHEAD;
  const int chunks = C / BK, steps = chunks * taps, total = images * (int)each;
  const int piece = threadIdx.x % 8, line = threadIdx.x / 8;
  x += (size_t)g * C + piece * E;
  w += (size_t)g * OC * TAPS * C + piece * E;

  // Of a chunk of channels, every `of`-th line from the `slice`-th on.
  auto load_pixels = [&](int chunk, int slice, int of) {
    char* to = pixels + chunk % RING * (READ * READ * bytes);
    for (int row = line + slice * LINES; row < room; row += of * LINES) {
      const int place = first - before + row;
      const unsigned image = (unsigned)place / each, spot = (unsigned)place % each;
#pragma unroll
      for (int plane = 0; plane < READ * READ; plane++) {
        const int h = spot / pitch * READ + plane / READ, v = spot % pitch * READ + plane % READ;
        const bool inside = place >= 0 && place < total && h < H && v < W;
        bring16(to + plane * bytes + row * 128 + (piece ^ row % 8) * 16,
                x + (inside ? ((size_t)(image * H + h) * W + v) * groups * C + chunk * BK : 0), inside);
      }
    }
  };
  auto load_weights = [&](int step) {
    char* to = weights + step % STAGES * (BN * 128);
    const int chunk = step / taps, tap = step % taps;
    const int part = (upper + tap / across * MADE) * KW + outer + tap % across * MADE;
#pragma unroll
    for (int r = 0; r < BN / LINES; r++) {
      const int row = line + r * LINES, o = base + row;
      bring16(to + row * 128 + (piece ^ row % 8) * 16, w + (o < OC ? ((size_t)o * TAPS + part) * C + chunk * BK : 0),
              o < OC);
    }
  };
  const int own = threadIdx.x / 128 * MT * 64;  // the group's first place
  float sums[MT][BN / 2];
  load_pixels(0, 0, 1);
  if (RING > 2 && chunks > 1) load_pixels(1, 0, 1);
  for (int step = 0; step < AHEAD; step++) {
    if (step < steps) load_weights(step);
    close_stage();
  }
  for (int step = 0, chunk = 0, tap = 0; step < steps; step++) {
    await_stage<AHEAD - 1>();
    show_copies();
    __syncthreads();
    // Of the tap: its row and column from the pixel's own on, as places, and the plane that it sees.
    const int j = upper + tap / across * MADE, i = outer + tap % across * MADE;
    const int down = TRANSPOSED ? top + PAD - j + SHIFTED : j - PAD + SHIFTED;
    const int right = TRANSPOSED ? left + PAD - i + SHIFTED : i - PAD + SHIFTED;
    const int off = (down / STRIDE - SHIFTED / STRIDE) * (int)pitch + right / STRIDE - SHIFTED / STRIDE;
    const int plane = TRANSPOSED ? 0 : down % STRIDE * STRIDE + right % STRIDE;
    const Matrix a = matrix_of(
        pixels + (chunk % RING * (READ * READ) + plane) * bytes + (own + before + off) * 128, 1024, 1024);
    const Matrix b = matrix_of(weights + step % STAGES * (BN * 128), 1024, 1024);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int m = 0; m < MT; m++) add_product(sums[m], a + m * (64 * 128 / 16) + k * 2, b + k * 2, step | k);
    close_products();
    if (step + AHEAD < steps) load_weights(step + AHEAD);
    // The next chunk takes the place of the last but one, of which all products have been added, and must be there AHEAD
    // steps before it is used; where a chunk has few taps, the next but one.
    if (RING == 2 && tap >= 1 && tap <= slices && chunk + 1 < chunks) load_pixels(chunk + 1, tap - 1, slices);
    if (RING > 2 && tap == 0 && chunk + 2 < chunks) load_pixels(chunk + 2, 0, 1);
    close_stage();
    await_products<1>();
    if (++tap == taps) tap = 0, chunk++;
  }
  await_products<0>();
  write_pixels<MT, BN>(weights, sums, base, OC, [&](int row) -> Number* {
    const int place = first + row;
    const unsigned image = (unsigned)place / each, spot = (unsigned)place % each;
    const int h = spot / pitch * MADE + top, v = spot % pitch * MADE + left;
    return place < total && h < OH && v < OW ? y + (((size_t)(image * OH + h) * OW + v) * groups + g) * OC : nullptr;
  });
}

#else

// out[part, g, o, tap, c] = sum over the part's places of gradient[place, g, o] * x[place at tap, g, c], for 64 o and 64
// c; a warpgroup has a row of taps.
extern "C" __global__ void __launch_bounds__(THREADS)
weight_gradient(const Number* __restrict__ gradient, const Number* __restrict__ x, float* __restrict__ out, int images,
                int each, int C, int H, int W, int OC, int OH, int OW) {
  extern __shared__ float4 memory[];
  char* stages = whole_pieces(memory);    // [STAGES] of [PLACES][128 bytes], then [plane][room][128 bytes]
  const int across = (C + 63) / 64, PAD = SIDE / 2;
  const int g = blockIdx.y, groups = gridDim.y, base = blockIdx.z / across * 64, begin = blockIdx.z % across * 64;
  const unsigned pitch = OW + REACH, whole = (OH + REACH) * pitch;
  const int reach = REACH * ((int)pitch + 1), room = PLACES + reach + PAD / STRIDE * ((int)pitch + 1);
  const int layer = (room + 7) / 8 * 1024, bytes = PLACES * 128 + STRIDE * STRIDE * layer;
  const int total = images * (int)whole, first = blockIdx.x * each, last = min(total, first + each);
  const int steps = (last - first + PLACES - 1) / PLACES, piece = threadIdx.x % 8, line = threadIdx.x / 8;
  const bool made = base + piece * E < OC, seen = begin + piece * E < C;
  gradient += (size_t)g * OC + base + piece * E;
  x += (size_t)g * C + begin + piece * E;

  auto load = [&](int step) {
    char* to = stages + step % STAGES * bytes;
    const int from = first + step * PLACES;
    for (int row = line; row < PLACES; row += LINES) {
      const int place = from + row;
      const unsigned image = (unsigned)place / whole, spot = (unsigned)place % whole, h = spot / pitch, v = spot % pitch;
      const bool inside = made && place < last && h < OH && v < OW;
      bring16(to + row * 128 + (piece ^ row % 8) * 16,
              gradient + (inside ? ((size_t)(image * OH + h) * OW + v) * groups * OC : 0), inside);
    }
    for (int row = line; row < room; row += LINES) {
      const int place = from - reach + row;
      const unsigned image = (unsigned)place / whole, spot = (unsigned)place % whole;
#pragma unroll
      for (int plane = 0; plane < STRIDE * STRIDE; plane++) {
        const int h = spot / pitch * STRIDE + plane / STRIDE, v = spot % pitch * STRIDE + plane % STRIDE;
        const bool inside = seen && place >= 0 && place < total && h < H && v < W;
        bring16(to + PLACES * 128 + plane * layer + row * 128 + (piece ^ row % 8) * 16,
                x + (inside ? ((size_t)(image * H + h) * W + v) * groups * C : 0), inside);
      }
    }
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, j = warp / 4;  // the row of taps
  float sums[SIDE * 32];
  for (int step = 0; step < AHEAD; step++) {
    if (step < steps) load(step);
    close_stage();
  }
  for (int step = 0; step < steps; step++) {
    await_stage<AHEAD - 1>();
    show_copies();
    __syncthreads();
    const char* from = stages + step % STAGES * bytes;
    const int down = j - PAD + SHIFTED;
    const char* seen_by = from + PLACES * 128 + down % STRIDE * STRIDE * layer +
                          (reach + (down / STRIDE - SHIFTED / STRIDE) * (int)pitch) * 128;
    // Without a stride what the next tap sees is a row on, so all taps of a row are one matrix of 3 * 64 columns.
    const Matrix a = matrix_of(from, 1024, 1024), b = matrix_of(seen_by, 1024, 128);
    begin_products();
#pragma unroll
    for (int k = 0; k < PLACES / 16; k++)
#if STRIDE == 1
      add_turned(sums, a + k * (16 * 128 / 16), b + (k * 16 - PAD) * (128 / 16), step | k);
#else
#pragma unroll
      for (int i = 0; i < SIDE; i++) {
        const int right = i - PAD + SHIFTED;
        add_turned(*(float(*)[32])(sums + i * 32), a + k * (16 * 128 / 16),
                   b + right % STRIDE * (layer / 16) + (k * 16 + right / STRIDE - SHIFTED / STRIDE) * (128 / 16), step | k);
      }
#endif
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
          *(float2*)(out + ((size_t)o * (SIDE * SIDE) + j * SIDE + i) * C + c) = {sums[i * 32 + n * 4 + half * 2], sums[i * 32 + n * 4 + half * 2 + 1]};
      }
  }
}

#endif
