"""Report how a launch is doing to a webhook (`--notify`) and to Kubeflow Trainer's status endpoint.

Only node 0's agent reports, in threads that nothing waits for while the run lasts.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tandem.config import Settings
from tandem.report.notify import NOTIFIED, Notices
from tandem.report.trainer_status import Endpoint, TrainerStatus
from tandem.signals import StopFlag
from tandem.telemetry.messages import Message, Send
from tandem.timeouts import OUTGOING_END_SECONDS, STOPPED_END_SECONDS

log = logging.getLogger("tandem.node")


class Outgoing:
    """Reports this launch to a webhook and to Kubeflow Trainer until `close`, if either is configured."""

    def __init__(self) -> None:
        self._receivers: list[Notices | TrainerStatus] = []

    def open(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        run: str,
        events: Iterable[Mapping[str, Any]],
        count: Send,
        event: Callable[..., None],
        hide: Callable[[str], str],
    ) -> None:
        """Start reporting, on node 0.

        `count` takes samples, `event` writes a line to the journal, `hide` removes secrets from a text.
        """
        webhook = settings.telemetry.notify
        if webhook is not None and webhook.address:

            def delivered(what: str, cause: str) -> None:
                event(NOTIFIED, event=what, cause=cause)

            self._receivers.append(Notices(webhook, run, events, count, delivered, hide))
        elif webhook is not None:
            log.warning("--notify: %s has no secret part; no messages are sent; set TANDEM_NOTIFY", webhook)
        if (endpoint := Endpoint.of(environ)) is not None:
            self._receivers.append(TrainerStatus(endpoint, settings.data.batch_size, count))

    def handle(self, message: Message) -> None:
        """Process a message of a rank or an event of this agent."""
        for each in self._receivers:
            each.handle(message)

    def ended(self, state: str, code: int, reason: str) -> None:
        """Send how the launch ended, without waiting for it; `state`: finished, stopped or failed."""
        for each in self._receivers:
            each.ended(state, code, reason)

    def flush(self, stop: StopFlag) -> None:
        """Wait for the last messages: less time after a stop signal, none after a second Ctrl-C."""
        for each in self._receivers:
            each.flush(STOPPED_END_SECONDS if stop else OUTGOING_END_SECONDS, lambda: stop.interrupts > 1)

    def close(self) -> None:
        for each in self._receivers:
            each.close()
