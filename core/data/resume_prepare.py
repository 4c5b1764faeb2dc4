"""Find out whether an earlier preparation in a folder can be continued, and which of its files are undamaged."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.core.data.catalog import RecordRules
from lockstep.core.data.index import INDEX_NAME, TOKENIZER_NAME, DatasetIndex
from lockstep.core.data.plan import PLAN_NAME, Plan, read_plan
from lockstep.core.data.shards import read_header
from lockstep.core.data.sources import SourceListing
from lockstep.core.errors import UserError

# Match only names like train_00000.bin, because the user's own files must not be removed.
_FIVE_DIGITS = "[0-9]" * 5


def plan_to_continue(folder: Path, identity: dict[str, Any], listing: SourceListing) -> Plan | None:
    """Return the plan in `folder` if these settings and this source would give the same; None if there is none.

    Raises:
        UserError: the folder was prepared with other settings or from another source, or has such files without a plan.
    """
    plan = read_plan(folder)
    if plan is None:
        if found := _ours(folder):
            raise UserError(f"{found[0]} exists already and has no {PLAN_NAME}; choose another folder or use --force")
        return None
    differences = [
        f"{name} is {there} there, {here} was asked for"
        for name in {**plan.identity, **identity}
        if (there := _setting(plan.identity, name)) != (here := _setting(identity, name))
    ]
    differences.extend(_source_differences(plan.listing, listing))
    if differences:
        listed = "; ".join(differences)
        raise UserError(
            f"{folder} was prepared with other settings or data: {listed}; choose another folder or use --force"
        )
    return plan if _tokenizer_is(folder, plan.tokenizer_sha256) else None


def damaged_shards(folder: Path, index: DatasetIndex) -> list[Path]:
    """Return the shards whose size or header differs from the index; their contents are not read."""
    return [
        folder / entry.file
        for split in index.splits.values()
        for entry in split.shards
        if _checksum_in_header(folder / entry.file) != entry.sha256
    ]


def remove_prepared(folder: Path) -> None:
    """Remove the files that a preparation writes, and no others.

    Raises:
        UserError: a file cannot be removed.
    """
    remove_files(_ours(folder))


def _setting(identity: dict[str, Any], name: str) -> Any:
    # An identity lacks rules for records that have the default value, as plans of older versions do.
    return identity.get(name, vars(RecordRules()).get(name))


def _source_differences(there: SourceListing, here: SourceListing) -> Iterator[str]:
    if there.description != here.description:
        yield f"the source is {there.description} there, {here.description} was asked for"
    elif changed := set(there.files).symmetric_difference(here.files):
        names = sorted({file.name for file in changed})
        yield f"the source has changed since: {len(names)} files differ, the first is {names[0]}"


def _tokenizer_is(folder: Path, fingerprint: str) -> bool:
    path = folder / TOKENIZER_NAME
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == fingerprint


def _checksum_in_header(path: Path) -> str | None:
    try:
        return read_header(path).sha256
    except UserError:
        return None


def _ours(folder: Path) -> list[Path]:
    """List the files of a preparation in the order of removal, the plan last: with it, the rest can be continued."""
    shards = itertools.chain.from_iterable(folder.glob(f"{split}_{_FIVE_DIGITS}*.bin") for split in ("train", "val"))
    named = [folder / name for name in (INDEX_NAME, TOKENIZER_NAME, PLAN_NAME)]
    return [path for path in [named[0], *sorted(shards), *named[1:]] if path.exists()]


def remove_files(paths: list[Path]) -> None:
    """Remove `paths` in this order; missing files are ignored.

    Raises:
        UserError: one cannot be removed.
    """
    try:
        for path in paths:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot remove {error.filename}: {error.strerror}") from error
