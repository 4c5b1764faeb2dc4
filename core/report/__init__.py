"""`lockstep report`: one self-contained HTML file about a training run, its curves and its parity checks."""

from core.report.build import build_report, write_report

__all__ = ["build_report", "write_report"]
