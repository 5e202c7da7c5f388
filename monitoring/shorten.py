#!/usr/bin/env python3
"""Print rules.yaml with seconds instead of minutes and hours, so that alerts fire while you watch.

    monitoring/shorten.py > /tmp/rules.yaml          # for Prometheus in a test or a demo

Waits (`for`) become 2 s, ranges become at most 10 s, and the limit of a stall becomes 5 s instead of two
minutes. The comparisons do not change.
"""

import re
from pathlib import Path

RULES = Path(__file__).with_name("rules.yaml")


def shortened(rules: str) -> str:
    """Return the rules with short times."""
    rules = re.sub(r"for: \d+[mh]", "for: 2s", rules)
    rules = re.sub(r"(?<=\[)\d+[mhd](?=[\]:])", "10s", rules)
    rules = rules.replace("[10s:15s]", "[10s:1s]")
    return re.sub(r", 120\)", ", 5)", rules)


if __name__ == "__main__":
    print(shortened(RULES.read_text(encoding="utf-8")), end="")
