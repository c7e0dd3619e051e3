"""The methods that divide LoRA's matrices, by hand.

The network `Low` adds B A x with A = (a₁, a₂) and B = (b₁, b₂) to nothing: z = (b₁a₁ + b₂a₂) x. For
x = 2, y = 1 and e = p − 1 the gradients are ∂/∂bₖ = 2 e aₖ and ∂/∂aₖ = 2 e bₖ.
"""

import pytest
import torch
from torch import Tensor, nn

from idiolect.core import lora_pairs
from idiolect.core.method import Report, Sent
from idiolect.core.tree import Params
from idiolect.errors import ConfigError, MethodError
from idiolect.methods import FedAvg, FedRotLoRA, FedSALoRA, FFALoRA, FlexLoRA, PFedLoRA
from methods.tiny import Line, client, close, setup, sigmoid

ALL = (FedSALoRA, FFALoRA, FlexLoRA, PFedLoRA, FedRotLoRA)
A, B = "low.lora_A", "low.lora_B"


class Layer(nn.Module):
    def __init__(self, a: list[float], b: list[float]) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.tensor(a, dtype=torch.float64).reshape(-1, 1))
        self.lora_B = nn.Parameter(torch.tensor(b, dtype=torch.float64).reshape(1, -1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.lora_A.mT @ self.lora_B.mT


class Low(nn.Module):
    """Logits [0, B A x]; and with a head, a shift of z beside them."""

    def __init__(self, a=(1.0, 3.0), b=(0.0, 0.0), head: bool = False) -> None:
        super().__init__()
        self.low = Layer(list(a), list(b))
        if head:
            self.head = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z = self.low(x.reshape(-1, 1)).reshape(-1) + getattr(self, "head", 0.0)
        return torch.stack([torch.zeros_like(z), z], -1)


def numbers(params: Params) -> dict[str, list[float]]:
    return {name: value.reshape(-1).tolist() for name, value in params.items()}


def given(a: list[float], b: list[float]) -> Params:
    return Low(a, b).state_dict()


@pytest.mark.parametrize("stacked", [False, True])
def test_fedsa_lora_trains_both_and_reports_a(stacked: bool) -> None:
    """From B = (1, 0): z = 2, e = σ(2) − 1; a ← a − lr · 2 e b, b ← b − lr · 2 e a."""
    method, model = FedSALoRA(lr=0.1), Low(b=(1.0, 0.0))
    told, e = setup(model), sigmoid(2.0) - 1
    sent = Sent(method.init_server(told))
    assert list(sent.shared) == [A]
    local = client(main=model, stacked=stacked)
    report, own = method.client_step(sent, method.init_personal(told), local)
    assert numbers(report.params) == {A: close([1 - 0.2 * e, 3.0])}
    assert numbers(own) == {B: close([1 - 0.2 * e, -0.6 * e])}
    deployed = method.deploy(sent, own, client(main=model))
    assert numbers(deployed) == {A: [1.0, 3.0], B: close([1 - 0.2 * e, -0.6 * e])}


def test_fedsa_lora_keeps_the_head_unless_told_to_share_it() -> None:
    told = setup(Low(head=True))
    assert set(FedSALoRA().init_personal(told)) == {B, "head"}
    shares = FedSALoRA(share_head=True)
    assert set(shares.init_server(told)) == {A, "head"} and set(shares.init_personal(told)) == {B}


def test_a_newcomer_to_fedsa_lora_trains_b_alone() -> None:
    """From B = 0: z = 0, e = −1/2, b ← b + lr · aₖ; two passes, the second from z = 2 (b · a)."""
    method, model = FedSALoRA(lr=0.1, newcomer_epochs=2), Low()
    told = setup(model)
    sent = Sent({A: torch.tensor([[2.0], [0.0]]).double()})
    found = method.adapt(sent, method.init_personal(told), client(main=model))
    e = sigmoid(2 * 2 * 0.2) - 1
    assert numbers(found) == {A: [2.0, 0.0], B: close([0.2 - 0.1 * 2 * e * 2, 0.0])}


@pytest.mark.parametrize("stacked", [False, True])
def test_ffa_lora_trains_and_sends_b_alone(stacked: bool) -> None:
    """From B = 0, e = −1/2: b ← lr · a. A stays at its start, and is in no message."""
    method, model = FFALoRA(lr=0.1), Low()
    told = setup(model)
    sent, kept = Sent(method.init_server(told)), method.init_personal(told)
    report, after = method.client_step(sent, kept, client(main=model, stacked=stacked))
    assert numbers(report.params) == {B: close([0.1, 0.3])}
    assert numbers(after) == {A: [1.0, 3.0]}
    assert numbers(method.deploy(Sent(report.params), after, client(main=model))) == {
        A: [1.0, 3.0],
        B: close([0.1, 0.3]),
    }


def products(params: Params) -> Tensor:
    return params[B] @ params[A]


def stacked(*params: Params) -> Params:
    return {name: torch.stack([one[name] for one in params]) for name in params[0]}


def test_only_under_a_common_a_is_the_mean_of_products_the_product_of_means() -> None:
    """What FFA-LoRA is for: of (1, 0)·(1, 0)ᵀ and (0, 1)·(0, 1)ᵀ FedAvg makes 1/2, not 1."""
    left, right = given([1.0, 0.0], [1.0, 0.0]), given([0.0, 1.0], [0.0, 1.0])
    size = torch.tensor([1.0, 1.0]).double()
    cohort = torch.arange(2)
    mean = FedAvg().server_step({}, cohort, Report(stacked(left, right), size))
    assert float(products(mean)) == 0.5 and float(products(left)) == float(products(right)) == 1
    common = [given([1.0, 3.0], [1.0, 0.0]), given([1.0, 3.0], [0.0, 1.0])]
    mean = FedAvg().server_step({}, cohort, Report(stacked(*common), size))
    assert float(products(mean)) == (1 + 3) / 2


def wide(a: list[list[float]], b: list[list[float]]) -> Params:
    return {A: torch.tensor(a, dtype=torch.float64), B: torch.tensor(b, dtype=torch.float64)}


def test_flexlora_averages_products_and_cuts_them_by_hand() -> None:
    """Products diag(4, 0) and diag(0, 2), weights 3 and 1: the mean is diag(3, 1/2).

    Its singular values are 3 and 1/2, with the unit vectors: A = 1, B = diag(3, 1/2).
    """
    left = wide([[1.0, 0.0], [0.0, 0.0]], [[4.0, 0.0], [0.0, 0.0]])
    right = wide([[0.0, 2.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0]])
    method = FlexLoRA(ranks=(1, 2))
    size = torch.tensor([3.0, 1.0]).double()
    new = method.server_step(left, torch.arange(2), Report(stacked(left, right), size))
    assert numbers(new) == {A: close([1.0, 0, 0, 1]), B: close([3.0, 0, 0, 0.5])}
    sent = method.send(new, torch.tensor([0, 1, 2])).own  # of ranks 1, 2 and 1
    assert torch.allclose(
        products({n: v[0] for n, v in sent.items()}), torch.tensor([[3.0, 0], [0, 0]]).double()
    )
    assert torch.allclose(products({n: v[1] for n, v in sent.items()}), products(new))
    assert all(torch.equal(value[0], value[2]) for value in sent.values())
    welcome = method.welcome(new, torch.tensor([0])).own
    assert torch.equal(welcome[B][0], new[B])  # a newcomer gets all ranks


def test_the_new_pair_of_flexlora_is_the_best_of_its_rank_and_of_one_sign() -> None:
    draw = torch.Generator().manual_seed(1)
    own = [
        {
            A: torch.randn(2, 5, generator=draw, dtype=torch.float64),
            B: torch.randn(4, 2, generator=draw, dtype=torch.float64),
        }
        for _ in range(3)
    ]
    size = torch.tensor([1.0, 2.0, 1.0]).double()
    new = FlexLoRA().server_step(own[0], torch.arange(3), Report(stacked(*own), size))
    mean = sum(w * products(one) for w, one in zip((0.25, 0.5, 0.25), own, strict=True))
    u, s, v = torch.linalg.svd(mean)
    assert torch.allclose(products(new), u[:, :2] * s[:2] @ v[:2])
    assert bool((new[A].max(1).values >= new[A].abs().max(1).values).all())


def test_a_client_of_flexlora_never_leaves_its_rank() -> None:
    """With A and B zero in a rank both gradients are zero there, whatever the optimiser."""
    method, model = FlexLoRA(ranks=(1, 2), optimiser="adam", lr=0.1, epochs=3), Low(b=(1.0, 1.0))
    sent = method.send(method.init_server(setup(model)), torch.tensor([0]))
    own = Sent(own={name: value[0] for name, value in sent.own.items()})
    trained = method.client_step(own, (), client(main=model))[0].params
    assert trained[A][1] == 0 and trained[B][0, 1] == 0
    assert trained[A][0] != 1 and trained[B][0, 0] != 1


def test_flexlora_goes_on_with_the_old_a_where_the_mean_has_no_direction() -> None:
    state = wide([[0.6, 0.8], [0.3, 0.1]], [[0.0, 0.0], [0.0, 0.0]])
    same = wide([[1.0, 0.0], [0.0, 0.0]], [[2.0, 0.0], [0.0, 0.0]])
    new = FlexLoRA().server_step(
        state, torch.arange(1), Report(stacked(same), torch.ones(1).double())
    )
    assert numbers(new) == {A: close([1.0, 0, 0.3, 0.1]), B: close([2.0, 0, 0, 0])}


@pytest.mark.parametrize("stacked", [False, True])
def test_pfedlora_trains_the_personal_adapter_then_the_shared_one(stacked: bool) -> None:
    """μ = 1/4, shared a₁ = 1, b₁ = 1, personal a₂ = 3, b₂ = 0: z = 2 · 3/4 · 1.

    Personal: ∂/∂b₂ = 2 e μ a₂, and a₂ stays, for b₂ is zero. Then z' = 2 (3/4 + μ b₂ a₂) and
    shared: ∂/∂b₁ = 2 e' (1 − μ) a₁, ∂/∂a₁ = 2 e' (1 − μ) b₁.
    """
    method, model = PFedLoRA(lr=0.1, personal_rank=1, weight=0.25), Low(b=(1.0, 0.0))
    told, e = setup(model), sigmoid(1.5) - 1
    sent, own = Sent(method.init_server(told)), method.init_personal(told)
    assert numbers(sent.shared) == {A: [1.0], B: [1.0]} and numbers(own) == {A: [3.0], B: [0.0]}
    report, own = method.client_step(sent, own, client(main=model, stacked=stacked))
    b2 = -0.1 * 2 * e * 0.25 * 3
    assert numbers(own) == {A: [3.0], B: close([b2])}
    e2 = sigmoid(2 * (0.75 + 0.25 * 3 * b2)) - 1
    assert numbers(report.params) == {A: close([1 - 0.15 * e2]), B: close([1 - 0.15 * e2])}
    models = method.models(sent, method.deploy(sent, own, client(main=model)))
    assert numbers(models["personal"]) == {A: [1.0, 3.0], B: close([0.75, 0.25 * b2])}
    assert numbers(models["global"]) == {A: [1.0, 0.0], B: [0.75, 0.0]}


def test_a_newcomer_to_pfedlora_trains_its_adapter_beside_the_shared_one() -> None:
    """As above, twice: in the second pass a₂ moves too, by 2 e' μ b₂; what is shared stays."""
    method, model = (
        PFedLoRA(lr=0.1, personal_rank=1, weight=0.25, newcomer_epochs=2),
        Low(b=(1.0, 0.0)),
    )
    told, a2, b2 = setup(model), 3.0, 0.0
    for _ in range(2):
        e = sigmoid(2 * (0.75 + 0.25 * a2 * b2)) - 1
        a2, b2 = a2 - 0.05 * e * b2, b2 - 0.05 * e * a2
    sent, own = Sent(method.init_server(told)), method.init_personal(told)
    found = method.adapt(sent, own, client(main=model))
    assert numbers(found) == {A: close([1.0, a2]), B: close([0.75, 0.25 * b2])}


def test_pfedlora_without_weight_on_the_personal_adapter_is_fedavg() -> None:
    """Of the shared ranks; the personal adapter stays as it was."""
    method, told = PFedLoRA(lr=0.1, personal_rank=1, weight=0.0), setup(Low(b=(1.0, 0.0)))
    sent, own = Sent(method.init_server(told)), method.init_personal(told)
    report, after = method.client_step(sent, own, client(main=Low()))
    plain = FedAvg(lr=0.1).client_step(sent, (), client(main=Low(a=(1.0,), b=(1.0,))))[0]
    assert numbers(report.params) == numbers(plain.params) and numbers(after) == numbers(own)


def turned(params: Params, by: Tensor) -> Params:
    return {A: by.T @ params[A], B: params[B] @ by}


def test_fedrot_lora_brings_a_turned_adapter_back() -> None:
    """A quarter turn, and a reflection, of the same pair: the product is the same, the mean is not.

    Training is switched off by a tiny rate, so what is reported is what was received, turned back.
    """
    common = wide([[2.0, 0.0, 1.0], [0.0, 1.0, 0.0]], [[1.0, 0.5], [0.0, 2.0]])
    for by in ([[0.0, -1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, -1.0]]):
        own = turned(common, torch.tensor(by).double())
        assert torch.allclose(products(own), products(common))
        for round in (0, 1):  # by A, then by B
            back = aligned(FedRotLoRA(), own, common, round)
            assert all(torch.allclose(back[name], common[name]) for name in (A, B))
        assert torch.equal(aligned(FedRotLoRA(strength=0.0), own, common, 0)[A], own[A])


def test_fedrot_lora_goes_a_part_of_the_way() -> None:
    """A quarter turn comes back along ¾ I + ¼ R, which is (3, 1; −1, 3) / 4: next to it, over √10.

    So by arctan(1/3), of the ninety degrees.
    """
    common = wide([[2.0, 0.0, 1.0], [0.0, 1.0, 0.0]], [[1.0, 0.5], [0.0, 2.0]])
    own = turned(common, torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double())
    back = aligned(FedRotLoRA(strength=0.25), own, common, 0)
    due = turned(own, torch.tensor([[3.0, 1.0], [-1.0, 3.0]]).double() / 10**0.5)
    assert all(torch.allclose(back[name], due[name]) for name in (A, B))


def aligned(method: FedRotLoRA, own: Params, common: Params, round: int) -> Params:
    """Let a client whose training ends at `own` align with what it was sent."""
    local = client(main=Low(), round=round)
    object.__setattr__(method, "fit", lambda *_: own)
    return method.client_step(Sent(common), (), local)[0].params


def test_fedrot_lora_keeps_every_clients_product() -> None:
    draw = torch.Generator().manual_seed(0)
    own, common = (
        {
            A: torch.randn(3, 5, generator=draw, dtype=torch.float64),
            B: torch.randn(4, 3, generator=draw, dtype=torch.float64),
        }
        for _ in range(2)
    )
    for strength in (1.0, 0.4):
        back = aligned(FedRotLoRA(strength=strength), own, common, 0)
        assert torch.allclose(products(back), products(own))
        assert float((back[A] - common[A]).norm()) < float((own[A] - common[A]).norm())


@pytest.mark.parametrize("kind", ALL)
def test_a_network_without_lora_is_refused(kind: type) -> None:
    with pytest.raises(MethodError, match=r"the network has none; add \[adapter\] name = \"lora\""):
        kind().init_server(setup(Line()))


def test_ranks_that_do_not_fit_are_refused() -> None:
    told = setup(Low())
    with pytest.raises(
        ConfigError, match="a client is to have rank 3, and the network's LoRA has 2"
    ):
        FlexLoRA(ranks=(1, 3)).init_server(told)
    with pytest.raises(ConfigError, match="rank 2, of which 2 are to be personal"):
        PFedLoRA(personal_rank=2).init_server(told)
    with pytest.raises(MethodError, match=r"has ranks \[1, 2\], expected one"):
        lora_pairs.rank_of({"a.lora_A": torch.zeros(1, 2), "b.lora_A": torch.zeros(2, 2)})
