"""Figures printed in Divi et al. 2021 (PersFL), Tables 2-7: facts to compare with."""

# Tables 2 and 3: (mean accuracy over users, standard deviation over users), %.
TABLE = {
    "cifar10-ds1": {
        "FedAvg": (45.0, 5.1),
        "PersFL": (81.9, 4.9),
        "FedPer": (78.2, 5.6),
        "pFedMe": (69.0, 6.7),
        "Per-FedAvg": (66.9, 5.1),
    },
    "cifar10-ds2": {
        "FedAvg": (48.7, 2.0),
        "PersFL": (59.6, 1.7),
        "FedPer": (55.1, 2.1),
        "pFedMe": (59.2, 1.4),
        "Per-FedAvg": (57.6, 1.5),
    },
    "cifar10-ds3": {
        "FedAvg": (46.6, 9.4),
        "PersFL": (82.3, 7.2),
        "FedPer": (79.2, 7.9),
        "pFedMe": (78.1, 9.2),
        "Per-FedAvg": (77.8, 9.5),
    },
    "mnist-ds1": {
        "FedAvg": (92.0, 1.7),
        "PersFL": (98.6, 0.4),
        "FedPer": (98.3, 0.3),
        "pFedMe": (94.8, 1.0),
        "Per-FedAvg": (98.9, 0.6),
    },
    "mnist-ds2": {
        "FedAvg": (85.5, 1.3),
        "PersFL": (88.0, 1.3),
        "FedPer": (85.5, 1.3),
        "pFedMe": (87.1, 1.2),
        "Per-FedAvg": (87.6, 1.0),
    },
    "mnist-ds3": {
        "FedAvg": (96.4, 1.3),
        "PersFL": (99.4, 0.3),
        "FedPer": (99.4, 0.5),
        "pFedMe": (98.2, 0.5),
        "Per-FedAvg": (97.3, 0.8),
    },
}

# Table 4: the final FedAvg model as teacher and start.
FEDAVG_ARM = {
    "cifar10-ds1": 80.9,
    "cifar10-ds2": 58.0,
    "cifar10-ds3": 81.6,
    "mnist-ds1": 98.6,
    "mnist-ds2": 88.1,
    "mnist-ds3": 99.4,
}

# Table 5: means over the ten users of the printed λ and T.
DISTIL = {
    "cifar10-ds1": (0.445, 13.88),
    "cifar10-ds2": (0.675, 15.16),
    "cifar10-ds3": (0.315, 9.24),
    "mnist-ds1": (0.035, 1.08),
    "mnist-ds2": (0.510, 8.92),
    "mnist-ds3": (0.005, 1.48),
}

# Table 6: PersFL-GD.
GD = {
    "cifar10-ds1": 81.5,
    "cifar10-ds2": 58.2,
    "cifar10-ds3": 81.7,
    "mnist-ds1": 98.7,
    "mnist-ds2": 87.3,
    "mnist-ds3": 99.5,
}

# Table 7: communication rounds, CIFAR-10 DS-1..3 then MNIST DS-1..3.
ROUNDS = {
    "FedAvg": (50, 25, 100, 100, 50, 100),
    "FedPer": (50, 25, 100, 100, 50, 100),
    "PersFL": (50, 25, 50, 100, 25, 100),
    "pFedMe": (800, 1000, 800, 800, 800, 800),
    "Per-FedAvg": (800, 800, 1000, 800, 800, 800),
}

# The cells of our grid: at λ = 0 and λ = 1 the temperature means nothing.
TEACHER_GRID = [
    (0.0, 1.0),
    *[(share, temperature) for share in (0.25, 0.5, 0.75) for temperature in (1.0, 5.0, 25.0)],
    (1.0, 1.0),
]
