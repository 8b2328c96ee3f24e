"""--multiprocessing-distributed without a launcher: start one process for each device."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

from oneflow_accel import launched
from oneflow_accel.backends.base import Backend
from oneflow_accel.errors import UserError

from resnet50_imagenet.options import Options

_OF_A_PROCESS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")


def check_distributed_options(options: Options, backend: Backend) -> None:
    """Raise UserError for a collective library, device, node or address that OneFlow cannot use."""
    if options.dist_backend not in (None, backend.collective_backend):
        raise UserError(
            f"--dist-backend {options.dist_backend}: the collectives of {backend.name} are "
            f"{backend.collective_backend}; leave the option out"
        )
    if options.gpu is not None and options.gpu >= backend.device_count():
        raise UserError(
            f"--gpu {options.gpu}: {backend.name} has {backend.device_count()} device(s), "
            "numbered from 0"
        )
    if options.rank >= options.world_size:
        raise UserError(f"--rank {options.rank}: nodes are numbered 0 to {options.world_size - 1}")
    _address(options.dist_url)


def needs_launcher(options: Options, backend: Backend) -> bool:
    """Whether processes are asked for that nobody has started yet."""
    if launched.launched() or not (options.multiprocessing_distributed or options.world_size > 1):
        return False
    return options.world_size * backend.device_count() > 1


def relaunch(options: Options, backend: Backend, argv: Sequence[str]) -> None:
    """Replace this process by a launcher, which starts main.py on each device."""
    host, port = _address(options.dist_url)
    command = [sys.executable, "-m", "oneflow_accel.launch"]
    command += ["--nproc_per_node", str(backend.device_count())]
    command += ["--nnodes", str(options.world_size), "--node_rank", str(options.rank)]
    command += ["--master_addr", host, "--master_port", str(port)]
    sys.stdout.flush()
    sys.stderr.flush()
    # Leave out what oneflow has set for this process alone; with it the launcher would take itself
    # for one of the job's processes.
    environment = {name: text for name, text in os.environ.items() if name not in _OF_A_PROCESS}
    os.execve(sys.executable, [*command, sys.argv[0], *argv], environment)


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or not port:
        raise UserError(f"--dist-url {url}: expected tcp://HOST:PORT")
    return parts.hostname, port
