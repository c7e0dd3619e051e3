// Attention over short rows of places: softmax(q k' SCALE) v of every example's every head, and its gradients.
//
// A block takes NEAR heads, with all that is read more than once in shared memory; SPLIT threads share a place, each
// with some of its numbers, and take ROWS places. Scores are never stored: the backward pass makes them again from the
// logarithms of the sums under the softmax. Sums are taken in a fixed order. Constants: HEADS, PLACES, KEYS, WIDTH
// (numbers of a head), SCALE, CAUSAL, MASKED, NEAR, SPLIT, ROWS, CHUNK (keys at a time), THREADS. Tensors are [example,
// head, place, number] with any strides but the last, which is 1; those of gradients and results are given by the
// caller, too. Numbers are REAL in memory, or bfloat16 with HALF.

#include "common.cuh"

#define NOTHING ((WIDE)__uint_as_float(0xff800000u))  // minus infinity
#define D (WIDTH / SPLIT)  // numbers of a thread, four by four
#define UNITS(places) (((places) + ROWS - 1) / ROWS)  // threads, or SPLIT of them, that a head's places take

__device__ __forceinline__ size_t head_at(int head, int example_step, int head_step) {
  return (size_t)(head / HEADS) * example_step + head % HEADS * head_step;
}

// All places of the block's heads, as WIDE numbers [head][place][number].
__device__ __forceinline__ void hold(WIDE* to, const Number* from, int places, int first, int heads,
                                     int e, int h, int p) {
  for (int quad = threadIdx.x; quad < NEAR * places * (WIDTH / 4); quad += THREADS) {
    const int n = quad % (WIDTH / 4) * 4, place = quad / (WIDTH / 4) % places;
    const int head = min(first + quad / (WIDTH / 4) / places, heads - 1);
    const Four four = *(const Four*)(from + head_at(head, e, h) + (size_t)place * p + n);
#pragma unroll
    for (int i = 0; i < 4; i++) to[quad * 4 + i] = number(four.at[i]);
  }
}

// A thread's numbers of a place, in shared memory and in registers.
#define NUMBER(j) (((j) / 4 * SPLIT + part) * 4 + (j) % 4)

__device__ __forceinline__ void store(Number* to, const WIDE* numbers, WIDE factor, int part) {
#pragma unroll
  for (int j = 0; j < D; j += 4) {
    Four four;
#pragma unroll
    for (int i = 0; i < 4; i++) four.at[i] = kept(numbers[j + i] * factor);
    *(Four*)(to + NUMBER(j)) = four;
  }
}

// The sums over numbers of a[r] times b, a place in shared memory.
__device__ __forceinline__ void products(const WIDE (*a)[D], const WIDE* b, int part, WIDE (*out)[CHUNK], int c) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) out[r][c] = 0;
#pragma unroll
  for (int j = 0; j < D; j++)
#pragma unroll
    for (int r = 0; r < ROWS; r++) out[r][c] += a[r][j] * b[NUMBER(j)];
#pragma unroll
  for (int r = 0; r < ROWS; r++) out[r][c] = over_lanes<SPLIT>(out[r][c]);
}

__device__ __forceinline__ bool seen(const unsigned char* mask, int place, int key, int mask_place) {
#if CAUSAL
  if (key > place) return false;
#endif
#if MASKED
  return mask[(size_t)place * mask_place + key];
#else
  return true;
#endif
}

#ifdef FORWARD

extern "C" __global__ void __launch_bounds__(THREADS)
attend(const Number* __restrict__ q, int qe, int qh, int qp, const Number* __restrict__ k, int ke, int kh, int kp,
       const Number* __restrict__ v, int ve, int vh, int vp, const unsigned char* __restrict__ mask, int me, int mh,
       int mp, Number* __restrict__ out, int oe, int oh, int op, WIDE* __restrict__ logs, int heads) {
  extern __shared__ float4 memory[];
  WIDE* keys = (WIDE*)memory;                   // [NEAR][KEYS][WIDTH]
  WIDE* values = keys + NEAR * KEYS * WIDTH;
  const int first = blockIdx.x * NEAR, part = threadIdx.x % SPLIT, unit = threadIdx.x / SPLIT;
  hold(keys, k, KEYS, first, heads, ke, kh, kp);
  hold(values, v, KEYS, first, heads, ve, vh, vp);
  __syncthreads();
  const int near = min(unit / UNITS(PLACES), NEAR - 1), head = min(first + near, heads - 1);
  const bool ours = unit < NEAR * UNITS(PLACES) && first + near < heads;
  keys += near * KEYS * WIDTH;
  values += near * KEYS * WIDTH;
#if MASKED
  mask += head_at(head, me, mh);
#endif
  WIDE asked[ROWS][D], found[ROWS][D], most[ROWS], sum[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int place = min(unit % UNITS(PLACES) + r * UNITS(PLACES), PLACES - 1);
    const Number* from = q + head_at(head, qe, qh) + (size_t)place * qp;
#pragma unroll
    for (int j = 0; j < D; j += 4) {
      const Four four = *(const Four*)(from + NUMBER(j));
#pragma unroll
      for (int i = 0; i < 4; i++) asked[r][j + i] = number(four.at[i]) * (WIDE)SCALE;
    }
#pragma unroll
    for (int j = 0; j < D; j++) found[r][j] = 0;
    most[r] = NOTHING;
    sum[r] = 0;
  }
  for (int start = 0; start < KEYS; start += CHUNK) {
    WIDE share[ROWS][CHUNK];
#pragma unroll
    for (int c = 0; c < CHUNK; c++) products(asked, keys + min(start + c, KEYS - 1) * WIDTH, part, share, c);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int place = min(unit % UNITS(PLACES) + r * UNITS(PLACES), PLACES - 1);
      WIDE top = most[r];
#pragma unroll
      for (int c = 0; c < CHUNK; c++) {
        if (start + c >= KEYS || !seen(mask, place, min(start + c, KEYS - 1), mp)) share[r][c] = NOTHING;
        top = share[r][c] > top ? share[r][c] : top;
      }
      const WIDE base = top == NOTHING ? 0 : top, factor = exp(most[r] - base);
      most[r] = top;
      sum[r] *= factor;
#pragma unroll
      for (int c = 0; c < CHUNK; c++) sum[r] += share[r][c] = exp(share[r][c] - base);
#pragma unroll
      for (int j = 0; j < D; j++) found[r][j] *= factor;
    }
#pragma unroll
    for (int c = 0; c < CHUNK; c++) {
      const WIDE* value = values + min(start + c, KEYS - 1) * WIDTH;
#pragma unroll
      for (int j = 0; j < D; j++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) found[r][j] += share[r][c] * value[NUMBER(j)];
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int place = unit % UNITS(PLACES) + r * UNITS(PLACES);
    if (!ours || place >= PLACES) continue;
    store(out + head_at(head, oe, oh) + (size_t)place * op, found[r], 1 / sum[r], part);
    if (part == 0) logs[(size_t)head * PLACES + place] = most[r] + log(sum[r]);
  }
}

#else

// Of all pairs of a row and the others: the row's numbers left and right, times those of the others, make a score and
// the gradient of its share; onto one or two sums go the others' numbers. In the first pass a row is a query.
extern "C" __global__ void __launch_bounds__(THREADS)
attend_gradient(const Number* __restrict__ g, int ge, int gh, int gp, const Number* __restrict__ q, int qe, int qh, int qp,
                const Number* __restrict__ k, int ke, int kh, int kp, const Number* __restrict__ v, int ve, int vh, int vp,
                const Number* __restrict__ out, int oe, int oh, int op, const WIDE* __restrict__ logs,
                const unsigned char* __restrict__ mask, int me, int mh, int mp, Number* __restrict__ dq,
                Number* __restrict__ dk, Number* __restrict__ dv, int de, int dh, int dp, int heads) {
  extern __shared__ float4 memory[];
  WIDE* keys = (WIDE*)memory;                   // [NEAR][KEYS][WIDTH]
  WIDE* values = keys + NEAR * KEYS * WIDTH;
  WIDE* queries = values + NEAR * KEYS * WIDTH; // [NEAR][PLACES][WIDTH]
  WIDE* given = queries + NEAR * PLACES * WIDTH;
  WIDE* tops = given + NEAR * PLACES * WIDTH;   // [NEAR][PLACES]
  WIDE* levels = tops + NEAR * PLACES;          // sums over numbers of the gradient times the result
  const int first = blockIdx.x * NEAR, part = threadIdx.x % SPLIT;
  hold(keys, k, KEYS, first, heads, ke, kh, kp);
  hold(values, v, KEYS, first, heads, ve, vh, vp);
  hold(queries, q, PLACES, first, heads, qe, qh, qp);
  hold(given, g, PLACES, first, heads, ge, gh, gp);
  __syncthreads();
  for (int at = threadIdx.x; at < NEAR * PLACES; at += THREADS) {
    const int place = at % PLACES, head = min(first + at / PLACES, heads - 1);
    const Number* made = out + head_at(head, oe, oh) + (size_t)place * op;
    WIDE level = 0;
#pragma unroll 4
    for (int n = 0; n < WIDTH; n += 4) {
      const Four four = *(const Four*)(made + n);
#pragma unroll
      for (int i = 0; i < 4; i++) level += given[at * WIDTH + n + i] * number(four.at[i]);
    }
    tops[at] = logs[(size_t)head * PLACES + place];
    levels[at] = level;
  }
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < 2; pass++) {
    const int rows = pass ? KEYS : PLACES, others = pass ? PLACES : KEYS;
    for (int base = 0; base < NEAR * UNITS(rows); base += THREADS / SPLIT) {
      const int unit = base + threadIdx.x / SPLIT, near = min(unit / UNITS(rows), NEAR - 1);
      const int head = min(first + near, heads - 1);
      const WIDE* left_of = (pass ? keys : queries) + near * rows * WIDTH;
      const WIDE* right_of = (pass ? values : given) + near * rows * WIDTH;
      const WIDE* left_by = (pass ? queries : keys) + near * others * WIDTH;
      const WIDE* right_by = (pass ? given : values) + near * others * WIDTH;
      const unsigned char* own = mask;
#if MASKED
      own += head_at(head, me, mh);
#endif
      WIDE left[ROWS][D], right[ROWS][D], by_left[ROWS][D], by_right[ROWS][D];
      int row[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        row[r] = min(unit % UNITS(rows) + r * UNITS(rows), rows - 1);
#pragma unroll
        for (int j = 0; j < D; j++) {
          left[r][j] = left_of[row[r] * WIDTH + NUMBER(j)];
          right[r][j] = right_of[row[r] * WIDTH + NUMBER(j)];
          by_left[r][j] = by_right[r][j] = 0;
        }
      }
      for (int start = 0; start < others; start += CHUNK) {
        WIDE share[ROWS][CHUNK], slope[ROWS][CHUNK];
#pragma unroll
        for (int c = 0; c < CHUNK; c++) {
          const int other = min(start + c, others - 1);
          products(left, left_by + other * WIDTH, part, share, c);
          products(right, right_by + other * WIDTH, part, slope, c);
        }
#pragma unroll
        for (int c = 0; c < CHUNK; c++)
#pragma unroll
          for (int r = 0; r < ROWS; r++) {
            const int other = min(start + c, others - 1), place = pass ? other : row[r], key = pass ? row[r] : other;
            const bool counts = start + c < others && seen(own, place, key, mp);
            const WIDE p = counts ? exp(share[r][c] * (WIDE)SCALE - tops[near * PLACES + place]) : 0;
            slope[r][c] = counts ? p * (slope[r][c] - levels[near * PLACES + place]) * (WIDE)SCALE : 0;
            share[r][c] = p;
          }
#pragma unroll
        for (int c = 0; c < CHUNK; c++) {
          const int other = min(start + c, others - 1);
#pragma unroll
          for (int j = 0; j < D; j++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
              by_left[r][j] += slope[r][c] * left_by[other * WIDTH + NUMBER(j)];
              if (pass) by_right[r][j] += share[r][c] * right_by[other * WIDTH + NUMBER(j)];
            }
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const int place = unit % UNITS(rows) + r * UNITS(rows);
        if (unit >= NEAR * UNITS(rows) || first + near >= heads || place >= rows) continue;
        const size_t to = head_at(head, de, dh) + (size_t)place * dp;
        store((pass ? dk : dq) + to, by_left[r], 1, part);
        if (pass) store(dv + to, by_right[r], 1, part);
      }
    }
  }
}

#endif
