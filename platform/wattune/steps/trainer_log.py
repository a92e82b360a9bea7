"""Lines of Hugging Face's Trainer without its bar: its losses by epoch, and its run time and speed at the end."""

import re
from typing import Final

from wattune.steps.lines import token_rate_in
from wattune.steps.pattern import PatternSteps
from wattune.steps.source import PRESETS, TRAINING_LOSS

# transformers/trainer_callback.py, ProgressCallback.on_log and PrinterCallback.on_log print the dict of
# transformers/trainer.py, _maybe_log_save_evaluate: "{'loss': 2.31, 'grad_norm': 1.2, 'learning_rate': 5e-05,
# 'epoch': 0.5}", since version 5 with quotes around numbers; transformers/trainer_utils.py, speed_metrics, the last
# one: "{'train_runtime': 12.3, 'train_samples_per_second': 8.1, 'train_steps_per_second': 2.0, 'train_loss': 1.9,
# 'epoch': 3.0}".
_TOLD: Final = r"'?(\d{1,12}(?:\.\d{0,20})?)(?!\d)"
_EPOCH: Final = re.compile(rf"'loss': '?[\d.].*'epoch': {_TOLD}")
_EVALUATED: Final = re.compile(rf"'eval_runtime': {_TOLD}")
_END: Final = re.compile(rf"'train_runtime': {_TOLD}.*'train_steps_per_second': {_TOLD}.*'epoch': {_TOLD}")
# hiyouga/LLaMA-Factory, src/llamafactory/train/callbacks.py, LogCallback.on_log, adds the tokens a second so far.
_THROUGHPUT: Final = re.compile(rf"'loss': .*'throughput': {_TOLD}")
_LOSS: Final = re.compile(rf"(?i)(?<![a-z]){TRAINING_LOSS}['\"]?\W{{0,4}}\d")


# transformers/trainer.py, _inner_training_loop, and its examples without Trainer; the heading of the columns of
# ultralytics/models/yolo/detect/train.py, progress_string.
_TRAINS: Final = re.compile(r"(?i)\*\*\*\*\* running training|total optimization steps|^\s*epoch\b.*loss\b")


class TrainerLog:
    """The losses that a program printed."""

    def __init__(self) -> None:
        """Has seen none yet."""
        self._epochs: list[tuple[float, int]] = []
        self._evaluated_ns: list[tuple[int, int]] = []
        """Ends of evaluations, and how long they took."""
        self._end: tuple[float, float, float, int] | None = None
        self.rate: tuple[float, bool] | None = None
        """Tokens a second that it told last, as `token_rate_in` reads them."""
        self.trains = False
        """True once a loss was printed that is of no evaluation, or that training begins."""

    def feed(self, line: str, mono_ns: int) -> bool:
        """Takes a plain line; returns True where it has a loss or says that training begins."""
        if found := _EPOCH.search(line):
            self._epochs.append((float(found[1]), mono_ns))
        if found := _EVALUATED.search(line):
            self._evaluated_ns.append((mono_ns, round(float(found[1]) * 1e9)))
        if ended := _END.search(line):
            self._end = float(ended[1]), float(ended[2]), float(ended[3]), mono_ns
        if found := _THROUGHPUT.search(line):
            self.rate = float(found[1]), False
        else:
            self.rate = token_rate_in(line) or self.rate
        trains = any((ended, _LOSS.search(line), _TRAINS.search(line)))
        self.trains |= trains
        return trains

    def steps(self) -> PatternSteps | None:
        """Returns the steps of a run that has ended, as many as its speed says; None where nothing says how many."""
        if self._end is None:
            return None
        runtime_s, per_s, epochs, end_ns = self._end
        number, marks = round(runtime_s * per_s), PatternSteps(PRESETS["tqdm"])
        marks.mark((0.0, 0.0), end_ns - round(runtime_s * 1e9))
        told = [(number * epoch / epochs, at_ns) for epoch, at_ns in self._epochs if 0 < epoch < epochs]
        since_ns = 0
        for at, at_ns in [*told, (number, end_ns)]:
            marks.leave_out(sum(took for then, took in self._evaluated_ns if since_ns < then <= at_ns))
            marks.mark((float(round(at)), 0.0), at_ns)
            since_ns = at_ns
        return marks
