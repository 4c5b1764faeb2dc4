"""Docstrings, comments and messages are plain English: the subject or the verb comes first, and code is no person.

This file denies a few words in the sources and in the tests. It does not read Markdown, nor names. In the sources, the
docstring of a function begins with a verb of verbs.txt (ruff's D401 holds the form of verbs, and lets nouns pass); the
docstring of a class or a property states what it is.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.parity_tests.repository import REPO, parsed

ROOMS = ("core", "torch_backend", "jax_backend", "scripts", "lockstep", "parity_tests", "docs")
# A sentence that begins with one of these has its subject late: "Of the rest one is measured", "What differs is told".
FIRST_WORDS = "Of|What|Whose|Whether|Who|That"
# Verbs of persons. Code prints, reports, states, names, returns, requires, reads, searches, supports, has or yields.
PERSONS = (
    r"says|(?:is|are|was|were|be|been) (?:told|said)|gives? way|looks|waits? for nobody|asks|wants|likes|believes"
    r"|knows? (?:no|nothing|nobody|of)"
)
# A sentence begins a text or a paragraph, or follows the end of another one.
DENIED = re.compile(rf"(?:\A|(?<=[.!?:] )|(?<=[.!?]\) )|(?<=\n))(?:{FIRST_WORDS})\b|\b(?:{PERSONS})\b")
ANY = re.compile(rf"\b(?:{FIRST_WORDS}|{PERSONS})\b|told|said|knows?")
# The verbs with which the docstring of a function begins. A verb that is missing is added to the file.
VERBS = frozenset((Path(__file__).parent / "verbs.txt").read_text(encoding="utf-8").split())
# Verbs that are nouns as well are nouns before one of these: "Time of a step", "Step → file".
AFTER_NOUNS = (["of"], ["→"])
# The docstring of a class or a property that begins with one of these does not state what it is.
NO_SUBJECT = re.compile(
    "About|After|Although|As|At|Because|Before|By|Everything|For|From|How|If|In|Its|Nothing|On|One|Over|So|Something|"
    "Under|Until|When|Where|Whether|Which|While|Why|With|Without|X"
)
FIELD = re.compile("[a-z_]+:")
MODULE = "python -m lockstep."
# Environment variables may precede a command, and an explanation follows it.
OF_ITS_OWN = re.compile(rf"(?:    )?([A-Z_]+=\S+ )*{re.escape(MODULE)}((?!{re.escape(MODULE)}).)*")
# These files have the words and the planted sentences: this one, and the one that reads the pages.
OWN = ("parity_tests/house/test_prose.py", "parity_tests/house/test_pages_prose.py")

Text = tuple[int, str]


def paragraphs(text: str) -> str:
    """Join the lines of each paragraph, so that a sentence over two lines is one text; paragraphs stay apart."""
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n".join(part for part in parts if part)


def strings(source: str) -> Iterator[Text]:
    """Yield (line, text) of every docstring, and of every other string with a space in it."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, paragraphs(node.value)


def comments(source: str) -> Iterator[Text]:
    """Yield (line, text) of every comment; lines of comments below each other are one text."""
    lines, begun, block = source.splitlines(), 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, text = token.start[0], token.string.lstrip("# ")
        alone = lines[row - 1].lstrip().startswith("#")
        if block and not (alone and row == begun + len(block)):
            yield begun, paragraphs(" ".join(block))
            block = []
        begun = begun if block else row
        block.append(text)
    if block:
        yield begun, paragraphs(" ".join(block))


def denied(source: str) -> list[tuple[int, str]]:
    """Return (line, the denied word with some words around it) of each text that has one."""
    if not ANY.search(source):
        return []
    return [
        (line, text[max(0, match.start() - 40) : match.end() + 40])
        for line, text in (*strings(source), *comments(source))
        for match in DENIED.finditer(text)
    ]


def is_property(node: ast.AST) -> bool:
    """Return whether a node is a property: its docstring is that of a value."""
    return any("property" in ast.unparse(found) for found in getattr(node, "decorator_list", ()))


def misbegun(source: str) -> list[tuple[int, str]]:
    """Return (line, first words) of each docstring of a function without a verb, or of a class without a subject."""
    found = []
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if not (words := (ast.get_docstring(node) or "").split()):
            continue
        first = words[0].rstrip(".,;:")
        if isinstance(node, ast.ClassDef) or is_property(node):
            wrong = bool(NO_SUBJECT.fullmatch(first) or FIELD.fullmatch(words[0]))
        else:
            wrong = first not in VERBS or words[1:2] in AFTER_NOUNS
        if wrong:
            found.append((node.body[0].lineno, " ".join(words[:6])))
    return found


def crowded(source: str) -> list[str]:
    """Return the lines of a module's docstring in which a command does not begin a line of its own."""
    text = re.sub("`[^`]*`", "", ast.get_docstring(parsed(source), clean=False) or "")
    return [line for line in text.splitlines() if MODULE in line and not OF_ITS_OWN.fullmatch(line)]


def sources(root: Path) -> Iterator[Path]:
    """Yield the Python files of the rooms, each once: links between rooms are left out."""
    for room in ROOMS:
        yield from (
            path for path in sorted((root / room).rglob("*.py")) if path.relative_to(root).as_posix() not in OWN
        )


def test_no_text_has_a_denied_word() -> None:
    found = [
        f"{path.relative_to(REPO)}:{line}: …{words}…"
        for path in sources(REPO)
        for line, words in denied(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(["write it with the subject first, and code as no person:", *found])


def test_docstrings_begin_with_a_verb_or_state_a_thing() -> None:
    found = [
        f"{path.relative_to(REPO)}:{line}: {words}…"
        for path in sources(REPO)
        if path.relative_to(REPO).parts[0] != "parity_tests"
        for line, words in misbegun(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(["begin with a verb of verbs.txt, or state what the class or property is:", *found])


def test_commands_in_docstrings_of_modules_have_lines_of_their_own() -> None:
    found = [
        f"{path.relative_to(REPO)}: {line}"
        for path in sources(REPO)
        for line in crowded(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(["write each command on a line of its own:", *found])


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("python -m lockstep.a", False),
        ("    docs/a.md python -m lockstep.a --page", True),
        ("    python -m lockstep.a    the rows python -m lockstep.a --page    the page", True),
        ("    python -m lockstep.a    the rows", False),
        ("    A=1 python -m lockstep.a", False),
        ("Made by `python -m lockstep.a`.", False),
    ],
)
def test_a_command_within_a_line_is_seen(line: str, wrong: bool) -> None:
    assert bool(crowded(f'"""Study it.\n\n{line}\n"""\n')) == wrong


@pytest.mark.parametrize(
    "text",
    [
        "One line of the table.",
        "How often a host waits.",
        "Bytes that a step needs.",
        "Tokens, targets and weights.",
        "See `Store`.",
        "As `Store.put`.",
        "Σ weight·loss / total.",
        "x (…, D) → (…, D).",
        "`step`, and its gradients.",
        "(layers,) float64.",
        "rows: gives the sequences.",
        "Time of a step.",
        "Step → file of what was observed.",
    ],
)
def test_a_docstring_without_a_verb_is_seen(text: str) -> None:
    assert len(misbegun(f'def f():\n    """{text}"""\n')) == 1
    assert len(misbegun(f'class C:\n    async def f(self):\n        """{text}"""\n')) == 1


@pytest.mark.parametrize(
    "text", ["How a rank reads.", "Where evidence goes.", "One run.", "Everything read.", "X (…, D).", "saved: bytes."]
)
@pytest.mark.parametrize("form", ["class C:\n    {}\n", "class C:\n    @property\n    def f(self):\n        {}\n"])
def test_a_docstring_without_a_subject_is_seen(text: str, form: str) -> None:
    assert len(misbegun(form.format(f'"""{text}"""'))) == 1


def test_docstrings_of_functions_classes_and_properties_are_left_alone() -> None:
    source = """
    class Store:
        '''A place for evidence.'''

        def put(self):
            '''Implement `Store.put`.'''

        def both(self):
            '''Replay, print, and write the file.'''

        @property
        def size(self):
            '''Bytes in it.'''
    """
    assert not misbegun(textwrap.dedent(source))


def test_the_rooms_are_read() -> None:
    read = {path.relative_to(REPO).parts[0] for path in sources(REPO)}
    assert read == set(ROOMS)


@pytest.mark.parametrize(
    "text",
    [
        "Of the rest one is measured at a time.",
        "The best is kept. Of the rest one is measured.",
        "Sketches add up. What is not finite\nin x is not finite in its bucket.",
        "Return it.\n\nWhether two threads meet depends on the machine.",
        "Whose part this is, of how many.",
        "Rank 0 waits (for the others). Who still reads it has come here too.",
        "Raises UserError: That a refused operation ends the run is seen elsewhere.",
        "The line says why.",
        "JAX is told to use the CPU.",
        "It must be\ntold before it starts.",
        "The worker gives way to the trainer.",
        "The judge looks at nothing else.",
        "One that hangs waits for nobody.",
        "A check asks for norms.",
        "Skipped checks are\nsaid once.",
        "The loaders know no ranks.",
        "A GPU likes few kernels.",
    ],
)
@pytest.mark.parametrize("form", ["docstring", "comment", "message"])
def test_a_planted_sentence_is_seen(text: str, form: str) -> None:
    forms = {
        "docstring": f'def f():\n    """{text}"""\n',
        "comment": "\n".join(f"    # {line}" for line in re.sub("\n+", "\n", text).split("\n")),
        "message": f"raise ValueError({re.sub(chr(10) + '+', ' ', text)!r})\n",
    }
    source = forms[form]
    if form == "comment":
        source = f"def f():\n{source}\n    return 1\n"
    assert len(denied(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        'x = "says"\n',  # one word: a name
        "said = looks = asks = wants = 1\n",
        "# The path said above. The shapes are known, and nobody knows the rest.\n",
        '"""Return the rank whose part this is, what it holds, and whether it is whole."""\n',
        "# The value that was asked for.\n",
    ],
)
def test_an_honest_text_is_left_alone(source: str) -> None:
    assert not denied(source)


def test_notes_at_the_ends_of_lines_are_texts_by_themselves() -> None:
    assert denied("x = 1  # one that\ny = 2  # Of these\n") == [(2, "Of these")]
