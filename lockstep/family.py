"""`from_hf`: the JAX reference of a model of transformers, for `watch`.

    from lockstep import from_hf, watch

    watcher = watch(model, optimizer, reference=from_hf(model), every=100)

docs/guide/watch.md is the page for users.
"""

from __future__ import annotations

from typing import Any

from lockstep.jax_backend.backend import JaxBackend
from lockstep.torch_backend.watch.family import Accumulate, FamilyReference


def from_hf(model: Any, *, accumulate: Accumulate | None = None) -> FamilyReference:
    """Build the reference that `watch` takes, for a causal language model of transformers of a family known here.

    Args:
        model: what trains, of one of the six families (docs/guide/families.md), wrapped as it is.
        accumulate: for steps that accumulate gradients: `step` gets the list of micro-batches, and the step's loss is
            the mean of theirs (`mean`), or one mean over the tokens of all (`tokens`).

    `watcher.step` gets what the model is given: a mapping with `input_ids` and `labels`, of which -100 counts nothing.
    Raises UserError for another architecture, and for settings that our model of the family cannot express.
    """
    return FamilyReference(model, JaxBackend(), accumulate)
