"""Compare the reference with closed forms before it judges: inputs with results that are known by hand.

Every form is (stage, description, the reference's result, the correct result). Shapes as in
core/parity/reference/stages.py: B batch, S sequence, D hidden, H heads, K key-value heads, E head dimension, F
feed-forward, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.core.backend import Arrays, Session
from lockstep.core.config.schema import OptimConfig, RunConfig
from lockstep.core.model.families.transformer import WINDOWED
from lockstep.core.model.graph import Operation
from lockstep.core.model.groups import group_settings, moment_names, update_rules
from lockstep.core.model.names import groups_of, parameter_shapes, probe_shapes
from lockstep.core.parity.reference.stages import stages_of

Form = tuple[str, str, np.ndarray, np.ndarray]
ROWS, LENGTH = 2, 8
# The document of each token in its sequence, if the run uses documents. There are documents of one token and of
# several, at both ends and in the middle.
DOCUMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 2, 2, 2]], np.int32)


@dataclass(frozen=True)
class Subject:
    """A session of the reference at a small model, and the configuration of this model's run."""

    session: Session
    config: RunConfig

    def run(self, stage: str, **inputs: np.ndarray) -> np.ndarray:
        """Run a stage. Returns its output in float64."""
        return self.session.run_stage(stage, inputs)["out"].astype(np.float64)

    def stages(self) -> dict[str, Operation]:
        """Return the first of every forward stage, by id."""
        found: dict[str, Operation] = {}
        for stage in stages_of(self.config):
            found.setdefault(stage.id, stage)
        return found

    def of_kind(self, kind: str) -> list[Operation]:
        """Return the first of every forward stage of one kind."""
        return [stage for stage in self.stages().values() if stage.kind == kind]

    def shapes(self, stage: Operation) -> dict[str, tuple[int, ...]]:
        """Return the shape of every floating-point input of a stage, and of its output under `out`."""
        taps = probe_shapes(self.config.model, ROWS, LENGTH)
        params = parameter_shapes(self.config.model)
        of_inputs = {role: taps[tap] for role, tap in stage.reads.items()}
        return of_inputs | {role: params[name] for role, name in stage.params.items()} | {"out": taps[stage.tap]}

    def integers(self, stage: Operation) -> dict[str, np.ndarray]:
        """Return the inputs that come from the batch, int32 (ROWS, LENGTH): token ids, all different, and documents."""
        ids = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH)
        return {role: DOCUMENTS if role == "documents" else ids for role in stage.batch}


def tables(subject: Subject) -> Iterator[Form]:
    """Check that an embedding is a row of its table, and the projection of unit vector i is column i, plus the bias."""
    for stage in subject.stages().values():
        shapes = subject.shapes(stage)
        if "weight" not in stage.params or len(shapes["weight"]) != 2 or stage.kind == "library_head":
            continue
        if stage.kind == "position":
            yield from _positions(subject, stage)
            continue
        rows, columns = shapes["weight"]
        # Small integers, which are exact in every format, as are all their sums.
        weight = ((np.arange(rows * columns).reshape(rows, columns) * 7) % 61 - 30).astype(np.float64)
        if stage.kind == "embedding":
            tokens = subject.integers(stage)["tokens"]
            yield stage.id, "a row of the table", subject.run(stage.id, weight=weight, tokens=tokens), weight[tokens]
            continue
        unit = np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % columns
        x = np.eye(columns)[unit]
        bias = {"bias": np.arange(rows) % 5 - 2.0} if "bias" in stage.params else {}
        due = weight.T[unit] + bias.get("bias", 0.0)
        yield stage.id, "the column of a unit vector", subject.run(stage.id, x=x, weight=weight, **bias), due


def _positions(subject: Subject, stage: Operation) -> Iterator[Form]:
    """Check that every token gets the row of its position, counted in its own document if positions restart there."""
    shapes = subject.shapes(stage)
    rows, columns = shapes["weight"]
    weight = ((np.arange(rows * columns).reshape(rows, columns) * 7) % 61 - 30).astype(np.float64)
    x = np.arange(math.prod(shapes["x"])).reshape(shapes["x"]) % 97.0
    place = within_documents() if "documents" in stage.batch else np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
    due = x + weight[place.astype(int)]
    yield stage.id, "the row of a position", subject.run(stage.id, x=x, weight=weight, **subject.integers(stage)), due


def sums_and_norms(subject: Subject) -> Iterator[Form]:
    """Check x + y, and RMSNorm (Zhang & Sennrich 2019) of a constant c: c/√(c² + ε), times its gain.

    RMSNorm subtracts no mean. LayerNorm (Ba et al. 2016) of numbers c above and below their mean is ±c/√(c² + ε), times
    its gain, plus its bias.
    """
    eps = subject.config.model.norm_eps
    for stage in subject.stages().values():
        shapes = subject.shapes(stage)
        if stage.kind == "sum":
            x = np.arange(math.prod(shapes["x"])).reshape(shapes["x"]) % 97.0
            yield stage.id, "a sum", subject.run(stage.id, x=x, y=1.0 - 2 * x), 1.0 - x
        elif stage.kind in ("norm", "centered_norm", "head_norm"):
            gain, constant = 1.0 + np.arange(shapes["weight"][0]) % 3, 0.25
            x = np.full(shapes["x"], constant)
            due = np.broadcast_to(gain * constant / math.sqrt(constant**2 + eps), shapes["out"])
            weight = gain - 1.0 if stage.kind == "centered_norm" else gain
            yield stage.id, "a constant vector", subject.run(stage.id, x=x, weight=weight), due
        elif stage.kind == "layer_norm":
            width, constant = shapes["weight"][0], 0.25
            gain, bias = 1.0 + np.arange(width) % 3, np.arange(width) % 5 - 2.0
            # Equally many numbers above and below the mean. If the width is odd, the last number is the mean.
            signs = np.where(np.arange(width) % 2, -1.0, 1.0) * (np.arange(width) < width // 2 * 2)
            scale = math.sqrt(constant**2 * np.square(signs).mean() + eps)
            due = np.broadcast_to(signs * constant / scale * gain + bias, shapes["out"])
            x = np.broadcast_to(7.0 + signs * constant, shapes["x"])
            yield stage.id, "numbers around their mean", subject.run(stage.id, x=x, weight=gain, bias=bias), due
        elif stage.kind == "scale":
            x = np.arange(math.prod(shapes["x"])).reshape(shapes["x"]) % 97.0
            yield stage.id, "times √hidden", subject.run(stage.id, x=x), x * math.sqrt(subject.config.model.hidden)
        elif stage.kind == "cap":
            cap, shape = subject.config.model.logits_cap, shapes["logits"]
            sign = np.where(np.arange(math.prod(shape)).reshape(shape) % 2, -1.0, 1.0)
            # tanh(ln 3 / 2) = ½.
            logits = sign * cap * math.log(3.0) / 2
            yield stage.id, "half of the cap", subject.run(stage.id, logits=logits), sign * cap / 2


# GELU by tanh (Hendrycks & Gimpel 2016) at 1. At −1 it is smaller by 1. GELU by erf is 0.8413… at 1.
GELU_OF_ONE = 0.8411919906082767


def activation(subject: Subject) -> Iterator[Form]:
    """Check SwiGLU (Shazeer 2020): silu(ln 3) = ¾·ln 3, times `up`; silu(−ln 3) = −¼·ln 3; and GELU at ±1."""
    for stage in subject.of_kind("gated"):
        shape = subject.shapes(stage)["gate"]
        sign = np.where(np.arange(math.prod(shape)).reshape(shape) % 2, -1.0, 1.0)
        due = np.where(sign > 0, 0.75, -0.25) * math.log(3.0) * 2.0
        yield stage.id, "silu at ±ln 3", subject.run(stage.id, gate=sign * math.log(3.0), up=np.full(shape, 2.0)), due
    for stage in (*subject.of_kind("gated_gelu"), *subject.of_kind("gelu")):
        shape = subject.shapes(stage)["up"]
        sign = np.where(np.arange(math.prod(shape)).reshape(shape) % 2, -1.0, 1.0)
        due, inputs = np.where(sign > 0, GELU_OF_ONE, GELU_OF_ONE - 1.0), {"up": sign}
        if stage.kind == "gated_gelu":
            due, inputs = 2.0 * due, {"gate": sign, "up": np.full(shape, 2.0)}
        yield stage.id, "GELU at ±1", subject.run(stage.id, **inputs), due


def rotation(subject: Subject) -> Iterator[Form]:
    """Check RoPE (Su et al. 2021): pair (j, j + E/2) turns by position·θ^(−2j/E), and products depend only on distance.

    Llama 3.1 scales each frequency, by the number of turns that it makes in `rope_original` tokens.
    """
    model, reset = subject.config.model, subject.config.attention.reset_positions
    half, base = model.head_dim // 2, float(model.rope_theta)
    position = within_documents() if reset else np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
    frequency = base ** (-2.0 * np.arange(half) / model.head_dim)
    if model.rope_factor > 1:
        turns = model.rope_original * frequency / (2 * math.pi)
        share = np.interp(turns, [model.rope_low, model.rope_high], [1.0 / model.rope_factor, 1.0])
        frequency = frequency * share
    angle = position[..., None] * frequency
    several = {"documents": DOCUMENTS} if reset else {}
    single = {"documents": np.zeros_like(DOCUMENTS)} if reset else {}
    for one in subject.of_kind("rope"):
        stage, (heads, width) = one.id, one.width
        x = np.zeros((ROWS, LENGTH, heads, width))
        x[..., :half] = 1.0
        due = np.broadcast_to(np.concatenate([np.cos(angle), np.sin(angle)], 2)[:, :, None], x.shape)
        yield stage, "angles", subject.run(stage, x=x.reshape(ROWS, LENGTH, -1), **several), due
        rng = np.random.default_rng(0)
        left, right = (np.broadcast_to(rng.standard_normal(width), x.shape) for _ in range(2))
        turned = [subject.run(stage, x=y.reshape(ROWS, LENGTH, -1), **single)[0, :, 0] for y in (left, right)]
        products = turned[0] @ turned[1].T
        due = np.array([[products[max(i - j, 0), max(j - i, 0)] for j in range(LENGTH)] for i in range(LENGTH)])
        yield stage, "products depend on the distance alone", products, due


def attention(subject: Subject) -> Iterator[Form]:
    """Check attention: equal keys give the running mean of each KV head's values; two keys a logistic weight of scores.

    With a document mask, this holds within each document; with a window, over its keys. A cap changes a score s to
    cap·tanh(s / cap).
    """
    for stage in subject.of_kind("attention"):
        model, masked = subject.config.model, subject.config.attention.document_mask
        seen = {"documents": DOCUMENTS} if masked else {}
        position = np.broadcast_to(np.arange(LENGTH, dtype=np.float64), (ROWS, LENGTH))
        # Number of earlier keys that a query attends to.
        in_document = within_documents() if masked else position
        window = model.window if stage.id == WINDOWED else LENGTH
        within = np.minimum(in_document, window - 1)
        shape_q, shape_k = (ROWS, LENGTH, model.heads, model.head_dim), (ROWS, LENGTH, model.kv_heads, model.head_dim)
        of_q, of_k = subject.shapes(stage)["q"], subject.shapes(stage)["k"]
        heads, kv_heads, width = model.heads, model.kv_heads, model.head_dim
        q = np.random.default_rng(0).standard_normal(shape_q)
        of_head = np.arange(heads) // (heads // kv_heads)
        own = 16.0 * np.arange(kv_heads)
        v = np.broadcast_to(position[..., None, None] + own[:, None], (ROWS, LENGTH, kv_heads, width))
        k = np.ones(shape_k)
        given = {"q": q.reshape(of_q), "k": k.reshape(of_k), "v": v.reshape(ROWS, LENGTH, -1), **seen}
        out = subject.run(stage.id, **given).reshape(shape_q)
        due = np.broadcast_to((position - within / 2)[..., None, None] + 16.0 * of_head[:, None], out.shape)
        yield stage.id, "equal keys: the running mean", out, due
        q, k = np.zeros_like(q), np.zeros_like(k)
        first = in_document == 0
        q[..., 0], k[first, :, 0] = 1.0, math.log(3.0) / model.score_scale
        v = np.zeros((ROWS, LENGTH, kv_heads, width))
        v[first] = 1.0
        given = {"q": q.reshape(of_q), "k": k.reshape(of_k), "v": v.reshape(ROWS, LENGTH, -1), **seen}
        out = subject.run(stage.id, **given).reshape(shape_q)
        cap = model.attention_cap
        above = math.exp(cap * math.tanh(math.log(3.0) / cap)) if cap else 3.0
        # With a window, the first key is outside of it.
        due = np.where(in_document < window, above / (above + within), 0.0)
        due = np.broadcast_to(due[..., None, None], out.shape)
        yield stage.id, "a score of ln 3 against zeros: 3 / (3 + n)", out, due


def within_documents() -> np.ndarray:
    """Return the position of each token of DOCUMENTS in its own document, from 0: float64 (ROWS, LENGTH)."""
    return np.array([[list(row[:i]).count(row[i]) for i in range(LENGTH)] for row in DOCUMENTS], np.float64)


def loss_head(subject: Subject) -> Iterator[Form]:
    """Check the loss: uniform logits cost ln V; a target's logit `a` above the rest costs ln(1 + (V − 1)·e^(−a)).

    z-loss adds z·L² with L = logsumexp: L = c + ln V if every logit is c, and L = a plus the cost if one logit is a and
    the others 0. A library's head gets the logits as products: row t of the weight is the unit vector of the token
    whose target is t.
    """
    vocabulary, last = subject.config.model.vocab_size, list(subject.stages().values())[-1]
    targets, shapes = subject.integers(last)["targets"], subject.shapes(last)
    z_loss = subject.config.loss.z_loss

    def nll(logits: np.ndarray) -> np.ndarray:
        if last.kind != "library_head":
            return subject.run(last.id, logits=logits, targets=targets)
        x = np.eye(shapes["x"][-1])[targets]
        weight = np.zeros(shapes["weight"])
        weight[:, : targets.size] = logits.reshape(-1, vocabulary).T
        return subject.run(last.id, x=x, weight=weight, targets=targets)

    flat = np.full((ROWS, LENGTH, vocabulary), 3.0)
    cost = math.log(vocabulary)
    due = np.full((ROWS, LENGTH), cost + z_loss * (3.0 + cost) ** 2)
    yield last.id, "uniform logits cost ln V", nll(flat), due
    above = np.linspace(0.5, 12.0, LENGTH)
    peaked = above[:, None] * np.eye(vocabulary)[targets]
    costs = np.log1p((vocabulary - 1) * np.exp(-above))
    due = np.broadcast_to(costs + z_loss * (above + costs) ** 2, (ROWS, LENGTH))
    yield last.id, "one logit above the rest", nll(peaked), due


def _adamw_by_hand(optim: OptimConfig, before: Arrays, done: int) -> tuple[Arrays, np.ndarray]:
    gradient = before["grads"]
    m = optim.beta1 * before["exp_avg"] + (1 - optim.beta1) * gradient
    v = optim.beta2 * before["exp_avg_sq"] + (1 - optim.beta2) * gradient**2
    m_hat, v_hat = m / (1 - optim.beta1 ** (done + 1)), v / (1 - optim.beta2 ** (done + 1))
    return {"exp_avg": m, "exp_avg_sq": v}, m_hat / (np.sqrt(v_hat) + optim.eps)


def _muon_by_hand(optim: OptimConfig, before: Arrays, done: int) -> tuple[Arrays, np.ndarray]:
    gradient = before["grads"]
    b = optim.momentum * before["momentum_buffer"] + (1 - optim.momentum) * gradient
    direction = optim.momentum * b + (1 - optim.momentum) * gradient if optim.nesterov else b
    return {"momentum_buffer": b}, 0.2 * math.sqrt(max(gradient.shape)) * by_singular_values(direction, optim.ns_steps)


# Rule of core/components/optimizers.py → a function of (settings, gradient after clipping, weight and moments before,
# steps done). The function returns the moments after, and the step before learning rate and weight decay. A rule
# without an entry has no closed form.
BY_HAND: dict[str, Callable[[OptimConfig, Arrays, int], tuple[Arrays, np.ndarray]]] = {
    "adamw": _adamw_by_hand,
    "muon": _muon_by_hand,
}


def optimizer(subject: Subject) -> Iterator[Form]:
    """Check AdamW (Loshchilov & Hutter 2019, algorithm 2, lr on both terms) by hand, at step 3, with clipping.

    Weight decay is decoupled. Learning rate and weight decay are the group's. Muon of a matrix is checked by its
    singular values (`by_singular_values`).
    """
    rng = np.random.default_rng(1)
    schedule, coefficient, done = 0.01, 0.5, 2
    shapes = parameter_shapes(subject.config.model)
    kinds = {"params": list(shapes), "grads": list(shapes), **moment_names(subject.config)}
    old: dict[str, dict[str, np.ndarray]] = {
        kind: {name: rng.standard_normal(shapes[name]) for name in names} for kind, names in kinds.items()
    }
    # Second moments are never negative.
    old |= {kind: {name: np.square(value) for name, value in old[kind].items()} for kind in old if kind == "exp_avg_sq"}
    inputs = {f"{kind}/{name}": value for kind, tree in old.items() for name, value in tree.items()}
    scalars = {"step": np.asarray(done), "coefficient": np.asarray(coefficient), "lr": np.asarray(schedule)}
    new = subject.session.run_stage("update", inputs | scalars)
    groups, rules = groups_of(subject.config.model), update_rules(subject.config)
    for name in shapes:
        settings = group_settings(subject.config, groups[name])
        by_hand = BY_HAND.get(rules[name].name)
        if by_hand is None:
            continue
        before = {kind: values[name] for kind, values in old.items() if name in values}
        before["grads"] = coefficient * before["grads"]
        moments, step = by_hand(subject.config.optim, before, done)
        for kind, due in moments.items():
            yield "moments", f"{kind} of {name}", new[f"{kind}/{name}"], due
        p, lr = before["params"], schedule * settings.lr_factor
        yield "update", name, new[f"params/{name}"], p - lr * (step + settings.weight_decay * p)


def by_singular_values(x: np.ndarray, steps: int) -> np.ndarray:
    """Apply Newton–Schulz (Jordan 2024) to the singular values: s ← 3.4445·s − 4.775·s³ + 2.0315·s⁵ in each step."""
    left, values, right = np.linalg.svd(x, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    moved: np.ndarray = (left * values) @ right
    return moved


FORMS: tuple[Callable[[Subject], Iterator[Form]], ...] = (
    tables,
    sums_and_norms,
    activation,
    rotation,
    attention,
    loss_head,
    optimizer,
)


def drawn(subject: Subject, stage: Operation, seed: int = 0) -> Arrays:
    """Draw a stage's inputs, and the gradient of its output (`grad`), from a normal distribution."""
    rng, shapes = np.random.default_rng(seed), subject.shapes(stage)
    drawn = {("grad" if role == "out" else role): rng.standard_normal(shape) for role, shape in shapes.items()}
    return drawn | subject.integers(stage)
