// Group normalisation of a stack of clients. Sums are taken in a fixed order. Images are [g, image, channel, pixel] in
// memory, and a block has a piece: some channels of one image of one client, which are normalised together; a thread
// takes V neighbouring pixels at once. With LAST they are [image, pixel, g, channel], the order of grouped convolutions
// with channels last, and a block has some pieces of an image; a thread has always the same V channels, of every ROWS-th
// pixel. Constants: C (channels), PARTS (groups of channels), PIXELS, THREADS, EPS, V, with LAST GROUPS (clients), HELD
// (pieces of a block); perhaps KEPT, so that images are read once, and held in registers (of a thread KEPT pixels) or,
// without LAST, in shared memory; HALF where images and their gradients are bfloat16. The argument relu says whether what
// is below 0 is cut off; going backward, what was is computed again, to the bit, which costs less than to read it. With
// LAST, others may be part of it. Forward, with PLUS, other images are added before that. Backward, with PLUS the gradient
// is the sum of two, and with MASKED it is 0 where images that are given were cut off, and kept for others that read it.

#define CHANNELS (C / PARTS)        // of a piece
#define EACH (CHANNELS * PIXELS)    // numbers of a piece
#define WARPS (THREADS / 32)

#include "common.cuh"

struct alignas(V * sizeof(Number)) Pack { Number of[V]; };

// The same in words, as registers hold it: two numbers of bfloat16 in one.
#if defined(HALF) && V % 2 == 0
struct alignas(V * sizeof(Number)) Words { unsigned at[V / 2]; };
__device__ __forceinline__ Pack opened(Words words) {
  Pack pack;
#pragma unroll
  for (int i = 0; i < V; i++) pack.of[i] = words.at[i / 2] >> i % 2 * 16;
  return pack;
}
__device__ __forceinline__ Words closed(Pack pack) {
  Words words;
#pragma unroll
  for (int i = 0; i < V / 2; i++) words.at[i] = pack.of[2 * i] | (unsigned)pack.of[2 * i + 1] << 16;
  return words;
}
// What was taken out of words before is forgotten, so that it takes no registers.
__device__ __forceinline__ void hold(Words& words) {
#pragma unroll
  for (int i = 0; i < V / 2; i++) {
    asm volatile("" : "+r"(words.at[i]));
  }
}
#else
typedef Pack Words;
__device__ __forceinline__ Pack opened(Words words) { return words; }
__device__ __forceinline__ Words closed(Pack pack) { return pack; }
__device__ __forceinline__ void hold(Words& words) {}
#endif

__device__ __forceinline__ float rectified(float value, int relu) {
  return relu && value < 0.f ? 0.f : value;  // what is no number stays so
}

#ifndef PLUS
#define PLUS 0
#endif
#ifndef MASKED
#define MASKED 0
#endif

// What is read once, and leaves room in the caches for what is read again.
__device__ __forceinline__ Pack once(const Number* from) {
  if (sizeof(Pack) == 16) {
    const float4 four = __ldcs((const float4*)from);
    return *(const Pack*)&four;
  } else {
    return *(const Pack*)from;
  }
}

// A number of the result before ReLU. Nothing is contracted here, so that torch's operations give the same.
__device__ __forceinline__ float placed(Number x, float mean, float factor, float shift) {
  return __fadd_rn(__fmul_rn(__fsub_rn(number(x), mean), factor), shift);
}

// The gradient of a number of the result, which ReLU may have cut off.
__device__ __forceinline__ Number passed(Number gradient, Number x, float mean, float factor, float shift, int relu) {
  return relu && placed(x, mean, factor, shift) <= 0.f ? (Number)0 : gradient;
}

#ifdef LAST

#define OWN (HELD * CHANNELS)       // channels of a block
#define SLICES (PARTS / HELD)       // blocks of an image
#define LANES (OWN / V)             // threads of a pixel
#define ROWS (THREADS / LANES)      // pixels at a time
#define PER (CHANNELS / V)          // threads of a pixel that have the same piece
#define STEP ((size_t)GROUPS * C)   // from pixel to pixel
// Whether a thread has a k-th pixel.
#define THERE(k) (PIXELS % ROWS == 0 || row + (k) * ROWS < PIXELS)
#ifdef KEPT
#define COUNT KEPT                  // pixels of a thread, at most
constexpr int unrolled = KEPT;
#define BLOCKS (KEPT > 4 ? 1 : 1024 / THREADS)  // of a multiprocessor: one reads while another writes
#else
#define COUNT ((PIXELS + ROWS - 1) / ROWS)
constexpr int unrolled = 4;
#define BLOCKS 1
#endif

// With more to read, pixels that a thread reads before it writes the first: no later read may pass a write.
#if (PLUS || MASKED) && !defined(KEPT)
#define BATCH 2
#else
#define BATCH 1
#endif
#define EACH_OF_BATCH(k) \
  _Pragma("unroll") for (int j = 0; j < BATCH; j++) if ((BATCH == 1 || (k) + j < COUNT) && THERE((k) + j))

__device__ __forceinline__ size_t beginning(int images) {
  const size_t image = blockIdx.x / SLICES % images, g = blockIdx.x / SLICES / images;
  return (image * PIXELS * GROUPS + g) * C + blockIdx.x % SLICES * OWN + threadIdx.x % LANES * V;
}

// The client's first factor of the block, and the image's first piece of it.
__device__ __forceinline__ size_t own_factors(int images) {
  return (size_t)(blockIdx.x / SLICES / images) * C + blockIdx.x % SLICES * OWN;
}
__device__ __forceinline__ int own_pieces() { return blockIdx.x / SLICES * PARTS + blockIdx.x % SLICES * HELD; }

// The sum of a piece over its threads, for all of them.
__device__ __forceinline__ float over_piece(float value, float* room) {
  __syncthreads();  // the last sum may still be read
  room[threadIdx.x] = value;
  __syncthreads();
  for (int first = 0; first < HELD; first += WARPS) {
    const int part = first + threadIdx.x / 32;
    float sum = 0.f;
    if (part < HELD)
      for (int k = threadIdx.x % 32; k < ROWS * PER; k += 32) sum += room[k / PER * LANES + part * PER + k % PER];
    sum = over_lanes<32>(sum);
    if (threadIdx.x % 32 == 0 && part < HELD) room[THREADS + part] = sum;
  }
  __syncthreads();
  return room[THREADS + threadIdx.x % LANES / PER];
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
normalise(const Number* __restrict__ x, const float* __restrict__ w, const float* __restrict__ b,
          const Number* __restrict__ added, Number* __restrict__ y, float* __restrict__ means, float* __restrict__ scales, int images, int relu) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;
  const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
  const size_t start = beginning(images);
  const int count = row < PIXELS ? (PIXELS - 1 - row) / ROWS * V + V : 0;
  // Each thread's own mean and squares around it are put together, so that one reading is enough.
  const float near = number(x[start + (row < PIXELS ? row * STEP : 0)]);
  float sum = 0.f, squares = 0.f;
#ifdef KEPT
  Words held[KEPT];
#pragma unroll
  for (int k = 0; k < KEPT; k++)
    if (THERE(k)) held[k] = *(const Words*)(x + start + (row + k * ROWS) * STEP);
#define SEEN(k, at) opened(held[k])
#define HOLD(words) hold(words)
#else
#define SEEN(k, at) *(const Pack*)(x + (at))
#define HOLD(words)
#endif
#pragma unroll unrolled
  for (int k = 0; k < COUNT; k++) {
    const int pixel = row + k * ROWS;
    if (!THERE(k)) break;
    const Pack pack = SEEN(k, start + pixel * STEP);
#pragma unroll
    for (int i = 0; i < V; i++) {
      const float off = number(pack.of[i]) - near;
      sum += off;
      squares += off * off;
    }
    HOLD(held[k]);
  }
  const float own = count ? near + sum / count : 0.f;
  if (count) squares -= sum * sum / count;
  const float mean = over_piece(own * count, room) / EACH;
  const float variance = over_piece(squares + count * (own - mean) * (own - mean), room) / EACH;
  const float scale = 1.f / sqrtf(variance + EPS);
  float factor[V], shift[V];
#pragma unroll
  for (int i = 0; i < V; i++) {
    const size_t channel = own_factors(images) + lane * V + i;
    factor[i] = __fmul_rn(w[channel], scale);
    shift[i] = b[channel];
  }
#pragma unroll unrolled
  for (int k = 0; k < COUNT; k += BATCH) {
    Pack packs[BATCH], others[BATCH];
    EACH_OF_BATCH(k) {
      const size_t at = start + (row + (k + j) * ROWS) * STEP;
      packs[j] = SEEN(k + j, at);
      if (PLUS) others[j] = once(added + at);
    }
    EACH_OF_BATCH(k) {
#pragma unroll
      for (int i = 0; i < V; i++) {
        float value = placed(packs[j].of[i], mean, factor[i], shift[i]);
        if (PLUS) value += number(others[j].of[i]);
        packs[j].of[i] = kept(rectified(value, relu));
      }
      *(Words*)(y + start + (row + (k + j) * ROWS) * STEP) = closed(packs[j]);
    }
  }
  if (row == 0 && lane % PER == 0) {
    means[own_pieces() + lane / PER] = mean;
    scales[own_pieces() + lane / PER] = scale;
  }
}

#if PLUS || MASKED
// The gradient of a pixel's channels, of several; it stays where the thread finds it again: where it is kept for others,
// or in the place of dx, which the thread writes there later.
#define KEPT_IN (MASKED ? masked : dx)
__device__ __forceinline__ Pack summed(const Number* gradient, const Number* second, const Number* cut, size_t at) {
  Pack given = once(gradient + at), other;
  if (PLUS) {
    other = once(second + at);
#pragma unroll
    for (int i = 0; i < V; i++) given.of[i] = kept(number(given.of[i]) + number(other.of[i]));
  }
  if (MASKED) {
    other = once(cut + at);
#pragma unroll
    for (int i = 0; i < V; i++) given.of[i] = number(other.of[i]) <= 0.f ? (Number)0 : given.of[i];
  }
  return given;
}
#endif

// dx, and each image's part of dw and db; `far` and `apart` are for the other order.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gradients(const Number* __restrict__ gradient, const Number* __restrict__ x, const float* __restrict__ w,
          const float* __restrict__ means, const float* __restrict__ scales, const float* __restrict__ b,
          Number* __restrict__ dx, float* __restrict__ dw, float* __restrict__ db, const Number* __restrict__ second,
          const Number* __restrict__ cut, Number* __restrict__ masked, int images, int relu, int far, int apart) {
  extern __shared__ float4 memory[];
  float* plains = (float*)memory;     // [ROWS][OWN], then a sum for each channel, then for each piece
  float* timeses = plains + ROWS * OWN;
  const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES, piece = own_pieces() + lane / PER;
  const size_t start = beginning(images), first_factor = own_factors(images);
  const float mean = means[piece], scale = scales[piece];
  float plain[V], times[V], factor[V], shift[V];
#pragma unroll
  for (int i = 0; i < V; i++) {
    plain[i] = times[i] = 0.f;
    factor[i] = __fmul_rn(w[first_factor + lane * V + i], scale);
    shift[i] = b[first_factor + lane * V + i];
  }
#ifdef KEPT
  Words held[KEPT], slopes[KEPT];     // of these, what ReLU cut off is 0
#pragma unroll
  for (int k = 0; k < KEPT; k++) {
    if (!THERE(k)) break;
    const size_t at = start + (row + k * ROWS) * STEP;
    held[k] = *(const Words*)(x + at);
#if PLUS || MASKED
    Pack given = summed(gradient, second, cut, at);
    if (MASKED) *(Words*)(masked + at) = closed(given);
#else
    Pack given = *(const Pack*)(gradient + at);
#endif
    const Pack seen = opened(held[k]);
#pragma unroll
    for (int i = 0; i < V; i++) given.of[i] = passed(given.of[i], seen.of[i], mean, factor[i], shift[i], relu);
    slopes[k] = closed(given);
    HOLD(held[k]);
    HOLD(slopes[k]);
  }
#define GIVEN(k, at) opened(slopes[k])
#define CUT 0
#else
#if PLUS || MASKED
#define GIVEN(k, at) *(const Pack*)(KEPT_IN + (at))
#else
#define GIVEN(k, at) *(const Pack*)(gradient + (at))
#endif
#define CUT relu
#endif
#pragma unroll unrolled
  for (int k = 0; k < COUNT; k += BATCH) {
    Pack given[BATCH], seen[BATCH];
    EACH_OF_BATCH(k) {
      const size_t at = start + (row + (k + j) * ROWS) * STEP;
#if (PLUS || MASKED) && !defined(KEPT)
      given[j] = summed(gradient, second, cut, at);
#else
      given[j] = GIVEN(k + j, at);
#endif
      seen[j] = SEEN(k + j, at);
    }
    EACH_OF_BATCH(k) {
#if (PLUS || MASKED) && !defined(KEPT)
      *(Words*)(KEPT_IN + start + (row + (k + j) * ROWS) * STEP) = closed(given[j]);
#endif
#pragma unroll
      for (int i = 0; i < V; i++) {
        const float slope = number(passed(given[j].of[i], seen[j].of[i], mean, factor[i], shift[i], CUT));
        plain[i] += slope;
        times[i] += slope * (number(seen[j].of[i]) - mean);
      }
      HOLD(held[k + j]);
      HOLD(slopes[k + j]);
    }
  }
#pragma unroll
  for (int i = 0; i < V; i++) {
    plains[threadIdx.x * V + i] = plain[i];
    timeses[threadIdx.x * V + i] = times[i];
  }
  __syncthreads();
  for (int channel = threadIdx.x; channel < OWN; channel += THREADS) {
    float level = 0.f, tilt = 0.f;
    for (int other = 0; other < ROWS; other++) {
      level += plains[other * OWN + channel];
      tilt += timeses[other * OWN + channel];
    }
    tilt *= scales[own_pieces() + channel / CHANNELS];
    const size_t to = (size_t)own_pieces() * CHANNELS + channel;  // [g, image, channel]
    dw[to] = tilt;
    db[to] = level;
    plains[channel] = level * w[first_factor + channel];
    timeses[channel] = tilt * w[first_factor + channel];
  }
  __syncthreads();
  // Sums over pieces: of the gradients, and of them times what was normalised.
  for (int first = 0; first < HELD; first += WARPS) {
    const int part = first + threadIdx.x / 32;
    float level = 0.f, tilt = 0.f;
    for (int k = threadIdx.x % 32; part < HELD && k < CHANNELS; k += 32) {
      level += plains[part * CHANNELS + k];
      tilt += timeses[part * CHANNELS + k];
    }
    level = over_lanes<32>(level);
    tilt = over_lanes<32>(tilt);
    if (threadIdx.x % 32 == 0 && part < HELD) {
      plains[part * CHANNELS] = level / EACH;
      timeses[part * CHANNELS] = tilt / EACH;
    }
  }
  __syncthreads();
  const float level = plains[lane / PER * CHANNELS], tilt = timeses[lane / PER * CHANNELS] * scale;
  float own[V];
#pragma unroll
  for (int i = 0; i < V; i++) own[i] = w[first_factor + lane * V + i];
#pragma unroll unrolled
  for (int k = 0; k < COUNT; k += BATCH) {
    Pack given[BATCH], packs[BATCH];
    EACH_OF_BATCH(k) {
      const size_t at = start + (row + (k + j) * ROWS) * STEP;
      given[j] = GIVEN(k + j, at);
      packs[j] = SEEN(k + j, at);
    }
    EACH_OF_BATCH(k) {
#pragma unroll
      for (int i = 0; i < V; i++) {
        const Number seen = packs[j].of[i];
        const float slope = number(passed(given[j].of[i], seen, mean, factor[i], shift[i], CUT));
        packs[j].of[i] = kept(scale * (slope * own[i] - level - (number(seen) - mean) * tilt));
      }
      *(Words*)(dx + start + (row + (k + j) * ROWS) * STEP) = closed(packs[j]);
    }
  }
}

#else

// With KEPT, what a block has read stays in shared memory, after the room for sums.
#ifdef KEPT
#define KEEP(which, at) (*(Pack*)((Number*)(memory + (WARPS + 3) / 4) + (which) * EACH + (at)))
#define SEEN(at) KEEP(0, at)
#define CUT 0
#else
#define SEEN(at) *(const Pack*)(x + start + (at))
#define CUT relu
#endif

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
          const Number* __restrict__ added, Number* __restrict__ y, float* __restrict__ means, float* __restrict__ scales, int images, int relu) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;
  const size_t start = (size_t)blockIdx.x * EACH, factor = own(images);
  float sum = 0.f;
#pragma unroll 4
  for (int at = threadIdx.x * V; at < EACH; at += THREADS * V) {
    const Pack pack = *(const Pack*)(x + start + at);
#ifdef KEPT
    KEEP(0, at) = pack;  // for the thread itself
#endif
#pragma unroll
    for (int i = 0; i < V; i++) sum += number(pack.of[i]);
  }
  const float mean = over_block(sum, room) / EACH;
  float squares = 0.f;
#pragma unroll 4
  for (int at = threadIdx.x * V; at < EACH; at += THREADS * V) {
    const Pack pack = SEEN(at);
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
    const float weight = __fmul_rn(w[factor + channel], scale), bias = b[factor + channel];
    Pack pack = SEEN(at);
#pragma unroll
    for (int i = 0; i < V; i++) pack.of[i] = kept(rectified(placed(pack.of[i], mean, weight, bias), relu));
    *(Pack*)(y + start + at) = pack;
  }
  if (threadIdx.x == 0) {
    means[blockIdx.x] = mean;
    scales[blockIdx.x] = scale;
  }
}

// dx, and each image's part of dw and db. Of neighbouring pixels a warp sums up one channel, then the next. The gradient
// may be some channels of larger images: `far` numbers from image to image, `apart` from channel to channel.
extern "C" __global__ void __launch_bounds__(THREADS)
gradients(const Number* __restrict__ gradient, const Number* __restrict__ x, const float* __restrict__ w,
          const float* __restrict__ means, const float* __restrict__ scales, const float* __restrict__ b,
          Number* __restrict__ dx, float* __restrict__ dw, float* __restrict__ db, const Number* __restrict__ second,
          const Number* __restrict__ cut, Number* __restrict__ masked, int images, int relu, int far, int apart) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;
  const size_t start = (size_t)blockIdx.x * EACH, factor = own(images);
  const float mean = means[blockIdx.x], scale = scales[blockIdx.x];
  gradient += (size_t)(blockIdx.x / PARTS) * far + blockIdx.x % PARTS * CHANNELS * (size_t)apart;
  float level = 0.f, tilt = 0.f;  // sums over the piece of the gradients, and of them times what was normalised
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int first = 0; first < CHANNELS; first += WARPS) {
    const int channel = first + warp;
    float plain = 0.f, times = 0.f;
    const float weight = channel < CHANNELS ? w[factor + channel] : 0.f, bias = channel < CHANNELS ? b[factor + channel] : 0.f;
    const float by = __fmul_rn(weight, scale);
    if (channel < CHANNELS)
      for (int pixel = lane * V; pixel < PIXELS; pixel += 32 * V) {
        const size_t at = start + channel * PIXELS + pixel;
        Pack given = *(const Pack*)(gradient + (size_t)channel * apart + pixel);
        const Pack seen = *(const Pack*)(x + at);
#pragma unroll
        for (int i = 0; i < V; i++) {
          given.of[i] = passed(given.of[i], seen.of[i], mean, by, bias, relu);
          plain += number(given.of[i]);
          times += number(given.of[i]) * (number(seen.of[i]) - mean);
        }
#ifdef KEPT
        KEEP(1, channel * PIXELS + pixel) = given;
        KEEP(0, channel * PIXELS + pixel) = seen;
#endif
      }
    plain = over_lanes<32>(plain);
    times = over_lanes<32>(times) * scale;
    if (lane == 0 && channel < CHANNELS) {
      const size_t to = (size_t)blockIdx.x * CHANNELS + channel;  // [g, image, channel]
      dw[to] = times;
      db[to] = plain;
      level += plain * weight;
      tilt += times * weight;
    }
  }
  level = over_block(level, room) / EACH;
  tilt = over_block(tilt, room) / EACH;
#pragma unroll 2
  for (int at = threadIdx.x * V; at < EACH; at += THREADS * V) {
    const size_t to = start + at;
    const float weight = w[factor + at / PIXELS], bias = b[factor + at / PIXELS], by = __fmul_rn(weight, scale);
#ifdef KEPT
    const Pack given = KEEP(1, at);  // 0 where ReLU cut it off
    Pack pack = KEEP(0, at);
#else
    const Pack given = *(const Pack*)(gradient + at / PIXELS * (size_t)apart + at % PIXELS);
    Pack pack = *(const Pack*)(x + to);
#endif
#pragma unroll
    for (int i = 0; i < V; i++) {
      const float standard = (number(pack.of[i]) - mean) * scale;
      const float slope = number(passed(given.of[i], pack.of[i], mean, by, bias, CUT));
      pack.of[i] = kept(scale * (slope * weight - level - standard * tilt));
    }
    *(Pack*)(dx + to) = pack;
  }
}

#endif

// out[which, g, channel] = the sum over images of parts[which, g, image, channel]: 32 channels of a block, whose warps
// take images in turn.
extern "C" __global__ void __launch_bounds__(THREADS)
totals(const float* __restrict__ parts, float* __restrict__ out, int images) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;  // [warp][32]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, channel = blockIdx.x * 32 + lane;
  parts += (size_t)blockIdx.y * images * C;
  float sum = 0.f;
  if (channel < C)
#pragma unroll 4
    for (int image = warp; image < images; image += WARPS) sum += parts[(size_t)image * C + channel];
  room[threadIdx.x] = sum;
  __syncthreads();
  if (warp || channel >= C) return;
  for (int other = 1; other < WARPS; other++) sum += room[other * 32 + lane];
  out[(size_t)blockIdx.y * C + channel] = sum;
}

// The sum of two gradients, 0 where images were cut off: of V numbers for each thread.
extern "C" __global__ void __launch_bounds__(THREADS)
masked_sum(const Number* __restrict__ gradient, const Number* __restrict__ second, const Number* __restrict__ cut,
           Number* __restrict__ out, int packs) {
  const int pack = blockIdx.x * THREADS + threadIdx.x;
  if (pack >= packs) return;
  const Pack one = ((const Pack*)gradient)[pack], two = ((const Pack*)second)[pack], seen = ((const Pack*)cut)[pack];
  Pack sum;
#pragma unroll
  for (int i = 0; i < V; i++)
    sum.of[i] = number(seen.of[i]) <= 0.f ? (Number)0 : kept(number(one.of[i]) + number(two.of[i]));
  ((Pack*)out)[pack] = sum;
}
