"""Find length errors shared by many tensors, each of which alone is too far from the truth's direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lockstep.core.parity.measures.decode import decode_typical
from lockstep.core.parity.measures.verdict import Finding


def with_typical_lengths(findings: Sequence[Finding], known: Mapping[str, float]) -> list[Finding]:
    """Return the findings; if one stage's are off by a count in the median, its first broken one has a note of it.

    known: numbers of the step (`known_scalars`). A stage in which a tensor's own length was named is left as it is.
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
