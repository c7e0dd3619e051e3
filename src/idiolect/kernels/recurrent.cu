// The gates of recurrent layers of a stack of clients, one place of a sequence at a time: what is left between
// two products. A thread has one unit of one example. Tensors are [g, example, ...] without gaps within a client;
// after them come the strides from client to client, in the same order. Constants: REAL (float or double),
// N (examples), H (units), THREADS, CELLED (whether somebody asks for the gradient by the cells).

typedef REAL Real;

#define UNIT                                                                            \
  const int at = blockIdx.x * THREADS + threadIdx.x, n = at / H, u = at % H;            \
  const size_t g = blockIdx.y;                                                          \
  if (n >= N) return;

__device__ __forceinline__ Real squash(Real x) { return (Real)1 / ((Real)1 + (Real)exp((Real)-x)); }

// What came again is in `total` already, with what enters, but for GRU.

extern "C" __global__ void __launch_bounds__(THREADS)
tanh_forward(const Real* total, const Real* ahead, const Real* before, const Real* cell, Real* h,
                  int total_s, int ahead_s, int before_s, int cell_s, int h_s) {
  UNIT
  h[g * h_s + at] = (Real)tanh(total[g * total_s + at]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
relu_forward(const Real* total, const Real* ahead, const Real* before, const Real* cell, Real* h,
                  int total_s, int ahead_s, int before_s, int cell_s, int h_s) {
  UNIT
  const Real value = total[g * total_s + at];
  h[g * h_s + at] = value < (Real)0 ? (Real)0 : value;  // what is no number stays so
}

extern "C" __global__ void __launch_bounds__(THREADS)
lstm_forward(const Real* total, const Real* ahead, const Real* before, const Real* cell, Real* h, Real* cells,
                  Real* gates, int total_s, int ahead_s, int before_s, int cell_s, int h_s, int cells_s, int gates_s) {
  UNIT
  const Real* sums = total + g * total_s + (size_t)n * 4 * H + u;
  const Real enter = squash(sums[0]), forget = squash(sums[H]), fresh = (Real)tanh(sums[2 * H]), out = squash(sums[3 * H]);
  const Real now = forget * cell[g * cell_s + at] + enter * fresh;
  Real* to = gates + g * gates_s + (size_t)n * 4 * H + u;
  to[0] = enter; to[H] = forget; to[2 * H] = fresh; to[3 * H] = out;
  cells[g * cells_s + at] = now;
  h[g * h_s + at] = out * (Real)tanh(now);
}

// `cell` is the bias within the product.
extern "C" __global__ void __launch_bounds__(THREADS)
gru_forward(const Real* total, const Real* ahead, const Real* before, const Real* cell, Real* h, Real* gates,
                 int total_s, int ahead_s, int before_s, int cell_s, int h_s, int gates_s) {
  UNIT
  const Real* again = total + g * total_s + (size_t)n * 3 * H + u;
  const Real* entered = ahead + g * ahead_s + (size_t)n * 3 * H + u;
  const Real reset = squash(entered[0] + again[0]), keep = squash(entered[H] + again[H]);
  const Real inner = again[2 * H] + cell[g * cell_s + u];
  const Real fresh = (Real)tanh(entered[2 * H] + reset * inner);
  Real* to = gates + g * gates_s + (size_t)n * 4 * H + u;
  to[0] = reset; to[H] = keep; to[2 * H] = fresh; to[3 * H] = inner;
  h[g * h_s + at] = fresh + keep * (before[g * before_s + at] - fresh);
}

// Backwards: `given` is the gradient by this place's output, `later` that through all places after it.

extern "C" __global__ void __launch_bounds__(THREADS)
tanh_gradient(const Real* given, const Real* later, const Real* before, const Real* h, Real* entered, Real* passed,
                   int given_s, int later_s, int before_s, int h_s, int entered_s, int passed_s) {
  UNIT
  const Real y = h[g * h_s + at];
  entered[g * entered_s + at] = (given[g * given_s + at] + later[g * later_s + at]) * ((Real)1 - y * y);
}

extern "C" __global__ void __launch_bounds__(THREADS)
relu_gradient(const Real* given, const Real* later, const Real* before, const Real* h, Real* entered, Real* passed,
                   int given_s, int later_s, int before_s, int h_s, int entered_s, int passed_s) {
  UNIT
  const Real total = given[g * given_s + at] + later[g * later_s + at];
  entered[g * entered_s + at] = h[g * h_s + at] > (Real)0 ? total : (Real)0;
}

extern "C" __global__ void __launch_bounds__(THREADS)
lstm_gradient(const Real* given, const Real* later, const Real* before, const Real* h, Real* entered, Real* passed,
                   const Real* by_cells, Real* by_cell, const Real* cells, const Real* cell, const Real* gates,
                   int given_s, int later_s, int before_s, int h_s, int entered_s, int passed_s, int by_cells_s,
                   int by_cell_s, int cells_s, int cell_s, int gates_s) {
  UNIT
  const Real* opened = gates + g * gates_s + (size_t)n * 4 * H + u;
  const Real enter = opened[0], forget = opened[H], fresh = opened[2 * H], out = opened[3 * H];
  const Real by_h = given[g * given_s + at] + later[g * later_s + at], bent = (Real)tanh(cells[g * cells_s + at]);
  Real down = by_cell[g * by_cell_s + at] + by_h * out * ((Real)1 - bent * bent);
#if CELLED
  down += by_cells[g * by_cells_s + at];
#endif
  Real* to = entered + g * entered_s + (size_t)n * 4 * H + u;
  to[0] = down * fresh * enter * ((Real)1 - enter);
  to[H] = down * cell[g * cell_s + at] * forget * ((Real)1 - forget);
  to[2 * H] = down * enter * ((Real)1 - fresh * fresh);
  to[3 * H] = by_h * bent * out * ((Real)1 - out);
  by_cell[g * by_cell_s + at] = down * forget;
}

extern "C" __global__ void __launch_bounds__(THREADS)
gru_gradient(const Real* given, const Real* later, const Real* before, const Real* h, Real* entered, Real* passed,
                  Real* again, const Real* gates, int given_s, int later_s, int before_s, int h_s, int entered_s,
                  int passed_s, int again_s, int gates_s) {
  UNIT
  const Real* opened = gates + g * gates_s + (size_t)n * 4 * H + u;
  const Real reset = opened[0], keep = opened[H], fresh = opened[2 * H], inner = opened[3 * H];
  const Real by_h = given[g * given_s + at] + later[g * later_s + at];
  const Real by_fresh = by_h * ((Real)1 - keep) * ((Real)1 - fresh * fresh);
  const Real by_reset = by_fresh * inner * reset * ((Real)1 - reset);
  const Real by_keep = by_h * (before[g * before_s + at] - fresh) * keep * ((Real)1 - keep);
  Real* to = entered + g * entered_s + (size_t)n * 3 * H + u;
  to[0] = by_reset; to[H] = by_keep; to[2 * H] = by_fresh;
  Real* back = again + g * again_s + (size_t)n * 3 * H + u;
  back[0] = by_reset; back[H] = by_keep; back[2 * H] = by_fresh * reset;
  passed[g * passed_s + at] = by_h * keep;
}
