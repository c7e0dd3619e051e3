// Group normalisation of a stack of clients: a block for each piece, some channels of one image of one client, which
// are normalised together. Sums are taken in a fixed order. Images are [g, image, channel, pixel] in memory, or with
// LAST [image, pixel, g, channel], the order of grouped convolutions with channels last. Constants: C (channels), PARTS
// (groups of channels), PIXELS, THREADS, EPS, GROUPS (clients); RELU where what is below 0 is cut off; HALF where x,
// and the gradient by it, are bfloat16. With LAST, THREADS is a multiple of a piece's channels.

#define CHANNELS (C / PARTS)        // of a piece
#define EACH (CHANNELS * PIXELS)    // numbers of a piece
#define WARPS (THREADS / 32)

#ifdef HALF
typedef unsigned short Number;
__device__ __forceinline__ float number(const Number* from, size_t at) { return __uint_as_float((unsigned)from[at] << 16); }
__device__ __forceinline__ void keep(Number* to, size_t at, float value) {
  const unsigned bits = __float_as_uint(value);  // to the nearest, of two the even one; what is no number stays so
  to[at] = value == value ? (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 : 0x7fc0u;
}
#else
typedef float Number;
__device__ __forceinline__ float number(const Number* from, size_t at) { return from[at]; }
__device__ __forceinline__ void keep(Number* to, size_t at, float value) { to[at] = value; }
#endif

// Where a piece begins, where its numbers are from there, and of which of its channels they are.
#ifdef LAST
__device__ __forceinline__ size_t beginning(int images) {
  const size_t image = blockIdx.x / PARTS % images, g = blockIdx.x / PARTS / images;
  return (image * PIXELS * GROUPS + g) * C + blockIdx.x % PARTS * CHANNELS;
}
__device__ __forceinline__ size_t place(int at) { return (size_t)(at / CHANNELS) * GROUPS * C + at % CHANNELS; }
__device__ __forceinline__ int channel_of(int at) { return at % CHANNELS; }
#else
__device__ __forceinline__ size_t beginning(int images) { return (size_t)blockIdx.x * EACH; }
__device__ __forceinline__ size_t place(int at) { return at; }
__device__ __forceinline__ int channel_of(int at) { return at / PIXELS; }
#endif

__device__ __forceinline__ float over_warp(float value) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  return value;
}

// The sum over a block's threads, for all of them.
__device__ __forceinline__ float over_block(float value, float* room) {
  value = over_warp(value);
  __syncthreads();  // the last sum may still be read
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.f;
  for (int warp = 0; warp < WARPS; warp++) total += room[warp];
  return total;
}

// The first of a piece's own factors: those of its client, and of its channels.
__device__ __forceinline__ size_t own(int images) {
  return (size_t)(blockIdx.x / PARTS / images) * C + blockIdx.x % PARTS * CHANNELS;
}

extern "C" __global__ void __launch_bounds__(THREADS)
normalise(const Number* __restrict__ x, const float* __restrict__ w, const float* __restrict__ b,
          float* __restrict__ y, float* __restrict__ means, float* __restrict__ scales, int images) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;
  const size_t start = beginning(images), factor = own(images);
  float sum = 0.f;
  for (int at = threadIdx.x; at < EACH; at += THREADS) sum += number(x, start + place(at));
  const float mean = over_block(sum, room) / EACH;
  float squares = 0.f;
  for (int at = threadIdx.x; at < EACH; at += THREADS) {
    const float off = number(x, start + place(at)) - mean;
    squares += off * off;
  }
  const float scale = 1.f / sqrtf(over_block(squares, room) / EACH + EPS);
  for (int at = threadIdx.x; at < EACH; at += THREADS) {
    const size_t to = start + place(at);
    const int channel = channel_of(at);
    const float value = (number(x, to) - mean) * scale * w[factor + channel] + b[factor + channel];
#ifdef RELU
    y[to] = value < 0.f ? 0.f : value;  // what is no number stays so
#else
    y[to] = value;
#endif
  }
  if (threadIdx.x == 0) {
    means[blockIdx.x] = mean;
    scales[blockIdx.x] = scale;
  }
}

// The gradient of a number of the result, which ReLU may have cut off.
__device__ __forceinline__ float gradient_at(const float* gradient, const float* y, size_t at) {
#ifdef RELU
  return y[at] <= 0.f ? 0.f : gradient[at];
#else
  return gradient[at];
#endif
}

// dx, and each image's part of dw and db. Of neighbouring pixels a warp sums up one channel, then the next; with
// channels last a thread has always the same channel, and those who share one add up at the end.
extern "C" __global__ void __launch_bounds__(THREADS)
gradients(const float* __restrict__ gradient, const Number* __restrict__ x, const float* __restrict__ w,
          const float* __restrict__ means, const float* __restrict__ scales, const float* __restrict__ y,
          Number* __restrict__ dx, float* __restrict__ dw, float* __restrict__ db, int images) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;
  const size_t start = beginning(images), factor = own(images);
  const float mean = means[blockIdx.x], scale = scales[blockIdx.x];
  float level = 0.f, tilt = 0.f;  // sums over the piece of the gradients, and of them times what was normalised
#ifdef LAST
  float plain = 0.f, times = 0.f;
  for (int at = threadIdx.x; at < EACH; at += THREADS) {
    const size_t from = start + place(at);
    const float given = gradient_at(gradient, y, from);
    plain += given;
    times += given * (number(x, from) - mean);
  }
  room[threadIdx.x] = plain;
  room[THREADS + threadIdx.x] = times;
  __syncthreads();
  if (threadIdx.x < CHANNELS) {
    const int channel = threadIdx.x;
    for (int other = channel + CHANNELS; other < THREADS; other += CHANNELS) {
      plain += room[other];
      times += room[THREADS + other];
    }
    times *= scale;
    dw[(size_t)blockIdx.x * CHANNELS + channel] = times;  // [g, image, channel]
    db[(size_t)blockIdx.x * CHANNELS + channel] = plain;
    level = plain * w[factor + channel];
    tilt = times * w[factor + channel];
  }
#else
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int first = 0; first < CHANNELS; first += WARPS) {
    const int channel = first + warp;
    float plain = 0.f, times = 0.f;
    if (channel < CHANNELS)
      for (int pixel = lane; pixel < PIXELS; pixel += 32) {
        const size_t at = start + channel * PIXELS + pixel;
        const float given = gradient_at(gradient, y, at);
        plain += given;
        times += given * (number(x, at) - mean);
      }
    plain = over_warp(plain);
    times = over_warp(times) * scale;
    if (lane == 0 && channel < CHANNELS) {
      const size_t to = (size_t)blockIdx.x * CHANNELS + channel;  // [g, image, channel]
      dw[to] = times;
      db[to] = plain;
      level += plain * w[factor + channel];
      tilt += times * w[factor + channel];
    }
  }
#endif
  level = over_block(level, room) / EACH;
  tilt = over_block(tilt, room) / EACH;
  for (int at = threadIdx.x; at < EACH; at += THREADS) {
    const size_t to = start + place(at);
    const float given = gradient_at(gradient, y, to) * w[factor + channel_of(at)];
    keep(dx, to, scale * (given - level - (number(x, to) - mean) * scale * tilt));
  }
}
