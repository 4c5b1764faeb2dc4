"""Faults of the loader: the trainer is right, but gets other batches than the data order defines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lockstep.core.backend import Batch
from lockstep.parity_tests.faults.fault import Batches
from lockstep.torch_backend.backend import TorchBackend

RESUMED_AT = 3


class LoaderStartsOver(TorchBackend):
    """After a resume before step 3 the loader begins with the first batch again (entrenar #294)."""

    @staticmethod
    def loader(batches: Batches) -> Batches:
        return lambda step: batches(step if step < RESUMED_AT else step - RESUMED_AT + 1)


class BatchHandedOutTwice(TorchBackend):
    """From the second step on each batch is the one before: the reader ran ahead of the writer by a slot."""

    @staticmethod
    def loader(batches: Batches) -> Batches:
        return lambda step: batches(max(1, step - 1))


class TokenIdsTooNarrow(TorchBackend):
    """Token ids go through an integer that holds half of them (as 16-bit signed shards do above 32,767)."""

    @staticmethod
    def loader(batches: Batches) -> Batches:
        def narrow(step: int) -> Batch:
            right = batches(step)
            holds = np.int32(max(right.tokens.max(), right.targets.max()) // 2 + 1)
            return replace(right, tokens=right.tokens % holds, targets=right.targets % holds)

        return narrow


class LastTargetWraps(TorchBackend):
    """Targets are made by rolling the tokens: the last one of each sequence is its first token."""

    @staticmethod
    def loader(batches: Batches) -> Batches:
        def rolled(step: int) -> Batch:
            right = batches(step)
            return replace(right, targets=np.roll(right.tokens, -1, axis=1))

        return rolled


class ShuffledWithinBatch(TorchBackend):
    """Sequences of a batch come in another order: losses alike, and micro-batches of other tokens."""

    @staticmethod
    def loader(batches: Batches) -> Batches:
        def reversed_rows(step: int) -> Batch:
            right = batches(step)
            return replace(right.rows(np.arange(len(right.tokens))[::-1]), weights=right.weights)

        return reversed_rows
