"""Trials on a Ray cluster: Ray Tune places each where its GPUs and cores are free, and supervises it there.

Every machine sees the sweep's folder, the run's data and this folder under the same paths, and has Lockstep installed.
A trial whose machine was lost is placed again, and goes on from its checkpoint.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.ray_cluster import LOCAL, reach_ray
from lockstep.core.sweep.trial import POLL_SECONDS, RESTARTS, End, Job, supervise

# Folder of the sweep for what Ray Tune keeps of a round; nothing is read from it, and it goes when the round ends.
SCRATCH = ".ray"


@dataclass(frozen=True)
class OnRay:
    """An engine of Ray Tune. folder: of the sweep. gpus, cpus: of each trial. jobs: at a time; 0 = as many as fit.

    address: of a cluster, `auto` for the one of this machine; empty: a Ray of its own, which ends with the sweep.
    """

    folder: Path
    jobs: int = 0
    gpus: int = 0
    cpus: int = 1
    address: str = ""

    def run(self, jobs: Sequence[Job], ended: Callable[[Job, End], None], tick: Callable[[], None]) -> None:
        """Implement `Engine.run`. Raises UserError if Ray has no room for the trials."""
        import ray
        from ray import tune

        if not ray.is_initialized():
            self.start()
        made: list[Any] = []
        failed: list[BaseException] = []
        scratch = self.folder / SCRATCH

        def fit() -> None:
            try:
                found = tune.Tuner(
                    tune.with_resources(
                        tune.with_parameters(trainable, jobs=tuple(jobs)), {"cpu": self.cpus, "gpu": self.gpus}
                    ),
                    param_space={"number": tune.grid_search(list(range(len(jobs))))},
                    tune_config=tune.TuneConfig(max_concurrent_trials=self.jobs or None),
                    run_config=tune.RunConfig(
                        name="round",
                        storage_path=str(scratch.absolute()),
                        failure_config=tune.FailureConfig(max_failures=RESTARTS),
                        verbose=0,
                    ),
                ).fit()
                made.extend(found[i] for i in range(len(found)))
            except BaseException as error:
                failed.append(error)

        working = threading.Thread(target=fit, name="lockstep-ray", daemon=True)
        working.start()
        try:
            while working.is_alive():
                working.join(POLL_SECONDS)
                tick()
        except BaseException:
            # Ray ends the processes that it has started; the trials go on from their checkpoints another time.
            ray.shutdown()
            raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if failed:
            raise UserError(f"Ray gave up: {type(failed[0]).__name__}: {failed[0]}") from failed[0]
        for result in made:
            ended(jobs[result.config["number"]], _end(result))

    def start(self) -> None:
        """Implement `Engine.start`: connect to the Ray of `address`, or start one."""
        # Ray reports its use, and changes folders, unless these are set before it is loaded.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
        os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
        # After Ctrl-C nothing of Tune's starts another Ray.
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
        import ray

        reach_ray(ray, self.address or LOCAL)
        self._require_room(ray)

    def _require_room(self, ray: Any) -> None:
        found = ray.cluster_resources()
        for name, asked in (("GPU", self.gpus), ("CPU", self.cpus)):
            if asked > found.get(name, 0):
                raise UserError(
                    f"a trial needs {asked} {name}s, and the Ray cluster has {found.get(name, 0):g} in all: no "
                    "trial would ever begin"
                )


def trainable(config: dict[str, Any], jobs: Sequence[Job]) -> None:
    """Make one trial where Ray has placed it, and report how it ended."""
    from ray import tune

    tune.report({"end": asdict(supervise(jobs[config["number"]], lambda: False))})


def _end(result: Any) -> End:
    if result.error is not None or "end" not in (result.metrics or {}):
        return End(failure=f"Ray gave it up: {str(result.error).strip().splitlines()[-1][:200]}")
    return End(**result.metrics["end"])
