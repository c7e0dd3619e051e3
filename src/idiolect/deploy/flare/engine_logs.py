"""How the engine logs: what an operator can use, in files that do not grow for ever."""

from typing import Any

_SIZE = 5 << 20  # bytes of a file, of which there are four
_LEVELS = {
    "nvflare": "WARNING",
    "nvflare.private.fed": "INFO",  # who registers, which job begins and ends
    "nvflare.fuel.f3": "ERROR",  # connections that cannot be made
    # Of messages to who is not there, which is for us to notice and to say.
    "nvflare.fuel.f3.cellnet": "CRITICAL",
    "nvflare.fuel.f3.streaming": "CRITICAL",
}


def log_settings() -> dict[str, Any]:
    """Return the engine's `log_config.json`."""
    plain = "%(asctime)s - %(name)s - %(levelname)s - %(fl_ctx)s - %(message)s"
    rotating = {
        "class": "logging.handlers.RotatingFileHandler",
        "maxBytes": _SIZE,
        "backupCount": 3,
        "mode": "a",
        "formatter": "plain",
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"()": "nvflare.fuel.utils.log_utils.BaseFormatter", "fmt": plain}},
        "handlers": {
            "logFileHandler": {**rotating, "filename": "log.txt", "level": "INFO"},
            "errorFileHandler": {**rotating, "filename": "error_log.txt", "level": "ERROR"},
        },
        "loggers": {
            "root": {"level": "INFO", "handlers": ["logFileHandler", "errorFileHandler"]},
            **{name: {"level": level} for name, level in _LEVELS.items()},
        },
    }
