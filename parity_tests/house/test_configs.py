"""Every run file that is shipped loads, and the 1.24B model is the published one."""

import pytest

from lockstep.core.config.file import load_config
from lockstep.core.model.budget import parameter_count
from lockstep.core.model.families import FAMILIES
from lockstep.parity_tests.repository import REPO

CONFIGS = sorted((REPO / "configs").rglob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(REPO / "configs")))
def test_config_loads(path):
    load_config(path)


def test_the_1b_model_has_the_published_parameter_count():
    assert parameter_count(load_config(REPO / "configs" / "llama-1b.toml").model) == 1_241_581_568


PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "mistral-7b": 7_241_732_096,
    "gemma-2-2b": 2_614_341_888,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_of_each_family_has_the_published_parameter_count(name):
    assert parameter_count(load_config(REPO / f"configs/families/{name}.toml").model) == PUBLISHED[name]


def test_every_family_has_a_run_file():
    shipped = {load_config(path).model.family for path in (REPO / "configs").rglob("*.toml")}
    assert shipped == FAMILIES.keys()


def test_the_count_sees_one_kv_head_more():
    config = load_config(REPO / "configs" / "llama-1b.toml", {"model.kv_heads": "16"})
    assert parameter_count(config.model) != 1_241_581_568
