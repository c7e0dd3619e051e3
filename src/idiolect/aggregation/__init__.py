"""How the server joins reports: the mean, robust rules, differential privacy; and the attacks."""

from idiolect.aggregation import robust, server_optimisers
from idiolect.aggregation.aggregator import Aggregator
from idiolect.aggregation.attacks import MODEL_ATTACKS as MODEL_ATTACKS
from idiolect.aggregation.attacks import Attack as Attack
from idiolect.aggregation.attacks import Attacked as Attacked
from idiolect.aggregation.private_mean import Private as Private

RULES: dict[str, type[Aggregator]] = {
    "mean": robust.Mean,
    "median": robust.Median,
    "geometric-median": robust.GeometricMedian,
    "trimmed-mean": robust.TrimmedMean,
    "krum": robust.Krum,
    "multi-krum": robust.MultiKrum,
    "norm-bound": robust.NormBound,
}

SERVER_OPTIMISERS: dict[str, type[Aggregator]] = {
    "fedavgm": server_optimisers.FedAvgM,
    "fedadam": server_optimisers.FedAdam,
    "fedyogi": server_optimisers.FedYogi,
    "fedadagrad": server_optimisers.FedAdagrad,
}
