"""What a rank computes on: kernels that repeat themselves, and threads that fit its cores."""

import copy
import importlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tandem.checkpoint.state import weights_sha256
from tandem.config import Settings
from tandem.config.slices import ComputeConfig
from tandem.distributed import devices
from tandem.distributed.devices import UNLIMITED, compute_deterministically, quota_of
from tandem.distributed.group import ProcessGroup
from tandem.distributed.peers import is_gpu_failure
from tandem.distributed.position import Connection, Grant, Position
from tandem.errors import ConfigError, GpuLostError, PeerLostError, is_retried
from tandem.signals import StopFlag
from tandem.tasks.recompute import recomputed
from tandem.training.precision import lay_out, precision_of
from tandem.training.train_state import check_compilation, on_their_devices
from tandem.verify import doctor, machine, resume


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_deterministic_kernels_are_asked_for_before_cublas_starts(restored: None) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    compute_deterministically()
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.utils.deterministic.fill_uninitialized_memory


class Stopped(Exception):
    """The runs themselves are not the matter here."""


@pytest.mark.parametrize(
    ("seen", "device", "expected"), [(["0"], "auto", True), (["0"], "cpu", False), ([], "auto", False)]
)
def test_a_proof_on_gpus_is_one_of_deterministic_kernels(
    seen: list[str], device: str, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def runner(arguments: Any, *_: Any) -> Any:
        asked.append(list(arguments))
        raise Stopped

    monkeypatch.setattr(resume, "gpus_of", lambda environ: seen)
    monkeypatch.setattr(resume, "Runner", runner)
    with pytest.raises(Stopped):
        resume.verify(Settings().replace(device=device), ["--lr=1"], {}, 1, StopFlag(), print)
    assert asked == [["--lr=1", *(["--deterministic=true"] if expected else [])]]


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000",
          "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 1),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 1),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/pod\n1:name=systemd:/\n", 
          "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "300000\n",
          "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n"}, 3),
        ({"proc/self/cgroup": "4:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, UNLIMITED),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "nonsense"}, UNLIMITED),
        ({}, UNLIMITED),
    ],
)  # fmt: skip
def test_a_containers_quota_counts_as_cores(files: dict[str, str], cores: int, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quota_of(tmp_path) == cores


@pytest.mark.parametrize(("quota", "ranks", "threads"), [(2, 1, 2), (2, 2, 1), (1, 4, 1), (UNLIMITED, 2, 4)])
def test_threads_fit_the_quota(quota: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "quota_of", lambda root: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    assert devices.set_threads("auto", Position(ranks_on_host=ranks)) == threads
    assert devices.set_threads(7, Position(ranks_on_host=ranks)) == 7


class World:
    """As many ranks as there are answers to whether one lacks bf16."""

    is_first = True

    def __init__(self, device: str, others_lacking: int) -> None:
        self.device, self._others = torch.device(device), others_lacking

    def sum(self, values: list[float]) -> list[float]:
        return [values[0] + self._others]


@pytest.mark.parametrize(
    ("wanted", "device", "others_lacking", "found"),
    [("auto", "cuda:0", 0, "bf16"), ("auto", "cuda:0", 1, "fp32"), ("auto", "cpu", 0, "fp32"),
     ("fp16", "cuda:0", 0, "fp16"), ("fp32", "cuda:0", 0, "fp32")],
)  # fmt: skip
def test_precision_auto_is_bf16_where_all_have_it(
    wanted: str, device: str, others_lacking: int, found: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    world: Any = World(device, others_lacking)
    assert precision_of(wanted, world) == found
    said = [record.message for record in caplog.records]
    assert said == [] if wanted != "auto" else len(said) == 1 and f"--precision auto: {found}" in said[0]


def test_channels_last_changes_how_pictures_lie_and_nothing_else() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))
    turned = copy.deepcopy(plain)
    lay_out(turned, channels_last=True)
    pictures = torch.randn(5, 3, 8, 8)
    seen: list[torch.Tensor] = []
    turned[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    torch.testing.assert_close(turned(pictures), plain(pictures))
    assert seen[0].is_contiguous(memory_format=torch.channels_last) and not seen[0].is_contiguous()
    assert turned[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert weights_sha256(turned[0].state_dict()) == weights_sha256(plain[0].state_dict())
    untouched = copy.deepcopy(plain)
    lay_out(untouched, channels_last=False)
    assert untouched[0].weight.is_contiguous() and not untouched._forward_pre_hooks
    with pytest.raises(ConfigError, match="--channels-last .*--strategy fsdp"):
        lay_out(turned, channels_last=True, shares="--strategy fsdp")


def test_an_optimizers_state_lies_as_its_parameters_do() -> None:
    """A checkpoint holds tensors in order; a fused kernel wants parameter and momentum to lie alike."""
    model = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    lay_out(model, channels_last=True)
    optimizer.load_state_dict(saved)
    on_their_devices(optimizer, [dict(group) for group in optimizer.param_groups])
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    assert momentum.stride() == model.weight.stride()
    assert torch.equal(momentum, saved["state"][0]["momentum_buffer"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 6))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + self.layers(x) * scale


def gradients(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """(loss, gradients, bytes that were kept for backward)."""
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.ones(7, 6, requires_grad=True)).square().mean()
    loss.backward()
    return loss, [p.grad for p in model.parameters() if p.grad is not None], sum(kept)


def test_recomputed_modules_give_the_same_bits_for_less_memory() -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(Block(), Block(), nn.Linear(6, 2))
    again = recomputed(copy.deepcopy(plain), Block)
    loss, expected, kept = gradients(plain)
    their_loss, theirs, kept_theirs = gradients(again)
    assert torch.equal(loss, their_loss) and kept_theirs < kept / 2
    assert all(torch.equal(*pair) for pair in zip(expected, theirs, strict=True))
    assert list(again.state_dict()) == list(plain.state_dict()) and type(again[0]).__name__ == "Block"
    moved = copy.deepcopy(again)  # as DataParallel's replicas: with weights of its own
    with torch.no_grad():
        moved[0].layers[0].weight.zero_()
    assert not torch.equal(gradients(moved)[0], loss)
    assert torch.equal(again.eval()(torch.ones(1, 6)), plain.eval()(torch.ones(1, 6)))
    assert isinstance(again[0](torch.ones(1, 6), scale=2.0), torch.Tensor)
    with pytest.raises(ValueError, match=r"recomputed\(Sequential, Conv2d\): the model has no such module"):
        recomputed(plain, nn.Conv2d)


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver."


@pytest.mark.parametrize(
    ("says", "version", "chosen", "expected"),
    [
        (TOO_OLD, "13.2", None, TOO_OLD.partition(". ")[0]),
        (TOO_OLD, None, None, ""),  # a torch for CPUs
        (TOO_OLD, "13.2", "", ""),  # a simulated node that gets none
        ("Found no NVIDIA driver on your system. Please check", "13.2", None, ""),  # a container for CPUs
    ],
)
def test_a_driver_that_is_too_old_is_one_line(
    says: str, version: str | None, chosen: str | None, expected: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def init() -> None:
        raise RuntimeError(says)

    (tmp_path / "version").write_text("NVRM version: ...")
    monkeypatch.setattr(devices, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    caplog.set_level(logging.WARNING)
    assert devices.choose_devices("auto", 0) == devices.choose_devices("auto", 1) == (torch.device("cpu"),)
    assert [record.message for record in caplog.records] == (
        [f"training on the CPU, because torch cannot use the GPU here: {expected}"] if expected else []
    )
    with pytest.raises(ConfigError, match="--device cuda: torch sees no CUDA device here") as caught:
        devices.choose_devices("cuda", 0)
    assert f"({expected})" in str(caught.value) if expected else "(" not in str(caught.value)


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_driver_that_counts_gpus_and_is_too_old_for_cuda_is_one_line_and_exit_2(
    wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NVML answers with any driver: the GPU was there, and what CUDA said later was a lost peer, for ever."""

    def init(*_: Any) -> None:
        raise RuntimeError(TOO_OLD)

    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat")
    monkeypatch.setattr(devices, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_init", init, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", init, raising=False)
    with pytest.raises(ConfigError, match="535.104.05.*--device cpu") as caught:
        devices.choose_devices(wanted, 0)
    assert "too old (found version 12040)" in str(caught.value) and "\n" not in str(caught.value)
    assert devices.choose_devices("cpu", 0) == (torch.device("cpu"),)
    with pytest.raises(ConfigError, match="too old"):
        ProcessGroup.open(Position(), Connection(), torch.device("cuda", 0), 5.0)
    finding = machine.gpus(wanted)
    assert finding.state == "fail" and "too old" in finding.text
    assert "too old" in dict(doctor._torch())["GPUs"]


def test_a_gpu_that_this_torch_has_no_code_for_is_one_line_and_exit_2(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90"])
    assert devices.choose_devices("auto", 0) == (torch.device("cuda", 0),)
    assert machine.gpus("auto").state == "pass"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    with pytest.raises(ConfigError, match="7.0.*sm_75"):
        devices.choose_devices("auto", 0)
    assert machine.gpus("auto").state == "fail" and "7.0" in dict(doctor._torch())["GPUs"]


@pytest.mark.parametrize(
    ("capability", "archs", "expected"),
    [
        ((8, 6), ["sm_80"], True), ((8, 9), ["sm_86"], True), ((8, 0), ["sm_86"], False),
        ((7, 0), ["sm_75", "sm_80"], False), ((9, 0), ["sm_80"], False), ((9, 0), ["compute_80"], True),
        ((12, 0), ["sm_100"], False), ((10, 3), ["sm_100"], True), ((9, 0), ["sm_90a"], True),
        ((12, 1), ["sm_120a"], False), ((12, 1), ["sm_75", "compute_120"], True),
    ],
)  # fmt: skip
def test_which_code_runs_on_which_gpu(capability: tuple[int, int], archs: list[str], expected: bool) -> None:
    assert devices.has_code_for(capability, archs) == expected


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA error: out of memory", ConfigError),
        ("CUDA out of memory. Tried to allocate 2.00 MiB.", ConfigError),
        ("CUDA error: no kernel image is available for execution on the device", ConfigError),
        ("Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1", ConfigError),
        ("[/x/gloo/transport/tcp/pair.cc:1] Connection closed by peer", PeerLostError),
    ],
)
def test_what_cuda_says_while_the_group_opens_is_no_lost_peer(
    text: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    with pytest.raises(kind):
        ProcessGroup.open(Position(), Connection(), torch.device("cpu"), 5.0)


def test_what_a_new_process_may_mend_is_raised_at_the_start_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: Any) -> None:
        raise RuntimeError(
            "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
            "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized"
        )

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_init", init, raising=False)
    with pytest.raises(RuntimeError, match="802") as caught:
        devices.choose_devices("auto", 0)
    assert is_gpu_failure(caught.value) and machine.gpus("auto").state == "fail"


@pytest.mark.parametrize(("seen", "local_rank"), [(0, 0), (1, 1)])
def test_a_gpu_that_was_there_is_retried_and_never_a_cpu(
    seen: int, local_rank: int, gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    socket = str(tmp_path / "samples.sock")
    first, again = (Grant(sample_socket=socket, restart=restart) for restart in (0, 1))
    assert not again.had_gpu
    first.note_gpu()
    assert again.had_gpu and not first.had_gpu and not Grant(restart=1).had_gpu
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    for wanted in ("auto", "cuda"):
        with pytest.raises(GpuLostError) as caught:
            devices.choose_devices(wanted, local_rank, had_gpu=True)
        assert is_retried(caught.value.exit_code)


def test_kernels_chosen_by_timing_are_refused_where_each_process_needs_the_same() -> None:
    timed = ComputeConfig(compile="max-autotune", deterministic=True)
    with pytest.raises(ConfigError, match="max-autotune.*--deterministic"):
        check_compilation(timed)
    for allowed in (replace(timed, deterministic=False), replace(timed, compile=None)):
        check_compilation(allowed)
    inductor = importlib.import_module("torch._inductor.config")
    if hasattr(inductor, "deterministic"):
        with inductor.patch(deterministic=False):
            check_compilation(replace(timed, compile="default"))
            assert inductor.deterministic
