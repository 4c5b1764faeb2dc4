"""Every run file that is shipped loads, and the 1.24B model is the published one."""

import pytest

from lockstep.core.config.file import load_config
from lockstep.core.model.budget import parameter_count
from lockstep.parity_tests.repository import REPO

CONFIGS = sorted((REPO / "configs").rglob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(REPO / "configs")))
def test_config_loads(path):
    load_config(path)


def test_the_1b_model_has_the_published_parameter_count():
    assert parameter_count(load_config(REPO / "configs" / "llama-1b.toml").model) == 1_241_581_568


def test_the_count_sees_one_kv_head_more():
    config = load_config(REPO / "configs" / "llama-1b.toml", {"model.kv_heads": "16"})
    assert parameter_count(config.model) != 1_241_581_568
