"""plain.py as a training function of Ray Train, with a checkpoint reported every 50 steps."""

import os
import tempfile
from pathlib import Path

import ray
import torch
import workload
from ray import train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def train_function() -> None:
    """Called in each worker."""
    model = workload.build_model()
    optimizer = workload.build_optimizer(model)
    checkpoint, done = train.get_checkpoint(), 0
    if checkpoint:
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved, "checkpoint.pt"), weights_only=True)
            done = workload.load(state, model, optimizer)
    for step in workload.steps(prepare_model(model), optimizer, done):
        if step % workload.SAVE_EVERY:
            continue
        with tempfile.TemporaryDirectory() as new:
            found = None
            if train.get_context().get_world_rank() == 0:
                torch.save(workload.state_of(model, optimizer, step), Path(new, "checkpoint.pt"))
                found = Checkpoint.from_directory(new)
            train.report({"step": step}, checkpoint=found)


if __name__ == "__main__":
    where = os.environ[workload.FOLDER]
    ray.init(num_cpus=4, include_dashboard=False, _temp_dir=f"{where}/ray")
    TorchTrainer(
        train_function,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workload.RANKS, use_gpu=False),
        run_config=RunConfig(storage_path=f"{where}/results", failure_config=FailureConfig(max_failures=-1)),
    ).fit()
