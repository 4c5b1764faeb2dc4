"""The page carries what the files contain, whatever that is."""

from __future__ import annotations

import base64
import html
import json
import math
import re
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import read_lines, sealed_line
from lockstep.core.parity.measures.verdict import Measure
from lockstep.core.parity.reference.stages import chain as chain_of_stages
from lockstep.core.parity.reference.stages import forward_stages, is_library_head
from lockstep.core.report.build import SCRIPTS, build_report, write_report
from lockstep.core.report.checks import AT_BOUND, CONTAMINATED, HELD, NAMED, ORIGIN, PER_DECADE, Checks, strain_code
from lockstep.core.report.curves import POINTS, charts, smooth, thin
from lockstep.core.report.heatmap import MAX_VALUES, MINUS_HIGH, ONE_OVER_HIGH, encode, number_planes
from lockstep.core.report.text import embed, esc, number
from lockstep.core.run.info import read_info, write_info
from lockstep.parity_tests.report.fake_run import FAULT_STEP, MODEL, NOT_COVERED, record, write_run

ROLES = {None: HELD, "contaminated": CONTAMINATED, "origin": ORIGIN}


def embedded(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    data: dict[str, Any] = json.loads(found[1], parse_constant=refuse)
    return data


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON: no browser reads it")


def verdict_words(page: str) -> str:
    """Return the text of the verdict's section."""
    section = page.split('<section class="verdict')[1].split("</section>")[0]
    return (
        html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", section.replace("</", " </"))).replace(" ,", ","))
        .replace(" .", ".")
        .replace(" ;", ";")
    )


def measure_of(tree: dict[str, Any]) -> Measure:
    return Measure(tree["name"], tree["value"], tree["low"], tree["high"], tree["basis"])


def series(data: dict[str, Any], chart: str, label: str) -> dict[str, Any]:
    spec = next(c for c in data["charts"] if c["id"] == chart)
    return next(s for s in spec["series"] if s["label"].startswith(label))


class Unpacked:
    """Reads the heatmap as the page's script does."""

    def __init__(self, heat: dict[str, Any]) -> None:
        self.heat = heat
        rows = len(heat["rows"])
        self.state, self.strain = self._planes("cells", (rows, len(heat["steps"])))
        self.planes = self._planes("details", (rows, len(heat["detailed"])))
        self.meta, (self.unequal, *_) = self._pair(), self._numbers(heat["unequal_digits"])
        self.measures = {}
        for name in heat["measures"]:
            value, *_ = self._numbers(heat["digits"])
            high, *_ = self._numbers(heat["bound_digits"])
            low, code = self._numbers(heat["bound_digits"])
            for at in np.argwhere((code == MINUS_HIGH) | (code == ONE_OVER_HIGH)):
                low[tuple(at)] = -high[tuple(at)] if code[tuple(at)] == MINUS_HIGH else 1 / high[tuple(at)]
            self.measures[name] = (value, low, high, self._pair())
        assert next(self.planes, None) is None

    def _planes(self, name: str, shape: tuple[int, int]) -> Iterator[Any]:
        planes = np.frombuffer(zlib.decompress(base64.b64decode(self.heat[name])), dtype=np.uint8)
        return iter(planes.reshape(-1, *shape))

    def _pair(self) -> Any:
        low = next(self.planes).astype(int)
        return low + 256 * next(self.planes).astype(int)

    def _numbers(self, digits: int) -> tuple[Any, Any]:
        exponent = next(self.planes).astype(int)
        mantissa = self._pair() - 32768
        special = {0: None, 1: math.nan, 2: math.inf, 3: -math.inf, 4: 0.0, MINUS_HIGH: None, ONE_OVER_HIGH: None}
        decode = np.vectorize(
            lambda e, m: special[e] if e in special else float(f"{m}e{e - self.heat['zero'] - digits + 1}"),
            otypes=[object],
        )
        return decode(exponent, mantissa), exponent

    def row_of(self, finding: dict[str, Any]) -> int:
        """Return the row of a finding."""
        wanted = tuple(finding[k] for k in ("phase", "stage", "tap", "layer", "scope"))
        found = [
            i
            for i, (line, *rest, _) in enumerate(self.heat["rows"])
            if (*self.heat["lines"][line][1:], *rest) == wanted
        ]
        assert len(found) == 1
        return found[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    return {
        "honest": write_run(root / "honest", steps=200),
        "faulty": write_run(root / "faulty", steps=200, faulty=True),
        "unchecked": write_run(root / "unchecked", steps=120, checked=False),
    }


@pytest.fixture(scope="module")
def pages(runs: dict[str, Path]) -> dict[str, str]:
    return {name: build_report(path) for name, path in runs.items()}


def lines(path: Path) -> list[dict[str, Any]]:
    return read_lines(path)


def replace_lines(run: Path, name: str, values: list[Any]) -> Path:
    (run / name).write_bytes(b"".join(f"{v}\n".encode() if isinstance(v, str) else sealed_line(v) for v in values))
    return run


def test_every_record_is_on_the_page(pages, runs):
    data, records = embedded(pages["honest"]), lines(runs["honest"] / "records.jsonl")
    for chart, label, key in (
        ("loss", "training, every step", "loss"),
        ("lr", "learning rate", "lr"),
        ("grad", "global", "grad_norm"),
        ("speed", "tokens per second", "tokens_per_second"),
    ):
        got = series(data, chart, label)
        assert got["x"] == [r["step"] for r in records]
        assert got["y"] == pytest.approx([r[key] for r in records], rel=1e-5)


def test_metrics_stand_at_the_steps_where_they_were_due(pages, runs):
    data, records = embedded(pages["honest"]), lines(runs["honest"] / "records.jsonl")
    for chart, label, key in (
        ("loss", "validation", "val/loss"),
        ("loss", "FP32, on a slice", "fp32/loss"),
        ("grad", "matrices", "grad_norm/matrices"),
        ("update", "gains", "update_ratio/gains"),
    ):
        due = [r for r in records if key in r["metrics"]]
        got = series(data, chart, label)
        assert got["x"] == [r["step"] for r in due]
        assert got["y"] == pytest.approx([r["metrics"][key] for r in due], rel=1e-5)


def test_entropies_and_clip_norm_are_lines(pages):
    specs = {c["id"]: c for c in embedded(pages["honest"])["charts"]}
    assert [(r["label"], r["y"]) for r in specs["loss"]["rules"]] == [
        ("unigram entropy", 6.913),
        ("bigram entropy", 4.287),
    ]
    assert specs["grad"]["rules"][0]["y"] == 1


@pytest.mark.parametrize("name", ["honest", "faulty"])
def test_every_finding_is_a_cell(pages, runs, name):
    heat = embedded(pages[name])["heat"]
    cells = Unpacked(heat)
    checks = [c for c in lines(runs[name] / "parity.jsonl") if c["verdict"] != "skipped"]
    assert heat["steps"] == [c["step"] for c in checks] and heat["detailed"] == list(range(len(checks)))
    compared = 0
    for column, check in enumerate(checks):
        for f in check["stages"]:
            at = cells.row_of(f), column
            origin = all(f[k] == (check["origin"] or {}).get(k) for k in ("stage", "tap", "phase"))
            role = NAMED if origin and f["role"] == "origin" else ROLES[f["role"]]
            assert cells.state[at] == role
            assert (cells.strain[at] > AT_BOUND) is not f["ok"]
            strain = max(measure_of(m).strain for m in f["measures"])
            if 1e-2 < strain < 1e2:
                assert PER_DECADE * math.log10(strain) == pytest.approx(int(cells.strain[at]) - AT_BOUND, abs=1.0)
            assert heat["metas"][cells.meta[at]] == [f["size"], f["note"]]
            assert (cells.unequal[at] is None) == (f["unequal"] is None)
            for m in f["measures"]:
                value, low, high, code = (plane[at] for plane in cells.measures[m["name"]])
                assert value == pytest.approx(m["value"], rel=5.1e-4)
                assert low == (m["low"] if m["low"] is None else pytest.approx(m["low"], rel=5.1e-3))
                assert high == (m["high"] if m["high"] is None else pytest.approx(m["high"], rel=5.1e-3))
                assert heat["bases"][code >> 1] == m["basis"]
                assert bool(code & 1) is not m["ok"]
                compared += 1
    assert compared == sum(len(f["measures"]) for c in checks for f in c["stages"])
    assert int((cells.state > 0).sum()) == sum(len(c["stages"]) for c in checks)


def test_lines_stand_in_the_order_of_the_chain(pages):
    heat = embedded(pages["honest"])["heat"]
    groups = list(dict.fromkeys(group for group, _, _ in heat["lines"]))
    assert groups == ["data and weights", "forward", "backward", "gradients", "update"]
    by_group = {g: [stage for group, _, stage in heat["lines"] if group == g] for g in groups}
    phases = chain_of_stages().phases
    chain = [stage for stage, phase in phases.items() if phase == "forward" and not is_library_head(stage)]
    chain = chain[: chain.index("evaluation")]  # what follows is behind the update, not in the pass
    own = {stage.id for stage in forward_stages(MODEL)} | {"loss"}
    chain = [stage for stage in chain if stage in own]  # other families have stages of their own
    assert by_group["forward"] == chain
    assert by_group["backward"] == [s for s in reversed(chain) if s != "loss"]
    links = [(None, "embed")]
    links += [(layer, stage) for layer in range(MODEL.layers) for stage in chain[1:16]]
    links += [(None, stage) for stage in chain[16:]]
    assert [tuple(link) for link in heat["depths"]] == links
    for line, tap, layer, _, depth in heat["rows"]:
        group, _, stage = heat["lines"][line]
        assert (depth >= 0) == (group in ("forward", "backward"))
        assert depth < 0 or tuple(heat["depths"][depth]) == (layer, stage), tap


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not here")
def test_the_pages_script_unpacks_what_was_packed(pages):
    heat = embedded(pages["faulty"])["heat"]
    cells = Unpacked(heat)
    source = resources.files("lockstep.core.report").joinpath("cells.js").read_text()
    ask = (
        "unpack().then(c => console.log(JSON.stringify(heat.rows.map((_, r) => heat.steps.map((_, s) => c.at(r, s))))))"
    )
    script = f"const data = {json.dumps({'heat': heat})};\n{source}\n{ask}"
    found = json.loads(subprocess.run(["node", "-"], input=script, capture_output=True, check=True, text=True).stdout)
    for row, of_row in enumerate(found):
        for column, cell in enumerate(of_row):
            assert (cell is None) == (cells.state[row, column] == 0)
            for m in cell["measures"] if cell else ():
                expected = [plane[row, column] for plane in cells.measures[m["name"]][:3]]
                assert [m["value"], m["low"], m["high"]] == [e if e is None else pytest.approx(e) for e in expected]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not here")
def test_the_scripts_are_one_program(tmp_path):
    text = "".join(resources.files("lockstep.core.report").joinpath(name).read_text() for name in SCRIPTS)
    (tmp_path / "page.js").write_text(text)
    subprocess.run(["node", "--check", str(tmp_path / "page.js")], check=True)


def test_the_first_bad_step_is_in_words(pages, runs):
    said = verdict_words(pages["faulty"])
    check = next(c for c in lines(runs["faulty"] / "parity.jsonl") if c["verdict"] == "disagreed")
    assert check["step"] == FAULT_STEP and f"First at step {FAULT_STEP}" in said
    assert "its origin is q_rope forward, layer 0, at blocks.0.attn.q_rope, from the candidate's own inputs" in said
    origin = next(f for f in check["stages"] if f["tap"] == "blocks.0.attn.q_rope" and f["role"] == "origin")
    for m in origin["measures"]:
        assert m["basis"] in said and number(m["value"]) in said and number(m["high"]) in said
    assert "Cause: disappears with FP32 RoPE tables." in said
    others = [o for o in check["origins"] if o["layer"]]
    assert others and all(f"q_rope forward, layer {o['layer']}" in said for o in others)
    roles = [f["role"] for f in check["stages"]]
    assert f"{len(roles)} comparisons there: " in said and f"{roles.count('contaminated')} are contaminated" in said
    assert f"{roles.count('origin')} broke by themselves" in said and f"{roles.count(None)} held" in said
    assert "20 checks: 13 agreed, 6 disagreed, 1 skipped." in said
    assert f"{NOT_COVERED[0]} (19 checks)" in said and "skipped: the queue was full" in said


def test_the_decoders_note_is_said(tmp_path):
    run = write_run(tmp_path / "run", steps=30, every=30)
    (check,) = lines(run / "parity.jsonl")
    broken = next(f for f in check["stages"] if f["stage"] == "gradients")
    broken |= {"ok": False, "role": "origin", "note": "length off by the accumulation steps (÷2)"}
    origin = {k: broken[k] for k in ("stage", "tap", "phase", "layer")}
    page = build_report(replace_lines(run, "parity.jsonl", [check | {"verdict": "disagreed", "origin": origin}]))
    said = verdict_words(page)
    assert "Decoded: length off by the accumulation steps (÷2)." in said
    assert "1 broke by itself" in said and "at embed.weight, end to end" in said


def test_agreement_says_what_was_compared_and_how_near_it_came(pages, runs):
    said = verdict_words(pages["honest"])
    checks = [c for c in lines(runs["honest"] / "parity.jsonl") if c["verdict"] != "skipped"]
    assert "Agreed" in said
    assert f"{sum(len(c['stages']) for c in checks):,} comparisons in {len(checks)} checks" in said
    for scope in ("local", "end_to_end", "over_steps"):
        found = [
            (measure_of(m).strain, m, f)
            for c in checks
            for f in c["stages"]
            for m in f["measures"]
            if f["scope"] == scope
        ]
        _, m, f = max(found, key=lambda item: item[0])
        assert f"at {f['tap']}" in said and number(m["value"]) in said and m["basis"] in said


def test_the_table_starts_with_the_origin_then_broken_then_honest_stages(pages):
    table = pages["faulty"].split('id="stages"')[1].split("<tbody>")[1].split("</tbody>")[0]
    rows = re.findall(r'<tr class="(\w+)">.*?</span> (\w[\w.]*)', table)
    assert rows[0] == ("bad", "q_rope")
    tones = [tone for tone, _ in rows]
    assert tones == sorted(tones) and {"bad", "good"} == set(tones)
    assert 'class="origin"' in table and 'class="origin"' not in pages["honest"]


@pytest.mark.parametrize(("agrees", "how"), [(True, "every comparison agrees under"), (False, "stages are nearer to")])
def test_casts_that_fit_better_are_told(tmp_path, runs, agrees, how):
    checks = lines(runs["faulty"] / "parity.jsonl")
    bad = next(check for check in checks if check["verdict"] == "disagreed")
    bad["fitting"] = {"settings": {"precision.casts": "<autocast>"}, "declared": {}, "agrees": agrees, "left": None}
    page = build_report(replace_lines(write_run(tmp_path / "run", steps=200), "parity.jsonl", checks))
    assert f"Declared otherwise: {how} precision.casts = '<autocast>'." in verdict_words(page)
    assert "<autocast>" not in page


def test_lines_of_schema_1_are_drawn_without_their_roles(tmp_path, runs):
    old = [c | {"schema": 1} for c in lines(runs["faulty"] / "parity.jsonl")]
    for check in old:
        check.pop("origins", None), check.pop("cause", None)
        for f in check.get("stages", []):
            del f["role"]
            f["stage"] = "rope" if f["stage"] == "q_rope" else f["stage"]  # ids of then
        if check.get("origin"):
            check["origin"]["stage"] = "rope"
    run = write_run(tmp_path / "run", steps=200)
    page = build_report(replace_lines(run, "parity.jsonl", old))
    heat = embedded(page)["heat"]
    assert heat["lines"][-1][2] == "rope" and "its origin is rope forward" in verdict_words(page)
    states = Unpacked(heat).state
    expected = Unpacked(embedded(build_report(runs["faulty"]))["heat"]).state
    assert sorted(states.ravel().tolist()) == sorted(expected.ravel().tolist())


def test_a_schema_of_the_future_is_said_to_be_unreadable(tmp_path):
    run = write_run(tmp_path / "run", steps=30)
    page = build_report(replace_lines(run, "parity.jsonl", [{"schema": 3, "what": "ever"}, {"schema": 3}]))
    assert "2 lines of parity.jsonl are of schema 3, which this page cannot read." in page
    assert "Could not tell" in verdict_words(page) and "Agreed" not in verdict_words(page)


def test_a_strain_keeps_its_side_of_the_bound():
    assert strain_code(1.0, ok=True) == AT_BOUND and strain_code(1.0 + 1e-9, ok=False) == AT_BOUND + 1
    assert strain_code(10.0, ok=False) == AT_BOUND + PER_DECADE and strain_code(0.1, ok=True) == AT_BOUND - PER_DECADE
    assert strain_code(math.inf, ok=False) == strain_code(math.nan, ok=False) == 255
    assert strain_code(0.0, ok=True) == 1 and strain_code(1e30, ok=False) == 254


def test_without_parity_file_it_says_not_checked(pages):
    page = pages["unchecked"]
    assert "Not checked" in page and embedded(page)["heat"] is None and embedded(page)["checks"] == []


def test_skipped_checks_are_counted_and_only_they_are_no_agreement(tmp_path):
    run = write_run(tmp_path / "run", steps=40, checked=False)
    skipped = {"schema": 1, "step": 10, "verdict": "skipped", "reason": "queue <full>"}
    page = build_report(replace_lines(run, "parity.jsonl", [skipped, {**skipped, "step": 20}]))
    assert "Could not tell" in page and "2 checks: 2 skipped." in page
    assert "skipped: queue &lt;full&gt; (2 checks)" in page
    assert [v for _, v, _ in embedded(page)["checks"]] == ["skipped", "skipped"]


def test_a_check_that_compared_nothing_is_no_agreement(tmp_path):
    run = write_run(tmp_path / "run", steps=40, checked=False)
    empty = {"schema": 1, "step": 10, "verdict": "agreed", "origin": None, "stages": [], "not_covered": ["all"]}
    assert "Could not tell" in build_report(replace_lines(run, "parity.jsonl", [empty]))


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scripts = 0
        self.attributes: list[Any] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.tags.append(tag)
        self.attributes += attrs


def test_nothing_from_the_files_becomes_markup(tmp_path):
    run = write_run(tmp_path / "run", steps=30, faulty=True)
    evil = "</script><img src=x onerror=alert(1)>\"'&\u2028\ud800\x1b"
    records = lines(run / "records.jsonl")
    records[-1]["sample"] = evil
    records[-1]["metrics"] = {f"grad_norm/{evil}": 1.0}
    replace_lines(run, "records.jsonl", records)
    about = json.loads((run / "run.json").read_text()) | {"name": evil, "git_commit": evil, "versions": {evil: evil}}
    write_info(run / "run.json", about)
    (run / "config.toml").write_text(f"# {evil[:30]}\n")
    checks = lines(run / "parity.jsonl")
    finding = checks[0]["stages"][5] | {"tap": evil, "stage": evil, "ok": False, "note": evil}
    finding["measures"][0] |= {"basis": evil, "ok": False}
    origin = {"stage": evil, "tap": evil, "phase": evil, "layer": None}
    checks[0] |= {"stages": [finding], "not_covered": [evil], "verdict": "disagreed", "origin": origin}
    page = build_report(replace_lines(run, "parity.jsonl", checks))
    page.encode("utf-8")
    tags = Tags()
    tags.feed(page)
    assert tags.scripts == 2 and "img" not in tags.tags
    assert not [name for name, _ in tags.attributes if name.startswith("on")]
    assert "\x1b" not in page and "\u2028" not in embed(evil)


def test_the_page_loads_nothing(pages):
    tags = Tags()
    tags.feed(pages["faulty"])
    assert not {"link", "iframe", "object"} & set(tags.tags)
    links = [v for k, v in tags.attributes if k in ("src", "href", "action", "srcset")]
    assert all(link.startswith("#") for link in links)
    assert "url(" not in pages["faulty"].split("</style>")[0] and "fetch(" not in pages["faulty"]


@pytest.mark.parametrize("name", ["records.jsonl", "parity.jsonl"])
def test_a_torn_last_line_is_left_out_and_noted(tmp_path, name):
    run = write_run(tmp_path / "run", steps=30)
    with (run / name).open("a") as file:
        file.write('{"step": 31, "los')
    page = build_report(run)
    assert f"The last line of {name}" in page
    assert len(series(embedded(page), "loss", "training, every")["x"]) == 30


@pytest.mark.parametrize("name", ["records.jsonl", "parity.jsonl"])
def test_a_line_that_is_nothing_of_a_run_is_an_error_that_names_it(tmp_path, name):
    run = write_run(tmp_path / "run", steps=30)
    values = lines(run / name)
    values[1] = {"no": "step"}
    replace_lines(run, name, values)
    with pytest.raises(UserError, match=rf"{name}, line 2: ") as error:
        build_report(run)
    assert "\n" not in str(error.value)


def test_a_damaged_record_is_left_out_and_told(tmp_path):
    run = write_run(tmp_path / "run", steps=30)
    path = run / "records.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 7, "loss": ', b'"step": 7, "loss": 1', 1))
    told = []
    page = build_report(run, told.append)
    assert told == ["records.jsonl, line 7: damaged after it was written (its crc32 does not match); left out."]
    assert told[0] in page
    assert 7 not in series(embedded(page), "loss", "training, every")["x"]


def test_a_damaged_check_leaves_the_verdict_open(tmp_path):
    run = write_run(tmp_path / "run", steps=30)
    assert "Agreed" in build_report(run)
    path = run / "parity.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"agreed"', b'"Agreed"', 1))
    told = []
    page = build_report(run, told.append)
    assert told == ["parity.jsonl, line 1: damaged after it was written (its crc32 does not match); left out."]
    assert "Could not tell" in page and "besides 1 damaged, whose verdicts are not known" in page


def test_checks_that_a_resume_set_aside_leave_the_verdict_open(tmp_path):
    run = write_run(tmp_path / "run", steps=30)
    info = read_info(run / "run.json")
    write_info(run / "run.json", info | {"damaged": [{"path": "damaged/001", "records": [3, 4], "checks": [1]}]})
    page = build_report(run)
    assert "Could not tell" in page
    assert "Damaged lines were set aside in damaged/001 when the run was resumed: records 3 to 4; checks 1." in page


def test_damaged_settings_and_information_are_told(tmp_path):
    run = write_run(tmp_path / "run", steps=30)
    settings = (run / "config.toml").read_bytes()
    (run / "config.toml").write_bytes(settings.replace(b"0.003", b"0.002"))
    assert "optim.peak_lr was 0.003 and is 0.002" in build_report(run).replace("&#x27;", "'")
    (run / "config.toml").write_bytes(settings)
    info = (run / "run.json").read_bytes()
    (run / "run.json").write_bytes(info.replace(b"3f1c9a7b", b"3f1c9a7c"))
    page = build_report(run)
    assert "run.json is damaged or was edited" in page and "3f1c9a7c" not in page


def test_no_records_is_an_error(tmp_path):
    with pytest.raises(UserError, match="not a run directory"):
        build_report(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no records\.jsonl"):
        build_report(tmp_path)
    (tmp_path / "records.jsonl").write_text('{"step": 1, "lo')
    with pytest.raises(UserError, match="no complete record"):
        build_report(tmp_path)


def test_records_alone_are_enough(tmp_path):
    (tmp_path / "records.jsonl").write_bytes(sealed_line({"step": 1, "loss": 2.5}))
    page = build_report(tmp_path)
    assert tmp_path.name in page and "run.json: No such file" in page
    assert [c["id"] for c in embedded(page)["charts"]] == ["loss"]


def test_non_finite_values_survive(tmp_path):
    run = write_run(tmp_path / "run", steps=30)
    records = lines(run / "records.jsonl")
    records[4]["loss"], records[5]["grad_norm"], records[-1]["loss"] = math.nan, math.inf, math.nan
    replace_lines(run, "records.jsonl", records)
    checks = lines(run / "parity.jsonl")
    finding = checks[0]["stages"][5]
    finding["ok"] = False
    for measure, value in zip(finding["measures"], ("nan", "inf", "-inf"), strict=True):
        measure |= {"value": value, "ok": False}
    checks[0]["verdict"] = "disagreed"
    page = build_report(replace_lines(run, "parity.jsonl", checks))
    data = embedded(page)
    assert series(data, "loss", "training, every")["y"][4] == "nan"
    assert series(data, "grad", "global")["y"][5] == "inf"
    cells = Unpacked(data["heat"])
    row = cells.row_of(finding)
    got = [cells.measures[m["name"]][0][row, 0] for m in finding["measures"]]
    assert math.isnan(got[0]) and got[1:] == [math.inf, -math.inf] and cells.strain[row, 0] == 255
    assert "NaN" in page.split("<script")[0]


def test_a_step_written_twice_counts_once(tmp_path):
    run = write_run(tmp_path / "run", steps=30, checked=False)
    records = lines(run / "records.jsonl")
    again = [r | {"loss": 1.0} for r in records[19:]]
    page = build_report(replace_lines(run, "records.jsonl", [*records, *again]))
    got = series(embedded(page), "loss", "training, every")
    assert got["x"] == list(range(1, 31)) and got["y"][19:] == [1] * 11 and "11 steps stand" in page


@pytest.mark.parametrize("count", [1, 1500, 1501, 20_000])
def test_thinning_keeps_ends_extremes_and_breaks(count):
    values = np.random.default_rng(count).normal(size=count)
    middle = count // 2
    values[middle] = 50.0
    values[count // 3] = -50.0
    if count > 2:
        values[count // 4] = math.nan
    kept = thin(values)
    assert len(kept) <= POINTS and (np.diff(kept) > 0).all()
    assert {0, count - 1, int(np.nanargmax(values)), int(np.nanargmin(values))} <= set(kept.tolist())
    assert count <= 2 or count // 4 in kept


def test_smoothing_follows_a_constant_and_passes_over_nan():
    assert [y for _, y in smooth([(i, 3.0) for i in range(20)], 5)] == pytest.approx([3.0] * 20)
    assert [y for _, y in smooth([(1, math.nan), (2, 1.0), (3, math.nan)], 5)] == [1.0, 1.0]


def test_numbers_keep_their_decimal_digits():
    values = np.array([0.0, 9.9996, -1.2344e-7, 3.0, 123456.0, math.nan, math.inf, 7.0])
    present = np.array([True] * 7 + [False])
    exponent, low, high = (p.astype(int) for p in number_planes(values, present, 4))
    mantissa = low + 256 * high - 32768
    assert exponent.tolist()[0] == 4 and exponent.tolist()[5:] == [1, 2, 0]
    assert mantissa.tolist()[1:5] == [1000, -1234, 3000, 1235]
    assert (exponent[1:5] - 132).tolist() == [1, -7, 0, 5]


def large_checks(columns: int, rows: int) -> Checks:
    checks, rng = Checks(), np.random.default_rng(0)
    for column in range(columns):
        values = np.exp(rng.normal(0, 0.1, (rows, 3)))
        unequal = rng.random(rows).tolist()
        findings = [
            {
                "stage": f"s{i % 15}",
                "tap": f"blocks.{i // 15}.tap{i % 15}",
                "phase": "forward",
                "layer": i // 15,
                "scope": "local",
                "size": 1 << 20,
                "ok": True,
                "unequal": unequal[i],
                "measures": [
                    {"name": n, "value": v, "low": None, "high": 9.0, "basis": "b"}
                    for n, v in zip(("excess", "gain_difference", "twin_distance"), row, strict=True)
                ],
            }
            for i, row in enumerate(values.tolist())
        ]
        checks.add({"step": 50 * column, "verdict": "agreed", "stages": findings})
    return checks


def test_a_large_run_stays_small(monkeypatch):
    monkeypatch.setattr("lockstep.core.report.heatmap.FINE_VALUES", 0)
    rng = np.random.default_rng(0)
    records = [record(step, 20_000, rng) for step in range(1, 20_001)]
    curves = len(embed(charts(records, {}, {})))
    # A quarter of the most values, and 300 checks of 600 comparisons without them.
    monkeypatch.setattr("lockstep.core.report.heatmap.MAX_VALUES", MAX_VALUES // 4)
    few, many = encode(large_checks(60, 500)), encode(large_checks(300, 600))
    assert few is not None and many is not None and many["left_out"] == 0
    assert len(few["detailed"]) == 60 and len(many["detailed"]) == 55
    assert curves < 400_000
    assert curves + 4 * len(few["details"]) + 4 * len(many["cells"]) < 2_500_000


def test_beyond_the_limit_broken_columns_are_kept(monkeypatch):
    checks = large_checks(20, 30)
    checks.cells.state[13 * 30] = ORIGIN
    monkeypatch.setattr("lockstep.core.report.heatmap.MAX_VALUES", 5 * 30 * 3)
    heat = encode(checks)
    assert heat is not None and heat["left_out"] == 0 and len(heat["detailed"]) == 5 and 13 in heat["detailed"]
    Unpacked(heat)
    monkeypatch.setattr("lockstep.core.report.heatmap.MAX_CELLS", 10 * 30)
    heat = encode(checks)
    assert heat is not None and heat["left_out"] == 10 and 13 * 50 in heat["steps"]
    assert len(heat["detailed"]) == 5 and heat["steps"].index(13 * 50) in heat["detailed"]
    Unpacked(heat)


def test_write_is_whole_and_goes_where_it_is_told(runs, pages, tmp_path):
    assert write_report(runs["honest"]) == runs["honest"] / "report.html"
    assert (runs["honest"] / "report.html").read_text(encoding="utf-8") == pages["honest"]
    assert write_report(runs["honest"], tmp_path / "x.html") == tmp_path / "x.html"
    assert [p.name for p in tmp_path.iterdir()] == ["x.html"]


def test_text_for_readers():
    assert [number(v) for v in (0.0, 1.25, 1e-7, 123456.0, math.nan, -math.inf, None)] == [
        "0",
        "1.25",
        "1e-7",
        "123,456",
        "NaN",
        "-∞",
        "—",
    ]
    assert esc("<a\x00\u202e") == "&lt;a␀\ufffd"
