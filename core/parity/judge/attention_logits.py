"""Compare the largest attention logits that a record reports with the candidate's own rotated queries and keys.

The logits come from a separate forward pass, whose roundings may differ from those in the program that showed q and k.
Each pass is as far from the truth as the twin is, up to MARGIN. If both factors of a product q·k have relative errors,
its error is at most the sum of these times |q|·|k| (Cauchy and Schwarz), and so is the error of the largest product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lockstep.core.components.precision import FORMATS
from lockstep.core.model.families import graph_of
from lockstep.core.model.families.transformer import WINDOWED
from lockstep.core.parity.evidence.attention_logits import ATTENTION_LOGITS
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.observations import sketch_distances
from lockstep.core.parity.judge.end_to_end import Repeated
from lockstep.core.parity.judge.reports import STAGE
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.compare import Reference, exact, finding
from lockstep.core.parity.measures.stretches import stretches
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.core.train.metrics import ATTENTION_LOGIT

# Number of queries that are computed at once.
QUERIES = 256


def attention_logits(
    evidence: Evidence, reference: Reference, repeated: Repeated, missing: list[str]
) -> Iterator[Finding]:
    """Compare the largest logit of each layer. Layers without q and k in the evidence are appended to `missing`."""
    shown = evidence.evaluated.get(ATTENTION_LOGITS)
    if shown is None:
        return
    config, batch = reference.config, evidence.weighted
    if shown.shape != (config.model.layers,):
        note = f"candidate {shown.shape}, layers {config.model.layers}"
        yield exact(STAGE, ATTENTION_LOGIT + "max", 1, 1, "a number for each layer", note)
        return
    documents = batch.documents_for(config.attention) if config.attention.document_mask else None
    model = config.model
    operations = [one for one in graph_of(model).operations if one.kind == "attention"]
    for layer, (value, attention) in enumerate(zip(shown.tolist(), operations, strict=True)):
        names = [attention.reads[what] for what in "qk"]
        if not all(name in evidence.taps and name in repeated.truth for name in names):
            missing.append(f"the largest attention logit of layer {layer}: its queries and keys are not shown")
            continue
        q, k = (evidence.taps[name].reshape(*batch.tokens.shape, -1, model.head_dim) for name in names)
        scale = math.prod(float(np.linalg.norm(x, axis=-1).max()) for x in (q, k)) * model.score_scale
        window = model.window if attention.id == WINDOWED else 0
        apart = abs(value - largest(q, k, documents, model.score_scale, window))
        measure = Measure(
            "relative_error", apart / scale if scale else apart, None, *_bound(reference, repeated, names)
        )
        yield finding(STAGE, f"{ATTENTION_LOGIT}blocks.{layer}", "local", (measure,), 1)


def _bound(reference: Reference, repeated: Repeated, names: list[str]) -> tuple[float, str]:
    """Return the bound on a logit's error as a share of the largest |q|·|k|/√E, and its basis in words."""
    precision = reference.config.precision
    if precision.exact:
        return calibrated_bounds.FP64_LIMIT, f"FP64: {calibrated_bounds.FP64_LIMIT:.0e} of the largest |q|·|k|/√E"
    errors = 0.0
    for name in names:
        w, t = repeated.twin[name], repeated.truth[name]
        error = sketch_distances(w, w, t, reference.stream).twin_relative_error
        errors += max(error, calibrated_bounds.FP32_LIMIT) + FORMATS[precision.operand].roundoff
    words = f"{calibrated_bounds.MARGIN:g} times the twin's errors in q and k, of the largest |q|·|k|/√E"
    return calibrated_bounds.MARGIN * errors, words


def largest(
    q_NSHE: np.ndarray, k_NSKE: np.ndarray, documents_NS: np.ndarray | None, scale: float, window: int = 0
) -> float:
    """Return the largest q·k·scale over queries, heads, and the keys that each query attends to.

    q_NSHE, k_NSKE: rotated queries (N, S, H, E) and keys (N, S, K, E).
    documents_NS: number of each token's document; None without a document mask.
    window: number of keys, with the query's own position; 0 for all earlier ones.
    """
    found, heads = -math.inf, k_NSKE.shape[2]
    for row, (q_SHE, k_SKE) in enumerate(zip(q_NSHE, k_NSKE, strict=True)):
        for where in stretches(len(q_SHE), QUERIES):
            places = np.arange(where.start, where.stop)
            q_CKGE = q_SHE[where].reshape(len(places), heads, -1, q_SHE.shape[-1])
            ago_CT = places[:, None] - np.arange(where.stop)
            seen_CT = (ago_CT >= 0) & (ago_CT < (window or where.stop))
            if documents_NS is not None:
                seen_CT &= documents_NS[row, where, None] == documents_NS[row, : where.stop]
            for head in range(heads):
                logits_CGT = q_CKGE[:, head] @ k_SKE[: where.stop, head].T
                found = max(found, float(logits_CGT.max(where=seen_CT[:, None], initial=-math.inf)))
    return found * scale
