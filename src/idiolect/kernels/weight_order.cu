// Weights of a stack of clients, [g, o, c, tap] in single precision, into the orders in which kernels for channels last
// read them, as Numbers, and their gradients, Numbers too, back into the first. Each is one reading and one writing.
// Constants: THREADS; HALF where Numbers are bfloat16; ROUNDED where they are to be numbers of TF32, for products with
// others that are cut off to it: they are that much larger which those are less, on average.

#include "common.cuh"

__device__ __forceinline__ Number rounded(float value) {
#if ROUNDED
  return __uint_as_float(nudged(__uint_as_float(nudged(value))) & 0xffffe000u);
#else
  return kept(value);
#endif
}

// to[g, o, tap, c], with `wide` channels, of which those from C on are 0. A block has an o.
extern "C" __global__ void __launch_bounds__(THREADS)
by_taps(const float* __restrict__ w, Number* __restrict__ to, int C, int taps, int wide) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;  // [c][tap]
  w += (size_t)blockIdx.x * C * taps;
  to += (size_t)blockIdx.x * wide * taps;
#pragma unroll 4
  for (int i = threadIdx.x; i < C * taps; i += THREADS) room[i] = w[i];
  __syncthreads();
  struct alignas(2 * sizeof(Number)) Two { Number one, other; };
  int tap = threadIdx.x * 2 / wide, c = threadIdx.x * 2 % wide;
  for (int i = threadIdx.x * 2; i < wide * taps; i += THREADS * 2) {
    *(Two*)(to + i) = {rounded(c < C ? room[c * taps + tap] : 0.f), rounded(c + 1 < C ? room[(c + 1) * taps + tap] : 0.f)};
    for (c += THREADS * 2; c >= wide; c -= wide) tap++;
  }
}

// to[g, c, tap, o]: of each client a matrix with rows and columns exchanged. A block has 64 o and 32 columns.
extern "C" __global__ void __launch_bounds__(THREADS)
turned(const float* __restrict__ w, Number* __restrict__ to, int O, int columns) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;  // [64][33]
  const int first = blockIdx.x * 32, base = blockIdx.z * 64;
  w += (size_t)blockIdx.y * O * columns;
  to += (size_t)blockIdx.y * O * columns;
#pragma unroll
  for (int i = threadIdx.x; i < 64 * 32; i += THREADS) {
    const int row = i / 32, col = i % 32;
    if (base + row < O && first + col < columns) room[row * 33 + col] = w[(size_t)(base + row) * columns + first + col];
  }
  __syncthreads();
  struct alignas(2 * sizeof(Number)) Two { Number one, other; };
#pragma unroll
  for (int i = threadIdx.x; i < 32 * 32; i += THREADS) {
    const int row = i % 32 * 2, col = i / 32;
    if (base + row < O && first + col < columns)
      *(Two*)(to + (size_t)(first + col) * O + base + row) = {rounded(room[row * 33 + col]), rounded(room[(row + 1) * 33 + col])};
  }
}

// dw[g, o, c, tap] = the sum over parts of [part, g, o, tap, c], with `wide` channels. A block has an o.
extern "C" __global__ void __launch_bounds__(THREADS)
put_back(const Number* __restrict__ parts, float* __restrict__ dw, int many, int C, int taps, int wide) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;  // [tap][wide + 1]
  const size_t step = (size_t)gridDim.x * wide * taps;
  parts += (size_t)blockIdx.x * wide * taps;
  dw += (size_t)blockIdx.x * C * taps;
  int tap = threadIdx.x / wide, c = threadIdx.x % wide;
#pragma unroll 4
  for (int i = threadIdx.x; i < wide * taps; i += THREADS) {
    float sum = number(parts[i]);
    for (int part = 1; part < many; part++) sum += number(parts[part * step + i]);
    room[tap * (wide + 1) + c] = sum;
    for (c += THREADS; c >= wide; c -= wide) tap++;
  }
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < C * taps; i += THREADS) dw[i] = room[i % taps * (wide + 1) + i / taps];
}
