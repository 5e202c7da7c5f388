"""Say why default_collate cannot make a batch of some samples."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

MOST_CHARACTERS = 200


def why_not_collated(samples: Sequence[Any], indices: Sequence[int] | None, error: Exception) -> str:
    """Return why default_collate failed, if the samples are the reason; else ""."""
    forms = [_form(sample) for sample in samples]
    other = next((at for at, form in enumerate(forms) if form != forms[0]), None)
    advice = "from __getitem__, or define collate"
    if other is not None:
        first, second = (f"sample {indices[at]}" if indices else "one sample" for at in (0, other))
        return (
            f"cannot make a batch: {first} is {_short(forms[0])}, and {second if indices else 'another'} is "
            f"{_short(forms[other])}; return samples of one structure and shape {advice}"
        )
    if isinstance(error, TypeError) and str(error).startswith("default_collate"):
        return f"cannot make a batch of {_short(forms[0])}; return tensors, arrays or numbers {advice}"
    return ""


def _form(sample: Any) -> str:
    if isinstance(sample, Tensor | np.ndarray):
        return f"a {type(sample).__name__} of shape {list(sample.shape)}"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {_form(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        return f"({', '.join(map(_form, sample))})"
    return "None" if sample is None else f"a value of type {type(sample).__name__}"


def _short(form: str) -> str:
    return form if len(form) <= MOST_CHARACTERS else form[:MOST_CHARACTERS] + "..."
