"""The same model at another width: what depends on `model.hidden`, and the rule for its learning rate.

The rule is lr ∝ 1/width for the matrices (Yang et al. 2022, Tensor Programs V), which `optim.base_width` applies: at
the first width of a sweep the matrices' rate is the schedule's, at twice that width it is half of it. The dimension of
a head stays; heads, KV heads and the MLP grow with the width.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.core.config.file import COMMAND_LINE
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.sweep.space import Point, Varied

INVERSE, CONSTANT = "inverse", "constant"
RULES = (INVERSE, CONSTANT)
# Settings that a width decides.
DECIDED = ("model.hidden", "model.heads", "model.kv_heads", "model.ffn_hidden", "optim.base_width")


def read_widths(text: str) -> tuple[int, ...]:
    """Read `128,256`. Raises UserError unless they are two or more whole numbers above 0, each once."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not words:
        return ()
    begin = f"{COMMAND_LINE}: widths = {text}: "
    if not all(word.isascii() and word.isdecimal() and int(word[:12]) > 0 for word in words):
        raise UserError(f"{begin}widths are whole numbers above 0, as in --widths 128,256")
    widths = tuple(int(word[:12]) for word in words)
    if len(set(widths)) < 2 or len(set(widths)) < len(widths):
        raise UserError(f"{begin}a transfer needs two widths or more, each once")
    return widths


def settings_of(config: RunConfig, width: int, widths: Sequence[int], rule: str) -> Point:
    """Return the settings of a width, as the command line gives them.

    Raises UserError if a count of heads or the MLP's width would not be whole.
    """
    model = config.model
    scaled = {"model.hidden": width}
    for name in ("heads", "kv_heads", "ffn_hidden"):
        whole, rest = divmod(getattr(model, name) * width, model.hidden)
        if rest or not whole:
            raise UserError(
                f"{COMMAND_LINE}: widths: at width {width} model.{name} would be {getattr(model, name)} × {width} / "
                f"{model.hidden}, which is not whole; the head dimension stays {model.head_dim}"
            )
        scaled[f"model.{name}"] = whole
    base = {"optim.base_width": str(widths[0])} if rule == INVERSE else {}
    return {key: str(value) for key, value in scaled.items()} | base


def require_free(varied: Sequence[Varied]) -> None:
    """Raise UserError if a setting is varied that the widths decide."""
    for one in varied:
        if one.key in DECIDED:
            raise UserError(f"{COMMAND_LINE}: vary = {one.text}: --widths decides {one.key}; vary the one or the other")
