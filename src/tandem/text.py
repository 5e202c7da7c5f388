"""Format numbers, paths, suggestions and errors for people. JSON output has plain values."""

from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

from tandem.errors import TandemError, text_of

MOST_CHARACTERS = 2000
"""How many characters of an error a message has at most."""
MOST_SAMPLES = 8
SAMPLE_NOTE = "in sample"
"""How the note of `in_samples` begins; a loader process sends it as the last line of its traceback."""


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units: 12 ms, 0.6 s, 25 s, 3 min 4 s, 2 h 5 min."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.0005 else "0 s"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    # Rounded before it is split into units, so that no part reads 60.
    whole = round(seconds) if seconds < 3599.5 else 60 * round(seconds / 60)
    for length, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= length:
            rest = whole % length // part
            return f"{whole // length:,} {unit}" + (f" {rest} {smaller}" if rest else "")
    raise AssertionError(seconds)


def relative_path(path: PurePath) -> PurePath:
    """Return a path as a person would type it here: relative if it is below the current directory."""
    try:
        return path.relative_to(Path.cwd())
    except (ValueError, OSError):  # it is elsewhere, or the current directory is gone
        return path


def nearest(name: str, known: Iterable[str], least: float = 0.6) -> str | None:
    """Return the known name most similar to `name`; None if none has at least that similarity, 0 to 1."""
    # Imported here, because only a wrong name needs it.
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, list(known), n=1, cutoff=least)), None)


def did_you_mean(suggestion: str | None, otherwise: str = "") -> str:
    """Return the part of a message about an unknown name that suggests a known name, if there is one."""
    return f"; did you mean {suggestion}?" if suggestion else otherwise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the error's type if it has no text."""
    return (text_of(error).strip() or type(error).__name__).splitlines()[0]


def in_one_line(error: BaseException) -> str:
    """Return all of an error's text in one line: NCCL's reason is at the end, after c10d's own text."""
    lines = [line.strip() for line in text_of(error).splitlines() if line.strip()]
    return "; ".join(lines)[:MOST_CHARACTERS] or type(error).__name__


def with_type(error: BaseException) -> str:
    """Return `ValueError: TEXT`, as the end of a traceback shows an error."""
    return f"{type(error).__name__}: {text_of(error)}"


def one_line(error: BaseException) -> str:
    """Return `with_type` of another library's error without line breaks."""
    return " ".join(with_type(error).split()).rstrip(": ")


def in_samples(indices: Sequence[int]) -> str:
    """Return the note for an error in one of these samples of the dataset."""
    named = ", ".join(str(int(index)) for index in indices[:MOST_SAMPLES])
    more = f" and {len(indices) - MOST_SAMPLES} more" if len(indices) > MOST_SAMPLES else ""
    return f"{SAMPLE_NOTE} {named}" if len(indices) == 1 else f"{SAMPLE_NOTE}s {named}{more} (one of them)"


def add_note(error: BaseException, note: str) -> None:
    """Add a note, unless the error has one already, or its message is for users as it is."""
    if not isinstance(error, TandemError) and not notes_of(error):
        error.add_note(note)


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of `in_samples` that an error of this process has."""
    return [note for note in getattr(error, "__notes__", ()) if note.startswith(SAMPLE_NOTE)]
