"""docs/benchmarks.md is what benchmarks/page.py makes of the results; what there is none of is said."""

from pathlib import Path

import page


def test_the_page_is_made_of_the_results() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(page.RESULTS)


def test_what_no_file_has_is_not_measured(tmp_path: Path) -> None:
    text = page.page(tmp_path)
    assert text.count("Not measured.") == len(page.QUESTIONS)
    programs = {question.program.split()[0] for question in page.QUESTIONS}
    assert all((page.ROOT / "benchmarks" / program).exists() for program in programs)
