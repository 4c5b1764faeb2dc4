"""How `assert_honest` is called, what it refuses, what it leaves as it was, and what it prints."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import NotHonest, assert_honest
from lockstep.core.errors import UserError
from lockstep.core.parity.honest.function import Value
from lockstep.core.parity.honest.judged import assert_close_says
from lockstep.parity_tests.honest.kinds import gelu, layer_norm, rms_norm, swiglu, wide
from lockstep.parity_tests.honest.wrong import changed


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


MLX: Any = "mlx"
X, W = numbers(12, 16), numbers(16, seed=1)


def names(report: Any) -> list[str]:
    return [one.name for one in report.results]


@pytest.mark.parametrize("dtype", ["bf16", torch.bfloat16, jnp.bfloat16, "bfloat16", jnp.dtype("bfloat16")], ids=str)
def test_a_dtype_has_many_names(dtype: Any) -> None:
    assert "bf" in assert_honest(F.gelu, gelu, [X], dtype).dtype


def test_results_are_named_after_the_plain_functions_parameters() -> None:
    assert names(assert_honest(rms_norm, rms_norm, [X, W], "bf16")) == ["output", "grad x", "grad weight"]


def test_a_mapping_goes_by_keyword() -> None:
    report = assert_honest(rms_norm, rms_norm, {"weight": W, "x": X}, "bf16")
    assert names(report) == ["output", "grad weight", "grad x"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [(None, ["grad a", "grad b"]), (["b"], ["grad b"]), ([0], ["grad a"]), (False, []), (True, ["grad a", "grad b"])],
    ids=str,
)
def test_what_is_differentiated_can_be_said(asked: Any, found: list[str]) -> None:
    report = assert_honest(swiglu, swiglu, {"gate": X, "up": X}, "bf16", differentiate=_renamed(asked))
    assert [n.replace("gate", "a").replace("up", "b") for n in names(report)[1:]] == found
    assert bool(report.notes) == (not found)


def _renamed(asked: Any) -> Any:
    return ["up" if one == "b" else one for one in asked] if isinstance(asked, list) else asked


def test_an_input_may_keep_its_own_dtype() -> None:
    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return (wide(x) * weight).to(x.dtype)

    def mine(x: Tensor, weight: Tensor) -> Tensor:
        seen.append((x.dtype, weight.dtype))
        return plain(x, weight)

    seen: list[Any] = []
    assert_honest(mine, plain, [X, W], "bf16", keep=["weight"])
    assert set(seen) == {(torch.bfloat16, torch.float32)}
    with pytest.raises(NotHonest, match="grad weight"):
        assert_honest(lambda x, weight: plain(x, weight.to(x.dtype)), plain, [X, W], "bf16", keep=[1])
    with pytest.raises(UserError, match="keep= names weight, which is float64; inputs keep bfloat16"):
        assert_honest(mine, plain, [X, W.double()], "bf16", keep=["weight"])
    with pytest.raises(UserError, match="keep= names y, which is no floating input"):
        assert_honest(mine, plain, [X, W], "bf16", keep=["y"])


def test_inputs_that_require_a_gradient_are_those_that_get_one() -> None:
    report = assert_honest(swiglu, swiglu, [X.clone().requires_grad_(), X], "bf16")
    assert names(report) == ["output", "grad gate"]


def test_several_outputs_and_their_own_gradients() -> None:
    def both(x: Tensor) -> tuple[Tensor, None, Tensor]:
        return x.exp(), None, x.argmax(-1)

    report = assert_honest(both, both, [X], "fp32")
    assert names(report) == ["output 0", "output 2", "grad x"]
    assert report["output 2"].notes == ("compared exactly",)
    with pytest.raises(NotHonest, match="numbers differ from the truth"):
        assert_honest(lambda x: (x.exp(), x.argmin(-1)), lambda x: (x.exp(), x.argmax(-1)), [X], "fp32")


def test_a_gradient_of_the_users_own() -> None:
    seen = []

    def scaled(x: Tensor) -> Tensor:
        y = x * 3
        if y.requires_grad:
            y.register_hook(lambda g: seen.append(g.detach().double()))
        return y

    grad = torch.full_like(X, 2.0)
    assert_honest(scaled, lambda x: x * 3, [X], "bf16", grad=grad)
    assert torch.equal(seen[0], grad.double())
    with pytest.raises(UserError, match=r"grad= of output has shape \(16,\), the output \(12, 16\)"):
        assert_honest(F.gelu, gelu, [X], "bf16", grad=W)


def test_an_output_without_a_gradient() -> None:
    def both(x: Tensor) -> dict[str, Tensor]:
        return {"y": x.exp(), "rest": x.sin()}

    def rest_is_detached(x: Tensor) -> dict[str, Tensor]:
        return {"y": x.exp(), "rest": x.sin().detach()}

    assert assert_honest(rest_is_detached, both, [X], "fp32", grad={"y": torch.ones_like(X), "rest": None}).ok
    with pytest.raises(NotHonest, match="grad x"):
        assert_honest(rest_is_detached, both, [X], "fp32")


class Norm(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(W.clone()), nn.Parameter(W.clone() / 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


def test_modules_share_mines_parameters_and_get_their_gradients() -> None:
    mine = Norm(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b))
    plain = Norm(layer_norm)
    plain.weight.data.zero_()
    report = assert_honest(mine, plain, [X], "fp32")
    assert names(report) == ["output", "grad x", "grad weight", "grad bias"]
    assert mine.weight.grad is None and mine.weight.dtype == torch.float32
    with pytest.raises(UserError, match=r"have different parameters \(bias, weight\)"):
        assert_honest(mine, lambda x: layer_norm(x, W, W), [X], "fp32")
    with pytest.raises(NotHonest, match="grad bias"):
        assert_honest(Norm(lambda x, w, b: layer_norm(x, w, b.detach())), plain, [X], "fp32")


@pytest.mark.parametrize("mine_in", ["jax", "torch"])
def test_two_frameworks(mine_in: Any) -> None:
    @jax.jit
    def in_jax(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * weight

    mine, plain = (in_jax, rms_norm) if mine_in == "jax" else (rms_norm, in_jax)
    plain_in: Any = "torch" if mine_in == "jax" else "jax"
    report = assert_honest(mine, plain, [X.numpy(), W.numpy()], "fp32", mine_in=mine_in, plain_in=plain_in)
    assert names(report) == ["output", "grad x", "grad weight"]


def test_jax_alone_with_arrays_of_its_own() -> None:
    x = jnp.asarray(X.numpy(), jnp.bfloat16)

    @jax.jit
    def plain(x: jax.Array) -> jax.Array:
        return jax.nn.gelu(x, approximate=False)

    assert assert_honest(plain, plain, [x], jnp.bfloat16).ok
    with pytest.raises(NotHonest):
        assert_honest(jax.jit(partial(jax.nn.gelu, approximate=True)), plain, [x], "fp32")


def through_numpy(x: Tensor) -> Tensor:
    """Narrow where no operation of torch shows it."""
    return torch.from_numpy(x.detach().float().numpy().astype(np.float64)) * 1.0


NARROWING: dict[str, tuple[Callable[..., Any], str]] = {
    "float": (lambda x: x.float().exp().to(x.dtype), "to_copy to float32"),
    "bfloat16": (lambda x: x.bfloat16().exp(), "to_copy to bfloat16"),
    "only the backward": (lambda x: Narrow.apply(x), "to_copy to float32"),
    "numpy": (through_numpy, "float32|all numbers of output are FP32's"),
}


class Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad.float() * 2).to(grad.dtype)


@pytest.mark.parametrize("name", NARROWING)
def test_a_plain_function_that_narrows_is_refused(name: str) -> None:
    plain, words = NARROWING[name]
    options: dict[str, Any] = {"differentiate": False} if name == "numpy" else {}
    with pytest.raises(UserError, match=f"plain narrows FP64 inside .*({words})"):
        assert_honest(plain, plain, [X], "bf16", **options)


def test_numbers_that_were_narrowed_unseen_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unseen(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy().astype(np.float32).astype(np.float64)).to(x.dtype)

    with pytest.raises(UserError, match=r"all numbers of output are FP32's"):
        assert_honest(unseen, unseen, [X], "bf16", differentiate=False)


def test_a_jax_function_that_narrows_is_refused() -> None:
    def plain(x: jax.Array) -> jax.Array:
        return jnp.exp(x.astype(jnp.float32)).astype(x.dtype)

    with pytest.raises(UserError, match=r"plain narrows FP64 inside .convert_element_type to float32"):
        assert_honest(plain, plain, [X.numpy()], "bf16")


def test_a_plain_function_that_narrows_may_have_a_truth_beside_it() -> None:
    def plain(x: Tensor) -> Tensor:
        return x.float().exp().to(x.dtype)

    assert assert_honest(torch.exp, plain, [X], "bf16", truth=torch.exp).ok


def test_a_plain_function_that_refuses_fp64_is_told() -> None:
    def plain(x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("no doubles\nhere")
        return x.exp()

    with pytest.raises(UserError, match=r"plain does not run in FP64 \(TypeError: no doubles\): let it compute"):
        assert_honest(torch.exp, plain, [X], "bf16")


def test_a_plain_function_that_fails_fails_by_itself() -> None:
    def plain(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as found:
        assert_honest(torch.exp, plain, [X], "bf16")
    assert {str(entry.path) for entry in found.traceback.filter(found)} == {__file__}


def detached(x: Tensor) -> Tensor:
    return x.detach() * 2


def there_and_back(x: Tensor) -> Tensor:
    return (x + 1000) - 1000


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: assert_honest(gelu, gelu, [X], "fp8"), "it is bf16, fp16 or fp32"),
    "fp64": (lambda: assert_honest(gelu, gelu, [X], torch.float64), "it is bf16, fp16 or fp32"),
    "one tensor": (lambda: assert_honest(gelu, gelu, cast(Any, X), "bf16"), r"write \[x\] for one"),
    "a list in the inputs": (lambda: assert_honest(gelu, gelu, [[X, X]], "bf16"), "pass each separately"),
    "complex": (lambda: assert_honest(gelu, gelu, [X.to(torch.complex64)], "bf16"), "complex64"),
    "out of range": (lambda: assert_honest(gelu, gelu, [X * 1e6], "fp16"), "outside the range of float16"),
    "bounds": (lambda: assert_honest(gelu, gelu, [X], "bf16", bounds={"exces": 2.0}, reason="x"), "no 'exces'"),
    "no reason": (lambda: assert_honest(gelu, gelu, [X], "bf16", bounds={"excess": 2.0}), "comes with reason="),
    "one draw": (lambda: assert_honest(gelu, gelu, [X], "bf16", draws=1), "2 at least"),
    "a stranger": (lambda: assert_honest(gelu, gelu, [X], "bf16", differentiate=["y"]), "names y, which is no"),
    "a framework": (lambda: assert_honest(gelu, gelu, [X], "bf16", mine_in=MLX), "neither 'torch' nor 'jax'"),
    "no output": (lambda: assert_honest(lambda x: None, lambda x: (), [X], "bf16"), "nothing was compared|returned"),
    "no number": (lambda: assert_honest(lambda x: x > 0, lambda x: x > 0, [X], "bf16"), "nothing was compared"),
    "a float": (lambda: assert_honest(lambda x: 1.0, lambda x: 1.0, [X], "bf16"), "returned float"),
    "empty": (lambda: assert_honest(gelu, gelu, [X[:0]], "bf16"), "nothing was compared"),
    "NaN alone": (
        lambda: assert_honest(torch.log, torch.log, [-X.abs()], "bf16"), "nothing can be judged of output: plain's"
    ),
    "no gradient": (lambda: assert_honest(detached, detached, [X], "bf16"), "plain gives no gradient to x"),
    "no digit": (lambda: assert_honest(lambda x: x * 1, there_and_back, [X], "bf16"), "zeros would be as good"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_is_refused(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(UserError, match=words):
        call()


def test_other_names_shapes_and_kinds_of_outputs_are_wrong() -> None:
    for mine, words in {
        lambda x: (x, x): "plain has no such output",
        lambda x: x[1:]: r"shape \(11, 16\), plain's is \(12, 16\)",
        lambda x: x > 0: "bool, plain's is bfloat16",
    }.items():
        with pytest.raises(NotHonest, match=words):
            assert_honest(mine, lambda x: x * 1, [X], "bf16")


def test_what_a_wrong_result_is_is_said() -> None:
    for mine, words in {
        lambda x: x * 0: "all numbers are zero",
        lambda x: x * 0 + 1: "all numbers are equal",
        lambda x: X.to(x.dtype) + 0 * x: "the same bits on different inputs",
        lambda x: x * 2: "2",
        lambda x: torch.where(x == x.max(), math.nan, x): "1 numbers are not finite, and plain's are; the first at",
    }.items():
        with pytest.raises(NotHonest, match=words):
            assert_honest(mine, lambda x: x * 1, [X], "bf16", differentiate=False)
    with pytest.raises(NotHonest, match="it is grad up's, to"):
        assert_honest(changed(swiglu, lambda gate, up: (up, gate)), swiglu, [X, X.flip(0)], "fp32")


def test_infinities_of_a_mask_are_held_to_be_there() -> None:
    mask = X > 1

    def masked(x: Tensor) -> Tensor:
        return x.masked_fill(mask, -math.inf)

    report = assert_honest(masked, masked, [X], "bf16")
    assert "numbers not compared: plain's are not finite" in report["output"].notes[0]
    with pytest.raises(NotHonest, match="are infinite in plain, and not so in mine"):
        assert_honest(lambda x: x.masked_fill(mask, -1e4), masked, [X], "bf16")


def test_bounds_of_ones_own_are_printed_with_their_reason() -> None:
    def coarse(x: Tensor) -> Tensor:
        return gelu(x.bfloat16()).to(x.dtype)

    with pytest.raises(NotHonest):
        assert_honest(coarse, gelu, [X], "fp32", differentiate=False)
    loose = dict.fromkeys(("excess", "largest", "lengths", "row", "column", "gain"), 1e6)
    report = assert_honest(coarse, gelu, [X], "fp32", differentiate=False, bounds=loose, reason="it is meant to be")
    assert str(report).count("given by bounds=: it is meant to be") == 6


def test_strides_offset_and_expansion_reach_the_function() -> None:
    seen: list[tuple[Any, ...]] = []

    def look(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        seen.extend((t.stride(), t.storage_offset() % 64, tuple(t.shape)) for t in (x, y, z))
        return x * 1 + y * 1 + z * 1

    given = numbers(16, 12).T, numbers(12, 20)[:, 3:19], numbers(16).expand(12, 16)
    assert_honest(look, lambda x, y, z: x + y + z, given, "bf16")
    assert seen[:3] == [(t.stride(), t.storage_offset() % 64, tuple(t.shape)) for t in given]


def test_nothing_of_the_users_is_changed() -> None:
    module = Norm(layer_norm)
    x = X.clone().requires_grad_()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), x.detach().clone(), x._version  # type: ignore[index]
    settings = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    def state() -> tuple[Any, ...]:
        return torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    def random(x: Tensor) -> Tensor:
        torch.randn(3)
        assert torch.is_grad_enabled()
        return module(x)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        around = state()
        assert_honest(random, lambda x: module(x), [x], "fp32")
        with pytest.raises(ZeroDivisionError):
            assert_honest(lambda x: 1 / 0, lambda x: module(x), [x], "fp32")
        assert state() == around
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]
    assert torch.equal(x, before[2]) and x._version == before[3] and x.grad is None and module.weight.grad is None
    assert (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision) == settings  # type: ignore[attr-defined]


FRESH = """
import sys
import numpy as np
from lockstep import assert_honest
import jax, jax.numpy as jnp
plain = lambda x: jnp.exp(x)
assert assert_honest(plain, plain, [np.ones((3, 4), np.float32)], "bf16", draws=2).ok
assert jax.config.jax_enable_x64 is False and jax.config.jax_default_matmul_precision is None
assert jnp.zeros(3).dtype == jnp.float32
assert "torch" not in sys.modules
"""


def test_a_fresh_process_keeps_jaxs_settings_and_loads_no_torch() -> None:
    subprocess.run([sys.executable, "-c", FRESH], check=True)


def test_in_inference_mode() -> None:
    with torch.inference_mode():
        assert assert_honest(F.gelu, gelu, [numbers(3, 4)], "bf16").ok


def test_reports_fit_in_80_columns() -> None:
    with pytest.raises(NotHonest) as found:
        assert_honest(lambda x, weight: x * weight * 1.1, rms_norm, [X, W], "bf16")
    lines = str(found.value).splitlines()
    assert max(map(len, lines)) <= 80
    assert re.match(r"mine beside plain at bf16, 32 draws: NOT HONEST: output, grad x, grad weight", lines[0])
    assert isinstance(found.value, AssertionError)


def test_the_report_is_printed_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    report = assert_honest(gelu, gelu, [X], "bf16")
    assert capsys.readouterr().out == ""
    assert_honest(gelu, gelu, [X], "bf16", verbose=True)
    assert capsys.readouterr().out == f"{report}\n"


def test_the_same_call_gives_the_same_report() -> None:
    one, other = (str(assert_honest(F.gelu, gelu, [X], "bf16", seed=3)) for _ in range(2))
    assert one == other


def test_a_failure_shows_no_frame_of_lockstep() -> None:
    with pytest.raises(NotHonest) as found:
        assert_honest(lambda x: x * 2, gelu, [X], "bf16")
    shown = found.traceback.filter(found)
    assert [entry.path for entry in shown] == [found.traceback[0].path]
    assert len(found.traceback) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("off", [0.0, 1e-7, 1e-5, 1e-3, 0.05])
def test_assert_close_is_quoted_rightly(dtype: torch.dtype, off: float) -> None:
    mine, plain = (numbers(50) * (1 + off)).to(dtype), numbers(50).to(dtype)
    name = str(dtype).rpartition(".")[2]
    said, _ = assert_close_says(*(Value(x.double().numpy(), name) for x in (mine, plain)))
    try:
        torch.testing.assert_close(mine, plain)
        through = True
    except AssertionError:
        through = False
    assert said == through


def test_a_kernel_that_is_better_than_plain_passes() -> None:
    def better(x: Tensor) -> Tensor:
        return F.gelu(wide(x)).to(x.dtype)

    def much_worse(x: Tensor) -> Tensor:
        for _ in range(16):
            x = x * 1.05
        return gelu(x / 1.05**16)

    assert assert_honest(better, much_worse, [X], "bf16").ok
    with pytest.raises(NotHonest):
        assert_honest(much_worse, better, [X], "bf16")


@pytest.mark.parametrize(("dtype", "ulp"), [("bf16", 2.0**-8), ("fp32", 2.0**-24)])
def test_exact_zeros_beside_small_numbers_excuse_no_error(dtype: str, ulp: float) -> None:
    def plain(x: Tensor) -> Tensor:
        return F.pad(x / 2**20, (0, 64))

    def scattered(x: Tensor) -> Tensor:
        return plain(x * (1 + 32 * ulp * torch.sign(numbers(64, 64, seed=2))))

    square = numbers(64, 64)
    assert assert_honest(plain, plain, [square], dtype).ok
    with pytest.raises(NotHonest) as found:
        assert_honest(scattered, plain, [square], dtype)
    output = found.value.report.results[0]
    assert output.measured is not None
    assert {m.name for m in output.measured.measures if not m.ok} >= {"excess", "row"}
