"""A user's attention for many clients against torch's own, in double precision."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from idiolect.core.network import Network, replace_layers
from idiolect.kernels.attention_layers import StackedFunctions, scaled_dot_product

CLIENTS, EXAMPLES, PLACES, KEYS, WIDE, HEADS = 2, 3, 4, 5, 8, 2

FLOAT = torch.randn(PLACES, KEYS, generator=torch.Generator().manual_seed(3)).double()
SEEN = FLOAT > -0.5


def rows(places, *before):
    return torch.randn(*before, EXAMPLES, HEADS, places, WIDE // HEADS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": SEEN},
        {"attn_mask": FLOAT},
        {"attn_mask": torch.zeros(PLACES, KEYS, dtype=torch.bool)},  # nothing is seen
    ],
    ids=str,
)
def test_the_function_and_its_gradients_are_torchs(options, float64):
    torch.manual_seed(0)
    q, k, v = rows(PLACES, CLIENTS), rows(KEYS, CLIENTS), rows(KEYS, CLIENTS)

    def bent(function):
        return lambda *own: function(*own, **options).sin().sum()

    mine = vmap(grad(bent(scaled_dot_product), (0, 1, 2)))(q, k, v)
    for client in range(CLIENTS):
        own = q[client], k[client], v[client]
        wanted = F.scaled_dot_product_attention(*own, **options)
        torch.testing.assert_close(scaled_dot_product(*own, **options), wanted)
        for left, right in zip(
            mine, grad(bent(F.scaled_dot_product_attention), (0, 1, 2))(*own), strict=True
        ):
            torch.testing.assert_close(left[client], right, rtol=1e-9, atol=1e-11)


def test_other_forms_of_the_function(float64):
    """Without heads, with fewer heads of keys, of other axes, and with dropout."""
    torch.manual_seed(0)
    three = torch.randn(EXAMPLES, PLACES, WIDE)
    few = torch.randn(EXAMPLES, 1, KEYS, WIDE // HEADS)
    five = torch.randn(2, EXAMPLES, HEADS, PLACES, WIDE)
    for arguments, options in (
        ((three, three, three), {}),
        ((rows(PLACES), few, few), {"enable_gqa": True}),
        ((five, five, five), {"is_causal": True}),
    ):
        wanted = F.scaled_dot_product_attention(*arguments, **options)
        torch.testing.assert_close(scaled_dot_product(*arguments, **options), wanted)
    ones = torch.ones(1, 1, 2, 4000)
    shares = scaled_dot_product(ones[..., :1], ones.mT[..., :1], ones.mT[..., :1], None, 0.25)
    assert abs(shares.mean() - 1) < 0.1 and not torch.equal(shares[0, 0, 0], shares[0, 0, 1])


LAYERS = [
    {},
    {"batch_first": True, "bias": False},
    {"kdim": 6, "vdim": 5},
    {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
]
CAUSAL = torch.ones(PLACES, PLACES, dtype=torch.bool).triu(1)
PADDED = torch.zeros(EXAMPLES, PLACES, dtype=torch.bool)
PADDED[0, -1] = True
CALLS = [
    {},
    {"need_weights": False},
    {"average_attn_weights": False, "attn_mask": CAUSAL},
    {"need_weights": False, "attn_mask": CAUSAL, "is_causal": True},
    {"need_weights": False, "attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": PADDED},
    {"key_padding_mask": PADDED.double() * -2.0},
    {"attn_mask": torch.randn(EXAMPLES * HEADS, PLACES, PLACES).double(), "need_weights": False},
]


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize(("made", "asked"), [*itertools.product(LAYERS, CALLS)])
def test_the_layer_and_its_gradients_are_torchs(made, asked, float64):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(WIDE, HEADS, **made)
    ours = replace_layers(nn.ModuleList([copy.deepcopy(theirs)]))[0]
    sizes = (EXAMPLES, PLACES) if made.get("batch_first") else (PLACES, EXAMPLES)
    x = torch.randn(CLIENTS, *sizes, WIDE)
    key, value = (torch.randn(*sizes, made.get(name, WIDE)) for name in ("kdim", "vdim"))
    own = "kdim" in made  # else a place's query, key and value are the same

    def bent(layer):
        def loss(params, x):
            given = (x, key, value) if own else (x, x, x)
            y, share = functional_call(layer, params, given, asked)
            return y.sin().sum() + (0 if share is None else share.cos().sum())

        return loss

    params = {
        name: torch.randn(CLIENTS, *held.shape) * 0.5 for name, held in theirs.named_parameters()
    }
    mine = vmap(grad(bent(ours), (0, 1)))(params, x)
    for client in range(CLIENTS):
        held = {name: leaf[client] for name, leaf in params.items()}
        wanted = grad(bent(theirs), (0, 1))(held, x[client])
        for name, leaf in wanted[0].items():
            torch.testing.assert_close(mine[0][name][client], leaf, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(mine[1][client], wanted[1], rtol=1e-9, atol=1e-11)


def test_one_sequence_alone(float64):
    theirs = nn.MultiheadAttention(WIDE, HEADS, dropout=0.5).eval()
    ours = replace_layers(nn.ModuleList([copy.deepcopy(theirs)]))[0]
    x, padded = torch.randn(PLACES, WIDE), PADDED[0]
    both = [layer(x, x, x, key_padding_mask=padded) for layer in (ours, theirs)]
    torch.testing.assert_close(*both)
    dropped = [ours.train()(x, x, x)[0] for _ in range(2)]
    assert not torch.equal(*dropped)
    with pytest.raises(RuntimeError, match="give attn_mask too"):
        ours(x, x, x, is_causal=True)


class Asking(nn.Module):
    """Calls torch's function itself, in training alone."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(WIDE, WIDE)

    def forward(self, x):
        x = self.enter(x)
        return F.scaled_dot_product_attention(x, x, x) if self.training else x


def test_a_modules_own_call_is_found_while_it_runs():
    network = Network(Asking())
    x = torch.randn(EXAMPLES, PLACES, WIDE)
    for training in (True, False):
        network(network.params, x, training)
    assert network._replaces == {True: True, False: False}
    plain = Network(Asking(), stacked=False)
    torch.testing.assert_close(network(network.params, x, True), plain(network.params, x, True))
    with StackedFunctions() as ours:
        torch.relu(x)
        assert not ours.called
        assert math.isfinite(F.scaled_dot_product_attention(x, x, x).sum()) and ours.called
