"""The report of a run that goes on: a page that grows with it, served to this machine alone."""

from idiolect.live.address import Address, address
from idiolect.live.server import serving

__all__ = ["Address", "address", "serving"]
