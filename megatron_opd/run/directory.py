"""Takes over the directory of a run, once nothing can keep the run from beginning."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable

from megatron_opd.checkpoint.claimant import claimant_of
from megatron_opd.checkpoint.part_dir import write_synced
from megatron_opd.checkpoint.run_dir import RunDir, prepare_run_dir
from megatron_opd.config.schema import Config
from megatron_opd.data.template import RunTemplate
from megatron_opd.errors import kept_traceback
from megatron_opd.evaluation.progress import rows_of
from megatron_opd.run.resume import Resumption, reopen_run_dir


class OwnedDirectory:
    """Takes the run's directory over, once, when nothing can keep the run from beginning.

    taken: whether it is this run's; until then it may hold an earlier run, which stays as it is.
    claimant: this run, as it claims servers.
    """

    def __init__(
        self,
        config: Config,
        template: RunTemplate,
        resumed: Resumption | None,
        say: Callable[..., None],
    ) -> None:
        self._config, self._template = config, template
        self._run_dir = RunDir(config.run.dir)
        self._resumed, self._say = resumed, say
        self.claimant = claimant_of("run", config.run.dir)
        self.taken = False

    def take_over(self) -> None:
        """Make the directory this run's, unless it is already. Raises UserError."""
        if self.taken:
            return
        config, resumed = self._config, self._resumed
        if resumed is None:
            prepare_run_dir(config.run.dir, config)
        else:
            self._say(*resumed.notes)
            rows = rows_of(resumed.evaluations)
            reopen_run_dir(config, resumed.state.updates, resumed.changes, rows)
        self.taken = True
        write_synced(self._run_dir.template, json.dumps(self._template.as_json()))
        self.claimant.keep(self._run_dir.path)

    def see_logs(self) -> str:
        """Return what follows a line that tells why the run failed."""
        return f"; logs are in {self._run_dir.logs}" if self.taken else ""

    def keep_traceback(self, error: BaseException) -> str:
        """Keep a traceback; return where. Before the directory is this run's, the logs are not."""
        if not self.taken:
            traceback.print_exception(error)
            return "its traceback is above"
        return kept_traceback(error, self._run_dir.logs / "controller.log")
