"""Judge the operations of a step, forward and backward, each from its own inputs: `watch(..., operations=True)`.

The user's loss runs again on the user's own module (live.py), and a dispatch mode intercepts each ATen operation below
autograd and autocast. A check judges some of them, in turn (core/parity/watch/turns.py). Each is judged as it runs, and
no tensors are kept. docs/guide/watch.md is the page for users.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lockstep.core.backend import Arrays
from lockstep.core.errors import UserError
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.parity.watch.coverage import Coverage
from lockstep.core.parity.watch.findings import exact, layer_in
from lockstep.core.parity.watch.formulas import formulas
from lockstep.core.parity.watch.limits import Precision
from lockstep.core.parity.watch.observed import Observed
from lockstep.core.parity.watch.snapshot import plain_name
from lockstep.core.parity.watch.turns import Turns
from lockstep.core.parity.watch.uncovered import Uncovered, reason
from lockstep.torch_backend.watch import live
from lockstep.torch_backend.watch.judge_operation import JudgeOperation
from lockstep.torch_backend.watch.places import Place, Places
from lockstep.torch_backend.watch.recompute import Call, NotJudged
from lockstep.torch_backend.watch.recorder import Casts, Recorder

log = logging.getLogger("lockstep.watch")

# Default number of operations per check.
COUNT = 200

ONCE_MORE = (
    "operations: the step ran once more, eagerly: what a compiler makes of it, and what went wrong once, is seen in "
    "gradients and loss alone"
)
IN_ONE_PIECE = "operations: a custom autograd.Function whose backward is wrong is right operation by operation"


@dataclass
class _Found:
    """The findings beyond a bound, and for each operation and phase the finding nearest to its bound.

    ways: counts by way of computing the truth. unjudged: counts by reason. judged: number of operations.
    """

    broken: list[Finding] = field(default_factory=list)
    nearest: dict[tuple[str, str], Finding] = field(default_factory=dict)
    ways: Counter[str] = field(default_factory=Counter)
    unjudged: Counter[str] = field(default_factory=Counter)
    judged: int = 0

    def take(self, finding: Finding) -> None:
        if not finding.ok:
            self.broken.append(finding)
            return
        key = finding.stage, finding.phase
        if key not in self.nearest or self.nearest[key].worst.strain < finding.worst.strain:
            self.nearest[key] = finding


class Operations:
    """A judge of `count` operations per check; later checks judge the others."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self._model, self._turns = model, Turns(count)
        self._judge = JudgeOperation(formulas())
        self._checks = 0

    def observe(self, loss: Callable[[], Any], params: Arrays, precision: Precision, uncovered: Uncovered) -> Observed:
        """Run the loss on the live module, and judge operations of it.

        loss: runs the loss. params: values of the module's parameters by name, to restore those that its forward
        changes. Raises UserError if no operation could be judged.
        """
        started, found = time.perf_counter(), _Found()
        if not self._turns.kinds:
            # A first pass lists the operations and judges none.
            self._turns.see(self._run(loss, params, precision, _Found(), set(), uncovered).kinds)
        recorder = self._run(loss, params, precision, found, self._turns.wanted(), uncovered)
        self._turns.see(recorder.kinds)
        uncovered.append(ONCE_MORE)
        uncovered.append(IN_ONE_PIECE)
        for why, count in sorted({**found.unjudged, **recorder.left_out}.items()):
            uncovered.append(f"operations: {count} not judged: {why}")
        coverage = Coverage(
            found.judged, len(self._turns.done), len(self._turns.kinds), dict(found.ways), time.perf_counter() - started
        )
        if not found.judged:
            raise UserError("none of the step's operations could be judged")
        return Observed([*found.broken, *found.nearest.values()], coverage)

    def _run(
        self, loss: Callable[[], Any], params: Arrays, precision: Precision, found: _Found, wanted: set[int],
        uncovered: Uncovered,
    ) -> Recorder:  # fmt: skip
        """Run forward and backward once, and judge the operations whose numbers are in `wanted`."""
        model, places = self._model, Places()

        def judge(place: int, call: Call, results: list[Any], where: Place, stage: str, note: str) -> None:
            kind, done = recorder.kinds[place], False
            try:
                way, judged = self._judge(call, results)
                for measures, size, unequal, number in judged:
                    words = [
                        where.line,
                        way,
                        f"result {number + 1} of {len(results)}" if len(results) > 1 else "",
                        note,
                    ]
                    found.take(
                        Finding(
                            stage=stage, tap=where.module, phase="backward" if where.backward else "forward",
                            layer=layer_in(where.module), scope="local", measures=measures, size=size,
                            unequal=unequal, note="; ".join(filter(None, words)),
                        )
                    )  # fmt: skip
                    done = True
                if done:
                    found.ways[way] += 1
                    found.judged += 1
            except NotJudged as error:
                found.unjudged[str(error)] += 1
            except Exception as error:
                log.debug("watch: %s", call.name, exc_info=True)
                found.unjudged[f"{call.name}: {reason(error)}"] += 1
            self._turns.had(place, kind, done)

        recorder = Recorder(places, wanted, judge, Casts.of(precision, model))
        try:
            with live.borrowed(model, precision), places.tracked(model, recorder.left), recorder:
                value = loss()
                value = value[0] if isinstance(value, tuple) else value
                if not isinstance(value, Tensor) or value.numel() != 1:
                    raise UserError("loss= returns a scalar tensor, or that and a mapping of outputs")
                live.gradients(value, model)
        finally:
            live.restore_parameters(model, params)
        if wanted:
            for finding in (*recorder.casts.findings(), self._unread(recorder)):
                found.take(finding)
        return recorder

    def _unread(self, recorder: Recorder) -> Finding:
        """Return a finding of parameters that no operation has read, of modules that ran."""
        names: list[str] = []
        size = 0
        for name, module in self._model.named_modules():
            if (plain_name(name) or type(module).__name__) not in recorder.places.ran:
                continue
            for own, p in module.named_parameters(recurse=False):
                size += 1
                if type(p) is nn.Parameter and p.numel() and p.untyped_storage().data_ptr() not in recorder.read:
                    names.append(f"{plain_name(name)}.{own}".removeprefix("."))
        basis = "a module that runs reads its parameters"
        note = f"read by no operation: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else ""
        return exact(
            "operation.parameters", names[0] if names else "all", len(names), max(size, 1), basis, note, "forward"
        )
