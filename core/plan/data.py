"""A run's use of its data: each data set's share, and how often the run passes over it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.core.config.mixture import all_parts
from lockstep.core.config.schema import RunConfig
from lockstep.core.data.index import INDEX_NAME, read_index
from lockstep.core.data.mixture_order import MixtureOrder
from lockstep.core.data.sampler import BlockSampler
from lockstep.core.run.data import RunData


@dataclass(frozen=True)
class Reading:
    """A data set that a run reads.

    share: of the run's samples. tokens: that the run reads. held: training tokens that are prepared, and epochs: how
    often the run passes over them; both None where the folder is not prepared here, or left out with a weight of zero.
    """

    name: str
    share: float
    tokens: int
    held: int | None = None
    epochs: float | None = None


def readings(config: RunConfig) -> list[Reading]:
    """Return how a run reads each data set, from indexes; no shard is read.

    Raises UserError as `lockstep train` does where prepared folders do not fit the run or each other.
    """
    train, data = config.train, config.data
    # A sample is a block of the longest sequence length, whatever the lengths of its steps.
    samples = -(-train.steps * train.batch_size * train.sequence_length // train.longest)
    if all((Path(folder) / INDEX_NAME).is_file() for folder in data.folders):
        RunData.open(config, verify=False)
    if not data.mixture:
        return [_reading(config, data.path, data.path, 1.0, samples)]
    counts = iter(MixtureOrder(tuple(part.weight for part in data.parts), data.seed).counts(samples))
    total = sum(part.weight for part in data.parts)
    return [
        _reading(config, part.name, part.path, float(part.weight / total), next(counts))
        if part.weight
        else Reading(part.name, 0.0, 0)
        for part in all_parts(data.mixture)
    ]


def _reading(config: RunConfig, name: str, folder: str, share: float, samples: int) -> Reading:
    length = config.train.longest
    if not (Path(folder) / INDEX_NAME).is_file():
        return Reading(name, share, samples * length)
    held = read_index(Path(folder)).train.tokens
    if config.data.window_shards:
        epochs = samples * length / held
    else:
        (epochs,) = BlockSampler(config.data.seed, held, length).epochs(samples)
    return Reading(name, share, samples * length, held, epochs)
