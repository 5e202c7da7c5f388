"""GPU metrics through NVML (extra `gpu`): absent without a GPU or the package, never an error."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tandem.telemetry import metrics
from tandem.telemetry.metrics import Gauge, Sample

logger = logging.getLogger("tandem")

# Reasons for reduced clocks that indicate a problem. Reaching the power limit is normal.
SLOWDOWN_REASONS = ("HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")


class Gpus:
    """This node's GPUs. `sample` returns their metrics, empty if there are none.

    `names`: the GPUs that torch sees, in its order, from CUDA_VISIBLE_DEVICES; None: all. NVML counts every
    GPU of the machine, so a rank's GPU 0 may be NVML's GPU 3.
    """

    def __init__(self, nvml: Any = None, names: Sequence[str] | None = None) -> None:
        self._nvml = nvml  # type: ignore[var-annotated,unused-ignore]
        self._handles = []
        self._energy: dict[int, float] = {}
        self._has_warned = False
        try:
            if nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
            count = range(self._nvml.nvmlDeviceGetCount())
            everyone = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in count]
            self._handles = everyone if names is None else [self._named(name, everyone) for name in names]
        # Without the package, a driver or a GPU, nothing can be measured.
        except Exception as error:
            logger.debug("no GPU metrics: %s", error)

    def _named(self, name: str, everyone: Sequence[Any]) -> Any:
        """Find a GPU by index, by the start of its UUID, or as a MIG device, which is not in `everyone`."""
        if name.isdecimal():
            return everyone[int(name)]
        begins = (each for each in everyone if _text(self._nvml.nvmlDeviceGetUUID(each)).startswith(name))
        found = next(begins, None)
        return self._nvml.nvmlDeviceGetHandleByUUID(name.encode()) if found is None else found

    def __len__(self) -> int:
        return len(self._handles)

    def names(self) -> list[str]:
        """Return the names of the GPUs, as far as NVML knows them."""
        try:
            return [_text(self._nvml.nvmlDeviceGetName(handle)) for handle in self._handles]
        except Exception as error:
            logger.debug("a GPU does not report its name: %s", error)
            return []

    def sample(self) -> list[Sample]:
        """Return the current values; a value that a GPU does not support is left out."""
        samples: list[Sample] = []
        for gpu, handle in enumerate(self._handles):
            try:
                self._sample_one(gpu, handle, samples)
            except Exception as error:
                # A failed GPU is sampled every few seconds, so a warning each time would fill the log.
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning("cannot query GPU %d: %s", gpu, error)
        return samples

    def _sample_one(self, gpu: int, handle: Any, samples: list[Sample]) -> None:
        nvml = self._nvml

        def ask(question: Callable[[], Any]) -> Any:
            with suppress(nvml.NVMLError):
                return question()
            return None

        def put(gauge: Gauge, value: float | None) -> None:
            if value is not None:
                samples.append(gauge.set(value, gpu=gpu))

        names = {
            "uuid": _text(ask(lambda: nvml.nvmlDeviceGetUUID(handle))),
            "name": _text(ask(lambda: nvml.nvmlDeviceGetName(handle))),
            "driver": _text(ask(nvml.nvmlSystemGetDriverVersion)),
        }
        samples.append(metrics.GPU_INFO.set(1, gpu=gpu, **names))
        used = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        # NVML returns percent, and Prometheus' convention is a ratio.
        put(metrics.GPU_UTILIZATION_RATIO, used.gpu / 100 if used is not None else None)
        memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        put(metrics.GPU_MEMORY_USED_BYTES, memory.used if memory is not None else None)
        put(metrics.GPU_MEMORY_SIZE_BYTES, memory.total if memory is not None else None)
        put(
            metrics.GPU_TEMPERATURE_CELSIUS,
            ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        )
        reasons = ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        put(metrics.GPU_THROTTLED, None if reasons is None else float(bool(reasons & self._slowdown_mask())))
        millijoules = ask(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        if millijoules is not None:
            # NVML counts from the load of the driver; a reload begins at 0. Only the energy since the first
            # sample counts.
            before = self._energy.setdefault(gpu, millijoules)
            self._energy[gpu] = millijoules
            samples.append(metrics.GPU_ENERGY_JOULES.inc(max(0.0, (millijoules - before) / 1e3), gpu=gpu))

    def _slowdown_mask(self) -> int:
        mask = 0
        for reason in SLOWDOWN_REASONS:
            # Newer versions of NVML have renamed the constants.
            for spelling in (f"nvmlClocksEventReason{reason}", f"nvmlClocksThrottleReason{reason}"):
                mask |= int(getattr(self._nvml, spelling, 0))
        return mask


def _text(value: object) -> str:
    """Decode text: NVML's Python binding returned bytes up to version 11."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
