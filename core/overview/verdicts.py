"""Count the verdicts in parity.jsonl without making objects of its lines, which are long."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import leads_out
from lockstep.core.files.jsonl import raw_lines, value_of

AGREED, DISAGREED, COULD_NOT, SKIPPED = "agreed", "disagreed", "could_not", "skipped"
VERDICTS = (AGREED, DISAGREED, COULD_NOT, SKIPPED)
DAMAGED = "damaged"  # lines that are not what was written: nobody knows their verdicts
_HEAD = re.compile(rb'\{(?:"schema": (\d{1,9}), )?"step": \d{1,18}, "verdict": "(agreed|disagreed|could_not|skipped)"')
_SCHEMAS = (b"1", b"2", None)
# No text can hold these: in a JSON string a quotation mark has a backslash before it.
_BROKEN, _STAGE = b'"ok": false', b'"stages": [{'


def count_verdicts(path: Path) -> Counter[str]:
    """Return how many checks have each verdict, as `lockstep report` counts them; lines of other kinds: `could_not`.

    Raises UserError if the file leads out of its folder or cannot be read.
    """
    if leads_out(path, path.parent):
        raise UserError(f"{path.name} is a link that leads out of the run")
    return Counter(_verdict(raw) if intact else DAMAGED for raw, intact in raw_lines(path))


def overall(counts: Counter[str]) -> str:
    """Return the verdict over all checks: `not checked` if no check was ever due."""
    if counts[DISAGREED]:
        return DISAGREED
    if not counts.total():
        return "not checked"
    return AGREED if counts[AGREED] and not counts[COULD_NOT] and not counts[DAMAGED] else COULD_NOT


def _verdict(raw: bytes) -> str:
    head = _HEAD.match(raw)
    if head is None or head[1] not in _SCHEMAS:
        return _verdict_of_object(raw)
    verdict = head[2].decode()
    if _BROKEN in raw:
        return DISAGREED
    return COULD_NOT if verdict == AGREED and _STAGE not in raw else verdict


def _verdict_of_object(raw: bytes) -> str:
    """Return the verdict of a line whose keys stand in another order than `Check.to_json` writes them."""
    value = value_of(raw) or {}
    verdict, stages = value.get("verdict"), value.get("stages", [])
    if value.get("schema", 2) not in (1, 2) or verdict not in VERDICTS or not isinstance(stages, list):
        return COULD_NOT
    if any(not isinstance(stage, dict) or not stage.get("ok") for stage in stages):
        return DISAGREED
    return COULD_NOT if verdict == AGREED and not stages else str(verdict)
