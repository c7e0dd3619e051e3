"""Networks by name, and the check every network passes before it is trained."""

from collections.abc import Callable

from torch import nn

from idiolect.core.batchnorm import check, masked_batch_norm_instead
from idiolect.models.feedforward import DNN, MLR, AlexNet, LeNet5, McMahanCNN
from idiolect.models.hf import hf_network
from idiolect.models.layers import group_norm_instead
from idiolect.models.resnet import ResNet18
from idiolect.models.shufflenet import ShuffleNetV2
from idiolect.models.table_networks import TableMLP
from idiolect.models.text_networks import FastText, KimCNN, NextWord
from idiolect.models.transformer import Decoder, Encoder, ViT

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlr": MLR,
    "dnn": DNN,
    "lenet5": LeNet5,
    "mcmahan-cnn": McMahanCNN,
    "alexnet": AlexNet,
    "resnet18": ResNet18,
    "shufflenet": ShuffleNetV2,
    "table-mlp": TableMLP,
    "kim-cnn": KimCNN,
    "fasttext": FastText,
    "next-word-lstm": NextWord,
    "decoder": Decoder,
    "encoder": Encoder,
    "vit": ViT,
    "hf": hf_network,
}
"""Each is called with the shape of one example and the number of classes, then its own options.

One that has a parameter `words` is given the vocabulary of its data, one that has `blocks` the
categories of a table that are to be embedded.
"""

BASED = ("decoder", "encoder", "vit", "hf")
"""Those that take `weights`: the folder of a pretrained base."""

__all__ = ["BASED", "MODELS", "check", "group_norm_instead", "masked_batch_norm_instead"]
