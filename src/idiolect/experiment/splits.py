"""Several divisions of data in one experiment: what each changes in [data]."""

from collections.abc import Mapping, Sequence

from idiolect.errors import ConfigError
from idiolect.experiment.load import Raw
from idiolect.experiment.schema import Data, Experiment, Split
from idiolect.results.models import folder_name


def with_splits(raw: Raw) -> Raw:
    """Give every split the keys of [data] that it does not change itself."""
    data, splits = raw.get("data", {}), raw.get("splits", ())
    if not isinstance(data, Mapping) or not isinstance(splits, (list, tuple)) or not splits:
        return raw
    whole = [{**data, **own} if isinstance(own, Mapping) else own for own in splits]
    return {**raw, "splits": whole}


def distinct(splits: Sequence[Split], where: str) -> Sequence[Split]:
    """Refuse splits whose results would stand in one folder."""
    seen: dict[str, str] = {}
    for place, split in enumerate(splits):
        key = folder_name(split.name).casefold()
        if key in seen or not split.name:
            raise ConfigError(
                f"{where}: splits[{place}].name: {split.name!r} is too like "
                f"{seen.get(key, '')!r}; give each split a name of its own"
            )
        seen[key] = split.name
    return splits


def divided(experiment: Experiment) -> dict[str, Experiment]:
    """Give an experiment for each split, by its name; without splits one, without a name."""
    plain = {"splits": (), "tune": None}
    if not experiment.splits:
        return {"": experiment.model_copy(update=plain)}
    return {
        split.name: experiment.model_copy(
            update={
                **plain,
                "name": f"{experiment.name}: {split.name}",
                "data": Data(**{name: getattr(split, name) for name in Data.model_fields}),
            }
        )
        for split in experiment.splits
    }
