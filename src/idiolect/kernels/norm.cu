// Group normalisation of a stack of clients. Images are [g, image, channel, pixel], so what is normalised
// together, some channels of one image, lies in one piece: a block for each. Sums are taken in a fixed order.
// Constants: C (channels), PARTS (groups of channels), PIXELS, THREADS, EPS; RELU where what is below 0 is cut off.

#define CHANNELS (C / PARTS)        // of a piece
#define EACH (CHANNELS * PIXELS)    // numbers of a piece
#define WARPS (THREADS / 32)

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
normalise(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ b,
          float* __restrict__ y, float* __restrict__ means, float* __restrict__ scales, int images) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;
  const size_t start = (size_t)blockIdx.x * EACH, factor = own(images);
  float sum = 0.f;
  for (int at = threadIdx.x; at < EACH; at += THREADS) sum += x[start + at];
  const float mean = over_block(sum, room) / EACH;
  float squares = 0.f;
  for (int at = threadIdx.x; at < EACH; at += THREADS) {
    const float off = x[start + at] - mean;
    squares += off * off;
  }
  const float scale = 1.f / sqrtf(over_block(squares, room) / EACH + EPS);
  for (int at = threadIdx.x; at < EACH; at += THREADS) {
    const int channel = at / PIXELS;
    const float value = (x[start + at] - mean) * scale * w[factor + channel] + b[factor + channel];
#ifdef RELU
    y[start + at] = value < 0.f ? 0.f : value;  // what is no number stays so
#else
    y[start + at] = value;
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

// dx, and each image's part of dw and db: a warp for each channel of the piece, then for the next.
extern "C" __global__ void __launch_bounds__(THREADS)
gradients(const float* __restrict__ gradient, const float* __restrict__ x, const float* __restrict__ w,
          const float* __restrict__ means, const float* __restrict__ scales, const float* __restrict__ y,
          float* __restrict__ dx, float* __restrict__ dw, float* __restrict__ db, int images) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;
  const size_t start = (size_t)blockIdx.x * EACH, factor = own(images);
  const float mean = means[blockIdx.x], scale = scales[blockIdx.x];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float level = 0.f, tilt = 0.f;  // sums over the piece of the gradients, and of them times what was normalised
  for (int first = 0; first < CHANNELS; first += WARPS) {
    const int channel = first + warp;
    float plain = 0.f, times = 0.f;
    if (channel < CHANNELS)
      for (int pixel = lane; pixel < PIXELS; pixel += 32) {
        const size_t at = start + channel * PIXELS + pixel;
        const float given = gradient_at(gradient, y, at);
        plain += given;
        times += given * (x[at] - mean);
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
  level = over_block(level, room) / EACH;
  tilt = over_block(tilt, room) / EACH;
  for (int at = threadIdx.x; at < EACH; at += THREADS) {
    const float given = gradient_at(gradient, y, start + at) * w[factor + at / PIXELS];
    dx[start + at] = scale * (given - level - (x[start + at] - mean) * scale * tilt);
  }
}
