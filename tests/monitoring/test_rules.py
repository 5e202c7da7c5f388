"""Rules and dashboard without a run: promtool's checks, tests on both sides, runbooks, what is generated."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from patience import patient
from prometheus import DASHBOARD, ROOT, RULES

pytestmark = [pytest.mark.core, pytest.mark.monitoring]
FOLDER = ROOT / "monitoring"
RULE_LIST = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULE_LIST if "alert" in rule}
MOVED = {  # alert -> its threshold, and one that its `loud` case does not reach: the test of the tests
    "TandemStraggler": ("> 1.2", "> 1.26"),
    "TandemStepsSkipped": ("> 0.05", "> 0.07"),
    "TandemThroughputDegraded": ("< 0.7 *", "< 0.5 *"),
    "TandemDataBound": ("> 0.3", "> 0.32"),
    "TandemCheckpointVolumeFilling": ("< 3 *", "< 2 *"),
    "TandemRestartingOften": ("> 2.5", "> 3.5"),
    "TandemLowGoodput": ("< 0.8", "< 0.7"),
    "TandemGpuIdle": ("< 0.2", "< 0.1"),
    "TandemCheckpointStale": ("> 2 *", "> 5 *"),
    "TandemTrainingStalled": (", 120)", ", 300)"),
}


def load(name: str) -> ModuleType:
    """A script of monitoring/ as a module."""
    spec = importlib.util.spec_from_file_location(f"monitoring_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LIMIT = patient(120)


def promtool(*arguments: str, cwd: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments], cwd=cwd, stdout=-1, stderr=subprocess.STDOUT, text=True, timeout=LIMIT
    )


def test_promtool_has_nothing_to_say(require: Any, tmp_path: Path) -> None:
    require("promtool")
    (tmp_path / "short.yaml").write_text(load("shorten").shortened(RULES.read_text()))
    for rules in (str(RULES), str(tmp_path / "short.yaml")):
        checked = promtool("check", "rules", "--lint=all", "--lint-fatal", rules)
        assert checked.returncode == 0, checked.stdout
    tested = promtool("test", "rules", "rules.test.yaml")
    assert tested.returncode == 0, tested.stdout


def test_the_tests_notice_moved_thresholds(require: Any, tmp_path: Path) -> None:
    require("promtool")
    rules = RULES.read_text()
    for threshold, moved in MOVED.values():
        assert rules.count(threshold) == 1, threshold
        rules = rules.replace(threshold, moved)
    (tmp_path / "rules.yaml").write_text(rules)
    (tmp_path / "rules.test.yaml").write_text((FOLDER / "rules.test.yaml").read_text())
    tested = promtool("test", "rules", "rules.test.yaml", cwd=tmp_path)
    assert tested.returncode == 1
    assert set(re.findall(r"alertname: (\w+)", tested.stdout)) == set(MOVED)


@pytest.mark.parametrize("alert", list(ALERTS))
def test_every_alert_is_tested_on_both_sides(alert: str) -> None:
    cases = yaml.safe_load((FOLDER / "rules.test.yaml").read_text())["tests"]
    mine = [case for case in cases for each in case.get("alert_rule_test", []) if each["alertname"] == alert]
    assert mine, "no test"
    for case in mine:
        assert [each for each in case["alert_rule_test"] if each["exp_alerts"]], "never fires"
        beside = any("quiet" in each["series"] for each in case["input_series"])
        before = any(not each["exp_alerts"] for each in case["alert_rule_test"])
        assert beside or before, "never quiet"


@pytest.mark.parametrize("alert", list(ALERTS))
def test_every_alert_has_a_runbook(alert: str) -> None:
    rule = ALERTS[alert]
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    page, _, anchor = rule["annotations"]["runbook_url"].rpartition("#")
    text = (ROOT / "docs" / page.rpartition("/")[2]).read_text()
    section = re.search(rf"^### {alert}\n(.*?)(?=^##|\Z)", text, re.M | re.S)
    assert section is not None and anchor == alert.lower()
    for word in ("Symptom", "It means", "Look at", "Do"):
        assert f"**{word}:**" in section[1], f"{alert} has no {word}"


def test_what_is_generated_is_up_to_date() -> None:
    assert json.loads(DASHBOARD.read_text()) == load("dashboard").dashboard(), "run make dashboard-json"


def test_every_panel_has_a_unit_a_place_and_the_datasource_variable() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = load("dashboard").every_panel(dashboard["panels"])
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["w"] > 0 and place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert panel["targets"] and panel["datasource"]["uid"] == "${datasource}"
    text = DASHBOARD.read_text()
    assert not re.findall(r"rate\([^\[]*\[(?!\$__rate_interval)", text)
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names == ["datasource", "job", "run", "instance"]


def test_provisioning_is_wired_to_the_files_that_are_there() -> None:
    compose = yaml.safe_load((ROOT / "compose" / "monitoring.yaml").read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume["source"] if isinstance(volume, dict) else volume.partition(":")[0]
            if source.startswith("./"):
                assert (ROOT / "compose" / source).exists(), source
    config = yaml.safe_load((ROOT / "compose" / "prometheus" / "prometheus.yml").read_text())
    assert [job["job_name"] for job in config["scrape_configs"]] == ["tandem"]
