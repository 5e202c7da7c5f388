"""What the ranks of a run print for months takes two files of each, and nobody loses its last words."""

from typing import Any

import pytest

from program_files import program_text
from tandem.rotation import LOG_BYTES

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

PRINTING = program_text("bounded_logs_printing")


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
