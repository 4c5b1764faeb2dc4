"""Kubernetes examples are valid by the schemas of Job, Service and JobSet, and agree with themselves."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from lockstep.core.errors import UserError
from lockstep.core.sweep.space import read_space
from lockstep.parity_tests.cluster.commands import EXAMPLES, IN_THE_CONTAINER, in_words, parsed, torchrun_problems
from lockstep.parity_tests.repository import REPO
from lockstep.scripts import cli

FILES = {path.name: path for path in sorted((EXAMPLES / "kubernetes").glob("*.yaml"))}
KINDS = {"Job": "io.k8s.api.batch.v1.Job", "Service": "io.k8s.api.core.v1.Service", "JobSet": "JobSet"}
Object = dict[str, Any]


def objects(name: str) -> list[Object]:
    return list(yaml.safe_load_all(FILES[name].read_text()))


@functools.cache
def definitions() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("schemas").joinpath("kubernetes.json").read_text())


def check(thing: Object) -> None:
    """Raise jsonschema.ValidationError or KeyError unless the object is valid by the schema of its kind."""
    schema = {**definitions(), "$ref": f"#/$defs/{KINDS[thing['kind']]}"}
    jsonschema.Draft202012Validator(schema).validate(thing)


def job_of(name: str) -> tuple[Object, str]:
    """Return the specification of the example's job, and the name by which its first pod is reached."""
    main = objects(name)[-1]
    title = main["metadata"]["name"]
    if main["kind"] == "Job":
        return main["spec"], f"{title}-0.{main['spec']['template']['spec']['subdomain']}"
    (node,) = main["spec"]["replicatedJobs"]
    return node["template"]["spec"], f"{title}-{node['name']}-0-0.{title}"


def container_of(name: str) -> Object:
    (container,) = job_of(name)[0]["template"]["spec"]["containers"]
    return container


# Values of the containers as the API server and their programs read them; in the schemas these are plain text.
QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
RESOURCES = {"cpu", "memory", "nvidia.com/gpu"}
VARIABLES = {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "RAY_AUTH_TOKEN", "RAY_START"}
IMAGE = "registry.example/lockstep:latest"


def problems(things: Sequence[Object]) -> Iterator[str]:
    """Yield what is wrong with an example beyond its schemas."""
    main = things[-1]
    job = main["spec"] if main["kind"] == "Job" else main["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    if container["image"] != IMAGE:
        yield f"an image of another name: {container['image']}"
    if pod["restartPolicy"] not in ("Never", "OnFailure"):
        yield f"no restart policy of a job: {pod['restartPolicy']}"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    shared = volumes.get(mounts.get("/dev/shm", ""), {}).get("emptyDir", {})
    if shared.get("medium") != "Memory":
        yield "no memory at /dev/shm, through which nccl and Ray pass data"
    for amounts in (*container["resources"].values(), shared):
        for name, amount in amounts.items():
            if amounts is not shared and name not in RESOURCES:
                yield f"no resource: {name}"
            elif name != "medium" and not QUANTITY.fullmatch(str(amount)):
                yield f"no quantity: {name} {amount}"
    for variable in container["env"]:
        if variable["name"] not in VARIABLES:
            yield f"a variable that nothing reads: {variable['name']}"
    for path in [container["workingDir"], *re.findall(r"(?m)(?:^|=)(/\S+)", "\n".join(container["command"]))]:
        if path.startswith(IN_THE_CONTAINER):
            if not (REPO / path.removeprefix(IN_THE_CONTAINER)).is_file():
                yield f"not in the image: {path}"
        elif not any(path == place or path.startswith(f"{place}/") for place in mounts):
            yield f"on no volume: {path}"
    if container["command"][0] == "torchrun":
        yield from torchrun_problems(container["command"][1:])
    for thing in things[:-1]:
        if thing["spec"]["clusterIP"] != "None":
            yield f"names of pods need clusterIP None: {thing['spec']['clusterIP']}"


def test_there_is_one_for_each_task() -> None:
    assert set(FILES) == {"train.yaml", "train-indexed-job.yaml", "prepare.yaml", "sweep.yaml"}


@pytest.mark.parametrize("name", FILES)
def test_it_is_valid(name: str) -> None:
    for thing in objects(name):
        check(thing)


def change(path: str, value: Any) -> Callable[[Object], None]:
    def planted(changed: Object) -> None:
        thing: Any = changed
        *places, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for place in places:
            thing = thing[place]
        thing[last] = value

    return planted


POD = "spec.replicatedJobs.0.template.spec.template.spec"
PLANTED = {
    "a field of another name": change("spec.failurePolicy.maxRestart", 5),
    "a version of JobSet that is none": change("apiVersion", "jobset.x-k8s.io/v1"),
    "a number that is text": change("spec.replicatedJobs.0.template.spec.parallelism", "two"),
    "a replicated job without a template": change("spec.replicatedJobs.0", {"name": "node"}),
    "a restart policy of another place": change("spec.replicatedJobs.0.template.spec.restartPolicy", "Never"),
    "a command that is one text": change(f"{POD}.containers.0.command", "torchrun"),
    "a variable that is a number": change(f"{POD}.containers.0.env.0.value", 1),
    "a volume of a kind that is none": change(f"{POD}.volumes.1", {"name": "shm", "emptydir": {}}),
    "a mount without a place": change(f"{POD}.containers.0.volumeMounts.0", {"name": "shared"}),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_mistake_is_found(fault: str) -> None:
    (thing,) = objects("train.yaml")
    changed = copy.deepcopy(thing)
    PLANTED[fault](changed)
    assert changed != thing
    with pytest.raises(jsonschema.ValidationError):
        check(changed)


@pytest.mark.parametrize("name", FILES)
def test_nothing_beyond_the_schemas_is_wrong(name: str) -> None:
    assert list(problems(objects(name))) == []


# Text of an example, what is planted in its place, and what must be found.
BEYOND = {
    "mountPath: /shared": ("mountPath: /shard", "on no volume: /shared/"),
    "mountPath: /dev/shm": ("mountPath: /dev/shn", "no memory at /dev/shm"),
    "medium: Memory": ("medium: ''", "no memory at /dev/shm"),
    "workingDir: /shared": ("workingDir: /shard", "on no volume: /shard"),
    "=/shared/": ("=/shard/", "on no volume: /shard/"),
    "/opt/lockstep/configs/": ("/opt/lockstep/config/", "not in the image: /opt/lockstep/config/"),
    "memory: ": ("memory: 1GB # ", "no quantity: memory 1GB"),
    "cpu: ": ("cpus: ", "no resource: cpus"),
    "restartPolicy: ": ("restartPolicy: Always # ", "no restart policy of a job: Always"),
    "lockstep:latest": ("lockstp:latest", "an image of another name"),
    "name: RAY_START": ("name: RAY_BEGIN", "a variable that nothing reads: RAY_BEGIN"),
    "name: OMP_NUM_THREADS": ("name: OMP_NUM_THREAD", "a variable that nothing reads: OMP_NUM_THREAD"),
    "nvidia.com/gpu:": ("nvidia.com/gpus:", "no resource: nvidia.com/gpus"),
    "--rdzv-backend": ("--rdzv-backends", "no words of torchrun"),
    "--max-restarts=3": ("--max-restarts=three", "no words of torchrun"),
    "clusterIP: None": ("clusterIP: Nil", "names of pods need clusterIP None: Nil"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_mistake_beyond_the_schemas_is_found(name: str) -> None:
    text = FILES[name].read_text()
    planted = {before: change for before, change in BEYOND.items() if before in text}
    assert len(planted) >= 10
    for before, (after, said) in planted.items():
        found = list(problems(list(yaml.safe_load_all(text.replace(before, after)))))
        assert any(problem.startswith(said) for problem in found), (before, found)


def test_every_mistake_stands_in_an_example() -> None:
    texts = "".join(path.read_text() for path in FILES.values())
    assert all(before in texts for before in BEYOND)


def test_and_in_a_job_and_a_service() -> None:
    service, job = objects("train-indexed-job.yaml")
    for thing, path, value in ((service, "spec.clusterIp", "None"), (job, "spec.completionmode", "Indexed")):
        change(path, value)(thing)
        with pytest.raises(jsonschema.ValidationError):
            check(thing)


@pytest.mark.parametrize("name", FILES)
def test_its_numbers_and_names_agree(name: str) -> None:
    """Pods, names, volumes and GPUs stand in several places."""
    job, first = job_of(name)
    pod, container = job["template"]["spec"], container_of(name)
    words = container["command"]
    assert job["parallelism"] == job["completions"] and job["completionMode"] == "Indexed"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
    if words[0] == "torchrun":
        assert f"--nnodes={job['completions']}" in words and f"--nproc-per-node={gpus}" in words
        assert f"--train.ranks={job['completions'] * gpus}" in words
        assert any(word.startswith(f"--rdzv-endpoint={first}:") for word in words)
        assert f"--rdzv-id={objects(name)[-1]['metadata']['name']}" in words
    else:
        assert words[:2] == ["bash", IN_THE_CONTAINER + "docs/examples/cluster/on_ray.sh"]
        assert words[2].startswith(f"{first}:") and words[3] == str(job["completions"])
        (start,) = [each["value"] for each in container["env"] if each["name"] == "RAY_START"]
        (secret,) = [each["valueFrom"] for each in container["env"] if each["name"] == "RAY_AUTH_TOKEN"]
        assert f"secret generic {secret['secretKeyRef']['name']} --from-literal=token=" in FILES[name].read_text()
        assert f"--num-cpus={container['resources']['requests']['cpu']}" in start
        assert (f"--num-gpus={gpus}" in start) == bool(gpus)
    assert (REPO / "docs/examples/cluster/on_ray.sh").is_file()


def test_the_service_has_the_name_and_the_job_that_the_pods_have() -> None:
    service, job = objects("train-indexed-job.yaml")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]


@pytest.mark.parametrize("name", FILES)
def test_its_command_is_one_of_lockstep(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = in_words(container_of(name)["command"])
    if words[0] not in {*cli.COMMANDS, *cli.GROUPS}:
        pytest.skip(f"`lockstep {words[0]}` is not there yet")
    options, config = parsed(words, monkeypatch)
    assert config.data.path.startswith("/shared/")
    if words[0] == "sweep":
        assert {one.key for one in read_space(options.vary)} == {"optim.peak_lr", "optim.weight_decay"}
        assert options.gpus <= container_of(name)["resources"]["limits"]["nvidia.com/gpu"]


def test_an_option_that_is_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    words = in_words(container_of("prepare.yaml")["command"])
    for planted in ("--data.sources=/shared", "--engines=ray", "--model.vocab-size=many"):
        with pytest.raises(UserError):
            parsed([*words, planted], monkeypatch)
    with pytest.raises(UserError):
        parsed([word.replace("llama-1b", "llama-2b") for word in words], monkeypatch)
