"""No module imports itself by way of others, not even for a type checker."""

from __future__ import annotations

from collections.abc import Mapping

import grimp


def circles(imports: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that reach each other along imports, which are more than one or reach themselves."""
    reached = {module: _reach(module, imports) for module in imports}
    found = {frozenset({m, *(o for o in reached[m] if m in reached[o])}) for m in imports if m in reached[m]}
    return sorted(map(set, found), key=sorted)


def _reach(module: str, imports: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = [module]
    while todo:
        for other in imports[todo.pop()] - found:
            found.add(other)
            todo.append(other)
    return found


def test_there_is_no_circle():
    graph = grimp.build_graph("lockstep", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert sum(map(len, imports.values())) > 2000
    assert circles(imports) == []


def test_a_circle_of_any_length_is_found():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert circles(imports) == [{"a", "b", "c"}]
    assert circles({**imports, "d": {"d"}}) == [{"a", "b", "c"}, {"d"}]
    assert circles({**imports, "c": {"d"}}) == []
