"""Stand-ins for nodes, with blank examples of their form: what messages must look like."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from idiolect.core.method import Method, Setup
from idiolect.core.tree import Tree
from idiolect.data import Dataset
from idiolect.deploy.handshake import NodeRegistry
from idiolect.engine.architecture import Architecture
from idiolect.engine.deployment_runtime import ClientIdentity, ClientRuntime, ServerRuntime

_CPU = torch.device("cpu")


class MessageTemplates:
    """A stand-in for the nodes of each architecture under each seed."""

    def __init__(
        self,
        method: Method,
        roster: NodeRegistry,
        architectures: Mapping[str, Architecture],
        seeds: Sequence[int],
    ) -> None:
        self._method = method
        self._form = roster.first.form
        self.architectures = architectures
        self._seeds = seeds
        self._newcomers = roster.model is not None
        self._clients = roster.model.clients if roster.model else roster.clients
        self.stand_ins = [
            [self._made(own, seed) for own in architectures.values()] for seed in seeds
        ]
        self._forms: dict[tuple[Any, ...], Tree] = {}

    def _made(self, own: Architecture, seed: int) -> ClientRuntime:
        lessons, test = self._form.lessons()
        place = ClientIdentity((own.clients or (0,))[0], self._clients, seed, self._newcomers)
        return ClientRuntime(self._method, place, lessons, test, own, _CPU)

    def kind(self, client: int) -> int:
        """Say which architecture a client runs, by its place."""
        served = [own.clients for own in self.architectures.values()]
        return next(n for n, own in enumerate(served) if own is None or client in own)

    def setups(self, run: int) -> list[Setup]:
        """Return what is known of each architecture before the first round."""
        return [one.setup for one in self.stand_ins[run]]

    def form(self, client: int, kind: str, **flags: bool) -> Tree:
        """Return the form of a node's answer, found by letting its stand-in answer once."""
        place = self.kind(client)
        key = (place, kind, *sorted(flags.items()))
        if key not in self._forms:
            self._forms[key] = self._answer(self.stand_ins[0][place], kind, flags)
        return self._forms[key]

    def _answer(self, stand_in: ClientRuntime, kind: str, flags: Mapping[str, bool]) -> Tree:
        if kind == "meet":
            return ()
        if kind == "step":
            return stand_in.step(stand_in.form, 0)[0]
        if kind == "tell":
            return stand_in.tell(stand_in.form, 0)[0]
        chosen = [flag for flag in ("only_global", "newcomers") if flags[flag]]
        sent = stand_in.guest_form if flags["newcomers"] else stand_in.form
        marks, facts, _ = stand_in.judge(sent, 0, tested=flags["tested"], flags=chosen)
        return {"marks": marks, "facts": facts}

    def servings(self, run: int, public: Dataset | None) -> list[ServerRuntime]:
        """Seat the server itself beside the nodes of each architecture, with public examples."""
        lessons, _ = self._form.lessons()
        known = dataclasses.replace(lessons, public=public)
        return [
            ServerRuntime(self._method, self._seeds[run], known, own, _CPU)
            for own in self.architectures.values()
        ]
