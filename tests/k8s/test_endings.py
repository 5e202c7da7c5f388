"""How a job ends where the controller deletes what still runs: nothing that anybody needs is lost with it."""

import json
from collections.abc import Callable

import pytest
from simulated_cluster import Cluster, Pod
from small_jobs import RUN_SECONDS, Run

from program_files import program_text

pytestmark = pytest.mark.timeout(300)
BUG = program_text("endings_bug")
REASON = "rank 1 on node 1: KeyError: 'no such column'"
LINGER = {"TANDEM_METRICS_LINGER": "20", "TANDEM_TASK__DELAY": "0.05", "TANDEM_STEPS": "60"}


def last_message(pod: Pod) -> str:
    return str(json.loads(pod.output().splitlines()[-1])["message"])


def is_scraped(pod: Pod) -> bool:
    """From then on it lingers at its end, until the scraper has seen the final state."""
    return "tandem_global_step" in pod.metrics()


@pytest.mark.parametrize("is_deleted", [False, True], ids=["ends first", "deleted in its linger"])
def test_a_workers_bug_is_the_masters_last_line_and_its_termination_message(
    cluster: Callable[[], Cluster], is_deleted: bool
) -> None:
    """With cleanPodPolicy Running a worker that ended first took the master with it: five of ten reasons."""
    linger = LINGER if is_deleted else {"TANDEM_STEPS": "60"}
    run = Run(cluster(), "pytorchjob", **{**linger, "TANDEM_TASK": "/task/buggy.py:Buggy"})
    (run.cluster.folder / "task/buggy.py").write_text(BUG)
    run.controller.start()
    master = run.controller.current["tandem-master-0"]
    if is_deleted:
        run.until(lambda: is_scraped(master), "a page of metrics", RUN_SECONDS)
        run.until(lambda: REASON in master.message(), "the master's word", RUN_SECONDS)
        assert run.controller.codes == [], "the others outstay the master"
        run.controller.delete("tandem-master-0")
    assert run.controller.run(RUN_SECONDS) == "Failed", run.controller.logs()
    assert run.controller.codes == [("tandem-master-0", 1)], "the master is judged first, and alone"
    assert ("tandem-master-0" in run.controller.deleted) is is_deleted
    run.controller.wait_for_all()
    for pod in run.cluster.pods:
        assert pod.code == 1, run.controller.logs()
        assert pod.message().startswith("ended with code 1: ") and REASON in pod.message(), pod.message()
        assert "\n" not in pod.message() and last_message(pod) == pod.message(), pod.output()


def test_an_elastic_jobs_worker_0_shows_its_scores_before_the_job_ends(
    cluster: Callable[[], Cluster],
) -> None:
    """Any worker that ends with 0 ends the job, and worker 0 has the scores and who scrapes them."""
    run = Run(cluster(), "elastic", **LINGER)
    run.controller.start()
    first = run.controller.current["tandem-worker-0"]
    run.until(lambda: is_scraped(first), "a page of metrics", RUN_SECONDS)
    pages = [""]

    def is_final() -> bool:
        pages.append(first.metrics())
        return 'tandem_run_state{tandem_run_state="succeeded"} 1' in pages[-1]

    run.until(is_final, "the final page", RUN_SECONDS)
    assert 'tandem_eval_score{score="accuracy"}' in pages[-1], pages[-1]
    assert run.finish()["eval"]
    assert run.controller.codes == [("tandem-worker-0", 0)], run.controller.logs()
    assert "tandem-worker-0" not in run.controller.deleted
