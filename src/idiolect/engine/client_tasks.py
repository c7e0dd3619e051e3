"""What a client is asked to do, as a value: it can be handed to another process."""

from dataclasses import dataclass
from typing import ClassVar

from idiolect.core.client import Local
from idiolect.core.method import Method, Sent
from idiolect.core.tree import Tree


@dataclass(frozen=True)
class Work:
    """A method's part in something: the engine calls it for one client at a time, or for many."""

    keeps: ClassVar[bool] = False  # the last of what it returns is the client's to keep

    method: Method

    def __call__(self, sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
        """Do it. `exam` holds what is scored and is never given to a method's training code."""
        raise TypeError(f"{type(self).__name__} does nothing")


@dataclass(frozen=True)
class Step(Work):
    """A client's round: what it reports, what the server reads in that, what it keeps."""

    keeps: ClassVar[bool] = True

    def __call__(self, sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
        """Train and report."""
        report, personal = self.method.client_step(sent, personal, local)
        read = self.method.read(report, local) if self.method.grouped else ()
        return report, read, personal


@dataclass(frozen=True)
class Prepare(Work):
    """A client does what it does once, before its first round."""

    keeps: ClassVar[bool] = True

    def __call__(self, sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
        """Return what it keeps, and nothing else."""
        return (self.method.prepare(personal, local),)


@dataclass(frozen=True)
class Look(Work):
    """A newcomer looks at a state of the server without training."""

    keeps: ClassVar[bool] = True

    def __call__(self, sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
        """Return what it keeps, and nothing else."""
        return (self.method.meet(sent, personal, local),)


@dataclass(frozen=True)
class Fuse(Work):
    """The server trains what it keeps for an architecture on its public examples."""

    def __call__(self, sent: Sent, personal: Tree, local: Local, exam: Local) -> Tree:
        """Return what it keeps from now on."""
        return self.method.fuse(sent.group, sent.shared, local)
