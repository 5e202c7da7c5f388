"""A real two-node Slurm cluster on one Debian host.

    two_nodes.py try [ARGUMENTS OF TANDEM LAUNCH]      run slurm/train.sbatch on it
    two_nodes.py shell [COMMAND]                       run a shell, or a command, on its login node

The controller and each node have their own namespaces (network, host name, mounts, processes). They share a
bridge, and a munge with its own key and socket. All files are in one directory. The nodes' process namespaces
are inside the controller's, whose first process dies with the process that started it. Nothing is left
behind, and the host's Slurm and munge are not touched. Needs root and Debian's slurm-wlm.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

TRAIN = Path(__file__).resolve().with_name("train.sbatch")
HEAD = "head"
TOOLS = ("unshare", "nsenter", "setpriv", "mount", "ip", "munged", "slurmctld", "slurmd", "sbatch", "srun")
UP_SECONDS = 60.0  # for a busy machine; usually a second or two

# Differences from a usual slurm.conf: root instead of a user `slurm`, no accounting, no cgroups, cores as
# configured, and short waits, so that a requeued job starts in seconds.
HOSTS = """\
127.0.0.1 localhost
10.77.0.1 head
"""
SLURM_CONF = """\
ClusterName=two
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its old credential has expired, by default after 120 s.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
# A step's daemon tries to reach a lost node for 100 s (measured). With the default of 60 s, Slurm would
# conclude that a process cannot be killed, and drain the remaining node.
UnkillableStepTimeout=300
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu,shard
NodeName=node[1-{nodes}] CPUs=4 RealMemory=1000 Gres=gpu:2,shard:8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=5 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
"""
# Slurm sees a GPU as a file: jobs that request one get its variables, but no device.
GRES_CONF = """\
NodeName=node[1-{nodes}] Name=gpu File=/dev/null
NodeName=node[1-{nodes}] Name=gpu File=/dev/zero
NodeName=node[1-{nodes}] Name=shard Count=8
"""


def available() -> tuple[bool, str]:
    """Return (True, "") if this machine can run such a cluster, else (False, the reason)."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_path()) is None]
    if missing:
        return False, f"{', '.join(missing)} missing (apt-get install slurm-wlm munge iproute2)"
    if os.geteuid() != 0:
        return False, "needs root"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return tried.returncode == 0, tried.stderr.decode().strip()


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


class Cluster:
    """Some nodes and a controller, for the length of a `with` block; `folder` has state and logs."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder
        self.addresses = {f"node{number}": f"10.77.0.1{number}" for number in range(1, nodes + 1)}
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": _path(),
        }
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._pids: dict[str, int] = {}  # {name: PID of the namespace's first process}

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop everything: all processes in the namespaces die with the controller's first process."""
        for holder in self._holders.values():  # the controller's is the first
            holder.kill()
            holder.wait(timeout=30)
        self._holders.clear()

    def on(self, where: str, *command: str) -> list[str]:
        """Return a command line that runs `command` on `head`, `node1`, `node2` ..., in this directory."""
        there = ["nsenter", "--target", str(self._pids[where]), "--net", "--uts", "--mount", "--pid"]
        return [*there, "--", "env", f"--chdir={os.getcwd()}", *command]

    def run(self, *command: str, where: str = HEAD, **options: str) -> str:
        """Run a command and return its output; `options` are its variables. Raises CalledProcessError."""
        done = subprocess.run(
            self.on(where, *command),
            env={**self.environment, **options},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        if done.returncode:
            error = subprocess.CalledProcessError(done.returncode, command, done.stdout)
            error.add_note(done.stdout)
            raise error
        return done.stdout.strip()

    def job(self, number: str) -> Mapping[str, str]:
        """Return the controller's fields of a job: JobState, Restarts, ExitCode, ..."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def node_state(self, node: str) -> str:
        return self.run("sinfo", "--noheader", "--nodes", node, "--format", "%T").splitlines()[0]

    def lose(self, node: str) -> None:
        """Kill all processes of the node, and mark it down as an administrator would."""
        os.kill(self._pids.pop(node), signal.SIGKILL)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def bring_back(self, node: str) -> None:
        """Start the node again and wait until it has registered; if it is still down, resume it."""
        before = self._registered(node)
        self._start_node(node)
        self._until(lambda: self._registered(node) != before, f"{node} has not registered")
        self._until(lambda: self._is_up(node), f"{node} is not back")

    def _registered(self, node: str) -> str:
        """Return the start time of the daemon that registered last."""
        words = self.run("scontrol", "--oneliner", "show", "node", node).split()
        return next(word for word in words if word.startswith("SlurmdStartTime="))

    def _is_up(self, node: str) -> bool:
        state = self.node_state(node)
        if state.startswith(("idle", "alloc", "mix")) and not state.endswith("*"):  # *: does not answer
            return True
        if state.startswith("down"):
            self.run("scontrol", "update", f"nodename={node}", "state=resume")
        return False

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def _start(self) -> None:
        (self.folder / "state").mkdir(parents=True, exist_ok=True)
        nodes = len(self.addresses)
        (self.folder / "slurm.conf").write_text(SLURM_CONF.format(folder=self.folder, nodes=nodes))
        (self.folder / "gres.conf").write_text(GRES_CONF.format(nodes=nodes))
        others = [f"{address} {node}\n" for node, address in self.addresses.items()]
        (self.folder / "hosts").write_text("".join([HOSTS, *others]))
        (self.folder / "resolv.conf").touch()  # empty: the host's name servers cannot be reached from here
        key = self.folder / "munge.key"
        key.unlink(missing_ok=True)
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        # It dies with this process, and its namespace's first process, and so all others, with it.
        self._hold(HEAD, ["setpriv", "--pdeathsig", "KILL"])
        self._in_network(HEAD, "ip link set lo up", "ip link add br0 type bridge")
        self._in_network(HEAD, "ip addr add 10.77.0.1/24 dev br0", "ip link set br0 up")
        files = ("key-file=munge.key", "pid-file=munged.pid", "log-file=munged.log", "seed-file=munged.seed")
        options = [f"--{name}={self.folder}/{file}" for name, file in (each.split("=") for each in files)]
        self.run("munged", "--force", f"--socket={self.folder}/munge.socket", *options)
        self.run("slurmctld", "-c")
        for node in self.addresses:
            self._start_node(node)
        self._until(
            lambda: {self.node_state(node) for node in self.addresses} == {"idle"}, "the nodes are not idle"
        )

    def _start_node(self, node: str) -> None:
        self._hold(node, ["nsenter", "--target", str(self._pids[HEAD]), "--net", "--uts", "--mount", "--pid"])
        # The kernel removes a lost node's network link together with its namespace, but not at once.
        on_head = ["nsenter", "--target", str(self._pids[HEAD]), "--net"]
        subprocess.run([*on_head, "ip", "link", "delete", node], stderr=subprocess.DEVNULL, check=False)
        self._in_network(HEAD, f"ip link add {node} type veth peer name eth0 netns {self._pids[node]}")
        self._in_network(HEAD, f"ip link set {node} master br0 up")
        self._in_network(node, "ip link set lo up", f"ip addr add {self.addresses[node]}/24 dev eth0")
        self._in_network(node, "ip link set eth0 up")
        self.run("slurmd", "-c", where=node)

    def _hold(self, name: str, prefix: Sequence[str]) -> None:
        """Create namespaces, and a process that keeps them."""
        spaces = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        holder = subprocess.Popen([*prefix, *spaces, "sleep", "infinity"], stdin=subprocess.DEVNULL)
        self._holders[name] = holder
        self._until(lambda: _name(_last_child(holder.pid)) == "sleep", f"no namespaces for {name}")
        self._pids[name] = _last_child(holder.pid)
        self.run("hostname", name, where=name)
        for file in ("hosts", "resolv.conf"):
            self.run("mount", "--bind", str(self.folder / file), f"/etc/{file}", where=name)

    def _in_network(self, where: str, *commands: str) -> None:
        for command in commands:
            subprocess.run(
                ["nsenter", "--target", str(self._pids[where]), "--net", *command.split()],
                env=self.environment,
                check=True,
            )

    def _until(self, true: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + UP_SECONDS
        while True:
            with contextlib.suppress(subprocess.CalledProcessError):  # the daemons may not be up yet
                if true():
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{otherwise} after {UP_SECONDS:.0f} s\n{self.logs()}")
            time.sleep(0.05)


def _last_child(pid: int) -> int:
    """Return the last process of a chain in which each has one child, as a PID on this host."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return _last_child(int(children[0])) if children else pid


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def train(cluster: Cluster, arguments: Sequence[str]) -> int:
    """Run train.sbatch with these arguments, print its output as it arrives, and return its exit code."""
    output = cluster.folder / "train.out"
    options = ["--parsable", "--gpus-per-node=0", f"--output={output}"]
    run_dir = os.environ.get("TANDEM_RUN_DIR", str(cluster.folder / "run"))
    variables = {"TANDEM_RUN_DIR": run_dir, "TANDEM_DEVICE": "cpu"}
    job = cluster.run("sbatch", *options, str(TRAIN), *arguments, **variables)
    print(cluster.run("sinfo"), cluster.run("squeue"), sep="\n", flush=True)
    shown = 0
    while True:
        state = cluster.job(job)
        text = output.read_bytes() if output.exists() else b""
        sys.stdout.write(text[shown:].decode(errors="replace"))
        sys.stdout.flush()
        shown = len(text)
        if state["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            print(f"job {job}: {state['JobState']}, exit code {state['ExitCode']}, on {state['NodeList']}")
            return int(state["ExitCode"].partition(":")[0])
        time.sleep(0.5)


def main(words: Sequence[str]) -> int:
    if words[:1] not in (["try"], ["shell"]):
        print(__doc__, file=sys.stderr)
        return 2
    here, why = available()
    if not here:
        print(f"slurm/two_nodes.py: cannot create a cluster here: {why}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="two-nodes-"))
    try:
        with Cluster(folder) as cluster:
            cluster.environment["PATH"] = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
            if words[0] == "try":
                return train(cluster, words[1:])
            command = cluster.on(HEAD, *(words[1:] or ["bash"]))
            return subprocess.run(command, env=cluster.environment).returncode
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
