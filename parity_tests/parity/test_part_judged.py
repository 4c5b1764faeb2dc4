"""`parity.update = N`: a check judges N elements of each tensor's moments and update, others in other checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from lockstep.core.components.optimizers import BLOCK
from lockstep.core.config.schema import OptimConfig, RunConfig
from lockstep.core.model.groups import update_rules
from lockstep.core.model.names import parameter_shapes
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.judge.update import not_judged, part_judged, update
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.session import TorchSession

EMBEDDING, GAIN = "embed.weight", "norm.weight"
ASKED = 700


def of_part(config: RunConfig, asked: int | str = ASKED, seed: int = 0) -> RunConfig:
    parity = config.parity.model_copy(update={"update": asked})
    return config.model_copy(update={"parity": parity, "seed": seed})


def optimized(name: str) -> RunConfig:
    return tiny_config().model_copy(update={"optim": OptimConfig(name=name, warmup_steps=3)})


@pytest.mark.parametrize("every", [1, 2, 4])
def test_no_element_is_left_out_for_good_whichever_steps_are_checked(every: int) -> None:
    config = of_part(tiny_config())
    seen = np.zeros(math.prod(parameter_shapes(config.model)[EMBEDDING]), int)
    rows = -(-ASKED // 64)
    parts = -(-300 // rows)
    checks = 12 * parts
    for number in range(checks):
        where, shape = part_judged(config, EMBEDDING, every * number)
        assert shape == (rows, 64) and where.stop - where.start == math.prod(shape) and where.stop <= seen.size
        seen[where] += 1
    # A part's share of the checks: by chance, five standard deviations at most from even.
    assert seen.min() > checks / parts - 5 * math.sqrt(checks / parts) and seen.min() > 0


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon"])
def test_small_tensors_and_those_that_move_as_a_whole_are_judged_whole(name: str) -> None:
    config = of_part(optimized(name))
    for parameter, shape in parameter_shapes(config.model).items():
        where, judged = part_judged(config, parameter, 3)
        whole = math.prod(shape) <= ASKED or (name == "muon" and parameter.startswith("blocks.") and len(shape) == 2)
        assert (judged == shape) == whole, parameter
        if update_rules(config)[parameter].together == BLOCK and judged != shape:
            assert where.start % BLOCK == where.stop % BLOCK == 0
    assert part_judged(of_part(optimized(name), "all"), EMBEDDING, 3) == (slice(0, 300 * 64), (300, 64))


def test_every_part_of_8_bit_moments_begins_with_a_block() -> None:
    """Also the last one, where rows are no multiple of those that fill blocks. torchao keeps such moments in FP32."""
    model = tiny_config(hidden=72, heads=2, kv_heads=2, ffn_hidden=414).model
    optim = OptimConfig(name="adamw8bit", eight_bit="bitsandbytes", warmup_steps=3)
    config = of_part(tiny_config().model_copy(update={"model": model, "optim": optim}), 16384)
    name, size = "blocks.0.mlp.gate_proj.weight", 414 * 72
    assert update_rules(config)[name].together == BLOCK
    seen = np.zeros(size, int)
    for step in range(60):
        where, shape = part_judged(config, name, step)
        assert where.start % BLOCK == 0 and (where.stop % BLOCK == 0 or where.stop == size)
        assert where.stop - where.start == math.prod(shape)
        seen[where] += 1
    assert seen.min() > 0


def test_a_check_says_how_much_it_leaves_to_others() -> None:
    assert not_judged(tiny_config(), 0) == not_judged(of_part(tiny_config(), 10**9), 0) == []
    (said,) = not_judged(of_part(tiny_config()), 0)
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(tiny_config().model).items()}
    judged = sum(size if size <= ASKED else -(-ASKED // 64) * 64 for n, size in sizes.items() if "down_proj" not in n)
    judged += sum(-(-ASKED // 128) * 128 for name in sizes if "down_proj" in name)
    assert said == f"{100 * (1 - judged / sum(sizes.values())):.3g} % of moments and update (parity.update = 700): " + (
        "in other checks"
    )


@pytest.fixture(scope="module", params=["adamw", "adamw8bit"])
def judged(request: pytest.FixtureRequest) -> tuple[Evidence, Reference]:
    """Return an honest second step, and the reference."""
    config = optimized(request.param)
    session = TorchSession(config)
    session.step(text_batch(config, 1))
    return gather(session, config, uneven_weights(text_batch(config), 0)), Reference.open(JaxBackend(), config)


def test_parts_of_an_honest_update_keep_their_bounds(judged: tuple[Evidence, Reference]) -> None:
    evidence, reference = judged
    for asked in (1, 200, ASKED, 5000):
        for seed in range(5):
            findings = list(update(evidence, replace(reference, config=of_part(reference.config, asked, seed))))
            assert [one for one in findings if not one.ok] == []
            assert sum(one.tap == EMBEDDING for one in findings) == 1


@pytest.mark.parametrize("kind", ["params", "exp_avg_sq"])
def test_a_wrong_row_is_found_when_it_has_its_turn_and_named(kind: str, judged: tuple[Evidence, Reference]) -> None:
    """One number of the last row is not what the update makes of it."""
    evidence, reference = judged
    after = evidence.after
    tensors = after.params if kind == "params" else after.optimizer[kind]
    wrong = tensors[EMBEDDING].copy()
    wrong[-1] = evidence.before.params[EMBEDDING][-1] if kind == "params" else wrong.max()
    changed: Mapping[str, np.ndarray] = {**tensors, EMBEDDING: wrong}
    if kind == "params":
        after = replace(after, params=changed)
    else:
        after = replace(after, optimizer={**after.optimizer, kind: changed})
    evidence = replace(evidence, after=after)
    tap = EMBEDDING if kind == "params" else f"{kind}/{EMBEDDING}"
    due = []
    for seed in range(60):
        config = of_part(reference.config, seed=seed)
        due.append(part_judged(config, EMBEDDING, evidence.before.step)[0].stop == wrong.size)
        found = [one.tap for one in update(evidence, replace(reference, config=config)) if not one.ok]
        assert found == ([tap] if due[-1] else [])
    assert 0 < sum(due) < 30
    assert [one.tap for one in update(evidence, reference) if not one.ok] == [tap]


def test_the_verdict_covers_no_more_than_was_judged(judged: tuple[Evidence, Reference]) -> None:
    evidence, reference = judged
    check = judge(evidence, replace(reference, config=of_part(reference.config)))
    assert check.verdict == "agreed"
    assert any("(parity.update = 700)" in line for line in check.not_covered)
    assert not any("parity.update" in line for line in judge(evidence, reference).not_covered)
