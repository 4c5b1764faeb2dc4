"""Read the stand-in's log of one step (standin/log.c): one line per event, with a kind and its fields."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

COPIES = ("h2d", "d2h", "d2d", "memset")
# cudaDataType (library_types.h).
FORMATS = {0: "fp32", 1: "fp64", 2: "fp16", 3: "int8", 14: "bf16", 28: "fp8_e4m3", 29: "fp8_e5m2"}
# cublasMath_t (cublas_api.h): the math modes of a handle. The last bit is a separate flag.
MATH_MODES = {0: "default", 1: "tensor_op", 2: "pedantic", 3: "tf32"}
NO_REDUCED_PRECISION = 16


@dataclass(frozen=True)
class Product:
    """A matrix product (m, k) · (k, n) → (m, n), `batch` times at once; a, b and c are formats of FORMATS.

    adds: the result is added to the output (beta = 1). math: the math mode of its cuBLAS handle.
    """

    m: int
    n: int
    k: int
    batch: int
    a: str
    b: str
    c: str
    adds: bool
    math: str


@dataclass
class Step:
    """The counts of one step's requests to the device.

    synchronisations: by the thing that the host waited for. copies: by kind, calls and bytes. kernels: launches by
    name, of torch's and libraries' kernels. triton: launches of Triton's kernels. collectives: calls of NCCL by name,
    and their elements. graphs: replays of CUDA graphs. captures: graphs recorded. allocations: calls of cudaMalloc.
    stubs: calls of functions that the stand-in does not define.
    """

    synchronisations: Counter[str] = field(default_factory=Counter)
    copies: dict[str, list[int]] = field(default_factory=lambda: {kind: [0, 0] for kind in COPIES})
    kernels: Counter[str] = field(default_factory=Counter)
    triton: Counter[str] = field(default_factory=Counter)
    products: Counter[Product] = field(default_factory=Counter)
    collectives: dict[str, list[int]] = field(default_factory=dict)
    graphs: int = 0
    captures: int = 0
    allocations: int = 0
    stubs: Counter[str] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        """The kernels that the host launched one by one."""
        return sum(self.kernels.values()) + sum(self.triton.values()) + sum(self.products.values())


def read_log(lines: Iterable[str]) -> Step:
    """Count the events of a step. Raises ValueError for a line of an unknown kind."""
    step = Step()
    for line in lines:
        kind, _, rest = line.strip().partition(" ")
        if kind == "sync":
            step.synchronisations[rest] += 1
        elif kind in COPIES:
            step.copies[kind][0] += 1
            step.copies[kind][1] += int(rest)
        elif kind == "launch":
            step.kernels[kernel_name(rest)] += 1
        elif kind == "triton":
            step.triton[rest] += 1
        elif kind == "product":
            step.products[_product(rest)] += 1
        elif kind == "collective":
            name, count, *_ = rest.split()
            counted = step.collectives.setdefault(name, [0, 0])
            counted[0] += 1
            counted[1] += int(count)
        elif kind == "stub":
            step.stubs[rest] += 1
        elif kind in ("graph", "capture", "allocate"):
            name = {"graph": "graphs", "capture": "captures", "allocate": "allocations"}[kind]
            setattr(step, name, getattr(step, name) + 1)
        elif kind not in ("", "free", "refused", "h2h"):
            raise ValueError(f"not a line of the stand-in's log: {line!r}")
    return step


def kernel_name(mangled: str) -> str:
    """Shorten a C++ symbol to its first two descriptive names: `reduce_kernel NormTwoOps`."""
    # Without literal template arguments, every remaining number is the length of the name after it.
    rest, words = re.sub(r"L[a-z]n?\d+E", "", mangled), []
    while found := re.search(r"\d+", rest):
        word = rest[found.end() : found.end() + int(found[0])]
        rest = rest[found.end() + len(word) :]
        words.append(word)
    telling = [word for word in words if re.search("[Kk]ernel|Functor|Ops|Copy|SoftMax", word) and "nocast" not in word]
    telling = [re.sub(r"_?GLOBAL__N__\w{8}_\d+_|_cu_\w+", "", word) for word in telling]
    return " ".join(dict.fromkeys(telling[:2])) or mangled[:60]


def _product(rest: str) -> Product:
    _, *words = rest.split()
    found = dict(zip(words[::2], words[1::2], strict=True))
    a, b, c = (FORMATS.get(int(found[name]), f"type {found[name]}") for name in "abc")
    m, n, k, batch = (int(found[name]) for name in ("m", "n", "k", "batch"))
    return Product(m, n, k, batch, a, b, c, float(found["beta"]) != 0, math_mode(int(found["math"])))


def math_mode(number: int) -> str:
    """Name a cuBLAS math mode; `full sums` where reduced-precision reductions are forbidden."""
    name = MATH_MODES.get(number & ~NO_REDUCED_PRECISION, f"mode {number}")
    return f"{name}, full sums" if number & NO_REDUCED_PRECISION else name


def as_json(step: Step) -> dict[str, Any]:
    """Return the counts as a JSON object; products as a list of objects with their number of calls."""
    found = {name: getattr(step, name) for name in step.__dataclass_fields__ if name != "products"}
    products = [{**asdict(product), "calls": calls} for product, calls in step.products.most_common()]
    return {**{n: dict(v) if isinstance(v, dict) else v for n, v in found.items()}, "products": products}
