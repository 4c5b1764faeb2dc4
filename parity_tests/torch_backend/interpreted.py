"""Run the kernels of torch_backend/kernels/one_kernel_triton.py on the CPU, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lockstep.torch_backend import kernels

KERNELS = f"{kernels.__name__}.one_kernel_triton"
SOURCE = Path(kernels.__file__).parent / "one_kernel_triton.py"


@contextmanager
def interpreted(source: Path = SOURCE) -> Iterator[None]:
    """Load the head's kernels from `source` inside a `with` block. Needs a process with TRITON_INTERPRET=1."""
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounding(interpreter))
        specification = importlib.util.spec_from_file_location(KERNELS, source)
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        patch.setitem(sys.modules, KERNELS, module)
        patch.setattr(kernels, "one_kernel_triton", module, raising=False)
        specification.loader.exec_module(module)
        yield


def rounding(interpreter: ModuleType) -> Any:
    """Return a cast for the interpreter, whose own truncates FP32 to bf16: to nearest, ties to even, as on a GPU."""
    cut, tl = interpreter.InterpreterBuilder.cast_impl, interpreter.tl

    def cast(self: Any, x: Any, to: Any) -> Any:
        if x.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            rounded = torch.from_numpy(x.data.copy()).bfloat16().view(torch.uint16).numpy()
            return interpreter.TensorHandle(rounded, to.scalar)
        return cut(self, x, to)

    return cast
