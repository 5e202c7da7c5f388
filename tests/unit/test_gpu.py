"""GPU metrics against a driver that is there, that is not, and that answers only in part."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.launch.this_machine import chosen_gpus
from tandem.telemetry.gpu import Gpus
from tandem.telemetry.metrics import GPU_INFO
from tandem.telemetry.registry import Registry


class NVMLError(Exception):
    pass


class Driver:
    """Two GPUs; the second one knows no temperature."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    nvmlClocksEventReasonHwSlowdown = 8
    nvmlClocksEventReasonSwPowerCap = 4

    def __init__(self) -> None:
        self.energy, self.reasons = 1_000_000, 4

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        return uuid.decode()

    def nvmlDeviceGetUUID(self, handle: int | str) -> bytes:
        return str(handle).encode() if isinstance(handle, str) else f"GPU-{handle}-f00".encode()

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "Imaginary 100"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "1.2"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=3, total=4)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        if handle == 1:
            raise NVMLError("not supported")
        return 60

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.reasons

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return self.energy


def test_what_gpus_say_and_what_they_cannot_say() -> None:
    driver, metrics = Driver(), Registry()
    gpus = Gpus(driver)

    def value(name: str, /, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    assert "tandem_gpu" not in metrics.page().decode()
    metrics.apply(gpus.sample())
    driver.energy, driver.reasons = 1_002_500, 12
    metrics.apply(gpus.sample())
    assert value("tandem_gpu_utilization_ratio", gpu="1", node="0") == 0.5
    assert value("tandem_gpu_temperature_celsius", gpu="0", node="0") == 60
    assert value("tandem_gpu_temperature_celsius", gpu="1", node="0") is None
    assert value("tandem_gpu_energy_joules_total", gpu="0", node="0") == 2.5
    assert value("tandem_gpu_throttled", gpu="0", node="0") == 1
    assert (
        value("tandem_gpu_info", gpu="1", uuid="GPU-1-f00", name="Imaginary 100", driver="1.2", node="0") == 1
    )
    assert "tandem_collect_errors_total{" not in metrics.page().decode()


def test_a_gpu_at_its_power_limit_is_not_throttled() -> None:
    metrics = Registry()
    metrics.apply(Gpus(Driver()).sample())
    assert metrics.registry.get_sample_value("tandem_gpu_throttled", {"gpu": "0", "node": "0"}) == 0


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        ("1", ["GPU-1-f00"]),
        ("GPU-1,0", ["GPU-1-f00", "GPU-0-f00"]),
        ("MIG-7", ["MIG-7"]),
        ("", []),
        (None, ["GPU-0-f00", "GPU-1-f00"]),
    ],
)
def test_gpus_are_numbered_as_torch_numbers_them(visible: str | None, uuids: list[str]) -> None:
    """Number 0 is the first of CUDA_VISIBLE_DEVICES, not the machine's."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    samples = Gpus(Driver(), chosen_gpus(environ)).sample()
    told = {each.labels["gpu"]: each.labels["uuid"] for each in samples if each.name == GPU_INFO.name}
    assert told == dict(enumerate(uuids))


def test_no_driver_and_a_driver_that_fails_are_no_error() -> None:
    class None_:
        def nvmlInit(self) -> None:
            raise OSError("libnvidia-ml.so.1 is not there")

    assert Gpus(None_()).sample() == [] and len(Gpus(None_())) == 0
    broken = Driver()
    gpus = Gpus(broken)
    broken.nvmlDeviceGetUUID = None  # type: ignore[assignment,method-assign]
    gpus.sample()
    gpus.sample()
