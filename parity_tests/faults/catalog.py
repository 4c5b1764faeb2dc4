"""All planted faults, with the origin that a check must name. The order of core/parity/reference/stages.py decides it.

The origin is the first stage of the chain that is wrong:

- For a fault in every block: block 0 in the forward pass, the last block in the backward pass.
- For a wrong gradient that a stage's backward pass sends back: that stage.
- `gradients`: the session changed the gradients of its program. `accumulation`: only the sum over several micro-batches
  is wrong. `compiler`: only the program without taps is wrong.
- A stage of the update names the layer of its first wrong parameter.
"""

from __future__ import annotations

from lockstep.parity_tests.faults import (
    attention,
    backward,
    casts,
    compiled,
    data,
    device,
    evaluation,
    forward,
    gradients,
    levers,
    looking,
    loss,
    optimizer,
    own_step,
    ranks,
    reports,
    sampling,
    small,
    state,
)
from lockstep.parity_tests.faults.fault import BF16, NOT_COMPILED, Fault

TINY = 1e-3  # a relative change of the loss that is too small to be seen in a plot

FORWARD = (
    Fault(forward.EmbeddingInBf16, "embed", loss_moves_less_than=TINY),
    Fault(forward.RmsNormInBf16, "attn_norm", layer=0, required=True, loss_moves_less_than=TINY),
    Fault(forward.NormEpsilon, "attn_norm", layer=0),
    Fault(forward.QueryScaled, "q", layer=-1, loss_moves_less_than=TINY),
    Fault(attention.RopeInBf16, "q_rope", layer=0, required=True, loss_moves_less_than=TINY, number=4),
    Fault(attention.PositionsFromOne, "q_rope", layer=0, loss_moves_less_than=TINY),
    Fault(attention.KeysPairedAsNeighbours, "k_rope", layer=0),
    Fault(attention.KvHeadsTiled, "attn", layer=0, required=True, number=5),
    Fault(attention.SeesOneTokenAhead, "attn", layer=0),
    Fault(attention.SoftmaxInBf16, "attn", layer=0, loss_moves_less_than=TINY, recipes=BF16),
    Fault(attention.ScoresScaledByWidth, "attn", layer=0),
    Fault(attention.AttentionRoundsDown, "attn", layer=0, loss_moves_less_than=TINY, number=7),
    Fault(forward.ResidualInBf16, "attn_residual", layer=0, loss_moves_less_than=TINY),
    Fault(forward.BranchDamped, "mlp_residual", layer=1, loss_moves_less_than=TINY),
    Fault(forward.GeluForSilu, "act", layer=0),
    Fault(forward.DownProjectionInFp32, "down_proj", layer=0, loss_moves_less_than=TINY, recipes=BF16),
    Fault(forward.DropoutLeftOn, "down_proj", layer=0, cause="does not repeat"),
    Fault(loss.LogitsRoundedToBf16, "logits", required=True, loss_moves_less_than=TINY),
    Fault(small.LogitsCutToTf32, "logits", loss_moves_less_than=TINY),
    Fault(small.OneLogitColumnOff, "logits", loss_moves_less_than=TINY),
    Fault(loss.TargetsNotShifted, "tokens", required=True, number=3),
    Fault(loss.VocabularyPaddingCounts, "nll", number=15),
    Fault(
        loss.LateRowsReadEarlyLogits,
        "nll",
        number=16,
        note="only late rows of a micro-batch are wrong: the rows that are examined must be among them",
    ),
    Fault(loss.NllInBf16, "nll", note="under FP32 as well: the loss is FP32 in every policy"),
    Fault(loss.LabelSmoothingLeftOn, "nll", loss_moves_less_than=TINY),
    Fault(
        loss.MeanOfMicroBatchMeans,
        "loss",
        required=True,
        number=1,
        note="one micro-batch's share is wrong already: it is divided by its own weight",
    ),
    Fault(loss.LossWeightsIgnored, "loss"),
    Fault(loss.PenaltyLeftIn, "loss", loss_moves_less_than=TINY),
)

BACKWARD = (
    Fault(backward.LossScaleNeverTakenOut, "loss", "backward", backward_only=True, loss_moves_less_than=TINY),
    Fault(backward.NllGradientUnweighted, "nll", "backward", backward_only=True, loss_moves_less_than=TINY),
    Fault(
        backward.LogitsGradientZero, "nll", "backward", backward_only=True, loss_moves_less_than=TINY, cause="missing"
    ),
    Fault(
        backward.HeadGradientSummedInBf16,
        "logits",
        "backward",
        backward_only=True,
        loss_moves_less_than=TINY,
    ),
    Fault(
        backward.WeightCastCachedWithoutGradient,
        "up",
        "backward",
        1,
        backward_only=True,
        loss_moves_less_than=TINY,
        number=11,
    ),
    Fault(
        backward.HeadWithoutGradient,
        "logits",
        "backward",
        backward_only=True,
        loss_moves_less_than=TINY,
        number=28,
        note="no gradient comes back at the edge where the tied weight enters the head",
    ),
    Fault(backward.FinalGainFrozen, "final_norm", "backward", backward_only=True, loss_moves_less_than=TINY),
    Fault(backward.StreamGradientInBf16, "mlp_residual", "backward", -1, backward_only=True, loss_moves_less_than=TINY),
    Fault(
        backward.WeightGradientDropsTheTail,
        "down_proj",
        "backward",
        -1,
        backward_only=True,
        loss_moves_less_than=TINY,
        note="only a micro-batch's last rows are missing, and what is tapped has its loss on the first two: those that "
        "are examined must be among the last",
    ),
    Fault(backward.ActivationRecomputedInBf16, "act", "backward", -1, backward_only=True, loss_moves_less_than=TINY),
    Fault(
        backward.WeightGradientTruncated,
        "gate",
        "backward",
        -1,
        backward_only=True,
        loss_moves_less_than=TINY,
        note="under FP32 as well: 16 bits are cut off",
    ),
    Fault(backward.NormScaleHeldConstant, "mlp_norm", "backward", -1, backward_only=True, loss_moves_less_than=TINY),
    Fault(backward.SkipGradientShort, "attn_residual", "backward", 1, backward_only=True, loss_moves_less_than=TINY),
    Fault(
        backward.QueryGradientLosesLastTile,
        "attn",
        "backward",
        -1,
        backward_only=True,
        loss_moves_less_than=TINY,
        number=8,
    ),
    Fault(backward.GroupGradientOfOneHead, "attn", "backward", -1, backward_only=True, loss_moves_less_than=TINY),
    Fault(
        backward.RopeNotTurnedBack,
        "k_rope",
        "backward",
        -1,
        backward_only=True,
        loss_moves_less_than=TINY,
        note="keys stand behind queries in the forward chain, so before them in the backward",
    ),
    Fault(
        backward.ValueInputGradientLost,
        "v",
        "backward",
        1,
        backward_only=True,
        loss_moves_less_than=TINY,
        note="the edge into the values is bare: what the norm's output gets is held against its other consumers",
    ),
    Fault(backward.QueryWeightGradientLong, "q", "backward", 1, backward_only=True, loss_moves_less_than=TINY),
    Fault(
        backward.GainGradientSummedInBf16, "attn_norm", "backward", -1, backward_only=True, loss_moves_less_than=TINY
    ),
    Fault(backward.OneTokenWithoutGradient, "embed", "backward", backward_only=True, loss_moves_less_than=TINY),
    Fault(small.OneGradientElementDoubled, "up", "backward", 1, backward_only=True, loss_moves_less_than=TINY),
    Fault(
        small.UntappedActivationLong,
        "gradients",
        loss_moves_less_than=TINY,
        recipes=("fp32/eager", "bf16/eager"),
        note="the first parameter whose gradients part is the embedding; compiled, both programs round otherwise",
    ),
    Fault(gradients.OneGradientScaled, "gradients", layer=0, required=True, backward_only=True),
    Fault(gradients.GradientMissing, "gradients", backward_only=True, note="of the final norm, outside the blocks"),
    Fault(gradients.GradientsExchanged, "gradients", layer=1, backward_only=True),
    Fault(
        optimizer.ParameterNotInOptimizer,
        "gradients",
        layer=1,
        backward_only=True,
        loss_moves_less_than=TINY,
        note="expected in `moments` before its first run; but the optimizer's zero_grad passes it by as well, so that "
        "its gradient grows from batch to batch",
    ),
    Fault(
        gradients.ClipsEveryMicroBatch,
        "gradients",
        backward_only=True,
        note="one micro-batch's gradients are clipped already; the first parameter is the embedding",
    ),
    Fault(
        gradients.DoublesWithEveryMicroBatch,
        "accumulation",
        backward_only=True,
        number=27,
        cause="with one micro-batch",
    ),
    Fault(gradients.AccumulatesInBf16, "accumulation", backward_only=True, cause="with one micro-batch"),
    Fault(gradients.LastMicroBatchForgotten, "accumulation", backward_only=True, cause="with one micro-batch"),
)

# A run whose first batch contains boundaries between documents, one of them in the first examined sequence.
MASKED = {"attention.document_mask": "true", "data.seed": "222"}
RESET = {"attention.reset_positions": "true", "data.seed": "222"}
DOCUMENTS = (
    Fault(
        attention.PackedDocumentsSeeEachOther,
        "attn",
        layer=0,
        loss_moves_less_than=TINY,
        number=6,
        settings=MASKED,
    ),
    Fault(
        attention.PositionsRunOn,
        "q_rope",
        layer=0,
        loss_moves_less_than=TINY,
        note="no mask: it would hide nothing, but scores of one document know distances alone, so that only q and k "
        "move",
        settings=RESET,
    ),
    Fault(
        attention.EndOfTextOpensTheNextDocument,
        "tokens",
        loss_moves_less_than=TINY,
        note="the session was given the right documents, and its program others",
        settings=MASKED,
    ),
)

AUTOCAST, NARROW = {"precision.casts": "autocast"}, {"precision.casts": "residual=bf16, logits=bf16"}
CASTS = (
    Fault(
        casts.ActivationRoundedOnce,
        "act",
        layer=0,
        loss_moves_less_than=TINY,
        recipes=BF16,
        settings=AUTOCAST,
    ),
    Fault(casts.RopeTablesRounded, "q_rope", layer=0, loss_moves_less_than=TINY, recipes=BF16, settings=AUTOCAST),
    Fault(casts.ResidualLeftInFp32, "attn_residual", layer=1, loss_moves_less_than=TINY, recipes=BF16, settings=NARROW),
    Fault(
        casts.ResidualGradientCut,
        "mlp_residual",
        "backward",
        layer=0,
        backward_only=True,
        loss_moves_less_than=TINY,
        recipes=BF16,
        settings=NARROW,
        note="it is lost in the sum of what the next block's two readers send back",
    ),
    Fault(
        casts.HeadGradientRoundedTwice,
        "logits",
        "backward",
        backward_only=True,
        loss_moves_less_than=TINY,
        recipes=BF16,
        settings=NARROW,
    ),
)

# A check finds these, and names another origin at first. A recheck names the expected one.
BEYOND = (
    Fault(
        backward.SmallGradientsFlushed,
        "o_proj",
        "backward",
        -1,
        backward_only=True,
        loss_moves_less_than=TINY,
        note="the micro-batch that is examined first has its loss on two sequences: its gradients are larger than "
        "those of training, and few of them fall below the limit. A recheck has smaller ones",
    ),
)

MANY = {"train.micro_batch_size": "1"}
OWN = (
    Fault(own_step.NoMaskWithoutLossMask, "attn", layer=0, own_weights=True, recipes=NOT_COMPILED),
    Fault(
        own_step.NoGradientWithoutLossMask,
        "act",
        "backward",
        1,
        own_weights=True,
        backward_only=True,
        loss_moves_less_than=TINY,
        recipes=NOT_COMPILED,
    ),
    Fault(
        own_step.GradientsZeroedWithoutLossMask,
        "gradients",
        "backward",
        1,
        own_weights=True,
        backward_only=True,
        loss_moves_less_than=TINY,
    ),
    Fault(
        own_step.MicroBatchesAfterTheThirdLost,
        "accumulation",
        backward_only=True,
        loss_moves_less_than=TINY,
        settings=MANY,
    ),
    Fault(
        own_step.StepScalesItsGradients,
        "accumulation",
        loss_moves_less_than=TINY,
        note="what the session gives as gradients is right: the step is not the sum of its micro-batches",
    ),
)

UPDATE = (
    Fault(optimizer.NormCountsOneTwice, "grad_norm", number=23, loss_moves_less_than=TINY),
    Fault(
        small.NormLeavesOutGains,
        "grad_norm",
        loss_moves_less_than=TINY,
        note="2e-4 of the norm: a serial sum in FP32 may be off by as much, and this trainer declares FP64",
    ),
    Fault(optimizer.NeverClips, "clip_coefficient", loss_moves_less_than=TINY),
    Fault(optimizer.LearningRateOneStepLate, "learning_rate", loss_moves_less_than=TINY),
    Fault(optimizer.ScheduleCountsMicroBatches, "learning_rate", number=31, loss_moves_less_than=TINY),
    Fault(optimizer.ClipsWithoutSayingSo, "moments", loss_moves_less_than=TINY, cause="a power of two"),
    Fault(optimizer.WrongBeta, "moments", loss_moves_less_than=TINY),
    Fault(optimizer.SecondMomentInBf16, "moments", loss_moves_less_than=TINY),
    Fault(optimizer.FusedUpdateLeavesOutTheTail, "moments", loss_moves_less_than=TINY),
    Fault(
        optimizer.DecayInTheGradient,
        "moments",
        layer=0,
        loss_moves_less_than=TINY,
        note="the embedding does not decay: the first matrix is in block 0",
    ),
    Fault(optimizer.DecayOnNormGains, "update", layer=0, required=True, loss_moves_less_than=TINY),
    Fault(
        optimizer.BiasCorrectionOneStepOff, "update", required=True, loss_moves_less_than=TINY, cause="bias correction"
    ),
    Fault(optimizer.UpdateSwallowed, "update", number=19, loss_moves_less_than=TINY),
    Fault(optimizer.DecayWithoutEffect, "update", layer=0, number=20, loss_moves_less_than=TINY),
    Fault(optimizer.EpsilonUnderflows, "update", number=21, loss_moves_less_than=TINY),
    Fault(state.CountsMicroBatches, "step_count", loss_moves_less_than=TINY),
)

STATE = (
    Fault(
        state.OtherInitialWeights,
        "weights",
        loss_moves_less_than=TINY,
        note="initial weights are compared as one: no layer is named",
    ),
    Fault(state.OtherBatch, "tokens"),
    Fault(state.MomentsLostOnLoad, "checkpoint", number=29, loss_moves_less_than=TINY),
    Fault(state.WeightsRoundedOnLoad, "checkpoint", loss_moves_less_than=TINY),
    Fault(state.StepLostOnLoad, "checkpoint", loss_moves_less_than=TINY),
    Fault(state.BlocksExchangedOnLoad, "checkpoint", layer=0, loss_moves_less_than=TINY),
    Fault(state.CheckpointOfALaterStep, "checkpoint", loss_moves_less_than=TINY),
    Fault(state.FirstMomentsWrittenInBf16, "checkpoint", loss_moves_less_than=TINY),
)

DATA = (
    Fault(data.LoaderStartsOver, "tokens", first_step=data.RESUMED_AT, number=30),
    Fault(data.BatchHandedOutTwice, "tokens", first_step=2),
    Fault(data.TokenIdsTooNarrow, "tokens", number=33),
    Fault(data.LastTargetWraps, "tokens"),
    Fault(data.ShuffledWithinBatch, "tokens"),
)

SLOW = "a length that is always off by the same share is what the mean of gain differences over steps is for"
LATER = (
    Fault(
        forward.StaleInputBuffer,
        "tokens",
        first_step=2,
        note="the session was given the right tokens, and its program others",
    ),
    Fault(
        optimizer.GradientsNotZeroed,
        "accumulation",
        first_step=2,
        loss_moves_less_than=TINY,
        note="`gradients` of the same micro-batches are right: the step's are not their sum",
    ),
    Fault(
        optimizer.AmsgradLeftOn, "update", first_step=2, loss_moves_less_than=TINY, note="in the first step it is Adam"
    ),
    Fault(
        optimizer.OneBitFlips,
        "accumulation",
        layer=1,
        first_step=3,
        number=34,
        loss_moves_less_than=TINY,
        cause="does not repeat",
        note="the step's gradient is not the sum of its micro-batches'; one element is too little for the global norm",
    ),
    Fault(
        forward.StreamRoundsDown,
        "mlp_residual",
        layer=1,
        within=200,
        loss_moves_less_than=1e-5,
        note="a step's bound is wider, the sum over steps is not. With all 24 bits kept it was not found in 120 checks",
    ),
    Fault(forward.ValuesHardlyLong, "v", layer=0, within=200, loss_moves_less_than=1e-5, recipes=BF16, note=SLOW),
    Fault(
        backward.UpWeightGradientHardlyShort,
        "up",
        "backward",
        1,
        within=200,
        backward_only=True,
        loss_moves_less_than=TINY,
        recipes=BF16,
        note=SLOW,
    ),
)

MUON, EIGHT_BITS = {"optim.name": "muon"}, {"optim.name": "adamw8bit"}
OPTIMIZERS = (
    Fault(
        optimizer.GainsAtTheRateOfTheRest,
        "update",
        layer=0,
        loss_moves_less_than=TINY,
        settings={"optim.gains_lr_scale": "2.0"},
        note="the first gain is in block 0",
    ),
    Fault(
        optimizer.MuonWithoutItsLength,
        "update",
        layer=0,
        loss_moves_less_than=TINY,
        settings=MUON,
        note="AdamW moves the embedding: the first matrix is in block 0",
    ),
    Fault(
        optimizer.MuonWithoutNesterov,
        "update",
        layer=0,
        within=2,
        loss_moves_less_than=TINY,
        settings=MUON,
        note="in the first step the momentum is a multiple of the gradient, and only roundings are others",
    ),
    Fault(optimizer.BlockScaleStale, "moments", layer=1, loss_moves_less_than=TINY, settings=EIGHT_BITS),
)

EAGER = "without torch.compile"
COMPILED = (
    Fault(
        compiled.CompiledKeyGradientsMisplaced,
        "attn",
        "backward",
        -1,
        only_compiled=True,
        backward_only=True,
        loss_moves_less_than=TINY,
        number=9,
        cause=EAGER,
    ),
    Fault(compiled.CompiledSigmoidInBf16, "act", layer=0, only_compiled=True, loss_moves_less_than=TINY, cause=EAGER),
    Fault(compiled.CompiledEpsilonOutsideTheRoot, "attn_norm", layer=0, only_compiled=True, cause=EAGER),
    Fault(
        compiled.CompiledNormStoredInBf16,
        "mlp_norm",
        layer=0,
        only_compiled=True,
        loss_moves_less_than=TINY,
        cause=EAGER,
    ),
    Fault(compiled.CompiledLastTileUnmasked, "attn", layer=0, only_compiled=True, cause=EAGER),
    Fault(
        compiled.CompiledHeadDropsItsCasts,
        "logits",
        only_compiled=True,
        loss_moves_less_than=TINY,
        recipes=BF16,
        cause=EAGER,
    ),
    Fault(compiled.CompiledTailUnrotated, "k_rope", layer=0, only_compiled=True, cause=EAGER),
    Fault(
        compiled.CompiledScatterOverwrites,
        "embed",
        "backward",
        only_compiled=True,
        backward_only=True,
        loss_moves_less_than=TINY,
        cause=EAGER,
    ),
    Fault(compiled.CompiledLossInBf16, "loss", only_compiled=True, cause=EAGER),
    Fault(
        compiled.UntappedGradientLong,
        "compiler",
        layer=1,
        only_compiled=True,
        backward_only=True,
        loss_moves_less_than=TINY,
        cause=EAGER,
        note="a twentieth: two thirds of what is allowed as a distance between the programs, but all along the truth",
    ),
    Fault(
        compiled.UntappedRopeTurnsBack,
        "compiler",
        only_compiled=True,
        cause=EAGER,
        note="the tapped program is right; the first parameter whose gradients part is the embedding",
    ),
    Fault(
        compiled.UntappedGradientsDoubled,
        "compiler",
        only_compiled=True,
        backward_only=True,
        loss_moves_less_than=TINY,
        cause=EAGER,
        note="as above",
    ),
)

TWO = {"train.ranks": "2"}
RANKS = (
    Fault(
        ranks.EveryRankDividesByItsOwn,
        "loss",
        number=2,
        note="the loss over ranks is a mean of means before any gradient is reduced",
        settings=TWO,
    ),
    Fault(
        ranks.EveryRankReadsTheFirstShare,
        "loss",
        note="the loss is no mean of the batch's NLL: half of it is there twice, under the other half's weights",
        settings=TWO,
    ),
    Fault(ranks.ReducedInBf16, "reduction", backward_only=True, loss_moves_less_than=TINY, number=24, settings=TWO),
    Fault(
        ranks.OneParameterNotReduced,
        "reduction",
        layer=1,
        backward_only=True,
        loss_moves_less_than=TINY,
        number=25,
        settings=TWO,
    ),
    Fault(ranks.DdpBypassed, "reduction", backward_only=True, loss_moves_less_than=TINY, number=26, settings=TWO),
    Fault(ranks.SchedulerStepsOnceARank, "learning_rate", loss_moves_less_than=TINY, number=31, settings=TWO),
)

FP8 = ("fp8_tensorwise/eager", "fp8_tensorwise/compiled")
DELAYED = ("fp8_delayed/eager", "fp8_delayed/compiled")
FP16 = ("fp16/eager", "fp16/compiled")
LEVERS = (
    Fault(
        levers.ChunksSummedInBf16,
        "logits",
        "backward",
        backward_only=True,
        loss_moves_less_than=TINY,
        number=13,
        recipes=BF16,
    ),
    Fault(
        levers.ChunksIgnoreTheWeights,
        "logits",
        "backward",
        backward_only=True,
        loss_moves_less_than=TINY,
        number=14,
        recipes=BF16,
        note="the gradient of the logits is right: the product that makes the weight's of it takes another",
    ),
    Fault(
        levers.ChunksSendNothingBack,
        "logits",
        "backward",
        backward_only=True,
        loss_moves_less_than=TINY,
        number=17,
        recipes=BF16,
    ),
    Fault(
        levers.LibraryHeadGetsRoundedShares,
        "torch_head",
        "backward",
        backward_only=True,
        loss_moves_less_than=TINY,
        recipes=BF16,
        settings={"loss.head": "torch"},
    ),
    Fault(levers.AmaxOfHalfTheTokens, "down_proj", layer=1, loss_moves_less_than=TINY, number=18, recipes=FP8),
    Fault(levers.WeightScaleStale, "o_proj", layer=1, loss_moves_less_than=TINY, recipes=FP8),
    Fault(levers.LayerLeftOutOfFloat8, "up", layer=1, loss_moves_less_than=TINY, number=32, recipes=FP8),
    Fault(
        levers.ScalesOneStepLate,
        "q",
        layer=0,
        first_step=2,
        loss_moves_less_than=TINY,
        number=18,
        recipes=DELAYED,
        note="before the first step they are right; the first layer in FP8 is block 0's query projection",
    ),
    Fault(
        levers.HistoryForgets,
        "fp8_amax",
        first_step=2,
        loss_moves_less_than=TINY,
        recipes=DELAYED,
        note="one step's history is whole",
    ),
    Fault(levers.AmaxOfOneSequence, "fp8_amax", layer=1, loss_moves_less_than=TINY, recipes=DELAYED),
    Fault(levers.AmaxOfAnotherLayer, "fp8_amax", layer=1, loss_moves_less_than=TINY, recipes=DELAYED),
    Fault(
        levers.ClipsBeforeUnscaling,
        "clip_coefficient",
        loss_moves_less_than=TINY,
        number=22,
        recipes=FP16,
    ),
    Fault(
        levers.LossScaleNeverGrows,
        "loss_scale",
        loss_moves_less_than=TINY,
        recipes=FP16,
        settings={"precision.loss_scale_interval": "1"},
    ),
    Fault(
        levers.SkippedStepMovesAWeight,
        "update",
        loss_moves_less_than=TINY,
        recipes=FP16,
        settings={"precision.loss_scale": str(2.0**100)},
        note="the scale makes every gradient infinite: the step must be left out",
    ),
    Fault(
        levers.RecomputeDiffers,
        "down_proj",
        "backward",
        -1,
        backward_only=True,
        loss_moves_less_than=TINY,
        number=10,
        recipes=("bf16/eager",),
        settings={"recompute.parts": "mlp"},
        note="the activation that its weight's gradient is made of is the one computed again",
    ),
)

DEVICE = (
    Fault(device.TokensShiftedOnTheWay, "tokens"),
    Fault(device.TargetsShiftedOnTheWay, "tokens"),
    Fault(device.WeightsShiftedOnTheWay, "tokens"),
    Fault(device.DocumentsShiftedOnTheWay, "tokens", settings=MASKED),
)

EVALUATION = (
    Fault(evaluation.NllScaledInEvaluation, "evaluation", loss_moves_less_than=TINY),
    Fault(evaluation.DropoutLeftOnInEvaluation, "evaluation", loss_moves_less_than=TINY),
    Fault(evaluation.LastTokensLeftOutOfEvaluation, "evaluation", loss_moves_less_than=TINY),
    Fault(evaluation.GuessesShifted, "evaluation", loss_moves_less_than=TINY),
    Fault(evaluation.NllScaledWithoutLossMask, "evaluation", loss_moves_less_than=TINY),
)

LOOKING = (
    Fault(
        looking.AveragedWeightsStay,
        "weights",
        note="the average of a single step is that step's; a check evaluates after its step too",
    ),
    Fault(looking.EvaluationRoundsWeights, "weights", loss_moves_less_than=TINY),
    Fault(
        looking.SamplingFreesMoments,
        "weights",
        note="before the first step all moments are zero; a check samples after its step too",
    ),
    Fault(looking.CheckpointRoundsWeights, "weights", loss_moves_less_than=TINY),
)

SECOND_STEP = "`lockstep parity` requests norms by group in every second step"
REPORTS = (
    Fault(reports.TokensOfOneMicroBatch, "record", loss_moves_less_than=TINY),
    Fault(reports.LossWeightIsAMean, "record", loss_moves_less_than=TINY),
    Fault(
        reports.AttentionLogitsUnscaled,
        "record",
        layer=0,
        loss_moves_less_than=TINY,
        note="expected without a layer before its first run; attention logits are a layer's",
    ),
    Fault(reports.NormsByGroupAfterClipping, "record", first_step=2, loss_moves_less_than=TINY, note=SECOND_STEP),
    Fault(reports.WeightNormsAreSquares, "record", first_step=2, loss_moves_less_than=TINY, note=SECOND_STEP),
    Fault(reports.UpdateRatioHalved, "record", first_step=2, loss_moves_less_than=TINY, note=SECOND_STEP),
)

SAMPLING = (
    Fault(sampling.CacheOnePlaceBehind, "sampling", loss_moves_less_than=TINY),
    Fault(sampling.RopeNotAdvanced, "sampling", loss_moves_less_than=TINY),
    Fault(sampling.ValuesStayInTheCache, "sampling", loss_moves_less_than=TINY),
    Fault(sampling.KeysOfAnotherHead, "sampling", loss_moves_less_than=TINY),
    Fault(sampling.FirstTokenOfAPageLost, "sampling", loss_moves_less_than=TINY),
    Fault(sampling.CacheTrustedByItsLength, "sampling", loss_moves_less_than=TINY),
    Fault(sampling.SamplesAtAnotherTemperature, "sampling", loss_moves_less_than=TINY),
    Fault(sampling.SamplesFollowTheTokenBefore, "sampling", loss_moves_less_than=TINY),
)

FAULTS = (
    *FORWARD,
    *DOCUMENTS,
    *CASTS,
    *BACKWARD,
    *BEYOND,
    *OWN,
    *UPDATE,
    *STATE,
    *DEVICE,
    *EVALUATION,
    *LOOKING,
    *REPORTS,
    *SAMPLING,
    *DATA,
    *LATER,
    *OPTIMIZERS,
    *LEVERS,
    *COMPILED,
    *RANKS,
)

# The faults that one eager check of the first step must find, without other settings or a loader.
CATALOG = (*FORWARD, *DOCUMENTS, *CASTS, *BACKWARD, *UPDATE, *STATE, *DEVICE, *EVALUATION, *SAMPLING)
