"""Watch a run in a real browser while it trains, is killed, goes on and is set back: docs/results/report_watch.md.

    python -m lockstep.scripts.studies.watch_browser --page docs/results/report_watch.md

Needs Chromium, chromedriver and data/stdlib. A small model of the quickstart trains; what a run's files can hold is
planted with markup, and the page must show it and run none of it.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import write_atomically
from lockstep.core.files.jsonl import read_lines, sealed_line
from lockstep.core.run.info import read_info, write_info
from lockstep.core.sinks.visible import markdown
from lockstep.scripts.studies.browser import Browser, is_there, open_browser
from lockstep.scripts.studies.repository import ROOT

# Text that runs if it is taken for markup, as an element, an attribute, the end of the data, an address or a style.
MARKUP = (
    '</script><script>window.pwned=1</script><img src=x onerror="window.pwned=2">'
    "<svg onload=window.pwned=3>\"'><a href=javascript:window.pwned=4>x</a></title></style><style>*{display:none}"
)
SETTINGS = {
    "--model.hidden": "64",
    "--model.layers": "2",
    "--model.heads": "4",
    "--model.kv-heads": "2",
    "--model.ffn-hidden": "128",
    "--train.batch-size": "4",
    "--train.micro-batch-size": "4",
    "--train.sequence-length": "64",
    "--train.steps": "160",
    "--optim.warmup-steps": "5",
    "--compile.enabled": "false",
    "--eval.every": "10",
    "--checkpoint.every": "40",
    "--checkpoint.keep": "9",
    "--parity.every": "80",
    "--log.sample-every": "20",
    "--log.sample-tokens": "10",
    "--log.sample-prompt": MARKUP,
}
STEP = "const m = document.getElementById('live-said').textContent.match(/step (\\d+)/); return m ? Number(m[1]) : 0"
STATE = "return document.getElementById('live-state').textContent"
BRANCH = "return document.body.textContent.match(/branch \\d+ from step 80: [^(]*[^( ]/)?.[0] ?? ''"
SAID = "return document.getElementById('live-said').textContent"
# The traces of markup that was obeyed: an effect, an element that only markup makes, a load from elsewhere.
OBEYED = (
    "return [window.pwned ?? null, document.querySelectorAll('img, iframe, #parts script, #parts style, a[href^=java]')"
    ".length, performance.getEntriesByType('resource').filter(r => !r.name.startsWith(location.origin)).length]"
)
UNHARMED = [None, 0, 0]


def main(argv: list[str]) -> int:
    """Go through the stations and write the page; 1 if one of them was missed."""
    parser = argparse.ArgumentParser(description="A run watched in a browser.")
    parser.add_argument("--page", type=Path, help="Markdown to write; its picture lies beside it")
    options = parser.parse_args(argv)
    if not is_there():
        raise UserError("this machine has no Chromium with chromedriver")
    rows: list[tuple[str, str]] = []
    load = os.getloadavg()[0]
    # Ignored by whoever runs in the background, and by what is started from there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="lockstep-watch-") as folder, open_browser() as browser:
        try:
            _trained(Path(folder), browser, rows, options.page)
            _planted(Path(folder), browser, rows)
        except TimeoutError as missed:
            _tell(rows, "missed", str(missed))
    if options.page:
        picture = f"\n![The page while the run trains]({options.page.with_suffix('.png').name})\n"
        write_atomically(options.page, [(markdown(_text(rows, load)) + picture).encode()])
    return int(any(what == "missed" for what, _ in rows))


def _trained(folder: Path, browser: Browser, rows: list[tuple[str, str]], page: Path | None) -> None:
    """Watch a run that trains, is killed, goes on, ends, and is set back, on a server that ends and comes back."""
    run = folder / "<img src=x onerror=window.pwned=5>" / "watched"
    words = ["configs/quickstart.toml", "--name", run.name, "--out", str(run.parent)]
    words += [word for pair in SETTINGS.items() for word in pair]
    with _lockstep("train", *words) as training:
        _until(lambda: (run / "run.json").exists(), "the run's folder")
        with _watching(run) as address:
            port = address.rsplit(":", 1)[1].strip("/")
            browser.size(1200, 1000)
            browser.go(address)
            browser.run("window.mark = 1")
            first = browser.wait(STEP, lambda step: step > 0, 900)
            _tell(rows, "first seen", f"step {first}, {browser.run(STATE)}")
            began, steps = time.monotonic(), [first]
            while len(steps) < 12 and time.monotonic() - began < 120:
                steps.append(browser.wait(STEP, lambda step: step > steps[-1]))
            spent = time.monotonic() - began
            _tell(rows, "steps on the page while it trains", f"{', '.join(map(str, steps))}, in {spent:.0f} s")
            browser.wait("return document.querySelector('.sample')?.textContent ?? ''", lambda text: "pwned" in text)
            browser.wait("return document.querySelectorAll('#charts svg').length", lambda n: n >= 5)
            if page:
                browser.picture(page.with_suffix(".png"))
            training.kill()
            training.wait()
            browser.wait(STATE, lambda state: state == "killed")
            _tell(rows, "SIGKILL", f"{browser.run(STATE)}, {_step(browser)}")
        _tell(rows, "the server ended by Ctrl-C, exit code", "0")
        browser.wait(SAID, lambda text: "does not answer" in text)
        _tell(rows, "the page without a server", "shows that the server does not answer, and goes on trying")
    with _watching(run, port), _lockstep("train", "--resume", str(run)) as training:
        browser.wait(STATE, lambda state: state == "running", 900)
        again = browser.wait(STEP, lambda step: step > 0)
        later = browser.wait(STEP, lambda step: step > again, 900)
        _tell(rows, "another server on its port, and --resume", f"running, steps {again} to {later}")
        browser.wait(STATE, lambda state: state == "ended", 900)
        code = training.wait(120)
        _tell(rows, "the run's end", f"ended, {_step(browser)}, exit code {code}")
        with _lockstep("train", "--resume", str(run), "--from-step", "80", "--optim.peak-lr", "1e-3") as branch:
            back = browser.wait(STEP, lambda step: 80 <= step < 160, 900)
            # Its number counts what the kill left behind, too: steps after the last checkpoint, if there were any.
            branch_said = browser.wait(BRANCH, bool)
            _tell(rows, "set back to step 80, a branch", f"step {back}, {branch_said}")
            branch.send_signal(signal.SIGINT)
            branch.wait()
            browser.wait(STATE, lambda state: state == "stopped")
            _tell(rows, "Ctrl-C of the run", f"{browser.run(STATE)}, {browser.run(SAID).split(' · ')[-1]}")
        _tell(rows, "the page was loaded", "once" if browser.run("return window.mark") == 1 else "MORE THAN ONCE")
        _require_unharmed(browser, rows, "markup in the prompt, its samples, the configuration and the folder's name")


def _planted(folder: Path, browser: Browser, rows: list[tuple[str, str]]) -> None:
    """Plant markup wherever the files of the run hold text, with right checksums, and watch the run."""
    run = folder / "<img src=x onerror=window.pwned=5>" / "watched"
    info = read_info(run / "run.json")
    texts = {"name": MARKUP, "git_commit": MARKUP, "backend": MARKUP, "wandb_id": MARKUP, "created": MARKUP}
    history = {
        "finished": False,
        "stopped": {"how": "failed", "said": MARKUP, "time": ""},
        "versions": {MARKUP: MARKUP},
    }
    write_info(run / "run.json", info | texts | history | {"hardware": {"device": MARKUP, MARKUP: MARKUP}})
    with (run / "config.toml").open("a", encoding="utf-8") as file:
        file.write(f"# {MARKUP}\n")
    checks = read_lines(run / "parity.jsonl")
    for check in checks:
        check["not_covered"] = [MARKUP]
        check["cause"] = MARKUP
        check["stages"][3] |= {"stage": MARKUP, "tap": MARKUP, "note": MARKUP, "ok": False, "scope": MARKUP}
        check["stages"][3]["measures"][0] |= {"name": MARKUP, "basis": MARKUP, "value": 1e9}
        check |= {"verdict": "disagreed", "origin": {**check["stages"][3], "layer": None}, "origins": []}
    (run / "parity.jsonl").write_bytes(b"".join(map(sealed_line, checks)))
    records = read_lines(run / "records.jsonl")
    for record in records:
        record["metrics"][f"grad_norm/{MARKUP}"] = 1.0
        record["host"][f"seconds/{MARKUP}"] = 1.0
    records[-1]["sample"] = MARKUP
    (run / "records.jsonl").write_bytes(b"".join(map(sealed_line, records)))
    with _watching(run) as address:
        browser.go(address)
        browser.wait(STATE, lambda state: state == "failed")
        browser.wait("return document.querySelectorAll('#map canvas').length", bool)
        times = browser.run("return document.body.textContent.split('window.pwned').length - 1")
        _tell(rows, "markup planted in every text of a run's files", f"shown as text {times} times")
        _require_unharmed(browser, rows, "the same")
    _lockstep_once("runs", str(folder), "--page", str(folder / "runs.html"))
    _lockstep_once("report", str(run), "--out", str(folder / "report.html"))
    for name in ("runs.html", "report.html"):
        browser.go((folder / name).as_uri())
        time.sleep(1)
        _require_unharmed(browser, rows, f"the same in {name}")


def _require_unharmed(browser: Browser, rows: list[tuple[str, str]], what: str) -> None:
    found, said = browser.run(OBEYED), [line for line in browser.complaints() if "favicon" not in line]
    if found[:2] != UNHARMED[:2] or found[2]:
        _tell(rows, "missed", f"{what}: {found}")
    refused = [line for line in said if "Content Security Policy" in line]
    _tell(rows, f"{what}: scripts run, elements made, loads from elsewhere", f"none; refused: {len(refused)}")


def _tell(rows: list[tuple[str, str]], what: str, saw: str) -> None:
    rows.append((what, saw))
    print(f"{what}: {saw}", flush=True)


def _step(browser: Browser) -> str:
    return f"step {browser.run(STEP)}"


@contextmanager
def _lockstep(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command of Lockstep's in a process of its own, which is killed if it has not ended."""
    environment = os.environ | {"PYTHONPATH": os.fspath(ROOT / "src")}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _lockstep_once(*words: str) -> None:
    with _lockstep(*words) as process:
        if code := process.wait(120):
            raise TimeoutError(f"lockstep {words[0]}: exit code {code}")


@contextmanager
def _watching(run: Path, port: str = "0") -> Iterator[str]:
    """Start a server, yield its address, and end it by Ctrl-C. Raises TimeoutError if its exit code is not 0."""
    words = [sys.executable, "-m", "lockstep", "report", "--watch", str(run), "--port", port]
    environment = os.environ | {"PYTHONPATH": os.fspath(ROOT / "src")}
    server = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split(": ")[-1].split()[0]
        server.send_signal(signal.SIGINT)
        if code := server.wait(120):
            raise TimeoutError(f"report --watch: exit code {code}")
    finally:
        server.kill()
        server.wait()


def _until(holds: Callable[[], bool], what: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.2)


def _text(rows: Sequence[tuple[str, str]], load: float) -> str:
    version = subprocess.run(["chromedriver", "--version"], capture_output=True, text=True).stdout.split(" (")[0]
    python = platform.python_version()
    table = "\n".join(f"| {what} | {saw} |" for what, saw in rows)
    return f"""# A run watched in a browser

```
python -m lockstep.scripts.studies.watch_browser --page docs/results/report_watch.md
```

A model of two blocks, width 64, trains on Python's standard library with checks against JAX. Headless Chromium shows
`lockstep report --watch`. {version}, Python {python}, {os.cpu_count()} cores of an {_processor()}, under
a load of {load:.0f} as it began and {os.getloadavg()[0]:.0f} as it ended. All rows are of one call.

| what happens | what the page shows |
|---|---|
{table}
"""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return " ".join(name.split()[:2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
