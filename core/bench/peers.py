"""`lockstep bench peers`: contenders, what each row sets, whether they do the same work, and by how much they differ.

The JSON:
```
{"schema": 2, "suite": "peers", "device": {…}, "versions": {…}, "absent": {NAME: why it did not take part}, "models": [
  {"config": {…}, "parameters": …, "rows": [
    {"row": NAME, "status": "measured" | "not_the_same_work" | "failed", "reason": … or null,
     "contenders": {NAME: {"seconds": [every counted step], "median": …, "tokens_per_second": …,
                           "losses": [first steps], "memory": peak bytes or null}},
     "ratios": {PEER: {OURS: {"median": …, "low": …, "high": …}}}}]}]}
```
A ratio is Lockstep's tokens a second / the peer's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.core.bench.bars import Bar, Panel, picture
from lockstep.core.bench.intervals import ratio
from lockstep.core.components.optimizers import ADAMW
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError

SCHEMA, SUITE = 2, "peers"
# Steps whose losses must agree.
COMPARED = 8


@dataclass(frozen=True)
class Contender:
    """A contender of the race.

    program: module:function. settings: over the row's. only: the rows it is for, on the CPU. needs: packages to import.
    extra: what installs them.
    """

    name: str
    about: str
    program: str
    ours: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    extra: str = ""


# By name: scripts/shared/bench_peer.py imports each contender in a process of its own.
LOCKSTEP = "lockstep.torch_backend.tools.peers.lockstep:run"
CONTENDERS = (
    Contender("lockstep", "Lockstep", LOCKSTEP, ours=True),
    Contender(
        "lockstep-blas",
        "Lockstep, precision.cpu_products = blas",
        LOCKSTEP,
        ours=True,
        settings={"precision.cpu_products": "blas"},
        only=("fp32-eager", "fp32-compiled"),
    ),
    Contender("nanogpt", "a loop in the manner of nanoGPT", "lockstep.torch_backend.tools.peers.nanogpt:run"),
    Contender(
        "hugging-face",
        "Hugging Face Trainer, LlamaForCausalLM",
        "lockstep.torch_backend.tools.peers.hugging_face:run",
        needs=("transformers", "accelerate"),
        extra="peers",
    ),
    Contender(
        "torchtitan",
        "torchtitan, Llama 3",
        "lockstep.torch_backend.tools.peers.torchtitan:run",
        needs=("torchtitan", "triton"),
        extra="torchtitan",
    ),
)
EAGER, COMPILED = {"compile.enabled": "false"}, {"compile.enabled": "true"}
ROWS: dict[str, dict[str, str]] = {
    "fp32-eager": {"precision.policy": "fp32", **EAGER},
    "bf16-eager": {"precision.policy": "bf16", **EAGER},
    "fp32-compiled": {"precision.policy": "fp32", **COMPILED},
    "bf16-compiled": {"precision.policy": "bf16", **COMPILED},
}
# Relative half unit in the last place of the format to which a row rounds.
ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-9}


def taking_part(row: str, device: str, contenders: Sequence[Contender] = CONTENDERS) -> list[Contender]:
    """Return the contenders of a row: the library of FP32 products is a choice on the CPU alone."""
    return [one for one in contenders if not one.only or (row in one.only and device == "cpu")]


def check_comparable(config: RunConfig) -> None:
    """Raise UserError for a run whose step the peers do not support."""
    unknown = {
        f"optim.name = {config.optim.name!r}": config.optim.chosen.rules != (ADAMW,),
        f"loss.z_loss = {config.loss.z_loss:g}": config.loss.z_loss != 0,
        "attention.document_mask": config.attention.document_mask,
        "attention.reset_positions": config.attention.reset_positions,
        f"train.ranks = {config.train.ranks}": config.train.ranks != 1,
        "model.qkv_bias without model.o_bias (Hugging Face has both or none)": config.model.qkv_bias
        != config.model.o_bias,
    }
    if found := [what for what, is_there in unknown.items() if is_there]:
        raise UserError(f"bench peers: the peers do not support {', '.join(found)}; name a run without")


def bound(one: RunConfig, other: RunConfig, step: int) -> float:
    """Return how much the losses of two honest contenders may differ after `step` steps, relative.

    Each side has a rounding error of the loss. Under FP32 that of its longest sum of n terms, √n · 2⁻²⁴, which every
    token may share. Under bf16 a chain of 12 roundings a block, √(12·layers) · 2⁻⁹ a token, each token with its own:
    the mean over a step's tokens has 1/√tokens of it. Every update may add as much.
    """
    return step * (_rounding(one) + _rounding(other))


def _rounding(config: RunConfig) -> float:
    model, train = config.model, config.train
    roundoff = ROUNDOFF[config.precision.policy]
    if config.precision.chosen.in_fp32:
        terms = float(max(model.vocab_size, model.ffn_hidden, train.micro_batch_size * train.sequence_length))
    else:
        terms = 12.0 * model.layers / (train.batch_size * train.sequence_length)
    return roundoff * math.sqrt(terms)


def disagreement(configs: Mapping[str, RunConfig], losses: Mapping[str, Sequence[float]]) -> str | None:
    """Describe the first step at which a contender's loss is not that of the first contender; None if all agree.

    configs: the settings of each contender. With no losses to compare, that is the disagreement.
    """
    names = list(losses)
    steps = min((len(found) for found in losses.values()), default=0)
    if len(names) < 2 or not steps:
        return "no losses to compare"
    for index in range(min(steps, COMPARED)):
        expected = losses[names[0]][index]
        for name in names[1:]:
            allowed = bound(configs[names[0]], configs[name], index + 1)
            found, limit = losses[name][index], allowed * abs(expected)
            if not abs(found - expected) <= limit:
                return (
                    f"step {index + 1}: the loss of {name} is {found:.7g}, that of {names[0]} {expected:.7g}; "
                    f"rounding explains {limit:.1e}"
                )
    return None


def result(
    row: str,
    config: RunConfig,
    contenders: Sequence[Contender],
    taken: Mapping[str, Sequence[float]],
    losses: Mapping[str, Sequence[float]],
    memory: Mapping[str, int | None],
) -> dict[str, Any]:
    """Return one row's result."""
    tokens = config.train.batch_size * config.train.sequence_length
    found: dict[str, Any] = {
        "row": row,
        "status": "measured",
        "reason": disagreement(dict.fromkeys(losses, config), losses),
    }
    found["contenders"] = {
        name: {
            "seconds": list(taken[name]),
            "median": statistics.median(taken[name]),
            "tokens_per_second": tokens / statistics.median(taken[name]),
            "losses": list(losses[name][:COMPARED]),
            "memory": memory[name],
        }
        for name in (contender.name for contender in contenders)
    }
    if found["reason"]:
        return found | {"status": "not_the_same_work", "ratios": {}}
    ours = [contender.name for contender in contenders if contender.ours]
    peers = [contender.name for contender in contenders if not contender.ours]
    found["ratios"] = {peer: {own: ratio(taken[own], taken[peer]) for own in ours} for peer in peers}
    return found


def answers(found: Mapping[str, Any], contenders: Sequence[Contender] = CONTENDERS) -> list[str]:
    """Compare Lockstep in a measured row with the fastest peer, with each peer, and with the leanest one."""
    if found["status"] != "measured":
        return []
    of = found["contenders"]
    peers = [c.name for c in contenders if not c.ours and c.name in of]
    fastest = fastest_peer(found)
    lines = []
    for own in (c.name for c in contenders if c.ours and c.name in of):
        said = ", ".join(f"{_ratio(found['ratios'][peer][own])} of {peer}" for peer in peers)
        line = f"{own}: {said}; fastest peer {fastest}"
        known = [name for name in peers if of[name]["memory"] is not None]
        if known and of[own]["memory"] is not None:
            leanest = min(known, key=lambda name: of[name]["memory"])
            line += f"; memory {of[own]['memory'] / of[leanest]['memory']:.2f}× of {leanest}, the leanest"
        lines.append(line)
    return lines


def _ratio(value: Mapping[str, float]) -> str:
    return f"{value['median']:.2f}× ({value['low']:.2f} to {value['high']:.2f})"


HEADERS = ("contender", "step", "tokens/s", "memory", "loss, step 1", f"step {COMPARED}")


def cells(found: Mapping[str, Any], contenders: Sequence[Contender] = CONTENDERS) -> list[list[str]]:
    """Return the cells of a row's contenders under HEADERS."""
    lines = []
    for contender in contenders:
        one = found["contenders"].get(contender.name)
        if one is None:
            continue
        spread = f"{min(one['seconds']):.4g} to {max(one['seconds']):.4g}"
        memory = "not known" if one["memory"] is None else f"{one['memory'] / 1e6:,.0f} MB"
        first, last = f"{one['losses'][0]:.6f}", f"{one['losses'][-1]:.6f}"
        step = f"{one['median']:.4g} s ({spread}; {len(one['seconds'])} steps)"
        lines.append([contender.about, step, f"{one['tokens_per_second']:,.0f}", memory, first, last])
    return lines


SUMMARY = ("model", "row", "Lockstep, tokens/s", "fastest peer", "Lockstep / fastest peer", "memory / leanest peer")


def summary(results: Mapping[str, Any]) -> list[list[str]]:
    """Return a line under SUMMARY for each model and row: Lockstep beside the fastest and the leanest peer."""
    lines = []
    for model in results["models"]:
        for found in model["rows"]:
            start = [size(model), found["row"]]
            if found["status"] != "measured":
                lines.append([*start, found["status"].replace("_", " "), "", "", ""])
                continue
            own, fastest = found["contenders"]["lockstep"], fastest_peer(found)
            leanest = leanest_peer(found)
            memory = "not known" if leanest is None else f"{_times_the_memory(found, leanest):.2f}× of {leanest}"
            said = _ratio(found["ratios"][fastest]["lockstep"])
            lines.append([*start, f"{own['tokens_per_second']:,.0f}", fastest, said, memory])
    return lines


def size(model: Mapping[str, Any]) -> str:
    """Return a model's size in words."""
    return f"{model['parameters'] / 1e6:.3g}M"


def fastest_peer(found: Mapping[str, Any]) -> str:
    """Return the peer with the most tokens a second in a measured row."""
    return max(found["ratios"], key=lambda name: found["contenders"][name]["tokens_per_second"])


def leanest_peer(found: Mapping[str, Any]) -> str | None:
    """Return the peer with the least memory in a measured row; None where no peer's or not Lockstep's is known."""
    known = [name for name in found["ratios"] if found["contenders"][name]["memory"] is not None]
    if not known or found["contenders"]["lockstep"]["memory"] is None:
        return None
    return min(known, key=lambda name: found["contenders"][name]["memory"])


def _times_the_memory(found: Mapping[str, Any], peer: str) -> float:
    return found["contenders"]["lockstep"]["memory"] / found["contenders"][peer]["memory"]


def _about_model(model: Mapping[str, Any]) -> str:
    config = model["config"]
    shape, train = config["model"], config["train"]
    return (
        f"{model['parameters'] / 1e6:.1f}M parameters (run file {config['name']}): {shape['layers']} layers of "
        f"{shape['hidden']}, vocabulary {shape['vocab_size']:,}, [{train['batch_size']}, {train['sequence_length']}] "
        f"tokens a step in micro-batches of {train['micro_batch_size']}."
    )


METHOD = (
    "All start from the same weights and see the same tokens. Their processes are alive side by side with as many "
    "threads each and make one step in turn, round by round; a ratio is Lockstep's tokens a second over a peer's: "
    "the median over rounds, with its 95 % interval by bootstrap. Above 1, Lockstep is faster. Where losses of the "
    f"first {COMPARED} steps differ by more than rounding explains, a row is no comparison and has no ratio. Memory: "
    "the largest resident set above what the process held after its imports; compiled rows hold the compiler as well.",
    "The peers have their best settings: fused AdamW, as Lockstep has it, gradients set to "
    "None, torch's attention, RMSNorm and cross-entropy; under bf16, autocast, or in torchtitan its FSDP policy, which "
    "keeps activations and logits in bf16. torchtitan's `train_step` runs as it is, around its Llama 3 with the fused "
    "QKV projection. Their threads wait as OpenMP lets them by default (14 ms of spinning), Lockstep's as its commands "
    "let them (0.2 ms: the reference has the same cores). Lockstep computes its loss in FP64 from FP32 logits and its "
    "gradient norm in FP64, and makes no synchronisation that they do not make.",
)


def page(results: Mapping[str, Any], file: str = "bench_peers.json") -> str:
    """Return the Markdown page of a file of results: the summary first, then each model's rows.

    file: its name, which page and picture share (docs/results/bench_peers.md).
    """
    device = results["device"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    where = device["name"] + (f", {device['cores']} cores, {device['threads']} threads" if "threads" in device else "")
    lines = ["# Beside other trainers", "", *_table(SUMMARY, summary(results)), ""]
    lines += [f"{name}: {why}." for name, why in results["absent"].items()]
    lines += [""] * bool(results["absent"])
    stem = file.removesuffix(".json")
    named = "" if stem == "bench_peers" else f" --json docs/results/{file}"
    lines += [
        f"Made from [{file}]({file}) by `lockstep bench peers{named} --page docs/results/{stem}.md`; "
        f"measured by `lockstep bench peers`. {where}; {versions}. AdamW, clipping at a norm.",
        "",
    ]
    for paragraph in METHOD:
        lines += [paragraph, ""]
    for model in results["models"]:
        lines += [f"## {size(model)}", "", _about_model(model), ""]
        for found in model["rows"]:
            lines += [f"### {size(model)}, {found['row']}", ""]
            if found["status"] != "measured":
                lines += [f"{found['status'].replace('_', ' ').capitalize()}: {found['reason']}", ""]
            if found.get("contenders"):
                absent = [[name, why, *[""] * (len(HEADERS) - 2)] for name, why in results["absent"].items()]
                lines += [*_table(HEADERS, [*cells(found), *absent]), ""]
                lines += [*(f"- {line}" for line in answers(found)), ""]
    return "\n".join(lines)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headers)} |"
    yield f"|{'---|' * len(headers)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


SHOWS = "Lockstep's tokens a second over the fastest peer's, by model and row"


def drawn(results: Mapping[str, Any]) -> str:
    """Return the picture beside the page, or nothing if no row was measured."""
    panels = []
    for model in results["models"]:
        bars = []
        for found in model["rows"]:
            if found["status"] != "measured":
                continue
            peer = fastest_peer(found)
            value = found["ratios"][peer]["lockstep"]
            text = f"{value['median']:.2f}× of {peer}"
            bars.append(Bar(found["row"], value["median"], text, ours=True, low=value["low"], high=value["high"]))
        if bars:
            panels.append(Panel(f"{size(model)} parameters", [*bars, Bar("the fastest peer", 1.0, "1")]))
    return picture(SHOWS, f"{results['device']['name']}; a longer bar is faster", panels) if panels else ""
