"""Runs a test's function on several ranks: processes with a gloo group, kept alive from one test to the next.

Starting a process costs seconds, running a case milliseconds, so the ranks of a degree are started once and take one
case after the other. A case is a module-level function `case(world, *arguments)` of a test file; `world` is an
`Exchange` over all ranks. What it raises on any rank is raised in the test with its traceback, and a hang is a failure:
either way the ranks are stopped, and the next case starts new ones.
"""

import importlib.util
import inspect
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path

import torch
import torch.distributed as dist

from longstraw.parallel.exchange import Exchange
from longstraw.parallel.topology import Axis

# The last two are what torch imports at the first backward and the first comparison of tensors.
PRELOAD = ["pytest", "longstraw.parallel.context", "torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor"]
CASE_SECONDS = 60
START_SECONDS = 120


class Ranks:
    """The ranks of one degree."""

    def __init__(self, degree):
        self.degree = degree
        self._processes, self._pipes, self._folder = [], [], None

    def run(self, case, *arguments, seconds=CASE_SECONDS):
        """What `case(world, *arguments)` returned on each rank, in rank order."""
        if not self._processes:
            self._start()
            seconds += START_SECONDS
        job = pickle.dumps((inspect.getfile(case), case.__name__, arguments))
        for pipe in self._pipes:
            pipe.send_bytes(job)
        try:
            return self._results(case.__name__, time.monotonic() + seconds)
        except BaseException:
            self.stop()
            raise

    def stop(self):
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self):
        context = get_context("forkserver")  # imports once; the ranks are forked from a process that did nothing else
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.degree):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.degree, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def _results(self, name, deadline):
        results = {}
        while len(results) < self.degree:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = connection.wait(waiting, max(0, deadline - time.monotonic()))
            if not ready:
                missing = [rank for rank in range(self.degree) if rank not in results]
                raise TimeoutError(f"{name}: ranks {missing} of {self.degree} did not finish in time")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    error, result = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    raise ConnectionError(f"{name}: rank {rank} of {self.degree} died") from None
                if error is not None:
                    raise AssertionError(f"{name}: rank {rank} of {self.degree} raised\n{error}")
                results[rank] = result
        return [results[rank] for rank in range(self.degree)]


def _serve(rank, degree, store, pipe):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=degree, timeout=timedelta(seconds=CASE_SECONDS)
    )
    axis = Axis(degree, rank, dist.group.WORLD)
    while True:
        try:
            path, name, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            answer = (None, getattr(_module(path), name)(Exchange(axis), *arguments))
        except BaseException:  # noqa: BLE001 (whatever it is, the test is told)
            answer = (traceback.format_exc(), None)
        pipe.send_bytes(pickle.dumps(answer))


def _module(path):
    """The test file as a module, loaded once."""
    name = f"cases_{Path(path).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
