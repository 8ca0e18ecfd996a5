"""The elastic agent's meeting where it is alone: nothing of it is reached from another machine."""

from __future__ import annotations

import os
import uuid

from torch.distributed import PrefixStore
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from parallel3d.comm.job_store import LOCALHOST, listen_at, serve
from parallel3d.errors import UserError


class OneHost(RendezvousHandler):
    """A store on the loopback, and nobody to wait for.

    torch's own rendezvous listens on every address and keeps its state pickled in the store:
    whoever reached that port could have the agent run anything.

    Raises:
        UserError: the port, of `launch.master_port`, is taken.
    """

    def __init__(self, port: int) -> None:
        try:
            listening = listen_at(LOCALHOST, port)
        except OSError as error:
            raise UserError(
                f"launch.master_port={port} cannot be listened on ({error.strerror}): choose "
                "another, or 0 for a free one"
            ) from None
        if listening is None:
            raise UserError(f"this host has no {LOCALHOST}, by which its ranks meet")
        self.store = serve(LOCALHOST, listening)
        self.run_id = uuid.uuid4().hex
        self.rounds = 0

    def get_backend(self) -> str:
        return "one host"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The agent's part of the store, a new one for each start of the ranks."""
        self.rounds += 1
        part = PrefixStore(f"agent{self.rounds}", self.store)
        return RendezvousInfo(part, 0, 1, RendezvousStoreInfo(LOCALHOST, self.store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else would hear of it."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        return True


class NoLogs(LogsSpecs):
    """Ranks write where their launcher does, and leave no files for the agent behind.

    What they died of they leave in the run directory (`failure.write`).
    """

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for environ in envs.values():
            environ["TORCHELASTIC_ERROR_FILE"] = ""
        console = dict.fromkeys(envs, "")
        return LogsDest(console, dict(console), error_files=dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        return os.devnull
