"""The workload as a custom loop of tandem."""

import torch.distributed as dist
import workload

import tandem

run = tandem.start()
model = run.wrap(workload.build_model())
optimizer = workload.build_optimizer(model)
run.keep(model=model, optimizer=optimizer)
record = workload.Record()
for batch in run.batches(workload.rows(), batch_size=workload.RANKS * workload.SHARE, epochs=1):
    step = run.step + 1
    run.backward(workload.loss_of(model, batch))
    optimizer.step()
    optimizer.zero_grad()
    record.step(step, dist.get_rank(), dist.get_world_size(), batch[2].tolist())
