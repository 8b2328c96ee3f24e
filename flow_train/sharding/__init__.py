"""Parameters, gradients and the optimizer's state cut over the processes of a job: ZeRO stage 3
(Rajbhandari et al. 2020, "ZeRO", section 5), in the form of fully sharded data parallelism (Zhao et
al. 2023, "PyTorch FSDP").

    with watchdog.guard():
        sharding = fully_shard(model)
        optimizer = flow.optim.AdamW(model.parameters())
        loss(model(images)).backward()
        norm = sharding.clip(1.0)
        optimizer.step()

The guard (`oneflow_accel.watchdog`) ends all processes where one fails, on several machines too.

A *unit* is a module whose tensors are whole together: gathered before it runs, freed after it.
What no unit has belongs to the root, which is gathered for a whole step. Each tensor is flattened,
padded with zeros and cut evenly; a process keeps one piece, the *shard*, which takes the tensor's
place among the parameters. So an optimizer over `model.parameters()` is sharded too.

On CPUs of one machine the shards lie in memory that the processes share, so that gathering is no
more than waiting until all have written theirs.

A unit's backward pass gathers its tensors anew, runs the unit once more from its input
(activation checkpointing, Chen et al. 2016) and gives every process its piece of the mean gradient.
A unit with dropout seeds the generators before it runs, so that it draws the same masks again.
Without recomputation the linear layers inside a unit gather their weights anew for themselves.

`flow_train.steps.sharding` trains a cut model in the loop; a checkpoint of it is one of its shards.
"""

from flow_train.sharding.model import MODES, Sharding, fully_shard, shard_unit, sharding_options
from flow_train.sharding.units import ShardingOptions

__all__ = ["MODES", "Sharding", "ShardingOptions", "fully_shard", "shard_unit", "sharding_options"]
