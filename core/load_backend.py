"""Backends by name: `module:NAME` or `FILE.py:NAME`, NAME a callable without arguments that returns a `Backend`.

The name is an order to run that code. It comes from a command line, and never from a file (scripts/shared/backends.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from lockstep.core.backend import Backend
from lockstep.core.collector import importing
from lockstep.core.errors import UserError
from lockstep.core.files.paths import path_problem


def load_backend(spec: str) -> Backend:
    """Import and call NAME. Raises UserError that names the part of `spec` that is missing or no backend."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise UserError(f"{spec!r} names no backend: write FILE.py:NAME or module:NAME")
    if not place.endswith(".py") and not all(map(str.isidentifier, place.split("."))):
        raise UserError(f"{spec!r} names no backend: {place!r} is no module's name, and no FILE.py")
    try:
        with importing():
            module = module_from_file(place) if place.endswith(".py") else _from_module(place)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # foreign code: it must not end the check as if all were well
        if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
            raise UserError(f"{spec}: there is no module {error.name}") from error
        raise UserError(f"{spec}: importing {place} failed: {type(error).__name__}: {error}") from error
    factory = getattr(module, name, None)
    if factory is None:
        offered = sorted(
            n for n in vars(module) if n.endswith("Backend") or callable(getattr(getattr(module, n), "open", None))
        )
        raise UserError(f"{spec}: {place} has no {name}" + (f"; it has {', '.join(offered)}" if offered else ""))
    try:
        backend = factory()
    except (Exception, SystemExit) as error:
        raise UserError(f"{spec}: calling {name}() failed: {type(error).__name__}: {error}") from error
    if not callable(getattr(backend, "open", None)):
        raise UserError(f"{spec}: {name}() returned {type(backend).__name__}, which has no open(config): not a Backend")
    return backend


def _from_module(name: str) -> object:
    """Import a module that is installed, or one that lies in the working directory.

    For an installed one that folder is not on the path: modules that are not installed would be found in it, whoever
    wrote them.
    """
    here = str(Path.cwd())
    if importlib.util.find_spec(name.partition(".")[0]) is None and here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)


def module_from_file(file: str) -> object:
    """Import the file as a module. Its folder comes first while it is imported, and stays last for later imports.

    Raises UserError if there is no such file, and whatever importing it raises.
    """
    path = Path(file)
    if path_problem(file) or not path.is_file():
        raise UserError(f"no such file: {path}")
    found = importlib.util.spec_from_file_location(f"lockstep_candidate_{path.stem}", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        found.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
    return module
