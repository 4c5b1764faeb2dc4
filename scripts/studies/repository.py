"""Locate the repository: studies read its run files and write its pages."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
