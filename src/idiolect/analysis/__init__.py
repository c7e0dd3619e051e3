"""What a result says: figures of each method, tests between methods, and a verdict in one line."""

from idiolect.analysis.comparison import Comparison, Pair, compare
from idiolect.analysis.scores import Scores, scores

__all__ = ["Comparison", "Pair", "Scores", "compare", "scores"]
