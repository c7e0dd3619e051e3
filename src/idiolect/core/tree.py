"""Trees of tensors: dicts, tuples and NamedTuples whose leaves are tensors.

Everything a method handles is a tree: parameters, optimiser memory, reports, personal state. This
is the only file that imports torch's pytree. Every function returns a new tree.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from idiolect.errors import CheckpointError, ConfigError, MethodError
from idiolect.kernels import fused_tree_ops as at_once
from idiolect.kernels import row_average

Tree = Any
"""A tensor, or a dict, tuple or NamedTuple of trees. `()` is the tree of nothing."""

Params = dict[str, Tensor]
"""A network's parameters by the names that `nn.Module.named_parameters` gives them."""


def transformed() -> bool:
    """Return whether a transform of torch.func is under way, such as vmap over clients."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Drift(NamedTuple):
    """A leaf of a gradient where parameters have a running statistic: how far the statistic moves.

    It is no derivative. Applied to parameters it moves them by just that, whatever the factor or
    the sign of the step; products and norms leave it out.
    """

    by: Tensor


def map(fn: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply `fn` to the leaves that stand in the same place of each tree."""
    if _plain(*trees):
        return {name: fn(*[tree[name] for tree in trees]) for name in trees[0]}
    return pytree.tree_map(fn, *trees)


def _plain(*trees: Tree) -> bool:
    """Say whether trees are dicts of tensors with the same names, as parameters are.

    Every step handles these, and torch's general traversal takes longer than small arithmetic.
    """
    first = trees[0]
    return all(
        type(tree) is dict
        and tree.keys() == first.keys()
        and all(type(leaf) is Tensor for leaf in tree.values())
        for tree in trees
    )


def leaves(tree: Tree) -> list[Tensor]:
    """List the tensors of a tree, in a fixed order."""
    found: list[Tensor] = []
    _gather(tree, found)
    return found


def _gather(tree: Tree, found: list[Tensor]) -> None:
    """Collect leaves in torch's order, in a fraction of its time."""
    if type(tree) is dict:
        for part in tree.values():
            _gather(part, found)
    elif type(tree) is tuple or (isinstance(tree, tuple) and hasattr(tree, "_fields")):
        for part in tree:
            _gather(part, found)
    elif isinstance(tree, Tensor):
        found.append(tree)
    else:
        found += pytree.tree_leaves(tree)


def named(tree: Tree) -> dict[str, Tensor]:
    """Give every leaf a name from its path, `params.fc.weight`; the inverse is `like`."""
    pairs, _ = pytree.tree_flatten_with_path(tree)
    return {".".join(_step(key) for key in path) or "value": leaf for path, leaf in pairs}


def like(template: Tree, values: Mapping[str, Tensor]) -> Tree:
    """Rebuild a tree of the template's form from named leaves; raise if names differ."""
    names = list(named(template))
    if missing := sorted(set(names) - set(values)):
        raise CheckpointError(
            f"no value for {missing[0]!r} ({len(missing)} of {len(names)} missing)"
        )
    if unknown := sorted(set(values) - set(names)):
        raise CheckpointError(f"unknown value {unknown[0]!r} ({len(unknown)} unknown)")
    _, form = pytree.tree_flatten(template)
    return pytree.tree_unflatten([values[name] for name in names], form)


def _step(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


# Arithmetic, leaf by leaf.


def add(left: Tree, right: Tree) -> Tree:
    """Return left + right."""
    return _stepped(1.0, left, right) or _changed(torch.add, left, right)


def sub(left: Tree, right: Tree) -> Tree:
    """Return left - right."""
    return _stepped(-1.0, left, right) or _changed(torch.sub, left, right)


def scale(factor: float | Tensor, tree: Tree) -> Tree:
    """Return factor · tree."""
    if _plain(tree):
        return {name: factor * leaf for name, leaf in tree.items()}
    return pytree.tree_map(
        lambda leaf: leaf if isinstance(leaf, Drift) else factor * leaf, tree, is_leaf=_drifts
    )


def axpy(factor: float | Tensor, x: Tree, y: Tree) -> Tree:
    """Return factor · x + y, the step of most optimisers."""
    if isinstance(factor, Tensor):
        return _changed(lambda b, a: factor * a + b, y, x)
    return _stepped(factor, y, x) or _changed(lambda b, a: torch.add(b, a, alpha=factor), y, x)


def without_drifts(grads: Tree) -> Tree:
    """Return a gradient with zeros where it holds drifts."""
    return pytree.tree_map(
        lambda leaf: torch.zeros_like(leaf.by) if isinstance(leaf, Drift) else leaf,
        grads,
        is_leaf=_drifts,
    )


def drifted(grads: Tree, params: Tree, stepped: Tree) -> Tree:
    """Return the stepped parameters, but the old ones moved where the gradient holds drifts."""
    return pytree.tree_map(
        lambda grad, old, new: old + grad.by if isinstance(grad, Drift) else new,
        grads,
        params,
        stepped,
        is_leaf=_drifts,
    )


def drifting(grads: Tree) -> bool:
    """Say whether a gradient holds any drift."""
    if _plain(grads):
        return False
    return any(isinstance(leaf, Drift) for leaf in pytree.tree_leaves(grads, is_leaf=_drifts))


def double(leaf: Tensor) -> Tensor:
    """Return a leaf in double precision, or in single where the device has none: Apple's mps."""
    return leaf.float() if leaf.device.type == "mps" else leaf.double()


def zeros_like(tree: Tree) -> Tree:
    """Return zeros of the same shapes."""
    return map(torch.zeros_like, tree)


def dot(left: Tree, right: Tree) -> Tensor:
    """Return the inner product over all leaves."""
    return _total((a * b).sum() for a, b in _gradient_pairs(left, right))


def _in_one_launch(xs: list[Tensor], ys: list[Tensor]) -> bool:
    """Return whether pairs of leaves are better taken in one kernel."""
    return bool(xs) and xs[0].is_cuda and at_once.suit(xs, ys)


def sqdist(left: Tree, right: Tree) -> Tensor:
    """Return the squared Euclidean distance over all leaves."""
    pairs = _gradient_pairs(left, right)
    xs, ys = [a for a, _ in pairs], [b for _, b in pairs]
    if _in_one_launch(xs, ys):
        return at_once.distance(xs, ys)
    return _total((a - b).square().sum() for a, b in pairs)


def norm(tree: Tree) -> Tensor:
    """Return the Euclidean norm over all leaves."""
    return _total(leaf.square().sum() for leaf, _ in _gradient_pairs(tree, tree)).sqrt()


def _total(terms: Iterable[Tensor]) -> Tensor:
    first, *rest = terms
    for term in rest:
        first = first + term
    return first


def _drifts(node: Any) -> bool:
    return isinstance(node, Drift)


def _changed(fn: Callable[[Tensor, Tensor], Tensor], base: Tree, by: Tree) -> Tree:
    """Return fn(base, by); a drift moves parameters, and stays a drift in a gradient."""

    def change(old: Any, new: Any) -> Any:
        if isinstance(old, Drift):
            return Drift(fn(old.by, new.by)) if isinstance(new, Drift) else old
        return old + new.by if isinstance(new, Drift) else fn(old, new)

    if _plain(base, by):
        return {name: fn(old, by[name]) for name, old in base.items()}
    return pytree.tree_map(change, base, by, is_leaf=_drifts)


def _stepped(factor: float, base: Tree, by: Tree) -> Tree | None:
    """Return base + factor · by, done in one call; None where that cannot be, or does not pay."""
    if _plain(base, by):
        ys, xs = list(base.values()), [by[name] for name in base]
        if not transformed():
            real = bool(ys) and all(leaf.is_floating_point() for leaf in ys)
            made = torch._foreach_add(ys, xs, alpha=factor) if real else ()
        else:
            made = tuple(at_once.step(factor, xs, ys)) if _in_one_launch(xs, ys) else ()
        return dict(zip(base, made, strict=True)) if made else None
    ys, form = pytree.tree_flatten(base)
    xs = pytree.tree_leaves(by)
    if not _in_one_launch(xs, ys) or drifting(base) or drifting(by):
        return None
    return pytree.tree_unflatten(at_once.step(factor, xs, ys), form)


def _gradient_pairs(left: Tree, right: Tree) -> list[tuple[Tensor, Tensor]]:
    """Pair the leaves of two trees, without those where either holds a drift."""
    if _plain(left, right):
        return [(leaf, right[name]) for name, leaf in left.items()]
    pairs = zip(*(pytree.tree_leaves(tree, is_leaf=_drifts) for tree in (left, right)), strict=True)
    return [(a, b) for a, b in pairs if not isinstance(a, Drift) and not isinstance(b, Drift)]


# Choice. Branches under vmap are these, since torch refuses `if tensor` there.


def where(condition: Tensor, yes: Tree, no: Tree) -> Tree:
    """Choose one of two trees by a scalar condition, without a branch."""
    xs, form = pytree.tree_flatten(yes)
    ys = pytree.tree_leaves(no)
    if condition.dim() == 0 and _in_one_launch(xs, ys):
        return pytree.tree_unflatten(at_once.choose(condition, xs, ys), form)
    return map(lambda a, b: torch.where(condition, a, b), yes, no)


def pick(tree: Tree, row: Tensor) -> Tree:
    """Take one row of stacked trees; the row number may be a tensor under vmap."""
    return map(lambda leaf: leaf.index_select(0, row.reshape(1)).squeeze(0), tree)


# Stacks: trees of several clients along axis 0.


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack equal trees along a new axis 0."""
    return map(lambda *rows: torch.stack(rows), *trees)


def concat(trees: Sequence[Tree]) -> Tree:
    """Join stacks along axis 0."""
    return trees[0] if len(trees) == 1 else map(lambda *parts: torch.cat(parts), *trees)


def repeat(tree: Tree, times: int) -> Tree:
    """Stack `times` independent copies of a tree."""
    return map(lambda leaf: leaf.unsqueeze(0).repeat(times, *[1] * leaf.dim()), tree)


def take(tree: Tree, rows: Tensor) -> Tree:
    """Gather rows of a stack."""
    return map(lambda leaf: leaf[rows], tree)


def put(tree: Tree, rows: Tensor, values: Tree) -> Tree:
    """Return the stack with some rows replaced."""
    return map(lambda leaf, new: leaf.index_copy(0, rows, new), tree, values)


def shares(weights: Tensor) -> Tensor:
    """Scale the rows of weights to a sum of one; a row of zeros stays one."""
    total = weights.sum(1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=1e-30), torch.zeros_like(weights))


def onto_simplex(rows: Tensor) -> Tensor:
    """Return the nearest point of the simplex to each row.

    It is (row − τ)₊ with the τ that makes it add up to one: of the k largest entries, for the
    largest k whose smallest entry stays positive.
    """
    ordered = rows.sort(1, descending=True).values
    place = torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=rows.dtype)
    excess = (ordered.cumsum(1) - 1) / place
    kept = (ordered > excess).sum(1, keepdim=True).clamp(min=1)  # none of NaN
    return (rows - excess.gather(1, kept - 1)).clamp(min=0)


def mixed(weights: Tensor, tree: Tree) -> Tree:
    """Mix the rows of a stack: weights [result, row] give a stack of as many rows as results."""
    return map(lambda leaf: torch.tensordot(weights.to(leaf.dtype), leaf, dims=1), tree)


def flat(tree: Tree) -> Tensor:
    """Lay every row of a stack out as one long vector: [row, number]."""
    return torch.cat([leaf.reshape(len(leaf), -1) for leaf in leaves(tree)], 1)


def mean(tree: Tree, weight: Tensor) -> Tree:
    """Average the rows of a stack of real numbers with the given weights [row]."""
    every, form = pytree.tree_flatten(tree)
    for leaf in every:
        if not leaf.is_floating_point():
            raise MethodError(
                f"a leaf of {leaf.dtype} cannot be averaged; report it as real numbers, or keep it"
            )
    share = weight / weight.sum()
    if any(type(leaf) is not Tensor for leaf in every):  # rows that wait to be computed, on a GPU
        return pytree.tree_unflatten(row_average.averages(share, every), form)
    means = [torch.tensordot(share.to(leaf.dtype), leaf, dims=1) for leaf in every]
    return pytree.tree_unflatten(means, form)


def split(params: Params, chosen: Callable[[str], bool]) -> tuple[Params, Params]:
    """Split parameters by name into (chosen, rest); `{**chosen, **rest}` is the inverse."""
    inside = {name: value for name, value in params.items() if chosen(name)}
    outside = {name: value for name, value in params.items() if not chosen(name)}
    return inside, outside


def split_layers(params: Params, last: int) -> tuple[Params, Params]:
    """Split parameters into (base, head): the head is the last so many layers that have any."""
    layers = list(dict.fromkeys([layer_of(name) for name in params]))
    if last > len(layers):
        raise ConfigError(f"{last} last layers asked for, but the network has {len(layers)}")
    head = set(layers[len(layers) - last :])
    top, base = split(params, lambda name: layer_of(name) in head)
    return base, top


def layer_of(name: str) -> str:
    """Return the name of a parameter's layer, also where its weight is made of others."""
    whole, made, _ = f".{name}".partition(".parametrizations.")
    return (whole if made else whole.rpartition(".")[0]).lstrip(".")


# Sizes, tests and devices.


def nbytes(tree: Tree) -> int:
    """Return the size of all leaves in bytes."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def unsound_rows(tree: Tree, finite: bool) -> Tensor | None:
    """Say of each row of a stack whether it holds NaN or, if it is to be `finite`, infinity.

    Only real numbers are looked at; None for the tree of nothing. There is no temporary of its
    size.
    """
    every = leaves(tree)
    real = [leaf for leaf in every if leaf.is_floating_point() and leaf.numel()]
    if not real:
        return (
            torch.zeros(len(every[0]), dtype=torch.bool, device=every[0].device) if every else None
        )
    if real[0].is_cuda:
        return row_average.unsound(real, finite)
    rows = [leaf.reshape(len(leaf), -1) for leaf in real]
    # Two passes: for aminmax, which is one, a CPU takes far longer. A NaN is both ends.
    ends = torch.cat([end(own, 1)[None] for own in rows for end in (torch.amin, torch.amax)])
    return ~ends.isfinite().all(0) if finite else ends.isnan().any(0)


def equal(left: Tree, right: Tree) -> bool:
    """Say whether two trees have the same leaves, bit for bit."""
    one, other = named(left), named(right)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def to(tree: Tree, device: torch.device) -> Tree:
    """Move every leaf to a device."""
    return map(lambda leaf: leaf.to(device), tree)
