"""Stacked convolutions by our own CUDA kernels, compiled for each shape.

`thin.cu` is for few channels, `wide.cu` for many, `tensor.cu` and `runs.cu` for many on matrix
units, `columns.cu` for the gradient by the weights with few on matrix units, and `depthwise.cu` for
depthwise convolutions, of which torch is slow at the gradient by the weights.
The tasks are "convolve", "conv_relu" (bias and ReLU follow), "conv_relu_pool" (2×2 max-pooling
too), "input_gradient" and "weight_gradient".
"""

import functools
from collections.abc import Iterable, Iterator
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from idiolect.kernels.autotune import Form
from idiolect.kernels.compiled import aligned, launch, round_up
from idiolect.kernels.deferred import Deferred, DeferredTensor, Terms

_SHARED = 200 * 1024  # bytes of shared memory of a block; data-centre GPUs have more
_HALF = 112 * 1024  # bytes of shared memory with which two blocks fit on a multiprocessor
_SUMS = (32, 100)  # sums of a thread: enough to be worth its loads, and held in registers
_BEST_SUMS = 64
_CHANNELS = 16  # with fewer inputs or outputs, `thin.cu` is faster than `wide.cu`
_SMALL = 128  # channels up to which many ways are tried: compiling them takes a while
_LANES = 32  # threads of a warp
_THREADS = 256
_WARPS = _THREADS // _LANES
_CHUNK = 8  # channels of a product on matrix units


class ConvShape(NamedTuple):
    """A stack of clients, each with its own weights: [group, image, channel, height, width]."""

    groups: int
    images: int
    channels: int
    height: int
    width: int
    out_channels: int
    kernel_height: int
    kernel_width: int
    stride: int
    padding: int
    depthwise: bool = False  # each channel has its own weights, [group, channel, 1, ...]
    fused: bool = False  # among kernels that do more at once, which want pixels last in memory

    @property
    def inputs(self) -> int:
        """Channels that an output channel reads."""
        return 1 if self.depthwise else self.channels

    @property
    def convolutions(self) -> int:
        """Groups of the one grouped convolution that does the same for all."""
        return self.groups * self.channels if self.depthwise else self.groups

    @property
    def out_height(self) -> int:
        """Rows of the result."""
        return (self.height + 2 * self.padding - self.kernel_height) // self.stride + 1

    @property
    def out_width(self) -> int:
        """Columns of the result."""
        return (self.width + 2 * self.padding - self.kernel_width) // self.stride + 1

    @property
    def taps(self) -> int:
        """Weights of one input channel for one output channel."""
        return self.kernel_height * self.kernel_width

    @property
    def pointwise(self) -> bool:
        """Whether every pixel is made of one, by a matrix of channels."""
        alone = self.taps == self.stride == 1 and self.padding == 0
        return alone and not self.depthwise

    def seen_by(self, task: str) -> "ConvShape":
        """Return the shape of the convolution that a task is: the input gradient's is reversed."""
        if task != "input_gradient":
            return self
        return self._replace(
            channels=self.out_channels,
            height=self.out_height,
            width=self.out_width,
            out_channels=self.channels,
            padding=self.kernel_height - 1 - self.padding,
        )


class Tile(NamedTuple):
    """How a kernel cuts its work over blocks and threads."""

    file: str
    own: dict[str, int]  # constants that differ between tiles, as the source names them
    constants: dict[str, int]  # of the shape and the task
    blocks: tuple[int, int]  # along x and z; y is the group. Of a weight gradient: steps to share
    shared: int  # bytes of shared memory of a block
    waves: int = 1  # blocks of a weight gradient for each multiprocessor; 0: one for all steps

    @property
    def name(self) -> str:
        """Name the kernel and what differs between its tiles."""
        return f"{self.file[:-3]} " + "x".join(map(str, (*self.own.values(), self.waves)))


def forms(task: str, shape: ConvShape, most: int = 4) -> dict[str, Form]:
    """Return all ways to do a task by our kernels, by name; `most` bounds the tiles of wide.cu."""
    if shape.depthwise:
        return {"depthwise": functools.partial(_depthwise, task)}
    run = _weight_gradient if task == "weight_gradient" else functools.partial(_convolve, task)
    return {
        tile.name: functools.partial(run, tile=_rounding(tile)) for tile in tiles(task, shape, most)
    }


def _rounding(tile: Tile) -> Tile:
    """Let matrix units round where torch's may: a third of the work."""
    rounded = int(torch.backends.cuda.matmul.allow_tf32)
    return tile._replace(constants=tile.constants | {"ROUNDED": rounded})


@functools.cache
def tiles(task: str, shape: ConvShape, most: int = 4) -> tuple[Tile, ...]:
    """Return the tiles that are worth trying; none where the kernels cannot do it.

    Where matrix units can do it, they were faster than `wide.cu` on every shape that was measured.
    """
    every = _every_tile(task, shape, most)
    units = any(tile.file in ("tensor.cu", "runs.cu") for tile in every)
    return tuple(tile for tile in every if not units or tile.file != "wide.cu")


@functools.cache
def _every_tile(task: str, shape: ConvShape, most: int = 4) -> tuple[Tile, ...]:
    """Return the tiles that waste least, of each kernel."""
    s, pool = shape.seen_by(task), _pool(task)
    if shape.stride != 1 or shape.padding >= min(shape.kernel_height, shape.kernel_width):
        return ()
    if task == "input_gradient" and shape.kernel_height != shape.kernel_width:
        return ()  # rows and columns would be padded differently
    if min(s.out_height, s.out_width) < pool:
        return ()
    constants = {
        "C": s.channels, "H": s.height, "W": s.width, "PAD": s.padding, "OC": s.out_channels,
        "OH": s.out_height, "OW": s.out_width, "KH": s.kernel_height, "KW": s.kernel_width,
        "POOL": pool, "TRANSPOSED": int(task == "input_gradient"),
        "RELU": int(task == "conv_relu"), "WEIGHT_GRADIENT": int(task == "weight_gradient"),
    }  # fmt: skip
    tried = 10 if max(s.channels, s.out_channels) <= _SMALL else 3
    kinds: tuple[Iterable[Tile], ...]
    if task == "weight_gradient":
        runs = islice(_runs_weights(s), tried)
        wide = islice(_wide_weights(s), most)
        kinds = (_thin_weights(s), wide, runs, _columns_weights(s))
    else:
        tensor, runs = islice(_tensor(s, pool), 5), islice(_runs(s, task), tried)
        kinds = (_thin(s), _wide(s, pool)[:most], tensor, runs)
    found = [tile for kind in kinds for tile in kind]
    return tuple(tile._replace(constants=constants | tile.constants) for tile in found)


def has_fused_form(task: str, shape: ConvShape) -> bool:
    """Return whether a task is worth doing in one launch, as thin.cu and wide.cu can."""
    return any(tile.file in ("thin.cu", "wide.cu") for tile in _every_tile(task, shape))


def _pool(task: str) -> int:
    """Return the side of the windows of pixels that are pooled."""
    return 2 if task == "conv_relu_pool" else 1


# Launches.


def _convolve(task: str, x: Tensor, w: Tensor, *rest: Any, tile: Tile) -> Any:
    """Do a task that makes images; with pooling return also which pixel of each window it was."""
    *bias, shape = rest
    s, pool = shape.seen_by(task), _pool(task)
    made = (s.out_channels, s.out_height // pool, s.out_width // pool)
    out = x.new_empty(s.groups, s.images, *made)
    chosen = torch.empty_like(out, dtype=torch.uint8) if pool == 2 else out
    if tile.file in ("wide.cu", "tensor.cu"):  # [group, input, tap, output]: in one piece for all
        w = w.permute((0, 1, 3, 4, 2) if task == "input_gradient" else (0, 2, 3, 4, 1))
    w = aligned(w)
    given = [aligned(x), w, bias[0].contiguous() if bias else w, out, chosen, s.images]
    _launch("convolve", tile, (tile.blocks[0], s.groups, tile.blocks[1]), given)
    return (out, chosen) if pool == 2 else out


def _weight_gradient(gradient: Tensor, x: Tensor, shape: ConvShape, tile: Tile) -> Tensor:
    """Return the gradient by the weights, summed in a fixed order."""
    steps, blocks = tile.blocks
    parts, each = _parts(steps, tile.waves, x, shape.groups * blocks)
    out = _partial_sums(parts, x, shape)
    each *= tile.own.get("WK", 1)  # a step of a block may be several of its warps'
    given = [aligned(gradient), aligned(x), out, shape.images, each]
    _launch("weight_gradient", tile, (parts, shape.groups, blocks), given)
    return _summed(out)


def _launch(name: str, tile: Tile, grid: tuple[int, int, int], given: list[Any]) -> None:
    constants = tile.constants | tile.own
    launch(tile.file, name, constants, grid, tile.own["THREADS"], given, tile.shared)


def _depthwise(task: str, first: Tensor, second: Tensor, shape: ConvShape) -> Tensor:
    """Do a task of a depthwise convolution."""
    s = shape
    constants = {
        "C": s.channels, "H": s.height, "W": s.width, "OH": s.out_height, "OW": s.out_width,
        "KH": s.kernel_height, "KW": s.kernel_width, "PAD": s.padding, "STRIDE": s.stride,
        "THREADS": _THREADS,
    }  # fmt: skip
    size = (s.height, s.width) if task == "input_gradient" else (s.out_height, s.out_width)
    # A thread makes four pixels of a row, where it may.
    several = 1 if size[1] % 4 or (task == "input_gradient" and 4 % s.stride) else 4
    constants["SIDE_BY_SIDE"] = several
    run = functools.partial(launch, "depthwise.cu", task, constants)
    first, second = first.contiguous(), second.contiguous()
    if task == "weight_gradient":
        parts, each = _parts(s.images, 8, second, s.groups * s.channels)
        out, shared = _partial_sums(parts, second, s), 4 * _WARPS * s.taps
        given = [first, second, out, s.images, each]
        run((s.channels, s.groups, parts), _THREADS, given, shared)
        return _summed(out)
    out = first.new_empty(s.groups, s.images, s.channels, *size)
    blocks = -(-out.numel() // (several * _THREADS))
    run((blocks, 1, 1), _THREADS, [first, second, out, s.images, s.groups])
    return out


def _parts(steps: int, waves: int, x: Tensor, blocks: int) -> tuple[int, int]:
    """Return into how many parts steps are cut to fill the GPU, and the steps of each."""
    device = None if x.is_meta else x.device
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    each = -(-steps // max(1, min(steps, waves * processors // blocks)))
    return -(-steps // each), each


def _partial_sums(parts: int, x: Tensor, s: ConvShape) -> Tensor:
    sizes = (s.out_channels, s.inputs, s.kernel_height, s.kernel_width)
    return x.new_empty(parts, s.groups, *sizes)


def _summed(parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else DeferredTensor(_PartsSum(parts))


class _PartsSum(Deferred):
    """The sum of parts [part, group, ...], which a step adds up itself."""

    def __init__(self, parts: Tensor) -> None:
        super().__init__(parts.shape[1:], parts)
        self._parts = parts

    def make(self) -> Tensor:
        """Return it."""
        return self._parts.sum(0)

    def terms(self) -> Terms:
        """Return the parts."""
        parts = self._parts
        return Terms(parts, parts[0, 0].numel(), len(parts), parts[0].numel())


# Tiles. OCT and OCB are the output channels of a thread and of a block; see each source.


def _thin(s: ConvShape) -> Iterator[Tile]:
    """Propose the few tiles that were best on some shape."""
    channels = _snug(s)
    whole = round_up(s.out_channels, channels)
    few = round_up(-(-whole // 4), channels)  # of a block, where there are few clients
    narrow = ((2, 1, few), (4, 1, few)) if few < whole else ()
    for pixels, images, block in (*product((2, 4), (1, 2), (whole,)), *narrow):
        columns = round_up(s.out_width, pixels) + s.kernel_width - 1
        line = max(columns, s.width + 2 * s.padding)
        image = s.channels * (s.height + 2 * s.padding) * line
        shared = 4 * (s.channels * s.taps * block + images * image)
        if shared <= _SHARED and pixels <= s.out_width:
            own = {"PX": pixels, "OCT": channels, "OCB": block, "IMGS": images}
            own |= {"THREADS": _THREADS, "SLICES": 1}
            blocks = (-(-s.images // images), -(-s.out_channels // block))
            yield Tile("thin.cu", own, {}, blocks, shared)


def _thin_weights(s: ConvShape) -> Iterator[Tile]:
    for channels, threads in product({4, _snug(s)}, (_THREADS, 2 * _THREADS)):
        groups = round_up(s.out_channels, channels) // channels
        for several in {min(2, groups), min(4, groups)}:
            block = several * channels
            slices = min(s.out_height, threads // (s.channels * s.kernel_height * several))
            columns = (s.width + 2 * s.padding) | 1
            image = s.channels * (s.height + 2 * s.padding) * columns
            gradients = s.out_height * s.out_width * block
            shared = 4 * max(image + gradients, slices * block * s.channels * s.taps)
            if slices and shared <= _SHARED:
                own = {"PX": 1, "OCT": channels, "OCB": block, "IMGS": 1}
                own |= {"THREADS": threads, "SLICES": slices}
                blocks = (s.images, -(-s.out_channels // block))
                yield Tile("thin.cu", own, {}, blocks, shared, waves=4)


def _snug(s: ConvShape) -> int:
    """Return the output channels of a thread that leave the fewest idle."""
    return min((8, 6, 4), key=lambda channels: round_up(s.out_channels, channels))


def _wide(s: ConvShape, pool: int) -> list[Tile]:
    """Propose tiles, those that waste least first."""
    if not _is_wide(s):
        return []
    block = next(b for b in (64, 32, 16, 8, 4) if s.out_channels % b == 0)
    chunk = next(c for c in (4, 2, 1) if s.channels % c == 0)
    found: list[tuple[tuple[float, int], Tile]] = []
    talls = (2,) if pool == 2 else (1, 2)
    for tall, pixels, channels, threads in product(talls, range(2, 11), (8, 16), (128, 256)):
        sums = tall * pixels * channels
        if pixels % pool or block % channels or not _SUMS[0] <= sums <= _SUMS[1]:
            continue
        bands = -(-(s.out_height // pool * pool) // tall)
        columns = -(-(s.out_width // pool * pool) // pixels)
        units = threads // (block // channels)
        rows = _rows(s, columns, bands, units, tall)
        line = round_up(columns * pixels + s.kernel_width - 1, 4)
        shared = 2 * 4 * chunk * (s.taps * block + rows * line)
        if units % _LANES or shared > _HALF:
            continue
        own = {"TALL": tall, "PX": pixels, "OCT": channels, "OCB": block, "CHUNK": chunk}
        own |= {"THREADS": threads, "ROWS": rows}
        blocks = (-(-s.images * bands * columns // units), s.out_channels // block)
        waste = (round_up(s.out_width, pixels) / s.out_width, abs(sums - _BEST_SUMS))
        found.append((waste, Tile("wide.cu", own, {}, blocks, shared)))
    return [tile for _, tile in sorted(found, key=lambda pair: pair[0])]


def _wide_weights(s: ConvShape) -> Iterator[Tile]:
    if not _is_wide(s):
        return
    for channels, band, waves in product((8, 4, 2), (4, 2), (1, 2)):
        if s.out_channels % channels or not _SUMS[0] <= s.taps * channels <= _SUMS[1]:
            continue
        block = next(b for b in (8, 4, 2, 1) if s.out_channels % (b * channels) == 0) * channels
        band, wide = min(band, s.out_height), round_up(s.out_width, 2)
        plane = (band + s.kernel_height - 1) * (wide + s.kernel_width - 1) | 1
        shared = 2 * 4 * round_up(block * band * wide + _LANES * plane, 4)
        if shared <= _HALF:
            own = {"OCT": channels, "OCB": block, "BAND": band}
            own |= {"THREADS": _LANES * (block // channels)}
            outer = s.out_channels // block * -(-s.channels // _LANES)
            blocks = (s.images * -(-s.out_height // band), outer)
            yield Tile("wide.cu", own, {}, blocks, shared, waves=2 * waves)


def _is_wide(s: ConvShape) -> bool:
    return min(s.channels, s.out_channels) >= _CHANNELS and s.out_channels % 4 == 0


def _tensor(s: ConvShape, pool: int) -> Iterator[Tile]:
    """Propose tiles; with half the threads of a block, each has registers for twice the sums."""
    whole, half = ((2, 8), (4, 4), (2, 4)), ((4, 8), (2, 16))
    shapes = (whole, _THREADS), (half, _THREADS // 2), (((1, 8),), _THREADS)
    for block, (tiles, threads) in product((64, 32, 16), shapes):
        for sixteens, eights in tiles:
            along = _warps_along(s, block, sixteens, threads // _LANES)
            if not along:
                continue
            cells = along * eights * 8 // pool**2  # pixels, or windows of them, of a block
            height, width = s.out_height // pool, s.out_width // pool
            rows = _rows(s, width, height, cells, pool)
            plane = (rows * (width * pool + s.kernel_width - 1) + 7) // 16 * 16 + 8
            shared = 2 * 4 * _CHUNK * (s.taps * (block + 8) + plane)
            if shared <= _HALF:
                own = {"MT": sixteens, "NT": eights, "OCB": block, "THREADS": threads, "ROWS": rows}
                blocks = (-(-s.images * height * width // cells), s.out_channels // block)
                yield Tile("tensor.cu", own, {}, blocks, shared)


_RUN = 4  # pixels of a run of a convolution
_RUN_TILES = (  # sixteens, lines of a run, and warps along channels made, runs and channels read
    (4, 2, 1, 4, 1), (2, 2, 2, 4, 1), (2, 2, 1, 4, 1), (2, 2, 1, 4, 2), (2, 2, 1, 2, 2),
    (1, 2, 1, 4, 2), (2, 2, 1, 1, 4), (1, 2, 1, 2, 4), (1, 2, 1, 1, 4), (2, 1, 1, 2, 4),
    (1, 1, 1, 2, 4),
)  # fmt: skip


def _runs(s: ConvShape, task: str) -> Iterator[Tile]:
    """Propose tiles for many clients, then those for few, whose warps share sums."""
    if s.channels % _CHUNK or s.out_channels % 16 or s.taps % 2 == 0 or s.taps == 1:
        return
    pool, grain = _pool(task), 1
    if s.width % 2 == s.padding % 2 == 0:
        grain = 4 if s.width % 4 == s.padding % 4 == 0 else 2
    columns = -(-(s.out_width // pool * pool) // _RUN)
    line = (columns - 1) * _RUN + _RUN + (s.kernel_width + 2) // 4 * 4
    for sixteens, tall, along, runs, parts in _RUN_TILES:
        block, warps = 16 * sixteens * along, along * runs * parts
        if s.out_channels % block or s.channels % (_CHUNK * parts):
            continue
        bands = -(-(s.out_height // pool * pool) // tall)
        rows = _rows(s, columns, bands, 8 * runs, tall)
        plane = (rows * line + 23) // 32 * 32 + 8
        by_input = (block * s.taps + 23) // 32 * 32 + 8
        transposed, straight = _CHUNK * by_input, block * (_CHUNK * s.taps + 4)
        kernels = transposed if task == "input_gradient" else straight
        if tall < pool:
            continue
        step = 4 * parts * (kernels + _CHUNK * plane)
        stages = 2 if s.channels > _CHUNK * parts and 2 * step <= _HALF else 1
        after = along * runs * sixteens * _RUN * tall * 4 * _LANES * (parts > 1)
        shared = max(stages * step, 4 * after)
        if shared <= _HALF:
            own = {"MT": sixteens, "TALL": tall, "WM": along, "WN": runs, "WK": parts}
            own |= {"THREADS": _LANES * warps}
            more = {"RUN": _RUN, "ROWS": rows, "LINE": line, "PLANE": plane, "GRAIN": grain}
            more |= {"STAGES": stages}
            blocks = (-(-s.images * bands * columns // (8 * runs)), s.out_channels // block)
            yield Tile("runs.cu", own, more, blocks, shared)


def _runs_weights(s: ConvShape) -> Iterator[Tile]:
    """Propose tiles: warps of a block along the channels made, those read, and the steps."""
    found = _run(s.out_width)
    if s.channels % _CHUNK or s.out_channels % 16 or s.taps == 1 or found is None:
        return
    run, segments = found
    lines = 4 // segments
    paired = not any(n % 2 for n in (s.width, s.padding, s.out_width))
    ways = product((4, 2, 1), (4, 8), ((1, 2), (2, 2), (4, 2), (4, 0)))
    for sixteens, warps, (parts, waves) in ways:
        sums = 4 * s.taps * sixteens
        most = _SUMS[1] * (1 if warps == _WARPS else 2)  # of a thread, as registers allow
        sizes = _warps_for(s, warps // parts, sixteens)
        if s.out_channels % (16 * sixteens) or not _SUMS[0] <= sums <= most or sizes is None:
            continue
        along, inputs = sizes
        after = along * inputs * max(sums * _LANES * (parts > 1), 8 * (8 * s.taps + 4))
        for band in (2 * lines, lines):
            band = round_up(s.out_height, lines) if s.out_height * s.out_width <= 128 else band
            sp = _spread(band * segments * run, [run * n for n in range(4)])
            line, plane = _room_for_image(s, run, segments, band)
            step = 16 * sixteens * along * sp + _CHUNK * inputs * plane
            shared = 4 * max(2 * parts * step, after)
            if shared <= _HALF:
                own = {"MT": sixteens, "WM": along, "WC": inputs, "WK": parts, "BAND": band}
                own |= {"AT_ONCE": int(s.taps > 9 or sixteens < 4), "THREADS": _LANES * warps}
                more = {"RUN": run, "SEGS": segments, "SP": sp, "LINE": line, "PLANE": plane}
                more |= {"PAIRED": int(paired)}
                outer = s.out_channels * s.channels // (16 * sixteens * along * _CHUNK * inputs)
                steps = -(-s.images * -(-s.out_height // band) // parts)
                yield Tile("runs.cu", own, more, (steps, outer), shared, waves=waves)
                break


def _columns_weights(s: ConvShape) -> Iterator[Tile]:
    """Propose tiles, all weights of a client in one."""
    columns, sixteens = -(-s.channels * s.taps // 8), s.out_channels // 16
    if s.out_channels % 16 or s.out_width % 2 or sixteens * columns > _SUMS[1] // 4:
        return
    line = s.out_width + s.kernel_width - 1
    tiles = (4, _THREADS, 2), (8, _THREADS, 2), (8, _THREADS, 1), (8, 2 * _THREADS, 1)
    for band, threads, waves in tiles:
        band = min(band, s.out_height)
        sp = round_up(band * s.out_width - 8, 32) + 8  # against bank conflicts
        plane = (band + s.kernel_height - 1) * line
        step = s.out_channels * sp + s.channels * plane
        sums = 4 * sixteens * columns * threads
        shared = 4 * max(2 * round_up(step, 2), sums)
        if shared <= _HALF:
            own = {"MT": sixteens, "NT": columns, "BAND": band, "THREADS": threads}
            more = {"LINE": line, "PLANE": plane, "SP": sp}
            steps = s.images * -(-s.out_height // band)
            yield Tile("columns.cu", own, more, (steps, 1), shared, waves=waves)


def _run(width: int) -> tuple[int, int] | None:
    """Return how many pixels a run has, and how many runs a line, with the least left over."""
    ways = [(round_up(-(-width // segments), 2), segments) for segments in (1, 2, 4)]
    ways = [way for way in ways if way[0] <= 16]
    return min(ways, key=lambda way: (way[0] * way[1], way[1])) if ways else None


def _spread(least: int, threads: list[int]) -> int:
    """Return numbers from channel to channel, with which pairs that are read at once lie apart.

    `threads` is where the four threads of a channel read; 16 threads, of four channels, read 32
    banks at once.
    """

    def meet(step: int) -> int:
        places = [(place + channel * step) % 32 for place in threads for channel in range(4)]
        return max(map(places.count, places))

    return min(range(round_up(least, 2), round_up(least, 2) + 32, 2), key=meet)


def _room_for_image(s: ConvShape, run: int, segments: int, band: int) -> tuple[int, int]:
    """Return numbers from line to line, and from channel to channel of an image's lines."""
    least = round_up(segments * run + s.kernel_width // 2 * 2, 2)
    least = max(least, round_up(s.out_width + s.kernel_width - 1, 2))
    deep = band + s.kernel_height - 1

    def plane(line: int) -> int:
        return _spread(deep * line, _starts(line, run, segments))

    def worth(line: int) -> tuple[int, int]:
        places = [
            (place + channel * plane(line)) % 32
            for place in _starts(line, run, segments)
            for channel in range(4)
        ]
        return max(map(places.count, places)), plane(line)

    line = min((least, least + 2), key=worth)
    return line, plane(line)


def _starts(line: int, run: int, segments: int) -> list[int]:
    """Return where the four threads of a channel begin to read their runs."""
    return [n // segments * line + n % segments * run for n in range(4)]


def _warps_for(s: ConvShape, warps: int, sixteens: int) -> tuple[int, int] | None:
    """Return how many warps share channels made and channels read, such that least is read."""
    made, read = s.out_channels // (16 * sixteens), s.channels // _CHUNK
    ways = [
        (along, warps // along)
        for along in (1, 2, 4, 8)
        if warps % along == 0 and made % along == 0 and read % (warps // along) == 0
    ]
    return (
        min(ways, key=lambda way: made * read * (16 * sixteens / way[1] + _CHUNK / way[0]))
        if ways
        else None
    )


def _warps_along(s: ConvShape, block: int, sixteens: int, warps: int) -> int:
    """Return how many warps of a block share its output channels; 0 where that cannot be."""
    if s.channels % _CHUNK or s.out_channels % 16 or s.taps % 2 == 0:
        return 0
    if s.out_channels % block or block % (16 * sixteens) or warps % (block // 16 // sixteens):
        return 0
    return warps // (block // 16 // sixteens)


def _rows(s: ConvShape, columns: int, bands: int, units: int, tall: int) -> int:
    """Return the image rows that a block may need: its bands may begin within one, and cross."""
    most = (columns + units - 2) // columns + 1
    crossings = (most - 2) // bands + 1 if most > 1 else 0
    return most * tall + (s.kernel_height - 1) * (1 + crossings)
