"""References that cannot judge are refused in words; names are strict; nothing compared is never agreement."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from lockstep.core.errors import UserError
from lockstep.core.parity.watch.api import Watcher, watch
from lockstep.core.parity.watch.snapshot import Answer
from lockstep.core.parity.watch.update_rules import to_bfloat16
from lockstep.jax_backend.watch import reference
from lockstep.parity_tests.watch.stranger import FP32, Tagger, batches, jax_loss, jax_nll, torch_loss, train


def gradients_of_line(params: dict[str, np.ndarray], batch: Any) -> tuple[float, dict[str, np.ndarray]]:
    """Mean squared error of x·wᵀ + b, by hand, in numpy."""
    x, y = batch["x"], batch["y"]
    error = x @ params["weight"].T + params["bias"] - y
    scale = error.dtype.type(2 / error.size)
    return float((error**2).mean()), {"weight": scale * error.T @ x, "bias": scale * error.sum(0)}


def refused(watcher: Watcher, words: str) -> None:
    """Training went on to its end, no gradient was judged, and the verdict's line has the reason."""
    assert watcher.checks and watcher.verdict == "could_not"
    assert all(any(re.search(words, text) for text in check.not_judged) for check in watcher.checks), watcher
    assert re.search(words, watcher.headline) and re.search(words, str(watcher.to_json()["not_judged"]))
    assert not any(f.stage == "gradients" and f.tap != "names" for check in watcher.checks for f in check.findings)


def line(reference: Any, steps: int = 3, width: int = 5, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(12 if width == 5 else width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    watcher = watch(model, optimizer, reference=reference, every=1, **settings)
    for _ in range(steps):
        batch = {"x": torch.randn(32, model.in_features), "y": torch.randn(32, width)}
        loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        with watcher.step(batch, loss):
            optimizer.step()
        optimizer.zero_grad()
    return watcher


def test_a_numpy_function_is_a_reference() -> None:
    assert line(gradients_of_line).verdict == "agreed"


def test_names_are_mapped_both_ways() -> None:
    def other(params: dict[str, np.ndarray], batch: Any) -> tuple[float, dict[str, np.ndarray]]:
        loss, grads = gradients_of_line({"weight": params["w"], "bias": params["b"]}, batch)
        return loss, {"w": grads["weight"], "b": grads["bias"]}

    assert line(other, names={"weight": "w", "bias": "b"}).verdict == "agreed"
    assert line(other, names=lambda name: name[0]).verdict == "agreed"


@pytest.mark.parametrize("side", ["reference", "model"])
def test_names_missing_on_one_side_disagree(side: str) -> None:
    def other(params: dict[str, np.ndarray], batch: Any) -> tuple[float, dict[str, np.ndarray]]:
        loss, grads = gradients_of_line(params, batch)
        if side == "reference":
            del grads["bias"]
        else:
            grads["scale"] = grads["bias"]
        return loss, grads

    watcher = line(other, steps=1)
    (check,) = watcher.checks
    assert watcher.verdict == "disagreed"
    assert check.origin is not None
    assert (check.origin.stage, check.origin.tap) == ("gradients", "names")
    assert f"the {side} lacks" in check.origin.note


def test_no_names_at_all_disagree() -> None:
    assert line(lambda params, batch: (0.0, {}), steps=1).verdict == "disagreed"


def test_other_shapes_are_refused() -> None:
    def transposed(params: dict[str, np.ndarray], batch: Any) -> tuple[float, dict[str, np.ndarray]]:
        loss, grads = gradients_of_line(params, batch)
        return loss, grads | {"weight": grads["weight"].T}

    words = r"gradient of weight has shape \(12, 5\), the model's parameter \(5, 12\)"
    refused(line(transposed), words)


def test_a_truth_in_fp32_is_refused() -> None:
    def narrow(params: dict[str, np.ndarray], batch: Any) -> tuple[float, dict[str, np.ndarray]]:
        loss, grads = gradients_of_line(params, batch)
        return loss, {name: g.astype(np.float32) for name, g in grads.items()}

    refused(line(narrow), "not float64")


def test_a_twin_in_fp64_is_refused() -> None:
    def wide(params: dict[str, np.ndarray], batch: Any) -> tuple[float, dict[str, np.ndarray]]:
        return gradients_of_line({name: p.astype(np.float64) for name, p in params.items()}, batch)

    refused(line(wide), "computed in FP64")


def test_a_twin_above_bf16_is_refused() -> None:
    refused(train(autocast=True, precision="bf16"), "give the reference a twin")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_jax_function_that_narrows_is_refused(dtype: Any) -> None:
    def narrow(params: dict[str, jax.Array], batch: Any) -> jax.Array:
        return jax_loss({name: p.astype(dtype) for name, p in params.items()}, batch)

    refused(train(reference=reference(narrow)), f"narrows FP64 inside .convert_element_type to {dtype.__name__}")


def test_narrowing_inside_a_loop_is_found() -> None:
    def narrow(params: dict[str, jax.Array], batch: Any) -> jax.Array:
        x, _ = jax.lax.scan(lambda c, _: (c.astype(jnp.float32).astype(c.dtype), None), params["down.bias"], length=2)
        return jax_loss(params | {"down.bias": x}, batch)

    refused(train(reference=reference(narrow)), "narrows FP64")


def test_a_name_that_the_model_lacks_is_told() -> None:
    def other(params: dict[str, jax.Array], batch: Any) -> jax.Array:
        return jax_loss(params, batch) + params["head.weight"].sum()

    refused(train(reference=reference(other)), r"reads 'head\.weight'")


def test_a_parameter_that_the_reference_ignores_disagrees() -> None:
    def other(params: dict[str, jax.Array], batch: Any) -> jax.Array:
        return jax_loss(params | {"up.bias": jnp.zeros_like(params["up.bias"])}, batch)

    (check,) = train(reference=reference(other), data=batches(1)).checks
    assert "up.bias" in {f.tap for f in check.findings if not f.ok}


def nll_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).mT, batch[1], reduction="none")


@pytest.mark.parametrize("fault", [False, True], ids=["honest", "one value wrong"])
def test_outputs_are_compared(fault: bool) -> None:
    def with_nll(params: dict[str, jax.Array], batch: Any) -> Any:
        nll = jax_nll(params, batch)
        return nll.mean(), {"nll": nll}

    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = watch(model, optimizer, reference=reference(with_nll, has_aux=True))
    (batch,) = batches(1)
    nll = nll_of(model, batch)
    nll.mean().backward()
    shown = nll.detach().clone()
    shown[3, 4] += 1e-3 * fault
    with watcher.step(batch, nll.mean(), outputs={"nll": shown}):
        optimizer.step()
    broken = [(f.stage, f.tap) for f in watcher.checks[0].findings if not f.ok]
    assert broken == ([("loss", "nll")] if fault else [])


def test_without_a_checked_step_nothing_is_agreed() -> None:
    model = Tagger()
    watcher = watch(model, torch.optim.AdamW(model.parameters()), reference=FP32)
    assert watcher.verdict == "could_not"
    assert watcher.to_json()["verdict"] == "could_not"


def test_calibration_judges_nothing_and_then_everything() -> None:
    watcher = train(calibrate=3, data=batches(5))
    assert [check.verdict for check in watcher.checks] == ["could_not"] * 3 + ["agreed"] * 2
    assert watcher.verdict == "agreed"
    assert (
        "taken as honest by calibrate="
        in next(f for f in watcher.checks[-1].findings if f.stage == "gradients" and f.tap == "up.weight")
        .measures[0]
        .basis
    )
    assert train(calibrate=3, data=batches(3)).verdict == "could_not"


def test_calibrated_bounds_catch_a_fault_that_begins_later() -> None:
    def spoil(model: nn.Module, _: Any, number: int) -> None:
        if number >= 4:
            dict(model.named_parameters())["up.weight"].grad.mul_(1.0001)  # type: ignore[union-attr]

    watcher = train(calibrate=3, data=batches(5), spoil=spoil)
    assert [check.verdict for check in watcher.checks[3:]] == ["agreed", "disagreed"]


def test_a_missing_gradient_is_seen_while_calibrating() -> None:
    def spoil(model: nn.Module, *_: Any) -> None:
        dict(model.named_parameters())["up.weight"].grad = None

    assert train(calibrate=3, data=batches(1), spoil=spoil).verdict == "disagreed"


def test_bounds_can_be_given() -> None:
    watcher = train(bounds={"excess": 1.0001})
    assert watcher.verdict == "disagreed"
    assert "given by bounds=" in watcher.checks[0].origin.worst.basis  # type: ignore[union-attr]


def test_optimizers_without_a_rule_are_said_not_to_be_covered() -> None:
    watcher = train(optimizer=lambda p: torch.optim.RMSprop(p, lr=1e-3))
    assert watcher.verdict == "agreed"
    assert any(item.startswith("update: no rule") for item in watcher.checks[0].not_covered)


def test_frozen_parameters_are_said_not_to_be_covered() -> None:
    model = Tagger()
    model.embed.weight.requires_grad_(False)
    watcher = train(model, optimizer=lambda p: torch.optim.AdamW([x for x in p if x.requires_grad]))
    assert watcher.verdict == "agreed", watcher
    assert "gradients of 1 frozen parameters: embed.weight" in watcher.checks[0].not_covered


def test_two_optimizers_are_watched() -> None:
    torch.manual_seed(0)
    model = Tagger()
    parts = list(model.parameters())
    both = [torch.optim.SGD(parts[:1], lr=0.1), torch.optim.AdamW(parts[1:])]
    watcher = watch(model, both, reference=FP32, every=1)
    for batch in batches(2):
        loss = torch_loss(model, batch)
        loss.backward()
        with watcher.step(batch, loss):
            for optimizer in both:
                optimizer.step()
        model.zero_grad()
    assert watcher.verdict == "agreed", watcher
    assert len([f for f in watcher.checks[1].findings if f.stage == "update" and len(f.measures) >= 3]) == 8


def test_a_step_that_does_not_happen_disagrees() -> None:
    model = Tagger()
    watcher = watch(model, torch.optim.AdamW(model.parameters()), reference=FP32)
    (batch,) = batches(1)
    loss = torch_loss(model, batch)
    loss.backward()
    with watcher.step(batch, loss):
        pass
    assert watcher.checks[0].origin is not None
    assert watcher.checks[0].origin.stage == "step_count"


def test_an_error_in_the_block_is_not_hidden() -> None:
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = watch(model, optimizer, reference=FP32)
    (batch,) = batches(1)
    loss = torch_loss(model, batch)
    loss.backward()
    with pytest.raises(RuntimeError, match="mine"), watcher.step(batch, loss):
        raise RuntimeError("mine")
    assert watcher.checks == []
    assert not optimizer._optimizer_step_pre_hooks


def test_a_step_inside_a_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The inner block does not drop what the outer one has read."""
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = watch(model, optimizer, reference=FP32)
    (batch,) = batches(1)
    loss = torch_loss(model, batch)
    loss.backward()
    with watcher.step(batch, loss), watcher.step(batch, loss):
        optimizer.step()
    assert [check.verdict for check in watcher.checks] == ["agreed"]
    assert "one block is one optimizer step" in caplog.text


@pytest.mark.parametrize(
    ("loss", "why"),
    [(None, "gave one"), ("low", "is of type str"), (torch.zeros(2), "has shape"), ({"loss": 1.0}, "is of type dict")],
    ids=["none", "text", "two", "mapping"],
)
def test_a_loss_that_is_no_number_is_not_judged(loss: Any, why: str) -> None:
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = watch(model, optimizer, reference=FP32)
    (batch,) = batches(1)
    torch_loss(model, batch).backward()
    with watcher.step(batch, loss):
        optimizer.step()
    (check,) = watcher.checks
    assert check.verdict == "agreed"
    assert any(text.startswith("loss: not judged") and why in text for text in check.not_judged)
    assert "loss" not in {f.stage for f in check.findings}
    assert {"gradients", "update"} <= {f.stage for f in check.findings}


@pytest.mark.parametrize("judge", [None, "jax_loss"])
def test_what_is_no_reference_is_refused(judge: Any) -> None:
    model = Tagger()
    with pytest.raises(UserError, match="it is a function, or an object with `truth` and `twin`"):
        watch(model, torch.optim.AdamW(model.parameters()), reference=judge)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "every=0"),
        ({"precision": "fp8"}, "it is fp32, bf16 or fp64"),
        ({"rule": "lion"}, "known are adamw, adam, sgd"),
        ({"on_alarm": "mail"}, "it is 'log', 'stop'"),
        ({"bounds": {"exces": 2.0}}, "bounds has no 'exces'"),
        ({"bounds": {"excess": 2.0}, "calibrate": 3}, "both set the bounds"),
        ({"clip_norm": 0.0}, "it is positive"),
        ({"names": {"nope": "x"}}, "no parameter of the model"),
        ({"names": {"up.bias": "down.bias"}}, "maps both"),
        ({"declared": {"momentum": 0.9}}, "no hyperparameter"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(**settings)


class Both:
    """Any object with the two methods is a reference."""

    truth = staticmethod(lambda params, batch: Answer(*gradients_of_line(params, batch)))
    twin = truth


def test_an_object_with_truth_and_twin_is_a_reference() -> None:
    assert line(Both()).verdict == "agreed"


class CoarseTwin:
    """The weight's gradient is summed in bf16, as XLA does with a bias's under a JAX loss in bf16."""

    truth = staticmethod(lambda params, batch: Answer(*gradients_of_line(params, batch)))

    @staticmethod
    def twin(params: Any, batch: Any) -> Answer:
        loss, grads = gradients_of_line(params, batch)
        return Answer(loss, grads | {"weight": to_bfloat16(grads["weight"]).astype(np.float32)})


def test_a_twin_that_is_worse_than_the_candidate_is_called_that() -> None:
    watcher = line(CoarseTwin(), width=64)
    assert watcher.verdict == "agreed", watcher
    text = "the twin is worse than the candidate, which is nearer to the truth: weight"
    assert text in watcher.checks[0].not_covered
    (finding,) = [f for f in watcher.checks[0].findings if f.stage == "gradients" and f.tap == "weight"]
    assert finding.note == "the twin is worse than the candidate" and finding.measures[0].value < 1e-3
    assert not any("the twin is worse" in item for item in line(Both(), width=64).checks[0].not_covered)


class OneOtherKernel:
    """A twin with the candidate's bits in all gradients but one, where both err as much, or the candidate more."""

    own = True
    names = ("a", "b", "c", "d")

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.truth = {name: random.standard_normal((64, 64)) for name in self.names}
        noise = [2.0**-9 * random.standard_normal((64, 64)) for _ in range(2)]
        self.twin = {name: (t * (1 + noise[0])).astype(np.float32) for name, t in self.truth.items()}
        self.other = noise[1]

    def answers(self, params: Any, batch: Any, precision: Any, uncovered: Any) -> tuple[Answer, Answer]:
        """Answer with the truth and the twin."""
        return Answer(0.0, self.truth), Answer(0.0, self.twin)

    def candidate(self, size: float, longer: float) -> dict[str, torch.Tensor]:
        """Return the candidate's gradients; that of c has an error of its own, of a size in twin's errors."""
        other = longer * self.truth["c"] * (1 + size * self.other)
        return {n: torch.from_numpy(g.copy()) for n, g in {**self.twin, "c": other.astype(np.float32)}.items()}


@pytest.mark.parametrize(
    "size, longer, verdict",
    [(1.0, 1.0, "agreed"), (0.1, 1.0, "agreed"), (1.5, 1.0, "disagreed"), (1.0, 1.001, "disagreed")],
)
def test_a_gradient_of_another_kernel_is_held_in_size_and_length(size: float, longer: float, verdict: str) -> None:
    """Two honest errors of one size may point anywhere: the twin runs on the CPU, the candidate on a GPU."""
    reference = OneOtherKernel()
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(64, 64)) for name in reference.names})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = watch(model, optimizer, reference=reference, precision="bf16", on_alarm=lambda check: None)
    for name, gradient in reference.candidate(size, longer).items():
        model[name].grad = gradient
    with watcher.step({}, 0.0):
        optimizer.step()
    assert watcher.verdict == verdict, watcher
    assert [f.tap for f in watcher.checks[0].findings if not f.ok] == ([] if verdict == "agreed" else ["c"])


def test_gradients_of_bf16_weights_are_rounded_in_the_twin() -> None:
    """The twin's bits are the candidate's, where nothing differs but that rounding."""
    torch.manual_seed(0)
    model = nn.Linear(12, 5).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = watch(model, optimizer, reference=Both())
    batch = {"x": torch.randn(32, 12), "y": torch.randn(32, 5)}
    params = {name: p.detach().float().numpy() for name, p in model.named_parameters()}
    loss, grads = gradients_of_line(params, {key: x.numpy() for key, x in batch.items()})
    for name, p in model.named_parameters():
        p.grad = torch.from_numpy(grads[name]).bfloat16()
    with watcher.step(batch, loss):
        optimizer.step()
    assert watcher.verdict == "agreed", watcher
    found = {f.tap: f.unequal for f in watcher.checks[0].findings if f.stage == "gradients" and f.tap != "names"}
    assert found == {"weight": 0.0, "bias": 0.0}
