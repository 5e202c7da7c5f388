"""Implement `tandem eval`: score a checkpoint as a run with any number of ranks would have done."""

from tandem.checkpoint.state import deserialize
from tandem.config import Settings
from tandem.data.loader import loader_processes
from tandem.data.seeds import seed_model
from tandem.distributed import strategy as strategies
from tandem.distributed.devices import cores_of
from tandem.distributed.group import Position
from tandem.errors import ConfigError
from tandem.rank.session import RankSession
from tandem.tasks.base import WholeTask, load_task
from tandem.tasks.build import datasets_of, model_of
from tandem.training.evaluate import Evaluation, evaluation_batch_size
from tandem.training.precision import precision_of
from tandem.training.resume import check_model
from tandem.training.task_memory import recall
from tandem.training.weights import saved_at, tensors_in


def score(settings: Settings, position: Position, source: str) -> dict[str, float]:
    """Return the scores of the weights at `source` over the task's evaluation set; all ranks call this.

    Rank 0 reads the checkpoint. Raises ConfigError for weights of another model, and for a task without an
    evaluation set.
    """
    data = settings.data
    session = RankSession(settings, position)
    session.open_group()
    world = session.world
    task = WholeTask(load_task(settings.run.task, settings.run.task_fields, data.data_dir, data.download))
    world.once_per_node(task.prepare)
    dataset = datasets_of(task).evaluation
    if dataset is None:
        raise ConfigError(f"task {settings.run.task} has no evaluation set; return one in its Datasets")
    seed_model(settings.run.seed)
    strategy = strategies.load_to_evaluate(settings.compute.strategy, world)
    model = strategy.shard(model_of(task, world.devices))
    # A run that still trains may save a newer checkpoint at any time, so one rank chooses for all.
    saved = saved_at(source) if world.is_first else None
    state = deserialize(world.broadcast_bytes(saved.raw if saved else None))
    task.moment.resume(*world.broadcast_json([saved.step, saved.epoch_steps] if saved else None))
    weights = tensors_in(state)
    check_model(model, weights)
    strategy.load_model(model, weights)
    recall(task, state)
    task.after_resume(model)
    size = evaluation_batch_size(settings.evaluation, data, world)
    precision = precision_of(settings.compute.precision, world)
    workers = loader_processes(data.workers, cores_of(position))
    scores = Evaluation(world, strategy, task, model, dataset, size, precision, workers).scores()
    session.close()
    return scores
