"""The server's exchange with its nodes: a message to each client, its answer checked and read.

The structure of every answer is known before: the method's client side runs once on blank examples
of the nodes' form (`MessageTemplates`).
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from idiolect.core import tree
from idiolect.core.method import Method, Report, Sent, Setup
from idiolect.core.tree import Tree
from idiolect.data import Dataset
from idiolect.deploy import compression, protocol
from idiolect.deploy.handshake import NodeRegistry
from idiolect.deploy.messenger import Answer
from idiolect.deploy.protocol import CODES, POLICY_LIMITS, Message, Refused
from idiolect.deploy.secure_sum import SumFailed, run_secure_sum
from idiolect.engine.architecture import Architecture
from idiolect.engine.deployment_runtime import ClientIdentity, ClientRuntime, ServerRuntime
from idiolect.engine.row_metrics import MetricChoice
from idiolect.errors import ConfigError, DeployError
from idiolect.experiment.schema import Deployment

_CPU = torch.device("cpu")
_NONE: Mapping[str, Any] = MappingProxyType({})


class MessageTemplates:
    """A client of blank examples for each architecture under each seed."""

    def __init__(
        self,
        method: Method,
        registry: NodeRegistry,
        architectures: Mapping[str, Architecture],
        seeds: Sequence[int],
    ) -> None:
        self._method = method
        self._architectures = list(architectures.values())
        self._seeds = seeds
        self._blank, test = registry.first.form.blank_client()
        run = registry.finished
        clients = run.clients if run else registry.clients
        self.runtimes = [
            [
                ClientRuntime(
                    method,
                    ClientIdentity((own.clients or (0,))[0], clients, seed, run is not None),
                    self._blank,
                    test,
                    own,
                    _CPU,
                )
                for own in self._architectures
            ]
            for seed in seeds
        ]
        self.choice: MetricChoice | None = None  # what nodes measure when they are scored
        self.detail = False  # all metrics of the task
        self._answers: dict[tuple[Any, ...], Tree] = {}

    def architecture(self, client: int) -> int:
        """Return the position of the client's architecture."""
        served = (own.clients for own in self._architectures)
        return next(n for n, own in enumerate(served) if own is None or client in own)

    def setups(self, run: int) -> list[Setup]:
        """Return the setup of each architecture."""
        return [one.setup for one in self.runtimes[run]]

    def answer(self, client: int, kind: str, **flags: bool) -> Tree:
        """Return a tree with the structure of a client's answer to a kind of message."""
        place = self.architecture(client)
        measured = (self.choice, self.detail) if kind == "judge" else None
        key = (place, kind, measured, *sorted(flags.items()))
        if key not in self._answers:
            self._answers[key] = self._answered(self.runtimes[0][place], kind, flags)
        return self._answers[key]

    def _answered(self, runtime: ClientRuntime, kind: str, flags: Mapping[str, bool]) -> Tree:
        if kind == "meet":
            return ()
        if kind == "step":
            return runtime.step(runtime.form, 0)[0]
        if kind == "tell":
            return runtime.tell(runtime.form, 0)[0]
        chosen = [flag for flag in ("only_global", "newcomers") if flags[flag]]
        sent = runtime.guest_form if flags["newcomers"] else runtime.form
        own: Any = {"flags": chosen, "choice": self.choice, "detail": self.detail}
        marks, facts, _ = runtime.evaluate(sent, 0, tested=flags["tested"], **own)
        return {"marks": marks, "facts": facts}

    def server_runtimes(self, run: int, public: Dataset | None) -> list[ServerRuntime]:
        """Return the server's own runtime for each architecture, with public examples."""
        train = dataclasses.replace(self._blank, public=public)
        return [
            ServerRuntime(self._method, self._seeds[run], train, own, _CPU)
            for own in self._architectures
        ]


class NodeExchange:
    """Sends messages about one method to its nodes and reads the answers."""

    def __init__(
        self,
        registry: NodeRegistry,
        templates: MessageTemplates,
        deploy: Deployment,
        hides: bool = False,
    ) -> None:
        """`hides`: noise hides each client, as well among few that were drawn as among many."""
        self._hides = hides
        self._messenger = registry.messenger
        self._registry = registry
        self._templates = templates
        self._deploy, self._codec = deploy, compression.codec_of(deploy)
        self.failed: dict[str, str] = {}  # sites that gave no good answer to the last message
        self._bytes = [0, 0]

    def taken_bytes(self) -> tuple[int, int]:
        """Return the bytes that went down and up since the last call."""
        down, up = self._bytes
        self._bytes = [0, 0]
        return down, up

    def collect(
        self,
        kind: str,
        run: int,
        head: Mapping[str, Any],
        clients: np.ndarray,
        sent: Sent,
        groups: Sequence[Tree] = (),
        flags: Mapping[str, bool] = _NONE,
        true_for: Mapping[str, Collection[int]] = _NONE,
    ) -> dict[int, Tree]:
        """Send every client its part; return the answers that are in order.

        `groups` holds the server's state for each architecture. A field of `true_for` is true in
        the messages to the given clients and false in the others.
        """
        head = {**head, **flags}
        messages, packed = {}, {}
        for row, client in enumerate(clients.tolist()):
            architecture = self._templates.architecture(client)
            own_fields = {name: client in those for name, those in true_for.items()}
            # Without anything for one client alone, one message serves an architecture.
            target = (row, -1) if tree.leaves(sent.own) else (-1, architecture)
            key = (*target, *own_fields.values())
            if key not in packed:
                own = tree.map(lambda leaf, row=row: leaf[row : row + 1], sent.own)
                content = Sent(sent.shared, own, groups[architecture] if groups else ())
                packed[key] = protocol.pack(kind, {**head, **own_fields}, content, self._codec)
            messages[client] = packed[key]

        def read(client: int, message: Message) -> Tree:
            # A bystander sends no report; one under masks follows in the secure sum.
            empty = self._deploy.secure and kind in ("step", "tell")
            empty |= kind == "step" and client not in true_for["heard"]
            template = () if empty else self._templates.answer(client, kind, **flags)
            codec: protocol.Codec = protocol.UNCOMPRESSED
            if kind == "step" and not empty:
                topk = self._deploy.compress == "topk"
                codec = compression.TopK(self._deploy.keep, sent.shared) if topk else self._codec
            content = protocol.fitted(template, message.leaves, codec)
            if kind == "step":
                protocol.refuse_nonfinite(content)
                self._refuse_other_size(run, client, content, codec)
            return content

        return self._exchange(kind, head, messages, read)

    def packed(self, head: Mapping[str, Any], clients: np.ndarray, sent: Sent) -> dict[str, bytes]:
        """Return the message of a buffered round, which is the same for all sites."""
        content = Sent(sent.shared, sent.own, ())
        blob = protocol.pack("step", {**head, "heard": True}, content, self._codec)
        sites = self._registry.sites
        return {sites[client]: blob for client in clients.tolist()}

    def read_report(self, head: Mapping[str, Any], run: int, client: int, answer: Answer) -> Report:
        """Read a report of a buffered round, checked like any other."""
        self._refuse_other_question("step", head, self._registry.sites[client], answer)
        template = self._templates.answer(client, "step")
        report: Report = protocol.fitted(template, answer.message.leaves, self._codec)
        protocol.refuse_nonfinite(report)
        self._refuse_other_size(run, client, report, self._codec)
        self._bytes[0] += answer.bytes_down
        self._bytes[1] += answer.bytes_up
        return report

    def _refuse_other_question(
        self, kind: str, head: Mapping[str, Any], site: str, answer: Answer
    ) -> None:
        """Refuse an answer to anything but what was asked."""
        stated = answer.message.head
        echo = {key: stated.get(key) for key in ("run", "label", "seed", "round")}
        if echo != {key: head[key] for key in echo} or stated.get("to") != kind:
            raise Refused("round", f"{site} answered to {echo}")

    def _refuse_other_size(
        self, run: int, client: int, report: Tree, codec: protocol.Codec
    ) -> None:
        """Refuse a report of another number of examples than its node stated when joining."""
        stated = getattr(report, "size", None)
        if not isinstance(stated, torch.Tensor):
            return
        rows = self._registry.sizes(0, run)[client]
        expected = torch.full_like(stated, rows)
        if isinstance(codec, compression.Half):
            expected = expected.half().to(stated.dtype)
        if not torch.equal(stated, expected):
            raise Refused("sizes", f"a report of {stated.tolist()} examples; {rows} when joining")

    def _exchange(
        self,
        kind: str,
        head: Mapping[str, Any],
        messages: Mapping[int, bytes],
        read: Callable[[int, Message], Any],
        failed: dict[str, Refused] | None = None,
    ) -> dict[int, Any]:
        """Send messages and read the answers to them; add to `failed` why a site gave none."""
        sites = self._registry.sites
        number = {sites[client]: client for client in messages}
        found: dict[int, Any] = {}

        def take(site: str, answer: Answer) -> None:
            self._refuse_other_question(kind, head, site, answer)
            found[number[site]] = read(number[site], answer.message)
            self._bytes[0] += answer.bytes_down
            self._bytes[1] += answer.bytes_up

        by_site = {sites[client]: message for client, message in messages.items()}
        refused = self._messenger.ask(by_site, self._messenger.policy.timeout, take)
        if failed is not None:
            failed.update(refused)
        passed = {site: self._messenger.absence(site) for site in by_site if site not in refused}
        self.failed = {site: why for site, why in passed.items() if why}
        self.failed |= {site: why.reason for site, why in refused.items()}
        ahead = sorted(site for site, why in self.failed.items() if why == "ahead")
        if 2 * len(ahead) > len(by_site):  # one alone may be wrong
            raise ConfigError(
                f"{', '.join(ahead)} have done more rounds of run {head['run']} than the "
                f"{head['round']} that this server knows of: its folder is an older copy. Bring "
                "back a newer one of idiolect/runs, or start a new run in another --out folder; "
                "what the nodes hold stays as it is"
            )
        return found

    def secure_sum(
        self, head: Mapping[str, Any], cohort: np.ndarray, done: Sequence[int], form: Report
    ) -> tuple[list[int], Report]:
        """Return who is in the secure sum of what clients have `done`, and its mean."""
        failed: dict[str, Refused] = {}

        def ask(
            kind: str,
            clients: Sequence[int],
            more: Mapping[str, Any],
            read: Callable[[int, Message], Any],
            content: Mapping[int, Tree] | None = None,
        ) -> dict[int, Any]:
            whole = {**head, **more}
            same = protocol.pack(kind, whole) if content is None else b""
            messages = {
                client: same if content is None else protocol.pack(kind, whole, content[client])
                for client in clients
            }
            found = self._exchange(kind, whole, messages, read, failed)
            self.refuse_few(head["round"], cohort, found)
            return found

        try:
            return run_secure_sum(ask, head, done, self._registry.sites, form)
        except DeployError as error:
            # Nodes never mask a report for a second sum, so a restart would not help.
            if any(why.reason == "summed" for why in failed.values()):
                raise SumFailed(str(error)) from error
            raise

    def refuse_few(self, round: int, cohort: np.ndarray, reports: Mapping[int, Tree]) -> None:
        """Refuse a round in which fewer clients answered than the experiment or a site needs."""
        strictest, least = self._registry.least_cohort
        if self._hides:  # a coin for each may draw one site alone, and that must not be told
            least = min(least, len(cohort))
        needed = max(self._messenger.policy.needed(len(cohort)), least)
        if len(reports) >= needed:
            return
        limits = {site: why for site, why in self.failed.items() if why in POLICY_LIMITS}
        if limits:
            why = [f"{site}: {CODES[reason]}" for site, reason in sorted(limits.items())]
            raise ConfigError(f"round {round + 1} cannot be done: {'; '.join(why)}")
        if len(cohort) < least:
            raise ConfigError(
                f"round {round + 1} has {len(cohort)} sites; {strictest}: {CODES['min_cohort']}"
            )
        sites = self._registry.sites
        missing = [sites[int(client)] for client in cohort if int(client) not in reports]
        raise DeployError(
            f"round {round + 1}: {len(reports)} of {len(cohort)} nodes reported, {needed} "
            f"needed (deploy.minimum, or min_cohort of a site); without {', '.join(missing)}"
        )
