"""What is saved, and the fingerprint of weights."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tandem.checkpoint.state import deserialize, serialize, weights_sha256
from tandem.checkpoint.store import CheckpointStore
from tandem.errors import CheckpointError, ConfigError


def test_weights_sha256_is_what_the_design_says() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode() + b"\0" + str(value.dtype).encode() + str(tuple(value.shape)).encode())
        digest.update(value.numpy().astype(value.numpy().dtype.newbyteorder("<")).tobytes())
    assert weights_sha256(module.state_dict()) == digest.hexdigest()


def test_weights_sha256_sees_buffers_dtypes_and_nothing_else() -> None:
    module = nn.BatchNorm1d(4)
    before = weights_sha256(module.state_dict())
    module.weight.grad = torch.ones(4)
    assert weights_sha256(module.eval().state_dict()) == before
    module.num_batches_tracked += 1
    assert weights_sha256(module.state_dict()) != before
    for dtype in (torch.bfloat16, torch.float16, torch.bool, torch.complex64):
        odd = nn.Module()
        odd.register_buffer("values", torch.ones(2, 3).T.to(dtype))
        odd.register_buffer("empty", torch.empty(0, 3))
        odd.register_buffer("scalar", torch.tensor(1))
        assert len(weights_sha256(odd.state_dict())) == 64


def test_a_transposed_view_hashes_as_its_copy() -> None:
    view, copy = nn.Module(), nn.Module()
    view.register_buffer("w", torch.arange(6).reshape(2, 3).T)
    copy.register_buffer("w", torch.arange(6).reshape(2, 3).T.contiguous())
    assert weights_sha256(view.state_dict()) == weights_sha256(copy.state_dict())


def test_state_round_trip() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "step": 3,
        "notes": {"name": "x", "pair": (1, 2.5), "none": None},
    }
    back = deserialize(serialize(state))
    assert back["step"] == 3 and back["notes"] == state["notes"]
    assert torch.equal(back["model"]["weight"], model.weight)
    optimizer.load_state_dict(back["optimizer"])
    scheduler.load_state_dict(back["scheduler"])


class Odd:
    pass


@pytest.mark.parametrize("value", [Odd(), {"deep": [Odd()]}, lambda: 1])
def test_what_could_not_be_loaded_is_not_saved(value: object) -> None:
    with pytest.raises(ConfigError, match="extra") as caught:
        serialize({"step": 1, "extra": value})
    assert "\n" not in str(caught.value)


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"model": Evil()}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError):
        deserialize((tmp_path / "state.pt").read_bytes())
    for junk in (b"", b"junk", b"no zip file", bytes(100), b"PK" + bytes(100)):
        with pytest.raises(CheckpointError):
            deserialize(junk)
    assert not (tmp_path / "ran").exists()


def test_torch_save_straight_into_the_store(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    weights = torch.randn(300, 300)
    store.save(1, lambda sink: torch.save({"w": weights}, sink), {})  # type: ignore[arg-type]
    store.verify(1)
    assert torch.equal(deserialize(store.read(1)[0])["w"], weights)
