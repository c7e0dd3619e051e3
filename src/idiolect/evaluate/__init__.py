"""What a result says: figures of each method, tests between methods, and a verdict in one line."""

from idiolect.evaluate.comparison import Comparison, Pair, compare
from idiolect.evaluate.scores import Scores, scores

__all__ = ["Comparison", "Pair", "Scores", "compare", "scores"]
