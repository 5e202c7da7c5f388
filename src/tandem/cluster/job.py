"""One job until its end: wait, stop, collect the nodes' exit codes, and summarize."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from tandem.cluster.engine import STOP_SECONDS, Cluster, Node, code_of_removed, project_word
from tandem.cluster.network import keep_shape
from tandem.cluster.volume import read, volume_of
from tandem.errors import FINISHED, KILLED, job_code
from tandem.log import pluralize

POLL_SECONDS = 0.5


@dataclass
class ClusterJob:
    """The containers of a cluster's job. Containers that appear later belong to another job.

    They may be removed at any time, for example by `make compose-down` in another terminal. Earlier
    observations of them are kept, and the engine's events provide the rest.
    """

    cluster: Cluster
    nodes: dict[str, Node] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, cluster: Cluster) -> "ClusterJob":
        return cls(cluster, {node.identity: node for node in cluster.nodes()})

    @property
    def unfinished(self) -> list[Node]:
        """The nodes that were running or restarting at the last check."""
        # A removed node keeps its last status, which may be `running`.
        there = [node for node in self.nodes.values() if node.identity not in self.gone]
        return [node for node in there if node.is_unfinished]

    def look(self) -> None:
        """Update the state of the nodes."""
        there = {node.identity: node for node in self.cluster.nodes()}
        self.gone = self.nodes.keys() - there.keys()
        self.nodes |= {identity: there[identity] for identity in self.nodes.keys() & there.keys()}

    def wait(self) -> None:
        """Wait until the job is over, and maintain the network shape that the user requested."""
        shaped: dict[str, str] = {}
        while self.unfinished:
            keep_shape(self.cluster, shaped)
            time.sleep(POLL_SECONDS)
            self.look()

    def stop(self) -> None:
        """Send SIGTERM to every node, and SIGKILL after the grace period or Ctrl-C."""
        try:
            self.cluster.compose("stop", "node", seconds=STOP_SECONDS)
        except KeyboardInterrupt:
            self.cluster.compose("kill", "node")
        self.look()

    def codes(self) -> dict[int, int]:
        """Return the nodes' exit codes by index. If unknown, the node was killed by its removal."""
        by_index = sorted(self.nodes.values(), key=lambda node: node.index)
        return {node.index: self._code_of(node) for node in by_index}

    def _code_of(self, node: Node) -> int:
        if node.identity not in self.gone or not node.is_unfinished:
            return node.exit_code
        code = code_of_removed(node.identity, node.created)
        # `docker rm --force` kills a running container.
        return KILLED if code is None else code

    def summary(self, code: int) -> dict[str, object] | None:
        """Return the job's summary, read from the volume if its containers are gone.

        A summary from before the job belongs to an earlier one, unless the exit code matches: this job was
        then complete from the start, or stopped before it had anything to add.
        """
        path = f"{self.cluster.run_dir}/summary.json"
        found = self.cluster.read_dated(path)
        if found is None:
            found = read(volume_of(self.cluster.project), self.cluster.image, path)
        if found is None:
            return None
        text, written = found
        try:
            summary: dict[str, object] = json.loads(text)
        except ValueError:  # cut by a full disk, or edited
            return None
        began = min((_seconds(node.created) for node in self.nodes.values()), default=float("inf"))
        return summary if written >= began or summary["exit_code"] == code else None

    def result(self) -> tuple[int, str]:
        """Return the job's exit code and a one-line summary. The code of an unobserved job is not 0."""
        codes = self.codes()
        code = self._code(codes) if codes else KILLED
        summary = self.summary(code)
        nodes = ", ".join(f"node {index} {each}" for index, each in codes.items())
        end = f"ended with {code} ({nodes or 'its nodes were removed before they were seen'})"
        if summary is not None:
            return code, f"{end}: {self._details(code, summary)}"
        self.look()
        if self.gone or not codes:
            line = "the nodes are removed, and no summary of this job is in the volume; its logs may be"
            return code, f"{end}; {line}: {self._copy_command()}"
        return code, f"{end}; no summary was written, the logs say why: make compose-logs"

    def _code(self, codes: Mapping[int, int]) -> int:
        """Return the job's exit code: with spares, as many killed nodes as spares do not count."""
        failures = [code for code in codes.values() if code != FINISHED]
        spares = int(self.cluster.variables.get("TANDEM_SPARES") or 0)
        if codes.get(0) == FINISHED and len(failures) <= spares and set(failures) <= {KILLED}:
            return FINISHED
        return job_code(list(codes.values()))

    def _copy_command(self) -> str:
        """Return the command that copies the run's files to this host."""
        run = self.cluster.variables["RUN"]
        project = self.cluster.project
        return f"make compose-get RUN={run}{project_word(project)}"

    def _details(self, code: int, summary: Mapping[str, object]) -> str:
        scores = summary.get("eval")
        rate = summary.get("samples_per_second")
        digest = summary.get("weights_sha256")
        saved = summary.get("last_checkpoint_step")
        details = (
            [f"{name} {value:.4f}" for name, value in scores.items()] if isinstance(scores, dict) else []
        )
        details += [f"{rate:,.0f} samples/s"] if isinstance(rate, float) and rate else []
        details += [pluralize(int(str(summary["restarts"])), "restart")] if summary.get("restarts") else []
        details += [f"weights {str(digest)[:12]}"] if digest else []
        details += [f"checkpoint of step {saved}"] if saved is not None else []
        details += [str(summary["reason"])] if summary.get("reason") else []
        whose = "rank 0 " if code and summary["state"] == "finished" else ""  # another node has failed
        where = f"{whose}{summary['state']} at step {summary['global_step']}"
        if "WORKING_DIR" in self.cluster.variables:  # a script's run
            details.append(f"its files: {self._copy_command()}")
        return f"{where}; {', '.join(details)}" if details else where


def _seconds(created: str) -> float:
    """Convert the engine's UTC time to Unix seconds without a fraction, like a file's time from tar."""
    return datetime.fromisoformat(f"{created[:19]}+00:00").timestamp()
