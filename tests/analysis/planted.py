"""Results with a known truth: accuracies drawn with effects of clients, seeds and chance."""

import numpy as np


def result(accuracy, same_clients=False, names=None, curves=None):
    """Lay [method, seed, client] out as a result.json has it."""
    labels = names or [chr(ord("A") + place) for place in range(len(accuracy))]
    methods = {}
    for label, rows in zip(labels, accuracy, strict=True):
        methods[label] = {
            "method": label.lower(),
            "headline": {"personal": {}},
            "rounds": 10,
            "curves": (curves or {}).get(label),
            "speed": {"train_seconds": 20.0},
            "seeds": [
                {
                    "seed": seed,
                    "traffic": {"bytes_down": 100, "bytes_up": 50},
                    "clients": [{"personal": {"accuracy": score(value)}} for value in row],
                }
                for seed, row in enumerate(rows)
            ],
        }
    return {"data": {"same_clients": same_clients}, "methods": methods}


def score(value):
    return None if np.isnan(value) else float(value)


def drawn(
    generator,
    gains,  # [method] what each truly adds
    seeds=5,
    clients=10,
    same_clients=False,
    seed_effect=0.01,  # deviation, of one method under one seed: all its clients share it
    client_effect=0.01,  # deviation, of one method for one client: it stays over seeds
    test_rows=120,
):
    """Draw [method, seed, client]: clients of their own difficulty, scored on finitely many rows.

    The effects are about as large as those between methods in our reproduction of PersFL's tables,
    where the mean square between seeds is up to four times that between a seed's clients.
    """
    shape = (len(gains), seeds, clients)
    ease = generator.normal(0.85, 0.04, (1, 1 if same_clients else seeds, clients))
    luck = generator.normal(0, seed_effect, (len(gains), seeds, 1))
    taste = generator.normal(0, client_effect, (len(gains), 1 if same_clients else seeds, clients))
    truth = np.asarray(gains)[:, None, None] + ease + luck + taste
    truth = np.broadcast_to(np.clip(truth, 0.02, 0.98), shape)
    return generator.binomial(test_rows, truth) / test_rows
