import numpy as np
import pytest

from idiolect.data.generated import synthetic
from idiolect.errors import IdiolectError


def test_sizes_and_inputs_are_the_legacy_generators():
    """Redo the first client by the general multivariate draw that pFedMe's script uses.

    sizes = (int(lognormal(4, 2)) + 50) * 5; then mean models, mean inputs, centres, and per client
    weights, biases and inputs ~ N(centre, diag(j**-1.2)), all from one legacy generator.
    """
    data = synthetic(0.5, 0.5, clients=3, seed=0)
    draws = np.random.RandomState(0)
    sizes = (draws.lognormal(4, 2, 3).astype(int) + 50) * 5
    assert np.bincount(data.clients).tolist() == sizes.tolist()
    model = draws.normal(0, 0.5, 3)
    inputs = draws.normal(0, 0.5, 3)
    centre = np.stack([draws.normal(inputs[i], 1, 60) for i in range(3)])
    weights, biases = draws.normal(model[0], 1, (60, 10)), draws.normal(model[0], 1, 10)
    covariance = np.diag(np.arange(1, 61) ** -1.2)
    x = draws.multivariate_normal(centre[0], covariance, sizes[0])
    ours = data.x[data.clients == 0]
    assert np.allclose(np.abs(ours - centre[0]), np.abs(x - centre[0]), atol=1e-4)
    labels = np.argmax(ours @ weights + biases, axis=1)
    assert (labels == data.y[data.clients == 0]).mean() > 0.999  # float32 may turn a tie


def test_sizes_can_be_capped_and_seeds_differ():
    small = synthetic(clients=20, max_size=300)
    assert np.bincount(small.clients).max() == 300
    assert np.array_equal(small.x, synthetic(clients=20, max_size=300).x)
    assert not np.array_equal(small.x[:50], synthetic(clients=20, max_size=300, seed=1).x[:50])


def test_nonsense_is_refused():
    with pytest.raises(IdiolectError, match="alpha=-1"):
        synthetic(-1)
    with pytest.raises(IdiolectError, match="clients is 0"):
        synthetic(clients=0)
