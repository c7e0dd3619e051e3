"""What the demo runs, and the published figures beside it."""

from importlib import resources

EXPERIMENT = resources.files("idiolect.cli").joinpath("demo.toml").read_text(encoding="utf-8")

PAPER = {
    "paper: FedAvg": [91.2, 92.2, 88.0, 93.2, 92.3, 92.2, 93.8, 91.5, 94.3, 91.3],
    "paper: PersFL": [98.3, 98.8, 99.5, 98.2, 98.7, 98.3, 98.7, 98.7, 98.3, 98.5],
}
"""PersFL's Table 3, MNIST DS-1, users 0 to 9."""

REMARK = (
    "The paper's DS-1 gives each of 10 users 600 images of 4 digits, but not how many of each; "
    "here each digit of a user is 0.6 times as frequent as the one before "
    "(data.partition.imbalance), so users cannot be compared row by row, only column by column."
)
