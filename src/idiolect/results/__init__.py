"""What a run leaves behind: result.json, metrics.parquet, the deployed models, and tables."""

from idiolect.engine.outcome import Outcome
from idiolect.results.models import load_model
from idiolect.results.tables import table

__all__ = ["Outcome", "load_model", "table"]
