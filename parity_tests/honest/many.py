"""Run by hand: honest pairs on many seeds. `python -m lockstep.parity_tests.honest.many 10` counts false alarms."""

from __future__ import annotations

import sys
from collections import Counter

from lockstep import NotHonest, assert_honest
from lockstep.parity_tests.honest.kinds import KINDS, inputs_of


def accused(seeds: range, names: list[str]) -> tuple[int, Counter[str], dict[str, dict[str, float]]]:
    """How many checks were made, how many of a kind were accused, and the largest share of a bound by kind."""
    made, wrong, strain = 0, Counter[str](), dict[str, dict[str, float]]()
    for name in names or list(KINDS):
        kind = KINDS[name]
        for dtype in kind.dtypes:
            for seed in seeds:
                made += 1
                try:
                    report = assert_honest(
                        kind.mine, kind.plain, inputs_of(kind, seed), dtype, seed=seed, **kind.options
                    )
                except NotHonest as found:
                    report = found.report
                    wrong[f"{name}, {dtype}"] += 1
                    print(report, flush=True)
                for one in report.results:
                    for m in one.measured.measures if one.measured else ():
                        most = strain.setdefault(f"{name}, {dtype}", {})
                        most[m.name] = max(most.get(m.name, 0.0), m.strain)
    return made, wrong, strain


if __name__ == "__main__":
    made, wrong, strain = accused(range(int(sys.argv[1])), sys.argv[2:])
    for name, most in strain.items():
        print(f"{name:45}", "  ".join(f"{key} {value:.2f}" for key, value in most.items()))
    print(f"{sum(wrong.values())} of {made} accused: {dict(wrong)}")
