"""Local: every client trains alone, the floor that personalisation must beat."""

from dataclasses import dataclass
from typing import ClassVar

from idiolect.local import Local
from idiolect.method import Method, Sent, Setup
from idiolect.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class LocalOnly(Method):
    """No federation: each client keeps training its own model, and nothing is sent."""

    title: ClassVar[str] = "Local"

    def init_server(self, setup: Setup) -> Tree:
        """The server knows nothing."""
        return ()

    def init_personal(self, setup: Setup) -> Params:
        """Start from the common initial model."""
        return setup.params

    def client_step(self, sent: Sent, personal: Params, local: Local) -> tuple[Tree, Params]:
        """Train the own model; report nothing."""
        return (), self.fit(local, personal)

    def deploy(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Use the own model."""
        return personal

    def adapt(self, sent: Sent, personal: Params, local: Local) -> Params:
        """Train alone for as many rounds as the federation had: what a newcomer could do anyway."""
        return self.fit(local, personal)

    def models(self, sent: Sent, deployed: Params) -> dict[str, Tree]:
        """There is no global model."""
        return {"personal": deployed}
