"""Both backends start from the same names, shapes and bits, which are those of core/model/init.py."""

from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

from lockstep.core.model.init import init_parameters
from lockstep.core.model.names import parameter_shapes
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.cross.variants import VARIANTS, fresh_state, same_bits
from lockstep.parity_tests.tiny import tiny_config
from lockstep.torch_backend.backend import TorchBackend


@pytest.fixture(scope="module", params=VARIANTS)
def opened(request):
    config = tiny_config("bf16", **VARIANTS[request.param])
    return config, TorchBackend().open(config), JaxBackend().open(config)


def test_both_start_from_the_bits_of_core_init(opened):
    config, torch_session, jax_session = opened
    initial = fresh_state(init_parameters(config.model, config.seed))
    assert set(initial.params) == set(parameter_shapes(config.model))
    assert same_bits(torch_session.state(), initial)
    assert same_bits(jax_session.state(), initial)


def test_nnx_paths_are_torch_s_state_dict_keys(opened):
    config, torch_session, jax_session = opened
    paths = nnx.to_flat_state(nnx.state(jax_session.model(jax_session.params)))
    in_jax = {".".join(map(str, path)): tuple(leaf.shape) for path, leaf in paths}
    in_torch = {name: tuple(p.shape) for name, p in torch_session.model.state_dict().items()}
    assert in_jax == in_torch == parameter_shapes(config.model)


def test_each_parameter_stands_where_its_name_says():
    """Weights that are all different numbers come back from the module under the name they were given."""
    config = tiny_config("fp64", **VARIANTS["untied-biased"])
    session = JaxBackend().open(config)
    numbered = {n: np.full(shape, float(i)) for i, (n, shape) in enumerate(parameter_shapes(config.model).items())}
    session.load(fresh_state(numbered))
    model = session.model(session.params)
    blocks = {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
    for name, value in numbered.items():
        at, path = model, name.split(".")
        if path[0] == "blocks":
            at, path = blocks[".".join(path[:2])], path[2:]
        for attribute in path:
            at = getattr(at, attribute)
        assert float(at[...].ravel()[0]) == value.ravel()[0]


def test_another_seed_gives_other_bits():
    config = tiny_config()
    other = config.model_copy(update={"seed": 1})
    assert not same_bits(TorchBackend().open(config).state(), TorchBackend().open(other).state())


def test_one_bit_is_seen():
    state = TorchBackend().open(tiny_config()).state()
    name = "blocks.1.mlp.up_proj.weight"
    flipped = np.array(state.params[name])
    flipped.view(np.uint32)[3, 5] ^= 1
    assert same_bits(state, replace(state, params=dict(state.params)))
    assert not same_bits(state, replace(state, params={**state.params, name: flipped}))
