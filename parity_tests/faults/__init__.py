"""Planted faults: trainers that are wrong in one way each. Every check of the engine is tripped by at least one.

Each is a `Backend` that can stand as `--candidate parity_tests/faults/FILE.py:NAME`. `CATALOG` says which stage it
must be traced to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parity_tests.faults import forward, loss, optimizer, state
from torch_backend.session import TorchBackend


@dataclass(frozen=True)
class Fault:
    """A planted fault and the stage that the verdict must name as its origin."""

    make: Callable[[], TorchBackend]
    stage: str
    required: bool = False

    @property
    def name(self) -> str:
        """The class's name."""
        return self.make.__name__


CATALOG = (
    Fault(loss.TargetsNotShifted, "nll", required=True),
    Fault(forward.KvHeadsTiled, "attn", required=True),
    Fault(forward.RopeInBf16, "q_rope", required=True),
    Fault(forward.RmsNormInBf16, "attn_norm", required=True),
    Fault(forward.LogitsRoundedToBf16, "logits", required=True),
    Fault(loss.MeanOfMicroBatchMeans, "loss", required=True),
    Fault(loss.OneGradientScaled, "gradients", required=True),
    Fault(optimizer.DecayOnNormGains, "update", required=True),
    Fault(optimizer.BiasCorrectionOneStepOff, "update", required=True),
    Fault(forward.EmbeddingInBf16, "embed"),
    Fault(forward.QueryScaled, "q"),
    Fault(forward.SeesOneTokenAhead, "attn"),
    Fault(forward.SoftmaxInBf16, "attn"),
    Fault(forward.ResidualInBf16, "attn_residual"),
    Fault(forward.GeluForSilu, "act"),
    Fault(forward.NormEpsilon, "attn_norm"),
    Fault(loss.LossWeightsIgnored, "loss"),
    Fault(loss.HeadWithoutGradient, "logits"),
    Fault(loss.GradientMissing, "gradients"),
    Fault(optimizer.NormCountsOneTwice, "grad_norm"),
    Fault(optimizer.NeverClips, "clip_coefficient"),
    Fault(optimizer.ClipsWithoutSayingSo, "moments"),
    Fault(optimizer.LearningRateOneStepLate, "learning_rate"),
    Fault(optimizer.WrongBeta, "moments"),
    Fault(optimizer.UpdateSwallowed, "update"),
    Fault(state.OtherInitialWeights, "weights"),
    Fault(state.OtherBatch, "tokens"),
    Fault(state.CountsMicroBatches, "step_count"),
)
