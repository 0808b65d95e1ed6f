"""The transformer of parallel.py on several hosts: trained, stopped, and resumed on any number.

    pip install -e '.[examples,orbax]'
    python examples/hosts.py runs/hosts --processes 2       # two processes of this machine
    python examples/hosts.py runs/hosts --processes 4 --steps 40     # resumes on four

On a cluster, start the program once on each host, without `--processes`: under Slurm, Kubernetes or
on TPUs, `jax.distributed.initialize()` finds the others by itself. Elsewhere say who is who:

    python examples/hosts.py /shared/run --coordinator host0:1234 --count 2 --process 0

Each host reads its own part of every batch. The arrays of the model are divided between all devices
of all hosts (FSDP), and none has a whole one. The step is that of one device. Each host writes its
parts of the arrays into one folder, by orbax, and reads the parts that it needs: on one host or on
four the losses are those of an uninterrupted run, up to rounding.
"""

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import sleep
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import parallel
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pytreemod as pm

DEVICES = 4
"""Of all processes together, in the trial on one machine."""

RULES = pm.AxisRules({"embed": parallel.AXIS})


def start(size: int, depth: int) -> dict[str, Any]:
    """Everything that training changes."""
    model = parallel.make_model(size, depth, key=jax.random.key(0))
    return {"model": model, "opt": pm.Optimizer(parallel.sgd).init(model)}


def global_batch(text: np.ndarray, mesh: Mesh) -> jax.Array:
    """A batch of which each process passes its own rows; nobody needs the others."""
    rows = np.split(text, jax.process_count())[jax.process_index()]
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P(parallel.AXIS)), rows)


def train(folder: Path, steps: int, every: int, size: int, depth: int) -> list[float]:
    """Train up to a number of steps, from the last checkpoint if there is one."""
    mesh = jax.make_mesh((jax.device_count(),), (parallel.AXIS,), axis_types=(AxisType.Explicit,))
    make = pm.make_sharded(start, mesh, RULES)
    losses: list[float] = []
    with ocp.CheckpointManager(folder.absolute()) as manager, jax.set_mesh(mesh):
        done = manager.latest_step() or 0
        if done:
            # Shapes and shardings alone: each process reads what its devices need.
            like = ocp.args.StandardRestore(make.eval_shape(size, depth))
            run = manager.restore(done, args=like)
        else:
            run = make(size, depth)
        for number, text in enumerate(parallel.batches(steps), 1):
            if number <= done:
                continue
            batch = global_batch(text, mesh)
            run["model"], run["opt"], loss = parallel.step(run["model"], run["opt"], batch)
            losses.append(float(loss))
            if jax.process_index() == 0:
                print(f"step {number:3d}   loss {losses[-1]:.6f}", flush=True)
            if number % every == 0 or number == steps:
                manager.save(number, args=ocp.args.StandardSave(run))
    return losses


def check_shared(folder: Path) -> None:
    """Refuse a folder that not all processes see: each would write its own, and none is whole."""
    mark = folder / "shared"
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    multihost_utils.sync_global_devices("the folder is made")
    seen = multihost_utils.process_allgather(np.asarray(mark.exists()))
    if not seen.all():
        blind = ", ".join(map(str, np.flatnonzero(~np.atleast_1d(seen))))
        raise SystemExit(f"{folder} is not shared: process {blind} does not see it")


# --- the command ----------------------------------------------------------------------------------


def launch(count: int, arguments: Sequence[str]) -> int:
    """Start processes on this machine, and wait for them; if one fails, stop the others."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, __file__, *arguments, "--coordinator", address]
    command += ["--count", str(count), "--devices", str(DEVICES // count)]
    waiting = {i: subprocess.Popen([*command, "--process", str(i)]) for i in range(count)}
    while waiting:
        for i, process in [*waiting.items()]:
            status = process.poll()
            if status is not None:
                del waiting[i]
            if status:
                print(f"process {i} ended with status {status}", file=sys.stderr)
                for other in waiting.values():
                    other.kill()
                return status
        sleep(0.1)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the checkpoints; all hosts must see it")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--processes", type=int, help="try it on this machine: 1, 2 or 4")
    parser.add_argument("--coordinator", help="address of the first process")
    parser.add_argument("--count", type=int, help="how many processes there are")
    parser.add_argument("--process", type=int, help="which of them this is")
    parser.add_argument("--devices", type=int, help="how many devices JAX makes of the CPU")
    parser.add_argument("--timeout", type=int, default=60, help="seconds to wait for the others")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Join the other processes, train, and return the losses of the steps that were made."""
    arguments = sys.argv[1:] if arguments is None else [*arguments]
    options = parse(arguments)
    if options.processes:
        at = arguments.index("--processes")
        sys.exit(launch(options.processes, [*arguments[:at], *arguments[at + 2 :]]))
    if options.folder.is_file():
        # Before the others wait for this process.
        raise SystemExit(f"{options.folder} is a file")
    if options.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    jax.distributed.initialize(
        options.coordinator, options.count, options.process, initialization_timeout=options.timeout
    )
    check_shared(options.folder)
    return train(options.folder, options.steps, options.every, options.size, options.depth)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
