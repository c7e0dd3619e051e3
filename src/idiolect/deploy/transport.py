"""How messages get from the hub to a node and back; an engine is anyone who can do `call`."""

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from idiolect.deploy.node import Node
from idiolect.deploy.node_process import Child
from idiolect.deploy.refusals import Refused
from idiolect.deploy.site import Site


class Transport(Protocol):
    """The hub's way to its nodes. Calls to different sites may be made from several threads."""

    sites: Sequence[str]  # all of the federation, in its order, whether they are there or not

    def call(self, site: str, blob: bytes, seconds: float) -> bytes:
        """Bring a message and wait for the answer; `Refused` where there is none."""

    def returned(self, site: str) -> bool:
        """Say whether a site that was lost could take part again if the run were started anew."""

    def stopped(self) -> bool:
        """Say whether the engine wants the hub to end."""


class Inside:
    """Nodes in this very process: for tests and for debugging a method over messages."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.sites: Sequence[str] = tuple(nodes)
        self._nodes = nodes
        self._turn = threading.Lock()  # networks are made under torch's one random state

    def call(self, site: str, blob: bytes, seconds: float) -> bytes:
        """Ask the node, one at a time."""
        with self._turn:
            return self._nodes[site].answer(blob)

    def returned(self, site: str) -> bool:
        """Say that nobody is ever lost for good."""
        return False

    def stopped(self) -> bool:
        """Say no."""
        return False


class Processes:
    """Each node a process of this machine: a federation to try things on."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites: Sequence[str] = tuple(site.name for site in sites)
        self.children = {site.name: Child(site) for site in sites}

    def call(self, site: str, blob: bytes, seconds: float) -> bytes:
        """Ask the node's process, starting it where there is none."""
        if site not in self.children:
            raise Refused("unreachable", f"no site {site!r}")
        return self.children[site].answer(blob)

    def returned(self, site: str) -> bool:
        """Say no: a process that ended is started again by the next call."""
        return False

    def stopped(self) -> bool:
        """Say no."""
        return False

    def close(self) -> None:
        """End all processes."""
        for child in self.children.values():
            child.close()
