"""A run's history in run.json: which settings are in force at which step, and which branch that is.

A run is one line of steps. `resumes` lists where it was gone on from, in order of time; a resume from an earlier step
ends what was done after it, and so does a roll-back. A change by a resume to the settings that bear on what a step
computes holds for the steps after it, until the run is set back before it: a branch, begun on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.core.run.info import CHANGED
from lockstep.core.run.resume import is_elastic

# In an entry of `resumes`: number of the branch that it begins, what it changes (key → both values), the version of
# Lockstep, where what came after its step was taken to, and that the step after it is checked.
BRANCH, VALUES, VERSION, LEFT, CHECKED = "branch", "changed", "lockstep", "left", "first_step_checked"

Info = Mapping[str, Any]


def line(info: Info) -> list[Mapping[str, Any]]:
    """Return the resumes in the run's history, oldest first: without those that it was set back before."""
    kept: list[Mapping[str, Any]] = []
    for resume in info.get("resumes", []):
        kept = [*(earlier for earlier in kept if earlier["step"] <= resume["step"]), resume]
    return kept


def settings_at(info: Info, done: int | None = None) -> dict[str, str]:
    """Return the settings, as text, that were changed since the run was made and are in force after `done` steps.

    done: None for now. Settings that change no step's result (core/run/resume.py) have their last value.
    """
    found: dict[str, str] = {}
    for resume in info.get("resumes", []):
        found |= {key: text for key, text in resume.get(CHANGED, {}).items() if is_elastic(key)}
    for resume in line(info):
        if done is None or resume["step"] <= done:
            found |= {key: text for key, text in resume.get(CHANGED, {}).items() if not is_elastic(key)}
    return found


def values_of(info: Info, key: str, first: str) -> list[tuple[int, str]]:
    """Return (after which step, value) of an elastic setting, oldest first, as each step of the run was made with it.

    first: its value when the run was made. A later value does not hold for the steps before its resume, though
    `settings_at` has it everywhere.
    """
    found, value = [(0, first)], first
    for resume in info.get("resumes", []):
        value = resume.get(CHANGED, {}).get(key, value)
        found = [earlier for earlier in found if earlier[0] <= resume["step"]] + [(resume["step"], value)]
    return found


def branches_begun(info: Info) -> list[Mapping[str, Any]]:
    """Return the resumes of the run's line that began a branch on purpose."""
    return [resume for resume in line(info) if BRANCH in resume]


def branch_of(info: Info) -> int:
    """Return the number of the branch that the run is on, 1 if none was begun on purpose."""
    return next((int(resume[BRANCH]) for resume in reversed(branches_begun(info))), 1)


def before_left(info: Info, folder: str) -> Info:
    """Return run.json as it was before the resume that left `folder` (branches/001) behind."""
    resumes = info.get("resumes", [])
    ends = [number for number, resume in enumerate(resumes) if resume.get(LEFT) == folder]
    return {**info, "resumes": resumes[: ends[0]]} if ends else info


def in_words(resume: Mapping[str, Any]) -> str:
    """Return `branch 2 from step 500: optim.peak_lr 0.003 → 0.0001`."""
    changed = ", ".join(f"{key} {was} → {now}" for key, (was, now) in resume[VALUES].items())
    return f"branch {resume[BRANCH]} from step {resume['step']}: {changed}"
