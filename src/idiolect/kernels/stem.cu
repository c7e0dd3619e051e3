// The first convolutions of networks, of pictures of up to four channels, of a stack of clients: on matrix units, of
// bfloat16. Pictures have few numbers and what is made of them many, so that is read or written once, 16 bytes at a time,
// and pictures are read as they lie in memory, in any order. A block holds a band of rows of one in shared memory, a
// pixel as four numbers, with zeros for channels that it has not: then every tap is another place of it. What is made,
// and its gradient, is [image, pixel, g, channel]; blocks of all clients run beside one another, whose pixels are
// neighbours.
// Constants: THREADS; C, KH, KW, PAD, STRIDE, of the convolution; WEIGHT_GRADIENT. BAND is rows made at a time.

#include "common.cuh"

#define TAPS (KH * KW)
#define WARPS (THREADS / 32)
#define BLOCK 64                          // channels made by a block
#define AT_ONCE 3                         // pixels that a thread reads before it writes them down

struct alignas(8) Pixel { Number of[4]; };
struct Steps { int image, channel, row, col; };  // numbers from one to the next, in memory

// So many rows of a picture from `top` on, each with PAD pixels before it; zeros outside of it.
__device__ __forceinline__ void hold(Pixel* to, const Number* x, Steps by, int top, int rows, int across, int H, int W) {
  const unsigned wide = across;           // as a divisor
  for (int from = threadIdx.x; from < rows * across; from += AT_ONCE * THREADS) {
    Pixel own[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      const unsigned spot = from + n * THREADS;
      const int h = top + (int)(spot / wide), v = (int)(spot % wide) - PAD;
      own[n] = {};
      if (spot < rows * wide && h >= 0 && h < H && v >= 0 && v < W)
#pragma unroll
        for (int c = 0; c < C; c++) own[n].of[c] = x[c * by.channel + h * by.row + v * by.col];
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++)
      if (from + n * THREADS < rows * across) to[from + n * THREADS] = own[n];
  }
}

// Where a tap is from a pixel on, in pixels; a tap that there is not has weights of 0, or is thrown away.
__device__ __forceinline__ int place_of(int tap, int across) { return tap < TAPS ? tap / KW * across + tap % KW : 0; }

#if !WEIGHT_GRADIENT

#define DEEP ((TAPS + 3) / 4)             // products of four taps
#define PITCH (DEEP * 16 + 2)             // numbers of a channel's weights: 4 * tap + c

extern "C" __global__ void __launch_bounds__(THREADS, 2)
convolve(const Number* __restrict__ x, const float* __restrict__ w, Number* __restrict__ y, int groups, int H, int W,
         int OC, int OH, int OW, int BAND, int client, int image, int channel, int row, int col, int by_client, int by_out,
         int by_channel, int by_row, int by_col) {
  extern __shared__ float4 memory[];
  Number* weights = (Number*)memory;      // [BLOCK][PITCH]
  Pixel* held = (Pixel*)(weights + BLOCK * PITCH);
  const int bands = (OH + BAND - 1) / BAND, g = blockIdx.x % groups, unit = blockIdx.x / groups;
  const int top = unit % bands * BAND, rows = min(BAND, OH - top), count = rows * OW, base = blockIdx.y * BLOCK;
  const int across = (OW - 1) * STRIDE + KW;
  const unsigned wide = OW;               // as a divisor
  w += (size_t)g * by_client;
#pragma unroll 4
  for (int i = threadIdx.x; i < BLOCK * DEEP * 16; i += THREADS) {
    const int o = i / (DEEP * 16), k = i % (DEEP * 16), tap = k / 4, c = k % 4;
    const bool there = base + o < OC && tap < TAPS && c < C;
    weights[o * PITCH + k] = kept(there ? w[(base + o) * by_out + c * by_channel + tap / KW * by_row + tap % KW * by_col] : 0.f);
  }
  hold(held, x + (size_t)g * client + (size_t)(unit / bands) * image, {image, channel, row, col}, top * STRIDE - PAD,
       (rows - 1) * STRIDE + KH, across, H, W);
  __syncthreads();

  // Columns of products are other channels than their numbers say: those that a thread has of four of them are eight
  // neighbours, which it writes at once.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = lane / 4, q = lane % 4;
  unsigned b[DEEP][8][2];
  int off[DEEP][2];
#pragma unroll
  for (int k = 0; k < DEEP; k++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      off[k][half] = place_of(k * 4 + half * 2 + q / 2, across) * 4 + q % 2 * 2;
#pragma unroll
      for (int t = 0; t < 8; t++)
        b[k][t][half] = *(const unsigned*)(weights + (t / 4 * 32 + n / 2 * 8 + t % 4 * 2 + n % 2) * PITCH + k * 16 + half * 8 + q * 2);
    }
  y += ((size_t)(unit / bands) * OH + top) * OW * groups * OC + (size_t)g * OC + base + q * 8;
  for (int tile = warp * 16; tile < count; tile += WARPS * 16) {
    const Number* seen[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const unsigned pixel = min(tile + half * 8 + n, count - 1);
      seen[half] = held[(pixel / wide * across + pixel % wide) * STRIDE].of;
    }
    float sums[8][4];
    clear(sums);
#pragma unroll
    for (int k = 0; k < DEEP; k++) {
      unsigned a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) a[i] = *(const unsigned*)(seen[i % 2] + off[k][i / 2]);
#pragma unroll
      for (int t = 0; t < 8; t++) multiply_half(sums[t], a, b[k][t]);
    }
    struct alignas(16) Eight { unsigned of[4]; };
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int part = 0; part < 2; part++) {
        Eight made;
#pragma unroll
        for (int i = 0; i < 4; i++) made.of[i] = both_kept(sums[part * 4 + i][half * 2], sums[part * 4 + i][half * 2 + 1]);
        const int pixel = tile + half * 8 + n;
        if (pixel < count && base + part * 32 + q * 8 < OC) *(Eight*)(y + (size_t)pixel * groups * OC + part * 32) = made;
      }
  }
}

#else

#define NT ((TAPS + 1) / 2)               // products of two taps

// out[part, g, o, tap, c] = the sum over the part's pixels of gradient[pixel, g, o] * x[pixel at tap, c]. A part is `each`
// bands; of every one, each warp adds up some pixels for all weights of a block, and at last the warps' sums are added.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
weight_gradient(const Number* __restrict__ gradient, const Number* __restrict__ x, float* __restrict__ out, int groups,
                int images, int each, int H, int W, int OC, int OH, int OW, int BAND, int client, int image, int channel,
                int row, int col) {
  extern __shared__ float4 memory[];      // two stages: of the gradient [places][128 bytes], and a band of a picture
  const int places = (BAND * OW + 15) / 16 * 16, across = (OW - 1) * STRIDE + KW;
  const int stage = places * 128 + ((BAND - 1) * STRIDE + KH) * across * (int)sizeof(Pixel) / 16 * 16 + 16;
  const int bands = (OH + BAND - 1) / BAND, g = blockIdx.x % groups, part = blockIdx.x / groups, base = blockIdx.y * BLOCK;
  const int first = part * each, steps = min(images * bands - first, each);
  const unsigned wide = OW;               // as a divisor
  x += (size_t)g * client;
  gradient += (size_t)g * OC + base + threadIdx.x % 8 * 8;
  const bool any = base + threadIdx.x % 8 * 8 < OC;

  auto load = [&](int step) {
    char* to = (char*)memory + step % 2 * stage;
    const int own = (first + step) / bands, top = (first + step) % bands * BAND, rows = min(BAND, OH - top);
    const Number* from = gradient + ((size_t)own * OH + top) * OW * groups * OC;
    for (int place = threadIdx.x / 8; place < places; place += THREADS / 8) {
      const bool inside = any && place < rows * OW;
      bring16(to + place * 128 + (threadIdx.x % 8 ^ place % 8) * 16, from + (inside ? (size_t)place * groups * OC : 0),
              inside);
    }
    hold((Pixel*)(to + places * 128), x + (size_t)own * image, {image, channel, row, col}, top * STRIDE - PAD,
         (rows - 1) * STRIDE + KH, across, H, W);
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = lane / 4, q = lane % 4;
  int off[NT];
  float sums[4][NT][4];
#pragma unroll
  for (int t = 0; t < NT; t++) {
    off[t] = place_of(t * 2 + n / 4, across) * 4 + n % 4;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[m][t][i] = 0.f;
  }
  load(0);
  close_stage();
  for (int step = 0; step < steps; step++) {
    if (step + 1 < steps) load(step + 1);
    close_stage();
    await_stage<1>();
    __syncthreads();
    const char* from = (const char*)memory + step % 2 * stage;
    const Number* held = (const Number*)(from + places * 128);
    const int count = min(BAND, OH - (first + step) % bands * BAND) * OW;
    for (int k = warp * 16; k < count; k += WARPS * 16) {
      const Number* seen[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {       // past the end, where the gradient is 0, the last pixel
        const unsigned pixel = min(k + i / 2 * 8 + q * 2 + i % 2, count - 1);
        seen[i] = held + (pixel / wide * across + pixel % wide) * (STRIDE * 4);
      }
      unsigned a[4][4];
#pragma unroll
      for (int m = 0; m < 4; m++)
        load_turned(a[m], from + (k + lane / 16 * 8 + lane % 8) * 128 + ((m * 2 + lane / 8 % 2) ^ lane % 8) * 16);
#pragma unroll
      for (int t = 0; t < NT; t++) {
        unsigned b[2];
#pragma unroll
        for (int half = 0; half < 2; half++)
          b[half] = seen[half * 2][off[t]] | (unsigned)seen[half * 2 + 1][off[t]] << 16;
#pragma unroll
        for (int m = 0; m < 4; m++) multiply_half(sums[m][t], a[m], b);
      }
    }
    __syncthreads();
  }
  float* room = (float*)memory;           // [m][t][i][lane]
  for (int turn = 0; turn < WARPS; turn++) {
    if (warp == turn)
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float* to = room + ((m * NT + t) * 4 + i) * 32 + lane;
            *to = turn ? *to + sums[m][t][i] : sums[m][t][i];
          }
    __syncthreads();
  }
  out += (((size_t)part * groups + g) * OC + base) * (TAPS * C);
  for (int i = threadIdx.x; i < min(BLOCK, OC - base) * (TAPS * C); i += THREADS) {
    const int o = i / (TAPS * C), k = i % (TAPS * C) / C * 4 + i % C;
    out[i] = room[((o / 16 * NT + k / 8) * 4 + o % 16 / 8 * 2 + k % 2) * 32 + o % 8 * 4 + k % 8 / 2];
  }
}

#endif
