"""The ViT of vit_10b in PyTorch, cut over processes with FSDP2 on gloo, for benchmarks.sharded.

    python -m benchmarks.peers.sharded JSON

JSON has the shape, `mode`, `processes`, `batch` (of one process), `steps`, `warm_up`, `threads` and
`port`. Rank 0
prints a line of JSON: the median seconds of a step and a process's peak memory in GB.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from benchmarks.peers import torchvision


def vit(asked: dict[str, Any]) -> nn.Module:
    """timm's, with the sizes and the layers of ours."""
    torchvision.install()
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=asked["image_size"],
        patch_size=asked["patch_size"],
        embed_dim=asked["embed_dim"],
        num_heads=asked["num_heads"],
        depth=asked["num_blocks"],
        class_token=False,
        global_pool="avg",
        fc_norm=False,
    )
    model.set_grad_checkpointing(asked["mode"] == "full")
    return model


def train(rank: int, asked: dict[str, Any]) -> None:
    torch.set_num_threads(asked["threads"])
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{asked['port']}", rank=rank, world_size=asked["processes"]
    )
    model = vit(asked)
    if asked["mode"] == "replicated":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = torch.distributed.init_device_mesh("cpu", (asked["processes"],))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    images = torch.zeros(asked["batch"], 3, asked["image_size"], asked["image_size"])
    labels = torch.zeros(asked["batch"], dtype=torch.int64)
    seconds = []
    for _ in range(asked["warm_up"] + asked["steps"]):
        start = time.perf_counter()
        functional.cross_entropy(model(images), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        print(json.dumps([statistics.median(seconds[asked["warm_up"] :]), memory]), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    torch.multiprocessing.spawn(train, (asked,), nprocs=asked["processes"])
