"""Sends a study to Weights & Biases: a group of runs, one for every repeat of a trial, and one for the study.

wandb itself takes the key from `$WANDB_API_KEY` or what `wandb login` keeps; nothing here stores it. With
`WANDB_MODE=offline` runs are kept in `wandb/` of the storage, and `wandb sync` sends them.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from wattune.access import Access, refused
from wattune.run import Run, RunStatus
from wattune.tracking.copies import WithReceipts
from wattune.tracking.run import Curves, run_points, shown_params, shown_tags
from wattune.trial import TrialSpec

_ENVIRONMENT: Final = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
"""Standard output belongs to the command line, and errors are not reported to wandb's makers; the user's own win."""

_INIT_WITHIN_S: Final = 20.0
_FINISH_WITHIN_S: Final = 35.0
"""Together below `ANSWER_WITHIN_S`, so that wandb itself ends first."""

_OFFLINE: Final = ("offline", "dryrun", "disabled")

_LONGEST_ID: Final = 64
"""Characters of a run's name in W&B's addresses: the last ones tell trials apart."""


def is_offline() -> bool:
    """Returns whether wandb is told to keep its runs on this machine."""
    return _setting("mode", "online") in _OFFLINE


def server() -> str:
    """Returns the address of the server that wandb speaks to."""
    return _setting("base_url", "https://api.wandb.ai")


def has_key() -> bool:
    """Returns whether wandb has a key of its server, or what stands in for one."""
    from requests.utils import get_netrc_auth

    named = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    return bool(named or get_netrc_auth(server()))


def _setting(name: str, otherwise: str) -> str:
    """Returns a setting as wandb finds it: its variable, or what `wandb login --host` and `wandb offline` keep.

    wandb itself tells it only with its service started, which a recorded command would have beside it.
    """
    files = ConfigParser(interpolation=None)
    folder = Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser()
    with suppress(ConfigError, OSError, UnicodeDecodeError):  # wandb says so, and goes on without
        files.read([folder / "settings", Path("wandb", "settings")])
    return os.environ.get(f"WANDB_{name.upper()}") or str(files.get("default", name, fallback=otherwise))


class WandbTracker(WithReceipts):
    """Sends one study to one project."""

    def __init__(self, project: str, study_name: str, storage: Path) -> None:
        """Names a project, as `PROJECT` or `ENTITY/PROJECT`, a study, and the folder in which `wandb/` lies."""
        self._entity, _, self._project = project.rpartition("/")
        self._storage = storage
        host = "offline" if is_offline() else server()
        access = Access(f"project {project} at {host}", "see `wandb login`, or set WANDB_MODE=offline")
        place = hashlib.sha256(f"{host} {project}".encode()).hexdigest()[:12]
        super().__init__(study_name, access, storage / "wandb" / f"sent-{study_name}-{place}.json")

    def send_trial(self, name: str, spec: TrialSpec, result: Run, series: Curves) -> None:
        """Makes a trial's run. One that is measured anew is a run of its own; a part of one that was sent is completed.

        Curves are named `trace/...` over `trace_s`, seconds of the wall clock.
        """
        own = f"{name}-{result.numbers.attempt or 1}-{result.end_wall_ns}"
        config: dict[str, Any] = {**shown_params(spec), **shown_tags(spec, result)}
        run = self._run(f"{self.study_name}-{own}", f"{spec.label} #{result.repeat}", "trial", config)
        run.define_metric("trace/*", step_metric="trace_s")
        seconds: dict[int, dict[str, float]] = {}
        for metric, value, wall_ms, _ in run_points(result, series):
            if metric.startswith("trace/"):
                seconds.setdefault(wall_ms, {"trace_s": wall_ms / 1000})[metric] = value
        for wall_ms in sorted(seconds):
            run.log(seconds[wall_ms])
        run.summary.update({**result.metrics, "status": str(result.status), "quality": result.quality})
        run.finish(exit_code=0 if result.status is RunStatus.COMPLETED else 1)

    def send_study(self, facts: Mapping[str, str], document: Mapping[str, Any], ranking: Mapping[str, Any]) -> None:
        """Makes the study's run: its space, and a summary with its goal and answer."""
        run = self._run(self.study_name, self.study_name, "study", {"space": document})
        run.summary.update({**facts, "ranking": json.dumps(ranking)})
        run.finish(exit_code=0)

    def _run(self, run_id: str, name: str, kind: str, config: Mapping[str, Any]) -> Any:
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        # Asked first: wandb tries for minutes, also at the end of the process.
        if not is_offline() and (why := refused(server())):
            raise ConnectionError(why)
        import wandb

        self._storage.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            entity=self._entity or None,
            project=self._project,
            id=run_id[-_LONGEST_ID:],
            name=name,
            group=self.study_name,
            job_type=kind,
            config=dict(config),
            dir=str(self._storage),
            resume="allow",
            reinit="create_new",  # several studies of a process have runs of their own
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_meta=True,  # the command line and the machine are the study's, and may hold secrets
                x_disable_stats=True,  # those of this process say nothing about a trial
                init_timeout=_INIT_WITHIN_S,
                finish_timeout=_FINISH_WITHIN_S,
                finish_timeout_raises=True,
            ),
        )
