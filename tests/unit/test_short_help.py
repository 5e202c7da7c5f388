"""`tandem VERB -h` fits a screen, and `tandem --help` lists every verb once, in groups."""

import argparse
import re
import subprocess
import sys

import pytest

from patience import patient
from tandem.cli import GROUPS, VERBS, parser_of
from tandem.config import SETTINGS
from tandem.config.arguments import COMMON

LONGEST_LINES = 40


def tandem(*words: str) -> str:
    command = [sys.executable, "-m", "tandem", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=patient(60)).stdout


@pytest.mark.parametrize("verb", VERBS)
def test_short_help_fits_a_screen(verb: str) -> None:
    text = parser_of(verb, is_short=True).format_help()
    assert len(text.splitlines()) <= LONGEST_LINES
    assert max(map(len, text.partition("examples:")[0].splitlines())) <= 110
    shown = [each for each in parser_of(verb)._actions if each.help != argparse.SUPPRESS]
    own = {flag for action in shown for flag in action.option_strings}
    own -= {setting.flag for setting in SETTINGS.values()} | {"--config", "--task.NAME"}
    listed = set(re.findall(r"(?:^  |, )(--?[a-z][\w-]*)", text, re.M))
    assert {flag for flag in own if not flag.startswith("--no-")} <= listed


def test_short_help_has_common_settings_and_examples() -> None:
    text = tandem("launch", "-h")
    assert all(SETTINGS[name].flag in text for name in COMMON["launch"]) and "--channels-last" not in text
    assert "--help" in text and "examples" in text
    assert "--nodes N" in text and "--master HOST:PORT" in text and "{fp32,bf16,fp16,auto}" in text


def test_full_help_has_every_setting_with_a_typed_placeholder() -> None:
    text = tandem("launch", "--help")
    missing = [s.flag for s in SETTINGS.values() if s.flag not in text]
    assert not missing and " VALUE " not in text.replace("--task.NAME VALUE", "")


def test_every_verb_is_in_one_group() -> None:
    listed = [verb for verbs in GROUPS.values() for verb in verbs]
    assert sorted(listed) == sorted(VERBS)
    text = tandem("--help")
    assert all(f"{title}:" in text for title in GROUPS) and max(map(len, text.splitlines())) <= 130
    assert tandem("-V") == tandem("--version")
