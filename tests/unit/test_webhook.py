"""The address of a webhook is a secret: it is shown nowhere, and messages come once per cause."""

import json
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from receivers import Receiver
from tandem.config import Given, Settings, as_json, as_toml, explain, resolve
from tandem.config.address import Webhook, hide
from tandem.errors import ConfigError
from tandem.launch import secret as secret_module
from tandem.launch.secret import conceal
from tandem.report import sender
from tandem.report.about import About
from tandem.report.notify import NOTIFIED, Notice, Notices, OncePerCause, body_for, key_of
from tandem.report.sender import HttpRequest, HttpSender
from tandem.telemetry.messages import Event, Heartbeat, Samples

SECRET = "T0123ABCD/B0123ABCD/notASecretOfAnyone99"
SLACK = f"https://hooks.slack.com/services/{SECRET}"
TEAMS = f"https://contoso.webhook.office.com/webhookb2/{SECRET}"
FLOWS = f"https://prod-7.westeurope.logic.azure.com:443/workflows/{SECRET}/triggers/manual?sig={SECRET}"


def given(text: str, name: str = "--notify") -> Settings:
    return resolve({"notify": Given(text, f"flag {name}", name)}, {}, None).settings


@pytest.mark.parametrize("address", [SLACK, TEAMS, FLOWS, f"http://user:{SECRET[:9]}word@h:1/{SECRET}"])
def test_whatever_shows_settings_shows_the_host_alone(address: str) -> None:
    loaded = resolve({"notify": Given(address, "flag --notify", "--notify")}, {}, None)
    webhook = loaded.settings.telemetry.notify
    assert webhook is not None and webhook.address == address
    shown = [
        *(as_toml(loaded.settings), explain(loaded), json.dumps(as_json(loaded))),
        *(json.dumps(loaded.settings.to_dict()), repr(loaded.settings), str(webhook), f"{webhook}"),
        *(repr(pickle.dumps(loaded.settings)), pickle.loads(pickle.dumps(webhook))),
        *(hide(f"tandem launch --notify {address}"), hide(f"TANDEM_NOTIFY='{address}'")),
        hide(f"POST {address} failed", webhook.secrets()),
    ]
    for text in shown:
        assert "notASecret" not in text and SECRET[:9] not in text
    assert "[hidden]" in shown[0]


def test_a_rank_and_a_config_json_have_a_webhook_without_its_secret() -> None:
    stored = json.loads(json.dumps(given(SLACK).to_dict()))
    read = Settings.from_dict(stored).telemetry.notify
    assert read == "https://hooks.slack.com/[hidden]" and read is not None and read.address == ""
    assert pickle.loads(pickle.dumps(given(SLACK))).telemetry.notify == read


def test_another_run_does_not_take_over_the_webhook(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given(SLACK).to_dict()))
    loaded = resolve({"config": Given(str(path), "flag --config", "--config")}, {}, None)
    assert loaded.settings.telemetry.notify is None and "notify" in loaded.notes[0]


@pytest.mark.parametrize("bad", [
    f"hooks.slack.com/{SECRET}", f"ftp://x/{SECRET}", f"https:///{SECRET}", f"https://x:99999/{SECRET}",
    f"https://[x/{SECRET}", f"https://x/{SECRET} y", f"https://x/{SECRET}\n",
])  # fmt: skip
def test_an_invalid_address_is_an_error_that_does_not_quote_it(bad: str, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"TANDEM_NOTIFY='{bad}'\n")
    (tmp_path / "run.toml").write_text(f"notify = {json.dumps(bad)}\n")
    config = {"config": Given(str(tmp_path / "run.toml"), "flag --config", "--config")}
    sources: list[Callable[[], object]] = [
        lambda: given(bad),
        lambda: resolve({}, {"TANDEM_NOTIFY": bad}, None),
        lambda: resolve({}, {}, tmp_path / ".env"),
        lambda: resolve(config, {}, None),
    ]
    for source in sources:
        with pytest.raises(ConfigError, match="https?://") as error:
            source()
        assert "notASecret" not in str(error.value)


def test_the_address_leaves_the_variables_and_the_arguments() -> None:
    variables, words = {"TANDEM_NOTIFY": SLACK, "A": "b"}, ["tandem", "--notify", SLACK, f"--notify={SLACK}"]
    conceal(Webhook.parse(SLACK), variables, words)
    assert variables == {"A": "b"}
    assert words == ["tandem", "--notify", str(Webhook.parse(SLACK)), f"--notify={Webhook.parse(SLACK)}"]
    # This process was not started with it, and what it was started with stays as it is.
    before = Path("/proc/self/cmdline").read_bytes()
    for secret in (b"", b"no such argument of this process"):
        secret_module._wipe_block(48, secret)
    assert Path("/proc/self/cmdline").read_bytes() == before


def test_the_page_and_the_report_hide_it_in_all_texts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(given(SLACK).to_dict()))
    about = About(tmp_path, Webhook.parse(SLACK).secrets())
    assert "notASecret" not in json.dumps(about.read())
    assert "notASecret" not in about.hide(f"urlopen: {SLACK} / {SECRET} / {SECRET[-18:]}")


def test_formats_by_host() -> None:
    notice = Notice("r", "failed", "a <cause>", "rank 1 & <!channel> failed", 5.0, rank=1)
    assert body_for("hooks.slack.com", notice) == {"text": "rank 1 &amp; &lt;!channel&gt; failed"}
    for address in (TEAMS, FLOWS):
        card = body_for(Webhook.parse(address).host, notice)["attachments"][0]
        assert card["contentType"] == "application/vnd.microsoft.card.adaptive"
        assert card["content"]["body"][0]["text"] == notice.text
    for host in ("example.org", "hooks.slack.com.example.org", "logic.azure.com.example.org"):
        plain = body_for(host, notice)
        assert set(plain) == {"run", "event", "cause", "node", "rank", "step", "text", "time"}
        assert plain["rank"] == 1 and plain["node"] is None


def test_once_per_cause_in_ten_minutes_also_over_launches() -> None:
    once = OncePerCause([
        {"kind": NOTIFIED, "event": "failed", "cause": "a", "time": 1000.0},
        {"kind": NOTIFIED, "event": "failed", "cause": "b", "time": "never"}, {"kind": "failed"},
    ])  # fmt: skip
    assert not once.allows("failed", "a", 1500.0) and once.allows("hang", "a", 1500.0)
    assert once.allows("failed", "a", 1600.0) and not once.allows("failed", "a", 2199.0)
    assert once.allows("failed", "a", 1000.0), "a clock that went back"


def test_a_cause_is_the_same_at_another_step_but_not_of_another_rank() -> None:
    assert key_of("hang", "rank 3 on node 1 (process 4711) hung at step 1,234 for 10.2 s") == key_of(
        "hang", "rank 3 on node 1 (process 12) hung at step 5 for 11 s"
    )
    assert key_of("hang", "rank 3 on node 1 hung") != key_of("hang", "rank 12 on node 1 hung")
    assert key_of("hang", "rank 1 on node 3") != key_of("hang", "rank 1 on node 4")


# What is sent, and what a bad server costs.


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    here = Receiver()
    yield here
    here.close()


def beat(rank: int, step: int, trained: bool) -> Heartbeat:
    return Heartbeat(rank, step, "train", "forward", 0.0, 1.0, 1.0, trained, False)


class Sent:
    """Notices to a receiver, with what they count and deliver."""

    def __init__(self, receiver: Receiver, events: Any = ()) -> None:
        self.counted: list[Any] = []
        self.delivered: list[tuple[str, str]] = []
        webhook = Webhook.parse(f"{receiver.url}/{SECRET}")
        report = lambda event, cause: self.delivered.append((event, cause))  # noqa: E731
        hide = lambda text: text.replace("hunter2-hunter2", "[hidden]")  # noqa: E731
        self.notices = Notices(webhook, "llm", events, self.counted.append, report, hide)

    def outcomes(self) -> list[str]:
        samples = [each for message in self.counted for each in message.samples]
        return [each.labels["outcome"] for each in samples if each.name == "tandem_outgoing_requests"]


def test_each_event_is_told_once(receiver: Receiver) -> None:
    sent = Sent(receiver)
    handle = sent.notices.handle
    handle(Event("world", 0.0, {"number": 1, "world_size": 2, "nodes": 2}))
    handle(beat(0, 10, True))
    hang = {"rank": 1, "node": 1, "phase": "forward", "step": 10, "seconds": 12.0}
    for _ in range(2):
        handle(Event("hang", 0.0, hang))
    handle(Event("recovered", 0.0, {"cause": "rank 1 on node 1 hung", "seconds": 2.0, "steps_lost": 3}))
    handle(Event("rank_killed", 0.0, {"rank": 0, "node": 0, "signal": "SIGKILL", "steps_lost": 0}))
    handle(Event("recovered", 0.0, {"cause": "a node joined", "seconds": 1.0}))
    handle(beat(0, 20, True))
    sent.notices.ended("failed", 1, "rank 1 on node 1 failed: password hunter2-hunter2")
    sent.notices.flush(20, lambda: False)
    assert [(each["event"], each["rank"], each["step"]) for each in receiver.bodies] == [
        ("hang", 1, 10), ("recovered", None, 10), ("recovered", 0, 10), ("failed", 1, 20),
    ]  # fmt: skip
    assert receiver.bodies[2]["cause"] == "rank 0 on node 0 was killed (SIGKILL)"
    assert "hunter2" not in json.dumps(receiver.bodies) and "3 steps" in receiver.bodies[1]["text"]
    assert {each["run"] for each in receiver.bodies} == {"llm"} and receiver.posted[0].path == f"/{SECRET}"
    assert [event for event, _ in sent.delivered] == ["hang", "recovered", "recovered", "failed"]
    assert sent.outcomes() == ["sent"] * 4


@pytest.mark.parametrize(("last", "cause"), [
    ([{"kind": "world"}, {"kind": "failed", "reason": "it hung twice"}], "it hung twice"),
    ([{"kind": "world"}, {"kind": "checkpoint"}], "ended without a result"),
    ([{"kind": "world"}, {"kind": "stopped"}], None),
    ([{"kind": "world"}, {"kind": "failed"}, {"kind": "world"}, {"kind": "finished"}], None),
    ([], None),
])  # fmt: skip
def test_a_launch_after_a_failed_one_tells_that_training_goes_on(
    receiver: Receiver, last: list[dict[str, Any]], cause: str | None
) -> None:
    sent = Sent(receiver, last)
    sent.notices.handle(beat(0, 7, True))  # of a rank of no generation of this launch
    sent.notices.handle(Event("world", 0.0, {"number": 1}))
    for step in (7, 8):
        sent.notices.handle(beat(0, step, step > 7))
    sent.notices.handle(beat(0, 9, True))
    sent.notices.flush(20, lambda: False)
    assert [each["event"] for each in receiver.bodies] == (["recovered"] if cause else [])
    assert cause is None or cause in receiver.bodies[0]["text"]


@pytest.mark.parametrize(("state", "code", "words", "cause"), [
    ("finished", 0, "finished at step 0", "the last step is done"),
    ("stopped", 143, "the same command resumes it", "a stop signal"),
    ("stopped", 137, "nothing to save", "nothing to save"),
    ("failed", 200, "exit code 200", "nothing to save"),
])  # fmt: skip
def test_ends(receiver: Receiver, state: str, code: int, words: str, cause: str) -> None:
    sent = Sent(receiver)
    sent.notices.ended(state, code, "nothing to save")
    assert words in receiver.until(1)[0].body["text"]
    assert (receiver.bodies[0]["event"], receiver.bodies[0]["cause"]) == (state, cause)


def test_a_server_that_is_busy_gets_it_again_and_one_that_refuses_does_not(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender, "OUTGOING_RETRY_SECONDS", 0.01)
    receiver.answers = lambda number: [429, 500, 200, 400, 301, 500, 500, 500][number - 1]
    sent = Sent(receiver)
    with caplog.at_level(logging.WARNING, "tandem"):
        for number, event in enumerate(("finished", "stopped", "failed", "hang")):
            sent.notices._send(event, f"cause {number}", "text", {})
        sent.notices.flush(20, lambda: False)
    assert len(receiver.posted) == 8, "3 attempts; refused; no redirect is followed; given up after 3"
    assert sent.delivered == [("finished", "cause 0")]
    assert sent.outcomes() == ["failed", "failed", "sent", *["failed"] * 5]
    (warning,) = [each.getMessage() for each in caplog.records]
    assert "HTTP status 429" in warning and "notASecret" not in warning


def test_nothing_waits_for_a_server_that_hangs_or_is_down(caplog: pytest.LogCaptureFixture) -> None:
    hanging = Receiver(answers=lambda number: 60.0)
    down = Receiver()
    down.close()
    for receiver in (hanging, down):
        sent = Sent(receiver)
        began = time.monotonic()
        for number in range(100):
            sent.notices.ended("failed", 1, f"rank {number} failed")
        sent.notices.flush(0.3, lambda: False)
        sent.notices.close()
        assert time.monotonic() - began < 10
    assert "notASecret" not in caplog.text and down.url not in caplog.text
    hanging.close()


def test_a_request_that_cannot_be_made_ends_no_thread(
    caplog: pytest.LogCaptureFixture, receiver: Receiver
) -> None:
    counted: list[Samples] = []
    sends = HttpSender("webhook", counted.append, 5)  # type: ignore[arg-type]

    def fails() -> HttpRequest:
        raise ValueError(SLACK)

    sends.put(fails)
    sends.put(lambda: HttpRequest(f"{receiver.url}/a b{SECRET}\x00", {}))
    sends.put(lambda: HttpRequest(receiver.url, {"number": float("nan")}))
    assert sends.flush(20) and receiver.bodies == [{"number": "NaN"}]
    assert "notASecret" not in caplog.text
    sends.close()
    sends.put(fails)
