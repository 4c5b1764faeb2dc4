"""Build the stand-in for CUDA's runtime, driver, cuBLAS and NCCL with gcc, and name the environment it is used in.

The headers come with a CUDA build of torch (the `nvidia` packages). A function that torch's libraries need and no file
of `standin/` defines becomes a stub: it returns success, and the log names it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).parent / "standin"
# Torch's libraries that call CUDA.
LIBRARIES = ("libc10_cuda", "libtorch_cuda", "libtorch_python", "libtorch_cuda_linalg", "libcaffe2_nvrtc")
LIBRARY = "libcuda.so.1"
# Functions that the stand-in defines; cuFile and cuBLAS's versions come from the real libraries.
ANSWERED = re.compile(r"(?!cuFile)(__cuda|cuda|cublas|nccl|cu[A-Z])\w*")
REAL = {"cublasLtGetVersion", "cublasGetVersion_v2", "cublasGetVersion"}


def site_packages(python: Path) -> Path:
    """Return the folder that holds torch in the environment of this Python. Raises SystemExit without a CUDA build."""
    code = "import pathlib, torch; assert torch.version.cuda; print(pathlib.Path(torch.__file__).parents[1])"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{python}: no CUDA build of torch: {done.stderr.strip().splitlines()[-1]}")
    return Path(done.stdout.strip())


def build(site: Path, folder: Path) -> Path:
    """Compile the stand-in for the torch in `site` into `folder`, unless it is newer than its sources; return it."""
    library = folder / LIBRARY
    sources = sorted(SOURCES.glob("*.c"))
    newest = max(file.stat().st_mtime for file in SOURCES.rglob("*.[ch]"))
    if library.exists() and library.stat().st_mtime > newest:
        return library
    folder.mkdir(parents=True, exist_ok=True)
    headers = [
        f"-I{path}" for path in (SOURCES, *sorted(site.glob("nvidia/cu*/include")), site / "nvidia/nccl/include")
    ]
    objects = []
    for source in sources:
        objects.append(folder / f"{source.stem}.o")
        _gcc("-c", str(source), "-o", str(objects[-1]), *headers)
    stubs = folder / "stubs.c"
    stubs.write_text(stub_source(_asked(site) - _defined(objects)), encoding="utf-8")
    _gcc("-c", str(stubs), "-o", str(folder / "stubs.o"))
    linked = [str(file) for file in (*objects, folder / "stubs.o")]
    _gcc("-shared", f"-Wl,-soname,{LIBRARY}", "-o", str(library), *linked, "-ldl", "-lpthread")
    plain = folder / "libcuda.so"
    plain.unlink(missing_ok=True)
    plain.symlink_to(LIBRARY)
    return library


def stub_source(names: set[str]) -> str:
    """Return C source in which each of these functions logs its name and returns success for any arguments."""
    lines = ["void note(const char *format, ...);"]
    lines += [
        f'__attribute__((visibility("default"))) int {name}(void) {{ note("stub {name}"); return 0; }}'
        for name in sorted(names)
    ]
    return "\n".join(lines) + "\n"


def environment(library: Path, caches: Path, memory: int | None = None) -> Mapping[str, str]:
    """Return the variables of a case of the rehearsal. memory: bytes of the device; None: an H100's.

    Its compiled kernels go to `caches`. Never use them on a real GPU, because their variants were chosen at random.
    """
    return preloaded(library, memory) | {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        # With this, each generated kernel records the bytes that it reads and writes.
        "TORCHINDUCTOR_BENCHMARK_KERNEL": "1",
    }


def preloaded(library: Path, memory: int | None = None, name: str | None = None) -> dict[str, str]:
    """Return variables that load the stand-in instead of CUDA. memory, name: of the device; None: an H100's."""
    found = {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(library.parent), os.environ.get("LD_LIBRARY_PATH")))),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    found |= {} if memory is None else {"STANDIN_MEMORY": str(memory)}
    return found | ({} if name is None else {"STANDIN_NAME": name})


def _gcc(*arguments: str) -> None:
    # Most functions of a stand-in ignore their arguments.
    subprocess.run(["gcc", "-w", "-O1", "-fPIC", "-fvisibility=hidden", *arguments], check=True)


def _asked(site: Path) -> set[str]:
    """Return CUDA functions that torch's libraries need from other libraries."""
    files = [site / f"torch/lib/{name}.so" for name in LIBRARIES]
    names = {line.split()[-1].partition("@")[0] for file in files for line in _nm("--undefined-only", "-D", str(file))}
    return {name for name in names if ANSWERED.fullmatch(name)} - REAL


def _defined(objects: list[Path]) -> set[str]:
    return {line.split()[-1] for file in objects for line in _nm("--defined-only", str(file)) if line.split()[1:]}


def _nm(*arguments: str) -> list[str]:
    done = subprocess.run(["nm", *arguments], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line and not line.endswith(":")]
