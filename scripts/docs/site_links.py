"""Fit pages of docs/ to the site, as a hook of mkdocs: source links become text, lists nest, options stay whole.

The site holds docs/ alone.

parity_tests/house/test_links.py holds the same links to the files, where the pages are read in the repository.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_FENCE = re.compile(r"^ *```.*?^ *```", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
# The begin of an item in a list within a list. GitHub nests it at two spaces, Python-Markdown at four.
_NESTED = re.compile(r"^ {2,3}(?=[-*] |\d+\. )", re.M)

# Inline code, which a browser may break behind any hyphen, and an option in it.
_CODE = re.compile(r"<pre.*?</pre>|<code>(.*?)</code>", re.S)
_WHOLE = r'<span class="option">\g<0></span>'
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w.-]*")


def on_page_content(html: str, **_: Any) -> str:
    """Return the page's HTML; no line is broken within an option such as `--optim.peak-lr`."""

    def kept(code: re.Match[str]) -> str:
        if code[1] is None:
            return code[0]
        return f"<code>{_OPTION.sub(_WHOLE, code[1])}</code>"

    return _CODE.sub(kept, html)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page's Markdown; `page.file.src_uri` is its path below docs/."""
    folder = posixpath.dirname(page.file.src_uri)
    pieces, end = [], 0
    for fence in _FENCE.finditer(markdown):
        pieces += [_inside(markdown[end : fence.start()], folder), fence[0]]
        end = fence.end()
    return "".join([*pieces, _inside(markdown[end:], folder)])


def _inside(text: str, folder: str) -> str:
    """Replace each link of `text` that leaves docs/ by its words, and indent lists within lists."""

    def kept(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        # The site has no page for a folder.
        leaves = target.startswith("..") or not posixpath.splitext(target)[1]
        return link[1] if leaves else link[0]

    return _LINK.sub(kept, _NESTED.sub("    ", text))
