"""Mistakes in a loop of one's own are one line and exit code 2; its own errors; what is not finite."""

from pathlib import Path
from typing import Any

import pytest
from own_loops import SMALL, Scripts

from program_files import program_text
from tandem.config import Settings
from tandem.custom_loop.engine import check_settings
from tandem.errors import ConfigError

pytestmark = pytest.mark.multi


@pytest.fixture
def scripts(tmp_path: Path, processes: Any) -> Scripts:
    return Scripts(tmp_path, processes)


MISTAKES = program_text("own_loop_mistakes_mistakes")
LINES = (
    "tandem.start() was called twice",
    "run.batches was called before run.keep",
    "run.keep was called before any model was wrapped",
    "run.wrap: invalid type str; expected a torch.nn.Module",
    "run.keep(stranger=...): it trains a model that was not wrapped",
    "run.keep(name=...): invalid type str; expected a module, a tensor, a number",
    "run.keep was called twice",
    "run.wrap was called after run.keep",
    "run.backward was called outside of the loop",
    "run.backward: invalid loss, a tensor of shape (16, 1); expected a scalar",
    "run.backward got a loss without a gradient",
    "run.log(rows=...): invalid tensor of shape (16, 8); expected one number",
)


def test_each_mistake_is_one_line_and_ends_with_2(scripts: Scripts) -> None:
    scripts.write("mistakes.py", MISTAKES)
    code, output = scripts.alone("mistakes.py", "run")
    said = [line.partition("said: ")[2] for line in output.splitlines() if line.startswith("said: ")]
    assert len(said) == len(LINES), output
    for line, beginning in zip(said, LINES, strict=True):
        assert line.startswith(f"2 {beginning}")
    assert code == 2, output
    assert "run.backward added to gradients of an earlier backward" in output.splitlines()[-1]
    assert "Traceback" not in output


def test_a_plain_backward_is_one_line_on_one_rank_and_under_an_agent(scripts: Scripts) -> None:
    scripts.write("plain.py", SMALL.replace("run.backward(loss)", "loss.backward()"))
    code, output = scripts.alone("plain.py", "alone")
    assert code == 2, output
    assert "plain.py line 23" in output.splitlines()[-1] and "run.backward(loss)" in output.splitlines()[-1]
    assert "Traceback" not in output and "nan" not in output
    code, output = scripts.processes.wait(scripts.launch(["--nproc", "2"], "plain.py", "launched"))
    assert code == 2, output
    assert "run.backward(loss)" in output and "Traceback" not in output


def test_a_loader_and_a_batch_that_is_too_large_are_one_line_with_the_argument(scripts: Scripts) -> None:
    loader = SMALL.replace("run.batches(dataset,", "run.batches(torch.utils.data.DataLoader(dataset),")
    scripts.write("loader.py", loader)
    scripts.write("large.py", SMALL.replace("batch_size=16", "batch_size=1000"))
    for script, said in (("loader.py", "pass loader.dataset"), ("large.py", "use batch_size=256 or less")):
        code, output = scripts.alone(script, "run")
        assert code == 2 and said in output.splitlines()[-1], output
        assert "Traceback" not in output


TRAINED = program_text("own_loop_trained_parameters")
UNFROZEN = "error: the ranks do not average the gradients of 0.weight, 0.bias, because run.wrap got the model"
UNUSED = "error: in the previous pass of Sequential, no gradient reached 0.weight, 0.bias; use them"


@pytest.mark.parametrize("kind, line", [
    ("unfrozen", UNFROZEN),
    ("unfrozen teacher", UNFROZEN),
    ("new", UNFROZEN.replace("0.weight, 0.bias", "3.weight, 3.bias")),
    ("frozen", UNUSED),
    ("lazy", "error: run.wrap got a model with lazy modules, which have no sizes yet (0.weight, 0.bias)"),
])  # fmt: skip
def test_parameters_that_ranks_cannot_average_are_named_in_one_line(
    scripts: Scripts, kind: str, line: str
) -> None:
    scripts.write("trained.py", TRAINED)
    launch = scripts.launch(["--nproc", "2"], "trained.py", "run", KIND=kind)
    code, output = scripts.processes.wait(launch)
    assert code == 2, output
    assert line in output and "Traceback" not in output


def test_layers_that_are_frozen_after_the_wrap_are_trained_equally_on_all_ranks(scripts: Scripts) -> None:
    scripts.write("trained.py", TRAINED)
    launch = scripts.launch(["--nproc", "2"], "trained.py", "run", KIND="frozen", TANDEM_FIND_UNUSED="true")
    code, output = scripts.processes.wait(launch)
    assert code == 0, output
    assert "frozen until step 6: True" in output


@pytest.mark.parametrize("settings, line", [
    ({"strategy": "fsdp"}, "--strategy fsdp works only in tasks; a custom loop needs ddp or single"),
    ({"strategy": "dp"}, "--strategy dp works only in tasks; a custom loop needs ddp or single"),
    ({"precision": "bf16"}, "--precision bf16 works only in tasks; in a custom loop use torch.autocast"),
    ({"compile": "default"}, "--compile works only in tasks; in a custom loop call torch.compile on the"),
])  # fmt: skip
def test_settings_of_tasks_alone_are_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_settings(Settings().replace(**settings))
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_what_is_not_finite_changes_nothing_and_ends_the_run_or_is_left_out(scripts: Scripts) -> None:
    infinite = "    run.backward(loss * float('inf' if run.step == 12 else 1))"
    broken = SMALL.replace("    run.backward(loss)", infinite)
    scripts.write("broken.py", broken)
    code, output = scripts.alone("broken.py", "stops")
    assert code == 1, output
    assert "the loss of step 13 is not finite" in output and "Traceback" not in output
    code, output = scripts.alone("broken.py", "skips", TANDEM_ON_NONFINITE="skip")
    assert code == 0, output
    assert "the loss of step 13 is not finite: skipped" in output


@pytest.mark.soak
def test_an_own_error_has_its_traceback_and_a_loop_that_is_left_is_one_line(scripts: Scripts) -> None:
    scripts.write("fails.py", SMALL.replace("    run.backward(loss)", "    raise ValueError('my own')"))
    code, output = scripts.alone("fails.py", "fails")
    assert code == 1, output
    assert output.count("ValueError: my own") == 1 and "Traceback" in output
    scripts.write("leaves.py", SMALL.replace("    run.backward(loss)", "    break"))
    code, output = scripts.alone("leaves.py", "leaves")
    assert code == 1, output
    assert "run.stop()" in output.splitlines()[-1]


@pytest.mark.soak
def test_a_volume_that_fails_is_one_line(scripts: Scripts) -> None:
    breaks = "    if run.step == 7:\n        break_volume()\n    run.backward(loss)"
    top = (
        "import pathlib, time\n\n"
        "def break_volume():\n"  # a save may be on its way
        "    while not pathlib.Path('run/checkpoints').exists():\n"
        "        time.sleep(0.01)\n"
        "    pathlib.Path('run/checkpoints').rename('run/elsewhere')\n"
        "    pathlib.Path('run/checkpoints').touch()\n"
    )
    scripts.write("full.py", top + SMALL.replace("    run.backward(loss)", breaks))
    code, output = scripts.alone("full.py", "run", TANDEM_CHECKPOINT_EVERY=2)
    assert code == 1, output
    assert output.count("saves in a row failed") == 1 and "Traceback" not in output


@pytest.mark.soak
def test_a_complete_run_started_again_gives_no_batch_and_ends_well(scripts: Scripts) -> None:
    example = Path(__file__).parents[2] / "examples" / "gan.py"
    first, summary = scripts.alone(example, "run"), scripts.folder / "run" / "summary.json"
    before = summary.read_text()
    again = scripts.alone(example, "run")
    assert summary.read_text() == before, "a second start took it away"
    assert first[0] == 0 and again[0] == 0, again[1]
    assert "at step 48" in again[1]
    assert again[1].splitlines()[-1] == first[1].splitlines()[-1], "the weights' norm"
