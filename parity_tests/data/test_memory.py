"""How much memory there could be."""

import resource

from lockstep.core.data import memory


def test_the_least_limit_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    machine = memory.total_memory_bytes()
    assert machine > 2**28
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.total_memory_bytes() == machine
    (tmp_path / "memory.max").write_text("200000000\n")
    assert memory.total_memory_bytes() == 200_000_000
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100_000_000, resource.RLIM_INFINITY))
    assert memory.total_memory_bytes() == 100_000_000
