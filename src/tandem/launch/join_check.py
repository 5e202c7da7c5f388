"""`tandem doctor --join`: the nodes of a job connect, test each other, and learn which must stay out.

Every node runs it with the settings of its `tandem launch`. Node 0 hosts the store and gives orders. The
nodes answer, and node 0 judges the answers by `join_rules`. All nodes print the same verdict. See
docs/troubleshooting.md#check-the-nodes-of-a-job.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem.config import Settings
from tandem.distributed.devices import product_problem
from tandem.distributed.neighbor_link import own_address
from tandem.errors import FAILED, FINISHED, ConfigError, PeerLostError
from tandem.launch import join_rules as rules
from tandem.launch.connectivity import ConnectivityProblem
from tandem.launch.join_measure import LinkListener, Speed, devices, kind_of, measure_link, speed_of
from tandem.launch.rendezvous import LEFT_KEY, StoreLostError, read_all, stay_until_all_left
from tandem.launch.secret import take_key
from tandem.launch.store_endpoint import StoreEndpoint
from tandem.log import setup
from tandem.platforms.detection import Placement, detect_here
from tandem.platforms.environment import LOOPBACK
from tandem.process import boot_id
from tandem.run.directory import RunDir
from tandem.signals import StopFlag
from tandem.telemetry.messages import checked
from tandem.text import first_line, format_duration
from tandem.timeouts import JOIN_ANSWER_SECONDS, JOIN_POLL_SECONDS

SHARED_MEMORY = Path("/dev/shm")
HELLO = 0
REMEDIES = {
    "clock": "synchronize it (chrony, systemd-timesyncd); for a container, do that on the host",
    "shm": "--shm-size=1g or --ipc=host (Docker), or mount a medium: Memory volume there (Kubernetes)",
    "product": "replace the device, or leave this machine out",
    "speed": "raise the CPU limit of its container, or check its cooling and power (`nvidia-smi -q`)",
    "link": "check its cable, port, and the driver and limits of its network interface",
    "answer": "check its log and its memory, and start it again",
    "start": "start it with the same settings, or check its log",
}

Device = tuple[int, str]
VolumeCheck = Callable[[Path], Iterable[ConnectivityProblem]]


@dataclass(frozen=True)
class CheckOrder:
    """The test that each node in `nodes` runs now, with its arguments. A `verdict` ends the check."""

    kind: str
    nodes: dict[str, list[Any]] = field(default_factory=dict)
    verdict: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckAnswer:
    """A node's measurements, by name, and its failed checks; `names` is text that other nodes need."""

    values: dict[str, float] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    checks: list[dict[str, str]] = field(default_factory=list)


def check_nodes(
    settings: Settings, environ: Mapping[str, str], check_volume: VolumeCheck
) -> tuple[int, dict[str, Any]]:
    """Take part in the check; return this node's exit code and the verdict about all nodes, for JSON.

    Raises ConfigError if the job has a single node, and PeerLostError if the nodes do not connect.
    """
    placement = detect_here(environ, settings.launch)
    nodes = placement.nodes + placement.spares
    if (what := _what_is_here(placement, nodes)) is not None:
        raise ConfigError(
            f"--join tests the nodes of a job against each other, but {what}; run it once on each node with "
            "the settings of tandem launch, such as --nodes 2 --node-rank 0 --master HOST:PORT"
        )
    setup(None, None, placement.node_rank, True, False)
    endpoint = StoreEndpoint(placement, take_key(os.environ))
    patience = settings.launch.master_timeout
    is_first = placement.node_rank == 0
    try:
        store = endpoint.host() if is_first else endpoint.join(patience, StopFlag())
        node = NodeUnderTest(placement, settings, environ, check_volume)
        verdict = CheckCoordinator(store, node, nodes, patience).run() if is_first else node.take_part(store)
        left = store.add(LEFT_KEY, 1)
        if is_first:
            came = [each for each in verdict["nodes"] if each["host"]]
            stay_until_all_left(store, len(came), left)
    # The last three: text that is no answer or order of this program.
    except (RuntimeError, StoreLostError, ValueError, TypeError, KeyError) as error:
        remedy = "start it again on all nodes" if is_first else "see the output of node 0"
        raise PeerLostError(f"the check of the nodes was cut off: {first_line(error)}; {remedy}") from error
    return _exit_code(verdict, placement), verdict


def _what_is_here(placement: Placement, nodes: int) -> str | None:
    """Return what this process belongs to instead of a job of several nodes, or None."""
    if placement.rank is not None:
        return f"this is one process per rank ({placement})"
    if nodes < 2:
        return "this job has only one node"
    if placement.starts_all:
        return f"--nodes {placement.nodes} alone means simulated nodes on this machine"
    return None


def _exit_code(verdict: Mapping[str, Any], placement: Placement) -> int:
    """Return FAILED for a node that must stay out, and for all nodes if the job cannot start without it."""
    out = [each["node"] for each in verdict["nodes"] if each["state"] == "fail"]
    needed = placement.elastic[0] if placement.elastic else placement.nodes
    is_short = len(verdict["nodes"]) - len(out) < needed or 0 in out
    return FAILED if is_short or verdict["unclear"] or placement.node_rank in out else FINISHED


def as_text(verdict: Mapping[str, Any]) -> str:
    """Format one line per node, one per failed check, and a remedy below each of them."""
    lines = []
    for each in verdict["nodes"]:
        name = f"node {each['node']}"
        lines.append(f"{each['state']}  {name:<9} {each['host']}  {each['said']}".rstrip())
        for check in each["checks"]:
            lines += [f"      {check['name']:<9} {check['said']}", f"{'':<16}{check['remedy']}"]
    for check in verdict["unclear"]:
        lines += [f"fail  {check['name']:<9} {check['said']}", f"{'':<16}{check['remedy']}"]
    out = [str(each["node"]) for each in verdict["nodes"] if each["state"] == "fail"]
    found = f"stays out: node {', '.join(out)}" if out else "no node has to stay out"
    return "\n".join([*lines, f"{found}; tested in {format_duration(verdict['seconds'])}"])


class NodeUnderTest:
    """One node, which carries out the orders."""

    def __init__(
        self, placement: Placement, settings: Settings, environ: Mapping[str, str], check_volume: VolumeCheck
    ) -> None:
        self._check_volume = check_volume
        self.number = placement.node_rank
        self._run_dir = settings.run.run_dir
        interface = environ.get("GLOO_SOCKET_IFNAME", "")
        try:
            host = LOOPBACK if placement.is_one_host else own_address(interface, placement.master_host)
            self._listener = LinkListener(host)
        except socket.gaierror as error:
            raise ConfigError(
                f"the master's name {placement.master_host} does not resolve here ({error.strerror}); "
                "expected a name or address of node 0, give --master HOST:PORT"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"no address of this node that others reach: {error.strerror or error}; "
                "set GLOO_SOCKET_IFNAME to its interface"
            ) from error

    def take_part(self, store: TCPStore) -> dict[str, Any]:
        """Obey all orders; return the verdict. Raises RuntimeError if the store is lost."""
        store.set(_answer_key(HELLO, self.number), _text(self.hello()))
        number = HELLO
        while True:
            number += 1
            while not store.check([_order_key(number)]):
                time.sleep(JOIN_POLL_SECONDS)
            order = checked(CheckOrder, json.loads(store.get(_order_key(number))))
            if order.verdict:
                return order.verdict
            if str(self.number) in order.nodes:
                store.set(_answer_key(number, self.number), _text(self.obey(order)))

    def hello(self) -> CheckAnswer:
        """Run the checks that need no other node, and report where this node listens."""
        began = time.monotonic()
        checks = list[ConnectivityProblem]()
        run = RunDir(self._run_dir or "runs")
        if run.is_here:
            checks += [each for each in self._check_volume(run.folder) if each.state == "fail"]
        for device in devices():
            if problem := product_problem(device):
                checks.append(_failed("product", problem))
        shared = os.statvfs(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
        values = {
            "port": self._listener.port,
            "shm": float(shared.f_bavail * shared.f_frsize) if shared else 0.0,
            "cores": float(len(os.sched_getaffinity(0))),
            "seconds": time.monotonic() - began,
        }
        names = {
            "host": socket.gethostname(),
            "address": self._listener.host,
            "token": self._listener.token,
            "machine": boot_id() or socket.gethostname(),
        }
        return CheckAnswer(values, names, [_as_json(each) for each in checks])

    def obey(self, order: CheckOrder) -> CheckAnswer:
        """Carry out this node's part of an order."""
        arguments = order.nodes[str(self.number)]
        if order.kind == "clock":
            return CheckAnswer({"time": time.time()})
        if order.kind == "speed":
            return self._speed()
        try:
            found = measure_link(*arguments) if arguments else self._listener.measure()
        except OSError as error:
            return CheckAnswer(names={"error": str(error)})
        return CheckAnswer({"rate": found.rate, "latency": found.latency})

    @staticmethod
    def _speed() -> CheckAnswer:
        values = dict[str, float]()
        for device in devices():
            try:
                speed = speed_of(device)
                name = "cpu" if device.type == "cpu" else f"{device} {kind_of(device)}"
                values[name] = speed.rate
                values |= {"throttled": speed.throttled} if device.type == "cpu" else {}
            except RuntimeError as error:
                return CheckAnswer(
                    values, checks=[_as_json(_failed("speed", f"{device}: {first_line(error)}"))]
                )
        return CheckAnswer(values)


class CheckCoordinator:
    """Node 0, which gives the orders and decides."""

    def __init__(self, store: TCPStore, node: NodeUnderTest, nodes: int, patience: float) -> None:
        self._store = store
        self._node = node
        self._all = range(nodes)
        self._patience = patience
        self._number = HELLO
        self._hellos = dict[int, CheckAnswer]()
        self._checks: dict[int, list[ConnectivityProblem]] = {each: [] for each in self._all}
        self._unclear = list[ConnectivityProblem]()
        self._silent = set[int]()
        self._speeds = dict[Device, list[Speed]]()
        self._links = list[rules.LinkRate]()

    def run(self) -> dict[str, Any]:
        """Test all nodes, publish the verdict, and return it. Raises RuntimeError if the store fails."""
        self._meet()
        began = time.monotonic()
        self._compare_shared_memory()
        self._compare_clocks()
        self._compare_speeds()
        self._compare_links()
        local = max(each.values["seconds"] for each in self._hellos.values())
        verdict = self._verdict(local + time.monotonic() - began)
        self._number += 1
        self._store.set(_order_key(self._number), _text(CheckOrder("end", verdict=verdict)))
        return verdict

    @property
    def _present(self) -> list[int]:
        return [each for each in self._hellos if each not in self._silent]

    def _meet(self) -> None:
        own = self._node.hello()
        self._note_failed({0: own})
        others = self._collect(HELLO, [each for each in self._all if each], self._patience)
        self._hellos = dict(sorted({0: own, **others}.items()))
        for node in self._all:
            if node not in self._hellos:
                text = f"it did not come within {self._patience:.0f} s"
                self._checks[node].append(_failed("start", text))

    def _ask(self, kind: str, nodes: Mapping[int, Sequence[Any]]) -> dict[int, CheckAnswer]:
        """Give an order to some nodes, which may include this one; return their answers."""
        self._number += 1
        order = CheckOrder(kind, {str(node): list(arguments) for node, arguments in nodes.items()})
        self._store.set(_order_key(self._number), _text(order))
        answers = {0: self._node.obey(order)} if 0 in nodes else {}
        self._note_failed(answers)
        return answers | self._collect(self._number, [each for each in nodes if each], JOIN_ANSWER_SECONDS)

    def _collect(self, number: int, nodes: Sequence[int], seconds: float) -> dict[int, CheckAnswer]:
        keys = {_answer_key(number, node): node for node in nodes}
        ends = time.monotonic() + seconds
        known = set[str]()
        # `known` covers this order only, and all its keys are read again: they are few and small.
        while len(found := read_all(self._store, list(keys), known)) < len(keys) and time.monotonic() < ends:
            time.sleep(JOIN_POLL_SECONDS)
        answers = {keys[key]: checked(CheckAnswer, json.loads(text)) for key, text in found.items()}
        self._note_failed(answers)
        for node in nodes if number != HELLO else ():
            if node not in answers:
                self._silent.add(node)
                text = f"it gave no answer within {seconds:.0f} s"
                self._checks[node].append(_failed("answer", text))
        return answers

    def _note_failed(self, answers: Mapping[int, CheckAnswer]) -> None:
        for node, answer in answers.items():
            for each in answer.checks:
                failed = ConnectivityProblem(each["name"], "fail", each["said"], each["remedy"])
                self._checks[node].append(failed)

    def _compare_shared_memory(self) -> None:
        free = {node: each.values["shm"] for node, each in self._hellos.items()}
        for node, share in rules.far_below(free).items():
            if free[node] < rules.ENOUGH_SHARED_BYTES:
                text = (
                    f"{SHARED_MEMORY} has {free[node] / 2**20:,.0f} MiB free, {share:.0%} of what others have"
                )
                self._checks[node].append(_failed("shm", text))

    def _compare_clocks(self) -> None:
        asked = time.time()
        answers = self._ask("clock", dict.fromkeys(self._present, ()))
        uncertainty = (time.time() - asked) / 2
        middle = asked + uncertainty
        offsets = {
            node: rules.ClockOffset(each.values["time"] - middle, uncertainty)
            for node, each in answers.items()
        }
        wrong = rules.wrong_clocks(offsets)
        if wrong is None:
            spread = max(each.ahead for each in offsets.values()) - min(
                each.ahead for each in offsets.values()
            )
            text = f"the clocks differ by up to {spread:.0f} s, and no majority of the nodes agrees"
            self._unclear.append(_failed("clock", text))
        for node, ahead in (wrong or {}).items():
            side = "ahead of" if ahead > 0 else "behind"
            text = f"its clock is {abs(ahead):.0f} s {side} those of most other nodes"
            self._checks[node].append(_failed("clock", text))

    def _compare_speeds(self) -> None:
        self._measure_speeds(self._present)
        # Measure these again, because the slow attempt may have been a bad moment. The better one counts.
        self._measure_speeds({node for node, _ in self._slow_devices()}.intersection(self._present))
        for (node, name), share in self._slow_devices().items():
            tries = self._speeds[node, name]
            text = (
                f"{name} multiplies at {share:.0%} of the median speed of the others, at {len(tries)} tries"
            )
            if limit := max(tries).throttled:
                text += f"; a CPU limit stops it for {limit:.0%} of the time"
            self._checks[node].append(_failed("speed", text))

    def _measure_speeds(self, nodes: Iterable[int]) -> None:
        """Let nodes measure at the same time, but on one machine no more nodes than it has cores."""
        for turn in _turns({node: self._hellos[node] for node in sorted(nodes)}):
            for node, answer in self._ask("speed", dict.fromkeys(turn, ())).items():
                throttled = answer.values.get("throttled", 0.0)
                for name, rate in answer.values.items():
                    if name != "throttled":
                        self._speeds.setdefault((node, name), []).append(Speed(rate, throttled))

    def _slow_devices(self) -> dict[Device, float]:
        best = {device: max(tries).rate for device, tries in self._speeds.items()}
        found = dict[Device, float]()
        for kind in {_kind(name) for _, name in best}:
            found |= rules.far_below(
                {device: rate for device, rate in best.items() if _kind(device[1]) == kind}
            )
        return found

    def _compare_links(self) -> None:
        # A node that hardly gets a core also has a slow link, so measuring its partners would be useless.
        slow = {node for node, checks in self._checks.items() if any(each.name == "speed" for each in checks)}
        nodes = [each for each in self._present if each not in slow]
        rounds = 0
        while rules.needs_another_round(nodes, self._links, rounds):
            self._measure_links(rules.pairs_of_round(nodes, rounds))
            rounds += 1
        named = rules.slow_links(self._links)
        for node in (each for each, partners in named.items() if partners >= rules.PARTNERS):
            own = [each for each in self._links if each.partner_of(node) is not None]
            with_whom = " and ".join(f"node {each.partner_of(node)} ({_described(each)})" for each in own)
            others = [each for each in self._links if each not in own]
            best = max(others, key=lambda each: each.rate)
            text = f"its link is slow with {with_whom}; between others it has {_described(best)}"
            self._checks[node].append(_failed("link", text))
        if not any(each.rate for each in self._links) and self._links:
            self._unclear.append(_failed("link", "no node can connect to another one"))

    def _measure_links(self, pairs: Sequence[tuple[int, int]]) -> None:
        parts = dict[int, Sequence[Any]]()
        for first, second in pairs:
            listens = self._hellos[second]
            parts[first] = listens.names["address"], int(listens.values["port"]), listens.names["token"]
            parts[second] = ()
        answers = self._ask("link", parts)
        for first, second in pairs:
            ends = [answers.get(each, CheckAnswer()).values for each in (first, second)]
            rate = min(each.get("rate", 0.0) for each in ends)
            self._links.append(rules.LinkRate(first, second, rate, ends[0].get("latency", 0.0)))

    def _verdict(self, seconds: float) -> dict[str, Any]:
        nodes = []
        for node, checks in self._checks.items():
            hello = self._hellos.get(node)
            nodes.append(
                {
                    "node": node,
                    "host": hello.names["host"] if hello else "",
                    "state": "fail" if checks else "pass",
                    "said": ", ".join(self._said(node)),
                    "checks": [_as_json(each) for each in checks],
                }
            )
        unclear = [_as_json(each) for each in self._unclear]
        state = "fail" if unclear or any(each["state"] == "fail" for each in nodes) else "pass"
        return {"state": state, "nodes": nodes, "unclear": unclear, "seconds": round(seconds, 3)}

    def _said(self, node: int) -> Iterator[str]:
        for (other, name), tries in self._speeds.items():
            if other == node:
                yield f"{name} {max(tries).rate:,.0f} products/s"
        for link in self._links:
            if (partner := link.partner_of(node)) is not None:
                yield f"link to node {partner} {_described(link)}"


def _turns(hellos: Mapping[int, CheckAnswer]) -> Iterator[list[int]]:
    """Yield the nodes that measure at the same time: on one machine, no more than it has cores."""
    machines = dict[str, list[int]]()
    for node, hello in hellos.items():
        machines.setdefault(hello.names["machine"], []).append(node)
    cores = partial(min, default=1)
    each_turn = {
        machine: max(1, int(cores(hellos[node].values["cores"] for node in nodes)))
        for machine, nodes in machines.items()
    }
    number = 0
    while turn := [
        node
        for machine, nodes in machines.items()
        for node in nodes[number * each_turn[machine] : (number + 1) * each_turn[machine]]
    ]:
        yield turn
        number += 1


def _kind(name: str) -> str:
    """Return the kind in a device's name, such as "cuda:0 NVIDIA H100", to compare devices of one kind."""
    return name.partition(" ")[2]


def _described(link: rules.LinkRate) -> str:
    if not link.rate:
        return "no connection"
    return f"{link.rate * 8 / 1e9:,.2f} Gbit/s, {1e3 * link.latency:.2f} ms"


def _failed(name: str, text: str) -> ConnectivityProblem:
    return ConnectivityProblem(name, "fail", text, REMEDIES[name])


def _as_json(check: ConnectivityProblem) -> dict[str, str]:
    return {"name": check.name, "state": check.state, "said": check.text, "remedy": check.remedy}


def _text(message: CheckOrder | CheckAnswer) -> str:
    return json.dumps(asdict(message))


def _order_key(number: int) -> str:
    return f"tandem/join/order/{number}"


def _answer_key(number: int, node: int) -> str:
    return f"tandem/join/answer/{number}/{node}"
