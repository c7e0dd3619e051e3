"""The files of a run folder: results, metrics, models, traces."""
