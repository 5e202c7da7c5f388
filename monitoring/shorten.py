#!/usr/bin/env python3
"""Prints rules.yaml with seconds in place of minutes and hours: alerts fire and resolve while one looks on.

    monitoring/shorten.py > /tmp/rules.yaml          # for Prometheus in a test or at a demonstration

Waits (`for`) become 2 s, ranges at most 10 s, and the stall of two minutes one of five seconds. What is
compared with what stays as it is.
"""

import re
from pathlib import Path

RULES = Path(__file__).with_name("rules.yaml")


def shortened(rules: str) -> str:
    """The rules with short times."""
    rules = re.sub(r"for: \d+[mh]", "for: 2s", rules)
    rules = re.sub(r"(?<=\[)\d+[mhd](?=[\]:])", "10s", rules)
    rules = rules.replace("[10s:15s]", "[10s:1s]")
    return re.sub(r", 120\)", ", 5)", rules)


if __name__ == "__main__":
    print(shortened(RULES.read_text(encoding="utf-8")), end="")
