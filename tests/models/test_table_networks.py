"""The network for tables: what embedding means, and that it trains with a table's encoder."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import idiolect
from idiolect.errors import ModelError
from idiolect.models.table_networks import TableMLP, embedding_width


def test_a_category_is_a_column_of_its_matrix():
    torch.manual_seed(0)
    net = TableMLP((7,), 2, blocks=((1, 4),), hidden=5)
    assert embedding_width(4) == 2 and net.fc1.in_features == 7 - 4 + 2
    x = torch.tensor([[0.5, 0, 0, 1, 0, 2.0, -1.0], [0.5, 0, 0, 0, 0, 2.0, -1.0]])
    matrix = net.embeddings[0].weight
    for row, own in ((0, matrix[:, 2]), (1, torch.zeros(2))):  # an unknown one is the origin
        joined = torch.cat([x[row, :1], own, x[row, 5:]])
        hidden = F.relu(net.fc2(F.relu(net.fc1(joined))))
        assert torch.allclose(net(x)[row], net.fc3(hidden), atol=1e-6)
    plain = TableMLP((7,), 2)
    assert plain.fc1.in_features == 7 and plain(x).shape == (2, 2)
    assert [embedding_width(n) for n in (1, 10, 1000)] == [2, 4, 16]
    for wrong in (((1, 4), (3, 2)), ((5, 3),)):
        with pytest.raises(ModelError):
            TableMLP((7,), 2, blocks=wrong)


def test_declared_categories_are_embedded_and_predict_raw_rows():
    rng = np.random.default_rng(0)
    ward = rng.integers(0, 30, 400)
    table = {
        "ward": [f"w{n}" for n in ward],
        "x": rng.normal(size=400),
        "label": ["yes" if n % 3 == 0 else "no" for n in ward],
        "client": [f"c{n % 2}" for n in range(400)],
    }
    held = idiolect.federation(table, columns={"ward": {"type": "category", "encode": "embedding"}})
    encoder = held.dataset.encoder
    ((start, places),) = encoder.embedded
    result = idiolect.fit("fedavg", held, "table-mlp", rounds=12, lr=0.1, batch=20, epochs=3)
    leaves = [tuple(leaf.shape) for leaf in result.model(0).state_dict().values()]
    assert start == 0 and (embedding_width(places), places) in leaves
    assert result.mean > 0.9  # a category alone decides
    rows = {"x": [0.0, 0.0], "ward": ["w3", "w4"]}
    shown = str(result.predict(0, rows)).splitlines()[-2:]
    assert [line.split()[1] for line in shown] == ["yes", "no"]
