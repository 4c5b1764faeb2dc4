"""The parity engine: compares any two sessions through the seam of core/backend.py and says where they part.

`watch` does the same inside somebody's own training loop (docs/watch.md).
"""

from lockstep.core.parity.watching import Disagreed, Watcher, watch

__all__ = ["Disagreed", "Watcher", "watch"]
