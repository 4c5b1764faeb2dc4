"""FP8 and FP16 in JAX are torchao's and torch's, bit for bit; what is asked for is in force, and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from lockstep.core.config.schema import PrecisionConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.reference.self_check import sound_reference
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.kernels import float8 as in_jax
from lockstep.jax_backend.kernels.formats import BF16, E4M3, E5M2, FP16, TF32, rounded
from lockstep.jax_backend.precision import POLICIES
from lockstep.parity_tests import faults
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.kernels.float8 import float8
from lockstep.torch_backend.model import Linear

RECIPES = ("tensorwise", "rowwise")


@pytest.mark.parametrize(
    "form, dtype",
    [(BF16, torch.bfloat16), (FP16, torch.float16), (E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)],
)
def test_rounding_is_torchs(form, dtype):
    """All magnitudes, halfway cases and subnormal numbers among them; FP8 within its range, where casts saturate."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 16, generator=generator) * torch.exp2(torch.randint(-30, 20, (1 << 16,), generator=generator))
    if dtype.itemsize == 2:
        exact = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
    else:
        exact = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    x = torch.cat((x, exact, (exact[1:] + exact[:-1]) / 2))
    x = x.clamp(-form.largest, form.largest) if dtype.itemsize == 1 else x
    x = x[(x == 0) | (x.abs() > 1e-37)]  # XLA flushes what is subnormal in FP32 itself
    found = np.asarray(jax.jit(lambda a: rounded(a, form))(jnp.asarray(x.numpy())))
    np.testing.assert_array_equal(found, x.to(dtype).float().numpy())


def test_tf32_keeps_ten_bits():
    x = jnp.asarray([1 + 2.0**-11, 1 + 2.0**-10, 1 + 3 * 2.0**-11, 2.0**-130], jnp.float32)
    assert rounded(x, TF32)[:3].tolist() == [1.0, 1 + 2.0**-10, 1 + 2.0**-9]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("scale", [1.0, 7.0, 1e-20, 3e4])
def test_a_layer_is_torchaos_bit_for_bit(recipe, scale):
    """Output and both gradients; magnitudes of 7 · 2ⁿ make scales that are powers of two to begin with."""
    generator = torch.Generator().manual_seed(1)
    layer = float8(PrecisionConfig(policy=f"fp8_{recipe}"), torch.device("cpu"))
    assert layer is not None
    x = torch.randn(3, 16, 48, generator=generator) * scale
    x[0, 0, 0], x[1] = 7.0 * 2**3 * scale, 0.0
    weight, grad = torch.randn(32, 48, generator=generator) * 0.02, torch.randn(3, 16, 32, generator=generator)
    x.requires_grad_(), weight.requires_grad_()
    out = layer.product(x.bfloat16(), weight).float()
    ours = (out, *torch.autograd.grad(out, [x, weight], grad))

    @jax.jit
    def theirs(x, weight, grad):
        out, back = jax.vjp(lambda a, b: in_jax.product(a, b, POLICIES[f"fp8_{recipe}"], recipe), x, weight)
        return out, *back(grad)

    for one, other in zip(ours, theirs(*(t.detach().numpy() for t in (x, weight, grad))), strict=True):
        # Products of FP8 numbers add up exactly or nearly so in FP32: a last bit of bf16 may fall otherwise.
        found, due = one.detach().numpy(), np.asarray(other)
        assert np.all(np.abs(found - due) <= np.abs(due) * 2.0**-7 + np.abs(due).max() * 1e-6)
        assert np.mean(found != due) < 0.01


@pytest.mark.parametrize("recipe", RECIPES)
def test_our_layer_is_the_one_that_torchao_converts(recipe):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    precision = PrecisionConfig(policy=f"fp8_{recipe}")
    ours, made = float8(precision, torch.device("cpu")), Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(made, "emulate", True)
    theirs = convert_to_float8_training(nn.Linear(32, 48, bias=False), config=made)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert ours is not None
    assert torch.equal(ours.product(x, theirs.weight), theirs(x))


def test_the_filter_decides_layer_by_layer():
    config = tiny_config("fp8_tensorwise")
    some = config.precision.model_copy(update={"fp8_layers": "blocks.1.mlp.*, *.q_proj"})
    model = TorchBackend().open_rank(config.model_copy(update={"precision": some})).model
    narrow = {name for name, module in model.named_modules() if isinstance(module, Linear) and module.float8}
    assert narrow == {"blocks.0.attn.q_proj", "blocks.1.attn.q_proj"} | {
        f"blocks.1.mlp.{name}_proj" for name in ("gate", "up", "down")
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_follows_its_twin(recipe):
    """The negative twin beside it: bf16 is as far from the FP8 twin as FP8's own error."""
    config = tiny_config(f"fp8_{recipe}", layers=1)
    batch = uneven_weights(text_batch(config), 1)
    twin, truth = (
        JaxBackend().open(config.model_copy(update={"precision": PrecisionConfig(policy=policy)})).gradients(batch)
        for policy in (f"fp8_{recipe}", "fp64")
    )
    ours, other = (
        TorchBackend().open(config).gradients(batch),
        TorchBackend().open(tiny_config(layers=1)).gradients(batch),
    )

    def distance(candidate, name):
        return np.linalg.norm(candidate.grads[name] - twin.grads[name]) / np.linalg.norm(
            twin.grads[name] - truth.grads[name]
        )

    name = "blocks.0.mlp.down_proj.weight"
    assert distance(ours, name) < 0.5 < 0.8 < distance(other, name)


FAULTS = [
    fault for fault in faults.FAULTS if "fp8_tensorwise/eager" in fault.recipes and "bf16/eager" not in fault.recipes
]


@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda fault: fault.name if fault else "honest")
def test_a_fault_is_named_and_an_honest_trainer_is_not(fault):
    config = tiny_config("fp8_tensorwise", train={"sequence_length": 32})
    backend = fault.make() if fault else TorchBackend()
    evidence = gather(backend.open(config), config, uneven_weights(text_batch(config), 1))
    origin = judge(evidence, sound_reference(JaxBackend(), config)).origin
    assert (origin and (origin.stage, origin.layer)) == (fault and (fault.stage, fault.layer))


def test_a_gpu_without_fp8_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(UserError, match="A100 has no FP8 tensor cores"):
        float8(PrecisionConfig(policy="fp8_rowwise"), torch.device("cuda"))
