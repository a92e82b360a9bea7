"""Sends a study to MLflow: an experiment with one parent run, and a child run for every repeat of a trial.

If a store could not be reached or refused a trial, a later `log_trial` of the same trial sends it.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from wattune.access import SLOWEST_BYTES_PER_S
from wattune.objective import parse_constraint, parse_objective
from wattune.run import Run
from wattune.storage.files import is_file_of
from wattune.storage.format import FORMAT, FORMAT_TAG
from wattune.tracking.copies import Delivered, Sent, facts_of, goals_of
from wattune.tracking.locations import location
from wattune.tracking.picture import PICTURE
from wattune.tracking.reader import write_delivery_log
from wattune.tracking.run import (
    NS_PER_MS,
    RUN_STATUS,
    STUDY_TAG,
    TRIAL_TAG,
    Curves,
    is_whole,
    require_format,
    run_params,
    run_points,
    run_tags,
)
from wattune.tracking.store import (
    READ_WITHIN_S,
    Store,
    check_alive,
    log,
    search,
    sqlite_file,
)
from wattune.tracking.view import NOTE_TAG, compare_path, view_path, view_tags
from wattune.trial import TrialSpec

_PARENT_TAG: Final = "mlflow.parentRunId"
_KIND: Final = {"mlflow.experimentKind": "custom_model_development"}
"""Makes the UI of MLflow 3.17.2 open on runs and their charts, not on traces of language models."""

_BYTES_A_TRIAL: Final = 20_000
"""Generous size of a trial in the delivery log."""

MOST_COMPARED: Final = 6
"""Most runs that the link on a study's page compares: so many columns fit on a screen."""

_COMPARED: Final = ("feasible", "undecided", "behind", "infeasible")


class Tracker:
    """Sends one study to one MLflow store."""

    def __init__(
        self,
        uri: str,
        study_name: str,
        *,
        document: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Names a store as `Store` does, and a study, whose experiment has its name; there is no request yet.

        With the `document`, its search space with every default, the store shows the study's objective from the first
        trial on, and its pages are arranged for comparison.
        """
        self.uri = uri
        self.study_name = study_name
        self._store = Store(uri, clock)
        self._document = document
        self._experiment_id = ""
        self._parent_id = ""

    def log_trial(
        self, spec: TrialSpec, result: Run, folder: Path, series: Curves | None = None, picture: str = ""
    ) -> bool:
        """Sends one repeat of a trial with its folder's files; a repeat that was sent completely is not sent again.

        A run takes the place of an earlier attempt, of an earlier measurement of the same trial, and of a result whose
        files were since accepted as edited. Every file of the folder becomes an artifact with the same path, except
        hidden ones, and so does the `picture`, an SVG; of the curves in `series` MLflow gets at most one point a
        second. Returns true if it was sent now. Raises `TrackingError`: the store cannot be reached or refuses. A part
        may have been sent; the next call replaces it.
        """
        name = f"{result.trial_id}-{result.repeat}"
        identity = {TRIAL_TAG: name}
        params, points = run_params(spec), run_points(result, series or {})
        tags = {**run_tags(spec, result), **identity}
        files = [path for path in sorted(folder.rglob("*")) if is_file_of(folder, path)]

        def send(client: Any) -> bool:
            parent_id = self._parent(client)
            for run in search(client, self._experiment_id, identity):
                if is_whole(run) and Sent.of_run(run).holds(result):
                    return False
                client.delete_run(run.info.run_id)
            run_id = client.create_run(
                self._experiment_id,
                start_time=result.start_wall_ns // NS_PER_MS or None,
                tags={**identity, _PARENT_TAG: parent_id},
                run_name=f"{spec.label} #{result.repeat}",
            ).info.run_id
            log(client, run_id, params=params, tags=tags, points=points)
            for path in files:
                inside = path.relative_to(folder)
                if not any(part.startswith(".") for part in inside.parts):
                    client.log_artifact(run_id, str(path), inside.parent.as_posix() if len(inside.parts) > 1 else None)
            if picture:
                client.log_text(run_id, picture, PICTURE)
            client.set_terminated(
                run_id,
                status=RUN_STATUS.get(result.status, "FAILED"),
                end_time=result.end_wall_ns // NS_PER_MS or None,
            )
            return True

        moving_s = sum(path.stat().st_size for path in files) / SLOWEST_BYTES_PER_S
        return self._store.ask(f"send trial {name} of study {self.study_name}", send, moving_s=moving_s)

    def log_study(
        self,
        document: Mapping[str, Any],
        ranking: Mapping[str, Any],
        report_path: Path | None,
        results: Sequence[tuple[TrialSpec, Run]] = (),
    ) -> None:
        """Sends facts of the whole study, and all of its results as the delivery log; to be called after every change.

        The ranking is that of `Ranking.to_json`. Raises `TrackingError`: the store cannot be reached or refuses.
        """
        self._document = document

        def send(client: Any) -> None:
            parent_id = self._parent(client)
            self._arrange(client)
            client.log_text(parent_id, json.dumps(document, indent=1), "study.json")
            client.log_text(parent_id, json.dumps(ranking, indent=1), "ranking.json")
            if report_path is not None:
                client.log_artifact(parent_id, str(report_path))
            if results:
                write_delivery_log(client, parent_id, results)
            log(client, parent_id, tags=facts_of(ranking))
            self._link(client, ranking)
            client.set_terminated(parent_id)

        moving_s = len(results) * _BYTES_A_TRIAL / SLOWEST_BYTES_PER_S
        self._store.ask(f"send study {self.study_name}", send, moving_s=moving_s)

    def delivered(self) -> Delivered:
        """Returns what was sent completely and is final, the latest of each trial and repeat.

        Raises `TrackingError` where the store cannot be reached.
        """

        def find(client: Any) -> Delivered:
            self._parent(client)
            latest: Delivered = {}
            for run in search(client, self._experiment_id, {}):
                trial_id, _, repeat = run.data.tags.get(TRIAL_TAG, "").rpartition("-")
                if repeat.isdecimal() and is_whole(run) and (sent := Sent.of_run(run)).final:
                    key = (trial_id, int(repeat))
                    latest[key] = max(latest.get(key, sent), sent, key=lambda one: (one.attempt, one.end_ms))
            return latest

        return self._store.ask(f"list trials of study {self.study_name}", find, moving_s=READ_WITHIN_S)

    @property
    def page(self) -> str:
        """Path of the page that compares this study's trials, after the server's address; empty where nothing was sent.

        It asks nobody: whoever ends a study would wait for the store once more.
        """
        return view_path(self._experiment_id) if self._parent_id else ""

    def _parent(self, client: Any) -> str:
        """Finds or makes the study's own run."""
        if self._parent_id:
            return self._parent_id
        self._experiment_id = self._experiment(client)
        runs = search(client, self._experiment_id, {STUDY_TAG: self.study_name})
        run = next(runs, None) or client.create_run(
            self._experiment_id,
            tags={STUDY_TAG: self.study_name, FORMAT_TAG: str(FORMAT)},
            run_name=self.study_name,
        )
        require_format(run, f"study {self.study_name} in {self.uri}")
        self._parent_id = run.info.run_id
        self._arrange(client)
        return self._parent_id

    def _arrange(self, client: Any) -> None:
        """Writes objective and constraints on the study's run and page, if they are known."""
        if self._document is None:
            return
        objective = parse_objective(self._document["objective"])
        constraints = [parse_constraint(text) for text in self._document.get("constraints", ())]
        texts = json.dumps([str(bound) for bound in constraints])
        log(client, self._parent_id, tags=goals_of(self._document) | {"wattune.constraints": texts})
        for name, text in view_tags(self._document, objective, constraints).items():
            client.set_experiment_tag(self._experiment_id, name, text)

    def _link(self, client: Any, ranking: Mapping[str, Any]) -> None:
        """Adds a link to MLflow's comparison of the best runs to the note on the study's page."""
        rows = [row for verdict in _COMPARED for row in ranking[verdict]][:MOST_COMPARED]
        run_ids = []
        for row in rows:
            repeat = next((one["repeat"] for one in row["repeats"] if one["status"] == "completed"), 0)
            found = next(search(client, self._experiment_id, {TRIAL_TAG: f"{row['trial_id']}-{repeat}"}), None)
            run_ids += [found.info.run_id] if found is not None else []
        note = client.get_experiment(self._experiment_id).tags.get(NOTE_TAG, "")
        if note and len(run_ids) > 1:
            linked = f"{note}\n\n[Compare the best {len(run_ids)}]({compare_path(self._experiment_id, run_ids)})"
            client.set_experiment_tag(self._experiment_id, NOTE_TAG, linked)

    def _experiment(self, client: Any) -> str:
        experiment = client.get_experiment_by_name(self.study_name)
        if experiment is None:
            # Beside an sqlite file, also in a copy of both; elsewhere the server chooses.
            place = location(self.study_name) if sqlite_file(self.uri) else None
            return str(client.create_experiment(self.study_name, artifact_location=place, tags=_KIND))
        check_alive(experiment, self.uri)
        return str(experiment.experiment_id)
