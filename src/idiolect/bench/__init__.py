"""What is timed, against what, and how: `idiolect bench`.

Needs torch and numpy alone, so that it runs wherever there is a device to measure:
`python -m idiolect.bench` is the same command.
"""

from idiolect.bench.run_benchmark import Options, bench
from idiolect.bench.workloads import WORKLOADS, Workload

__all__ = ["WORKLOADS", "Options", "Workload", "bench"]
