// Gradients by images of convolutions of 3×3 or 1×1 with a stride of 2, of a stack of clients with channels last, by the matrix
// units of Hopper (wgmma), of bfloat16. Pixels whose row and column leave the same rest are a plane; of a place, the pixel
// of each of four planes sees the gradient there, and some also that of the place to the right, below, or both:
//
//            here             right      below      both        (weights by row and column of their tap)
//   even     1 1
//   right    1 2              1 0
//   both     2 2              2 0        0 2        0 0
//   below    2 1                         0 1
//
// Other forms have a block for each plane, which reads the same gradient and waits for as many steps as the plane has
// taps. Here a block makes all four, a column of this table at a time. (Planes could be columns of one product, but those
// of different widths would wait for one another.) Places are in one line as in `halo.cu`: a zero after every row, a row
// of zeros after every image. The block holds its places, with those to the right and below, for all channels, and the
// weights of four steps. With one tap, the even plane sees the gradient and the others are 0.
// The gradient is [image, pixel, g, channel] in memory, weights [g, made, tap, read]. Constants: THREADS, SIDE of kernels.

#include "common.cuh"
#include "warpgroup.cuh"

#define BM (THREADS / 2)                  // places of a block
#define GAP (SIDE / 2)                    // zeros between rows and between images
#define MADE (SIDE == 1 ? 1 : 4)          // planes that see anything
#define ROWS(shift) ((shift) == 0 ? 256 : (shift) == 3 ? 64 : 128)
#define BEGIN(shift) ((shift) == 0 ? 0 : 128 + (shift) * 128)  // the row of the weights where those of a column begin
#define ALL 576                           // rows of the weights of four columns
#define NEXT (64 * 128 / 16)              // from a plane's weights to the next plane's, for a matrix

// C is of what is made, O of the gradient, which has OH rows and OW columns.
extern "C" __global__ void __launch_bounds__(THREADS)
input_gradient(const Number* __restrict__ gradient, const Number* __restrict__ w, Number* __restrict__ dx, int images, int C,
               int H, int W, int O, int OH, int OW) {
  extern __shared__ float4 memory[];
  const int g = blockIdx.y, groups = gridDim.y, base = blockIdx.z * 64, first = blockIdx.x * BM;
  const unsigned pitch = OW + GAP, each = (OH + GAP) * pitch;  // places of a row and of an image
  const int room = BM + GAP * ((int)pitch + 1), bytes = (room + 7) / 8 * 1024, total = images * (int)each, chunks = O / BK;
  const int piece = threadIdx.x % 8, line = threadIdx.x / 8;
  char* weights = whole_pieces(memory);   // [ALL], or [chunk][64], [128 bytes], then [chunk][room][128 bytes]
  char* held = weights + (SIDE == 1 ? chunks * 64 : ALL) * 128;
  gradient += (size_t)g * O + piece * 8;
  w += (size_t)g * C * (SIDE * SIDE) * O + piece * 8;

  auto hold = [&](int chunk) {
    for (int row = line; row < room; row += LINES) {
      const unsigned spot = first + row, image = spot / each, h = spot % each / pitch, v = spot % each % pitch;
      const bool inside = spot < total && h < OH && v < OW;
      bring16(held + chunk * bytes + row * 128 + (piece ^ row % 8) * 16,
              gradient + (inside ? ((size_t)(image * OH + h) * OW + v) * groups * O + chunk * BK : 0), inside);
    }
  };
  const int own = threadIdx.x / 128 * 64;  // the group's first place
  float sums[MADE][32];                   // of the planes: even, right, both, below
#if SIDE == 1
  for (int chunk = 0; chunk < chunks; chunk++) {
    hold(chunk);
#pragma unroll
    for (int row = line; row < 64; row += LINES) {
      const bool inside = base + row < C;
      bring16(weights + (chunk * 64 + row) * 128 + (piece ^ row % 8) * 16,
              w + (inside ? (size_t)(base + row) * O + chunk * BK : 0), inside);
    }
  }
  close_stage();
  await_stage<0>();
  show_copies();
  __syncthreads();
  for (int chunk = 0; chunk < chunks; chunk++) {
    const Matrix a = matrix_of(held + chunk * bytes + own * 128, 1024, 1024);
    const Matrix b = matrix_of(weights + chunk * (64 * 128), 1024, 1024);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) add_product(sums[0], a + k * 2, b + k * 2, chunk | k);
    close_products();
  }
#else
  auto load = [&](int chunk, int shift) {
#pragma unroll 4
    for (int r = 0; r < ROWS(shift) / LINES; r++) {
      const int row = line + r * LINES, plane = (shift < 2 ? shift : 2) + row / 64, c = base + row % 64;
      const int j = plane < 2 ? 1 : shift < 2 ? 2 : 0, i = plane % 3 == 0 ? 1 : shift % 2 ? 0 : 2;
      bring16(weights + (BEGIN(shift) + row) * 128 + (piece ^ row % 8) * 16,
              w + (c < C ? ((size_t)c * 9 + j * 3 + i) * O + chunk * BK : 0), c < C);
    }
  };
  hold(0);
  load(0, 0);
  close_stage();
  if (chunks > 1) hold(1);
  load(0, 1);
  close_stage();
  for (int chunk = 0; chunk < chunks; chunk++) {
#pragma unroll
    for (int shift = 0; shift < 4; shift++) {
      await_stage<1>();
      show_copies();
      __syncthreads();
      const Matrix a = matrix_of(held + chunk * bytes + (own + shift / 2 * (int)pitch + shift % 2) * 128, 1024, 1024);
      const Matrix b = matrix_of(weights + BEGIN(shift) * 128, 1024, 1024);
      begin_products();
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const Matrix left = a + k * 2, right = b + k * 2;
        const int more = shift ? 1 : chunk | k;
        if (shift == 0) add_product(sums[0], left, right, more);
        if (shift < 2) add_product(sums[1], left, right + (shift ? 0 : NEXT), more);
        add_product(sums[2], left, right + (shift < 2 ? 2 - shift : 0) * NEXT, more);
        if (shift % 2 == 0) add_product(sums[3], left, right + (shift ? 1 : 3) * NEXT, more);
      }
      close_products();
      // What is two steps on takes the place of what was two steps ago, of which all products have been added.
      if (shift < 2) load(chunk, shift + 2);
      else if (chunk + 1 < chunks) load(chunk + 1, shift - 2);
      if (shift == 0 && chunk + 2 < chunks) hold(chunk + 2);
      close_stage();
      await_products<1>();
    }
  }
#endif
  await_products<0>();
  __syncthreads();
#pragma unroll
  for (int plane = 0; plane < MADE; plane++) lay_pixels<1, 64>(weights + plane * BM * PITCH(64), sums + plane);
  __syncthreads();
  const int c = base + piece * 8;
  for (int row = line; row < BM; row += LINES) {
    const unsigned spot = first + row, image = spot / each, h = spot % each / pitch, v = spot % each % pitch;
    if (spot >= total || h >= OH || v >= OW || c >= C) continue;
#pragma unroll
    for (int plane = 0; plane < 4; plane++) {
      const int down = h * 2 + plane / 2, right = v * 2 + (plane % 3 != 0);
      float4 own = {};
      if (plane < MADE) own = *(const float4*)(weights + (plane * BM + row) * PITCH(64) + piece * 16);
      if (down < H && right < W) *(float4*)(dx + (((size_t)(image * H + down) * W + right) * groups + g) * C + c) = own;
    }
  }
}
