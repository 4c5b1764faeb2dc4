"""Write the questions of both tasks from Python's standard library: python_words.jsonl and python_text.jsonl.

    cd docs/examples/lm_eval && python make_questions.py

A question shows two lines of a module and the beginning of a third; of four endings one is the line's own, and three
are those of other lines. Endings are short, since the harness refuses one that is longer than the model's sequences.
"""

import json
import random
import sysconfig
from pathlib import Path

QUESTIONS, TEXTS, CHOICES, LONGEST = 200, 20, 4, 24


def lines_of(module: Path) -> list[str]:
    return [line for line in module.read_text(encoding="utf-8", errors="ignore").splitlines() if line.strip()]


def main() -> None:
    draw = random.Random(0)
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    cut = []
    for module in modules:
        lines = lines_of(module)
        for number in range(2, len(lines), 40):
            words = lines[number].split(" ")
            if len(words) > 3 and words[-1]:
                begin, end = " ".join(words[:-2]), " " + " ".join(words[-2:])
                if len(end) <= LONGEST and end.isascii():
                    cut.append(("\n".join([*lines[number - 2 : number], begin]), end))
    ends = sorted({end for _, end in cut})
    with open("python_words.jsonl", "w", encoding="utf-8") as file:
        for text, end in draw.sample(cut, QUESTIONS):
            choices = [end, *draw.sample([other for other in ends if other != end], CHOICES - 1)]
            draw.shuffle(choices)
            file.write(json.dumps({"text": text, "choices": choices, "answer": choices.index(end)}) + "\n")
    with open("python_text.jsonl", "w", encoding="utf-8") as file:
        for module in draw.sample(modules, TEXTS):
            file.write(json.dumps({"text": "\n".join(lines_of(module)[:40])}) + "\n")


if __name__ == "__main__":
    main()
