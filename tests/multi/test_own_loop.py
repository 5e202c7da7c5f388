"""A loop of one's own: killed, stopped and resumed, alone and on two ranks; its docstrings' examples."""

import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
from own_loops import SMALL, Scripts

import tandem
from program_files import program_text
from tandem.checkpoint.listing import newest_step
from tandem.run.directory import RunDir

pytestmark = pytest.mark.multi
SIGTERM, SIGKILL = 15, 9


@pytest.fixture
def scripts(tmp_path: Path, processes: Any) -> Scripts:
    scripts = Scripts(tmp_path, processes)
    scripts.write("small.py", SMALL)
    return scripts


@pytest.mark.soak
def test_killed_and_started_again_alone_it_ends_with_the_same_bits_and_lines(scripts: Scripts) -> None:
    assert scripts.alone("small.py", "calm")[0] == 0
    code, output = scripts.alone("small.py", "killed", SIGNAL=SIGKILL, SIGNAL_AT=23)
    assert code == -SIGKILL, output
    killed = RunDir(scripts.folder / "killed")
    saved = newest_step(killed.checkpoints)  # a save takes as long as the disk takes
    assert saved in (15, 20)
    code, output = scripts.alone("small.py", "killed")
    assert code == 0, output
    assert "after the loop 48 15.66" in output and "[48.0, 48.0, 48.0]" in output
    assert scripts.summary("killed")["resumed_from_step"] == saved
    assert scripts.summary("killed")["weights_sha256"] == scripts.summary("calm")["weights_sha256"]
    assert scripts.lines("killed") == scripts.lines("calm")


def test_a_stop_signal_saves_where_it_is_and_ends_with_143(scripts: Scripts) -> None:
    code, output = scripts.alone("small.py", "run", SIGNAL=SIGTERM, SIGNAL_AT=22)
    assert code == 143, output
    assert "after the loop" not in output
    summary = scripts.summary("run")
    assert (summary["state"], summary["last_checkpoint_step"]) == ("stopped", summary["global_step"])
    assert 23 <= summary["global_step"] <= 24


@pytest.mark.timeout(400)
def test_two_ranks_killed_and_stopped_end_with_the_same_bits_and_lines(
    scripts: Scripts, module_ports: list[int]
) -> None:
    calm, killed, stopped, last = module_ports
    assert [code for code, _ in scripts.ranks("small.py", "calm", calm)] == [0, 0]
    first, second = scripts.ranks("small.py", "run", killed, SIGNAL=SIGKILL, SIGNAL_AT=23, TO_RANK=1)
    assert (first[0], second[0]) == (200, -SIGKILL), first[1]
    assert "lost the other ranks" in first[1]
    ended = scripts.ranks("small.py", "run", stopped, SIGNAL=SIGTERM, SIGNAL_AT=31, TO_RANK=1)
    assert [code for code, _ in ended] == [143, 143], ended[0][1]
    ended = scripts.ranks("small.py", "run", last)
    assert [code for code, _ in ended] == [0, 0], ended[0][1]
    assert scripts.summary("run")["weights_sha256"] == scripts.summary("calm")["weights_sha256"]
    assert scripts.lines("run") == scripts.lines("calm")


def example(name: str) -> str:
    """The indented code of a public name's docstring, without its indentation."""
    text = inspect.getdoc(getattr(tandem.Run, name, None) or getattr(tandem, name)) or ""
    code = [line for line in text.splitlines() if line.startswith("    ") or not line]
    return textwrap.dedent("\n".join(code)).strip() + "\n"


def test_ten_public_names_have_types_and_an_example_and_all_of_them_run(scripts: Scripts) -> None:
    names = {name: each for name, each in vars(tandem.Run).items() if not name.startswith("_")}
    callables = {name: getattr(each, "fget", each) for name, each in names.items()} | {"start": tandem.start}
    assert len(callables) <= 10
    for name, each in callables.items():
        parameters = inspect.signature(each).parameters.values()
        kinds = [each.annotation for each in parameters if each.name != "self"]
        kinds += [inspect.signature(callables[name]).return_annotation]
        assert inspect.Signature.empty not in kinds, name
    before = "".join(example(name) for name in ("start", "wrap", "keep", "rank"))
    data, loop = example("batches").split("    run.backward(loss)\n")
    inside = (example("backward"), loop, example("log"), example("step"), example("stop"))
    body = "".join(each if each is loop else textwrap.indent(each, "    ") for each in inside)
    scripts.write("names.py", before + data + body)
    scripts.write("parts.py", before + data.partition("for ")[0] + example("parts"))
    run_above = {"start", "wrap", "keep", "rank", "batches", "backward", "log", "step", "stop", "parts"}
    assert run_above == set(callables)
    for script in ("names.py", "parts.py"):
        code, output = scripts.alone(script, script.removesuffix(".py"))
        assert code == 0, output
        assert "finished at step 8" in output and "said once" in output


def test_a_model_may_be_frozen_in_the_pass_of_another(scripts: Scripts) -> None:
    scripts.write("gan.py", program_text("own_loop_frozen_pass"))
    code, output = scripts.processes.wait(scripts.launch(["--nproc", "2"], "gan.py", "run"))
    assert code == 0, output
    assert "steps: 8" in output
