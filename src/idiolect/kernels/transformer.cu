// What transformers do between their products, in one pass each: rotary positions and gated units.

#include "common.cuh"

// out = x with each pair (n, n + half) of [row, head, number] turned by its place's angle.
#ifdef TURN
extern "C" __global__ void __launch_bounds__(THREADS)
turn(const Number* __restrict__ x, const WIDE* __restrict__ cosine, const WIDE* __restrict__ sine,
     Number* __restrict__ out, int quads) {
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
    const WIDE l = number(left.at[i]), r = number(right.at[i]);
    a.at[i] = kept(l * c - r * s);
    b.at[i] = kept(r * c + l * s);
  }
  *(Four*)(out + first) = a;
  *(Four*)(out + first + HALF_WIDTH) = b;
}
#endif

// out = silu(gate) * up.
#ifdef GATE
extern "C" __global__ void __launch_bounds__(THREADS)
gated(const Number* __restrict__ gate, const Number* __restrict__ up, Number* __restrict__ out,
      int quads) {
  const long long quad = (long long)blockIdx.x * THREADS + threadIdx.x;
  if (quad >= quads) return;
  const Four g = ((const Four*)gate)[quad], u = ((const Four*)up)[quad];
  Four y;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const WIDE x = number(g.at[i]);
    y.at[i] = kept(x / (1 + exp(-x)) * number(u.at[i]));
  }
  ((Four*)out)[quad] = y;
}

// Its gradients by gate and up, given the one by its output.
extern "C" __global__ void __launch_bounds__(THREADS)
gated_gradient(const Number* __restrict__ dy, const Number* __restrict__ gate,
               const Number* __restrict__ up, Number* __restrict__ dgate, Number* __restrict__ dup,
               int quads) {
  const long long quad = (long long)blockIdx.x * THREADS + threadIdx.x;
  if (quad >= quads) return;
  const Four d = ((const Four*)dy)[quad], g = ((const Four*)gate)[quad], u = ((const Four*)up)[quad];
  Four dg, du;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const WIDE x = number(g.at[i]), y = number(d.at[i]), open = 1 / (1 + exp(-x));
    dg.at[i] = kept(y * number(u.at[i]) * open * (1 + x * (1 - open)));
    du.at[i] = kept(y * x * open);
  }
  ((Four*)dgate)[quad] = dg;
  ((Four*)dup)[quad] = du;
}
#endif
