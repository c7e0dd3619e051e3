"""Loggers: a run's scores for TensorBoard, MLflow and Weights & Biases, each behind its extra."""

from idiolect.analysis.loggers.logger import LOGGERS, Logger, logger

__all__ = ["LOGGERS", "Logger", "logger"]
