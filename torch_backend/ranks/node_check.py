"""Report a rank's host, code and view of the file system, for a comparison over ranks."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.core.files.shared_folder import sees, sources_fingerprint

PACKAGES = ("core", "torch_backend")


@dataclass(frozen=True)
class NodeReport:
    """A rank's report for the comparison of nodes.

    sees: True if this rank finds a file that rank 0 has just created. code: SHA-256 of torch's version and the sources.
    """

    host: str
    sees: bool
    torch: str
    code: str


def node_report(file: Path) -> NodeReport:
    """Return the report of this rank; wait some seconds for the file to appear."""
    version = f"torch {torch.__version__}"
    return NodeReport(socket.gethostname(), sees(file), version, _fingerprint(version))


def _fingerprint(version: str) -> str:
    return sources_fingerprint(Path(__file__).resolve().parents[2], PACKAGES, version)
