"""Networks of the papers by name, and the check every network passes before it is trained."""

from collections.abc import Callable

from torch import nn

from idiolect.batchnorm import BatchNorm
from idiolect.models.check import check, group_norm_instead, masked_batch_norm_instead
from idiolect.models.images import LeNet5, McMahanCNN
from idiolect.models.perceptrons import DNN, MLR

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlr": MLR,
    "dnn": DNN,
    "lenet5": LeNet5,
    "mcmahan-cnn": McMahanCNN,
}
"""Each is called with the shape of one example and the number of classes, then its own options."""

__all__ = [
    "DNN",
    "MLR",
    "MODELS",
    "BatchNorm",
    "LeNet5",
    "McMahanCNN",
    "check",
    "group_norm_instead",
    "masked_batch_norm_instead",
]
