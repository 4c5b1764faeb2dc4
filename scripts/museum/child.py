"""Run one side of one exhibit in its environment: `python -m lockstep.scripts.museum.child LOOP SETTINGS FILE`.

The process starts with the packages of that side first on its path. Its findings go into FILE as JSON.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

# Names in the lines that a loop needs for Lockstep.
OURS = re.compile(r"\b(watch(_\w+)?|watcher|assert_honest|NotHonest)\b")


def lines_of_lockstep(source: str) -> int:
    """Count the lines of a loop that use Lockstep's names, import included and return excluded."""
    lines = (line.partition("#")[0].strip() for line in source.splitlines())
    return sum(bool(OURS.search(line)) for line in lines if not line.startswith(("return ", '"""', "from __future__")))


def run(loop: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Import a loop's module, run it, and return what was seen."""
    module = importlib.import_module(loop)
    started = time.perf_counter()
    seen = module.loop(**settings).to_json()
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    return seen | {"seconds": time.perf_counter() - started, "lines": lines_of_lockstep(source)}


def main() -> None:
    """Write what the loop found, with the versions of the packages that were named."""
    loop, given, packages, file = sys.argv[1:]
    import torch

    torch.set_num_threads(1)
    found = run(loop, json.loads(given))
    versions = {name: metadata.version(name) for name in json.loads(packages)}
    Path(file).write_text(json.dumps(found | {"versions": versions}), encoding="utf-8")


if __name__ == "__main__":
    main()
