"""Why a message was refused, as a word: all that one side ever tells the other about a failure.

Texts of errors, paths and data stay where they arose, in that side's log.
"""

from idiolect.errors import DeployError

LIMITS = {
    "min_sites": "a run of so few sites",
    "min_cohort": "rounds with so few sites",
    "min_batch": "gradient steps on so few rows",
    "min_steps": "reports of so few gradient steps",
    "min_examples": "reports with so few training rows behind them",
    "min_scored": "scores of so few validation or test rows",
    "require_privacy": 'a method without differential privacy (aggregate = "dp")',
    "max_epsilon": "a run that spends so much epsilon",
    "methods": "a method of the experiment",
    "max_rounds": "so many rounds",
    "max_seeds": "so many seeds",
    "max_reports": "so many reports or scorings in a run",
    "max_runs": "so many runs in a day",
}
"""The limits of a site's policy (`site_policy`), and what a run beyond each of them asks for."""

CODES = {
    # What a site allows.
    **{name: f"its site's policy does not allow {what} ({name})" for name, what in LIMITS.items()},
    # About messages.
    "format": "the message cannot be read",
    "protocol": "the message is of another protocol; install the same idiolect on both sides",
    "size": "the message is larger than the limit (deploy.limit_mb)",
    "structure": "the message lacks a tensor, or has one too many",
    "shape": "a tensor of the message has another shape than the method's",
    "dtype": "a tensor of the message has another type than the method's",
    "nonfinite": "the message holds NaN or infinity",
    "sizes": "its report states other numbers of examples than it told when joining",
    "statistics": "it told statistics of its data that cannot be right",
    "round": "the message is of another round, run or sender than the one at hand",
    "identity": "the message is not signed by the expected member, or is not for its receiver",
    "replay": "the message was received before",
    "conflict": "another message for the same round was answered before",
    "keys": "keys, shares or survivors of the secure sum do not fit; its log says which",
    "summed": "its report was masked for another sum before, and is not given to a second one",
    "range": "its report is too large for the sum under masks; lower lr or set clip",
    "closed": "the node was started anew and must be told the experiment again",
    # About joining.
    "version": "it runs another version of idiolect; install the same on all sides",
    "method": "its copy of the method differs; install the same idiolect on all sides",
    "experiment": "it cannot run this experiment; its log says why",
    "model": "it cannot build the network; its log says why",
    "data": "its data is missing, cannot be read or not be divided as asked; its log says why",
    "classes": "its labels do not fit the classes that the experiment declares",
    "words": "its data is text, and the experiment has no [data.text] that numbers words alike",
    "open": "its site takes part only under masks (require_secure or --secure); set deploy.secure",
    "newcomer": "it was asked for a report in a run that is over, where only its scores may leave",
    "owner": "it holds state of this run for someone else than who submitted it",
    "busy": "another process is working with its personal state",
    # About work.
    "diverged": "its training produced NaN or infinity",
    "memory": "it ran out of memory",
    "disk": "it cannot write to its disk",
    "state": "its personal state is damaged or belongs to another method",
    "crashed": "its training process ended unexpectedly",
    "failed": "it failed for a reason that its log tells",
    # Found by the side that waits.
    "timeout": "it did not answer in time",
    "unreachable": "it cannot be reached",
}
"""Each code with what it means to whoever reads the other side's log."""


class Refused(DeployError):
    """A message or a task that cannot be accepted: a code to tell, and words for the own log."""

    def __init__(self, reason: str, words: str = "") -> None:
        if reason not in CODES:
            raise ValueError(f"{reason!r} is no code")
        self.reason = reason
        super().__init__(words or CODES[reason])
