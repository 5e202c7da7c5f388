"""Send a message to a webhook (`--notify`) when a run fails, stops, hangs, recovers or finishes.

Node 0's agent derives the messages from the events of the run. A delivered message is recorded as an event
itself, so that later launches of the run do not send it again.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.address import Webhook
from tandem.errors import FINISHED, STOPPED
from tandem.report.sender import HttpRequest, HttpSender
from tandem.telemetry.messages import Event, Heartbeat, Message, Send
from tandem.timeouts import SAME_CAUSE_SECONDS

NOTIFIED = "notified"
"""Kind of the event for a delivered message, with the fields `event` and `cause`."""
MOST_WAITING = 20
LONGEST_TEXT = 2000
"""A reason may contain a traceback. Slack cuts at 40,000 characters, Teams refuses above 28 kB."""
SLACK = re.compile(r"hooks\.slack(-gov)?\.com")
TEAMS = re.compile(r".+\.(webhook\.office|logic\.azure|powerplatform)\.com")
JOINED = "a node joined"  # the words of recovery.py; the ranks restart, but nothing has failed


@dataclass(frozen=True)
class Notice:
    """An event of the run, as plain JSON. `event`: failed, stopped, hang, recovered or finished."""

    run: str
    event: str
    cause: str
    text: str
    time: float
    node: int | None = None
    rank: int | None = None
    step: int | None = None


def body_for(host: str, notice: Notice) -> dict[str, Any]:
    """Return the JSON that the webhook's service expects: Slack's or Teams', or else the notice itself."""
    if SLACK.fullmatch(host):
        # Slack reads < and > as its own markup, such as <!channel>.
        text = notice.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return {"text": text}
    if TEAMS.fullmatch(host):
        card = {
            "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
            "type": "AdaptiveCard",
            "version": "1.2",
            "body": [{"type": "TextBlock", "text": notice.text, "wrap": True}],
        }
        kind = "application/vnd.microsoft.card.adaptive"
        return {
            "type": "message",
            "attachments": [{"contentType": kind, "contentUrl": None, "content": card}],
        }
    return dict(vars(notice))


def key_of(event: str, cause: str) -> tuple[str, str]:
    """Return the identity of a message: its ranks count; steps, times and process IDs always differ."""
    return event, re.sub(r"(?<!\brank )(?<!\bnode )(?<![\d.,])\d[\d.,]*", "#", cause)


class OncePerCause:
    """Allows one message per event and cause in SAME_CAUSE_SECONDS, counting those of earlier launches."""

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self._last: dict[tuple[str, str], float] = {}
        for each in events:
            if each.get("kind") == NOTIFIED and isinstance(each.get("time"), int | float):
                self._last[key_of(str(each.get("event")), str(each.get("cause")))] = float(each["time"])

    def allows(self, event: str, cause: str, now: float) -> bool:
        """Return whether a message may be sent at `now` (Unix time), and record it if so."""
        key = key_of(event, cause)
        # A clock that was set back must not silence a cause for longer.
        if 0 <= now - self._last.get(key, float("-inf")) < SAME_CAUSE_SECONDS:
            return False
        self._last[key] = now
        return True


class Notices:
    """Sends messages about one launch to a webhook, from construction to `close`."""

    def __init__(
        self,
        webhook: Webhook,
        run: str,
        events: Iterable[Mapping[str, Any]],
        count: Send,
        delivered: Callable[[str, str], object] = lambda event, cause: None,
        hide: Callable[[str], str] = lambda text: text,
    ) -> None:
        """`events`: those of the run so far. `delivered` is called with an event and its cause.

        `hide` removes secrets from a text.
        """
        known = list(events)
        self._webhook = webhook
        self._run = run
        self._hide = hide
        self._delivered = delivered
        self._once = OncePerCause(known)
        self._sender = HttpSender("webhook", count, MOST_WAITING)
        self._step = 0
        self._recovers_from = _how_the_last_launch_ended(known)
        self._begun = False

    def handle(self, message: Message) -> None:
        """Send a message if this is news; ignore it otherwise."""
        match message:
            case Heartbeat(0, step, trained=trained):
                self._step = step
                if trained and self._begun and self._recovers_from:
                    self._recovered(self._recovers_from, {"step": step})
            case Event("world"):
                self._begun = True
            case Event("hang", _, values):
                self._hung(values)
            case Event("rank_killed", _, values):
                who = f"rank {values.get('rank')} on node {values.get('node')}"
                self._recovered(f"{who} was killed ({values.get('signal')})", values)
            case Event("recovered", _, values) if values.get("cause") != JOINED:
                self._recovered(str(values.get("cause")), values)

    def ended(self, state: str, code: int, reason: str) -> None:
        """Send how the launch ended: finished, stopped or failed."""
        texts = {
            "finished": f"finished at step {self._step:,}",
            "stopped": f"stopped at step {self._step:,}"
            + (", saved; the same command resumes it" if code == STOPPED else f": {reason}"),
        }
        text = texts.get(state, f"failed at step {self._step:,} (exit code {code}): {reason}")
        rank = re.search(r"\brank (\d{1,6})\b", reason)
        node = re.search(r"\bnode (\d{1,6})\b", reason)
        named = {"rank": rank and int(rank[1]), "node": node and int(node[1]), "step": self._step}
        # After a good end, the reason says only that all ranks exited so.
        cause = {FINISHED: "the last step is done", STOPPED: "a stop signal"}.get(code, reason or state)
        self._send(state, cause, text, named)

    def flush(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait until all messages are delivered or given up, at most for `seconds`."""
        self._sender.flush(seconds, is_over)

    def close(self) -> None:
        self._sender.close()

    def _hung(self, values: Mapping[str, Any]) -> None:
        who = f"rank {values.get('rank')} on node {values.get('node')}"
        cause = f"{who} hung in {values.get('phase')}"
        waited = f"{float(values.get('seconds') or 0):.0f} s without progress"
        self._send("hang", cause, f"{cause} at step {values.get('step')} ({waited}); restarting", values)

    def _recovered(self, cause: str, values: Mapping[str, Any]) -> None:
        self._recovers_from = ""
        lost = values.get("steps_lost")
        cost = f"; {lost:,} steps are repeated" if isinstance(lost, int) and lost else ""
        self._send("recovered", cause, f"recovered and training again after: {cause}{cost}", values)

    def _send(self, event: str, cause: str, text: str, named: Mapping[str, Any]) -> None:
        now = time.time()
        cause = self._hide(cause)[:LONGEST_TEXT]
        if not self._once.allows(event, cause, now):
            return
        where = {name: named.get(name) for name in ("node", "rank", "step")}
        if where["step"] is None:
            where["step"] = self._step
        text = f"tandem run {self._run}: {self._hide(text)}"[:LONGEST_TEXT]
        body = body_for(self._webhook.host, Notice(self._run, event, cause, text, now, **where))
        request = HttpRequest(self._webhook.address, body)
        self._sender.put(lambda: request, lambda: self._delivered(event, cause))


def _how_the_last_launch_ended(events: Iterable[Mapping[str, Any]]) -> str:
    """Return how the last launch failed, which this one recovers from; "" if it finished or was stopped."""
    how = ""
    for each in events:
        match each.get("kind"):
            case "world":
                how = "the last launch ended without a result"
            case "failed":
                how = f"the last launch failed: {each.get('reason')}"
            case "finished" | "stopped":
                how = ""
    return how
