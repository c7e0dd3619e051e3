// Dense layers of a stack of clients with small batches, in plain float32.
//
// With few examples such a layer is bound by reading, or writing, its weights once. Libraries make
// tiles for large batches, of which there are then too few to keep a GPU busy. Sums are taken in a fixed
// order. Constants: N (examples), IN, OUT (numbers an example has before and after), VEC (4, or 1 where
// IN is no multiple of it), THREADS, and ROWS (examples of a thread; of a weights' gradient 1, or N that it holds), LINES
// (outputs of a thread).

#include "common.cuh"

#if VEC == 4
typedef float4 Pack;
#else
typedef float Pack;
#endif

__device__ __forceinline__ void unpack(float* to, const float* from) { *(Pack*)to = *(const Pack*)from; }

#ifdef FORWARD

// y[g, n, o] = bias[g, o] + sum over i of x[g, n, i] * w[g, o, i]: a block makes LINES outputs of ROWS
// examples, and its warps share the sum. Weights lie `next` numbers apart from group to group, and `line` from output
// to output. With BIAS 0 there is none; with RELU it is cut off below 0, but for NaN.
extern "C" __global__ void __launch_bounds__(THREADS)
forward(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias,
        float* __restrict__ y, int stride, int next, int line) {
  extern __shared__ float4 memory[];
  float* shared = (float*)memory;               // [warp][ROWS][LINES]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = blockIdx.y, first = blockIdx.z * ROWS, low = blockIdx.x * LINES;
  x += (size_t)g * stride;
  w += (size_t)g * next;
  float sums[ROWS][LINES];
#pragma unroll
  for (int n = 0; n < ROWS; n++)
#pragma unroll
    for (int o = 0; o < LINES; o++) sums[n][o] = 0.f;
#pragma unroll 2
  for (int i = threadIdx.x * VEC; i < IN; i += THREADS * VEC) {
    alignas(16) float weights[LINES][VEC];
#pragma unroll
    for (int o = 0; o < LINES; o++) unpack(weights[o], w + (size_t)min(low + o, OUT - 1) * line + i);
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
      alignas(16) float seen[VEC];
      unpack(seen, x + (size_t)min(first + n, N - 1) * IN + i);
#pragma unroll
      for (int o = 0; o < LINES; o++)
#pragma unroll
        for (int v = 0; v < VEC; v++) sums[n][o] += weights[o][v] * seen[v];
    }
  }
#pragma unroll
  for (int n = 0; n < ROWS; n++)
#pragma unroll
    for (int o = 0; o < LINES; o++) {
      float sum = sums[n][o];
      sum = over_lanes<32>(sum);
      if (lane == (n * LINES + o) % 32) shared[(warp * ROWS + n) * LINES + o] = sum;
    }
  __syncthreads();
  for (int k = threadIdx.x; k < ROWS * LINES; k += THREADS) {
    const int n = first + k / LINES, o = low + k % LINES;
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < THREADS / 32; part++) sum += shared[part * ROWS * LINES + k];
    if (n < N && o < OUT) {
#if BIAS
      sum += bias[g * OUT + o];
#endif
#if RELU
      sum = sum < 0.f ? 0.f : sum;
#endif
      y[((size_t)g * N + n) * OUT + o] = sum;
    }
  }
}

#endif

#ifdef INPUT_GRADIENT

// out[g, n, i] = sum over o of gradient[g, n, o] * w[g, o, i]: a thread makes VEC numbers of ROWS examples, and LINES
// threads share the sum. With ADDED it is added to what was there before.
extern "C" __global__ void __launch_bounds__(THREADS)
input_gradient(const float* __restrict__ gradient, const float* __restrict__ w, float* __restrict__ out, int next,
               int line, const float* __restrict__ before) {
  extern __shared__ float4 memory[];
  float* gradients = (float*)memory;            // [OUT][ROWS]
  const int side = THREADS / LINES, part = threadIdx.x / side;
  const int g = blockIdx.y, first = blockIdx.z * ROWS, i = (blockIdx.x * side + threadIdx.x % side) * VEC;
  gradient += ((size_t)g * N + first) * OUT;
  for (int k = threadIdx.x; k < OUT * ROWS; k += THREADS) {
    const int n = k / OUT, o = k % OUT;
    gradients[o * ROWS + n] = first + n < N ? gradient[n * OUT + o] : 0.f;
  }
  __syncthreads();
  w += (size_t)g * next + min(i, IN - VEC);
  alignas(16) float sums[ROWS][VEC];
#pragma unroll
  for (int n = 0; n < ROWS; n++) {
#if ADDED && LINES == 1
    unpack(sums[n], before + ((size_t)g * N + min(first + n, N - 1)) * IN + min(i, IN - VEC));
#else
#pragma unroll
    for (int v = 0; v < VEC; v++) sums[n][v] = 0.f;
#endif
  }
#if LINES > 1
#pragma unroll 8
#else
#pragma unroll 4
#endif
  for (int o = part; o < OUT; o += LINES) {
    alignas(16) float weights[VEC];
    unpack(weights, w + (size_t)o * line);
#pragma unroll
    for (int n = 0; n < ROWS; n++)
#pragma unroll
      for (int v = 0; v < VEC; v++) sums[n][v] += gradients[o * ROWS + n] * weights[v];
  }
#if LINES > 1
  float* room = gradients + (OUT * ROWS + 3) / 4 * 4;  // [part][ROWS][side][VEC]
  __syncthreads();
#pragma unroll
  for (int n = 0; n < ROWS; n++)
    *(Pack*)(room + ((part * ROWS + n) * side + threadIdx.x % side) * VEC) = *(Pack*)sums[n];
  __syncthreads();
  for (int k = threadIdx.x; k < ROWS * side; k += THREADS) {
    const int n = k / side, at = (blockIdx.x * side + k % side) * VEC;
    if (first + n >= N || at >= IN) continue;
    alignas(16) float total[VEC];
#if ADDED
    unpack(total, before + ((size_t)g * N + first + n) * IN + at);
#else
#pragma unroll
    for (int v = 0; v < VEC; v++) total[v] = 0.f;
#endif
#pragma unroll
    for (int other = 0; other < LINES; other++)
#pragma unroll
      for (int v = 0; v < VEC; v++) total[v] += room[((other * ROWS + n) * side + k % side) * VEC + v];
    *(Pack*)(out + ((size_t)g * N + first + n) * IN + at) = *(Pack*)total;
  }
#else
  if (i >= IN) return;
#pragma unroll
  for (int n = 0; n < ROWS; n++)
    if (first + n < N) *(Pack*)(out + ((size_t)g * N + first + n) * IN + i) = *(Pack*)sums[n];
#endif
}

#endif

#if defined(WEIGHT_GRADIENT) && ROWS > 1

// The same as below, for ROWS = N examples: a thread holds VEC inputs of all of them and goes through LINES outputs, of
// which the next few weights are on their way while it computes.
#define AHEAD 4
#define PADDED ((N + 3) / 4 * 4)

extern "C" __global__ void __launch_bounds__(THREADS)
weight_gradient(const float* __restrict__ gradient, const float* __restrict__ x, float* __restrict__ dw,
                float* __restrict__ db, int stride, const float* __restrict__ w, int next) {
  extern __shared__ float4 memory[];
  float* gradients = (float*)memory;            // [LINES][PADDED]
  const int g = blockIdx.y, low = blockIdx.z * LINES, many = min(LINES, OUT - low);
  const int i = (blockIdx.x * THREADS + threadIdx.x) * VEC;
  x += (size_t)g * stride + min(i, IN - VEC);
  w += (size_t)g * next + (size_t)low * IN + min(i, IN - VEC);
  dw += ((size_t)g * OUT + low) * IN + i;
  gradient += (size_t)g * N * OUT + low;
  alignas(16) float before[AHEAD][VEC], seen[N][VEC];
#ifdef STEP
#pragma unroll
  for (int o = 0; o < AHEAD; o++) unpack(before[o], w + (size_t)min(o, many - 1) * IN);
#endif
#pragma unroll
  for (int n = 0; n < N; n++) unpack(seen[n], x + (size_t)n * IN);
  for (int k = threadIdx.x; k < many * N; k += THREADS) gradients[k % many * PADDED + k / many] = gradient[k / many * OUT + k % many];
  __syncthreads();
#ifndef STEP
  for (int o = threadIdx.x; blockIdx.x == 0 && o < many; o += THREADS) {
    float sum = 0.f;
    for (int n = 0; n < N; n++) sum += gradients[o * PADDED + n];
    db[g * OUT + low + o] = sum;
  }
#endif
  if (i >= IN) return;
#pragma unroll 1
  for (int o = 0; o < many; o += AHEAD) {
    alignas(16) float sums[AHEAD][VEC];
#pragma unroll
    for (int l = 0; l < AHEAD; l++) {
#ifdef STEP
#pragma unroll
      for (int v = 0; v < VEC; v++) sums[l][v] = before[l][v];
      unpack(before[l], w + (size_t)min(o + AHEAD + l, many - 1) * IN);
#else
#pragma unroll
      for (int v = 0; v < VEC; v++) sums[l][v] = 0.f;
#endif
    }
#pragma unroll
    for (int l = 0; l < AHEAD; l++) {
      if (o + l >= many) break;
      alignas(16) float pulls[PADDED];
#pragma unroll
      for (int n = 0; n < PADDED; n += 4) *(float4*)(pulls + n) = *(const float4*)(gradients + (o + l) * PADDED + n);
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int v = 0; v < VEC; v++) sums[l][v] += pulls[n] * seen[n][v];
      *(Pack*)(dw + (size_t)(o + l) * IN) = *(Pack*)sums[l];
    }
  }
}

#elif defined(WEIGHT_GRADIENT)

// dw[g, o, i] = sum over n of gradient[g, n, o] * x[g, n, i], and db[g, o] that of the gradients alone: a thread
// makes VEC numbers of LINES outputs. With STEP what is made is w[g, o, i] + that sum, and db is not.
extern "C" __global__ void __launch_bounds__(THREADS)
weight_gradient(const float* __restrict__ gradient, const float* __restrict__ x, float* __restrict__ dw,
                float* __restrict__ db, int stride, const float* __restrict__ w, int next) {
  extern __shared__ float4 memory[];
  float* gradients = (float*)memory;            // [N][LINES]
  const int g = blockIdx.y, low = blockIdx.z * LINES, i = (blockIdx.x * THREADS + threadIdx.x) * VEC;
  gradient += (size_t)g * N * OUT;
  for (int k = threadIdx.x; k < N * LINES; k += THREADS) {
    const int n = k / LINES, o = low + k % LINES;
    gradients[k] = o < OUT ? gradient[n * OUT + o] : 0.f;
  }
  __syncthreads();
#ifndef STEP
  if (blockIdx.x == 0 && threadIdx.x < LINES && low + threadIdx.x < OUT) {
    float sum = 0.f;
    for (int n = 0; n < N; n++) sum += gradients[n * LINES + threadIdx.x];
    db[g * OUT + low + threadIdx.x] = sum;
  }
#endif
  if (i >= IN) return;
#ifdef STEP                                     // asked for early: it takes longest to arrive
  alignas(16) float before[LINES][VEC];
#pragma unroll
  for (int o = 0; o < LINES; o++)
    unpack(before[o], w + (size_t)g * next + (size_t)min(low + o, OUT - 1) * IN + i);
#endif
  x += (size_t)g * stride + i;
  alignas(16) float sums[LINES][VEC];
#pragma unroll
  for (int o = 0; o < LINES; o++)
#pragma unroll
    for (int v = 0; v < VEC; v++) sums[o][v] = 0.f;
#pragma unroll 4
  for (int n = 0; n < N; n++) {
    alignas(16) float seen[VEC];
    unpack(seen, x + (size_t)n * IN);
#pragma unroll
    for (int o = 0; o < LINES; o++)
#pragma unroll
      for (int v = 0; v < VEC; v++) sums[o][v] += gradients[n * LINES + o] * seen[v];
  }
#ifdef STEP
#pragma unroll
  for (int o = 0; o < LINES; o++)
#pragma unroll
    for (int v = 0; v < VEC; v++) sums[o][v] += before[o][v];
#endif
#pragma unroll
  for (int o = 0; o < LINES; o++)
    if (low + o < OUT) *(Pack*)(dw + ((size_t)g * OUT + low + o) * IN + i) = *(Pack*)sums[o];
}

#endif
