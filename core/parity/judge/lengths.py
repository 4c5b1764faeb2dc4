"""Find an error of length that many tensors share, if the direction of each one is wrong too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lockstep.core.parity.measures.decode import decode_typical
from lockstep.core.parity.measures.verdict import Finding


def with_typical_lengths(findings: Sequence[Finding], known: Mapping[str, float]) -> list[Finding]:
    """Return the findings. If a stage's lengths are wrong by a count in the median, its first broken one gets a note.

    known: numbers of the step (`known_scalars`).
    A stage with a note about a single tensor's length does not change.
    """
    broken: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        if not one.ok:
            broken.setdefault((one.stage, one.phase), []).append(one)
    notes: dict[int, str] = {}
    for group in broken.values():
        if any("length" in one.note for one in group):
            continue
        ratios = [1 + m.value for one in group for m in one.measures if m.name == "gain_difference"]
        if said := decode_typical(ratios, known):
            notes[id(group[0])] = "; ".join(filter(None, (group[0].note, said)))
    return [replace(one, note=notes[id(one)]) if id(one) in notes else one for one in findings]
