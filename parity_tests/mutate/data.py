"""The configuration and batches of these tests: those of parity_tests/tiny.py, to share reference sessions."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.core.backend import Batch
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.parity_tests.tiny import text_batch


@dataclass(frozen=True)
class Text:
    config: RunConfig
    uneven: bool = False

    def batch(self, step: int) -> Batch:
        batch = text_batch(self.config, seed=step)
        return uneven_weights(batch, step) if self.uneven else batch
