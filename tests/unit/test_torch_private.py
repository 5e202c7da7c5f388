"""What torch does not promise: each does its work, and so does its way without torch's private name."""

import json
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel

from tandem import torch_private
from tandem.distributed.strategy.fsdp import FSDPStrategy as FullyShardedStrategy
from tandem.errors import ConfigError


@pytest.fixture(params=["with torch's own", "without it"])
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`without(owner, name)` takes the name away in half of the cases."""

    def take(owner: Any, name: str) -> None:
        assert hasattr(owner, name), f"{owner} has no {name} in torch {torch.__version__}: see the table"
        if request.param == "without it":
            monkeypatch.delattr(owner, name)

    return take


@pytest.fixture
def group(tmp_path: Path) -> Any:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_batchnorms_are_known(without: Any) -> None:
    without(batchnorm, "_NormBase")
    known = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.SyncBatchNorm(2), nn.InstanceNorm1d(2)]
    assert all(torch_private.is_batchnorm(module) for module in known)
    assert not torch_private.is_batchnorm(nn.LayerNorm(2))


def test_the_end_of_the_gradients_comes_before_the_end_of_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = []
    weight = nn.Parameter(torch.ones(3))
    for _ in range(2):
        loss = (weight * 2).sum()
        torch_private.after_gradients(loss, lambda: order.append(weight.grad is not None))
        loss.backward()
        engine = SimpleNamespace(run_backward=torch.autograd.Variable._execution_engine.run_backward)
        monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", engine)  # then it never comes
    assert order == [True] and weight.grad is not None


@pytest.mark.parametrize(("value", "expected"), [(1.0, 0.0), (float("nan"), 1.0), (float("-inf"), 1.0)])
def test_values_that_are_not_finite_are_noted(without: Any, value: float, expected: float) -> None:
    without(torch, "_amp_foreach_non_finite_check_and_unscale_")
    tensors, found = [torch.ones(3), torch.tensor([1.0, value])], torch.zeros(())
    torch_private.note_nonfinite(tensors, found, torch.ones(()))
    assert found.item() == expected and tensors[0].tolist() == [1.0, 1.0, 1.0]
    found.fill_(1.0)  # what was found before stays found
    torch_private.note_nonfinite([torch.ones(2)], found, torch.ones(()))
    assert found.item() == 1.0


@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_an_overflow_is_seen(without: Any, value: float) -> None:
    scaler = torch.amp.GradScaler("cpu")
    without(type(scaler), "_found_inf_per_device")
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale((weight * value).sum()).backward()
    scaler.unscale_(optimizer)
    assert torch_private.has_overflowed(scaler, optimizer) is (value != 1.0)


def test_which_optimizers_skip_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, fused=True)
    assert torch_private.can_skip_on_device(fused)
    assert not torch_private.can_skip_on_device(torch.optim.Rprop([nn.Parameter(torch.ones(1))]))
    monkeypatch.delattr(fused, "_step_supports_amp_scaling")
    assert not torch_private.can_skip_on_device(fused)


def test_tensors_are_copied(without: Any) -> None:
    without(torch, "_foreach_copy_")
    targets = [torch.zeros(2), torch.zeros(1, dtype=torch.int64)]
    torch_private.copy_all(targets, [torch.tensor([1.0, 2.0]), torch.tensor([3])], non_blocking=True)
    assert [target.tolist() for target in targets] == [[1.0, 2.0], [3]]


def test_ddps_counters_or_zero(without: Any, group: Any) -> None:
    without(DistributedDataParallel, "_get_ddp_logging_data")
    model = DistributedDataParallel(nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    assert torch_private.hidden_sync_seconds(model) >= 0.0
    assert torch_private.hidden_sync_seconds(nn.Linear(1, 1)) == 0.0


def test_the_flight_record_is_json_or_empty(without: Any, group: Any) -> None:
    recorder = torch._C._distributed_c10d
    if not hasattr(recorder, "_dump_fr_trace_json"):
        pytest.skip(f"torch {torch.__version__} gives no flight record as JSON")
    without(recorder, "_dump_fr_trace_json")
    dist.all_reduce(torch.ones(1))
    record = torch_private.flight_record()
    assert json.loads(record)["version"] if hasattr(recorder, "_dump_fr_trace_json") else record == b""


def test_a_flight_recorder_that_takes_no_backend(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.11, where the question ended the thread that sends the heartbeat."""
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda: b"{}", raising=False)
    assert torch_private.flight_record() == b"{}"

    def broken(**_: object) -> bytes:
        raise RuntimeError("no recorder")

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", broken)
    assert torch_private.flight_record() == b""


def test_the_rendezvous_is_hastened_once(without: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[object] = []

    def original(seconds: object) -> None:
        slept.append(seconds)

    monkeypatch.setattr(dynamic_rendezvous, "_delay", original)
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda depth=2: "x")
    without(dynamic_rendezvous, "get_method_name")
    torch_private.shorten_rendezvous_waits(0.05)
    torch_private.shorten_rendezvous_waits(0.07)
    dynamic_rendezvous._delay(1)
    dynamic_rendezvous._delay((0.1, 0.2))
    assert slept == [0.05, (0.1, 0.2)]
    if hasattr(dynamic_rendezvous, "get_method_name"):
        assert dynamic_rendezvous.get_method_name(1) == "test_the_rendezvous_is_hastened_once"
    monkeypatch.delattr(dynamic_rendezvous, "_delay")
    torch_private.shorten_rendezvous_waits(0.05)
    assert not hasattr(dynamic_rendezvous, "_delay")


def test_a_handler_says_what_it_knows() -> None:
    stopped: list[bool] = []
    came = [SimpleNamespace(addr="a"), SimpleNamespace(addr="b")]
    holder = SimpleNamespace(_cache_duration=1, state=SimpleNamespace(participants=came))
    handler = SimpleNamespace(_state_holder=holder, _stop_heartbeats=lambda: stopped.append(True))
    torch_private.shorten_handler_waits(handler, 0.05)
    torch_private.stop_keep_alive(handler)
    assert (holder._cache_duration, torch_private.nodes_here(handler), stopped) == (0.05, ["a", "b"], [True])
    for less in (SimpleNamespace(), SimpleNamespace(_state_holder=SimpleNamespace())):
        torch_private.shorten_handler_waits(less, 0.05)
        torch_private.stop_keep_alive(less)
        assert torch_private.nodes_here(less) is None and not hasattr(less, "_cache_duration")


def test_a_store_that_does_not_answer_holds_nobody() -> None:
    """The engine joins its thread, which stood in a read from a node 0 that was gone."""
    never = threading.Event()
    torch_private.stop_keep_alive(SimpleNamespace(_stop_heartbeats=never.wait), limit=0.1)
    assert not never.is_set()


def test_the_real_handler_has_all_of_it() -> None:
    handler = dynamic_rendezvous.DynamicRendezvousHandler
    assert {"_state_holder"} <= set(handler.__annotations__) and hasattr(handler, "_stop_heartbeats")
    assert "_cache_duration" in dynamic_rendezvous._BackendRendezvousStateHolder.__annotations__
    torch_private.import_what_ddp_imports()


@pytest.mark.parametrize("name", ["_RendezvousState", "_NodeDesc"])
def test_a_torch_whose_nodes_meet_otherwise_is_one_line(without: Any, name: str) -> None:
    without(dynamic_rendezvous, name)
    if hasattr(dynamic_rendezvous, name):
        assert getattr(dynamic_rendezvous, name) in torch_private.rendezvous_kinds()
    else:
        with pytest.raises(ConfigError, match=r"rendezvous of torch .*; install torch"):
            torch_private.rendezvous_kinds()


def test_fsdp_is_refused_on_cpus_where_torch_has_it_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.6, which failed in the first step with a missing method of its own."""
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    strategy: Any = object.__new__(FullyShardedStrategy)
    strategy.check(SimpleNamespace(device=torch.device("cuda", 0)))
    with pytest.raises(ConfigError, match="--strategy fsdp on CPUs needs torch .*; .*--strategy ddp"):
        strategy.check(SimpleNamespace(device=torch.device("cpu")))


def test_a_model_is_built_whole_where_torch_has_no_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = torch_private.FakeTensors()
    with fake.mode():
        assert isinstance(torch.empty(2), fake.kind)
    monkeypatch.setitem(sys.modules, "torch._subclasses", SimpleNamespace())
    with pytest.raises(ImportError):
        torch_private.FakeTensors()


def test_a_function_that_reads_what_it_draws_is_noted_whole(without: Any) -> None:
    without(nn.init, "_no_grad_trunc_normal_")
    calls = []
    fake = torch_private.FakeTensors()
    with fake.mode():
        tensor = torch.empty(3)
    has_function = hasattr(nn.init, "_no_grad_trunc_normal_")
    with fake.whole_calls(lambda *args, **_: calls.append(args[1]) or args[1]):
        if has_function:
            nn.init.trunc_normal_(torch.empty(3))
            nn.init.trunc_normal_(tensor)
    assert len(calls) == has_function and all(each is tensor for each in calls)


def test_a_store_listens_at_a_descriptor_in_old_and_new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_private.listening_at(None) == {}
    for version, more in (("2.6.0+cpu", {"use_libuv": False}), ("2.15.0", {})):
        monkeypatch.setattr(torch, "__version__", version)
        assert torch_private.listening_at(7) == {"master_listen_fd": 7, **more}


def test_signs_of_life_are_asked_as_often_as_torch_lets_one() -> None:
    known = torch_private.handler_intervals(1, 5, 0.5)
    wanted = {"keep_alive_interval": 1, "keep_alive_max_attempt": 5, "cas_backoff_max_seconds": 0.5}
    assert known.items() <= wanted.items()


@pytest.mark.parametrize("recorder", ["_dump_nccl_trace_json", "_dump_fr_trace_json"])
def test_the_flight_record_of_nccl_is_that_of_its_group(
    recorder: str, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older group has a recorder of its own, the newer one is called "nccl2" there: "nccl" is empty."""
    found = b'{"entries": [{"collective_seq_id": 1}]}'

    def dump(name: str, backend: str = "nccl2") -> bytes:
        return found if (name, backend) == (recorder, "nccl2") else b'{"entries": []}'

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        monkeypatch.setattr(torch._C._distributed_c10d, name, partial(dump, name), raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert torch_private.flight_record() == found


def test_what_a_loader_process_sends_for_an_error(without: Any) -> None:
    without(torch._utils, "ExceptionWrapper")
    sent = torch_private.worker_failure(ConfigError("no"))
    with pytest.raises(ConfigError, match="no"):
        sent.reraise() if hasattr(sent, "reraise") else (_ for _ in ()).throw(sent)
