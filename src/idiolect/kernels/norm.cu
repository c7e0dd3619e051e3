// Group normalisation of a stack of clients. Sums are taken in a fixed order. Images are [g, image, channel, pixel] in
// memory, and a block has a piece: some channels of one image of one client, which are normalised together; a thread
// takes V neighbouring pixels at once. With LAST they are [image, pixel, g, channel], the order of grouped convolutions
// with channels last, and a block has all pieces of an image; a thread has always the same V channels, of every ROWS-th
// pixel. Constants: C (channels), PARTS (groups of channels), PIXELS, THREADS, EPS, V, with LAST GROUPS (clients); HALF
// where images and their gradients are bfloat16. The argument relu says whether what is below 0 is cut off.

#define CHANNELS (C / PARTS)        // of a piece
#define EACH (CHANNELS * PIXELS)    // numbers of a piece
#define WARPS (THREADS / 32)

#include "common.cuh"

struct alignas(V * sizeof(Number)) Pack { Number of[V]; };

__device__ __forceinline__ float rectified(float value, int relu) {
  return relu && value < 0.f ? 0.f : value;  // what is no number stays so
}

// The gradient of a number of the result, which ReLU may have cut off.
__device__ __forceinline__ float passed(Number gradient, Number y, int relu) {
  return relu && number(y) <= 0.f ? 0.f : number(gradient);
}

// What ReLU left: not read where none follows.
__device__ __forceinline__ Pack left(const Number* y, int relu) { return relu ? *(const Pack*)y : Pack(); }

#ifdef LAST

#define LANES (C / V)               // threads of a pixel
#define ROWS (THREADS / LANES)      // pixels at a time
#define PER (CHANNELS / V)          // threads of a pixel that have the same piece
#define STEP ((size_t)GROUPS * C)   // from pixel to pixel

__device__ __forceinline__ size_t beginning(int images) {
  const size_t image = blockIdx.x % images, g = blockIdx.x / images;
  return (image * PIXELS * GROUPS + g) * C + threadIdx.x % LANES * V;
}

// The sum of a piece over its threads, for all of them.
__device__ __forceinline__ float over_piece(float value, float* room) {
  __syncthreads();  // the last sum may still be read
  room[threadIdx.x] = value;
  __syncthreads();
  for (int first = 0; first < PARTS; first += WARPS) {
    const int part = first + threadIdx.x / 32;
    float sum = 0.f;
    if (part < PARTS)
      for (int k = threadIdx.x % 32; k < ROWS * PER; k += 32) sum += room[k / PER * LANES + part * PER + k % PER];
    sum = over_lanes<32>(sum);
    if (threadIdx.x % 32 == 0 && part < PARTS) room[THREADS + part] = sum;
  }
  __syncthreads();
  return room[THREADS + threadIdx.x % LANES / PER];
}

extern "C" __global__ void __launch_bounds__(THREADS)
normalise(const Number* __restrict__ x, const float* __restrict__ w, const float* __restrict__ b,
          Number* __restrict__ y, float* __restrict__ means, float* __restrict__ scales, int images, int relu) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;
  const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
  const size_t start = beginning(images);
  const int count = row < PIXELS ? (PIXELS - 1 - row) / ROWS * V + V : 0;
  // Each thread's own mean and squares around it are put together, so that one reading is enough.
  const float near = number(x[start + (row < PIXELS ? row * STEP : 0)]);
  float sum = 0.f, squares = 0.f;
#pragma unroll 4
  for (int pixel = row; pixel < PIXELS; pixel += ROWS) {
    const Pack pack = *(const Pack*)(x + start + pixel * STEP);
#pragma unroll
    for (int i = 0; i < V; i++) {
      const float off = number(pack.of[i]) - near;
      sum += off;
      squares += off * off;
    }
  }
  const float own = count ? near + sum / count : 0.f;
  if (count) squares -= sum * sum / count;
  const float mean = over_piece(own * count, room) / EACH;
  const float variance = over_piece(squares + count * (own - mean) * (own - mean), room) / EACH;
  const float scale = 1.f / sqrtf(variance + EPS);
  float factor[V], shift[V];
#pragma unroll
  for (int i = 0; i < V; i++) {
    const size_t channel = (size_t)(blockIdx.x / images) * C + lane * V + i;
    factor[i] = w[channel] * scale;
    shift[i] = b[channel];
  }
#pragma unroll 4
  for (int pixel = row; pixel < PIXELS; pixel += ROWS) {
    Pack pack = *(const Pack*)(x + start + pixel * STEP);
#pragma unroll
    for (int i = 0; i < V; i++) pack.of[i] = kept(rectified((number(pack.of[i]) - mean) * factor[i] + shift[i], relu));
    *(Pack*)(y + start + pixel * STEP) = pack;
  }
  if (row == 0 && lane % PER == 0) {
    means[blockIdx.x * PARTS + lane / PER] = mean;
    scales[blockIdx.x * PARTS + lane / PER] = scale;
  }
}

// dx, and each image's part of dw and db.
extern "C" __global__ void __launch_bounds__(THREADS)
gradients(const Number* __restrict__ gradient, const Number* __restrict__ x, const float* __restrict__ w,
          const float* __restrict__ means, const float* __restrict__ scales, const Number* __restrict__ y,
          Number* __restrict__ dx, float* __restrict__ dw, float* __restrict__ db, int images, int relu) {
  extern __shared__ float4 memory[];
  float* plains = (float*)memory;     // [ROWS][C], then a sum for each channel, then for each piece
  float* timeses = plains + ROWS * C;
  const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES, piece = blockIdx.x * PARTS + lane / PER;
  const size_t start = beginning(images), factor = (size_t)(blockIdx.x / images) * C;
  const float mean = means[piece], scale = scales[piece];
  float plain[V], times[V];
#pragma unroll
  for (int i = 0; i < V; i++) plain[i] = times[i] = 0.f;
#pragma unroll 2
  for (int pixel = row; pixel < PIXELS; pixel += ROWS) {
    const size_t at = start + pixel * STEP;
    const Pack given = *(const Pack*)(gradient + at), seen = *(const Pack*)(x + at), made = left(y + at, relu);
#pragma unroll
    for (int i = 0; i < V; i++) {
      const float own = passed(given.of[i], made.of[i], relu);
      plain[i] += own;
      times[i] += own * (number(seen.of[i]) - mean);
    }
  }
#pragma unroll
  for (int i = 0; i < V; i++) {
    plains[threadIdx.x * V + i] = plain[i];
    timeses[threadIdx.x * V + i] = times[i];
  }
  __syncthreads();
  for (int channel = threadIdx.x; channel < C; channel += THREADS) {
    float level = 0.f, tilt = 0.f;
    for (int other = 0; other < ROWS; other++) {
      level += plains[other * C + channel];
      tilt += timeses[other * C + channel];
    }
    tilt *= scales[blockIdx.x * PARTS + channel / CHANNELS];
    dw[(size_t)blockIdx.x * C + channel] = tilt;  // [g, image, channel]
    db[(size_t)blockIdx.x * C + channel] = level;
    plains[channel] = level * w[factor + channel];
    timeses[channel] = tilt * w[factor + channel];
  }
  __syncthreads();
  // Sums over pieces: of the gradients, and of them times what was normalised.
  for (int first = 0; first < PARTS; first += WARPS) {
    const int part = first + threadIdx.x / 32;
    float level = 0.f, tilt = 0.f;
    for (int k = threadIdx.x % 32; part < PARTS && k < CHANNELS; k += 32) {
      level += plains[part * CHANNELS + k];
      tilt += timeses[part * CHANNELS + k];
    }
    level = over_lanes<32>(level);
    tilt = over_lanes<32>(tilt);
    if (threadIdx.x % 32 == 0 && part < PARTS) {
      plains[part * CHANNELS] = level / EACH;
      timeses[part * CHANNELS] = tilt / EACH;
    }
  }
  __syncthreads();
  const float level = plains[lane / PER * CHANNELS], tilt = timeses[lane / PER * CHANNELS] * scale;
  float own[V];
#pragma unroll
  for (int i = 0; i < V; i++) own[i] = w[factor + lane * V + i];
#pragma unroll 2
  for (int pixel = row; pixel < PIXELS; pixel += ROWS) {
    const size_t at = start + pixel * STEP;
    const Pack given = *(const Pack*)(gradient + at), made = left(y + at, relu);
    Pack pack = *(const Pack*)(x + at);
#pragma unroll
    for (int i = 0; i < V; i++)
      pack.of[i] = kept(scale * (passed(given.of[i], made.of[i], relu) * own[i] - level - (number(pack.of[i]) - mean) * tilt));
    *(Pack*)(dx + at) = pack;
  }
}

#else

// The sum over a block's threads, for all of them.
__device__ __forceinline__ float over_block(float value, float* room) {
  value = over_lanes<32>(value);
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
          Number* __restrict__ y, float* __restrict__ means, float* __restrict__ scales, int images, int relu) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;
  const size_t start = (size_t)blockIdx.x * EACH, factor = own(images);
  float sum = 0.f;
#pragma unroll 4
  for (int at = threadIdx.x * V; at < EACH; at += THREADS * V) {
    const Pack pack = *(const Pack*)(x + start + at);
#pragma unroll
    for (int i = 0; i < V; i++) sum += number(pack.of[i]);
  }
  const float mean = over_block(sum, room) / EACH;
  float squares = 0.f;
#pragma unroll 4
  for (int at = threadIdx.x * V; at < EACH; at += THREADS * V) {
    const Pack pack = *(const Pack*)(x + start + at);
#pragma unroll
    for (int i = 0; i < V; i++) {
      const float off = number(pack.of[i]) - mean;
      squares += off * off;
    }
  }
  const float scale = 1.f / sqrtf(over_block(squares, room) / EACH + EPS);
#pragma unroll 4
  for (int at = threadIdx.x * V; at < EACH; at += THREADS * V) {
    const int channel = at / PIXELS;
    const float weight = w[factor + channel] * scale, bias = b[factor + channel];
    Pack pack = *(const Pack*)(x + start + at);
#pragma unroll
    for (int i = 0; i < V; i++) pack.of[i] = kept(rectified((number(pack.of[i]) - mean) * weight + bias, relu));
    *(Pack*)(y + start + at) = pack;
  }
  if (threadIdx.x == 0) {
    means[blockIdx.x] = mean;
    scales[blockIdx.x] = scale;
  }
}

// dx, and each image's part of dw and db. Of neighbouring pixels a warp sums up one channel, then the next.
extern "C" __global__ void __launch_bounds__(THREADS)
gradients(const Number* __restrict__ gradient, const Number* __restrict__ x, const float* __restrict__ w,
          const float* __restrict__ means, const float* __restrict__ scales, const Number* __restrict__ y,
          Number* __restrict__ dx, float* __restrict__ dw, float* __restrict__ db, int images, int relu) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;
  const size_t start = (size_t)blockIdx.x * EACH, factor = own(images);
  const float mean = means[blockIdx.x], scale = scales[blockIdx.x];
  float level = 0.f, tilt = 0.f;  // sums over the piece of the gradients, and of them times what was normalised
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int first = 0; first < CHANNELS; first += WARPS) {
    const int channel = first + warp;
    float plain = 0.f, times = 0.f;
    if (channel < CHANNELS)
      for (int pixel = lane * V; pixel < PIXELS; pixel += 32 * V) {
        const size_t at = start + channel * PIXELS + pixel;
        const Pack given = *(const Pack*)(gradient + at), seen = *(const Pack*)(x + at), made = left(y + at, relu);
#pragma unroll
        for (int i = 0; i < V; i++) {
          const float own = passed(given.of[i], made.of[i], relu);
          plain += own;
          times += own * (number(seen.of[i]) - mean);
        }
      }
    plain = over_lanes<32>(plain);
    times = over_lanes<32>(times) * scale;
    if (lane == 0 && channel < CHANNELS) {
      const size_t to = (size_t)blockIdx.x * CHANNELS + channel;  // [g, image, channel]
      dw[to] = times;
      db[to] = plain;
      level += plain * w[factor + channel];
      tilt += times * w[factor + channel];
    }
  }
  level = over_block(level, room) / EACH;
  tilt = over_block(tilt, room) / EACH;
#pragma unroll 2
  for (int at = threadIdx.x * V; at < EACH; at += THREADS * V) {
    const size_t to = start + at;
    const float weight = w[factor + at / PIXELS];
    const Pack given = *(const Pack*)(gradient + to), made = left(y + to, relu);
    Pack pack = *(const Pack*)(x + to);
#pragma unroll
    for (int i = 0; i < V; i++) {
      const float standard = (number(pack.of[i]) - mean) * scale;
      pack.of[i] = kept(scale * (passed(given.of[i], made.of[i], relu) * weight - level - standard * tilt));
    }
    *(Pack*)(dx + to) = pack;
  }
}

#endif
