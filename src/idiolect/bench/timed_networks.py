"""Networks of the timed workloads, as a user writes them: of torch's layers alone."""

import torch
from torch import Tensor, nn


class RowsGRU(nn.Module):
    """Reads an image row by row: `nn.GRU` of 64 units, then a dense layer."""

    def __init__(self, shape: tuple[int, ...], classes: int, units: int = 64) -> None:
        super().__init__()
        self.read = nn.GRU(shape[0] * shape[2], units, batch_first=True)
        self.fc = nn.Linear(units, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        rows = x.transpose(1, 2).flatten(2)
        logits: Tensor = self.fc(self.read(rows)[0][:, -1])
        return logits


class SmallViT(nn.Module):
    """Patches of 4×4, a token more, four `nn.TransformerEncoderLayer` of width 64, four heads."""

    def __init__(
        self, shape: tuple[int, ...], classes: int, width: int = 64, layers: int = 4
    ) -> None:
        super().__init__()
        places = shape[1] // 4 * (shape[2] // 4)
        self.patches = nn.Conv2d(shape[0], width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, places + 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        seen = self.patches(x).flatten(2).transpose(1, 2)
        whole = torch.cat([self.token.expand(len(x), -1, -1), seen], 1) + self.places
        logits: Tensor = self.fc(self.norm(self.encoder(whole)[:, 0]))
        return logits


class _Residual(nn.Module):
    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.found = nn.Sequential(
            nn.Conv2d(inside, out, 3, stride, padding=1, bias=False),
            nn.GroupNorm(8, out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.GroupNorm(8, out),
        )
        plain = stride == 1 and inside == out
        self.carried = nn.Identity() if plain else nn.Conv2d(inside, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = (self.found(x) + self.carried(x)).relu()
        return added


class DeepResNet(nn.Module):
    """A ResNet with group normalisation: one block a stage makes ResNet-10, two ResNet-18."""

    def __init__(
        self, shape: tuple[int, ...], classes: int, blocks: int = 2, width: int = 64
    ) -> None:
        super().__init__()
        enter = nn.Conv2d(shape[0], width, 3, padding=1, bias=False)
        layers: list[nn.Module] = [enter, nn.GroupNorm(8, width), nn.ReLU()]
        inside = width
        for stage in range(4):
            for block in range(blocks):
                out = width * 2**stage
                layers.append(_Residual(inside, out, 2 if stage and not block else 1))
                inside = out
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [example, class]."""
        logits: Tensor = self.fc(self.layers(x).mean((2, 3)))
        return logits
