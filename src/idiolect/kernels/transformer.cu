// What transformers do between their products, in one pass each: rotary positions and gated units.

#include "numbers.cuh"

// out = x with each pair (n, n + half) of [row, head, number] turned by its place's angle.
#ifdef TURN
extern "C" __global__ void __launch_bounds__(THREADS)
turn(const REAL* __restrict__ x, const WIDE* __restrict__ cosine, const WIDE* __restrict__ sine,
     REAL* __restrict__ out, int quads) {
  const long long quad = (long long)blockIdx.x * THREADS + threadIdx.x;
  if (quad >= quads) return;
  const int n = quad % (HALF_WIDTH / 4) * 4;
  const long long head = quad / (HALF_WIDTH / 4);
  const size_t first = head * 2 * HALF_WIDTH + n;
  const size_t angle = (size_t)(head / HEADS % PLACES) * HALF_WIDTH + n;
  const Four left = *(const Four*)(x + first), right = *(const Four*)(x + first + HALF_WIDTH);
  Four a, b;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const WIDE c = cosine[angle + i], s = SIGN * sine[angle + i];
    const WIDE l = wide(left.at[i]), r = wide(right.at[i]);
    a.at[i] = narrow(l * c - r * s);
    b.at[i] = narrow(r * c + l * s);
  }
  *(Four*)(out + first) = a;
  *(Four*)(out + first + HALF_WIDTH) = b;
}
#endif

// out = silu(gate) * up.
#ifdef GATE
extern "C" __global__ void __launch_bounds__(THREADS)
gated(const REAL* __restrict__ gate, const REAL* __restrict__ up, REAL* __restrict__ out,
      int quads) {
  const long long quad = (long long)blockIdx.x * THREADS + threadIdx.x;
  if (quad >= quads) return;
  const Four g = ((const Four*)gate)[quad], u = ((const Four*)up)[quad];
  Four y;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const WIDE x = wide(g.at[i]);
    y.at[i] = narrow(x / (1 + exp(-x)) * wide(u.at[i]));
  }
  ((Four*)out)[quad] = y;
}

// Its gradients by gate and up, given the one by its output.
extern "C" __global__ void __launch_bounds__(THREADS)
gated_gradient(const REAL* __restrict__ dy, const REAL* __restrict__ gate,
               const REAL* __restrict__ up, REAL* __restrict__ dgate, REAL* __restrict__ dup,
               int quads) {
  const long long quad = (long long)blockIdx.x * THREADS + threadIdx.x;
  if (quad >= quads) return;
  const Four d = ((const Four*)dy)[quad], g = ((const Four*)gate)[quad], u = ((const Four*)up)[quad];
  Four dg, du;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const WIDE x = wide(g.at[i]), y = wide(d.at[i]), open = 1 / (1 + exp(-x));
    dg.at[i] = narrow(y * wide(u.at[i]) * open * (1 + x * (1 - open)));
    du.at[i] = narrow(y * x * open);
  }
  ((Four*)dgate)[quad] = dg;
  ((Four*)dup)[quad] = du;
}
#endif
