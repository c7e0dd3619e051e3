// Products of matrices in shared memory by the matrix units of Hopper, four warps at a time: wgmma. Both factors lie in
// rows of 128 bytes; in every eight of them, from a multiple of 1,024 on, pieces of 16 bytes are swizzled: piece p of row
// r is at p ^ r % 8. That depends on the address alone, so a matrix may begin at any row.

#define E (16 / (int)sizeof(Number))      // numbers of 16 bytes
#define BK (8 * E)                        // channels at a time: 128 bytes
#define LINES (THREADS / 8)               // rows of 128 bytes that are copied at a time
#define AHEAD (STAGES - 2)                // products of two steps may be under way

typedef unsigned long long Matrix;

// The first whole 1,024 bytes of shared memory.
__device__ __forceinline__ char* whole_pieces(void* memory) {
  const unsigned start = (unsigned)__cvta_generic_to_shared(memory);
  return (char*)memory + (1024 - start % 1024) % 1024;
}

// A matrix, `eight` bytes from eight rows to the next. Where it is summed over rows instead of within them, it may be
// wider than 64 columns: the next 64 are `wide` bytes on.
__device__ __forceinline__ Matrix matrix_of(const char* first, int eight, int wide) {
  const unsigned start = (unsigned)__cvta_generic_to_shared(first);
  return 1ull << 62 | (Matrix)(eight / 16) << 32 | (Matrix)(wide / 16) << 16 | (start & 0x3ffff) >> 4;
}

// What this thread copied into shared memory may be read by matrix units.
__device__ __forceinline__ void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until all products but the last few have been added.
template <int LATER>
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
}

#define EIGHT(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3]), "+f"(s[i + 4]), "+f"(s[i + 5]), "+f"(s[i + 6]), "+f"(s[i + 7])
#define MANY(s, i) EIGHT(s, i), EIGHT(s, i + 8), EIGHT(s, i + 16), EIGHT(s, i + 24)
#define FIRST "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SECOND "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

#define THIRD "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"

#ifdef HALF
#define KIND(n, given) "{.reg .pred p; setp.ne.b32 p, %" given ", 0; wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 "
#define TURNED(ways) ", p, 1, 1, " ways ";}"
#else
#define KIND(n, given) "{.reg .pred p; setp.ne.b32 p, %" given ", 0; wgmma.mma_async.sync.aligned.m64n" n "k8.f32.tf32.tf32 "
#define TURNED(ways) ", p, 1, 1;}"
#endif

// sums[64][64 or 128] += the product of two matrices, over 32 bytes of their rows; unless `more` is 0: sums = it. A
// thread has, of rows 16 * warp + lane / 4 and eight further, two of every eight columns, from lane % 4 * 2 on.
__device__ __forceinline__ void add_product(float (&sums)[32], Matrix a, Matrix b, int more) {
  asm volatile(KIND("64", "34") "{" FIRST "}, %32, %33" TURNED("0, 0") : MANY(sums, 0) : "l"(a), "l"(b), "r"(more));
}

__device__ __forceinline__ void add_product(float (&sums)[64], Matrix a, Matrix b, int more) {
  asm volatile(KIND("128", "66") "{" FIRST "," SECOND "}, %64, %65" TURNED("0, 0") : MANY(sums, 0), MANY(sums, 32) : "l"(a), "l"(b), "r"(more));
}

#ifdef HALF
// The same over 16 rows of both; of up to 192 columns.
__device__ __forceinline__ void add_turned(float (&sums)[32], Matrix a, Matrix b, int more) {
  asm volatile(KIND("64", "34") "{" FIRST "}, %32, %33" TURNED("1, 1") : MANY(sums, 0) : "l"(a), "l"(b), "r"(more));
}

__device__ __forceinline__ void add_turned(float (&sums)[64], Matrix a, Matrix b, int more) {
  asm volatile(KIND("128", "66") "{" FIRST "," SECOND "}, %64, %65" TURNED("1, 1") : MANY(sums, 0), MANY(sums, 32) : "l"(a), "l"(b), "r"(more));
}

__device__ __forceinline__ void add_turned(float (&sums)[96], Matrix a, Matrix b, int more) {
  asm volatile(KIND("192", "98") "{" FIRST "," SECOND "," THIRD "}, %96, %97" TURNED("1, 1") : MANY(sums, 0), MANY(sums, 32), MANY(sums, 64) : "l"(a), "l"(b), "r"(more));
}
#endif

// Lay what warpgroups made, TALL matrices each of 64 pixels and COLS channels, into shared memory, a pixel after the other.
#define PITCH(cols) ((cols) * (int)sizeof(Number) + 16)  // bytes of a pixel
template <int TALL, int COLS>
__device__ __forceinline__ void lay_pixels(char* made, const float (*sums)[COLS / 2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int m = 0; m < TALL; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      char* row = made + (warp / 4 * TALL * 64 + m * 64 + warp % 4 * 16 + half * 8 + lane / 4) * PITCH(COLS);
#pragma unroll
      for (int n = 0; n < COLS / 8; n++)
        keep_both(row + (n * 8 + lane % 4 * 2) * sizeof(Number), sums[m][n * 4 + half * 2], sums[m][n * 4 + half * 2 + 1]);
    }
}

// Write it down from there, so that neighbouring threads write 16 bytes each of the same pixel: its channels from `base`
// on, of which there are OC. `where` tells of a pixel where its first channel is, and nothing of one that is not written.
template <int TALL, int COLS, class Where>
__device__ __forceinline__ void write_pixels(char* made, const float (*sums)[COLS / 2], int base, int OC, Where where) {
  const int each = 16 / (int)sizeof(Number), pieces = COLS / each, piece = threadIdx.x % pieces, o = base + piece * each;
  __syncthreads();
  lay_pixels<TALL, COLS>(made, sums);
  __syncthreads();
  for (int row = threadIdx.x / pieces; row < THREADS / 128 * TALL * 64; row += THREADS / pieces) {
    Number* to = where(row);
    if (to && o < OC) *(float4*)(to + o) = *(const float4*)(made + row * PITCH(COLS) + piece * 16);
  }
}
