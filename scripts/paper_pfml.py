"""Figures of the PFML paper (Yang et al. 2021), Tables 1-6, in percent."""

# Table 1 and 2: (FedAvg, pFedMe-GM, pFedMe-PM, PFML-GM, PFML-PM)
ACCURACY = {
    "pfml-mnist-mlr": (91.87, 92.13, 93.06, 92.45, 98.65),
    "pfml-mnist-dnn": (94.86, 95.85, 96.72, 96.70, 99.07),
    "pfml-synthetic-mlr": (77.97, 78.48, 82.81, 79.58, 90.74),
    "pfml-synthetic-dnn": (81.12, 83.13, 84.81, 84.78, 94.58),
    "pfml-cifar10-u5": (43.54, 39.73, 71.19, 49.24, 78.20),
    "pfml-cifar10-u10": (45.08, 40.76, 71.38, 49.48, 78.24),
}

# Tables 3-6: run -> label -> (GM, PM)
SENSITIVITY = {
    "pfml-synthetic-unequal": {
        "PFML, pull 20": (80.16, 94.40),
        "PFML, pull 30": (80.59, 94.58),
    },
    "pfml-mnist-steps-dnn": {
        "K = 1": (96.77, 99.08),
        "K = 3": (96.67, 99.07),
        "K = 5": (96.65, 99.07),
        "K = 7": (96.68, 99.07),
    },
    "pfml-mnist-steps-mlr": {
        "K = 1": (92.48, 98.64),
        "K = 3": (92.44, 98.65),
        "K = 5": (92.48, 98.65),
        "K = 7": (92.44, 98.65),
    },
    "pfml-synthetic-pull-mlr": {
        "pull 10": (79.88, 90.45),
        "pull 20": (80.44, 90.71),
        "pull 30": (79.99, 90.81),
        "pull 40": (80.16, 90.94),
    },
    "pfml-synthetic-pull-dnn": {
        "pull 10": (84.71, 94.16),
        "pull 20": (85.00, 94.42),
        "pull 30": (84.68, 94.61),
        "pull 40": (84.76, 94.80),
    },
    "pfml-synthetic-server-dnn": {
        "beta 1": (81.78, 94.63),
        "beta 2": (84.71, 94.61),
        "beta 3": (85.36, 94.58),
        "beta 4": (82.46, 94.49),
    },
    "pfml-synthetic-server-mlr": {
        "beta 1": (78.96, 90.61),
        "beta 2": (80.36, 90.66),
        "beta 3": (80.29, 90.74),
        "beta 4": (79.95, 90.76),
    },
}
