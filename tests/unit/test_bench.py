"""`tandem bench`: what is run, what is said of what cannot run, and how runs are compared."""

from pathlib import Path

import pytest

from tandem.config import Settings
from tandem.errors import ConfigError
from tandem.verify.bench import BenchOptions, Mode, modes_of, table


@pytest.mark.parametrize(
    ("compare", "output", "said"),
    [
        ("single,dpp", None, "--compare: invalid value 'dpp'; .*; did you mean d"),
        ("", None, "--compare: invalid value ''"),
        ("ddp", Path("nowhere/x.json"), "nowhere does not exist"),
    ],
)
def test_what_is_mistyped_is_said(compare: str, output: Path | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BenchOptions.of(compare, None, output)


def test_all_strategies_in_three_rounds_by_default() -> None:
    assert BenchOptions.of(None, None, None) == BenchOptions(["single", "dp", "ddp", "fsdp"], 3)
    with pytest.raises(ConfigError, match="use --nproc"):
        modes_of(["ddp"], Settings().replace(nodes=2), 0)


def test_ranks_follow_the_gpus_and_what_there_is_not_is_said() -> None:
    def modes(gpus: int, **values: object) -> list[tuple[int, bool]]:
        found = modes_of(["single", "dp", "ddp"], Settings().replace(**values), gpus)
        return [(mode.ranks, bool(mode.problem)) for mode in found]

    assert modes(0) == [(1, False), (1, True), (2, False)]
    assert modes(4) == [(1, False), (1, False), (4, False)]
    assert modes(1) == [(1, False), (1, True), (1, False)]
    assert modes(2, nproc=3) == [(1, False), (1, False), (3, True)]


def test_a_setting_of_ddp_leaves_the_others_out() -> None:
    settings = Settings().replace(gradient_compression="bf16")
    single, ddp, fsdp = modes_of(["single", "ddp", "fsdp"], settings, 0)
    assert (single.problem, ddp.problem) == ("--gradient-compression works only with ddp", "")
    assert fsdp.problem == single.problem


def test_the_table_compares_runs_of_the_same_round() -> None:
    single = Mode("single", 1, "", [100.0, 50.0, 100.0], [2**30] * 3, [2.0, 1.0])
    ddp = Mode("ddp", 2, "", [150.0, 100.0, 160.0], [2**29] * 3, [2.0, 1.25])
    lines = table([single, Mode("dp", 1, "cannot"), ddp], on_gpus=False).splitlines()
    assert lines[0].split("  ")[0] == "strategy" and "of single" in lines[0]
    assert lines[2].split() == ["dp", "1", "cannot"]
    assert lines[3].split() == ["ddp", "2", "150", "(100", "to", "160)", "1.60", "512", "1.2500", "0.2"]
