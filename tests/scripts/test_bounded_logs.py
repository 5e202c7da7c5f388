"""What the ranks of a run print for months takes two files of each, and nobody loses its last words."""

from typing import Any

import pytest

from tandem.rotation import LOG_BYTES

pytestmark = [pytest.mark.multi, pytest.mark.slow, pytest.mark.timeout(300)]

PRINTING = """
import os, time
rank, line = int(os.environ["RANK"]), "a line" + "." * 1000

def much(first):
    for number in range(first, first + 35_000):
        print(line, number)

much(0)
time.sleep(1.5)  # whoever speaks for the rank looks four times a second
much(35_000)
time.sleep(1.5)
print("the last word of rank", rank, flush=True)
raise SystemExit(rank)
"""


def test_logs_are_bounded_while_their_ranks_write(scripts: Any) -> None:
    (scripts.folder / "printing.py").write_text(PRINTING)
    code, said = scripts.run(scripts.tandem("--nproc", 2, "printing.py"))
    assert code == 1 and "the last word of rank 1" in said, said[-2000:]
    for rank in (0, 1):
        path = scripts.folder / "run" / "log" / f"rank-{rank}.log"
        before = path.with_name(f"{path.name}.1").read_bytes()
        assert path.stat().st_size < LOG_BYTES, "the second file was not begun"
        assert len(before) < 2 * LOG_BYTES, "so much in a quarter of a second"
        lines = (before + path.read_bytes()).decode().splitlines()
        numbers = [int(each.rpartition(" ")[2]) for each in lines if each.startswith("a line")]
        assert numbers == list(range(numbers[0], 70_000)), "a line is lost, or in two parts"
        assert f"the last word of rank {rank}" in lines
