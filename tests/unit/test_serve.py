"""`tandem page`: the reports of runs that are there, over HTTP."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import patient
from tandem.cli import run
from tandem.errors import ConfigError
from tandem.report.pages import report_policy
from tandem.report.report import ReportServer, runs_in
from tandem.report.web import Access
from tandem.telemetry.journal import Journal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text('{"lr": 0.1}')
        Journal(tmp_path / "runs" / name).metrics(10, loss=0.5)
    (tmp_path / "runs" / "no run").mkdir()
    return tmp_path / "runs"


def ask(url: str, **headers: str) -> tuple[int, bytes, str]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=patient(20)
        ) as answer:
            return answer.status, answer.read(), str(answer.headers["Content-Security-Policy"])
    except urllib.error.HTTPError as error:
        return error.code, error.read(), ""


@pytest.fixture
def serve() -> Iterator[object]:
    over, threads = threading.Event(), list[threading.Thread]()

    def start(runs: list[Path], access: Access | None = None) -> str:
        server = ReportServer(runs, "127.0.0.1", 0, access or Access())
        threads.append(threading.Thread(target=server.serve, args=(over.is_set,)))
        threads[-1].start()
        return server.url

    yield start
    over.set()
    for thread in threads:
        thread.join()


def names(page: bytes) -> list[str]:
    return re.findall(r'"name": "(one|two)"', page.decode())


def test_several_runs_are_compared_and_each_has_a_page(folder: Path, serve: object) -> None:
    assert callable(serve)
    url = serve(sorted(runs_in([folder])))
    code, page, policy = ask(f"{url}/")
    assert (code, names(page), policy) == (200, ["one", "two"], report_policy())
    assert b'"links": ["/1", "/2"]' in page
    assert names(ask(f"{url}/2")[1]) == ["two"] and b'"up": "/"' in ask(f"{url}/2")[1]
    assert ask(f"{url}/3")[0] == ask(f"{url}/../config.json")[0] == 404


def test_it_is_read_anew_and_a_run_that_went_away_is_said(folder: Path, serve: object) -> None:
    assert callable(serve)
    url = serve(runs_in([folder / "one"]))
    assert b'"state": "not finished"' in ask(f"{url}/")[1]
    (folder / "one" / "summary.json").write_text(json.dumps({"state": "finished"}))
    assert b'"state": "finished"' in ask(f"{url}/")[1] and b'"links": []' in ask(f"{url}/")[1]
    for file in (folder / "one").iterdir():
        file.unlink()
    code, said, _ = ask(f"{url}/")
    assert code == 404 and b"is not a run" in said


def test_it_is_as_guarded_as_the_live_page(folder: Path, serve: object) -> None:
    assert callable(serve)
    assert ask(f"{serve([folder / 'one'])}/", Host="evil.example")[0] == 421
    url = serve([folder / "one"], Access("word"))
    assert ask(f"{url}/healthz")[0] == ask(f"{url}/readyz")[0] == 200  # probes send no token
    assert ask(f"{url}/")[0] == 401 and ask(f"{url}/", Authorization="Bearer word")[0] == 200


def test_what_cannot_be_served_is_one_line(folder: Path, tmp_path: Path) -> None:
    for place, words in ((folder / "no run", "is not a run"), (tmp_path / "nothing", "does not exist")):
        with pytest.raises(ConfigError, match=words):
            run("page", [str(place)], {})
    with pytest.raises(ConfigError, match="--token-file"):
        run("page", [str(folder), "--host", "0.0.0.0"], {})


def test_the_verb_serves_until_ctrl_c(folder: Path) -> None:
    command = [sys.executable, "-m", "tandem", "page", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().partition(" ")[0]
        assert sorted(names(ask(url)[1])) == ["one", "two"]
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=patient(60)) == 0


def test_a_broken_run_is_left_out_and_the_others_are_served(
    folder: Path, serve: object, tmp_path: Path
) -> None:
    (tmp_path / "secret.json").write_text('{"canary": 1}')
    for name in ("one", "three"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "summary.json").symlink_to(tmp_path / "secret.json")
    (folder / "three" / "config.json").symlink_to(tmp_path / "secret.json")
    assert callable(serve)
    url = serve(sorted(runs_in([folder])))
    code, page, _ = ask(f"{url}/")
    assert code == 200 and names(page) == ["one", "two"] and b"canary" not in page
    assert b'"links": ["/1", "/3"]' in page and b"config.json is a link" in page
    code, said, _ = ask(f"{url}/2")
    assert code == 404 and said.count(b"\n") == 1 and b"config.json is a link" in said
    assert ask(f"{url}/3")[0] == 200
