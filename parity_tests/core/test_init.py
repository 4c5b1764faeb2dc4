"""Initial weights: the same bits for the same seed and name, the scale of the paper, nothing else."""

import hashlib
import math

import numpy as np
import pytest

from lockstep.core.config.schema import ModelConfig
from lockstep.core.model.families import graph_of
from lockstep.core.model.graph import Normal
from lockstep.core.model.init import init_parameter, init_parameters
from lockstep.core.model.names import parameter_shapes

MODEL = ModelConfig(vocab_size=1024, hidden=128, layers=2, heads=4, kv_heads=2, ffn_hidden=256, qkv_bias=True)

TINY = ModelConfig(vocab_size=32, hidden=16, layers=1, heads=2, kv_heads=1, ffn_hidden=16)
PINNED = "b62b0ebee8f13d4bde384110baf157626d056ea070058fb647c58885f00f1599"


def digest(params) -> str:
    h = hashlib.sha256()
    for name, array in params.items():
        h.update(name.encode() + array.tobytes())
    return h.hexdigest()


def test_shapes_names_and_dtype():
    params = init_parameters(MODEL, 0)
    assert {name: a.shape for name, a in params.items()} == parameter_shapes(MODEL)
    assert {a.dtype for a in params.values()} == {np.dtype(np.float32)}


def test_bits_are_the_ones_that_earlier_runs_started_from():
    """If this fails, no earlier run can be replayed from its seed: that must be wanted, and said."""
    assert digest(init_parameters(TINY, 7)) == PINNED
    assert digest(init_parameters(TINY, 8)) != PINNED


def test_a_parameter_depends_on_its_seed_and_name_alone():
    params = init_parameters(MODEL, 3)
    name = "blocks.1.mlp.up_proj.weight"
    alone = init_parameter(graph_of(MODEL).parameters[name], 3)
    assert alone.tobytes() == params[name].tobytes()
    assert not np.array_equal(params[name], params["blocks.0.mlp.up_proj.weight"])
    assert not np.array_equal(params[name], init_parameter(graph_of(MODEL).parameters[name], 4))
    deeper = MODEL.model_copy(update={"vocab_size": 2048, "layers": 3})
    assert init_parameters(deeper, 3)[name].tobytes() == alone.tobytes()


@pytest.mark.parametrize(
    "name, std",
    [
        ("embed.weight", 0.02),
        ("blocks.0.attn.q_proj.weight", 128**-0.5),
        ("blocks.0.attn.o_proj.weight", 128**-0.5 / math.sqrt(2 * 2)),
        ("blocks.1.mlp.gate_proj.weight", 128**-0.5),
        ("blocks.1.mlp.down_proj.weight", 128**-0.5 / math.sqrt(2 * 2)),
    ],
)
def test_scale(name, std):
    parameter = graph_of(MODEL).parameters[name]
    values = init_parameter(parameter, 0).astype(np.float64)
    n = values.size
    assert parameter.initial == Normal(pytest.approx(std, rel=1e-12))
    # Five standard errors of the sample deviation and the sample mean.
    assert abs(values.std() / std - 1) < 5 / math.sqrt(2 * n)
    assert abs(values.mean()) < 5 * std / math.sqrt(n)
    assert abs(values.std() / (std * 1.05) - 1) > 5 / math.sqrt(2 * n), "a scale 5 % off would pass"


def test_untied_head_scales_with_its_inputs():
    model = MODEL.model_copy(update={"tied": False})
    assert graph_of(model).parameters["lm_head.weight"].initial == Normal(128**-0.5)


def test_gains_are_one_and_biases_zero():
    params = init_parameters(MODEL, 0)
    assert all((a == 1).all() for name, a in params.items() if name.endswith("norm.weight"))
    biases = [a for name, a in params.items() if name.endswith(".bias")]
    assert len(biases) == 6 and all((a == 0).all() for a in biases)
