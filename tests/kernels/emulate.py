"""Run CUDA kernels on a CPU, thread by thread: slow, exact, and enough to see what they compute.

Every thread of a block is a coroutine; a barrier hands over to the next. Asynchronous copies are
made at once, so what this cannot see is a wait that is missing.
"""

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from idiolect.kernels import compiled

COMPILER = shutil.which("g++")
_OPTIONS = ("-O1", "-w", "-U_FORTIFY_SOURCE", "-std=c++17", "-shared", "-fPIC")
_KEPT = Path(__file__).parents[2] / ".pytest_cache" / "kernels"

_SHIM = """
#include <string.h>
#include <setjmp.h>
#include <ucontext.h>
extern "C" {                            // C++'s own headers take longer than a kernel to compile
double exp(double), log(double), tanh(double), sqrt(double), fabs(double);
float expf(float), logf(float), tanhf(float), sqrtf(float), fabsf(float);
void *malloc(size_t), free(void*), abort();
int posix_memalign(void**, size_t, size_t);
}
static float exp(float x) { return expf(x); }
static float log(float x) { return logf(x); }
static float tanh(float x) { return tanhf(x); }
static float sqrt(float x) { return sqrtf(x); }
static float fabs(float x) { return fabsf(x); }
#define NAN __builtin_nanf("")
#define INFINITY __builtin_inff()
#define isnan __builtin_isnan
#define isinf __builtin_isinf
template <class T> static T min(T a, T b) { return b < a ? b : a; }
template <class T> static T max(T a, T b) { return a < b ? b : a; }
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
struct Three { int x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
static Three threadIdx, blockIdx, blockDim, gridDim;
static float4* shared_memory;
struct Place { jmp_buf at; };
static jmp_buf home;                    // long jumps, since swapcontext asks the system each time
static Place places[1024];
static char ended[1024];
static int now;
static void pass_on() {
  if (!_setjmp(places[now].at)) _longjmp(home, 1);
  threadIdx.x = now;
}
static int arrived[1024];               // at how many barriers each thread of a block has been
static void __syncthreads() {           // warps may do more or less between two of them
  const int mine = ++arrived[now];
  for (bool all = false; !all;) {
    pass_on();
    all = true;
    for (int t = 0; t < blockDim.x; t++) all &= ended[t] || arrived[t] >= mine;
  }
}
#define __syncwarp pass_on
static unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return (unsigned __int128)x * y >> 64;
}
static int __clz(int value) { return __builtin_clz(value); }
static double lanes[1024];
template <class Real> static Real __shfl_xor_sync(unsigned, Real value, int mask) {
  lanes[threadIdx.x] = value;
  pass_on();
  const Real other = lanes[threadIdx.x ^ mask];
  pass_on();
  return other;
}
template <class T> static T __ldcs(const T* from) { return *from; }
static float __fsub_rn(float x, float y) { return x - y; }
static float __fmul_rn(float x, float y) { return x * y; }
static float __fadd_rn(float x, float y) { return x + y; }
static float __uint_as_float(unsigned bits) { float f; memcpy(&f, &bits, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned bits; memcpy(&bits, &f, 4); return bits; }
static unsigned lefts[1024][4], rights[1024][2];
static float short_of(unsigned bits) { return __uint_as_float(bits & 0xffffe000u); }
static void matrix_product(float* sums, const unsigned* a, const unsigned* b) {
  const int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  memcpy(lefts[threadIdx.x], a, 16);
  memcpy(rights[threadIdx.x], b, 8);
  pass_on();
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 8; k++)
      sums[i] += short_of(lefts[warp + row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]) *
                 short_of(rights[warp + col * 4 + k % 4][k / 4]);
  }
  pass_on();
}
static float low(unsigned bits) { return __uint_as_float(bits << 16); }
static float high(unsigned bits) { return __uint_as_float(bits & 0xffff0000u); }
static void half_product(float* sums, const unsigned* a, const unsigned* b) {
  const int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  memcpy(lefts[threadIdx.x], a, 16);
  memcpy(rights[threadIdx.x], b, 8);
  pass_on();
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k += 2) {
      const unsigned left = lefts[warp + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const unsigned right = rights[warp + col * 4 + k % 8 / 2][k / 8];
      sums[i] += low(left) * low(right) + high(left) * high(right);
    }
  }
  pass_on();
}
template <class T> static unsigned long __cvta_generic_to_shared(const T* p) {
  return (const char*)p - (const char*)shared_memory;
}
typedef unsigned long long Laid;
// A number of a matrix of wgmma, which sums over numbers of a row or, if `turned`, over rows.
static float element(Laid matrix, int row, int k, int size, int turned) {
  const int start = (matrix & 0x3fff) << 4;
  const int wide = (matrix >> 16 & 0x3fff) << 4, eight = (matrix >> 32 & 0x3fff) << 4;
  const int at = start + (turned ? row / 64 * wide + k / 8 * eight + k % 8 * 128 + row % 64 * size
                                 : row / 8 * eight + row % 8 * 128 + k * size);
  const char* from = (const char*)shared_memory + (at ^ (at >> 7 & 7) << 4);
  if (size == 4) return short_of(*(const unsigned*)from);
  return __uint_as_float((unsigned)*(const unsigned short*)from << 16);
}
static void group_product(float* sums, int many, int size, int turned, Laid a, Laid b, int more) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  for (int n = 0; n < many / 8; n++)
    for (int i = 0; i < 4; i++) {
      float sum = more ? sums[n * 4 + i] : 0.f;
      const int row = warp * 16 + lane / 4 + i / 2 * 8, col = n * 8 + lane % 4 * 2 + i % 2;
      for (int k = 0; k < 32 / size; k++)
        sum += element(a, row, k, size, turned) * element(b, col, k, size, turned);
      sums[n * 4 + i] = sum;
    }
}
static const char* froms[1024];
static void matrices(unsigned* to, const char* from, int turned) {
  const int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  froms[threadIdx.x] = from;
  pass_on();
  for (int j = 0; j < 4; j++) {
    const char** rows = froms + warp + j * 8;
    if (!turned) to[j] = *(const unsigned*)(rows[lane / 4] + lane % 4 * 4);
    else to[j] = *(const unsigned short*)(rows[lane % 4 * 2] + lane / 4 * 2) |
                 (unsigned)*(const unsigned short*)(rows[lane % 4 * 2 + 1] + lane / 4 * 2) << 16;
  }
  pass_on();
}
"""

_RUN = """
static void** given;
static void fibre() { KERNEL(ARGUMENTS); ended[now] = 1; _longjmp(home, 1); }
static void resume(int thread, bool first, char* stack, size_t depth) {
  now = thread;
  threadIdx = {thread, 0, 0};
  if (_setjmp(home)) return;
  if (!first) _longjmp(places[thread].at, 1);
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = stack + depth * thread;
  start.uc_stack.ss_size = depth;
  makecontext(&start, fibre, 0);
  setcontext(&start);
}
extern "C" void launch(const int* grid, int threads, int shared, void** arguments) {
  given = arguments;
  gridDim = {grid[0], grid[1], grid[2]}; blockDim = {threads, 1, 1};
  void* room = nullptr;
  if (posix_memalign(&room, 1024, shared + 16)) abort();
  shared_memory = (float4*)room;
  const size_t depth = 1 << 16;
  char* stacks = (char*)malloc(depth * threads);
  for (int block = 0; block < grid[0] * grid[1] * grid[2]; block++) {
    blockIdx = {block % grid[0], block / grid[0] % grid[1], block / grid[0] / grid[1]};
    for (int i = 0; i < shared / 4; i++) ((float*)room)[i] = NAN;
    memset(ended, 0, threads);
    memset(arrived, 0, sizeof arrived);
    for (bool first = true, left = true; left; first = false) {
      left = false;
      for (int t = 0; t < threads; t++) if (!ended[t]) {
        resume(t, first, stacks, depth);
        left |= !ended[t];
      }
    }
  }
  free(room); free(stacks);
}
"""


def _compiled(text: str) -> Path:
    """Compile once what several tests, workers and runs of them launch."""
    command = [COMPILER or "g++", *_OPTIONS]
    name = hashlib.sha256("\n".join([*command, text]).encode()).hexdigest()[:24]
    made = _KEPT / f"{name}.so"
    if not made.exists():
        _KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_KEPT) as folder:
            source, binary = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            source.write_text(text)
            subprocess.run([*command, "-o", binary, source], check=True)
            binary.replace(made)  # other workers find it whole, or not at all
    return made


class Kernel:
    """A kernel that is called as torch's compiled ones are, on tensors of a CPU."""

    def __init__(self, file: str, name: str, constants: Mapping[str, Any]) -> None:
        text = compiled.source(file, constants)
        text = text.replace("extern __shared__ float4 memory[];", "float4* memory = shared_memory;")
        text = re.sub(
            r'asm volatile\(KIND\("(\d+)".*?TURNED\("(\d).*?;\n',
            r"group_product(sums, \1, sizeof(Number), \2, a, b, more);\n", text,
        )  # fmt: skip
        text = re.sub(r"const unsigned place = .*?;\n", "", text)
        filled = "if (bytes) memcpy(to, from, 16); else memset(to, 0, 16);\n"
        text = re.sub(r'asm volatile\("cp.async.c[ag][^"]* 16, %2;.*?;\n', filled, text)
        text = re.sub(r'asm volatile\("cp.async.cg.*?;\n', "memcpy(to, from, 16);\n", text)
        both = "bits = kept(one) | (unsigned)kept(other) << 16;\n"
        text = re.sub(r'asm\("cvt.rn.bf16x2.*?;\n', both, text)
        text = re.sub(r'asm volatile\("ldmatrix[^"]*trans.*?;\n', "matrices(to, from, 1);\n", text)
        text = re.sub(r'asm volatile\("ldmatrix.*?;\n', "matrices(to, from, 0);\n", text)
        text = re.sub(r'asm volatile\("mma[^"]*k16.*?;\n', "half_product(sums, a, b);\n", text)
        both = "to[0] = bytes ? from[0] : 0.f; to[1] = bytes ? from[1] : 0.f;\n"
        text = re.sub(r'asm volatile\("cp.async.ca[^"]* 8, %2;.*?;\n', both, text)
        text = re.sub(r'asm volatile\("cp.async.ca.*?;\n', "*to = bytes ? *from : 0.f;\n", text)
        text = re.sub(r'asm volatile\("mma.*?;\n', "matrix_product(sums, a, b);\n", text)
        text = re.sub(r"asm volatile\(.*?\);", "", text)
        for constant, value in constants.items():  # parameters may be named by a constant
            text = text.replace(f", {constant})", f", {value})")
        found = re.search(rf"__global__[^{{]*?\b{name}\(([^)]*)\)", text)
        if found is None:
            raise ValueError(f"{file} has no kernel {name}")
        kinds = [part.replace("__restrict__", "").strip().rpartition(" ")[0]
                 for part in found.group(1).split(",")]  # fmt: skip
        asked = [f"*({kind}*)given[{n}]" for n, kind in enumerate(kinds)]
        run = _RUN.replace("KERNEL", name).replace("ARGUMENTS", ", ".join(asked))
        whole = "\n".join([_SHIM, text, run])
        self._launch = ctypes.CDLL(str(_compiled(whole))).launch

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int = 0
    ) -> None:
        """Run all blocks, one after the other."""
        held = [
            ctypes.c_void_p(arg.data_ptr())
            if isinstance(arg, torch.Tensor)
            else ctypes.c_int(arg)
            if isinstance(arg, int)
            else ctypes.c_double(arg)
            for arg in args
        ]
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(one) for one in held))
        self._launch((ctypes.c_int * 3)(*grid), block[0], shared_mem, places)


def use(patch: pytest.MonkeyPatch) -> None:
    """Run on this CPU whatever is launched, and take any tensor to be one on a GPU."""

    @functools.cache
    def kernel(file: str, name: str, constants: tuple[tuple[str, Any], ...], shared: int) -> Kernel:
        return Kernel(file, name, dict(constants))

    patch.setattr(compiled, "kernel", kernel)
    patch.setattr(compiled, "make_current", lambda: None)
    patch.setattr(compiled, "has_kernels", lambda tensor: True)
