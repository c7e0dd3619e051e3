// Weights of a stack of clients, [g, o, c, tap] in single precision, into the orders in which kernels for channels last
// read them, as Numbers, and their gradients, Numbers too, back into the first. Each is one reading and one writing.
// Constants: THREADS; HALF where Numbers are bfloat16; ROUNDED where they are to be numbers of TF32, for products with
// others that are cut off to it: they are that much larger which those are less, on average. LAID, SHORT: below.

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

// to[g, c, tap, o], of each client a matrix with rows and columns exchanged. Where LAID, what
// is read is [g, o, tap, c], as Numbers where it is SHORT, and else [g, o, c, tap]. Where FLIPPED, the last tap is the first.
// A block has 64 o and 64 columns.
#if SHORT
typedef Number From;
#define READ(value) number(value)
#else
typedef float From;
#define READ(value) (value)
#endif
extern "C" __global__ void __launch_bounds__(THREADS)
turned(const From* __restrict__ w, Number* __restrict__ to, int O, int C, int taps) {
  extern __shared__ float4 memory[];
  float* room = (float*)memory;  // [64][65]
  const int first = blockIdx.x * 64, base = blockIdx.z * 64, columns = C * taps;
  w += (size_t)blockIdx.y * O * columns;
  to += (size_t)blockIdx.y * O * columns;
  struct alignas(2 * sizeof(From)) Pair { From one, other; };
#pragma unroll
  for (int i = threadIdx.x; i < 64 * 32; i += THREADS) {
    const int row = i / 32, col = i % 32 * 2;
    if (base + row >= O || first + col >= columns) continue;
    const Pair two = *(const Pair*)(w + (size_t)(base + row) * columns + first + col);
    room[row * 65 + col] = READ(two.one);
    room[row * 65 + col + 1] = READ(two.other);
  }
  __syncthreads();
  struct alignas(2 * sizeof(Number)) Two { Number one, other; };
#pragma unroll
  for (int i = threadIdx.x; i < 64 * 32; i += THREADS) {
    const int row = i % 32 * 2, col = i / 32, from = first + col;
    if (base + row >= O || from >= columns) continue;
    const int c = LAID ? from % C : from / taps, own = LAID ? from / C : from % taps, tap = FLIPPED ? taps - 1 - own : own;
    *(Two*)(to + ((size_t)c * taps + tap) * O + base + row) = {rounded(room[row * 65 + col]), rounded(room[(row + 1) * 65 + col])};
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

// out = y + factor * the sum over parts, which lie so far apart, in the order in which they lie; y may be one client's for
// all. With HALF a copy of it is made in bfloat16, in which parts are where they are SHORT.
extern "C" __global__ void __launch_bounds__(THREADS)
add_parts(double factor, const From* __restrict__ parts, int many, int apart, const float* __restrict__ y, int shared,
          float* __restrict__ out, Number* __restrict__ copy, int numbers) {
  const int at = (blockIdx.x * THREADS + threadIdx.x) * 8;
  if (at >= numbers) return;
  const size_t to = (size_t)blockIdx.y * numbers + at;
  struct alignas(16) Four { float of[4]; };
  struct alignas(16) Numbers { Number of[8]; };
  struct alignas(16) Eight { From of[8]; };
  float old[8];
  *(Four*)old = *(const Four*)(y + (shared ? at : to));
  *(Four*)(old + 4) = *(const Four*)(y + (shared ? at : to) + 4);
  float sums[8] = {};
#pragma unroll 4
  for (int part = 0; part < many; part++) {
    const Eight own = *(const Eight*)(parts + (size_t)part * apart + to);
#pragma unroll
    for (int i = 0; i < 8; i++) sums[i] += READ(own.of[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) old[i] += (float)factor * sums[i];
  *(Four*)(out + to) = *(const Four*)old;
  *(Four*)(out + to + 4) = *(const Four*)(old + 4);
#ifdef HALF
  Numbers near;
#pragma unroll
  for (int i = 0; i < 8; i++) near.of[i] = kept(old[i]);
  *(Numbers*)(copy + to) = near;
#endif
}
