"""The report of a run that goes on: a page that grows with it, served to this machine alone."""

from idiolect.analysis.live.address import Address, address
from idiolect.analysis.live.page_server import serving

__all__ = ["Address", "address", "serving"]
