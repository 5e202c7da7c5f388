"""The manifests' own command, under exactly the environment that their controllers give, on separate nodes.

Every run is of the manifest as it stands but for variables that choose a small task and short cadences, as a
user would set them. Pods are namespaces with addresses of their own (`simulated_cluster`).
"""

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from simulated_cluster import REPOSITORY, Cluster, Pod
from small_jobs import RUN_SECONDS, Run

from tandem_k8s.documents import find


@dataclass(frozen=True)
class Shape:
    """One way a cluster runs the job; `victim` is the pod that is killed in the second run."""

    manifest: str
    platform: str
    first: str
    victim: str
    nproc: int = 1


SHAPES = [
    Shape("pytorchjob", "kubeflow-v1", "tandem-master-0", "tandem-worker-1"),
    Shape("pytorchjob", "kubeflow-v1", "tandem-master-0", "tandem-master-0", nproc=2),
    Shape("elastic", "kubeflow-v1", "tandem-worker-0", "tandem-worker-1"),
    Shape("trainjob", "kubeflow-v2", "tandem-node-0-0", "tandem-node-0-2"),
    Shape("jobset", "jobset", "tandem-node-0-0", "tandem-node-0-0"),
    Shape("indexed-job", "indexed-job", "tandem-0", "tandem-0"),
]


def warnings(pod: Pod) -> list[str]:
    """Lines of its log that are no plain news of tandem's: warnings, and whatever a library has printed."""
    news = [line for line in pod.output().splitlines() if line.startswith("{")]
    others = [line for line in pod.output().splitlines() if not line.startswith("{")]
    return others + [line for line in news if json.loads(line)["level"] != "info"]


@pytest.mark.core
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "shape",
    [
        SHAPES[0],
        pytest.param(SHAPES[1], marks=pytest.mark.soak),
        *(pytest.param(shape, marks=pytest.mark.slow) for shape in (*SHAPES[2:4], SHAPES[5])),
        pytest.param(SHAPES[4], marks=pytest.mark.soak),  # a TrainJob's controller makes a JobSet
    ],
    ids=lambda shape: f"{shape.manifest}-{shape.nproc}",
)
def test_trains_to_completion_without_a_warning_and_again_when_a_pod_is_killed(
    cluster: Callable[[], Cluster], shape: Shape
) -> None:
    secret = {"TANDEM_JOB_SECRET": "what only these pods know"}  # as from the Secret tandem-job
    steps = {"TANDEM_STEPS": "40", "TANDEM_TASK__DELAY": "0.05", **secret}
    calm = Run(cluster(), shape.manifest, shape.nproc, **steps)
    calm.controller.start()
    undisturbed = calm.finish()
    assert undisturbed["global_step"] == 40
    assert (undisturbed["platform"], undisturbed["nodes"]) == (shape.platform, 3)
    assert undisturbed["world_size"] == 3 * shape.nproc
    with_rank_0 = [pod.plan.name for pod in calm.cluster.pods if "rank 0 of" in pod.output()]
    assert set(with_rank_0) == {shape.first}
    assert [code for _, code in calm.controller.codes] == [0] * len(calm.controller.codes)
    assert [line for pod in calm.cluster.pods for line in warnings(pod)] == []

    run = Run(cluster(), shape.manifest, shape.nproc, TANDEM_CHECKPOINT_EVERY="5", **steps)
    run.controller.start()
    run.until(lambda: bool(run.steps_saved()), "a checkpoint")
    victim = run.controller.current[shape.victim]
    victim.send(signal.SIGKILL)
    summary = run.finish()
    assert (shape.victim, 137) in run.controller.codes
    again = run.controller.current[shape.victim]
    assert again.address != victim.address
    assert summary["global_step"] == 40
    if shape.manifest == "elastic":  # the others do not wait for it, and sums are made in another order
        assert summary["world_size"] in (2, 3)
    else:
        assert again.code == 0
        assert summary["world_size"] == 3 * shape.nproc
        assert summary["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("manifest", "victim"),
    [("pytorchjob", "tandem-worker-0"), pytest.param("indexed-job", "tandem-1", marks=pytest.mark.soak)],
)
def test_a_spare_pod_takes_the_place_of_a_killed_one(
    cluster: Callable[[], Cluster], manifest: str, victim: str
) -> None:
    never = {"TANDEM_CHECKPOINT_EVERY": "never", "TANDEM_STEPS": "200", "TANDEM_TASK__DELAY": "0.05"}
    run = Run(cluster(), manifest, TANDEM_SPARES="1", **never)
    events = run.folder / "events.jsonl"
    run.controller.start()
    run.until(lambda: run.step_logged() >= 10 and "a spare" in run.controller.logs(), "step 10, and a spare")
    run.controller.current[victim].send(signal.SIGKILL)
    run.until(lambda: "node_replaced" in events.read_text(), "the spare has the place of the lost node")
    summary = run.finish()
    lines = map(json.loads, events.read_text().splitlines())
    replaced = [(each["node"], each["by"]) for each in lines if each["kind"] == "node_replaced"]
    assert replaced == [(1, 2)]
    assert (summary["world_size"], summary["global_step"], summary["restarts"]) == (2, 200, 1)
    assert run.steps_saved() == [200], "no checkpoint was read: there was none"
    assert (victim, 137) in run.controller.codes and run.controller.current[victim].code == 0


PLAIN = ("    optimizer.zero_grad()", "    time.sleep(0.02)\n        optimizer.zero_grad()")
OWN_LOOP = ("    loss_c =", "    time.sleep(0.1)\n    loss_c =")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["plain", pytest.param("own loop", marks=pytest.mark.soak)])
def test_a_script_goes_on_when_a_pod_is_killed(cluster: Callable[[], Cluster], kind: str) -> None:
    run = Run(cluster(), "script", TANDEM_CHECKPOINT_EVERY="5", TANDEM_BATCH_SIZE="96")
    folder, saved = run.cluster.folder / "script", run.folder / "snapshot.pt"
    folder.mkdir()
    text = find(run.controller.documents, "ConfigMap")["data"]["train.py"].replace(*PLAIN)
    if kind == "own loop":
        text = (REPOSITORY / "examples/gan.py").read_text().replace(*OWN_LOOP)
    assert "time.sleep" in text
    (folder / "train.py").write_text(f"import time\n{text}")
    run.cluster.volumes[str(folder)] = "/script"
    run.controller.start()
    run.until(lambda: saved.exists() or bool(run.steps_saved()), "something that was saved")
    run.controller.current["tandem-worker-1"].send(signal.SIGKILL)
    assert run.controller.run(RUN_SECONDS) == "Succeeded", run.controller.logs()
    assert ("tandem-worker-1", 137) in run.controller.codes
    log = (run.folder / "log/rank-0.log").read_text()
    if kind == "plain":
        assert "resuming after epoch" in log and log.count("epoch 10: loss") == 1
    else:
        summary = run.summary()
        assert (summary["state"], summary["global_step"]) == ("finished", 30)
        assert summary["platform"] == "kubeflow-v1" and summary["restarts"] >= 1


@pytest.mark.timeout(240)
def test_draining_the_master_leaves_a_checkpoint_and_143_and_the_job_goes_on(
    cluster: Callable[[], Cluster],
) -> None:
    run = Run(
        cluster(), "pytorchjob", TANDEM_STEPS="60", TANDEM_TASK__DELAY="0.05", TANDEM_CHECKPOINT_EVERY="never"
    )
    run.controller.start()
    run.until(lambda: run.step_logged() >= 10, "step 10")
    assert run.steps_saved() == []
    master = run.controller.current["tandem-master-0"]
    master.send(signal.SIGTERM)
    run.until(lambda: master.code is not None, "the drained master's end")
    assert master.code == 143, master.output()
    (saved,) = run.steps_saved()
    assert saved >= 10
    assert run.summary()["state"] == "stopped"
    summary = run.finish()
    assert (summary["resumed_from_step"], summary["global_step"]) == (saved, 60)
    # Never Succeeded before the end, and no pod ever ended with 0 while there was training left.
    assert run.controller.states.index("Succeeded") == len(run.controller.states) - 1
    zeros = [name for name, code in run.controller.codes if code == 0]
    assert len(zeros) == len(set(zeros))
    assert [code for name, code in run.controller.codes if name == "tandem-master-0"] == [143, 0]


@pytest.mark.timeout(240)
def test_a_pod_waits_for_its_master_and_gives_up_with_a_code_that_is_retried(
    cluster: Callable[[], Cluster],
) -> None:
    late = Run(cluster(), "pytorchjob", TANDEM_STEPS="20")
    never = Run(cluster(), "pytorchjob", TANDEM_STEPS="20", TANDEM_MASTER_TIMEOUT="10")
    master, *workers = late.controller.plans
    for worker in workers:
        late.controller.current[worker.name] = late.cluster.start(worker)
    lonely = never.cluster.start(never.controller.plans[1])

    late.until(lambda: lonely.code is not None, "the end of the one that waits 10 s only", limit=60)
    waiting = late.controller.current[workers[0].name]
    assert waiting.code is None and "waiting for master tandem-master-0:23456" in waiting.output()
    late.controller.current[master.name] = late.cluster.start(master)
    assert late.finish()["world_size"] == 3
    assert waiting.code == 0  # the same pod that waited
    assert lonely.code == 200, lonely.output()
    assert "waiting for master" in lonely.output() and "Traceback" not in lonely.output()
