"""Make the schemas of this folder from packages unpacked into one folder (README.md has the commands).

    python parity_tests/cluster/schemas/make.py FOLDER

The schemas have no descriptions. Kubernetes' definitions are those that a Job or a Service refers to, no others.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
KUBERNETES = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict/_definitions.json"
# Name of a model in kubeflow-trainer-api → name of the same definition in Kubernetes.
THEIRS = {
    "IoK8sApiBatchV1JobTemplateSpec": "io.k8s.api.batch.v1.JobTemplateSpec",
    "IoK8sApimachineryPkgApisMetaV1ObjectMeta": "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta",
}
ROOTS = ("io.k8s.api.batch.v1.Job", "io.k8s.api.core.v1.Service")


def main(packages: Path) -> None:
    """Write kubernetes.json and skypilot.json."""
    sys.path.insert(0, str(packages))
    write("kubernetes.json", kubernetes(json.loads((packages / KUBERNETES).read_text())["$defs"]))
    write("skypilot.json", skypilot())


def kubernetes(known: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas of Job, Service and JobSet, with all definitions that they refer to."""
    found: dict[str, Any] = {}
    wanted = [*ROOTS, *THEIRS.values()]
    while wanted:
        if (name := wanted.pop()) not in found:
            found[name] = json.loads(json.dumps(plain(known[name])).replace("/api/_definitions.json#", "#"))
            wanted.extend(ref.rpartition("/")[2] for ref in refs(found[name]))
    found |= jobset()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": found}


def jobset() -> dict[str, Any]:
    """Return the definitions of JobSet, from the pydantic models of kubeflow-trainer-api."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    schema = plain(JobsetV1alpha2JobSet.model_json_schema(ref_template="#/$defs/{model}"))
    ours = {
        name: part for name, part in schema.pop("$defs").items() if name.startswith("Jobset") and "Status" not in name
    } | {"JobSet": schema}
    for part in ours.values():
        part["additionalProperties"] = False
    text = json.dumps(ours)
    for model, name in THEIRS.items():
        text = text.replace(f"#/$defs/{model}", f"#/$defs/{name}")
    ours = json.loads(text)
    # Kubernetes writes the status, not the user; its schema refers to many more definitions.
    del ours["JobSet"]["properties"]["status"]
    ours["JobSet"]["properties"] |= {
        "apiVersion": {"enum": ["jobset.x-k8s.io/v1alpha2"]},
        "kind": {"enum": ["JobSet"]},
    }
    ours["JobSet"]["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return ours


def skypilot() -> dict[str, Any]:
    """Return SkyPilot's schemas of a task and its resources. Modules that they import but do not need are stubs."""
    for name in ("sky", "sky.utils"):
        package = ModuleType(name)
        package.__path__ = [str(Path(sys.path[0], *name.split(".")))]
        package.__version__, package.__root_dir__ = "0.0.0", package.__path__[0]  # type: ignore[attr-defined]
        sys.modules[name] = package
    modes = ["jobs_and_ssh", "jobs", "none"]
    autostop = ModuleType("sky.skylet.autostop_lib")
    autostop.AutostopWaitFor = SimpleNamespace(supported_modes=lambda: modes)  # type: ignore[attr-defined]
    sys.modules["sky.skylet.autostop_lib"] = autostop
    from sky.utils import schemas

    # The settings of SkyPilot that a task may override: any object.
    schemas._task_config_schema = lambda: {"type": "object"}
    return {"task": plain(schemas.get_task_schema()), "resources": plain(schemas.get_resources_schema())}


def plain(schema: Any) -> Any:
    """Return a schema without its descriptions, titles and defaults."""
    if isinstance(schema, list):
        return [plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, part in schema.items():
        if key in ("properties", "definitions", "$defs", "patternProperties") and isinstance(part, dict):
            kept[key] = {name: plain(inner) for name, inner in part.items()}
        elif key not in ("description", "title", "default", "example") and not key.startswith("x-kubernetes"):
            kept[key] = plain(part)
    return kept


def refs(schema: Any) -> list[str]:
    """Return all references of a schema."""
    if isinstance(schema, list):
        return [ref for part in schema for ref in refs(part)]
    if not isinstance(schema, dict):
        return []
    own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
    return own + [ref for part in schema.values() for ref in refs(part)]


def write(name: str, content: dict[str, Any]) -> None:
    """Write a schema to a file, one definition per line."""
    (HERE / name).write_text(json.dumps(content, sort_keys=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
