// Two images of as many channels become one of twice as many: one after the other, or, with DEALT, in turn. Images that
// are read may be some channels of larger ones: from one to the next there are `far` pieces of 16 bytes, from channel to
// channel `apart`. Constants: THREADS, DEALT, CHANNELS (of an image that is read), PIECES (of a channel).

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
join(const float4* __restrict__ one, const float4* __restrict__ other, float4* __restrict__ out, int images,
     int far, int apart, int other_far, int other_apart) {
  const unsigned at = blockIdx.x * THREADS + threadIdx.x, row = at / PIECES, channel = row % (2 * CHANNELS);
  const size_t image = row / (2 * CHANNELS);
  if (image >= images) return;
  const bool second = DEALT ? channel % 2 : channel >= CHANNELS;
  const size_t own = DEALT ? channel / 2 : second ? channel - CHANNELS : channel;
  const float4* from = second ? other + image * other_far + own * other_apart : one + image * far + own * apart;
  out[at] = from[at % PIECES];
}
