// Draw a round's batches where they are used: what numpy.random.default_rng(key).permutation(count) gives
// for every client, bit for bit, laid out as [client, step, example]. A block for each client: its first
// thread shuffles in shared memory, all of them write. Constants: REAL (of weights), THREADS.

typedef unsigned int Word;
typedef unsigned long long Long;

// SeedSequence's hash of a key of WORDS words.
#define WORDS 5
#define POOL 4

__device__ __forceinline__ Word folded(Word value) { return value ^ value >> 16; }

__device__ __forceinline__ Word hashed(Word value, Word* factor) {
  value ^= *factor;
  *factor *= 0x931E8875u;
  return folded(value * *factor);
}

__device__ __forceinline__ Word mixed(Word left, Word right) {
  return folded(left * 0xCA01F9DDu - right * 0x4973F715u);
}

// PCG64 with numpy's halves: the low one of a number comes first.
struct Draws { Long high, low, step_high, step_low; Word spare; bool has_spare; };

__device__ __forceinline__ void advance(Draws* d) {
  const Long by_high = 0x2360ED051FC65DA4ull, by_low = 0x4385DF649FCCF645ull;
  const Long high = __umul64hi(d->low, by_low) + d->high * by_low + d->low * by_high;
  const Long low = d->low * by_low;
  d->low = low + d->step_low;
  d->high = high + d->step_high + (d->low < low);
}

__device__ __forceinline__ void seed(Draws* d, const Word* key) {
  Word pool[POOL], factor = 0x43B0D7E5u, made[2 * POOL];
  for (int n = 0; n < POOL; n++) pool[n] = hashed(key[n], &factor);
  for (int from = 0; from < POOL; from++)
    for (int to = 0; to < POOL; to++)
      if (from != to) pool[to] = mixed(pool[to], hashed(pool[from], &factor));
  for (int n = POOL; n < WORDS; n++)
    for (int to = 0; to < POOL; to++) pool[to] = mixed(pool[to], hashed(key[n], &factor));
  factor = 0x8B51F9DDu;
  for (int n = 0; n < 2 * POOL; n++) {
    const Word value = pool[n % POOL] ^ factor;
    factor *= 0x58F38DEDu;
    made[n] = folded(value * factor);
  }
  Long parts[4];
  for (int n = 0; n < 4; n++) parts[n] = made[2 * n] | (Long)made[2 * n + 1] << 32;
  d->step_high = parts[2] << 1 | parts[3] >> 63;
  d->step_low = parts[3] << 1 | 1;
  d->low = d->step_low + parts[1];
  d->high = d->step_high + parts[0] + (d->low < parts[1]);
  advance(d);
  d->has_spare = false;
}

__device__ __forceinline__ Word drawn(Draws* d) {
  if (d->has_spare) { d->has_spare = false; return d->spare; }
  advance(d);
  const Long crossed = d->high ^ d->low;
  const int turn = (int)(d->high >> 58);
  const Long value = crossed >> turn | crossed << (64 - turn & 63);
  d->spare = (Word)(value >> 32);
  d->has_spare = true;
  return (Word)value;
}

// A number from 0 to most, all alike: bits enough for it, drawn again where they say more.
__device__ __forceinline__ int bounded(Draws* d, int most) {
  const Word mask = 0xFFFFFFFFu >> __clz(most);
  Word value = drawn(d) & mask;
  while (value > (Word)most) value = drawn(d) & mask;
  return (int)value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
shuffle(const long long* __restrict__ who, const long long* __restrict__ held, long long* __restrict__ rows,
        REAL* __restrict__ weight, int tag, int round, int call, int batch, int asked, int epochs, int steps,
        int wide) {
  extern __shared__ float4 memory[];
  int* order = (int*)memory;
  const long long* mine = who + 4 * (size_t)blockIdx.x;  // seed, client, count, where its rows begin
  const int count = (int)mine[2], per_epoch = (count + batch - 1) / batch;
  const int own_steps = !count ? 0 : asked ? asked : epochs * per_epoch;
  held += mine[3];
  rows += (size_t)blockIdx.x * steps * wide;
  weight += (size_t)blockIdx.x * steps * wide;
  Draws draws;
  if (threadIdx.x == 0) {
    const Word key[WORDS] = {(Word)mine[0], (Word)tag, (Word)round, (Word)mine[1], (Word)call};
    seed(&draws, key);
  }
  const int last = min(own_steps, steps);
  for (int first = 0; first < last; first += per_epoch) {
    for (int i = threadIdx.x; i < count; i += THREADS) order[i] = i;
    __syncthreads();
    if (threadIdx.x == 0)
      for (int i = count - 1; i > 0; i--) {
        const int other = bounded(&draws, i), kept = order[i];
        order[i] = order[other];
        order[other] = kept;
      }
    __syncthreads();
    const int end = min(per_epoch, last - first) * wide;
    for (int i = threadIdx.x; i < end; i += THREADS) {
      const int place = i / wide * batch + i % wide;
      const size_t to = (size_t)first * wide + i;
      rows[to] = held[place < count ? order[place] : 0];
      weight[to] = place < count ? (REAL)1 : (REAL)0;
    }
    __syncthreads();
  }
  for (int i = last * wide + threadIdx.x; i < steps * wide; i += THREADS) {
    rows[i] = count ? held[0] : 0;
    weight[i] = (REAL)0;
  }
}
