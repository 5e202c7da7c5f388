"""Read OpenTelemetry's standard variables for this launch, and create the attributes of its resource."""

import logging
import math
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tandem import __version__

log = logging.getLogger("tandem.tracker")

OTEL = "otel"
SIGNALS = ("metrics", "traces", "logs")
PREFIX = "OTEL_EXPORTER_OTLP_"
ENDPOINT = f"{PREFIX}ENDPOINT"
INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
INTERVAL_SECONDS = 60.0
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
INSTALL = "OpenTelemetry is not installed here; run: pip install 'tandem-train[otel]'"


class OtelChoice(NamedTuple):
    """The signals to send, the interval of metrics in seconds, and the problems with the variables."""

    signals: tuple[str, ...]
    interval: float
    problems: tuple[str, ...]

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "OtelChoice":
        """Return the choice in OpenTelemetry's standard variables; without an endpoint, no signals."""
        problems = []
        signals = []
        is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        for signal in () if is_off else SIGNALS:
            wanted = environ.get(f"OTEL_{signal.upper()}_EXPORTER") or "otlp"
            address, endpoint = _of_signal(environ, signal, "ENDPOINT")
            if not endpoint or "otlp" not in [each.strip() for each in wanted.split(",")]:
                continue
            variable, protocol = _of_signal(environ, signal, "PROTOCOL")
            # The value may contain a password.
            if not endpoint.startswith(("http://", "https://")):
                problems.append(f"{address}: invalid value; expected http://HOST:4318 or https://...")
            elif protocol not in ("", "http/protobuf"):
                problems.append(
                    f"{variable}: unsupported value; set it to http/protobuf, "
                    f"and {address} to the collector's port for HTTP, which is usually 4318"
                )
            else:
                signals.append(signal)
        return cls(tuple(signals), _interval(environ), tuple(dict.fromkeys(problems)))


def _of_signal(environ: Mapping[str, str], signal: str, what: str) -> tuple[str, str]:
    """Return the name and value of the variable in effect: the signal's own one, if it is set."""
    own = f"{PREFIX}{signal.upper()}_{what}"
    name = own if environ.get(own) else f"{PREFIX}{what}"
    return name, environ.get(name, "")


def _interval(environ: Mapping[str, str]) -> float:
    with suppress(ValueError):
        seconds = float(environ.get(INTERVAL, "")) / 1000
        if math.isfinite(seconds) and seconds > 0:
            return seconds
    return INTERVAL_SECONDS


def is_installed() -> bool:
    """Return whether the extra `otel` is installed."""
    with suppress(ModuleNotFoundError):
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    return False


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether this launch is sent to a collector; if not, log what prevents it."""
    choice = OtelChoice.of(environ)
    for problem in choice.problems:
        log.warning("%s; this is not sent to OpenTelemetry", problem)
    if choice.signals and not is_installed():
        log.warning("%s is set, but %s", _of_signal(environ, choice.signals[0], "ENDPOINT")[0], INSTALL)
        return False
    return bool(choice.signals)


def resource_of(environ: Mapping[str, str], run: Path, task: str, identity: str) -> dict[str, str]:
    """Return attributes by the semantic conventions, as far as they are known."""
    found = {
        "service.name": "tandem",
        "service.version": __version__,
        "service.instance.id": identity,
        "host.name": socket.gethostname(),
        "tandem.run": run.name,
        "tandem.task": task,
    }
    if environ.get("KUBERNETES_SERVICE_HOST"):
        host = environ.get("HOSTNAME") or socket.gethostname()
        index = environ.get("JOB_COMPLETION_INDEX")
        # The pods of an Indexed Job have the host name JOB-INDEX; their names are longer.
        if index is None:
            found["k8s.pod.name"] = host
        elif host.endswith(f"-{index}"):
            found["k8s.job.name"] = host.removesuffix(f"-{index}")
        with suppress(OSError):
            found["k8s.namespace.name"] = NAMESPACE.read_text().strip()
    return {name: value for name, value in found.items() if value}
