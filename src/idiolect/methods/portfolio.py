"""Portfolio: each client's own mixture of candidates, on validation data never below its local one.

The rounds are FedAvg's, and so is what crosses the network. Beside them a client trains a model on
its own data only, as `local` does, and keeps the best global model it met, as PersFL does. After
the rounds it trains candidates, those that start alike as rows of one stack: PersFL's grid from its
best teacher; all layers (FT) or the last (FB) of the final global model, plain, held by
distillation (KD) or by elastic weights (EWC). `personalise.choosing` makes one model of them on
validation data, `personalise.pooling` with what the other clients' validation data say. A mixture
with the local model is the MoE of Pye and Yu (2021).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.capabilities import (
    Facts,
    FinalExchange,
    NewcomerHistory,
    NewcomerModel,
    Reason,
    Refit,
)
from idiolect.core.client import Local
from idiolect.core.method import Report, Sent, Setup, setting
from idiolect.core.tree import Params, Tree
from idiolect.errors import ConfigError
from idiolect.methods.fedavg import FedAvg
from idiolect.methods.persfl import Teacher, better, grid, no_teacher
from idiolect.methods.personalise import choosing, local_training
from idiolect.methods.personalise.choosing import Blend, CandidateScores, Votes
from idiolect.methods.personalise.local_training import LossTerms, StartingPoint, chosen

WORDS = {
    "local": "local model",
    "global": "global model",
    "teacher": "best global model met",
    "persfl": "PersFL student",
    "ft": "fine-tuned model",
    "ft+kd": "fine-tuned model with distillation",
    "ft+ewc": "fine-tuned model with elastic weights",
    "fb": "fine-tuned head",
    "fb+kd": "fine-tuned head with distillation",
    "fb+ewc": "fine-tuned head with elastic weights",
}
KINDS = tuple(WORDS)


class PortfolioState(NamedTuple):
    """What a client keeps between rounds; () for what no candidate needs."""

    teacher: Teacher | tuple[()]
    alone: Params | tuple[()]  # trained on its own data only
    again: Params | tuple[()] = ()  # the latter, on its validation rows too


class Twins(NamedTuple):
    """Two global models: by training rows alone, and by training and validation rows."""

    chosen_by: Params
    used: Params


class Candidate(NamedTuple):
    """The terms of one candidate's training."""

    name: str
    share: float = 0.0  # α or λ: of the distillation
    temperature: float = 1.0  # T
    ewc: float = 0.0  # λ: of the elastic weights
    pace: float = 1.0  # factor of the learning rate


class PortfolioModels(NamedTuple):
    """A client's model, its candidates, and how they did on validation data."""

    personal: Blend
    candidates: Params  # [candidate, ...]
    weights: Tensor  # [candidate] in the mixture
    accuracies: Tensor  # [candidate]
    accuracy: Tensor  # of the mixture
    proven: Tensor  # 1 where the client's own validation data speak for leaving the local model
    votes: Votes  # its own, before the exchange
    others: Tensor  # how many others voted
    others_gain: Tensor  # in accuracy over their local models, in the mean; NaN without others
    real: Tensor | tuple[()] = ()  # something where what is called accuracy here is another score
    again: Params | tuple[()] = ()  # [candidate, ...] trained on validation rows too


@dataclass(frozen=True, kw_only=True)
class Portfolio(Facts, FinalExchange, NewcomerHistory, NewcomerModel, Reason, Refit, FedAvg):
    """FedAvg, then at each client a mixture of candidates that its validation data choose."""

    title: ClassVar[str] = "Portfolio"
    paper: ClassVar[str] = "none: ours, of the parts of PersFL and of Pye and Yu 2021"
    tunes: ClassVar[bool] = True
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "whole-grid": {"temperatures": (1.0, 5.0, 25.0)}
    }

    candidates: tuple[str, ...] = setting(
        KINDS, "what a client may choose from; without `local` nothing is promised", choices=KINDS
    )
    shares: tuple[float, ...] = setting(
        (0.0, 0.25, 0.5, 0.75), "shares of PersFL's soft loss (λ)", least=0, most=1, deploy=True
    )
    temperatures: tuple[float, ...] = setting(
        (5.0,), "temperatures of PersFL's grid (T)", above=0, deploy=True
    )
    tune_epochs: int = setting(
        10, "passes in which a client trains its candidates", least=1, deploy=True
    )
    tune_lr: float = setting(0.01, "learning rate of that training", above=0, deploy=True)
    paces: tuple[float, ...] = setting(
        (1.0, 5.0), "factors of that rate which plain FT and FB try", above=0, deploy=True
    )
    fb_layers: int = setting(1, "how many last layers FB trains", least=1, deploy=True)
    kd_weight: float = setting(0.5, "share of KD's soft loss (α)", least=0, most=1, deploy=True)
    kd_temperature: float = setting(6.0, "temperature of KD (T)", above=0, deploy=True)
    ewc_weight: float = setting(5.0, "strength of EWC's hold (λ)", least=0, deploy=True)
    members: int = setting(5, "most candidates in a mixture; 1: a single one", least=1, deploy=True)
    caution: float = setting(
        10.0, "validation examples that an average of all counts as", above=0, deploy=True
    )
    heed: float = setting(
        30.0, "validation examples that the others' mixtures count as instead", above=0, deploy=True
    )
    margin: float = setting(
        1.5,
        "standard errors by which a mixture must be more likely than the local model",
        least=0,
        deploy=True,
    )
    trust: float = setting(
        3.0,
        "deviations by which it must be more accurate instead, by all clients' validation data",
        least=0,
        deploy=True,
    )
    refits: bool = setting(
        False, "train all again beside it, on validation rows too, and use that once it is chosen"
    )
    keep_candidates: bool = setting(False, "score every candidate at the end", deploy=True)
    newcomer_epochs: int = setting(
        20, "passes in which a newcomer trains its local model", least=1, deploy=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.candidates)) < len(self.candidates):
            raise ConfigError(
                f"Portfolio: candidates are {', '.join(self.candidates)}, expected each once"
            )

    @property
    def chooses(self) -> bool:
        """It looks at validation rows, and keeps apart what it trains on them by itself."""
        return not self.refits

    def refitted(self) -> "Portfolio":
        """Train the rounds and the candidates twice."""
        return dataclasses.replace(self, refits=True)

    # What there is to choose from, always in the same order.

    @property
    def cells(self) -> list[Candidate]:
        """PersFL's grid; its λ = 1 is the teacher as it is, and a candidate without training."""
        pairs = grid(self.shares, self.temperatures, (0.0,))
        return [Candidate(f"λ={share:g} T={t:g}", share, t) for share, t in pairs if share < 1]

    def holds(self, trains: str) -> list[Candidate]:
        """FT's or FB's trainings, as far as they are wanted."""
        plain = [Candidate(trains if p == 1 else f"{trains} ×{p:g}", pace=p) for p in self.paces]
        held = [
            Candidate(f"{trains}+kd", self.kd_weight, self.kd_temperature),
            Candidate(f"{trains}+ewc", ewc=self.ewc_weight),
        ]
        wanted = [trial for trial in held if trial.name in self.candidates]
        return [*(plain if trains in self.candidates else []), *wanted]

    @property
    def names(self) -> list[str]:
        """Name the candidates; a cell of the grid by its λ and T, a faster training by its pace."""
        ready = [name for name in ("local", "global", "teacher") if name in self.candidates]
        cells = self.cells if "persfl" in self.candidates else []
        trials = [*cells, *self.holds("ft"), *self.holds("fb")]
        return ready + [trial.name for trial in trials]

    @property
    def models_held(self) -> int:
        """The candidates, and those that make the mixture."""
        return len(self.names) + self.members  # with two global models, each counts twice

    @property
    def taught(self) -> bool:
        """Whether the best global model over the rounds is needed."""
        return bool({"teacher", "persfl"} & set(self.candidates))

    # The rounds.

    def init_server(self, setup: Setup) -> Params | Twins:
        """Start with one model, or twice with the same."""
        start = setup.params
        return Twins(start, tree.map(torch.clone, start)) if self.refits else start

    def init_personal(self, setup: Setup) -> PortfolioState:
        """Start with no teacher, and alone from the common initial model."""
        alone = setup.params if "local" in self.candidates else ()
        teacher = no_teacher(setup) if self.taught else ()
        again = tree.map(torch.clone, alone) if self.refits else ()
        return PortfolioState(teacher, alone, again)

    def client_step(
        self, sent: Sent, personal: PortfolioState, local: Local
    ) -> tuple[Report, PortfolioState]:
        """Do FedAvg's step, and the same from the client's own model, on equal batches."""
        kept = self.meet(sent, personal, local)
        judged, used = _pair(sent.shared)
        first, second = local.alike(
            lambda: self._stepped((judged, kept.alone), local),
            lambda: self._stepped((used, kept.again), local.with_validation()),
        )
        kept = kept._replace(alone=first[1], again=second[1])
        trained: Tree = Twins(first[0], second[0]) if used else first[0]
        return Report(trained, local.size), kept

    def _stepped(self, starts: Sequence[Params | tuple[()]], local: Local) -> list[Tree]:
        """Train for a round from each model there is, on equal batches."""
        there = [start for start in starts if start]
        if len(there) < 2:
            return [self.fit(local, start) if start else () for start in starts]
        stack = local.each(lambda start: self.fit(local, start), tree.stack(there))
        return [tree.map(lambda leaf, n=n: leaf[n], stack) for n in range(len(there))]

    def meet(self, sent: Sent, personal: PortfolioState, local: Local) -> PortfolioState:
        """Keep the received model if its validation loss is lower than any before."""
        if not personal.teacher:
            return personal
        judged, _ = _pair(sent.shared)
        return personal._replace(teacher=better(judged, personal.teacher, local))

    # The end.

    def deploy(self, sent: Sent, personal: PortfolioState, local: Local) -> PortfolioModels:
        """Train the candidates, and make one model of them on validation data."""
        kept = self.meet(sent, personal, local)
        judged, used = _pair(sent.shared)
        best = kept.teacher.params if kept.teacher else ()
        if not self.refits:
            return self.choose(self._candidates(judged, best, kept.alone, local), local)
        # The teacher stays: another training's model of the same round is good for other clients.
        candidates, again = local.alike(
            lambda: self._candidates(judged, best, kept.alone, local),
            lambda: self._candidates(used, best, kept.again, local.with_validation()),
        )
        return self.choose(candidates, local, again=again)

    def tell(self, deployed: PortfolioModels, local: Local) -> Votes:
        """Return the weights of the mixture, and what it gains."""
        return deployed.votes

    def hear(self, deployed: PortfolioModels, others: Votes, local: Local) -> PortfolioModels:
        """Choose again from the same candidates, with the others' votes."""
        chosen = self.choose(deployed.candidates, local, others, deployed.again)
        return chosen._replace(votes=deployed.votes)

    def choose(
        self,
        candidates: Params,
        local: Local,
        others: Votes | None = None,
        again: Params | tuple[()] = (),
    ) -> PortfolioModels:
        """Mix the candidates by the rule, or stay with the local model.

        What is used is the same mixture of those that were trained `again`, if they were.
        """
        scores = choosing.scored(candidates, local)
        sound = choosing.sound(candidates, scores)
        weights = self._weights(scores, sound, others)
        blend, mixture = choosing.blended(candidates, weights, self.members)
        first = tree.map(lambda leaf: leaf[0], candidates)
        compared = choosing.compared(blend, first, local)
        accuracy, evident = compared.accuracy, scores.counts.sum() > 1
        votes = choosing.votes(weights, compared, evident & (local.size > 0))
        proven = torch.ones_like(evident)
        if "local" in self.candidates:
            # The promise, and more: without evidence a client stays with what it has by itself.
            proven = choosing.surely_better(scores, mixture, self.margin) | ~sound[0]
            gains = proven
            if others is not None:
                gains = gains | choosing.surely_gains(compared, evident, others, self.trust)
            keeps = accuracy >= scores.accuracies[0] - 1e-6  # rounding apart
            taken = gains & (keeps | accuracy.isnan())  # of no example, none is misjudged
            mixture = torch.where(taken, mixture, choosing.alone(mixture.new_zeros(()), scores))
            accuracy = torch.where(taken, accuracy, scores.accuracies[0])
            blend, mixture = choosing.blended(candidates, mixture, self.members)
        if again:
            refitted, _ = choosing.blended(again, mixture, self.members)
            blend = tree.where(choosing.finite(refitted), refitted, blend)
        heard = tree.zeros_like(votes) if others is None else others
        return PortfolioModels(
            blend,
            candidates,
            mixture,
            scores.accuracies,
            accuracy,
            proven.to(accuracy.dtype),
            votes,
            heard.voices,
            choosing.mean_gain(heard),
            () if local.task.kind == "classes" else torch.ones_like(accuracy),
            again,
        )

    def _weights(self, scores: CandidateScores, sound: Tensor, others: Votes | None) -> Tensor:
        """Weigh the candidates; the prior is even, or what the others chose."""
        if self.members == 1:
            return choosing.alone(choosing.best_of(scores, sound), scores)
        if others is None:
            return choosing.fitted(scores, choosing.even(sound), self.caution)
        return choosing.fitted(scores, *choosing.prior(others, sound, self.caution, self.heed))

    def adapt(self, sent: Sent, personal: PortfolioState, local: Local) -> PortfolioModels:
        """Let a newcomer train its local model first, as `local` does."""
        if personal.alone:
            start, epochs = personal.alone, self.newcomer_epochs
            parts = [local, *([local.with_validation()] if personal.again else [])]
            alone, *again = local.alike(
                *(lambda own=own: self.fit(own, start, lr=self.lr, epochs=epochs) for own in parts)
            )
            personal = personal._replace(alone=alone, again=again[0] if again else ())
        return self.deploy(sent, personal, local)

    def _candidates(
        self,
        common: Params,
        teacher: Params | tuple[()],
        alone: Params | tuple[()],
        local: Local,
    ) -> Params:
        """Return all candidates [candidate, ...], in the order of their names."""
        ready: dict[str, Tree] = {"local": alone, "global": common, "teacher": teacher}
        first = [model for name, model in ready.items() if name in self.candidates]
        cells = self.cells if "persfl" in self.candidates else []
        every, head = common.__contains__, chosen(common, True, self.fb_layers, ())
        trained = local.alike(
            lambda: self._trained(teacher or common, cells, every, local),
            lambda: self._trained(common, self.holds("ft"), every, local),
            lambda: self._trained(common, self.holds("fb"), head, local),
        )
        stacks = [tree.stack(first)] if first else []
        found: Params = tree.concat([*stacks, *filter(None, trained)])
        return found

    def _trained(
        self,
        start: Params,
        trials: Sequence[Candidate],
        wanted: Callable[[str], bool],
        local: Local,
    ) -> Params | tuple[()]:
        """Train from one model under several terms, as rows of one stack."""
        if not trials:
            return ()
        at, held = StartingPoint(start, start, start), any(trial.ewc for trial in trials)
        taught = any(trial.share for trial in trials)
        importance = local_training.fisher(self, at, wanted, local) if held else {}

        def one(share: Tensor, temperature: Tensor, ewc: Tensor, pace: Tensor) -> Tree:
            terms = LossTerms(share if taught else None, temperature, ewc if held else None)
            rate, epochs = self.tune_lr * pace, self.tune_epochs
            return local_training.adapted(self, at, wanted, terms, importance, local, rate, epochs)

        columns = zip(*[trial[1:] for trial in trials], strict=True)
        stack: Params = local.each(one, *(local.numbers(column) for column in columns))
        return stack

    def models(self, sent: Sent, deployed: PortfolioModels) -> dict[str, Tree]:
        """The mixture, the global model, the local one, and every candidate where all are kept."""
        judged, used = _pair(sent.shared)
        if not deployed:
            return {"global": used or judged}
        named: dict[str, Tree] = {"personal": deployed.personal, "global": used or judged}
        found = deployed.again or deployed.candidates
        for place, name in enumerate(self.names):
            if name == "local" or (self.keep_candidates and name != "global"):
                named[name] = tree.map(lambda leaf, n=place: leaf[n], found)
        return named

    def predict(self, model: Tree, x: Tensor, local: Local) -> Tensor:
        """Mix, where it is a mixture."""
        if isinstance(model, Blend):
            return choosing.predict(model, x, local)
        return local.logits(model, x)

    def facts(self, deployed: PortfolioModels) -> dict[str, Tensor]:
        """The weights of the mixture, how each candidate did on validation data, who else voted."""
        score = {} if isinstance(deployed.real, tuple) else {"score_of_task": deployed.real}
        return {
            **score,
            "weights": deployed.weights,
            "validation_accuracy": deployed.accuracy,
            "validation_accuracy_of_candidates": deployed.accuracies,
            "proven": deployed.proven,
            "others": deployed.others,
            "others_gain": deployed.others_gain,
        }

    def reason(self, facts: Mapping[str, Any]) -> str:
        """Name the members of a client's mixture, and what they were worth."""
        parts = sorted(
            (-float(weight), place) for place, weight in enumerate(facts["weights"]) if weight > 0
        )
        if not parts:
            return ""
        words = [f"{self._spoken(place)} {-weight:.2f}" for weight, place in parts]
        text = self._spoken(parts[0][1]) if len(parts) == 1 else "mixture of " + ", ".join(words)
        members = [self.names[place] for _, place in parts]
        if len(parts) == 2 and "local" in members:
            other = members.index("local") ^ 1
            text = f"MoE of {self._spoken(parts[other][1])}, weight {-parts[other][0]:.2f}"
        own = float(facts["validation_accuracy"])
        word = ""
        if "local" in self.candidates and members != ["local"] and not facts.get("proven", 1):
            gain = 100 * float(facts["others_gain"])
            word = f"; on the word of {facts['others']:.0f} others, who gained {gain:.1f} points"
        if math.isnan(own):
            return f"{text}; there was no validation data to choose by{word}"
        text = f"{text}: {_told(facts, own)}"
        if "local" not in self.candidates:
            return text
        if members == ["local"]:
            return f"{text}; nothing else was surely better"
        alone = float(facts["validation_accuracy_of_candidates"][0])
        return f"{text} against {_told(facts, alone)} local{word}"

    def _spoken(self, place: int) -> str:
        name = self.names[place]
        if name in WORDS:
            return WORDS[name]
        if "×" in name:
            trains, pace = name.split(" ×")
            return f"{WORDS[trains]} at {pace} times the rate"
        share, temperature = (part.split("=")[1] for part in name.split())
        return f"{WORDS['persfl']} (λ {share}, T {temperature})"


def _pair(shared: Params | Twins) -> Twins:
    """Return the global model that choices are made by, and the one that is used, if another."""
    return shared if isinstance(shared, Twins) else Twins(shared, {})


def _told(facts: Mapping[str, Any], score: float) -> str:
    """Say how good a model is on validation data."""
    return f"score {score:.3f}" if "score_of_task" in facts else f"{100 * score:.1f} %"
