"""Stacked recurrent layers against torch's own, in double precision; the CUDA source on a CPU."""

import copy

import emulate
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from idiolect.core.network import replace_layers
from idiolect.kernels import recurrent

CLIENTS, EXAMPLES, PLACES, INPUTS, UNITS = 3, 2, 5, 4, 3
KINDS = [
    (nn.RNN, {}),
    (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    (nn.GRU, {"bias": False, "batch_first": True}),
    (nn.LSTM, {"num_layers": 2, "batch_first": True, "dropout": 0.5}),
    (nn.LSTM, {"bidirectional": True, "bias": False}),
]
name = lambda value: getattr(value, "__name__", "")  # noqa: E731


def pair(kind, options):
    torch.manual_seed(0)
    theirs = kind(INPUTS, UNITS, **options).eval()  # as torch draws others for dropout
    return replace_layers(nn.ModuleList([copy.deepcopy(theirs)]))[0], theirs


def stacked(layer, clients=CLIENTS):
    params = dict(layer.named_parameters())
    return {key: torch.randn(clients, *own.shape) * 0.5 for key, own in params.items()}


def shape(options, batched=True):
    first = options.get("batch_first") and batched
    sizes = (EXAMPLES, PLACES) if first else (PLACES, EXAMPLES) if batched else (PLACES,)
    return (*sizes, INPUTS)


def flat(outputs):
    """List the tensors that a layer returned."""
    y, state = outputs
    return [y, *(state if isinstance(state, tuple) else (state,))]


def begun(options, kind, batched=True):
    ways = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    sizes = (ways, *([EXAMPLES] * batched), UNITS)
    states = tuple(torch.randn(CLIENTS, *sizes) for _ in range(1 + (kind is nn.LSTM)))
    return states if kind is nn.LSTM else states[0]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=name)
def test_outputs_states_and_gradients_are_torchs(kind, options, batched, given, float64):
    """Every client with its own weights and sequences, beginning at zero or at a given state."""
    ours, theirs = pair(kind, options)
    params, x = stacked(theirs), torch.randn(CLIENTS, *shape(options, batched))
    begin = begun(options, kind, batched) if given else None
    taken = (0, 1, 2) if given else (0, 1)

    def bent(layer):
        def loss(params, x, begin):
            found = flat(functional_call(layer, params, (x, begin) if given else (x,)))
            return sum((part * (n + 1)).sin().sum() for n, part in enumerate(found))

        return loss

    dims = (0, 0, 0 if given else None)
    mine = vmap(grad(bent(ours), taken), dims)(params, x, begin)
    for client in range(CLIENTS):
        own = {key: value[client] for key, value in params.items()}
        state = begin
        if given:
            state = tuple(s[client] for s in begin) if kind is nn.LSTM else begin[client]
        found = [
            flat(functional_call(layer, own, (x[client], state) if given else (x[client],)))
            for layer in (ours, theirs)
        ]
        for left, right in zip(*found, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)
        wanted = grad(bent(theirs), taken)(own, x[client], state)
        got = torch.utils._pytree.tree_map(lambda leaf, client=client: leaf[client], mine)
        for left, right in zip(
            *(torch.utils._pytree.tree_leaves(one) for one in (got, wanted)), strict=True
        ):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_second_derivatives(kind, float64):
    ours, theirs = pair(kind, {})
    params, x = stacked(theirs), torch.randn(CLIENTS, *shape({}))

    def curved(layer):
        def loss(params, x):
            return sum(part.sin().sum() for part in flat(functional_call(layer, params, (x,))))

        def bend(params, x):
            return sum(part.pow(3).sum() for part in grad(loss)(params, x).values())

        return grad(bend)

    mine = vmap(curved(ours))(params, x)
    for client in range(CLIENTS):
        own = {key: value[client] for key, value in params.items()}
        for key, wanted in curved(theirs)(own, x[client]).items():
            torch.testing.assert_close(mine[key][client], wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("given", [False, True])
def test_cells(kind, given, float64):
    ours, theirs = pair(kind, {})
    for sizes in ((EXAMPLES,), ()):
        state = torch.randn(*sizes, UNITS)
        begin = (state, 2 * state) if kind is nn.LSTMCell else state
        x = torch.randn(*sizes, INPUTS)
        arguments = (x, begin) if given else (x,)
        found = [layer(*arguments) for layer in (ours, theirs)]
        left, right = (one if isinstance(one, tuple) else (one,) for one in found)
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)
    params = stacked(theirs)
    one, *_ = flat((vmap(lambda own: functional_call(ours, own, arguments))(params), ()))
    for client in range(CLIENTS):
        wanted = functional_call(theirs, {k: v[client] for k, v in params.items()}, arguments)
        got = tuple(part[client] for part in one) if kind is nn.LSTMCell else one[client]
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_dropout_between_layers_is_drawn_for_every_client():
    ours, _ = pair(nn.LSTM, {"num_layers": 2, "dropout": 0.5})
    x = torch.randn(*shape({}))
    runs = vmap(lambda _: ours.train()(x)[0], randomness="different")(torch.zeros(CLIENTS))
    assert len({float(run.detach().sum()) for run in runs}) == CLIENTS
    ours.dropout = 0.0
    assert torch.equal(ours(x)[0], ours(x)[0])


def test_what_is_left_to_torch():
    projected = nn.LSTM(4, 3, proj_size=2)
    assert type(replace_layers(nn.ModuleList([projected]))[0]) is nn.LSTM
    ours, theirs = pair(nn.GRU, {})
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(PLACES, EXAMPLES, INPUTS), [5, 3])
    assert torch.equal(ours(packed)[0].data, theirs(packed)[0].data)
    with pytest.raises(RuntimeError, match="of input size 4 was given inputs of 7"):
        ours(torch.zeros(2, 2, 7))


@pytest.mark.skipif(emulate.COMPILER is None, reason="needs g++ to run CUDA sources")
@pytest.mark.parametrize("celled", [False, True])
@pytest.mark.parametrize("kind", ["tanh", "relu", "gru", "lstm"])
def test_kernels_equal_the_plain_form(kind, celled, monkeypatch):
    if celled and kind != "lstm":
        pytest.skip("only an LSTM has cells")
    emulate.use(monkeypatch)
    gates = {"gru": 3, "lstm": 4}.get(kind, 1)
    torch.manual_seed(0)
    ahead = torch.randn(2, 3, 5, gates * 6)
    w, h = torch.randn(2, gates * 6, 6), torch.randn(2, 5, 6)
    own = {"gru": [torch.randn(2, 6)], "lstm": [torch.randn(2, 5, 6)]}.get(kind, [])
    given = [ahead, w, h, *own]
    made = recurrent._cuda_forward(*given, kind=kind)
    for left, right in zip(made, recurrent.plain_forward(*given, kind=kind), strict=True):
        torch.testing.assert_close(left, right)
    g = [torch.randn_like(made[0]) for _ in range(1 + celled)]
    options = {"kind": kind, "celled": celled}
    both = [
        form(*g, *given, *made, **options)
        for form in (recurrent._cuda_gradient, recurrent.plain_gradient)
    ]
    for left, right in zip(*both, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
