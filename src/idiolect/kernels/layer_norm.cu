// Layer normalisation of short rows [g, row, number]: LANES threads take a row, four numbers at a time, and keep it in
// registers. Sums are taken in a fixed order. Constants: WIDTH (numbers of a row, a multiple of 4), LANES (of a warp, a
// power of 2), EPS, THREADS, REAL.

#include "common.cuh"

#define QUADS ((WIDTH / 4 + LANES - 1) / LANES)  // fours of a thread
#define SIDE (THREADS / LANES)                   // rows of a block at a time
struct alignas(16) Wide { WIDE at[4]; };

// The thread's numbers of a row, less a mean, and 0 beyond the row's end.
__device__ __forceinline__ void read(WIDE (*to)[4], const Number* from, int lane) {
#pragma unroll
  for (int j = 0; j < QUADS; j++) {
    const int quad = lane + j * LANES;
    const bool inside = quad < WIDTH / 4;
    const Four four = *(const Four*)(from + (inside ? quad : 0) * 4);
#pragma unroll
    for (int i = 0; i < 4; i++) to[j][i] = inside ? number(four.at[i]) : 0;
  }
}

#ifdef FORWARD

extern "C" __global__ void __launch_bounds__(THREADS)
normalise(const Number* __restrict__ x, const WIDE* __restrict__ w, const WIDE* __restrict__ b, WIDE* __restrict__ y,
          WIDE* __restrict__ means, WIDE* __restrict__ scales, int rows) {
  const int lane = threadIdx.x % LANES, row = blockIdx.x * SIDE + threadIdx.x / LANES;
  const size_t at = (size_t)blockIdx.y * rows + min(row, rows - 1);
  WIDE own[QUADS][4], sum = 0, squares = 0;
  read(own, x + at * WIDTH, lane);
#pragma unroll
  for (int j = 0; j < QUADS; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) sum += own[j][i];
  const WIDE mean = over_lanes<LANES>(sum) / WIDTH;
#pragma unroll
  for (int j = 0; j < QUADS; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      own[j][i] -= mean;
      squares += lane + j * LANES < WIDTH / 4 ? own[j][i] * own[j][i] : 0;
    }
  const WIDE scale = 1 / sqrt(over_lanes<LANES>(squares) / WIDTH + (WIDE)EPS);
  if (row >= rows) return;
#pragma unroll
  for (int j = 0; j < QUADS; j++) {
    const int quad = lane + j * LANES;
    if (quad >= WIDTH / 4) break;
    const Wide factor = *(const Wide*)(w + (size_t)blockIdx.y * WIDTH + quad * 4);
    const Wide shift = *(const Wide*)(b + (size_t)blockIdx.y * WIDTH + quad * 4);
    Wide made;
#pragma unroll
    for (int i = 0; i < 4; i++) made.at[i] = own[j][i] * scale * factor.at[i] + shift.at[i];
    *(Wide*)(y + at * WIDTH + quad * 4) = made;
  }
  if (lane == 0) {
    means[at] = mean;
    scales[at] = scale;
  }
}

#else

// dx, and out[0, part, g] and out[1, part, g], the gradients by factors and shifts over the part's rows.
extern "C" __global__ void __launch_bounds__(THREADS)
gradients(const WIDE* __restrict__ gradient, const Number* __restrict__ x, const WIDE* __restrict__ w,
          const WIDE* __restrict__ means, const WIDE* __restrict__ scales, Number* __restrict__ dx,
          WIDE* __restrict__ out, int rows, int each) {
  extern __shared__ float4 memory[];
  WIDE* room = (WIDE*)memory;                    // [SIDE][WIDTH]
  const int lane = threadIdx.x % LANES, side = threadIdx.x / LANES, g = blockIdx.y;
  const int first = blockIdx.x * each, last = min(rows, first + each);
  WIDE factor[QUADS][4], by_factor[QUADS][4], by_shift[QUADS][4];
#pragma unroll
  for (int j = 0; j < QUADS; j++) {
    const int quad = lane + j * LANES;
    const bool inside = quad < WIDTH / 4;
    const Wide four = *(const Wide*)(w + (size_t)g * WIDTH + (inside ? quad : 0) * 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      factor[j][i] = inside ? four.at[i] : 0;
      by_factor[j][i] = by_shift[j][i] = 0;
    }
  }
  for (int start = first; start < last; start += SIDE) {
    const bool ours = start + side < last;
    const size_t at = (size_t)g * rows + min(start + side, last - 1);
    const WIDE mean = means[at], scale = scales[at];
    WIDE own[QUADS][4], given[QUADS][4], level = 0, tilt = 0;
    read(own, x + at * WIDTH, lane);
#pragma unroll
    for (int j = 0; j < QUADS; j++) {
      const int quad = lane + j * LANES;
      const Wide four = *(const Wide*)(gradient + at * WIDTH + (quad < WIDTH / 4 ? quad : 0) * 4);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        own[j][i] = (own[j][i] - mean) * scale;
        given[j][i] = four.at[i] * factor[j][i];
        by_factor[j][i] += ours ? four.at[i] * own[j][i] : 0;
        by_shift[j][i] += ours ? four.at[i] : 0;
        level += given[j][i];
        tilt += given[j][i] * own[j][i];
      }
    }
    level = over_lanes<LANES>(level) / WIDTH;
    tilt = over_lanes<LANES>(tilt) / WIDTH;
#pragma unroll
    for (int j = 0; j < QUADS; j++) {
      const int quad = lane + j * LANES;
      Four made;
#pragma unroll
      for (int i = 0; i < 4; i++) made.at[i] = kept(scale * (given[j][i] - level - own[j][i] * tilt));
      if (ours && quad < WIDTH / 4) *(Four*)(dx + at * WIDTH + quad * 4) = made;
    }
  }
#pragma unroll
  for (int which = 0; which < 2; which++) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < QUADS; j++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (lane + j * LANES < WIDTH / 4)
          room[side * WIDTH + (lane + j * LANES) * 4 + i] = which ? by_shift[j][i] : by_factor[j][i];
    __syncthreads();
    for (int n = threadIdx.x; n < WIDTH; n += THREADS) {
      WIDE sum = 0;
      for (int k = 0; k < SIDE; k++) sum += room[k * WIDTH + n];
      out[(((size_t)which * gridDim.x + blockIdx.x) * gridDim.y + g) * WIDTH + n] = sum;
    }
  }
}

#endif
