"""Compare the reference on four devices with the reference on one, in a process with four CPU devices.

`python -m lockstep.parity_tests.jax_backend.sharded PART…` with JAX_NUM_CPU_DEVICES=4 prints one JSON object, with one
key per part (see test_sharding.py).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import PartitionSpec

from lockstep.core.backend import Gradients
from lockstep.core.checkpoint.format import begin_checkpoint, load_checkpoint
from lockstep.core.config.schema import AttentionConfig, RunConfig
from lockstep.jax_backend import checkpoint
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.session import JaxSession
from lockstep.jax_backend.sharding import AXIS, Shards
from lockstep.parity_tests.cross.variants import VARIANTS, shaken_state
from lockstep.parity_tests.tiny import text_batch, tiny_config

DEVICES = 4
TRAIN = {"batch_size": 8, "micro_batch_size": 4, "sequence_length": 32}
STEPS = 4


def config_of(devices: int, policy: str = "fp64", variant: str = "tied", **optim: Any) -> RunConfig:
    """Return a tiny run of one block. DEVICES divides all its sizes except the vocabulary."""
    config = tiny_config(policy, train=TRAIN, vocab_size=258, **{**VARIANTS[variant], "layers": 1})
    parity = config.parity.model_copy(update={"reference_devices": devices})
    return config.model_copy(update={"parity": parity, "optim": config.optim.model_copy(update=optim)})


def session_of(config: RunConfig) -> JaxSession:
    """Open a session with weights in which no gain is 1 and no bias is 0."""
    session = JaxBackend().open(config)
    state = session.state()
    shaken = shaken_state(config.model).params
    session.load(type(state)(0, shaken, state.optimizer, state.scalars))
    return session


def apart(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """Return the largest of max|a − b| / max|b| over all pairs of arrays."""
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[n] - theirs[n]).max() / np.abs(theirs[n]).max()) for n in theirs)


def gradients(config: RunConfig) -> Gradients:
    """Return the gradients of eight sequences of text, in two micro-batches."""
    return session_of(config).gradients(text_batch(config))


def exact(variant: str) -> dict[str, float]:
    """Return, in FP64, the differences of NLL, loss and gradients between four devices and one."""
    ours, theirs = (gradients(config_of(n, variant=variant)) for n in (DEVICES, 1))
    return {
        "nll": float(np.abs(ours.nll - theirs.nll).max()),
        "loss": abs(ours.loss - theirs.loss),
        "grads": apart(dict(ours.grads), dict(theirs.grads)),
    }


def trained(**optim: Any) -> dict[str, float]:
    """Return, in FP64, the difference of the weights after STEPS steps, relative to their change on one device."""
    ours, theirs = (session_of(config_of(n, **optim)) for n in (DEVICES, 1))
    first = theirs.state().params
    for seed in range(STEPS):
        records = [s.step(text_batch(s.config, seed), norms=True) for s in (ours, theirs)]
    moved = {name: theirs.state().params[name] - first[name] for name in first}
    by_ours = {name: ours.state().params[name] - first[name] for name in first}
    return {"weights": apart(by_ours, moved), "loss": abs(records[0].loss - records[1].loss)}


def under(policy: str) -> dict[str, float]:
    """Return the distance of gradients between four devices and one, relative to the error of the policy itself."""
    truth = gradients(config_of(1))
    ours, theirs = (gradients(config_of(n, policy)) for n in (DEVICES, 1))
    distance = []
    for name, t in truth.grads.items():
        cost = np.linalg.norm(theirs.grads[name] - t)
        distance.append(float(np.linalg.norm(ours.grads[name].astype(np.float64) - theirs.grads[name]) / cost))
    return {"largest": max(distance), "median": float(np.median(distance))}


def memory() -> dict[str, Any]:
    """Return the bytes of weights, moments and gradients on each device, and their total without sharding."""
    session = session_of(config_of(DEVICES))
    session.step(text_batch(session.config))
    _, _, grads = session.accumulate(text_batch(session.config))
    held = dict.fromkeys(map(str, jax.devices()), 0)
    whole = 0
    for tree in (session.params, *session.moments.values(), grads):
        for array in tree.values():
            whole += array.nbytes
            for shard in array.addressable_shards:
                held[str(shard.device)] += shard.data.nbytes
    return {"held": list(held.values()), "whole": whole}


def places() -> dict[str, Any]:
    """Return the shardings of parameters of some shapes, and of batches of 8 and 2 sequences."""
    shards = Shards(DEVICES)
    shapes = [(64, 128), (128, 64), (64, 64), (258, 64), (3, 5), (6,), (8,)]
    rows = {n: str(shards.rows(np.zeros((n, 6))).sharding.spec) for n in (8, 2)}
    return {"parameters": [str(shards.of(shape).spec) for shape in shapes], "rows": rows}  # type: ignore[union-attr]


def one_device_program() -> bool:
    """Return whether a reference on one device leaves the other devices unused."""
    session = session_of(config_of(1))
    return all(len(p.sharding.device_set) == 1 for p in session.params.values())


def documents() -> float:
    """Return the difference of FP64 gradients between four devices and one, with a document mask."""
    found = []
    for devices in (DEVICES, 1):
        config = config_of(devices)
        attention = AttentionConfig(document_mask=True, reset_positions=True)
        found.append(gradients(config.model_copy(update={"attention": attention})))
    return apart(dict(found[0].grads), dict(found[1].grads))


def evaluated() -> float:
    """Return the largest difference of validation NLL and of sampling logits between four devices and one."""
    ours, theirs = (session_of(config_of(n)) for n in (DEVICES, 1))
    batch, tokens = text_batch(ours.config), np.arange(7, dtype=np.int32)
    nll = np.abs(ours.evaluate(batch)["nll"] - theirs.evaluate(batch)["nll"]).max()
    logits = np.abs(ours.next_token_logits(tokens) - theirs.next_token_logits(tokens)).max()
    return float(max(nll, logits))


def stored() -> bool:
    """Return whether a checkpoint written on four devices is equal bit for bit when read on one."""
    session = session_of(config_of(DEVICES))
    session.step(text_batch(session.config))
    state = session.state()
    with tempfile.TemporaryDirectory() as folder:
        path = begin_checkpoint(Path(folder) / "step_000001", 1, session.write, {}).commit()
        read, _ = load_checkpoint(path, partial(checkpoint.read_state, config=config_of(1)))
    arrays = [(read.params, state.params), *((read.optimizer[kind], state.optimizer[kind]) for kind in state.optimizer)]
    return all(np.array_equal(a[name], b[name]) for a, b in arrays for name in b)


# Faults: gradients that are lost, or counted several times


def not_summed(session: JaxSession) -> Callable[..., Any]:
    """Return a program without the sum over devices: it returns the first device's gradients."""
    own = jax.value_and_grad(partial(JaxSession.micro_loss, session), has_aux=True)
    rows, whole = PartitionSpec(AXIS), PartitionSpec()
    mesh = session.shards._mesh

    def program(params: Any, tokens: Any, targets: Any, weights: Any, total: Any, documents: Any) -> Any:
        alone = jax.shard_map(
            lambda *inputs: own(*inputs, None),
            mesh=mesh,
            in_specs=(whole, rows, rows, rows, whole),
            out_specs=((whole, rows), whole),
            check_vma=False,
        )
        with mock.patch.object(session.shards, "tap", lambda tap: tap):
            return alone(params, tokens, targets, weights, total)

    return jax.jit(program)


def counted_again(session: JaxSession) -> Callable[..., Any]:
    """Return a program whose gradients are DEVICES times too large, as from a second sum over devices."""
    own = session._micro_gradients

    def program(*inputs: Any) -> Any:
        found, grads = own(*inputs)
        return found, {name: g * DEVICES for name, g in grads.items()}

    return program


def one_twice(session: JaxSession) -> Callable[..., Any]:
    """Return a program in which the last device gets the sequences of the first."""
    own = session._micro_gradients

    def program(params: Any, tokens: Any, targets: Any, *more: Any) -> Any:
        part = len(tokens) // DEVICES
        order = np.r_[: len(tokens) - part, :part]
        return own(params, session.shards.rows(tokens[order]), session.shards.rows(targets[order]), *more)

    return program


FAULTS = {"not summed": not_summed, "counted again": counted_again, "one twice": one_twice}


def faulty(fault: Callable[[JaxSession], Any]) -> float:
    """Return the difference of gradients between four devices with this fault and one."""
    session = session_of(config_of(DEVICES))
    session._micro_gradients = fault(session)
    found = session.gradients(text_batch(session.config))
    return apart(dict(found.grads), dict(gradients(config_of(1)).grads))


PARTS: dict[str, Callable[[], Any]] = {
    **{f"exact {variant}": partial(exact, variant) for variant in ("tied", "untied-biased")},
    **{f"trained {name}": partial(trained, name=name) for name in ("adamw", "muon")},
    **{f"under {policy}": partial(under, policy) for policy in ("fp32", "bf16", "fp8_tensorwise")},
    "memory": memory,
    "places": places,
    "one": one_device_program,
    "documents": documents,
    "evaluated": evaluated,
    "stored": stored,
    **{f"fault {name}": partial(faulty, fault) for name, fault in FAULTS.items()},
}


def main(parts: list[str]) -> None:
    """Print the results of the parts as JSON."""
    assert len(jax.devices()) == DEVICES, jax.devices()
    json.dump({part: PARTS[part]() for part in parts}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
