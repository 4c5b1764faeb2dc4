"""States of the random number generators of Python, numpy and a session, as arrays.

Lockstep itself does not draw from them: batches, weights and samples are functions of seed and step. A candidate may,
and its resumed run must draw the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import numpy as np

from lockstep.core.backend import Arrays, NotSupported, Session
from lockstep.core.capabilities import HasRandomState, ask
from lockstep.core.errors import UserError

# Words of a Mersenne Twister's state (Matsumoto & Nishimura 1998).
_WORDS = 624
PYTHON, NUMPY, SESSION = "python", "numpy", "session/"


def random_state(session: Session) -> dict[str, np.ndarray]:
    """Return the states of all generators by name: `python`, `numpy`, and those of the session as `session/…`.

    Those of Python and NumPy are Mersenne Twisters: the key, the position, then the Gaussian kept back.
    """
    version, key, kept = random.getstate()
    assert version == 3
    of_numpy: Any = np.random.get_state(legacy=False)
    twister = of_numpy["state"]
    found: dict[str, Any] = {
        PYTHON: np.array(key, np.uint32),
        f"{PYTHON}/gauss": np.array([] if kept is None else [kept], np.float64),
        NUMPY: np.array([*twister["key"], twister["pos"]], np.uint32),
        f"{NUMPY}/gauss": np.array([of_numpy["gauss"]] if of_numpy["has_gauss"] else [], np.float64),
    }
    with suppress(NotSupported):
        found |= {SESSION + name: state for name, state in ask(session, HasRandomState).random_state().items()}
    return found


def restore_random_state(session: Session, states: Arrays) -> None:
    """Restore the states that `random_state` returned; a missing one is left unchanged.

    Raises UserError for a state of numpy with which numpy would read beyond its memory.
    """
    if PYTHON in states:
        kept = states[f"{PYTHON}/gauss"]
        random.setstate((3, tuple(int(n) for n in states[PYTHON]), float(kept[0]) if len(kept) else None))
    if NUMPY in states:
        kept, key = states[f"{NUMPY}/gauss"], states[NUMPY]
        # numpy accepts any position, and reads memory there.
        if key.shape != (_WORDS + 1,) or not 0 <= int(key[-1]) <= _WORDS:
            raise UserError(f"the random states hold {NUMPY!r}, which is not the state of a Mersenne Twister")
        np.random.set_state(("MT19937", key[:-1], int(key[-1]), len(kept), float(kept[0]) if len(kept) else 0.0))
    with suppress(NotSupported):
        ask(session, HasRandomState).set_random_state(session_states(states))


def session_states(states: Arrays) -> dict[str, np.ndarray]:
    """Return those of the session's own generators, by the names that it gave them."""
    return {key.removeprefix(SESSION): state for key, state in states.items() if key.startswith(SESSION)}
