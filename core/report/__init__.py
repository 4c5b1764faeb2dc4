"""`lockstep report`: one self-contained HTML file about a training run or several, their curves and parity checks."""

from lockstep.core.report.build import build_report, write_report
from lockstep.core.report.compare import build_comparison, write_comparison

__all__ = ["build_comparison", "build_report", "write_comparison", "write_report"]
