// What is done to all leaves of a tree, or to all logits of a batch, in one launch for all clients.
//
// A stack of small networks is bound by how many kernels are started, not by what they do. Sizes of
// leaves are arguments; how many there are, and the type of numbers, are constants of the
// compilation: REAL, LEAVES (their parameters), EACH (TRY(0) TRY(1) ...), THREADS. Sums are taken in a
// fixed order.

#include "common.cuh"

#define SPAN (4 * THREADS)  // numbers of a leaf in a block
#define PACK (16 / (int)sizeof(REAL))
struct alignas(16) Pack { REAL value[PACK]; };

#ifdef STEP

// y + factor * x of a leaf, in which x is a sum of terms that lie so far apart. Where PULLED, pull * (p - q) is added to x.
template <bool PULLED>
__device__ __forceinline__ void add_terms(REAL factor, const REAL* x, int terms, int apart, const REAL* y, REAL* o,
                                          REAL pull, const REAL* p, const REAL* q, int numbers, int block) {
  const int start = block * SPAN, end = min(numbers, start + SPAN);
  if (end - start == SPAN && (((size_t)x | (size_t)y | (size_t)o | (size_t)p | (size_t)q) & 15) == 0 &&
      apart % PACK == 0) {
#pragma unroll
    for (int at = start + threadIdx.x * PACK; at < end; at += THREADS * PACK) {
      const Pack before = *(const Pack*)(y + at);
      Pack sum = *(const Pack*)(x + at);
#pragma unroll 8
      for (int k = 1; k < terms; k++) {
        const Pack term = *(const Pack*)(x + (size_t)k * apart + at);
#pragma unroll
        for (int j = 0; j < PACK; j++) sum.value[j] += term.value[j];
      }
      if (PULLED) {
        const Pack here = *(const Pack*)(p + at), there = *(const Pack*)(q + at);
#pragma unroll
        for (int j = 0; j < PACK; j++) sum.value[j] += pull * (here.value[j] - there.value[j]);
      }
#pragma unroll
      for (int j = 0; j < PACK; j++) sum.value[j] = before.value[j] + factor * sum.value[j];
      *(Pack*)(o + at) = sum;
    }
    return;
  }
  for (int at = start + threadIdx.x; at < end; at += THREADS) {
    REAL sum = x[at];
#pragma unroll 8
    for (int k = 1; k < terms; k++) sum += x[(size_t)k * apart + at];
    if (PULLED) sum += pull * (p[at] - q[at]);
    o[at] = y[at] + factor * sum;
  }
}

// y + factor * x of a leaf [OUT][IN], in which x is the sum over examples of products of their numbers g [OUT] and
// z [IN]. A thread makes LINES lines of a few numbers.
template <bool PULLED, int EXAMPLES, int IN, int OUT, int LINES>
__device__ __forceinline__ void add_products(REAL factor, const REAL* g, const REAL* z, const REAL* y, REAL* o,
                                             REAL pull, const REAL* p, const REAL* q, int block) {
  constexpr int SIDE = IN % PACK == 0 ? PACK : 1;
  const int tile = block * THREADS + threadIdx.x;
  const int low = tile / (IN / SIDE) * LINES, i = tile % (IN / SIDE) * SIDE;
  if (low >= OUT) return;
  struct alignas(sizeof(REAL) * SIDE) Few { REAL value[SIDE]; };
  Few before[LINES], sums[LINES];
#pragma unroll
  for (int l = 0; l < LINES; l++) {
    before[l] = *(const Few*)(y + (size_t)min(low + l, OUT - 1) * IN + i);
#pragma unroll
    for (int j = 0; j < SIDE; j++) sums[l].value[j] = 0;
  }
#pragma unroll 5
  for (int n = 0; n < EXAMPLES; n++) {
    const Few seen = *(const Few*)(z + n * IN + i);
#pragma unroll
    for (int l = 0; l < LINES; l++) {
      const REAL pull = g[n * OUT + min(low + l, OUT - 1)];
#pragma unroll
      for (int j = 0; j < SIDE; j++) sums[l].value[j] += pull * seen.value[j];
    }
  }
#pragma unroll
  for (int l = 0; l < LINES; l++) {
    if (low + l >= OUT) break;
    if (PULLED) {
      const Few here = *(const Few*)(p + (size_t)(low + l) * IN + i), there = *(const Few*)(q + (size_t)(low + l) * IN + i);
#pragma unroll
      for (int j = 0; j < SIDE; j++) sums[l].value[j] += pull * (here.value[j] - there.value[j]);
    }
#pragma unroll
    for (int j = 0; j < SIDE; j++) sums[l].value[j] = before[l].value[j] + factor * sums[l].value[j];
    *(Few*)(o + (size_t)(low + l) * IN + i) = sums[l];
  }
}

// The step of all leaves. Leaf i has m##i blocks a client and n##i numbers; its steps from client to client are a##i
// (x##i), c##i (z##i), b##i (y##i), d##i (p##i) and e##i (q##i), 0 where all clients share a row.
extern "C" __global__ void __launch_bounds__(THREADS)
add_leaves(double by, LEAVES) {
  const int client = blockIdx.y;
  const REAL factor = (REAL)by;
  int block = blockIdx.x;
#define OWN(i, pulled)                                                                                           \
  y##i + (size_t)client * b##i, o##i + (size_t)client * n##i, pulled ? 2 * t##i[client] : (REAL)0,               \
      p##i + (size_t)client * d##i, q##i + (size_t)client * e##i
#define TERMS(i, pulled)                                                                                         \
  if (block >= 0 && block < m##i)                                                                                \
    return add_terms<pulled>(factor, x##i + (size_t)client * a##i, k##i, s##i, OWN(i, pulled), n##i, block);     \
  block -= m##i;
#define PRODUCTS(i, pulled, examples, in, out, lines)                                                            \
  if (block >= 0 && block < m##i)                                                                                \
    return add_products<pulled, examples, in, out, lines>(factor, x##i + (size_t)client * a##i,                  \
                                                          z##i + (size_t)client * c##i, OWN(i, pulled), block);  \
  block -= m##i;
  EACH
}

#endif

#if defined(GAP) || defined(CHOICE)

#ifdef GAP       // factor * scales[client] * (x - y)
#define MADE(x, y) (scale * ((x) - (y)))
#else            // x where keep[client], else y
#define MADE(x, y) (kept ? (x) : (y))
#endif

// Leaf i is x##i, y##i -> o##i with n##i numbers a client; a leaf that all clients share has only one
// row, and its step from client to client (a##i, b##i) is 0.
extern "C" __global__ void __launch_bounds__(THREADS)
mix(double factor, const REAL* __restrict__ scales, const unsigned char* __restrict__ keep, LEAVES) {
  const int client = blockIdx.y;
  int block = blockIdx.x;
#ifdef GAP
  const REAL scale = (REAL)factor * scales[client];
#endif
#ifdef CHOICE
  const bool kept = keep[client];
#endif
#define TRY(i)                                                                     \
  if (block >= 0 && block < (n##i + SPAN - 1) / SPAN) {                            \
    const REAL* x = x##i + (size_t)client * a##i;                                  \
    const REAL* y = y##i + (size_t)client * b##i;                                  \
    REAL* o = o##i + (size_t)client * n##i;                                        \
    const int start = block * SPAN, end = min(n##i, start + SPAN);                 \
    if (end - start == SPAN && (((size_t)x | (size_t)y | (size_t)o) & 15) == 0) {  \
      _Pragma("unroll") for (int at = start + threadIdx.x * PACK; at < end; at += THREADS * PACK) { \
        const Pack left = *(const Pack*)(x + at), right = *(const Pack*)(y + at);  \
        Pack made;                                                                 \
        _Pragma("unroll") for (int j = 0; j < PACK; j++)                           \
          made.value[j] = MADE(left.value[j], right.value[j]);                     \
        *(Pack*)(o + at) = made;                                                   \
      }                                                                            \
    } else {                                                                       \
      for (int at = start + threadIdx.x; at < end; at += THREADS) o[at] = MADE(x[at], y[at]); \
    }                                                                              \
    return;                                                                        \
  }                                                                                \
  block -= (n##i + SPAN - 1) / SPAN;
  EACH
#undef TRY
}

#endif

#if defined(DISTANCE) || defined(LOSS)

// The sum over a block's threads, in a fixed order, for thread 0.
__device__ __forceinline__ REAL over_block(REAL value, REAL* room) {
  value = over_lanes<32>(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
  __syncthreads();
  REAL total = 0;
  if (threadIdx.x == 0)
    for (int warp = 0; warp < THREADS / 32; warp++) total += room[warp];
  return total;
}

#endif

#ifdef DISTANCE

// out[client] = the sum of (x - y)^2 over all leaves.
extern "C" __global__ void __launch_bounds__(THREADS)
distance(REAL* __restrict__ out, LEAVES) {
  extern __shared__ float4 memory[];
  const int client = blockIdx.x;
  REAL sum = 0;
#define TRY(i)                                                    \
  {                                                               \
    const REAL* x = x##i + (size_t)client * a##i;                 \
    const REAL* y = y##i + (size_t)client * b##i;                 \
    _Pragma("unroll 4") for (int at = threadIdx.x; at < n##i; at += THREADS) { \
      const REAL gap = x[at] - y[at];                             \
      sum += gap * gap;                                           \
    }                                                             \
  }
  EACH
#undef TRY
  sum = over_block(sum, (REAL*)memory);
  if (threadIdx.x == 0) out[client] = sum;
}

#endif

#ifdef LOSS

__device__ __forceinline__ REAL most_of_warp(REAL value) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) {
    const REAL other = __shfl_xor_sync(0xffffffffu, value, mask);
    value = other > value || isnan(other) ? other : value;
  }
  return value;
}

// Of one row of logits, by a warp: the largest, and the sum of exp(logit - largest).
__device__ __forceinline__ void tops(const REAL* row, int classes, REAL* largest, REAL* sum) {
  REAL most = row[0], total = 0;
  for (int k = threadIdx.x % 32; k < classes; k += 32) {
    const REAL logit = row[k];
    most = logit > most || isnan(logit) ? logit : most;
  }
  most = most_of_warp(most);
  if (isinf(most)) most = 0;                    // as torch's logsumexp does
  for (int k = threadIdx.x % 32; k < classes; k += 32) total += exp(row[k] - most);
  *largest = most;
  *sum = over_lanes<32>(total);
}

// out[client] = the mean cross-entropy of its rows, weighted; 0 where the weights are.
extern "C" __global__ void __launch_bounds__(THREADS)
loss(const REAL* __restrict__ logits, const long long* __restrict__ labels, int next_labels,
     const REAL* __restrict__ weight, int next_weight, REAL* __restrict__ out, int rows, int classes) {
  extern __shared__ float4 memory[];
  const int client = blockIdx.x;
  logits += (size_t)client * rows * classes;
  labels += (size_t)client * next_labels;
  weight += (size_t)client * next_weight;
  REAL sum = 0, count = 0;
  for (int row = threadIdx.x / 32; row < rows; row += THREADS / 32) {
    REAL most, total;
    tops(logits + (size_t)row * classes, classes, &most, &total);
    if (threadIdx.x % 32 == 0) {
      const REAL right = logits[(size_t)row * classes + labels[row]];
      sum += (most + log(total) - right) * weight[row];
      count += weight[row];
    }
  }
  sum = over_block(sum, (REAL*)memory);
  count = over_block(count, (REAL*)memory);
  if (threadIdx.x == 0) out[client] = sum / (count > (REAL)1e-12 ? count : (REAL)1e-12);
}

// out[client, row] = the cross-entropy of a row times its weight, by one warp of several blocks.
extern "C" __global__ void __launch_bounds__(THREADS)
row_loss(const REAL* __restrict__ logits, const long long* __restrict__ labels, int next_labels,
         const REAL* __restrict__ weight, int next_weight, REAL* __restrict__ out, int rows,
         int classes) {
  const int client = blockIdx.x;
  logits += (size_t)client * rows * classes;
  const int step = gridDim.y * (THREADS / 32);
  for (int row = blockIdx.y * (THREADS / 32) + threadIdx.x / 32; row < rows; row += step) {
    REAL most, total;
    tops(logits + (size_t)row * classes, classes, &most, &total);
    if (threadIdx.x % 32) continue;
    const long long label = labels[(size_t)client * next_labels + row];
    const REAL gap = most + log(total) - logits[(size_t)row * classes + label];
    out[(size_t)client * rows + row] = gap * weight[(size_t)client * next_weight + row];
  }
}

// out[client, row] = scales[client] * weight / all weights * (softmax - what is right); ALONE: scales are 1.
extern "C" __global__ void __launch_bounds__(THREADS)
loss_gradient(const REAL* __restrict__ scales, const REAL* __restrict__ logits,
           const long long* __restrict__ labels, int next_labels, const REAL* __restrict__ weight,
           int next_weight, REAL* __restrict__ out, int rows, int classes) {
  const int client = blockIdx.x, lane = threadIdx.x % 32;
  logits += (size_t)client * rows * classes;
  out += (size_t)client * rows * classes;
  labels += (size_t)client * next_labels;
  weight += (size_t)client * next_weight;
  REAL count = 0;
  for (int row = lane; row < rows; row += 32) count += weight[row];
  count = over_lanes<32>(count);
  const REAL scale = (ALONE ? (REAL)1 : scales[client]) / (count > (REAL)1e-12 ? count : (REAL)1e-12);
  const int warps = THREADS / 32 * gridDim.y;
  for (int row = blockIdx.y * (THREADS / 32) + threadIdx.x / 32; row < rows; row += warps) {
    const REAL* own = logits + (size_t)row * classes;
    REAL most, total;
    tops(own, classes, &most, &total);
    const REAL share = scale * weight[row];
    for (int k = lane; k < classes; k += 32)
      out[(size_t)row * classes + k] = share * (exp(own[k] - most) / total - (k == labels[row] ? 1 : 0));
  }
}

#endif

#ifdef AVERAGE

// Of leaf i, o##i = the sum over rows of share[row] * x##i[row], without the rows that are left out, which may hold NaN.
extern "C" __global__ void __launch_bounds__(THREADS)
average(const REAL* __restrict__ share, const unsigned char* __restrict__ left_out, int rows, LEAVES) {
  int block = blockIdx.x;
#define TRY(i)                                                                     \
  if (block >= 0 && block < m##i) {                                                \
    const int at = (block * THREADS + threadIdx.x) * PACK, many = min(PACK, n##i - at); \
    if (many <= 0) return;                                                         \
    Pack sums;                                                                     \
    _Pragma("unroll") for (int j = 0; j < PACK; j++) sums.value[j] = 0;            \
    if (n##i % PACK == 0) {                                                        \
      _Pragma("unroll 8") for (int row = 0; row < rows; row++) {                   \
        const Pack own = *(const Pack*)(x##i + (size_t)row * n##i + at);           \
        const REAL part = share[row];                                              \
        const bool gone = left_out[row];                                           \
        _Pragma("unroll") for (int j = 0; j < PACK; j++) sums.value[j] += gone ? 0 : part * own.value[j]; \
      }                                                                            \
    } else {                                                                       \
      for (int row = 0; row < rows; row++)                                         \
        if (!left_out[row])                                                        \
          for (int j = 0; j < many; j++) sums.value[j] += share[row] * x##i[(size_t)row * n##i + at + j]; \
    }                                                                              \
    if (n##i % PACK == 0) *(Pack*)(o##i + at) = sums;                              \
    else                                                                           \
      for (int j = 0; j < many; j++) o##i[at + j] = sums.value[j];                 \
    return;                                                                        \
  }                                                                                \
  block -= m##i;
  EACH
#undef TRY
}

#endif

#ifdef UNSOUND

// marks[row] = 1 where the row of a leaf holds a number that is not up to l##i in size; NaN is up to nothing. Rows of
// leaf i lie r##i numbers apart, and are m##i blocks: pieces of n##i numbers, s##i from piece to piece, in chunks.
extern "C" __global__ void __launch_bounds__(THREADS)
unsound(unsigned char* __restrict__ marks, LEAVES) {
  const int row = blockIdx.y;
  int block = blockIdx.x, numbers = 0;
  const REAL* x = nullptr;
  REAL largest = 0;
#define TRY(i)                                                                     \
  if (block >= 0 && block < m##i) {                                                \
    const int chunks = (n##i + CHUNK - 1) / CHUNK, first = block % chunks * CHUNK; \
    x = x##i + (size_t)row * r##i + (size_t)(block / chunks) * s##i + first;       \
    numbers = min(CHUNK, n##i - first);                                            \
    largest = (REAL)l##i;                                                          \
  }                                                                                \
  block -= m##i;
  EACH
#undef TRY
  bool found = false;
  if (((size_t)x & 15) == 0 && numbers % PACK == 0) {
#pragma unroll 8
    for (int at = threadIdx.x * PACK; at < numbers; at += THREADS * PACK) {
      const Pack own = *(const Pack*)(x + at);
#pragma unroll
      for (int j = 0; j < PACK; j++) found |= !(fabs(own.value[j]) <= largest);
    }
  } else {
    for (int at = threadIdx.x; at < numbers; at += THREADS) found |= !(fabs(x[at]) <= largest);
  }
  if (found) marks[row] = 1;                    // whoever writes, writes the same
}

#endif

#ifdef WEIGH

// Factors [example][row][...] of rows that are averaged: made = share * left, and zeros in made and right where a row is
// left out, which may hold NaN. A block takes one example of one row.
extern "C" __global__ void __launch_bounds__(THREADS)
weigh(const REAL* __restrict__ share, const unsigned char* __restrict__ left_out, const REAL* __restrict__ left,
      REAL* __restrict__ made, REAL* __restrict__ right, int lefts, int rights) {
  const size_t place = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
  const REAL part = share[blockIdx.x];
  const bool gone = left_out[blockIdx.x];
  for (int i = threadIdx.x; i < lefts; i += THREADS) made[place * lefts + i] = gone ? 0 : part * left[place * lefts + i];
  if (gone)
    for (int i = threadIdx.x; i < rights; i += THREADS) right[place * rights + i] = 0;
}

#endif
